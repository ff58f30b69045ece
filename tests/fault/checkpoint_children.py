"""Processes that save checkpoints and are killed at a moment chosen by the test.

Run as a program, this file is a small parent process. It imports only numpy and `strata.checkpoint`, starts no threads
and forks a child for every order, so a process that saves and dies costs milliseconds. An order is a line of JSON on
stdin: a list of runs to execute concurrently. Once all children have exited, the parent answers with their reports and
exit codes. A child writes each report to a pipe immediately, so the report survives the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from faulty_store import Call, Fault, FaultyStore, When

from strata.checkpoint import CheckpointManager
from strata.errors import StrataError
from strata.storage import local, open_store

MIB = 1 << 20
LOOKS, LOOK_S = 20, 0.005
CALLS = ("open", "pwrite", "ftruncate", "fsync", "link", "rename", "unlink", "rmdir", "mkdir")
"""The system calls with which a local store modifies the disk; `open` only if it creates a file."""
SMALL_PIECE_BYTES = 8_192
"""Small enough that several threads write even a small state in several pieces."""
STEPS = (1, 2, 3)
SAVERS = ("thread", "process")
"""The kinds of saver."""
_PR_SET_PDEATHSIG = 1

Report = Callable[..., None]
"""Sends a report to the test; the report has been written when the call returns."""


# -- states --------------------------------------------------------------------------------------------------------


def state_of(step: int, *, num_bytes: int = 40_000, num_tensors: int = 3, writer: str = "") -> dict[str, Any]:
    """Return a deterministic state whose file size is not a multiple of the page size."""
    random = np.random.default_rng([step, *writer.encode()])
    each = num_bytes // num_tensors
    tensors = {f"w{n}": np.frombuffer(random.bytes(each), np.uint8).copy() for n in range(num_tensors)}
    return {"model": tensors, "step": step, "writer": writer, "lr": 0.1 * step}


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states are equal bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def open_manager(
    place: str | None = None, *, saver: Any = "thread", statistics: bool = False, **options: Any
) -> CheckpointManager:
    """Open a manager that saves in a thread of this process, where faults can be planned, or in a saver process.

    Statistics are off by default: they are written in idle time, so the moment of their calls is not reproducible.
    """
    return CheckpointManager(place, saver=saver, statistics=statistics, **options)


# -- kills at a boundary -------------------------------------------------------------------------------------------


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the signal is delivered
        signal.pause()


def do_nothing(_: int) -> None:
    """Stand in for `fsync`."""


class Boundaries:
    """Numbers the system calls of all threads and, at one of them, kills the process or runs another action."""

    def __init__(self, number: int | None, when: When, act: Callable[[], None] = die) -> None:
        self.seen: list[tuple[str, str]] = []
        """Pairs of call and path."""
        self._number, self._when, self._act = number, when, act
        self._lock = threading.Lock()

    def install(self) -> None:
        """Wrap the calls; `fsync` is only counted, because the page cache survives the death of a process."""
        for name in CALLS:
            setattr(os, name, self._numbered(name, do_nothing if name == "fsync" else getattr(os, name)))

    def _numbered(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            is_chosen = self._next(name, args) == self._number
            if is_chosen and (self._when == "before" or (self._when == "half" and name != "pwrite")):
                self._act()
            elif is_chosen and self._when == "half":
                fd, data, offset = args
                real(fd, data[: data.nbytes // 2 // 4_096 * 4_096 or (1 if data.nbytes < 4_096 else 4_096)], offset)
                self._act()
            try:
                return real(*args, **kwargs)
            finally:
                # Also after a call that failed, for example `rmdir` of a directory that is not empty.
                if is_chosen and self._when == "after":
                    self._act()

        return call

    def _next(self, name: str, args: tuple[Any, ...]) -> int:
        """Record a call and return its number; for `link` and `rename` record the new path."""
        path = args[1] if name in ("link", "rename") else args[0]
        path = str(Path(f"/proc/self/fd/{path}").readlink()) if isinstance(path, int) else os.fspath(path)
        with self._lock:
            self.seen.append((name, path))
            return len(self.seen) - 1


# -- the saver process ---------------------------------------------------------------------------------------------

IN_SAVER = "STRATA_TEST_IN_SAVER"
"""Environment variable with the settings of `act_in_saver`, as JSON."""
CUSTOMS = """
import os, sys
if os.environ.get("STRATA_TEST_IN_SAVER"):
    sys.path.append(os.environ["STRATA_TEST_FAULTS"])
    import checkpoint_children
    checkpoint_children.act_in_saver()
"""


def environment_of_savers(
    directory: Path, *, number: int | None = None, when: When = "before", victim: str = "saver"
) -> dict[str, str]:
    """Return the environment of a trainer whose saver logs its calls and, at one of them, kills itself or the trainer.

    The log is written to `directory`. A saver is a separate interpreter, so a `sitecustomize` module installs the
    wrappers.
    """
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(CUSTOMS)
    chosen = {"number": number, "when": when, "victim": victim, "notes": str(directory / "notes")}
    return {
        IN_SAVER: json.dumps(chosen),
        "STRATA_TEST_FAULTS": str(Path(__file__).parent),
        "PYTHONPATH": str(directory),
    }


def act_in_saver() -> None:
    chosen = json.loads(os.environ[IN_SAVER])
    local.PIECE_BYTES = SMALL_PIECE_BYTES
    notes = os.open(chosen["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(notes, b"%d\n" % os.getpid())
    boundaries = Boundaries(chosen["number"], chosen["when"], die if chosen["victim"] == "saver" else orphan)
    boundaries.seen = _Noted(notes)
    boundaries.install()


class _Noted(list[tuple[str, str]]):
    """A list of calls that is also written to a file, so that it outlives the process."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def append(self, call: tuple[str, str]) -> None:
        super().append(call)
        os.write(self._fd, f"{call[0]} {call[1]}\n".encode())


def orphan() -> None:
    """Kill the trainer and return once it is gone."""
    trainer = os.getppid()
    os.kill(trainer, signal.SIGKILL)
    while os.getppid() == trainer:
        time.sleep(0.001)


def save_beside(report: Report, *, place: str, environment: dict[str, str], always: bool = False) -> None:
    """Save step 2 with a saver into which a fault is injected; `always` injects it into every replacement, too.

    If the save fails, save step 3 with a healthy saver.
    """
    os.environ.update(environment)
    with open_manager(place, saver="process", statistics=False) as manager:
        handle = manager.save(state_of(2), step=2)
        if not always:
            os.environ.pop(IN_SAVER)
        try:
            saved = handle.wait()
        except StrataError as error:
            os.environ.pop(IN_SAVER, None)
            report(event="failed", kind=type(error).__name__, message=str(error)[:500])
            saved = manager.save(state_of(3), step=3).wait()
        report(event="durable", step=saved.step, id=saved.id)


# -- runs ----------------------------------------------------------------------------------------------------------


def save_three(
    report: Report,
    *,
    place: str,
    storage_options: dict[str, Any] | None = None,
    level: str,
    number: int | None = None,
    when: When = "before",
    num_bytes: int = 40_000,
    statistics: bool = False,
) -> None:
    """Save steps 1, 2 and 3, retain one, and report each when it is durable; at the end, report the calls.

    `level="calls"` numbers system calls, `level="store"` numbers calls of the store.
    """
    local.PIECE_BYTES = SMALL_PIECE_BYTES
    boundaries = Boundaries(number, when)
    if level == "calls":
        boundaries.install()
        manager = open_manager(place, keep_count=1, statistics=statistics)
    else:
        store = FaultyStore(open_store(place, storage_options))
        if number is not None:
            store.plan(Fault(lambda _: die(), when), number=number)
        manager = open_manager(store=store, keep_count=1)
    with manager:
        for step in STEPS:
            saved = manager.save(state_of(step, num_bytes=num_bytes), step=step).wait()
            report(event="durable", step=step, id=saved.id)
            manager.wait()  # until retention has deleted the old checkpoint
            while statistics and not Path(saved.path, "statistics.json").exists():
                time.sleep(0.001)  # otherwise the next save may start first, and no statistics would be written
    calls: list[Any] = boundaries.seen if level == "calls" else [_summary(call) for call in store.seen]
    for start in range(0, len(calls), 10):
        report(event="calls", calls=calls[start : start + 10])


def _summary(call: Call) -> tuple[int, str, str]:
    return call.number, call.kind, call.key


def write_rounds(
    report: Report, *, place: str, writer: str, num_rounds: int, saver: str, keep_count: int | None
) -> None:
    """Save the same steps as a concurrent writer."""
    with open_manager(place, saver=saver, keep_count=keep_count) as manager:
        for step in range(1, num_rounds + 1):
            saved = manager.save(state_of(step, writer=writer), step=step).wait()
            report(event="durable", step=step, id=saved.id)


def save_often(
    report: Report, *, place: str, saver: str, measured: list[int], num_bytes: int, num_tensors: int
) -> None:
    """Report the resources of this process and its saver after each number of saves in `measured`."""
    state = state_of(0, num_bytes=num_bytes, num_tensors=num_tensors)
    with open_manager(place, saver=saver, statistics=True, keep_count=2) as manager:
        for step in range(1, max(measured) + 1):
            state["step"] = step
            for tensor in state["model"].values():
                tensor += 1
            manager.save(state, step=step).wait()
            manager.wait()
            if step in measured:
                gc.collect()
                report(event="holds", step=step, **holdings())


def save_large(report: Report, *, place: str, saver: str, num_bytes: int, num_tensors: int) -> None:
    """Wait for a first measurement without a state, then save three times."""
    with open_manager(place, saver=saver, statistics=True, keep_count=1) as manager:
        manager.save(b"", step=0).wait()  # allocates everything that a process allocates once
        report(event="ready", pid=os.getpid())
        sys.stdin.readline()
        state = {"model": {f"w{n}": np.ones(num_bytes // num_tensors, np.uint8) for n in range(num_tensors)}}
        for step in (1, 2, 3):
            manager.save(state, step=step).wait()
        manager.wait()
        report(event="done", peak_bytes=peak_bytes())


def load_large(report: Report, *, place: str, saver: str) -> None:
    with open_manager(place, saver=saver) as manager:
        manager.list()
        report(event="ready", pid=os.getpid())
        sys.stdin.readline()
        state = manager.load()
        report(event="done", peak_bytes=peak_bytes(), num_bytes=sum(w.nbytes for w in state["model"].values()))


RUNS: dict[str, Callable[..., None]] = {
    run.__name__: run for run in (save_three, save_beside, write_rounds, save_often, save_large, load_large)
}


# -- resources of a process ----------------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def held_bytes(pid: int) -> int:
    """Return the memory of a process and all its descendants, counting shared memory once.

    Staging memory is their only anonymous shared memory, so the largest `RssShmem` is all of it. Adding up the
    proportional shares would count it twice if a process mapped it between two reads.
    """
    total = shared = 0
    for one in family(pid):
        with contextlib.suppress(OSError):  # it has just exited
            counts = _kibibytes(Path(f"/proc/{one}/smaps_rollup")) | _kibibytes(Path(f"/proc/{one}/status"))
            total += counts["Pss_Anon"] + counts["Pss_File"]
            shared = max(shared, counts["RssShmem"])
    return (total + shared) * 1_024


def _kibibytes(path: Path) -> dict[str, int]:
    fields = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in fields if len(line) == 3 and line[2] == "kB"}


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def holdings() -> dict[str, int]:
    pids = family(os.getpid())
    return {
        "num_bytes": held_bytes(os.getpid()),
        "num_fds": min(_num_fds(pids) for _ in range(LOOKS)),
        "num_threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),  # noqa: PTH208 - names
        "num_processes": len(pids),
    }


def _num_fds(pids: Iterable[int]) -> int:
    """Count the open descriptors now; the minimum of many counts excludes those that are open only briefly."""
    time.sleep(LOOK_S)
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)  # noqa: PTH208 - names


def peak_bytes() -> int:
    """Return the peak memory of this process; `getrusage` would include its parent's memory at the fork."""
    return _kibibytes(Path("/proc/self/status"))["VmHWM"] * 1_024


# -- the parent ----------------------------------------------------------------------------------------------------


def serve() -> None:
    for line in sys.stdin:
        children = [_forked(order) for order in json.loads(line)]
        ended = []
        for pid, reports in children:
            lines = reports.read().splitlines()  # until the child is dead
            reports.close()
            _, status = os.waitpid(pid, 0)
            ended.append(
                {"exit_code": os.waitstatus_to_exitcode(status), "reports": [json.loads(line) for line in lines]}
            )
        print(json.dumps(ended), flush=True)


def _forked(order: dict[str, Any]) -> tuple[int, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading)
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives the tests
        os.close(reading)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        RUNS[order["run"]](_reporter(writing), **order["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reporter(fd: int) -> Report:
    def report(**fields: Any) -> None:
        line = json.dumps(fields).encode() + b"\n"
        assert os.write(fd, line) == len(line)

    return report


class Ended:
    """The exit code and the reports of a child that has exited."""

    def __init__(self, exit_code: int, reports: list[dict[str, Any]]) -> None:
        self.exit_code = exit_code
        """Negative: the signal that killed it."""
        self.durable = {one["id"]: one["step"] for one in reports if one["event"] == "durable"}
        self.calls = [call for one in reports if one["event"] == "calls" for call in one["calls"]]
        self.failed = [f"{one['kind']}: {one['message']}" for one in reports if one["event"] == "failed"]
        self.holds = {one["step"]: one for one in reports if one["event"] == "holds"}


class Parent:
    """The test's end of the program in this file."""

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = _start([], stderr=self._log)
        return self

    def __exit__(self, *_: object) -> None:
        with self._process, self._log:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def begin(self, *orders: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[Ended]:
        """Wait until every child of the last `begin` has exited; only the timeout of the test bounds the wait."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the parent has exited:\n{self.log()}"
        return [Ended(**one) for one in json.loads(line)]

    def run(self, run: Callable[..., None], **arguments: Any) -> Ended:
        self.begin(order(run, **arguments))
        return self.end()[0]

    def log(self) -> str:
        """Return the end of what the children wrote to stderr."""
        self._log.seek(0)
        return self._log.read()[-5_000:]


def order(run: Callable[..., None], **arguments: Any) -> dict[str, Any]:
    return {"run": run.__name__, "arguments": arguments}


@contextlib.contextmanager
def alone(run: Callable[..., None], **arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """Start one child in its own interpreter, for measurements; it prints its reports to stdout."""
    with _start([json.dumps(order(run, **arguments))], stderr=None) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _start(arguments: list[str], *, stderr: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)


class Peak:
    """Samples the memory of a process and its descendants and keeps the maximum."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self.at_first_bytes = self.bytes = held_bytes(pid)
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, held_bytes(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main(arguments: list[str]) -> None:
    if not arguments:
        serve()
        return
    one = json.loads(arguments[0])
    RUNS[one["run"]](_reporter(sys.stdout.fileno()), **one["arguments"])


if __name__ == "__main__":
    main(sys.argv[1:])
