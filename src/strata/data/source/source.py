"""`Source`, the file system that a dataset is read from, and `DataFile`, one file in it.

A source wraps a pyarrow file system, counts bytes and translates errors. pyarrow reports most errors of object stores
as a plain `OSError` with a long text; the patterns here classify that text and were collected from real servers.
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
_UNAVAILABLE = re.compile(
    r"NETWORK_CONNECTION|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|curlCode: \d+"
    r"|UNAVAILABLE:|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CURL error|Could not connect|Could not resolve"
    r"|get a new connection|Connection (?:refused|reset|closed|timed out)|Timeout was reached|timed out"
    r"|\bHTTP status(?: code)?:? (?:408|429|5\d\d)\b|\] (?:408|429|5\d\d) "
)
_QUOTED = re.compile(r"'[^']*'")
"""File names, which may contain any word."""
_SECRET = re.compile(r"(?i)\b(sig|signature|x-amz-[a-z-]+|token|secret|password|key)=[^&\s'\"]+")
_USER = re.compile(r"://[^/@\s]*@")
"""A user name, and perhaps a password, in a URL."""
_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a dataset, before its contents are read."""

    path: str
    """The path in its file system."""
    name: str
    """The path relative to the root of the search. It is shown to users, and it survives moving the dataset."""
    size_bytes: int
    mtime_ns: int
    """With the size, decides whether a cache entry is still valid. Not part of a dataset's fingerprint."""
    partition: tuple[tuple[str, str | None], ...] = ()
    """Hive partition keys and values from the path, percent-decoded; None is the null partition."""


class ByteCounter:
    """A thread-safe counter. It starts at 0 in another process, which counts its own bytes."""

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
    """A file system to read from. Thread-safe and picklable."""

    filesystem: pafs.FileSystem
    is_local: bool
    """Whether reads cost no round trip, so that prefetching gains nothing."""
    timeout_s: float = TIMEOUT_S
    """The deadline for metadata of one file, where the client library would wait forever."""
    max_attempts: int | None = None
    """Attempts per S3 request; pyarrow loses this setting when it pickles its file system."""
    counter: ByteCounter = field(default_factory=ByteCounter, compare=False, repr=False)
    """Counts the bytes of `read`, `read_tail` and `open_counted`. Readers that use `open` add theirs."""

    @property
    def has_round_trips(self) -> bool:
        """Whether each read is a request, so that few large reads are faster. False for prefetched bytes."""
        return not self.is_local

    def open(self, file: DataFile) -> pa.NativeFile:
        """Open a file for random access, without a detour through Python. The caller adds to the counter."""
        with translate_errors(file.name):
            return self.filesystem.open_input_file(file.path)

    def open_counted(self, file: DataFile, counter: ByteCounter | None = None) -> pa.PythonFile:
        """Open a file and count every byte that is read, here and in `counter`.

        Each read takes the interpreter lock, so use this where exact figures matter more than speed.
        """
        counters = [self.counter] if counter is None else [self.counter, counter]
        return pa.PythonFile(_CountedFile(self.open(file), counters), mode="r")

    def read(self, file: DataFile, offset: int, num_bytes: int) -> pa.Buffer:
        """Return these bytes, or fewer at the end of the file."""
        with self.open(file) as opened, translate_errors(file.name):
            found = _read_at(opened, offset, num_bytes)
        self.counter.add(found.size)
        return found

    def read_tail(self, file: DataFile, num_bytes: int) -> pa.Buffer:
        """Return the last bytes of the file."""
        first = max(0, file.size_bytes - num_bytes)
        return self.read(file, first, file.size_bytes - first)

    def info(self, path: str, name: str = "") -> pafs.FileInfo:
        """Return metadata of a path; its type is NotFound if nothing exists there. Errors use `name`.

        Raises:
            StorageUnavailable: The store does not answer in time.
            StorageDenied, StorageError: See `translate_errors`.
        """
        with translate_errors(name or path):
            if self.is_local:
                return self.filesystem.get_file_info(path)
            return _within(self.timeout_s, lambda: self.filesystem.get_file_info(path))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.filesystem, self.is_local, self.timeout_s, self.max_attempts)


@contextlib.contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn the `OSError` of a file system into an error of Strata that names the file.

    Raises:
        DataFileMissing: The file does not exist.
        StorageDenied, StorageUnavailable, StorageError: The store refuses, does not answer, or fails otherwise.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise translate_error(error, name) from error


def translate_error(error: OSError, name: str) -> DataFileMissing | StorageError:
    """Return the Strata error for an `OSError` of a file system."""
    unquoted = _QUOTED.sub("", str(error))
    name, text = without_secrets(name), without_secrets(str(error))
    text = text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}…"
    if isinstance(error, PermissionError) or _DENIED.search(unquoted):
        return StorageDenied(f"{name}: access denied: {text}; check its permissions, or the credentials")
    if isinstance(error, FileNotFoundError):
        return DataFileMissing(f"{name} does not exist: {text}")
    if isinstance(error, (TimeoutError, ConnectionError)) or _UNAVAILABLE.search(unquoted):
        return StorageUnavailable(f"{name} cannot be reached: {text}; check the endpoint, the network and the proxy")
    if _MISSING.search(unquoted):
        return DataFileMissing(f"{name} does not exist: {text}")
    return StorageError(f"{name} cannot be read: {text}")


def without_secrets(text: str) -> str:
    """Remove user names, passwords, signatures and tokens from URLs, so that the text may be shown."""
    return _SECRET.sub(r"\1=…", _USER.sub("://", text))


class _CountedFile:
    """A file for `pa.PythonFile` that passes buffers through without copying them."""

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
    """Read into a buffer; `NativeFile.read_at` would copy once more, into bytes."""
    size = opened.size()
    if offset >= size:
        return pa.py_buffer(b"")
    opened.seek(offset)
    return opened.read_buffer(min(num_bytes, size - offset))


def _within(deadline_s: float, call: Callable[[], Answer]) -> Answer:
    """Call in a new thread, which is abandoned at the deadline because a native call cannot be stopped."""
    answer: list[Answer] = []
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
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
