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
from strata.launch.commit import CoordinatorCommit
from strata.launch.environment import JOINED, NOTE, STACKS_SIGNAL, Place, place_in, storage_options_in
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
    place = place_in(variables) or _place_without_agent(variables)
    if checkpoints is not None:
        place = replace(place, checkpoints=os.fspath(checkpoints))
    elif of_run := storage_options_in(variables):
        given = checkpoint_options.get("storage_options") or {}
        checkpoint_options = {**checkpoint_options, "storage_options": {**of_run, **given}}
    strategy = strategy_of(every if every is not None else variables.get(EVERY))
    agreement = Agreement()
    membership: JoinedMembership | NoMembership = NoMembership()
    commit = None
    if place.coordinator:
        membership = _joined(place, agreement, on_left=_no_longer_joined, on_lost=_end_process)
        variables[JOINED] = str(os.getpid())
        commit = CoordinatorCommit(membership.worker)
        _dump_stacks_when_asked()
        _stop_when_asked(membership)
    elif place.world_size == 1 and forks.may_use_grpc():
        membership = _embedded(place, agreement)
        commit = CoordinatorCommit(membership.worker)
    try:
        manager = CheckpointManager(
            place.checkpoints,
            strategy=strategy,
            ranks=Ranks(rank=place.rank, size=place.world_size, session=place.session),
            commit=commit,
            **{"keep_count": 3, **checkpoint_options},
        )
    except BaseException:
        membership.leave(together=False)  # or its thread's complaints would be the last words, not this error
        raise
    if place.rank == 0:
        where = manager.place.rstrip("/")
        print(f"{NOTE}checkpoints in {where}, {manager.schedule}", file=sys.stderr, flush=True)
    return Context(place, membership, manager, strategy=strategy, agreement=agreement)


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
    joined, place = variables.get(JOINED), place_in(variables)
    if not joined or place is None:
        return
    if joined == str(os.getpid()):
        raise ConfigError(
            "strata.init() was called before in this process, which is one rank of its run; use the context that it "
            "returned, or close that one first",
            field=JOINED,
        )
    raise ConfigError(
        f"process {joined} is rank {place.rank} of run {place.run!r} already, and has started this one; call "
        f"strata.init() only there, or start this one without {JOINED} and STRATA_RUN in its environment: then it "
        "is a run of its own",
        field=JOINED,
    )


def _joined(
    place: Place,
    agreement: Agreement,
    *,
    on_left: Callable[[], None] | None = None,
    on_lost: Callable[[StrataError], None] | None = None,
) -> JoinedMembership:
    client = CoordinatorClient(place.coordinator, config=ClientConfig(connect_timeout_s=JOIN_TIMEOUT_S))
    client.connect()
    try:
        return JoinedMembership(client, place, agreement, on_left=on_left, on_lost=on_lost)
    except BaseException:
        client.close()
        raise


def _embedded(place: Place, agreement: Agreement) -> JoinedMembership:
    coordinator = EmbeddedCoordinator().start()
    try:
        return _joined(replace(place, coordinator=coordinator.address), agreement, on_left=coordinator.stop)
    except BaseException:
        coordinator.stop()
        raise


def _place_without_agent(variables: Mapping[str, str]) -> Place:
    """Torchrun's rank; or a world of one."""
    script = _NOT_IN_NAMES.sub("-", Path(sys.argv[0]).stem).lstrip("-._")[:_MAX_NAME] or "run"
    rank, world_size = int(variables.get("RANK", "0")), int(variables.get("WORLD_SIZE", "1"))
    run = variables.get("TORCHELASTIC_RUN_ID", "none")  # what torchrun calls a run without a name
    return Place(
        run=script if run in ("", "none") else run,
        attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        rank=rank,
        world_size=world_size,
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        local_world_size=int(variables.get("LOCAL_WORLD_SIZE", str(world_size))),
        master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(variables.get("MASTER_PORT", "0")),
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
