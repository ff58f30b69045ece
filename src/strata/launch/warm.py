"""The process that workers are forked from, and what a worker does until the first line of its script.

Importing torch takes seconds, a fork milliseconds. So `local.LocalWorkers` starts this program once, with a socket and
the names of modules; it imports them, and then forks a worker for every order that comes. What follows from that:

- It has one thread when it forks, for a fork takes no other along, only the locks that they hold.
- A worker is like a new interpreter: nothing of this process is left in it but what is imported.
- It watches its workers and tells of their ends. When the agent is gone, the socket closes, and they all go.

It is run by its path and needs nothing but the standard library, so that a worker's search path is just Python's own.
The agent's end uses the messages that are defined here.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
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
import types
from importlib.machinery import SourceFileLoader
from io import open_code
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

MAX_MESSAGE_BYTES = 32 << 10
MAX_ORDER_BYTES = 16 << 20
"""Linux has less room for the arguments and the environment of a program."""
_MAX_PASSED_OVER = 20
_MAX_REASON = 200
_PR_SET_PDEATHSIG = 1
_BLAS_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)


# -- what is said ------------------------------------------------------------------------------------------------------


class Order(NamedTuple):
    """A worker to start. Too large for a message: it comes in a file of its own, beside the descriptor of the log."""

    rank: int
    script: str
    arguments: list[str]
    is_module: bool
    directory: str
    variables: dict[str, str]


class Ready(NamedTuple):
    """Everything is imported, as far as it can be."""

    passed_over: list[str]
    """Modules that cannot be imported, and why."""
    threads_of: str
    """The first module after which there was more than one thread; it must not be forked then."""


class Started(NamedTuple):
    """The answer to an order."""

    pid: int


class NotStarted(NamedTuple):
    """The other answer to an order."""

    reason: str


class Exited(NamedTuple):
    """Of a worker that was started; what was in its process group has been killed."""

    pid: int
    code: int
    """Below 0: the signal that ended it."""


FromWarm = Ready | Started | NotStarted | Exited
_KINDS: dict[str, type[FromWarm]] = {kind.__name__: kind for kind in (Ready, Started, NotStarted, Exited)}


def encode(message: FromWarm) -> bytes:
    return json.dumps([type(message).__name__, *message]).encode("ascii")


def decode(data: bytes) -> FromWarm:
    kind, *values = json.loads(data)
    return _KINDS[kind](*values)


def encode_order(order: Order) -> bytes:
    """Python's own JSON takes what cannot be said in UTF-8: names of files and variables may be any bytes."""
    return json.dumps(order).encode("ascii")


# -- the warm process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Goes on in every worker, where it runs the script; never returns in the process that forks them."""
    die_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    gc.disable()  # imports make much and drop little: looking for garbage in it is a quarter of torch's time
    ready = _preload(sys.argv[2:])
    gc.enable()
    gc.collect()
    gc.freeze()  # in the workers, too: what is there now stays, and to look at it again would copy all its pages
    warm = _Warm(link)
    warm.say(ready)
    order = warm.serve()
    _settle(order)
    _run(order)


def _preload(names: Iterable[str]) -> Ready:
    passed_over = []
    threads_of = ""
    for name in names:
        try:
            _import(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the script meets it too, and says it better
            passed_over.append(f"{name}: {type(error).__name__}: {error}"[:_MAX_REASON])
        if not threads_of and len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - of threads, not of files
            threads_of = name[:_MAX_REASON]
    return Ready(passed_over[:_MAX_PASSED_OVER], threads_of)


def _import(name: str) -> None:
    """A module; or `module:name`, of a module that imports what stands behind a name when it is looked up."""
    module, _, attribute = name.partition(":")
    imported = importlib.import_module(module)
    if attribute:
        getattr(imported, attribute)


def die_with_parent(number: signal.Signals) -> None:
    """Linux sends this signal when the thread that has started us ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


class _Warm:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._agent = os.getppid()
        self._children: set[int] = set()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the pipe tells of it

    def say(self, message: FromWarm) -> None:
        with contextlib.suppress(OSError):  # nobody is there: reading finds that out, too
            self._link.send(encode(message))

    def serve(self) -> Order:
        """Returns in workers only."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake in ready:
                # One that was sent to everybody, as at a shutdown, is the agent's business: the workers save first.
                if signal.SIGTERM in os.read(self._wake, 4096) and os.getppid() != self._agent:
                    self._end()
                self._tell_of_exits()
            if self._link.fileno() in ready:
                order = self._hear()
                if order is not None:
                    return order

    def _hear(self) -> Order | None:
        try:
            _, files, _, _ = socket.recv_fds(self._link, 1, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            files = []
        if len(files) != 2:
            self._end()
        order_file, log = files
        order = Order(*json.loads(os.pread(order_file, MAX_ORDER_BYTES, 0)))
        os.close(order_file)
        warm_pid = os.getpid()
        # a signal that is meant for the worker must not find our handlers there
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            self._go_on(log)
            self.say(NotStarted(f"{error}; see the limits of processes and memory (ulimit -u, the container's)"))
            return None
        if pid == 0:
            self._leave(warm_pid, log)
            return order
        self._children.add(pid)
        self._go_on(log)
        self.say(Started(pid))
        return None

    def _go_on(self, log: int) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.close(log)

    def _leave(self, warm_pid: int, log: int) -> None:
        """The child parts with everything of this process, and has a session, an output and signals of its own."""
        die_with_parent(signal.SIGKILL)
        if os.getppid() != warm_pid:  # it had gone before it could be said
            os._exit(1)
        os.setsid()
        self._link.close()
        signal.set_wakeup_fd(-1)
        for fd in (self._wake, self._waker):
            os.close(fd)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _tell_of_exits(self) -> None:
        while self._children:
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is None:
                return
            pid = exited.si_pid
            if pid in self._children:
                kill_group(pid)  # as long as the worker is not waited for, the number is its own
            _, status = os.waitpid(pid, 0)
            if pid in self._children:
                self._children.discard(pid)
                self.say(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> NoReturn:
        """With all workers, and not before they have gone."""
        for pid in self._children:
            kill_group(pid)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        os._exit(0)  # there is nothing to clean up, and taking down what was imported takes time


def kill_group(pid: int) -> None:
    """A worker with everything in its process group; it may have been forked a moment ago, and not lead one yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- a worker ----------------------------------------------------------------------------------------------------------


def _settle(order: Order) -> None:
    """All that a new interpreter would find or do itself."""
    before, path_before = dict(os.environ), _python_path(os.environ)
    try:
        os.chdir(order.directory)
    except OSError as error:
        sys.exit(f"strata: the worker cannot run in its directory: {error}")
    os.environ.clear()
    os.environ.update(order.variables)
    path = _python_path(os.environ)
    if path != path_before and sys.path[: len(path_before)] == path_before:
        sys.path[:] = dict.fromkeys([*path, *sys.path[len(path_before) :]])
    _set_num_threads(before, order.variables)
    if "numpy.random" in sys.modules:  # Python's own generator does so itself
        sys.modules["numpy.random"].seed()


def _python_path(variables: Mapping[str, str]) -> list[str]:
    """What `PYTHONPATH` puts before everything else, in a process that is started here."""
    text = variables.get("PYTHONPATH", "")
    paths = [os.path.abspath(entry) for entry in text.split(os.pathsep)] if text else []  # noqa: PTH100 - links stay
    return list(dict.fromkeys(paths))


def _set_num_threads(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Libraries read this when they are loaded, which was in another environment; and OpenBLAS was kept from starting
    threads then.
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
    """The first of what may be a list, one for each level of nesting; 0 if there is none."""
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() else 0


def _run(order: Order) -> None:
    """As `python script.py` or `python -m module` does, in a `__main__` that is the script's own to the very end: its
    classes can be pickled, and threads that go on after its last line find it.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    how = ["-m", order.script] if order.is_module else [order.script]
    sys.orig_argv = [sys.executable, *how, *order.arguments]
    sys.argv = [how[0], *order.arguments]
    try:
        if order.is_module:
            sys.path.insert(0, str(Path.cwd()))
            _run_module(order.script, alter_argv=True)
        elif pkgutil.get_importer(order.script) is not None:  # a directory or archive with a `__main__.py`
            sys.path.insert(0, str(Path.cwd() / order.script))
            _run_module("__main__", alter_argv=False)
        else:
            sys.path.insert(0, str(Path(order.script).resolve().parent))
            _run_file(str(Path.cwd() / order.script), main.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0):  # what is called at exit can tell a failure by it, as after any other exception
            sys.last_value = error
        raise
    except BaseException as error:
        _hide_our_frames(error)
        raise


def _run_module(name: str, *, alter_argv: bool) -> None:
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # it is what Python itself calls


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
    """From the traceback that Python shows at its end, by the hook that the script may have set."""
    ours = {each.__code__.co_filename for each in (_run, runpy.run_path)}
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    hook = sys.excepthook
    sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(traceback), traceback)


if __name__ == "__main__":
    main()
