"""Run a Python function on the workers of a run. `TrainingOrchestrator.run` passes it in files of the run's directory:

    call/function.pkl                 the caller's search path as a line of JSON; then function and arguments, pickled
    call/attempt-000-rank-0.result    its result, pickled
    call/attempt-000-rank-0.error     … or the reason why there is none, as text

Loading a pickle executes code. So these files are read only if no other user can have written them, and pickles never
come over a connection. Both sides are here: a worker runs this module with the path of the first file, the caller
writes that file and reads the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import stat
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from strata.errors import ConfigError, InvalidArgument, LimitExceeded, RunFailed
from strata.launch.environment import read_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

FUNCTION = "function.pkl"
MAX_CALL_BYTES = 64 << 20
MAX_RESULT_BYTES = 64 << 20
"""Largest result of one rank. Larger ones belong into a file or a checkpoint."""
MAX_PATH_BYTES = 1 << 20
MAX_ERROR_CHARS = 64 << 10
"""Characters of a traceback that are kept, from its end."""


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    max_bytes: int = MAX_CALL_BYTES
    """Largest size of the pickled call."""
    preload: tuple[str, ...] = ()
    """Modules that workers will need, beyond those that the function's own file imports."""

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))


# -- the caller's side -------------------------------------------------------------------------------------------------


def write_call(path: Path, call: Call) -> None:
    """
    Raises:
        InvalidArgument: A part cannot be pickled; the message names it.
        LimitExceeded: The call is too large.
        ConfigError: cloudpickle is not installed.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    places = [place or str(Path.cwd()) for place in sys.path]
    with written(path) as file:
        file.write(json.dumps(places).encode() + b"\n")
        try:
            _dump((call.function, call.args, call.kwargs), file, call.max_bytes)
        except _TooLarge:
            raise LimitExceeded(
                f"{call.name} and its arguments exceed {call.max_bytes >> 20} MiB; write large objects to a file and "
                "pass its path",
                field="train_fn",
            ) from None
        except _NotPicklable as error:
            raise InvalidArgument(
                f"{_culprit(call)} cannot be pickled for the workers ({error}); create objects that belong to a "
                "process, such as open files, locks and connections, inside the function",
                field="train_fn",
            ) from error.__cause__


def read_result(directory: Path, attempt: int, rank: int) -> Any:
    """Return the result of a rank that has succeeded.

    Raises:
        RunFailed: It left no result, or one that cannot be read here.
    """
    result, error = _paths(directory, attempt, rank)
    if error.exists():
        raise RunFailed(f"rank {rank}: {read_error(directory, attempt, rank)}")
    try:
        with trusted(result) as file:
            return pickle.load(file)  # noqa: S301 - a file of this user's, see `trusted`
    except FileNotFoundError:
        raise RunFailed(
            f"rank {rank} exited without a result; let the function return instead of calling sys.exit() or os._exit()"
        ) from None
    except ConfigError:
        raise
    except Exception as error:
        raise RunFailed(
            f"cannot read the result of rank {rank} ({type(error).__name__}: {error}); return values whose types the "
            "caller can import"
        ) from error


def read_error(directory: Path, attempt: int, rank: int) -> str:
    """Return the worker's traceback; empty if it left none, for example because it was killed."""
    _, error = _paths(directory, attempt, rank)
    with contextlib.suppress(FileNotFoundError), trusted(error) as file:
        return file.read(4 * MAX_ERROR_CHARS).decode(errors="replace").rstrip()
    return ""


# -- the worker's side -------------------------------------------------------------------------------------------------


def main() -> None:
    """Call the function and store its result. A result that cannot be stored is not a failure of the worker: training
    again would not change it.
    """
    path = Path(sys.argv[1])
    spec = read_environment(os.environ)
    if spec is None:
        raise ConfigError("this module runs in workers only; call TrainingOrchestrator.run()")
    result, error = _paths(path.parent, spec.identity.attempt, spec.identity.rank)
    try:
        call = read_call(path)
        value = call.function(*call.args, **call.kwargs)
    except Exception as raised:
        with contextlib.suppress(FileNotFoundError):  # the directory is not on this machine
            _write_error(error, "".join(_shown(raised)))
        raise
    try:
        with written(result) as file:
            _dump(value, file, MAX_RESULT_BYTES)
    except _TooLarge:
        _write_error(
            error,
            f"the result of {call.name} exceeds {MAX_RESULT_BYTES >> 20} MiB; save it to a file or with "
            "ctx.checkpoint(), and return its path",
        )
    except _NotPicklable as refused:
        _write_error(
            error,
            f"the result of {call.name}, a {type(value).__name__}, cannot be pickled ({refused}); return plain values "
            "and arrays, or save it and return its path",
        )


def read_call(path: Path) -> Call:
    """Load the call, and adopt the caller's search path so that the function's imports are found.

    Raises:
        ConfigError: It cannot be loaded here, or other users can write to it.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} is not on this machine; to run functions on several machines, set STRATA_RUNS_DIR to a directory "
            "that all of them share"
        )
    with trusted(path) as file:
        places = json.loads(file.readline(MAX_PATH_BYTES))
        sys.path[:] = list(dict.fromkeys([*places, *sys.path]))
        try:
            function, args, kwargs = pickle.load(file)  # noqa: S301 - a file of this user's, see `trusted`
        except Exception as error:
            raise ConfigError(
                f"cannot load the function in a worker ({type(error).__name__}: {error}); make its imports available "
                "there"
            ) from error
    return Call(function, args, kwargs)


def _shown(error: BaseException) -> list[str]:
    """Return the traceback, starting with the user's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    return traceback.format_exception(type(error), error, frames)


def _write_error(path: Path, text: str) -> None:
    with written(path) as file:
        file.write(text[-MAX_ERROR_CHARS:].encode(errors="replace"))


# -- files -------------------------------------------------------------------------------------------------------------


def _paths(directory: Path, attempt: int, rank: int) -> tuple[Path, Path]:
    """Return the paths of a rank's result and error in an attempt."""
    stem = f"attempt-{attempt:03}-rank-{rank}"
    return directory / f"{stem}.result", directory / f"{stem}.error"


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Write a file that only this user can read, atomically."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # several machines may write it at once
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def trusted(path: Path) -> Iterator[BinaryIO]:
    """Open a file of this user's.

    Raises:
        ConfigError: Another user may have written it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path} does not belong to this user alone, and loading it would execute its content; set "
                "STRATA_RUNS_DIR to your own directory, on a file system that keeps owners and modes"
            )
        yield file


# -- pickling ----------------------------------------------------------------------------------------------------------


class _NotPicklable(Exception):
    """The message is the pickler's."""


class _TooLarge(Exception):
    pass


class _Bounded:
    """A file with a size limit, so that an object that is too large is never in memory twice."""

    def __init__(self, file: BinaryIO | None, max_bytes: int) -> None:
        self._file = file
        self._left = max_bytes

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        self._left -= num_bytes
        if self._left < 0:
            raise _TooLarge
        if self._file is not None:
            self._file.write(data)
        return num_bytes


def _dump(value: Any, file: BinaryIO | None, max_bytes: int) -> None:
    """
    Raises:
        _TooLarge, _NotPicklable, OSError.
        ConfigError: cloudpickle is not installed.
    """
    try:
        import cloudpickle  # noqa: PLC0415 - optional
    except ImportError:
        raise ConfigError(
            "running a function on workers needs cloudpickle, which is not installed; pip install "
            "'strata-runtime[functions]', or put the function into a script for `strata run`"
        ) from None
    try:
        cloudpickle.dump(value, _Bounded(file, max_bytes))
    except (_TooLarge, OSError):
        raise
    except Exception as error:
        raise _NotPicklable(f"{type(error).__name__}: {error}") from error


def why_not_picklable(value: Any) -> str:
    """Return the pickler's error; empty if the value can be sent to workers."""
    try:
        _dump(value, None, sys.maxsize)
    except _NotPicklable as error:
        return str(error)
    return ""


def _culprit(call: Call) -> str:
    """Name the part of a call that cannot be pickled."""
    named = {f"argument {number}": value for number, value in enumerate(call.args, start=1)}
    named |= {f"argument {name!r}": value for name, value in call.kwargs.items()}
    for name, value in named.items():
        if why_not_picklable(value):
            return f"{name} of {call.name}, a {type(value).__name__},"
    return f"the function {call.name}, with the globals that it uses,"


if __name__ == "__main__":
    main()
