"""A Python function as what the workers of a run run. `TrainingOrchestrator.run` hands it over in a file:

    call/function.pkl                 the caller's search path as a line of JSON; then function and arguments, pickled
    call/attempt-000-rank-0.result    what it gave back, pickled
    call/attempt-000-rank-0.error     … or why there is nothing, as text

in the run's directory. Reading a pickle runs what is in it. So these files are read only if nobody but this user can
have written them, and nothing of the kind ever comes over a connection. Both ends are here: a worker runs this module
with the first file's path, the caller writes and reads the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
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
"""Of one rank. More than that belongs into a file, or a checkpoint."""
MAX_PATH_BYTES = 1 << 20
MAX_ERROR_CHARS = 64 << 10
"""Of the end of a traceback."""


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))


# -- the caller's end --------------------------------------------------------------------------------------------------


def write_call(path: Path, call: Call) -> None:
    """
    Raises:
        InvalidArgument: Something of it cannot be pickled; the message says what. LimitExceeded: It is too large.
        ConfigError: cloudpickle is not installed.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    places = [place or str(Path.cwd()) for place in sys.path]
    with _written(path) as file:
        file.write(json.dumps(places).encode() + b"\n")
        try:
            _dump((call.function, call.args, call.kwargs), file, MAX_CALL_BYTES)
        except _TooLarge:
            raise LimitExceeded(
                f"{call.name} and its arguments are more than {MAX_CALL_BYTES >> 20} MiB; put what is large into a "
                "file and hand over its path",
                field="train_fn",
            ) from None
        except _NotPicklable as error:
            raise InvalidArgument(
                f"{_culprit(call)} cannot be handed to workers ({error}); make what belongs to a process, such as open "
                "files, locks and connections, inside the function",
                field="train_fn",
            ) from error.__cause__


def read_result(directory: Path, attempt: int, rank: int) -> Any:
    """What the function gave back on a rank that has ended well.

    Raises:
        RunFailed: Nothing, or nothing that can be read here.
    """
    result, error = _places(directory, attempt, rank)
    if error.exists():
        raise RunFailed(f"rank {rank}: {read_error(directory, attempt, rank)}")
    try:
        with _trusted(result) as file:
            return pickle.load(file)  # noqa: S301 - a file of this user's, see `_trusted`
    except FileNotFoundError:
        raise RunFailed(
            f"rank {rank} ended without a result; the function must return, not end the process by sys.exit() or "
            "os._exit()"
        ) from None
    except ConfigError:
        raise
    except Exception as error:
        raise RunFailed(
            f"what rank {rank} gave back cannot be read here ({type(error).__name__}: {error}); return values whose "
            "types can be imported here, too"
        ) from error


def read_error(directory: Path, attempt: int, rank: int) -> str:
    """The worker's traceback; empty if it left none, as one that was killed."""
    _, error = _places(directory, attempt, rank)
    with contextlib.suppress(FileNotFoundError), _trusted(error) as file:
        return file.read(4 * MAX_ERROR_CHARS).decode(errors="replace").rstrip()
    return ""


# -- the worker's end --------------------------------------------------------------------------------------------------


def main() -> None:
    """Calls the function and keeps its result. A result that cannot be kept is no failure of the worker: to train again
    would change nothing.
    """
    path = Path(sys.argv[1])
    spec = read_environment(os.environ)
    if spec is None:
        raise ConfigError("this module is for the workers of TrainingOrchestrator.run(); call that")
    result, error = _places(path.parent, spec.identity.attempt, spec.identity.rank)
    try:
        call = read_call(path)
        value = call.function(*call.args, **call.kwargs)
    except Exception as raised:
        with contextlib.suppress(FileNotFoundError):  # the directory is not on this machine, as it says then
            _write_error(error, "".join(_shown(raised)))
        raise
    try:
        with _written(result) as file:
            _dump(value, file, MAX_RESULT_BYTES)
    except _TooLarge:
        _write_error(
            error,
            f"what {call.name} gave back is more than {MAX_RESULT_BYTES >> 20} MiB; save it, to a file or with "
            "ctx.checkpoint(), and return where it is",
        )
    except _NotPicklable as refused:
        _write_error(
            error,
            f"what {call.name} gave back, a {type(value).__name__}, cannot be pickled ({refused}); return plain values "
            "and arrays, or save it and return where it is",
        )


def read_call(path: Path) -> Call:
    """The caller's search path becomes ours: what the function imports is found where it was found there.

    Raises:
        ConfigError: It cannot be loaded here, or others can write to it.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} is not on this machine; workers on other machines can run functions only where all of them share "
            "the directory of runs (STRATA_RUNS_DIR)"
        )
    with _trusted(path) as file:
        places = json.loads(file.readline(MAX_PATH_BYTES))
        sys.path[:] = list(dict.fromkeys([*places, *sys.path]))
        try:
            function, args, kwargs = pickle.load(file)  # noqa: S301 - a file of this user's, see `_trusted`
        except Exception as error:
            raise ConfigError(
                f"the function cannot be loaded in a worker ({type(error).__name__}: {error}); what it needs must be "
                "importable there, too"
            ) from error
    return Call(function, args, kwargs)


def _shown(error: BaseException) -> list[str]:
    """Its traceback, beginning with the user's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    return traceback.format_exception(type(error), error, frames)


def _write_error(path: Path, text: str) -> None:
    with _written(path) as file:
        file.write(text[-MAX_ERROR_CHARS:].encode(errors="replace"))


# -- files -------------------------------------------------------------------------------------------------------------


def _places(directory: Path, attempt: int, rank: int) -> tuple[Path, Path]:
    """Of a rank's result and its error. Those of another attempt are others."""
    stem = f"attempt-{attempt:03}-rank-{rank}"
    return directory / f"{stem}.result", directory / f"{stem}.error"


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A new file for this user's eyes only, there as a whole or not at all."""
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _trusted(path: Path) -> Iterator[BinaryIO]:
    """
    Raises:
        ConfigError: Somebody else may have written it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path} is not this user's alone, and reading it would run what is in it; keep runs in a directory of "
                "your own (STRATA_RUNS_DIR), on a file system that keeps owners and modes"
            )
        yield file


# -- pickling ----------------------------------------------------------------------------------------------------------


class _NotPicklable(Exception):
    """With what the object says about it."""


class _TooLarge(Exception):
    pass


class _Bounded:
    """Takes so many bytes and no more, so that what is too large never lies in memory twice."""

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
        import cloudpickle  # noqa: PLC0415 - only who hands over functions needs it
    except ImportError:
        raise ConfigError(
            "functions are handed to workers by cloudpickle, which is not installed; pip install "
            "'strata-runtime[functions]', or put the function into a script for `strata run`"
        ) from None
    try:
        cloudpickle.dump(value, _Bounded(file, max_bytes))
    except (_TooLarge, OSError):
        raise
    except Exception as error:
        raise _NotPicklable(f"{type(error).__name__}: {error}") from error


def _culprit(call: Call) -> str:
    """What of it it is."""
    named = {f"argument {number}": value for number, value in enumerate(call.args, start=1)}
    named |= {f"argument {name!r}": value for name, value in call.kwargs.items()}
    for name, value in named.items():
        with contextlib.suppress(_TooLarge):
            try:
                _dump(value, None, MAX_CALL_BYTES)
            except _NotPicklable:
                return f"{name} of {call.name}, a {type(value).__name__},"
    return f"the function {call.name}, with what it uses of its script,"


if __name__ == "__main__":
    main()
