"""The trainer's side of the saver: a thread of the trainer, or a separate process that outlives it.

Both share the staging memory, take one job at a time and return a future. After a job they compute its statistics from
the same memory until it is claimed for the next snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.load import statistics
from strata.checkpoint.save import job as jobs
from strata.checkpoint.save.staging import Memory, PrivateMemory, SharedMemory
from strata.checkpoint.saver import protocol
from strata.checkpoint.saver.executor import Executor, is_committed
from strata.errors import CheckpointAborted, CheckpointBusy, StrataError
from strata.lifecycle import Home, renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.checkpoint.load.statistics import Statistics
    from strata.checkpoint.save.job import Job
    from strata.checkpoint.saver.executor import Outcome
    from strata.storage import Store, Watch

log = logging.getLogger(__name__)
MAX_TRIES = 2
"""A second process retries a job whose first one died; a second death fails the job."""
EXIT_WAIT_S = 1.0
CLAIM_TIMEOUT_S = 60.0
"""For statistics to stop: after the current tensor, or after the store has written the statistics file."""
CLOSE_TIMEOUT_S = 30.0
"""After the last job: two seconds for statistics, and some for a slow store."""
OUTLIVES = "STRATA_OUTLIVES_WORKER"
"""Read by `strata.launch.processes.warm`, which kills all other processes that a worker leaves behind."""


class Saver(Protocol):
    """Writes one snapshot at a time."""

    memory: Memory

    def prepare(self) -> None:
        """Get ready for the first job."""
        ...

    def claim(self) -> None:
        """Wait until the saver no longer reads the memory.

        Raises:
            CheckpointBusy: It does not stop reading.
        """
        ...

    def submit(self, job: Job, watch: Watch) -> Future[Outcome]:
        """Submit the snapshot in the memory, which belongs to the saver until it is claimed again."""
        ...

    def interrupt(self, reason: str) -> None:
        """Retry a job that hangs, or fail it with this reason."""
        ...

    def close(self) -> None:
        """Wait until all work is done."""
        ...

    def let_go(self) -> None:
        """Finish all work without waiting for it."""
        ...


class ThreadSaver:
    """Writes in a thread of the trainer."""

    def __init__(self, store: Store) -> None:
        self.memory: Memory = PrivateMemory()
        self._store = store
        self._executor = Executor(store)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="strata-saver")
        self._stop = threading.Event()
        self._future: Future[Outcome] = Future()

    def prepare(self) -> None:
        pass

    def claim(self) -> None:
        self._stop.set()
        try:
            self._pool.submit(lambda: None).result(CLAIM_TIMEOUT_S)  # the pool has one thread
        except TimeoutError:
            raise CheckpointBusy(
                f"the saver thread still reads the last snapshot after {CLAIM_TIMEOUT_S:g} s; check whether "
                f"{self._store.url} responds"
            ) from None
        self._stop.clear()

    def submit(self, job: Job, watch: Watch) -> Future[Outcome]:
        future = self._future = Future()
        self._pool.submit(self._run, job, watch, future)
        return future

    def interrupt(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):  # the job has just ended
            self._future.set_exception(CheckpointAborted(reason))

    def _run(self, job: Job, watch: Watch, future: Future[Outcome]) -> None:
        try:
            with self.memory.view()[: job.size_bytes] as view:
                outcome = self._executor.run(job, view, watch)
        except BaseException as error:  # noqa: BLE001 - a thread boundary: the future carries it
            with contextlib.suppress(InvalidStateError):  # interrupted
                future.set_exception(error)
            return
        with contextlib.suppress(InvalidStateError):
            future.set_result(outcome)
        with self.memory.view()[: job.size_bytes] as view:
            write_statistics(self._store, job, view, self._stop.is_set)

    def close(self) -> None:
        self._pool.shutdown()
        self.memory.close()

    def let_go(self) -> None:
        self._pool.shutdown(wait=False)


def write_statistics(store: Store, job: Job, memory: memoryview, stop: Callable[[], bool]) -> None:
    """Write statistics beside a committed checkpoint; skip them if `stop` returns true or the store fails."""
    if not job.options.statistics or (job.ranks is not None and job.ranks.size > 1):
        return
    data = np.frombuffer(memory, np.uint8)
    found: dict[str, Statistics] = {}
    for tensor in job.tensors:
        piece = data[tensor.offset : tensor.offset + tensor.num_bytes]
        one = statistics.of_bytes(piece, BY_NAME[tensor.dtype], stop=stop)
        if one is None:
            return
        found[tensor.name] = one
    try:
        statistics.write(store, job.head.id, found)
        if not is_committed(store, job.head.id):  # deleted meanwhile
            store.delete([f"{job.head.id}/{statistics.FILE_NAME}"])
    except StrataError as error:
        log.warning("checkpoint %s has no statistics: %s", job.head.id, error)


# -- a separate process --------------------------------------------------------------------------------------------


class ProcessSaver:
    """Writes in a separate process, which starts before the first job, and again if it dies."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self._shared = SharedMemory()
        self.memory: Memory = self._shared
        self._open = protocol.Open(url=url, storage_options=dict(storage_options or {}))
        self._sending = renewed(threading.Lock())
        self._handing_over = renewed(threading.RLock())
        """Held while a saver is started or found dead."""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._pending: _Pending | None = None
        self._home = Home()
        self._free = threading.Event()
        """Set while the saver does not read the memory."""
        self._free.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def prepare(self) -> None:
        self._start()
        if self._shared.size_bytes:
            self._send(protocol.Map(num_bytes=self._shared.size_bytes))

    def claim(self) -> None:
        if not self._free.is_set():
            with contextlib.suppress(CheckpointAborted):  # the process is dead, so the memory is free
                self._send(protocol.Release())
            if not self._free.wait(CLAIM_TIMEOUT_S):
                is_killed = self._kill(f"it still reads the last snapshot after {CLAIM_TIMEOUT_S:g} s")
                if not is_killed or not self._free.wait(EXIT_WAIT_S):
                    raise CheckpointBusy(
                        f"the saver process {self.pid} still reads the last snapshot and cannot be killed"
                    )

    def submit(self, job: Job, watch: Watch) -> Future[Outcome]:
        """Submit a job through the memory, behind the snapshot.

        A large message would block until it is read, but a submitted job must survive the death of this process.
        """
        data = jobs.encode(job)
        if self._shared.size_bytes < job.size_bytes + len(data):
            self._shared.grow(job.size_bytes + len(data))
        self._shared.view()[job.size_bytes : job.size_bytes + len(data)] = data
        run = protocol.RunJob(
            id=job.head.id, memory_bytes=self._shared.size_bytes, job_offset=job.size_bytes, job_bytes=len(data)
        )
        is_alone = job.ranks is None or job.ranks.size == 1
        pending = _Pending(watch, run, num_tries=MAX_TRIES if is_alone else 1)
        self._pending = pending
        self._free.clear()
        watch.on_cancel = lambda: self._cancel(job.head.id)
        self._hand_over(pending)
        return pending.future

    def _hand_over(self, pending: _Pending) -> None:
        """Send a job to a live process.

        If the process dies, the snapshot is still in the memory, and another process retries. With several ranks the
        others may have aborted by then, so there is no retry.
        """
        with self._handing_over:
            error = CheckpointAborted(f"the saver process has exited{self._exit_cause()}")
            while pending.num_tries > 0:
                pending.num_tries -= 1
                try:
                    self._start()
                    self._send(pending.run)
                except CheckpointAborted as failure:
                    error = failure
                    self._link = None  # ignore further messages of this process
                except Exception as failure:  # noqa: BLE001 - no descriptors, no memory, no such program
                    error = CheckpointAborted(
                        f"the saver process could not be started ({failure}); saver='thread' needs none"
                    )
                    self._link = None
                else:
                    pending.run = msgspec.structs.replace(pending.run, is_retry=True)
                    return
            self._pending = None
            self._free.set()
        pending.future.set_exception(error)

    def interrupt(self, reason: str) -> None:
        """Kill the process: another one retries, as after any other death."""
        pending = self._pending
        if not self._kill(reason) and pending is not None and self._pending is pending:
            self._pending = self._link = None
            with contextlib.suppress(InvalidStateError):  # the job has just ended
                pending.future.set_exception(CheckpointAborted(f"{reason}; its process {self.pid} cannot be killed"))

    def _kill(self, why: str) -> bool:
        """Kill the process; return whether it has exited."""
        process = self._process
        if process is None:
            return True
        log.warning("killing the saver process %d: %s", process.pid, why)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_WAIT_S)
        return process.returncode is not None

    def close(self) -> None:
        if not self._home.is_here:
            return  # a forked child: the process and the memory belong to its parent
        self.let_go()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning(
                    "the saver process %d has written everything but does not exit; leaving it behind",
                    self._process.pid,
                )

    def let_go(self) -> None:
        """Close without waiting: the process exits by itself."""
        if self._home.is_here:
            with contextlib.suppress(CheckpointAborted):
                if self._link is not None:
                    self._send(protocol.Close())
            self._shared.close()

    # -- within ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None and self._link is not None:
            return
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as unless_started, theirs:
            unless_started.callback(ours.close)
            source = str(Path(__file__).parents[2])
            paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
            # Termination signals are for the trainer; the staged snapshot is written all the same. The saver inherits
            # the blocked signals until it has begun to ignore them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, protocol.IGNORED_SIGNALS)
            try:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "strata.checkpoint.saver.process"),
                        *(str(theirs.fileno()), str(self._shared.fd), str(os.getpid())),
                    ],
                    pass_fds=(theirs.fileno(), self._shared.fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": paths, OUTLIVES: "1"},
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            unless_started.pop_all()
        self._link = Connection(ours.detach())
        self._send(self._open)
        threading.Thread(
            target=self._listen, args=(self._link, self._process), name="strata-saver-link", daemon=True
        ).start()

    def _send(self, message: protocol.ToSaver) -> None:
        link = self._link
        try:
            if link is None:
                raise BrokenPipeError
            with self._sending:
                link.send_bytes(protocol.encode(message))
        except OSError:
            raise CheckpointAborted(f"the saver process has exited{self._exit_cause(wait_s=EXIT_WAIT_S)}") from None

    def _cancel(self, id: str) -> None:
        with contextlib.suppress(CheckpointAborted):
            self._send(protocol.Cancel(id=id))

    def _listen(self, link: Connection, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                self._receive(protocol.decode_from_saver(link.recv_bytes(protocol.MAX_BYTES)))
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_TIMEOUT_S)
        finally:
            link.close()
        with self._handing_over:
            if self._link is not link:
                return
            self._link, pending = None, self._pending
            if pending is None:
                self._free.set()
                return
            if pending.num_tries > 0:
                log.warning("the saver process has exited%s; another one writes %s", self._exit_cause(), pending.run.id)
            self._hand_over(pending)

    def _receive(self, message: protocol.FromSaver) -> None:
        pending = self._pending
        match message:
            case protocol.BytesWritten() if pending is not None:
                pending.watch.advance(message.num_bytes)
            case protocol.Done() if pending is not None:
                self._pending = None
                pending.future.set_result(message.outcome)
            case protocol.Failed() if pending is not None:
                self._pending = None
                pending.future.set_exception(protocol.decode_error(message))
            case protocol.Free():
                self._free.set()
            case _:
                log.warning("unexpected message %r from the saver process", type(message).__name__)

    def _exit_cause(self, wait_s: float = 0) -> str:
        """Describe how the process exited. A killed process closes its link just before its exit code is available."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return ""
        return f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"


@dataclass(slots=True)
class _Pending:
    """A submitted job."""

    watch: Watch
    run: protocol.RunJob
    num_tries: int
    """Remaining attempts."""
    future: Future[Outcome] = field(default_factory=Future)
