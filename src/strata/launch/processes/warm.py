"""The warm process, which forks workers, and what a worker does until the first line of its script.

Importing torch takes seconds, a fork takes milliseconds. So `local.LocalWorkers` starts this program once, with a
socket
and the names of modules. It imports them, and then forks a worker for every order. Consequences:

- It has one thread when it forks: a fork copies no other thread, only the locks that they hold.
- A worker is like a new interpreter: it keeps nothing of this process but the imported modules.
- It watches its workers and reports their exits. When the agent dies, the socket closes, and all of them exit.
- It copies their output from a pipe to their logs, which it rotates. No worker writes into a pipe without a reader,
  because it dies with this process.
- It adopts orphaned descendants of workers, and kills them after the last worker has exited.

It is started by its path and uses only the standard library, so that a worker's search path is Python's default. The
agent's side uses the messages that are defined here.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import time
import types
import warnings
from importlib.machinery import SourceFileLoader
from io import open_code
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from types import TracebackType

MAX_MESSAGE_BYTES = 32 << 10
MAX_ORDER_BYTES = 16 << 20
"""More than Linux allows for the arguments and environment of a program."""
PREVIOUS = ".1"
"""Suffix of the older half of a log."""
OUTLIVES = "STRATA_OUTLIVES_WORKER"
"""Variable of processes that may outlive the worker that started them, such as a saver."""
TITLE_BYTES = 160
"""Bytes for the title of a process in `ps`."""
STRAY_GRACE_S = 3.0
"""Time from SIGTERM to SIGKILL for descendants that have left their worker's process group."""
SWEEP_S = 0.2
"""Time from the exit of the last worker to the search for them: the next attempt starts first."""
_MAX_SKIPPED = 20
_MAX_REASON = 200
_MAX_UNWRITTEN = 4 << 10
_BLOCK_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
_BLAS_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)


# -- messages ----------------------------------------------------------------------------------------------------------


class Order(NamedTuple):
    """The order to start a worker. It is too large for a message and comes in a file, with the log's descriptor."""

    rank: int
    title: str
    """Title in `ps`."""
    log: str
    """Absolute path."""
    log_bytes: int
    """Limit for the log and its older half together; 0: no limit."""
    script: str
    arguments: list[str]
    is_module: bool
    directory: str
    variables: dict[str, str]


class Ready(NamedTuple):
    """The modules are imported."""

    skipped: list[str]
    """Modules that cannot be imported, and the reasons."""
    threads_of: str
    """First module that started a thread; the process must not fork then."""


class Started(NamedTuple):
    """Answer to an order: the worker runs."""

    pid: int


class NotStarted(NamedTuple):
    """Answer to an order: the worker could not be started."""

    reason: str


class Exited(NamedTuple):
    """A worker has exited, and its process group was killed."""

    pid: int
    code: int
    """Below 0: the signal that ended the process."""
    unwritten: str
    """End of the output that could not be written to the log, for example on a full disk."""


FromWarm = Ready | Started | NotStarted | Exited
_KINDS: dict[str, type[FromWarm]] = {kind.__name__: kind for kind in (Ready, Started, NotStarted, Exited)}


def encode(message: FromWarm) -> bytes:
    return json.dumps([type(message).__name__, *message]).encode("ascii")


def decode(data: bytes) -> FromWarm:
    kind, *values = json.loads(data)
    return _KINDS[kind](*values)


def encode_order(order: Order) -> bytes:
    """Encode an order. Python's JSON supports surrogates: names of files and variables may be any bytes."""
    return json.dumps(order).encode("ascii")


# -- the warm process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve orders. Continue in every worker and run its script; never return in the warm process."""
    die_with_parent(signal.SIGTERM)
    show_title("strata: forks the workers of a run")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    gc.disable()  # imports create little garbage: looking for it takes a quarter of torch's import time
    ready = _preload(sys.argv[3:])
    gc.enable()
    gc.collect()
    gc.freeze()  # for the workers: scanning these objects again would copy all their pages
    warm = _Warm(link)
    warm.send(ready)
    order = warm.serve()
    show_title(order.title)
    _settle(order)
    run_script(order.script, order.arguments, is_module=order.is_module)


def _preload(names: Iterable[str]) -> Ready:
    skipped = []
    threads_of = ""
    for name in names:
        try:
            _import(name)
        except Exception as error:  # noqa: BLE001 - the script raises it again, with a better traceback
            skipped.append(f"{name}: {type(error).__name__}: {error}"[:_MAX_REASON])
        if not threads_of and len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - threads, not files
            threads_of = name[:_MAX_REASON]
    return Ready(skipped[:_MAX_SKIPPED], threads_of)


def _import(name: str) -> None:
    """Import a module, or look up `module:name` in a module that imports lazily."""
    module, _, attribute = name.partition(":")
    imported = importlib.import_module(module)
    if attribute:
        getattr(imported, attribute)


def die_with_parent(number: signal.Signals) -> None:
    """Let Linux send this signal when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def show_title(text: str) -> None:
    """Show this text in `ps` instead of the command line, by overwriting the memory of the latter; Python has a copy.
    Do nothing if the location of that memory is not certain.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        shown = Path("/proc/self/cmdline").read_bytes()
        if 0 < start < end and len(shown) == end - start and ctypes.string_at(start, len(shown)) == shown:
            title = text.encode("utf-8", "replace")[: len(shown) - 1]
            ctypes.memmove(start, title.ljust(len(shown), b"\0"), len(shown))


class _Log:
    """Copies a worker's output from its pipe to its log, of which it keeps the newest part."""

    def __init__(self, pipe: int, file: int, path: str, max_bytes: int) -> None:
        self.unwritten = b""
        """End of what could not be written since the last successful write."""
        self._pipe = pipe
        self._file = file
        self._path = path
        self._half_bytes = max_bytes // 2
        self._size = os.fstat(file).st_size
        self._num_lost = 0

    def pump(self) -> int | None:
        """Copy a block; return its size, or None if no process can write any more."""
        try:
            data = os.read(self._pipe, _BLOCK_BYTES)
        except BlockingIOError:
            return 0
        num_bytes = len(data)
        while self._half_bytes and len(data) > (room := self._half_bytes - self._size):
            end = data.rfind(b"\n", 0, max(room, 0)) + 1  # the end of a line, if there is one
            end = end or (self._half_bytes if self._size == 0 else 0)
            self._write(data[:end])
            self._rotate()
            data = data[end:]
        self._write(data)
        return num_bytes or None

    def drain(self) -> None:
        """Copy everything that a worker wrote before it exited, even while others write to its pipe."""
        for _ in range(2 * _PIPE_BYTES // _BLOCK_BYTES):
            if self._pipe < 0 or not self.pump():
                return

    def close(self) -> None:
        os.close(self._pipe)
        os.close(self._file)
        self._pipe = -1

    def _rotate(self) -> None:
        try:
            os.replace(self._path, self._path + PREVIOUS)  # noqa: PTH105
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # truncate it instead
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        else:
            os.close(self._file)
            self._file = file
        self._size = 0

    def _write(self, data: bytes) -> None:
        """Write to the log. On a full disk, count the lost bytes, and report them once a write succeeds."""
        left = b"\n[strata: %d bytes could not be written here]\n" % self._num_lost if data and self._num_lost else b""
        left += data
        try:
            while left:
                num_bytes = os.write(self._file, left)
                self._size += num_bytes
                left = left[num_bytes:]
                if len(left) <= len(data):
                    self._num_lost, self.unwritten = 0, b""
        except OSError:
            lost = left[-len(data) :]
            self._num_lost += len(lost)
            self.unwritten = (self.unwritten + lost)[-_MAX_UNWRITTEN:]


class _Warm:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._agent = os.getppid()
        self._children: dict[int, _Log] = {}
        """Logs of running workers, by process id."""
        self._logs: dict[int, _Log] = {}
        """Logs by pipe, until no process writes to it."""
        self._sweeps: list[tuple[float, float, signal.Signals]] = []
        """When to send which signal to strays that started before a time after the boot: (due, before, signal)."""
        self._poll = select.poll()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the pipe reports it
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def send(self, message: FromWarm) -> None:
        with contextlib.suppress(OSError):  # the agent is gone, which the next read notices
            self._link.send(encode(message))

    def serve(self) -> Order:
        """Serve orders; return in workers only."""
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._pause_ms())}
            if self._wake in ready:
                # The agent handles a SIGTERM to all processes, as at a shutdown: the workers save first.
                if signal.SIGTERM in os.read(self._wake, 4096) and os.getppid() != self._agent:
                    self._end()
                self._report_exits()
            for pipe in ready & self._logs.keys():
                if self._logs[pipe].pump() is None:
                    self._poll.unregister(pipe)
                    self._logs.pop(pipe).close()
            self._sweep()
            if self._link.fileno() in ready:
                order = self._receive()
                if order is not None:
                    return order

    def _receive(self) -> Order | None:
        try:
            _, files, _, _ = socket.recv_fds(self._link, 1, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            files = []
        if len(files) != 2:
            self._end()
        order_file, log_file = files
        order = Order(*json.loads(os.pread(order_file, MAX_ORDER_BYTES, 0)))
        os.close(order_file)
        pipe, output = _pipe()
        warm_pid = os.getpid()
        # a signal for the worker must not run our handlers there
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        log = _Log(pipe, log_file, order.log, order.log_bytes)
        try:
            pid = os.fork()
        except OSError as error:
            self._continue(output)
            log.close()
            self.send(NotStarted(f"{error}; check the limits on processes and memory (ulimit -u, the container's)"))
            return None
        if pid == 0:
            log.close()
            self._leave(warm_pid, output)
            return order
        self._children[pid] = self._logs[pipe] = log
        self._poll.register(pipe, select.POLLIN)
        self._continue(output)
        self.send(Started(pid))
        return None

    def _continue(self, output: int) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.close(output)

    def _leave(self, warm_pid: int, output: int) -> None:
        """Drop everything of this process in the child, and give it its own session, output and signals."""
        die_with_parent(signal.SIGKILL)
        if os.getppid() != warm_pid:  # the parent died before the call above
            os._exit(1)
        os.setsid()
        self._link.close()
        for log in self._logs.values():
            log.close()
        signal.set_wakeup_fd(-1)
        for fd in (self._wake, self._waker):
            os.close(fd)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _report_exits(self) -> None:
        """Report exits of workers, and reap adopted processes, which would otherwise stay zombies."""
        while (pid := _exited()) is not None:
            if pid in self._children:
                kill_group(pid)  # before the worker is reaped, its process id is not reused
            _, status = os.waitpid(pid, 0)
            if pid in self._children:
                log = self._children.pop(pid)
                log.drain()
                unwritten = log.unwritten.decode("utf-8", "replace")
                self.send(Exited(pid, os.waitstatus_to_exitcode(status), unwritten))
                if not self._children:
                    now_s, boot_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
                    self._sweeps += [
                        (now_s + SWEEP_S, boot_s, signal.SIGTERM),
                        (now_s + SWEEP_S + STRAY_GRACE_S, boot_s, signal.SIGKILL),
                    ]

    def _pause_ms(self) -> float | None:
        if not self._sweeps:
            return None
        return max(min(due_s for due_s, _, _ in self._sweeps) - time.monotonic(), 0.0) * 1_000 + 1

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for due_s, before_s, number in [sweep for sweep in self._sweeps if sweep[0] <= now_s]:
            self._sweeps.remove((due_s, before_s, number))
            _send_all(strays(self._children, before_s), number)

    def _end(self) -> NoReturn:
        """Kill all workers and their descendants, except savers; exit once they are gone."""
        for pid in self._children:
            kill_group(pid)
        for pid, log in self._children.items():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            log.drain()
        for number in (signal.SIGTERM, signal.SIGKILL):
            end_s = time.monotonic() + STRAY_GRACE_S
            _send_all(strays((), float("inf")), number)
            while (left := strays((), float("inf"))) and time.monotonic() < end_s:
                if number is signal.SIGKILL:
                    _send_all(left, number)  # including those forked in the meantime
                time.sleep(_POLL_S)
        os._exit(0)  # nothing to clean up, and tearing down modules takes time


def _pipe() -> tuple[int, int]:
    """Return a pipe: the non-blocking end to read from, and the end to write to."""
    pipe, output = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(pipe, False)
    with contextlib.suppress(OSError):  # a limit applies to all pipes of a user
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return pipe, output


def _exited() -> int | None:
    """Return the process id of a child that has exited and was not reaped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def strays(workers: Collection[int], before_s: float) -> set[int]:
    """Return adopted descendants of this process, outside of running workers, that started before a time (in seconds
    after the boot) and may not outlive their worker; and their own descendants.
    """
    children: dict[int, list[tuple[int, float]]] = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append((int(path.parent.name), int(fields[19]) * tick_s))
    found: set[int] = set()
    todo = [pid for pid, began_s in children.get(os.getpid(), ()) if pid not in workers and began_s <= before_s]
    while todo:
        pid = todo.pop()
        if not _outlives(pid):
            found.add(pid)
            todo += [child for child, _ in children.get(pid, ())]
    return found


def _outlives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return f"{OUTLIVES}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _send_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(pid: int) -> None:
    """Kill a worker with its process group; it may have been forked a moment ago and not lead a group yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- a worker ----------------------------------------------------------------------------------------------------------


def _settle(order: Order) -> None:
    """Set up what a new interpreter would have: directory, environment, search path, threads, seeds."""
    before, path_before = dict(os.environ), _python_path(os.environ)
    try:
        os.chdir(order.directory)
    except OSError as error:
        sys.exit(f"strata: cannot enter the working directory: {error}")
    os.environ.clear()
    os.environ.update(order.variables)
    path = _python_path(os.environ)
    if path != path_before and sys.path[: len(path_before)] == path_before:
        sys.path[:] = dict.fromkeys([*path, *sys.path[len(path_before) :]])
    _set_num_threads(before, order.variables)
    if "numpy.random" in sys.modules:  # Python's own generator reseeds itself
        sys.modules["numpy.random"].seed()


def _python_path(variables: Mapping[str, str]) -> list[str]:
    """Return the entries that `PYTHONPATH` adds to the search path in this directory."""
    text = variables.get("PYTHONPATH", "")
    paths = [os.path.abspath(entry) for entry in text.split(os.pathsep)] if text else []  # noqa: PTH100 - links stay
    return list(dict.fromkeys(paths))


def _set_num_threads(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Apply the worker's numbers of threads: libraries were loaded in another environment, with a single-threaded
    OpenBLAS.
    """
    num_threads = _number(after.get("OMP_NUM_THREADS"))
    if "torch" in sys.modules and num_threads and num_threads != _number(before.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(num_threads)
    if "numpy" in sys.modules:
        num_threads = _number(after.get("OPENBLAS_NUM_THREADS")) or num_threads or len(os.sched_getaffinity(0))
        if num_threads != _number(before.get("OPENBLAS_NUM_THREADS")):
            _set_blas_threads(num_threads)


def _set_blas_threads(num_threads: int) -> None:
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "openblas" in line}
    for path in paths:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _BLAS_SETTERS:
                if hasattr(library, name):
                    getattr(library, name)(num_threads)


def _number(text: str | None) -> int:
    """Return the first number of a list, which has one per level of nesting; 0 if there is none."""
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() else 0


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run the script as `python script.py` or `python -m module` does, in its own `__main__`: its classes can be
    pickled, and threads that continue after its last line find it.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    how = ["-m", script] if is_module else [script]
    sys.orig_argv = [sys.executable, *how, *arguments]
    sys.argv = [how[0], *arguments]
    try:
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            _run_module(script, alter_argv=True)
        elif pkgutil.get_importer(script) is not None:  # a directory or archive with a `__main__.py`
            sys.path.insert(0, str(Path.cwd() / script))
            _run_module("__main__", alter_argv=False)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            _run_file(str(Path.cwd() / script), main.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):  # exit hooks recognize a failure by it, as after any other exception
            sys.last_value = error
        raise
    except BaseException as error:
        _hide_our_frames(error)
        raise


def _run_module(name: str, *, alter_argv: bool) -> None:
    # Importing ahead may import the module itself; it runs once more as __main__, as it would without.
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of package", RuntimeWarning)
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # what Python itself calls


def _run_file(path: str, names: dict[str, Any]) -> None:
    try:
        with open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec", dont_inherit=True), names)  # noqa: S102 - the user's own script


def _hide_our_frames(error: BaseException) -> None:
    """Remove our frames from the traceback that Python prints, with the hook that the script may have set."""
    ours = {each.__code__.co_filename for each in (run_script, runpy.run_path)}
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    hook = sys.excepthook
    sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(traceback), traceback)


if __name__ == "__main__":
    main()
