"""The saver process: it writes what a trainer has staged, even if the trainer is killed.

`client.ProcessSaver` starts it with two descriptors, a socket and the memory. It exits when the trainer closes the
socket or dies, after it has finished the job that it received completely.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from strata.checkpoint.save import job as jobs
from strata.checkpoint.saver import client, protocol
from strata.checkpoint.saver.executor import Executor
from strata.errors import StrataError
from strata.storage import Store, Watch, open_store

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("strata.checkpoint.saver.process")
PROGRESS_EVERY_S = 0.05
MAX_FINAL_STATISTICS_S = 2.0
"""How much longer `close()` may take, so that the last checkpoint gets statistics too."""


def main() -> None:
    link_fd, memory_fd, trainer_pid = (int(argument) for argument in sys.argv[1:4])
    for number in protocol.IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, protocol.IGNORED_SIGNALS)
    logging.basicConfig(level=logging.WARNING, format="strata saver: %(message)s")
    link = Connection(link_fd)
    place = protocol.decode_to_saver(link.recv_bytes(protocol.MAX_BYTES))
    assert isinstance(place, protocol.Open)
    try:
        store = open_store(place.url, place.storage_options)
    except StrataError as error:
        link.send_bytes(protocol.encode(protocol.encode_error(error)))
        sys.exit(1)
    worker = _Worker(store, link, memory_fd)
    threading.Thread(target=_listen, args=(link, worker, trainer_pid), daemon=True).start()
    worker.work()
    store.close()


def _listen(link: Connection, worker: _Worker, trainer_pid: int) -> None:
    """Receive messages until the trainer exits. Its forked children may hold the socket open, so its pid is watched."""
    trainer = _open_pidfd(trainer_pid)
    try:
        while trainer is not None or trainer_pid == os.getppid():
            ready = wait([link, *([trainer] if trainer is not None else [])])
            if link not in ready:
                break
            worker.receive(protocol.decode_to_saver(link.recv_bytes(protocol.MAX_BYTES)))
        while link.poll():  # sent before the trainer died
            worker.receive(protocol.decode_to_saver(link.recv_bytes(protocol.MAX_BYTES)))
    except (EOFError, OSError):
        pass
    worker.receive(protocol.Close())


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is ready when the process exits; None where the system has no such descriptors."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


class _Worker:
    """Runs jobs one after another; messages arrive in another thread."""

    def __init__(self, store: Store, link: Connection, memory_fd: int) -> None:
        self._store = store
        self._link = link
        self._memory_fd = memory_fd
        self._map: mmap.mmap | None = None
        self._executor = Executor(store)
        self._queue: queue.SimpleQueue[protocol.RunJob | protocol.Map | None] = queue.SimpleQueue()
        self._watch = Watch()
        self._running = ""
        self._cancelled: set[str] = set()
        self._stop = threading.Event()
        self._ends_at_s = math.inf
        self._sending = threading.Lock()

    def receive(self, message: protocol.ToSaver) -> None:
        """Handle a message; jobs are queued."""
        match message:
            case protocol.RunJob() | protocol.Map():
                self._queue.put(message)
            case protocol.Cancel():
                self._cancelled.add(message.id)
                if self._running == message.id:
                    self._watch.cancel()
            case protocol.Release():
                self._stop.set()
            case protocol.Close():
                self._ends_at_s = time.monotonic() + MAX_FINAL_STATISTICS_S
                self._queue.put(None)

    def work(self) -> None:
        """Run queued jobs until `Close`."""
        while (message := self._queue.get()) is not None:
            if isinstance(message, protocol.Map):
                self._mapped(message.num_bytes)
            else:
                self._run(message)

    def _run(self, run: protocol.RunJob) -> None:
        progress = _ProgressReporter(self._send)
        self._watch, self._running = Watch(progress.advance), run.id
        if run.id in self._cancelled:
            self._watch.cancel()
        try:
            memory = self._mapped(run.memory_bytes)
            job = jobs.decode(bytes(memory[run.job_offset : run.job_offset + run.job_bytes]))
            snapshot = memory[: job.size_bytes]
            outcome = self._executor.run(job, snapshot, self._watch, is_retry=run.is_retry)
            progress.flush()
            self._send(protocol.Done(outcome))
        except Exception as error:
            if not isinstance(error, StrataError):
                log.exception("checkpoint %s failed", run.id)
            self._send(protocol.encode_error(error))
        else:
            client.write_statistics(self._store, job, snapshot, self._must_stop)
        finally:
            self._running = ""
            self._stop.clear()
            self._send(protocol.Free())

    def _must_stop(self) -> bool:
        """Return whether statistics must stop: the next snapshot needs the memory, or `close()` waits."""
        return self._stop.is_set() or time.monotonic() > self._ends_at_s

    def _mapped(self, num_bytes: int) -> memoryview:
        if self._map is None or len(self._map) < num_bytes:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # map all existing pages at once
            self._map = mmap.mmap(self._memory_fd, num_bytes, flags=flags)
        return memoryview(self._map)

    def _send(self, message: protocol.FromSaver) -> None:
        with self._sending, contextlib.suppress(OSError):  # the trainer has exited
            self._link.send_bytes(protocol.encode(message))


class _ProgressReporter:
    """Sends progress at most every `PROGRESS_EVERY_S`."""

    def __init__(self, send: Callable[[protocol.FromSaver], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._unsent = 0
        self._sent_at_s = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._unsent += num_bytes
            if time.monotonic() - self._sent_at_s < PROGRESS_EVERY_S:
                return
        self.flush()

    def flush(self) -> None:
        with self._lock:
            num_bytes, self._unsent = self._unsent, 0
            self._sent_at_s = time.monotonic()
        if num_bytes:
            self._send(protocol.BytesWritten(num_bytes))


if __name__ == "__main__":
    main()
