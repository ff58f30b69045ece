"""`strata.init()`: find out which process this is, and create its context.

Under `strata run`, the environment defines it. Alone (plain `python train.py`), the process is a world of one with its
own coordinator inside; a forked child of a connected process cannot have one and does without. Under torchrun, it is
one of torchrun's ranks, without a coordinator.
"""

from __future__ import annotations

import difflib
import faulthandler
import inspect
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.checkpoint import Adaptive, CheckpointManager, EverySeconds, EverySteps, Ranks
from strata.coordinator.client import ClientConfig, CoordinatorClient
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import ConfigError, StrataError
from strata.identity import RUN, TORCHRUN, Identity
from strata.launch.commit import CoordinatorCommit
from strata.launch.environment import (
    JOINED,
    NOTE,
    STACKS_SIGNAL,
    UNREACHABLE,
    WorkerSpec,
    read_environment,
    storage_options_in,
)
from strata.lifecycle import Home
from strata.train.agreement import Agreement
from strata.train.alone import Alone
from strata.train.context import AGREEING, Context
from strata.train.loggers import checked, create
from strata.train.membership import JOIN_TIMEOUT_S, JoinedMembership, NoMembership
from strata.transport import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strata.checkpoint.policy import Strategy
    from strata.train.loggers import Logger

EVERY = "STRATA_CHECKPOINT_EVERY"
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 63
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def init(
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    every: int | str | Strategy | None = None,
    loggers: Iterable[str | Logger] = (),
    **checkpoint_options: Any,
) -> Context:
    """Join the run that this process belongs to, or start a new one.

    Args:
        checkpoints: Directory or URL of checkpoints, instead of the run's.
        every: When `maybe_checkpoint` saves: a number of steps, a time ("90s", "10m", "1h") or a strategy. Default:
            first after a minute, then as often as costs one percent of the time. The last step is always saved.
        loggers: Where rank 0 also writes what it reports: "tensorboard" (in `tensorboard/RUN`), "mlflow", "wandb"
            (offline files), or objects with `start(step)`, `log(step, metrics)` and `close()`.
        checkpoint_options: Arguments for `CheckpointManager`: `keep_count` (default 3), `compression`,
            `storage_options`, …

    Raises:
        ConfigError: The environment or an argument is invalid.
        CoordinatorUnavailable: The run's coordinator does not answer.
    """
    variables = os.environ
    check_options(checkpoint_options)
    chosen = checked(loggers)
    _check_is_the_rank(variables)
    spec = read_environment(variables) or _spec_without_agent(variables)
    if checkpoints is not None:
        spec = replace(spec, checkpoints=os.fspath(checkpoints))
    elif of_run := storage_options_in(variables):
        given = checkpoint_options.get("storage_options") or {}
        checkpoint_options = {**checkpoint_options, "storage_options": {**of_run, **given}}
    identity = spec.identity
    written = create(
        chosen if identity.rank == 0 else (),
        run=identity.run,
        checkpoints=os.fspath(spec.checkpoints),
        attempt=identity.attempt + identity.incarnation,
    )
    strategy = strategy_of(every if every is not None else variables.get(EVERY))
    alone = Alone(variables)
    agreement = Agreement(on_limit=lambda: alone.hold(AGREEING))
    membership: JoinedMembership | NoMembership = NoMembership()
    commit = None
    if spec.coordinator:
        membership = _joined(spec, agreement, on_left=_no_longer_joined, on_lost=_end_process)
        variables[JOINED] = str(os.getpid())
        commit = CoordinatorCommit(membership.worker, membership.members)
        _dump_stacks_when_asked()
        _stop_when_asked(membership)
    elif spec.identity.world_size == 1 and forks.may_use_grpc():
        membership = _embedded(spec, agreement)
        commit = CoordinatorCommit(membership.worker)
    try:
        manager = CheckpointManager(
            spec.checkpoints,
            strategy=strategy,
            ranks=Ranks.of(spec.identity),
            commit=commit,
            **{"keep_count": 3, **checkpoint_options},
        )
    except BaseException:
        membership.leave(together=False)  # otherwise its thread logs after this error
        raise
    if spec.identity.rank == 0:
        where = manager.place.rstrip("/")
        print(f"{NOTE}checkpoints in {where}, {manager.schedule}", file=sys.stderr, flush=True)
    return Context(
        spec.identity,
        membership,
        manager,
        strategy=strategy,
        agreement=agreement,
        alone=alone,
        spec=spec,
        loggers=written,
    )


def alone(
    *, checkpoints: str | os.PathLike[str], every: int | str | Strategy | None = None, **checkpoint_options: Any
) -> Context:
    """Return the context of a single process without a coordinator. The arguments are those of `init`."""
    strategy = strategy_of(every)
    manager = CheckpointManager(checkpoints, strategy=strategy, **{"keep_count": 3, **checkpoint_options})
    return Context(Identity(), NoMembership(), manager, strategy=strategy)


def strategy_of(every: int | str | Strategy | None) -> Strategy:
    """Return the strategy for a number of steps, a time, or a strategy.

    Raises:
        ConfigError: It is none of these.
    """
    if every is None:
        return Adaptive()
    if not isinstance(every, int | str | type) and hasattr(every, "decide"):
        return every
    text = "" if isinstance(every, bool) else str(every).strip()
    if text.isdecimal() and int(text):
        return EverySteps(int(text))
    found = _SECONDS.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"every={every!r} is neither a number of steps nor a time; write 500, 90s, 10m or 1h", field="every"
        )
    return EverySeconds(float(found[1]) * _UNITS_S[found[2]])


def check_options(options: Iterable[str]) -> None:
    known = [*inspect.signature(init).parameters, *inspect.signature(CheckpointManager).parameters]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]}=?" if close else "see docs/run.md and docs/checkpoints.md"
            raise ConfigError(f"strata.init() has no argument {name}=; {cure}", field=name)


def _check_is_the_rank(variables: Mapping[str, str]) -> None:
    joined, spec = variables.get(JOINED), read_environment(variables)
    if not joined or spec is None:
        return
    if joined == str(os.getpid()):
        raise ConfigError(
            "strata.init() was already called in this process; use the context that it returned, or close that one "
            "first",
            field=JOINED,
        )
    raise ConfigError(
        f"process {joined} is already rank {spec.identity.rank} of run {spec.identity.run!r}, and this process is its "
        f"child; call strata.init() only in the parent, or remove {JOINED} and {RUN} from this process's environment "
        "to make it a separate run",
        field=JOINED,
    )


def _joined(
    spec: WorkerSpec,
    agreement: Agreement,
    *,
    on_left: Callable[[], None] | None = None,
    on_lost: Callable[[StrataError], None] | None = None,
) -> JoinedMembership:
    client = CoordinatorClient(spec.coordinator, config=ClientConfig(connect_timeout_s=JOIN_TIMEOUT_S))
    client.connect()
    try:
        return JoinedMembership(
            client, spec.identity, agreement, on_left=on_left, on_lost=on_lost, is_late=spec.servers_before > 0
        )
    except BaseException:
        client.close()
        raise


def _embedded(spec: WorkerSpec, agreement: Agreement) -> JoinedMembership:
    coordinator = EmbeddedCoordinator().start()
    try:
        return _joined(replace(spec, coordinator=coordinator.address), agreement, on_left=coordinator.stop)
    except BaseException:
        coordinator.stop()
        raise


def _spec_without_agent(variables: Mapping[str, str]) -> WorkerSpec:
    """Return the spec of one of torchrun's ranks, or of a world of one."""
    script = _NOT_IN_NAMES.sub("-", Path(sys.argv[0]).stem).lstrip("-._")[:_MAX_NAME] or "run"
    identity = Identity.from_environment(variables, launchers=(TORCHRUN,)) or Identity()
    return WorkerSpec(
        identity=identity if identity.run else replace(identity, run=script),
        coordinator="",
        checkpoints=str(Path("checkpoints") / script),
    )


def _dump_stacks_when_asked() -> None:
    """Dump stacks on the signal that the agent sends before it kills a hung worker."""
    faulthandler.register(signal.Signals[STACKS_SIGNAL], file=2, all_threads=True, chain=False)


def _end_process(error: StrataError) -> None:
    """Exit: this process can no longer save, and the others wait for it. The agent restarts all of them."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(UNREACHABLE)


def _no_longer_joined() -> None:
    os.environ[JOINED] = ""


def _stop_when_asked(membership: JoinedMembership) -> None:
    """Save and stop on SIGTERM, unless the script handles it. A signal to all processes, as at a shutdown, reaches
    workers before the agent can ask them to stop.
    """
    home = Home()

    def stop(*_: object) -> None:
        if home.is_here:
            membership.ask_stop("SIGTERM")
        else:  # a forked child inherits this handler but is not a rank: it exits
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)
