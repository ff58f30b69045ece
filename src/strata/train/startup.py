"""`strata.init()`: who this process is, and the context that follows from it.

Under `strata run` the environment says so. Alone (plain `python train.py`) it is a world of one with a coordinator of
its own inside; in a forked child of a process that is connected to one, which cannot have another, without. Under
torchrun it is one of its ranks, without a coordinator.
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
from strata.launch.environment import JOINED, NOTE, STACKS_SIGNAL, WorkerSpec, read_environment, storage_options_in
from strata.lifecycle import Home
from strata.train.agreement import Agreement
from strata.train.context import Context
from strata.train.membership import JOIN_TIMEOUT_S, JoinedMembership, NoMembership
from strata.transport import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strata.checkpoint.policy import Strategy

EVERY = "STRATA_CHECKPOINT_EVERY"
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 63
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def init(
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    every: int | str | Strategy | None = None,
    **checkpoint_options: Any,
) -> Context:
    """Joins the run that this process belongs to, or begins one of its own.

    Args:
        checkpoints: A directory or URL, instead of the run's.
        every: When `maybe_checkpoint` saves: a number of steps, a time ("90s", "10m", "1h"), a strategy; left out, as
            often as costs one percent of the time, first after a minute. The last step is saved in any case.
        checkpoint_options: For `CheckpointManager`: `keep_count` (3 unless given), `compression`, `storage_options`, …

    Raises:
        ConfigError: The environment or an argument makes no sense.
        CoordinatorUnavailable: The run's coordinator does not answer.
    """
    variables = os.environ
    _check_options(checkpoint_options)
    _check_is_the_rank(variables)
    spec = read_environment(variables) or _spec_without_agent(variables)
    if checkpoints is not None:
        spec = replace(spec, checkpoints=os.fspath(checkpoints))
    elif of_run := storage_options_in(variables):
        given = checkpoint_options.get("storage_options") or {}
        checkpoint_options = {**checkpoint_options, "storage_options": {**of_run, **given}}
    strategy = strategy_of(every if every is not None else variables.get(EVERY))
    agreement = Agreement()
    membership: JoinedMembership | NoMembership = NoMembership()
    commit = None
    if spec.coordinator:
        membership = _joined(spec, agreement, on_left=_no_longer_joined, on_lost=_end_process)
        variables[JOINED] = str(os.getpid())
        commit = CoordinatorCommit(membership.worker)
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
        membership.leave(together=False)  # or its thread's complaints would be the last words, not this error
        raise
    if spec.identity.rank == 0:
        where = manager.place.rstrip("/")
        print(f"{NOTE}checkpoints in {where}, {manager.schedule}", file=sys.stderr, flush=True)
    return Context(spec.identity, membership, manager, strategy=strategy, agreement=agreement)


def strategy_of(every: int | str | Strategy | None) -> Strategy:
    """What a user said about when to save.

    Raises:
        ConfigError: It is neither steps nor a time.
    """
    if every is None:
        return Adaptive()
    if isinstance(every, int):
        return EverySteps(every)
    if not isinstance(every, str):
        return every
    text = every.strip()
    if text.isdigit():
        return EverySteps(int(text))
    found = _SECONDS.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"every={every!r} is neither a number of steps nor a time such as 90s, 10m, 1h", field="every"
        )
    return EverySeconds(float(found[1]) * _UNITS_S[found[2]])


def _check_options(options: Iterable[str]) -> None:
    known = [*inspect.signature(init).parameters, *inspect.signature(CheckpointManager).parameters]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]}=?" if close else "see docs/run.md and docs/checkpoints.md for those it has"
            raise ConfigError(f"strata.init() has no argument {name}=; {cure}", field=name)


def _check_is_the_rank(variables: Mapping[str, str]) -> None:
    joined, spec = variables.get(JOINED), read_environment(variables)
    if not joined or spec is None:
        return
    if joined == str(os.getpid()):
        raise ConfigError(
            "strata.init() was called before in this process, which is one rank of its run; use the context that it "
            "returned, or close that one first",
            field=JOINED,
        )
    raise ConfigError(
        f"process {joined} is already rank {spec.identity.rank} of run {spec.identity.run!r}, and this process is its "
        f"child; call strata.init() only in the parent, or remove {JOINED} and {RUN} from this process's environment "
        "to make it a run of its own",
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
        return JoinedMembership(client, spec.identity, agreement, on_left=on_left, on_lost=on_lost)
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
    """Torchrun's rank; or a world of one."""
    script = _NOT_IN_NAMES.sub("-", Path(sys.argv[0]).stem).lstrip("-._")[:_MAX_NAME] or "run"
    identity = Identity.from_environment(variables, launchers=(TORCHRUN,)) or Identity()
    return WorkerSpec(
        identity=identity if identity.run else replace(identity, run=script),
        coordinator="",
        checkpoints=str(Path("checkpoints") / script),
    )


def _dump_stacks_when_asked() -> None:
    """The agent asks before it kills a worker that hangs."""
    faulthandler.register(signal.Signals[STACKS_SIGNAL], file=2, all_threads=True, chain=False)


def _end_process(error: StrataError) -> None:
    """This process can save nothing any more, and the others wait for it. The agent starts all of them again."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _no_longer_joined() -> None:
    os.environ[JOINED] = ""


def _stop_when_asked(membership: JoinedMembership) -> None:
    """A signal that goes to all processes, as when a machine shuts down, reaches workers before the agent can ask them:
    all ranks save, and end. Unless the script has its own way with it.
    """
    home = Home()

    def stop(*_: object) -> None:
        if home.is_here:
            membership.ask_stop("SIGTERM")
        else:  # a child that was forked has inherited this, and is no rank: it ends, as who sends the signal expects
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)
