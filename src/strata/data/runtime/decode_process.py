"""Decoding in processes, for transforms that would hold the interpreter lock.

Each worker thread owns one process. It requests a row group over a socket and receives the rows as Arrow IPC in a
memfd: anonymous shared memory, which cannot leak. The thread waits without holding the lock, so the pipeline is the
same as with threads.

A process exits when its socket is closed, at the latest when the parent dies.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import threading
import weakref
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from strata.data.runtime.decoder import ThreadDecoder, open_shared
from strata.data.runtime.metrics import State, WorkerMetrics, WorkerRecorder
from strata.data.shared.tables import read_table, write_table
from strata.errors import BY_KIND, DataFileInvalid, DataWorkerDied, ForkedProcess, InvalidArgument, StrataError
from strata.lifecycle import Home, finalize, renewed

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from strata.data.runtime.decoder import Recipe

GRACE_S = 5.0
"""How long a process may take to exit once its socket is closed."""
MAX_MESSAGE_BYTES = 1 << 20


class _Done(msgspec.Struct, frozen=True):
    """The answer of a process that decoded a row group; the memfd follows."""

    num_bytes: int
    counts: WorkerMetrics
    """The metrics of this row group."""


class _Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer of a process that raised an error."""

    kind: str
    message: str
    field: str = ""
    path: str = ""
    row_group: int | None = None


class ProcessDecoder:
    """Decodes in its own process, which starts with the first row group."""

    def __init__(self, recipe: Recipe, recorder: WorkerRecorder) -> None:
        self._recipe = recipe
        self._recorder = recorder
        self._lock = renewed(threading.Lock())
        self._home = Home()
        self._process: ForkServerProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_busy = False
        self._is_aborted = False
        self._stop: Any = None

    def decode(self, number: int) -> pa.Table:
        self._is_busy = True
        try:
            connection = self._connected()
            with self._recorder.during(State.DECODE):
                connection.send_bytes(str(number).encode())
                answer = connection.recv_bytes(MAX_MESSAGE_BYTES)
                if answer[:1] == b"-":
                    raise _rebuilt(msgspec.json.decode(answer[1:], type=_Failed))
                done = msgspec.json.decode(answer, type=_Done)
                table = _mapped(reduction.recv_handle(connection), done.num_bytes)
                self._recorder.move(done.counts.transform_s, State.TRANSFORM)
        except (EOFError, OSError) as error:
            if isinstance(error, StrataError):
                raise
            cause = self._cause_of_death()
            self.shutdown()  # the next row group, or the next loop, gets a new process
            raise DataWorkerDied(cause) from error
        finally:
            self._is_busy = False
        self._recorder.add(done.counts)
        return table

    def close(self) -> None:
        """Do nothing: the process is kept for the next pass, and `shutdown` ends it."""

    def ready(self) -> None:
        """Prepare for a pass: replace a process that died since the last one."""
        self._is_aborted = False
        with self._lock:
            self._disown_if_forked()
            process = self._process
        if process is not None and not process.is_alive():
            self.shutdown()

    def abort(self) -> None:
        """End a process that is decoding: its answer is no longer needed."""
        self._is_aborted = True  # also stops a thread that is about to start one
        if self._is_busy:
            self.shutdown()

    def shutdown(self) -> None:
        with self._lock:
            stop, self._stop = self._stop, None
            self._process = self._connection = None
        if stop is not None:
            stop()

    def _connected(self) -> Connection[Any, Any]:
        with self._lock:
            if self._is_aborted:
                raise DataWorkerDied("the worker process was stopped")
            self._disown_if_forked()
            if self._connection is None:
                self._start()
            assert self._connection is not None
            return self._connection

    def _disown_if_forked(self) -> None:
        """Drop the process after a fork: it belongs to the parent, and Python cannot check it here."""
        if not self._home.is_here:
            self._home = Home()
            self._process = self._connection = self._stop = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["strata.data.runtime.decode_process"])
        ours, theirs = context.Pipe()
        try:
            process = context.Process(
                target=_serve, args=(theirs, self._recipe), name=f"strata-data-{self._recorder.worker}", daemon=True
            )
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            raise InvalidArgument(
                f"worker_type='process' sends the transform and the file system to other processes, which failed: "
                f"{error}. Define the transform at the top level of a module (no lambda, no inner function)",
                field="transform",
            ) from error
        except ChildProcessError:  # the forkserver belongs to the parent process
            ours.close()
            raise ForkedProcess(
                "worker_type='process' needs Python's forkserver, which belongs to the process that forked this one; "
                "use worker_type='thread', or start this process with multiprocessing.get_context('spawn')",
                field="worker_type",
            ) from None
        finally:
            theirs.close()
        _started.add(process)
        self._process, self._connection = process, ours
        self._stop = finalize(self, _end, process, ours)

    def _cause_of_death(self) -> str:
        process = self._process
        if process is None:
            return "the worker process was stopped"
        process.join(GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            cure = "; if memory ran out, use fewer workers or a smaller split_bytes" if code == -signal.SIGKILL else ""
        else:
            how = f"exited with code {code}"
            cure = (
                "; its error output shows the reason. A script that starts processes must do its work below "
                "`if __name__ == '__main__':`"
            )
        return f"worker process {process.pid} {how} while decoding{cure}"


_started: weakref.WeakSet[ForkServerProcess] = weakref.WeakSet()


def _disown() -> None:
    """Stop multiprocessing from ending the processes when a forked child exits: they belong to its parent."""
    multiprocessing.process._children.difference_update(_started)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_disown)


def _end(process: ForkServerProcess, connection: Connection[Any, Any]) -> None:
    connection.close()
    process.terminate()
    process.join(GRACE_S)
    if process.is_alive():
        process.kill()
        process.join(GRACE_S)
    with contextlib.suppress(ValueError):  # the kernel has not released it yet; Python reaps it later
        process.close()


def _mapped(handle: int, num_bytes: int) -> pa.Table:
    """Return the rows without a copy; the memory is freed with the last array that uses it."""
    try:
        memory = mmap.mmap(handle, num_bytes)
    finally:
        os.close(handle)
    return read_table(pa.py_buffer(memory))


def _rebuilt(failed: _Failed) -> StrataError:
    kind = BY_KIND.get(failed.kind, StrataError)
    if issubclass(kind, DataFileInvalid):
        return kind(failed.message, field=failed.field, path=failed.path, row_group=failed.row_group)
    return kind(failed.message, field=failed.field)


# In the decoding process


def _serve(connection: Connection[Any, Any], recipe: Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    recorder = WorkerRecorder(0)
    decoder = ThreadDecoder(recipe, recorder, shared=open_shared(recipe))
    with contextlib.suppress(EOFError, OSError), connection:
        while True:
            number = int(connection.recv_bytes(MAX_MESSAGE_BYTES))
            recorder.reset()
            recorder.enter(State.DECODE)
            try:
                handle, num_bytes = _written(decoder.decode(number))
            except StrataError as error:
                _send_failure(connection, _failure_of(error))
                continue
            except Exception as error:  # noqa: BLE001 - the parent raises it
                _send_failure(connection, _Failed("DataError", f"{type(error).__name__}: {error}"))
                continue
            try:
                connection.send_bytes(msgspec.json.encode(_Done(num_bytes, recorder.snapshot())))
                reduction.send_handle(connection, handle, os.getppid())
            finally:
                os.close(handle)


def _end_with_parent(handle: int) -> None:
    """Exit when the parent is gone and the socket hangs up, even while a transform does not return."""
    poll = select.poll()
    poll.register(handle, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def _failure_of(error: StrataError) -> _Failed:
    failed = _Failed(type(error).__name__, error.message, error.field)
    if isinstance(error, DataFileInvalid):
        failed = msgspec.structs.replace(failed, path=error.path, row_group=error.row_group)
    return failed


def _send_failure(connection: Connection[Any, Any], failed: _Failed) -> None:
    failed = msgspec.structs.replace(failed, message=failed.message[: MAX_MESSAGE_BYTES // 8])
    connection.send_bytes(b"-" + msgspec.json.encode(failed))


def _written(table: pa.Table) -> tuple[int, int]:
    """Write rows to anonymous shared memory and return its handle and size."""
    handle = os.memfd_create("strata-data", os.MFD_CLOEXEC)
    try:
        write_table(handle, table)
        return handle, max(1, os.fstat(handle).st_size)
    except BaseException:
        os.close(handle)
        raise
