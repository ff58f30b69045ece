"""Engines: where a Trainer's work runs. The port is `Engine`; the work itself is the same function everywhere.

Inline      in this process, without a coordinator: workers=1
Launched    in processes that are started for it, on this machine or on Ray: workers=N, engine="ray"
Joined      in this process, which is already a rank: under `strata run` (one machine or several) and torchrun
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import distributed

from strata.errors import ConfigError
from strata.identity import TORCHRUN, Identity
from strata.launch.environment import read_environment
from strata.launch.record.log import parse_which
from strata.launch.spec import RunSpec, Size
from strata.train.function import Call
from strata.train.function_run import importing_ahead, run_call
from strata.train.startup import alone, init

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.launch.run import PageOf
    from strata.train.context import Context

T = TypeVar("T")
MAX_CALL_BYTES = 16 << 30
"""Largest pickled job: the module's weights and the arrays that the user passed."""
PRELOAD = ("torch._dynamo", "strata.trainer.work", "strata.checkpoint.manager", "strata.data.map_style")
"""Modules that every worker needs before its first step, and that are slow to import. An optimizer imports the
first."""
DEFAULT_STEPS = 500
"""Steps between two checkpoints under torchrun, where ranks have no coordinator with which to agree on a time."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where and when a fit saves."""

    checkpoints: str
    every: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """What an engine gives to the work on each worker."""

    context: Context
    on_interrupt: Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]]
    """Returns a context manager within which Ctrl-C calls a function, instead of interrupting a step."""


class Engine(Protocol):
    def prepared(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which workers begin to start, while the caller checks what `run` will receive."""
        ...

    def run(self, work: Callable[..., T], arguments: tuple[Any, ...], saving: Saving) -> T:
        """Call `work(session, *arguments)` on every worker; return the result of rank 0.

        Raises:
            RunFailed: A worker failed; or what the work raised, if it ran in this process.
        """
        ...


class Inline:
    """One worker: this process, without a coordinator."""

    def prepared(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, work: Callable[..., T], arguments: tuple[Any, ...], saving: Saving) -> T:
        with alone(checkpoints=saving.checkpoints, every=saving.every, **saving.options) as context:
            return work(Session(context, _interruptible), *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Worker processes that an agent starts, watches and restarts."""

    workers: int | str
    engine: str = "local"
    name: str = ""
    max_restarts: int = 3
    logs: str = "auto"
    servers: int = 0
    """Parameter servers, in addition to the workers."""
    is_asynchronous: bool = False
    """Whether workers share nothing but the servers while they train, so that each can be restarted alone."""
    page_of: PageOf | None = None
    """Returns the page that is served while they run."""

    def prepared(self) -> contextlib.AbstractContextManager[None]:
        return importing_ahead(_launched_worker, *PRELOAD) if self.engine == "local" else contextlib.nullcontext()

    def run(self, work: Callable[..., T], arguments: tuple[Any, ...], saving: Saving) -> T:
        results = run_call(
            Call(
                _launched_worker,
                (work, arguments, saving, self.servers, self.is_asynchronous),
                {},
                max_bytes=MAX_CALL_BYTES,
                preload=PRELOAD,
            ),
            workers=self.workers,
            servers=self.servers,
            engine=self.engine,
            name=self.name,
            max_restarts=self.max_restarts,
            checkpoints=saving.checkpoints,
            logs=self.logs,
            page_of=self.page_of,
        )
        found: T = results[0]
        return found


class Joined:
    """This process is a rank of a run. The context stays open until the process exits."""

    _context: Context | None = None

    def __init__(self, *, servers: int = 0, is_asynchronous: bool = False) -> None:
        """`servers`: how many of the last ranks are parameter servers. `is_asynchronous`: see `Launched`."""
        self._servers = servers
        self._is_asynchronous = is_asynchronous

    def prepared(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, work: Callable[..., T], arguments: tuple[Any, ...], saving: Saving) -> T:
        if Joined._context is None:
            every = saving.every
            if every is None and read_environment(os.environ) is None:
                every = DEFAULT_STEPS
            Joined._context = init(checkpoints=saving.checkpoints or None, every=every, **saving.options)
            Joined._context.divide(self._servers)
        context = Joined._context
        with _process_group(context, is_kept=True, is_on_demand=self._is_asynchronous):
            return work(Session(context, _not_interruptible), *arguments)


def choose(
    *,
    workers: int | str,
    engine: str,
    name: str,
    max_restarts: int,
    logs: str,
    servers: int = 0,
    is_apart: bool = False,
    is_asynchronous: bool = False,
    page_of: PageOf | None = None,
) -> Engine:
    """Return the engine for a Trainer's arguments in this process.

    Args:
        is_apart: Even a single worker needs a process of its own, because it takes the module apart.
        page_of: Returns the page of a run that is started here. A page belongs to a run, so even a single worker is
            one then.

    Raises:
        ConfigError: An argument is invalid, even if the engine for this process does not use it.
    """
    if engine not in ("local", "ray"):
        raise ConfigError(f"engine={engine!r} is unknown; use 'local' or 'ray'", field="engine")
    size = Size.parse(str(workers))
    parse_which(logs)
    named = "unnamed" if name == "" else name
    RunSpec(name=named, script="unknown", workers=size, directory="", checkpoints="", max_restarts=max_restarts)
    if is_worker():
        return Joined(servers=servers, is_asynchronous=is_asynchronous)
    if size == Size(1, 1) and engine == "local" and not (servers or is_apart or page_of):
        return Inline()
    return Launched(
        workers=workers,
        engine=engine,
        name=name,
        max_restarts=max_restarts,
        logs=logs,
        servers=servers,
        is_asynchronous=is_asynchronous,
        page_of=page_of,
    )


def is_worker() -> bool:
    """Return whether a launcher has started this process as a rank."""
    if read_environment(os.environ) is not None:
        return True
    found = Identity.from_environment(os.environ, launchers=(TORCHRUN,))
    return found is not None and found.world_size > 1


def agrees_on_times() -> bool:
    """Return whether the workers can decide to save by time; ranks of torchrun have no coordinator for it."""
    return not is_worker() or read_environment(os.environ) is not None


def _launched_worker(
    work: Callable[..., T], arguments: tuple[Any, ...], saving: Saving, servers: int, is_asynchronous: bool
) -> T | None:
    """Run the work in a worker or server process; only the result of rank 0 counts."""
    _keep_memory()
    with init(every=saving.every, **saving.options) as context:
        context.divide(servers)
        with _process_group(context, is_kept=False, is_on_demand=is_asynchronous):
            result = work(Session(context, _not_interruptible), *arguments)
            return result if context.rank == 0 else None


@contextlib.contextmanager
def _process_group(context: Context, *, is_kept: bool, is_on_demand: bool) -> Iterator[None]:
    if is_on_demand:
        context.meet_on_demand()
        yield
        return
    is_ours = not context.roles.is_server and context.world_size > 1 and not distributed.is_initialized()
    if is_ours:
        context.init_process_group()
    try:
        yield
    finally:
        if is_ours and not is_kept:
            distributed.destroy_process_group()


def _keep_memory() -> None:
    """Let malloc keep large buffers between steps; by default glibc returns them to the kernel after every step."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(_TOP_PAD, 64 << 20)


@contextlib.contextmanager
def _interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C end training after the current step, with a save; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _not_interruptible(interrupt: Callable[[], None]) -> Iterator[None]:  # noqa: ARG001 - the agent handles Ctrl-C
    yield
