"""Processes that save checkpoints, and that are killed at the moment which the test has chosen.

As a program this file is a small parent: it has imported numpy and `strata.checkpoint`, nothing else, starts no thread,
and forks for every order, so that a process which saves and dies costs milliseconds. Orders are lines of JSON on stdin:
a list of runs that go on side by side. The answer, when all have ended, is what each reported and how it ended. What a
child reports goes into a pipe at once, so it stands whatever becomes of the child.
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
"""The calls of the operating system by which a local store changes something; `open` only if it makes a file."""
SMALL_PIECE_BYTES = 8_192
"""So that also a small state is written in several pieces, by several threads."""
STEPS = (1, 2, 3)
SAVERS = ("thread", "process")
"""Who may do the saving."""
_PR_SET_PDEATHSIG = 1

Say = Callable[..., None]
"""Reports to the test; it has arrived when the call returns."""


# -- what is saved -------------------------------------------------------------------------------------------------


def state_of(step: int, *, num_bytes: int = 40_000, num_tensors: int = 3, who: str = "") -> dict[str, Any]:
    """The same for the same arguments; its file does not end on a page."""
    random = np.random.default_rng([step, *who.encode()])
    each = num_bytes // num_tensors
    tensors = {f"w{n}": np.frombuffer(random.bytes(each), np.uint8).copy() for n in range(num_tensors)}
    return {"model": tensors, "step": step, "who": who, "lr": 0.1 * step}


def is_same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def open_manager(
    place: str | None = None, *, saver: Any = "thread", statistics: bool = False, **options: Any
) -> CheckpointManager:
    """One that saves in a thread of this process, where faults can be planned, or in a process of its own.

    Statistics are written when nothing else is to do, so they come whenever they like: only who asks for them has them.
    """
    return CheckpointManager(place, saver=saver, statistics=statistics, **options)


# -- dying at a boundary -------------------------------------------------------------------------------------------


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until it has arrived
        signal.pause()


def do_nothing(_: int) -> None:
    """In place of `fsync`."""


class Boundaries:
    """Numbers the system's calls as they are made, by all threads, and dies at one of them, or does something else."""

    def __init__(self, number: int | None, when: When, act: Callable[[], None] = die) -> None:
        self.seen: list[tuple[str, str]] = []
        """Call and path."""
        self._number, self._when, self._act = number, when, act
        self._lock = threading.Lock()

    def install(self) -> None:
        """Of `fsync` only the number matters: what a kernel holds survives the death of a process."""
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
                # Also after a call that was refused, as to remove a directory that is not empty.
                if is_chosen and self._when == "after":
                    self._act()

        return call

    def _next(self, name: str, args: tuple[Any, ...]) -> int:
        """For `link` and `rename` the path is the new one."""
        path = args[1] if name in ("link", "rename") else args[0]
        path = str(Path(f"/proc/self/fd/{path}").readlink()) if isinstance(path, int) else os.fspath(path)
        with self._lock:
            self.seen.append((name, path))
            return len(self.seen) - 1


# -- in the process that saves -------------------------------------------------------------------------------------

IN_SAVER = "STRATA_TEST_IN_SAVER"
"""Environment: JSON of what `act_in_saver` takes."""
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
    """Of a trainer whose saver is to note its calls in `directory`, and at one of them kill itself or the trainer.

    A saver is an interpreter of its own, so the wrapping goes along in a `sitecustomize`.
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
    """Calls that are also written down, so that they outlive the process."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def append(self, call: tuple[str, str]) -> None:
        super().append(call)
        os.write(self._fd, f"{call[0]} {call[1]}\n".encode())


def orphan() -> None:
    """Kills the trainer, and goes on when it is gone."""
    trainer = os.getppid()
    os.kill(trainer, signal.SIGKILL)
    while os.getppid() == trainer:
        time.sleep(0.001)


def save_beside(say: Say, *, place: str, environment: dict[str, str], always: bool = False) -> None:
    """Saves step 2 by a process that something happens to, or (`always`) to every one that is started for it.

    If that fails, step 3 by a sound one.
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
            say(event="failed", kind=type(error).__name__, message=str(error)[:500])
            saved = manager.save(state_of(3), step=3).wait()
        say(event="durable", step=saved.step, id=saved.id)


# -- what children do ----------------------------------------------------------------------------------------------


def save_three(
    say: Say,
    *,
    place: str,
    storage_options: dict[str, Any] | None = None,
    level: str,
    number: int | None = None,
    when: When = "before",
    num_bytes: int = 40_000,
    statistics: bool = False,
) -> None:
    """Saves steps 1, 2 and 3, of which one is kept, and says of each when it is durable; at the end, what it did.

    `level="calls"` numbers the calls of the operating system, `"store"` those of the store.
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
            say(event="durable", step=step, id=saved.id)
            manager.wait()  # until what is too old is gone
            while statistics and not Path(saved.path, "statistics.json").exists():
                time.sleep(0.001)  # else the next save may come first, and there would be none
    calls: list[Any] = boundaries.seen if level == "calls" else [_told(call) for call in store.seen]
    for start in range(0, len(calls), 10):
        say(event="calls", calls=calls[start : start + 10])


def _told(call: Call) -> tuple[int, str, str]:
    return call.number, call.kind, call.key


def write_rounds(say: Say, *, place: str, who: str, num_rounds: int, saver: str, keep_count: int | None) -> None:
    """Saves the same steps as another writer does at the same time."""
    with open_manager(place, saver=saver, keep_count=keep_count) as manager:
        for step in range(1, num_rounds + 1):
            saved = manager.save(state_of(step, who=who), step=step).wait()
            say(event="durable", step=step, id=saved.id)


def save_often(say: Say, *, place: str, saver: str, measured: list[int], num_bytes: int, num_tensors: int) -> None:
    """Says how much this process and its saver hold after some numbers of saves."""
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
                say(event="holds", step=step, **holdings())


def save_large(say: Say, *, place: str, saver: str, num_bytes: int, num_tensors: int) -> None:
    """Waits to be measured before it has a state, then saves three times."""
    with open_manager(place, saver=saver, statistics=True, keep_count=1) as manager:
        manager.save(b"", step=0).wait()  # what there is once for each process is there
        say(event="ready", pid=os.getpid())
        sys.stdin.readline()
        state = {"model": {f"w{n}": np.ones(num_bytes // num_tensors, np.uint8) for n in range(num_tensors)}}
        for step in (1, 2, 3):
            manager.save(state, step=step).wait()
        manager.wait()
        say(event="done", peak_bytes=peak_bytes())


def load_large(say: Say, *, place: str, saver: str) -> None:
    with open_manager(place, saver=saver) as manager:
        manager.list()
        say(event="ready", pid=os.getpid())
        sys.stdin.readline()
        state = manager.load()
        say(event="done", peak_bytes=peak_bytes(), num_bytes=sum(w.nbytes for w in state["model"].values()))


RUNS: dict[str, Callable[..., None]] = {
    run.__name__: run for run in (save_three, save_beside, write_rounds, save_often, save_large, load_large)
}


# -- what a process holds ------------------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def held_bytes(pid: int) -> int:
    """By a process and all below it; what they share counts once.

    The staging memory is the only memory of theirs that has no file and is shared, so the largest share of it is all of
    it. To add up what the kernel attributes to each would count it twice when one of them maps it between two looks.
    """
    total = shared = 0
    for one in family(pid):
        with contextlib.suppress(OSError):  # it has just ended
            told = _kibibytes(Path(f"/proc/{one}/smaps_rollup")) | _kibibytes(Path(f"/proc/{one}/status"))
            total += told["Pss_Anon"] + told["Pss_File"]
            shared = max(shared, told["RssShmem"])
    return (total + shared) * 1_024


def _kibibytes(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) == 3 and line[2] == "kB"}


def is_running(pid: int) -> bool:
    """And not only waiting for somebody to hear how it ended."""
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
    """At this moment: of one that is open for a moment only, the least of many looks does not tell."""
    time.sleep(LOOK_S)
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)  # noqa: PTH208 - names


def peak_bytes() -> int:
    """The most that this process ever held; `getrusage` would also tell what its parent held when it was forked."""
    return _kibibytes(Path("/proc/self/status"))["VmHWM"] * 1_024


# -- the parent ----------------------------------------------------------------------------------------------------


def serve() -> None:
    for line in sys.stdin:
        children = [_forked(order) for order in json.loads(line)]
        ended = []
        for pid, reports in children:
            lines = reports.read().splitlines()  # until it is dead
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
        RUNS[order["run"]](_say_to(writing), **order["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _say_to(fd: int) -> Say:
    def say(**words: Any) -> None:
        line = json.dumps(words).encode() + b"\n"
        assert os.write(fd, line) == len(line)

    return say


class Ended:
    """A child that is gone: how it ended, and what it had reported."""

    def __init__(self, exit_code: int, reports: list[dict[str, Any]]) -> None:
        self.exit_code = exit_code
        """Below 0, the signal that ended it."""
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
        """When all of the last `begin` have ended; they are to end in time, or the test's own limit ends it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the parent has ended:\n{self.log()}"
        return [Ended(**one) for one in json.loads(line)]

    def run(self, run: Callable[..., None], **arguments: Any) -> Ended:
        self.begin(order(run, **arguments))
        return self.end()[0]

    def log(self) -> str:
        """What the children have complained of."""
        self._log.seek(0)
        return self._log.read()[-5_000:]


def order(run: Callable[..., None], **arguments: Any) -> dict[str, Any]:
    return {"run": run.__name__, "arguments": arguments}


@contextlib.contextmanager
def alone(run: Callable[..., None], **arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """One child in an interpreter of its own, for measuring; its reports are lines on its stdout."""
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
    """Looks again and again at what a family of processes holds, and remembers the most."""

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
    RUNS[one["run"]](_say_to(sys.stdout.fileno()), **one["arguments"])


if __name__ == "__main__":
    main(sys.argv[1:])
