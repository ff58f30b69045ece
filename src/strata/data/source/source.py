"""Where files are: a pyarrow file system, with failures told in our words and bytes counted.

pyarrow reports most of what object stores say as a plain `OSError` with a long text. What the text means is decided
here, once, from messages that the real servers gave.
"""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa
import pyarrow.fs as pafs

from strata.data.pyarrow_private import s3_with_retries
from strata.errors import DataFileMissing, StorageDenied, StorageError, StorageUnavailable
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Answer = TypeVar("Answer")

TIMEOUT_S = 60.0
_DENIED = re.compile(
    r"ACCESS_DENIED|SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY|EXPIRED_TOKEN|INVALID_TOKEN|TOKEN_REFRESH_REQUIRED"
    r"|UNRECOGNIZED_CLIENT|INVALID_SIGNATURE|MISSING_AUTHENTICATION_TOKEN|REQUEST_TIME_TOO_SKEWED|NOT_SIGNED_UP"
    r"|PERMISSION_DENIED|UNAUTHENTICATED|Authoriz?ationFailure|Authoriz?ationPermissionMismatch|AuthenticationFailed"
    r"|Failed to get token|CredentialUnavailable|\bHTTP status(?: code)?:? 40[13]\b|\] 40[13] "
)
_MISSING = re.compile(
    r"NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|NOT_FOUND:|No such file or directory|Path does not exist"
    r"|BlobNotFound|ContainerNotFound|\bHTTP status(?: code)?:? 404\b|\] 404 "
)
_AWAY = re.compile(
    r"NETWORK_CONNECTION|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|curlCode: \d+"
    r"|UNAVAILABLE:|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CURL error|Could not connect|Could not resolve"
    r"|get a new connection|Connection (?:refused|reset|closed|timed out)|Timeout was reached|timed out"
    r"|\bHTTP status(?: code)?:? (?:408|429|5\d\d)\b|\] (?:408|429|5\d\d) "
)
_QUOTED = re.compile(r"'[^']*'")
"""Names of files, which may hold any words."""
_SECRET = re.compile(r"(?i)\b(sig|signature|x-amz-[a-z-]+|token|secret|password|key)=[^&\s'\"]+")
_USER = re.compile(r"://[^/@\s]*@")
"""A name, and perhaps a password, in a URL."""
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class DataFile:
    path: str
    """As its file system knows it."""
    name: str
    """Relative to where the search began: what people read, and what stays the same when a dataset is moved."""
    size_bytes: int
    mtime_ns: int
    """With the size: whether what a cache knows of the file still holds. Not part of a dataset's fingerprint."""
    partition: tuple[tuple[str, str | None], ...] = ()
    """Hive partition keys and values, unquoted, as they stand in the path; None is the null partition."""


class ByteCounter:
    """Counts for several threads. In another process it begins anew: that process counts its own."""

    __slots__ = ("_lock", "_total")

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())
        self._total = 0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._total += num_bytes

    @property
    def total(self) -> int:
        return self._total

    def __reduce__(self) -> tuple[type[ByteCounter], tuple[()]]:
        return ByteCounter, ()


@dataclass(frozen=True, slots=True)
class Source:
    """A file system to read from. Can be used by several threads at once, and pickled."""

    filesystem: pafs.FileSystem
    is_local: bool
    """Whether reading costs no round trip: then nothing is fetched ahead."""
    timeout_s: float = TIMEOUT_S
    """For a question about one file, where the client library itself would wait for ever."""
    max_attempts: int | None = None
    """Of S3's requests, which pyarrow forgets when it pickles its file system."""
    counter: ByteCounter = field(default_factory=ByteCounter, compare=False, repr=False)
    """What `read`, `read_tail` and `open_counted` read, and what readers add that read through `open`."""

    @property
    def costs_trips(self) -> bool:
        """Whether each read is a request, so that few and large ones are better; not so for what has been fetched."""
        return not self.is_local

    def open(self, file: DataFile) -> pa.NativeFile:
        """For reading anywhere in it, without a detour through Python: who reads adds to the counter."""
        with reaching(file.name):
            return self.filesystem.open_input_file(file.path)

    def open_counted(self, file: DataFile, counter: ByteCounter | None = None) -> pa.PythonFile:
        """The same, and every byte that is asked for is counted, here and in `counter`.

        Each read takes the interpreter's lock for a moment: for where exact figures matter more than speed.
        """
        counters = [self.counter] if counter is None else [self.counter, counter]
        return pa.PythonFile(_Counted(self.open(file), counters), mode="r")

    def read(self, file: DataFile, offset: int, num_bytes: int) -> pa.Buffer:
        """These bytes, or fewer where the file ends."""
        with self.open(file) as opened, reaching(file.name):
            found = _read_at(opened, offset, num_bytes)
        self.counter.add(found.size)
        return found

    def read_tail(self, file: DataFile, num_bytes: int) -> pa.Buffer:
        """The last bytes of the file."""
        first = max(0, file.size_bytes - num_bytes)
        return self.read(file, first, file.size_bytes - first)

    def info(self, path: str, name: str = "") -> pafs.FileInfo:
        """What is at this path, of type NotFound if nothing is. `name`: what errors call it.

        Raises:
            StorageUnavailable: Nobody answers in time.
            StorageDenied, StorageError: As for `reaching`.
        """
        with reaching(name or path):
            if self.is_local:
                return self.filesystem.get_file_info(path)
            return _within(self.timeout_s, lambda: self.filesystem.get_file_info(path))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.filesystem, self.is_local, self.timeout_s, self.max_attempts)


@contextlib.contextmanager
def reaching(name: str) -> Iterator[None]:
    """Turns what file systems raise into ours.

    Raises:
        DataFileMissing, StorageDenied, StorageUnavailable, StorageError: As their names say.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise translated(error, name) from error


def translated(error: OSError, name: str) -> DataFileMissing | StorageError:
    """What a file system meant."""
    said = _QUOTED.sub("", str(error))
    name, text = without_secrets(name), without_secrets(str(error))
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    if isinstance(error, PermissionError) or _DENIED.search(said):
        return StorageDenied(f"{name} may not be read: {text}; check its permissions, or the credentials")
    if isinstance(error, FileNotFoundError):
        return DataFileMissing(f"{name} is gone: {text}")
    if isinstance(error, (TimeoutError, ConnectionError)) or _AWAY.search(said):
        return StorageUnavailable(f"{name} cannot be reached: {text}; check the endpoint, the network and the proxy")
    if _MISSING.search(said):
        return DataFileMissing(f"{name} is gone: {text}")
    return StorageError(f"{name} cannot be read: {text}")


def without_secrets(text: str) -> str:
    """As it may be told: URLs without users and passwords, without signatures and tokens."""
    return _SECRET.sub(r"\1=…", _USER.sub("://", text))


class _Counted:
    """A file for `pa.PythonFile`: passes buffers through without copying them."""

    def __init__(self, file: pa.NativeFile, counters: list[ByteCounter]) -> None:
        self._file = file
        self._counters = counters
        self.closed = False

    def read(self, num_bytes: int = -1) -> pa.Buffer:
        found = self._file.read_buffer(None if num_bytes < 0 else num_bytes)
        for counter in self._counters:
            counter.add(found.size)
        return found

    read_buffer = read

    def seek(self, position: int, whence: int = 0) -> int:
        return cast("int", self._file.seek(position, whence))

    def tell(self) -> int:
        return cast("int", self._file.tell())

    def size(self) -> int:
        return cast("int", self._file.size())

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._file.close()


def _read_at(opened: pa.NativeFile, offset: int, num_bytes: int) -> pa.Buffer:
    """As a buffer: `NativeFile.read_at` would copy it once more, into bytes."""
    size = opened.size()
    if offset >= size:
        return pa.py_buffer(b"")
    opened.seek(offset)
    return opened.read_buffer(min(num_bytes, size - offset))


def _within(deadline_s: float, call: Callable[[], Answer]) -> Answer:
    """Asks in a thread of its own, which is left behind if there is no answer: a native call cannot be stopped."""
    answer: list[Answer] = []
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            failure.append(error)

    thread = threading.Thread(target=ask, name="strata-info", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"no answer within {deadline_s:g} s")
    return answer[0]


def _rebuild(filesystem: pafs.FileSystem, is_local: bool, timeout_s: float, max_attempts: int | None) -> Source:
    if max_attempts is not None:
        filesystem = s3_with_retries(filesystem, max_attempts)
    return Source(filesystem, is_local, timeout_s, max_attempts)
