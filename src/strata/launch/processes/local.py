"""Worker processes on this machine: the agent's side of `strata.launch.processes.warm`.

A *host* is a process that forks workers. The warm host has imported what the script needs, forks all workers, and stays
for the next attempt. Without it, every worker has its own cold host, in the worker's environment: the same program with
nothing imported.

If a host dies, its workers die. The next start replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from strata.errors import ConfigError, InvalidArgument
from strata.launch.processes import warm
from strata.launch.protocol import NOT_STARTED, WorkerExit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from strata.launch.processes.base import ProcessSpec

log = logging.getLogger(__name__)
READY_TIMEOUT_S = 300.0
"""Longest time for the imports, which take minutes from a slow network file system."""
ANSWER_TIMEOUT_S = 60.0
"""Longest time for a fork."""
CLOSE_TIMEOUT_S = 10.0
"""Longest time for killed processes to disappear: the system must free their memory."""
MAX_FAILED_WARMINGS = 2
"""Failures in a row after which workers always start cold."""
_REAP_TIMEOUT_S = 1.0
_POLL_S = 0.005
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables that keep the libraries of numpy and pyarrow from starting threads when they are loaded."""


class LocalWorkers:
    """`Workers` as processes of this machine.

    Use it from one event loop, in a thread that lives as long as the workers: Linux treats the end of the thread that
    started them as the death of the agent.
    """

    def __init__(
        self, *, preload: Sequence[str] = (), is_warm: bool = True, variables: Mapping[str, str] | None = None
    ) -> None:
        self._preload = tuple(dict.fromkeys(preload))
        self._is_warm = is_warm
        self._variables = variables
        """Environment of the warm host; None: ours. Python and some libraries read it only when they start."""
        self._warm: _Host | None = None
        self._num_failed_warmings = 0
        self._hosts: set[_Host] = set()
        self._roster = _Roster()
        self._starting = asyncio.Lock()
        self._was_killed = asyncio.Event()

    async def prepare(self) -> None:
        if self._is_warm:
            self._warm_up()

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        orders = self._encode_checked(specs)
        with contextlib.ExitStack() as logs:
            workers = [_Worker(spec.rank, logs.enter_context(_open_log(spec.log))) for spec in specs]
            self._roster.add(workers)  # before the first wait: from here on they can be killed
            try:
                async with self._starting:
                    hosts = await self._unless_killed(self._hosts_for(specs, workers), workers)
                    for host, worker, order in zip(hosts, workers, orders, strict=True):
                        if host is not None:
                            await host.start(worker, order)
            finally:  # perhaps cancelled
                for worker in workers:
                    worker.log = -1
                    if not worker.is_ordered:
                        self._roster.remove(worker)

    async def next_exit(self) -> WorkerExit:
        return await self._roster.exits.get()

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            worker = self._roster.by_rank.get(rank)
            if worker is not None:
                worker.is_killed |= worker.pid is None or _is_alive(worker.pid)
                if worker.pid is not None:
                    warm.kill_group(worker.pid)
        self._was_killed.set()

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        worker = self._roster.by_rank.get(rank)
        if worker is None:
            return
        if worker.pid is None:
            worker.signals.add(number)
        else:
            _send_signal(worker.pid, number)

    def pid_of(self, rank: int) -> int | None:
        worker = self._roster.by_rank.get(rank)
        return worker.pid if worker is not None else None

    async def close(self) -> None:
        self.kill(list(self._roster.by_rank))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._roster.is_empty.wait()
        for host in list(self._hosts):
            await host.close()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while _are_running(self._roster.groups) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - not ours
            await asyncio.sleep(_POLL_S)
        self._roster.groups.clear()

    # -- starting --------------------------------------------------------------------------------------------------

    def _encode_checked(self, specs: Sequence[ProcessSpec]) -> list[bytes]:
        ranks = set(self._roster.by_rank)
        for spec in specs:
            if spec.rank in ranks:
                raise InvalidArgument(f"rank {spec.rank} is already running; wait for its exit first", field="rank")
            ranks.add(spec.rank)
        orders = [_encode(spec) for spec in specs]
        if max(map(len, orders), default=0) > warm.MAX_ORDER_BYTES:
            raise InvalidArgument(
                f"a worker's arguments and environment have more than {warm.MAX_ORDER_BYTES} bytes; "
                "let the script read them from a file",
                field="arguments",
            )
        return orders

    async def _unless_killed(
        self, hosts: Coroutine[Any, Any, Sequence[_Host | None]], workers: Sequence[_Worker]
    ) -> Sequence[_Host | None]:
        """Wait for the hosts, whose imports may take minutes. Workers that are killed meanwhile end at once."""
        coming = asyncio.create_task(hosts)
        while not coming.done():
            if all(worker.is_killed for worker in workers):
                coming.cancel()
                for worker in workers:
                    worker.is_ordered = True
                    self._roster.ended(worker, -signal.SIGKILL)
                return [None] * len(workers)
            self._was_killed.clear()
            killed = asyncio.create_task(self._was_killed.wait())
            try:
                await asyncio.wait((coming, killed), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                coming.cancel()
                raise
            finally:
                killed.cancel()
        return coming.result()

    async def _hosts_for(self, specs: Sequence[ProcessSpec], workers: Sequence[_Worker]) -> Sequence[_Host | None]:
        """Return a host for each worker; None if none could be started."""
        if self._is_warm:
            host = await self._warm_host()
            if host is not None:
                return [host] * len(specs)
        # start all of them before the first wait
        return [self._cold_host(spec, worker) for spec, worker in zip(specs, workers, strict=True)]

    async def _warm_host(self) -> _Host | None:
        """Return the warm host, or None if this start must do without."""
        host = self._warm_up()
        if host is None:
            return None
        ready = await host.when_ready()
        if ready is None:
            self._failed_to_warm(host.cause)
            return None
        self._num_failed_warmings = 0
        if ready.threads_of:
            log.warning(
                "importing %s starts threads, which a fork does not copy; every worker imports it itself",
                ready.threads_of,
            )
            await host.close()
            num_before = len(self._preload)
            self._preload = tuple(name for name in self._preload if name != ready.threads_of)
            self._is_warm = len(self._preload) < num_before
            return await self._warm_host() if self._is_warm else None
        return host

    def _warm_up(self) -> _Host | None:
        if self._warm is None or self._warm.is_over:
            variables = _warm_variables(self._variables)
            try:
                self._warm = self._spawn(self._preload, variables, subprocess.DEVNULL)
            except OSError as error:
                self._warm = None
                self._failed_to_warm(str(error))
        return self._warm

    def _failed_to_warm(self, reason: str) -> None:
        self._num_failed_warmings += 1
        self._is_warm = self._num_failed_warmings < MAX_FAILED_WARMINGS
        log.warning("workers start cold, because the warm process failed: %s", reason)

    def _cold_host(self, spec: ProcessSpec, worker: _Worker) -> _Host | None:
        try:
            return self._spawn((), spec.variables, worker.log, is_for_one=True)
        except OSError as error:
            worker.is_ordered = True
            self._roster.not_started(worker, str(error))
            return None

    def _spawn(
        self, modules: Sequence[str], variables: Mapping[str, str], stderr: int, *, is_for_one: bool = False
    ) -> _Host:
        """
        Raises:
            OSError: The system cannot start another process.
        """
        process, ours = _take_ahead(modules, variables) or _start_host(modules, variables, stderr)
        host = _Host(process, ours, self._roster, self._hosts.discard, is_for_one=is_for_one)
        self._hosts.add(host)
        return host


_ahead: dict[tuple[str, ...], tuple[dict[str, str], subprocess.Popen[bytes], socket.socket]] = {}
"""Warm hosts that no `LocalWorkers` has taken over yet, by their modules."""


@contextlib.contextmanager
def warm_ahead(preload: Sequence[str]) -> Iterator[None]:
    """Start a warm host for a `LocalWorkers` that will be created inside the context with the same modules and our
    environment: the imports run while the caller prepares the rest. An unused host ends with the context.
    """
    modules, variables = tuple(dict.fromkeys(preload)), _warm_variables(None)
    with contextlib.suppress(OSError):  # the workers will start their own, or report the error
        _ahead[modules] = (variables, *_start_host(modules, variables, subprocess.DEVNULL))
    try:
        yield
    finally:
        unused = _ahead.pop(modules, None)
        if unused is not None:
            _, process, link = unused
            link.close()
            process.kill()
            process.wait()


def _take_ahead(
    modules: Sequence[str], variables: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket] | None:
    """Return a host that was warmed ahead. Variables may have been added since, for example by a library that the
    caller imported; workers get the current ones.
    """
    found = _ahead.get(tuple(modules))
    if found is None or not found[0].items() <= variables.items():
        return None
    del _ahead[tuple(modules)]
    return found[1:]


def _warm_variables(variables: Mapping[str, str] | None) -> dict[str, str]:
    return {**(os.environ if variables is None else variables), **SINGLE_THREADED}


def _start_host(
    modules: Sequence[str], variables: Mapping[str, str], stderr: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as unless_started, theirs:
        unless_started.callback(ours.close)
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", warm.__file__, str(theirs.fileno()), "-" * warm.TITLE_BYTES, *modules],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=dict(variables),
            start_new_session=True,  # only the agent receives Ctrl-C, and asks the workers to stop
        )
        unless_started.pop_all()
    return process, ours


@dataclass(slots=True, eq=False)
class _Worker:
    rank: int
    log: int
    """Descriptor of the log during the start; -1 afterwards."""
    pid: int | None = None
    is_ordered: bool = False
    """The order was given: it will end, even if it never ran."""
    is_killed: bool = False
    """It was killed while it was alive, perhaps before it ran."""
    signals: set[signal.Signals] = field(default_factory=set)
    """Signals that were sent before it ran."""


class _Roster:
    """Running workers, and the exits of others."""

    def __init__(self) -> None:
        self.by_rank: dict[int, _Worker] = {}
        """Workers that have not ended."""
        self.groups: set[int] = set()
        """Process groups of all workers since there were none."""
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    def add(self, workers: Iterable[_Worker]) -> None:
        if not self.by_rank:
            self.groups.clear()
        self.by_rank |= {worker.rank: worker for worker in workers}
        if self.by_rank:
            self.is_empty.clear()

    def remove(self, worker: _Worker) -> None:
        del self.by_rank[worker.rank]
        if not self.by_rank:
            self.is_empty.set()

    def started(self, worker: _Worker, pid: int) -> None:
        worker.pid = pid
        self.groups.add(pid)
        if worker.is_killed:
            warm.kill_group(pid)
        for number in worker.signals:
            _send_signal(pid, number)

    def not_started(self, worker: _Worker, reason: str) -> None:
        if worker.log >= 0:
            with contextlib.suppress(OSError):
                os.write(worker.log, f"strata: the worker could not be started: {reason}\n".encode())
        self.ended(worker, NOT_STARTED)

    def ended(self, worker: _Worker, code: int, unwritten: str = "") -> None:
        self.remove(worker)
        is_killed = worker.is_killed and code == -signal.SIGKILL
        self.exits.put_nowait(WorkerExit(worker.rank, code, log_end=tuple(unwritten.splitlines()), is_killed=is_killed))

    def lost(self, worker: _Worker) -> None:
        """Kill a worker whose host is dead, and report its exit once it is gone."""
        assert worker.pid is not None
        warm.kill_group(worker.pid)
        _when_gone(worker.pid, lambda: self.ended(worker, -signal.SIGKILL))


class _Host:
    """A process that forks workers, and the socket to it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        roster: _Roster,
        when_over: Callable[[_Host], None],
        *,
        is_for_one: bool,
    ) -> None:
        self.cause = "its process has ended"
        self._ended = asyncio.Event()
        self._process = process
        self._link = link
        self._roster = roster
        self._when_over = when_over
        self._is_for_one = is_for_one
        self._workers: dict[int, _Worker] = {}
        """Running workers, by process id."""
        self._waiting: deque[tuple[_Worker, asyncio.Future[None]]] = deque()
        """Workers whose orders were sent. Answers come in the same order."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[warm.Ready | None] = self._loop.create_future()
        link.setblocking(False)
        self._loop.add_reader(link, self._listen)

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    async def when_ready(self) -> warm.Ready | None:
        """Wait for the imports; return None if the host died or was killed because it took too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_TIMEOUT_S):
                return await asyncio.shield(self._ready)
        self.kill(f"its imports took more than {READY_TIMEOUT_S:g} s")
        return None

    async def start(self, worker: _Worker, order: bytes) -> None:
        """Start a worker; return when it runs or has ended."""
        await self.when_ready()
        worker.is_ordered = True
        if self.is_over:
            self._roster.not_started(worker, self.cause)
            return
        answer: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((worker, answer))
        self._send(order, worker.log)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await asyncio.shield(answer)
        except TimeoutError:
            self.kill(f"it did not answer within {ANSWER_TIMEOUT_S:g} s")

    async def close(self) -> None:
        """End the host, with its workers."""
        if not self._ready.done():
            self.kill("it was closed")  # it is importing and does not read
            return
        self._let_go()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._ended.wait()
        self.kill("it was closed")

    def kill(self, cause: str) -> None:
        if not self.is_over:
            self.cause = cause
            self._over()

    def _let_go(self) -> None:
        """Close our side of the socket, on which the host exits."""
        if not self.is_over:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)

    def _send(self, order: bytes, log_fd: int) -> None:
        """Send an order in a file, since messages are small and an order must arrive whole."""
        try:
            fd = os.memfd_create("strata-order", os.MFD_CLOEXEC)
            with os.fdopen(fd, "wb") as file:
                file.write(order)
                file.flush()
                socket.send_fds(self._link, [b"\0"], [fd, log_fd])
        except OSError as error:
            self.kill(f"it accepts no orders: {error}")

    def _listen(self) -> None:
        while not self.is_over:
            try:
                data = self._link.recv(warm.MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._receive(warm.decode(data))
            else:
                self._over()

    def _receive(self, message: warm.FromWarm) -> None:
        match message:
            case warm.Ready(skipped):
                for each in skipped:
                    log.info("not preloaded: %s", each)
                self._ready.set_result(message)
                return
            case warm.Started(pid):
                self._workers[pid] = worker = self._answered()
                self._roster.started(worker, pid)
            case warm.NotStarted(reason):
                self._roster.not_started(self._answered(), reason)
            case warm.Exited(pid, code, unwritten):
                self._roster.ended(self._workers.pop(pid), code, unwritten)
        if self._is_for_one and not self._workers:
            self._let_go()

    def _answered(self) -> _Worker:
        worker, answer = self._waiting.popleft()
        answer.set_result(None)
        return worker

    def _over(self) -> None:
        """Clean up after the host has ended, or kill it."""
        self._ended.set()
        self._loop.remove_reader(self._link)
        self._link.close()
        self._process.kill()
        try:
            self._process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("process %d does not exit after SIGKILL", self._process.pid)
        if not self._ready.done():
            self._ready.set_result(None)
        while self._waiting:
            self._roster.not_started(self._answered(), self.cause)
        for worker in self._workers.values():
            self._roster.lost(worker)
        self._workers.clear()
        self._when_over(self)


def _encode(spec: ProcessSpec) -> bytes:
    return warm.encode_order(
        warm.Order(
            rank=spec.rank,
            title=spec.title or shlex.join([spec.script, *spec.arguments]),
            log=str(spec.log.absolute()),
            log_bytes=spec.log_bytes,
            script=spec.script,
            arguments=list(spec.arguments),
            is_module=spec.is_module,
            directory=spec.directory,
            variables=dict(spec.variables),
        )
    )


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write a worker's log ({error}); choose another directory for the run", field="log"
        ) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _when_gone(pid: int, then: Callable[[], None]) -> None:
    """Call `then` once a process that is not our child has exited."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # it is gone, or the system has no pidfd
        loop.call_soon(then)
        return

    def gone() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        then()

    loop.add_reader(fd, gone)


def _is_alive(pid: int) -> bool:
    """Return whether a process of ours, which may be a zombie, still runs."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    return status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _are_running(groups: set[int]) -> bool:
    """Return whether a process of one of these groups runs. Zombies do not count."""
    if groups:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(group) in groups and state not in "ZX":
                    return True
    return False
