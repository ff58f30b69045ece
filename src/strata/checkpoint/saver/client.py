"""Who writes a snapshot: a thread of the trainer, or a process of its own that outlives it.

Both have the staging memory, take one job at a time, and answer with a future. After a job its statistics are computed
from the same memory for as long as nobody claims it.
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
from strata.checkpoint.saver import protocol as messages
from strata.checkpoint.saver.executor import Executor, is_committed
from strata.errors import BY_KIND, CheckpointAborted, CheckpointBusy, StorageError, StrataError
from strata.lifecycle import Home, renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.checkpoint.load.statistics import Statistics
    from strata.checkpoint.save.job import Job
    from strata.checkpoint.saver.executor import Outcome
    from strata.storage import Store, Watch

log = logging.getLogger(__name__)
MAX_TRIES = 2
"""A second saver for a snapshot whose first one died; who kills that one, too, means it."""
EXIT_WAIT_S = 1.0
CLAIM_TIMEOUT_S = 60.0
"""For statistics to be given up: it is done after the next tensor, or when the store has taken the last file."""
CLOSE_TIMEOUT_S = 30.0
"""Once its last job is done: two seconds for statistics, and some for a slow store."""
OUTLIVES = "STRATA_OUTLIVES_WORKER"
"""Read by `strata.launch.processes.warm`, which ends everything else that a worker leaves behind."""


class Saver(Protocol):
    memory: Memory

    def prepare(self) -> None:
        """Makes it ready for the first job."""
        ...

    def claim(self) -> None:
        """Returns when nobody reads the memory any more.

        Raises:
            CheckpointBusy: Somebody does, and cannot be stopped.
        """
        ...

    def submit(self, job: Job, watch: Watch) -> Future[Outcome]:
        """Hands over the snapshot in the memory. From now on it is the saver's, until the future has ended and the
        memory has been claimed.
        """
        ...

    def give_up(self, reason: str) -> None:
        """The job hangs: it is tried anew, or fails for this reason."""
        ...

    def close(self) -> None:
        """Returns when all work is done."""
        ...

    def let_go(self) -> None:
        """Nobody wants it any more: all work is done, later."""
        ...


class ThreadSaver:
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
            self._pool.submit(lambda: None).result(CLAIM_TIMEOUT_S)  # it has one thread
        except TimeoutError:
            raise CheckpointBusy(
                f"the thread that writes checkpoints still reads the last snapshot after {CLAIM_TIMEOUT_S:g} s; does "
                f"{self._store.url} answer?"
            ) from None
        self._stop.clear()

    def submit(self, job: Job, watch: Watch) -> Future[Outcome]:
        future = self._future = Future()
        self._pool.submit(self._run, job, watch, future)
        return future

    def give_up(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):  # it has ended just now
            self._future.set_exception(CheckpointAborted(reason))

    def _run(self, job: Job, watch: Watch, future: Future[Outcome]) -> None:
        try:
            with self.memory.view()[: job.size_bytes] as view:
                outcome = self._executor.run(job, view, watch)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: whoever waits hears it
            with contextlib.suppress(InvalidStateError):  # it was given up
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
    """Beside a committed checkpoint; given up when somebody wants the memory, or the store does not take it."""
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
        if not is_committed(store, job.head.id):  # removed meanwhile
            store.delete([f"{job.head.id}/{statistics.FILE_NAME}"])
    except StrataError as error:
        log.warning("checkpoint %s has no statistics: %s", job.head.id, error)


# -- a process of its own ------------------------------------------------------------------------------------------


class ProcessSaver:
    """The trainer's end. The process is started when the first job is near, and again should it die."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self._shared = SharedMemory()
        self.memory: Memory = self._shared
        self._place = messages.Open(url=url, storage_options=dict(storage_options or {}))
        self._sending = renewed(threading.Lock())
        self._handing_over = renewed(threading.RLock())
        """Held by whoever starts a saver, or finds one dead."""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._pending: _Pending | None = None
        self._home = Home()
        self._free = threading.Event()
        """Nobody reads the memory."""
        self._free.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def prepare(self) -> None:
        self._start()
        if self._shared.size_bytes:
            self._send(messages.Map(num_bytes=self._shared.size_bytes))

    def claim(self) -> None:
        if not self._free.is_set():
            with contextlib.suppress(CheckpointAborted):  # dead: the memory is free
                self._send(messages.Release())
            if not self._free.wait(CLAIM_TIMEOUT_S):
                is_killed = self._is_killed(f"it has not let go of the last snapshot within {CLAIM_TIMEOUT_S:g} s")
                if not is_killed or not self._free.wait(EXIT_WAIT_S):
                    raise CheckpointBusy(f"the saver process {self.pid} holds the last snapshot and cannot be killed")

    def submit(self, job: Job, watch: Watch) -> Future[Outcome]:
        """The job goes through the memory, behind the snapshot: a message of any size would have to wait for a reader,
        and what is handed over must be there, should this process end now.
        """
        data = jobs.encode(job)
        if self._shared.size_bytes < job.size_bytes + len(data):
            self._shared.grow(job.size_bytes + len(data))
        self._shared.view()[job.size_bytes : job.size_bytes + len(data)] = data
        run = messages.RunJob(
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
        """To a saver that lives. If it dies, the snapshot is still in the memory, and another one begins anew; with
        several ranks, the others may have given up by then.
        """
        with self._handing_over:
            error = CheckpointAborted(f"the saver process has ended{self._how()}")
            while pending.num_tries > 0:
                pending.num_tries -= 1
                try:
                    self._start()
                    self._send(pending.run)
                except CheckpointAborted as failure:
                    error = failure
                    self._link = None  # whatever is heard there is of a saver that we have given up
                except Exception as failure:  # noqa: BLE001 - no descriptors left, no memory, no such program
                    error = CheckpointAborted(
                        f"the saver process could not be started ({failure}); saver='thread' does without one"
                    )
                    self._link = None
                else:
                    pending.run = msgspec.structs.replace(pending.run, is_second_try=True)
                    return
            self._pending = None
            self._free.set()
        pending.future.set_exception(error)

    def give_up(self, reason: str) -> None:
        """Kills the process: another one begins anew, as after any other death of it."""
        pending = self._pending
        if not self._is_killed(reason) and pending is not None and self._pending is pending:
            self._pending = self._link = None
            with contextlib.suppress(InvalidStateError):  # it has ended just now
                pending.future.set_exception(CheckpointAborted(f"{reason}; its process {self.pid} cannot be killed"))

    def _is_killed(self, why: str) -> bool:
        process = self._process
        if process is None:
            return True
        log.warning("the saver process %d is killed: %s", process.pid, why)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_WAIT_S)
        return process.returncode is not None

    def close(self) -> None:
        if not self._home.is_here:
            return  # a forked child: the process and the memory are its parent's
        self.let_go()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning(
                    "the saver process %d has written everything and does not end; it is left behind", self._process.pid
                )

    def let_go(self) -> None:
        """Like `close`, without waiting: the process ends by itself."""
        if self._home.is_here:
            with contextlib.suppress(CheckpointAborted):
                if self._link is not None:
                    self._send(messages.Close())
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
            # Signals that end programs are for the trainer; what is staged is written nevertheless. The saver inherits
            # that they are blocked, until it has begun to ignore them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, messages.IGNORED_SIGNALS)
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
        self._send(self._place)
        threading.Thread(
            target=self._listen, args=(self._link, self._process), name="strata-saver-link", daemon=True
        ).start()

    def _send(self, message: messages.ToSaver) -> None:
        link = self._link
        try:
            if link is None:
                raise BrokenPipeError
            with self._sending:
                link.send_bytes(messages.encode(message))
        except OSError:
            raise CheckpointAborted(f"the saver process has ended{self._how(wait_s=EXIT_WAIT_S)}") from None

    def _cancel(self, id: str) -> None:
        with contextlib.suppress(CheckpointAborted):
            self._send(messages.Cancel(id=id))

    def _listen(self, link: Connection, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                self._hear(messages.decode_from_saver(link.recv_bytes(messages.MAX_BYTES)))
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
                log.warning("the saver process has ended%s; another one writes %s", self._how(), pending.run.id)
            self._hand_over(pending)

    def _hear(self, message: messages.FromSaver) -> None:
        pending = self._pending
        match message:
            case messages.BytesWritten() if pending is not None:
                pending.watch.advance(message.num_bytes)
            case messages.Done() if pending is not None:
                self._pending = None
                pending.future.set_result(message.outcome)
            case messages.Failed() if pending is not None:
                self._pending = None
                pending.future.set_exception(_error(message))
            case messages.Free():
                self._free.set()
            case _:
                log.warning("the saver said %r, which nobody asked for", type(message).__name__)

    def _how(self, wait_s: float = 0) -> str:
        """A process that is killed closes its link a moment before its exit code is there: `wait_s` is for that."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return ""
        return f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"


@dataclass(slots=True)
class _Pending:
    """A job that was handed over."""

    watch: Watch
    run: messages.RunJob
    num_tries: int
    """That are left."""
    future: Future[Outcome] = field(default_factory=Future)


def _error(message: messages.Failed) -> Exception:
    kind = BY_KIND.get(message.kind)
    if kind is not None:
        return kind(message.text, field=message.field, missing=message.missing)
    return StorageError(f"{message.kind}: {message.text}")
