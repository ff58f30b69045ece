"""S3, Google Cloud Storage and Azure as stores, through obstore.

Large objects are multipart uploads straight from the caller's memory; reads fetch ranges in parallel.

Retries: obstore retries requests that fail with 5xx, 429 or a broken connection, but only idempotent ones. We retry the
others where we can find out what became of the first attempt. Both continue until `retry_timeout_s` has passed, long
enough for a server to restart. A missing bucket is a final answer.

Credentials, in this order: `storage_options`; the environment (AWS_*, AZURE_*, GOOGLE_*); for S3 the keys of a profile
in ~/.aws (no roles, no single sign-on); the identity of the machine, container or pod.

A process that is killed during an upload leaves parts that no listing shows but that S3 charges for; so does an upload
that is abandoned while the store does not answer. Give the bucket a lifecycle rule for them
(AbortIncompleteMultipartUpload). Google Cloud has the same rule; Azure drops such parts after a week.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import time
import uuid
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from strata.errors import (
    BucketMissing,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StrataError,
    TransferCancelled,
)
from strata.storage.base import Listed, Pool, Watch, byte_view, check_key, check_offset
from strata.storage.object_options import AZURE, GCS, S3, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from strata.storage.object_options import Settings

MAX_PARTS = 10_000
"""The limit of S3 for one upload."""
DELETE_AT_ONCE = 1_000
MAX_READS = 3
"""Attempts to read an object that is replaced while it is read."""
MAX_BACKOFF_S = 10.0
_WRITER = "stratawriter"
"""Metadata of an object that was put with `if_absent`: the id of the call that put it."""
_CLASSES = {S3: S3Store, GCS: GCSStore, AZURE: AzureStore}
_CODE = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
"""The error code and message in the body of a response."""
_NO_BUCKET = ("NoSuchBucket", "InvalidBucketName", "ContainerNotFound", "InvalidResourceName")
_FULL = ("QuotaExceeded", "InsufficientStorage", "StorageFull", "507 Insufficient")
_METADATA_REQUEST = re.compile(
    r"performing \w+ https?://[^/]+/(latest/api/token|latest/meta-data|metadata/identity|computeMetadata|v2/credentials)"
)
"""A request to the metadata service, which obstore makes when it finds no other credentials."""
_T = TypeVar("_T")


class ObjectStore:
    """A bucket, or a prefix in one."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._settings = read_settings(url, storage_options, os.environ)
        self._limits = self._settings.limits
        self._store = _open(self._settings)
        self._pool = Pool(self._limits.concurrency, "strata-object")

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path = check_key(key)
        with self._translating(key):
            if if_absent:
                self._put_if_absent(path, data)
            else:
                self._retry(lambda: self._store.put(path, data, use_multipart=False))

    def _put_if_absent(self, path: str, data: bytes) -> None:
        """Put an object for exactly one of all callers, even if a response is lost.

        An attempt that arrived makes its own retry fail, so a caller that finds an object checks whether it wrote it.
        """
        writer = uuid.uuid4().hex

        def attempt() -> None:
            try:
                self._store.put(path, data, mode="create", use_multipart=False, attributes={_WRITER: writer})
            except AlreadyExistsError:
                if self._retry(lambda: self._writer(path)) != writer:
                    raise

        try:
            self._retry(attempt)
        except AlreadyExistsError:
            raise
        except BaseError:
            with contextlib.suppress(BaseError):
                if self._writer(path) == writer:  # the write arrived, whatever the response was
                    return
            raise

    def _writer(self, path: str) -> str | None:
        try:
            attributes = self._store.get(path, options={"head": True}).attributes
        except FileNotFoundError:
            return None  # deleted meanwhile
        return next((value for name, value in attributes.items() if name.lower() == _WRITER), None)

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        """Upload an object. A cancelled upload ends when its requests in flight end, within `timeout_s`."""
        path, data, watch = check_key(key), byte_view(data), watch or Watch()
        watch.check()
        with self._translating(key):
            if data.nbytes <= self._limits.piece_bytes:
                self._retry(lambda: self._store.put(path, data, use_multipart=False))
                watch.advance(data.nbytes)
            else:
                self._put_pieces(path, data, watch)

    def _put_pieces(self, path: str, data: memoryview, watch: Watch) -> None:
        pieces = _Pieces(data, self._limits.piece_bytes, watch, num_at_once=self._limits.concurrency)

        def upload() -> None:
            self._store.put(
                path,
                iter(pieces),
                use_multipart=True,
                chunk_size=pieces.piece_bytes,
                max_concurrency=self._limits.concurrency,
            )

        # Not in this thread: a progress callback may use obstore, which panics inside a call of its own.
        uploading = self._pool.submit(self._retry, upload, while_=lambda: not pieces.begun)
        uploading.add_done_callback(lambda _: pieces.done.put(0))
        num_reported = 0
        try:
            while num_bytes := pieces.done.get():
                watch.advance(num_bytes)
                num_reported += num_bytes
        except BaseException:
            pieces.is_abandoned = True
            wait([uploading])  # nothing reads the data once we raise
            raise
        if uploading.exception() is not None:
            watch.check()  # cancellation matters more than how the abort failed
        uploading.result()
        watch.advance(data.nbytes - num_reported)

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, key: str, *, max_bytes: int) -> bytes:
        path = check_key(key)

        def read() -> bytes:
            result = self._store.get(path)
            size = result.meta["size"]
            if size > max_bytes:
                raise StorageError(f"{self.url}/{key} has {size} bytes, more than the limit of {max_bytes}")
            return bytes(result.bytes())

        with self._translating(key):
            return self._retry(read)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        path, out = check_key(key), byte_view(out)
        check_offset(offset)
        with self._translating(key):
            if not out.nbytes:
                self._retry(lambda: self._store.head(path))
                return
            for _ in range(MAX_READS):
                if len(self._read_pieces(path, offset, out)) == 1:
                    return
        raise StorageError(f"{self.url}/{key} was replaced {MAX_READS} times while it was being read")

    def _read_pieces(self, path: str, offset: int, out: memoryview) -> set[str | None]:
        """Read the pieces in parallel; return the versions of the object that they come from."""

        def read(start: int) -> str | None:
            piece = out[start : start + self._limits.piece_bytes]
            return self._retry(lambda: self._read_piece(path, offset + start, piece))

        starts = range(0, out.nbytes, self._limits.piece_bytes)
        if len(starts) == 1:
            return {read(0)}
        futures = [self._pool.submit(read, start) for start in starts]
        try:
            return {future.result() for future in futures}
        finally:  # nothing writes into `out` once we raise
            for future in futures:
                future.cancel()
            wait(futures)

    def _read_piece(self, path: str, start: int, out: memoryview) -> str | None:
        end = start + out.nbytes
        try:
            result = self._store.get(path, options={"range": (start, end)})
        except BaseError as error:
            if "status code: 416" in str(error) or "but object was only" in str(error):
                raise StorageError(f"{self.url}/{path} ends before byte {start}, expected {end} bytes") from None
            raise
        found = memoryview(result.bytes())
        if found.nbytes != out.nbytes:
            raise StorageError(f"{self.url}/{path} ends at byte {start + found.nbytes}, before byte {end}")
        out[:] = found
        version: str | None = result.meta["e_tag"]
        return version

    def size(self, key: str) -> int:
        path = check_key(key)
        with self._translating(key):
            size: int = self._retry(lambda: self._store.head(path))["size"]
            return size

    def walk(self, prefix: str = "") -> Iterator[Listed]:
        path = check_key(prefix) if prefix else None
        with self._translating(prefix):
            found = self._retry(lambda: list(itertools.chain.from_iterable(self._store.list(path))))
        listed = (Listed(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in found)
        yield from sorted(listed, key=lambda one: one.key)  # not every server sorts by bytes

    def children(self, prefix: str = "") -> list[str]:
        path = check_key(prefix) if prefix else None
        with self._translating(prefix):
            found = self._retry(lambda: self._store.list_with_delimiter(path))["common_prefixes"]
        return sorted(below.rstrip("/").rpartition("/")[2] for below in found)

    # -- removing --------------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> None:
        paths = [check_key(key) for key in keys]
        for start in range(0, len(paths), DELETE_AT_ONCE):
            batch = paths[start : start + DELETE_AT_ONCE]
            with self._translating(batch[0] if len(batch) == 1 else ""):
                self._retry(lambda batch=batch: self._delete(batch))  # type: ignore[misc]

    def _delete(self, paths: list[str]) -> None:
        try:
            self._store.delete(paths)
        except FileNotFoundError:  # not on S3; the error does not name it, or whether the others are deleted
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(path)

    def close(self) -> None:
        self._pool.shutdown()

    # -- within ----------------------------------------------------------------------------------------------------

    def _retry(self, work: Callable[[], _T], *, while_: Callable[[], bool] = lambda: True) -> _T:
        """Retry what obstore does not; see the module docstring."""
        max_retries = self._limits.max_retries
        end_s = time.monotonic() + self._limits.retry_timeout_s
        for attempt in itertools.count() if max_retries is None else range(max_retries):
            try:
                return work()
            except BaseError as error:
                pause_s = min(0.1 * 2 ** min(attempt, 10), MAX_BACKOFF_S)
                if not (while_() and _may_be_repeated(error, max_retries)) or time.monotonic() + pause_s > end_s:
                    raise
            time.sleep(pause_s)
        return work()

    @contextlib.contextmanager
    def _translating(self, key: str) -> Iterator[None]:
        """Translate errors of obstore, without a cause: it may quote secrets."""
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except StrataError:
            raise
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and error.errno is not None:
                raise  # raised by a progress callback
            raise _translate(error, where, self._settings) from None


class _Pieces:
    """Slices of the data, without a copy, as the upload requests them."""

    def __init__(self, data: memoryview, piece_bytes: int, watch: Watch, *, num_at_once: int) -> None:
        min_bytes = -(-data.nbytes // MAX_PARTS)
        self.piece_bytes = max(piece_bytes, -(-min_bytes // (1 << 20)) << 20)
        self.begun = False
        self.is_abandoned = False
        """Set when the caller no longer wants the upload."""
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Sizes of the pieces that arrived; 0 at the end."""
        self._data = data
        self._watch = watch
        self._num_at_once = num_at_once

    def __iter__(self) -> Iterator[memoryview]:
        for number, start in enumerate(range(0, self._data.nbytes, self.piece_bytes)):
            self._watch.check()
            if self.is_abandoned:
                raise TransferCancelled("the upload was abandoned")
            self.begun = True
            if number >= self._num_at_once:  # then one more has arrived
                self.done.put(self.piece_bytes)
            yield self._data[start : start + self.piece_bytes]


def _open(settings: Settings) -> Any:
    # Each of the three classes takes its own configuration under the same parameter names.
    try:
        return _CLASSES[settings.kind](
            settings.bucket,
            prefix=settings.prefix,
            config=settings.config,
            client_options=settings.client_options,
            retry_config=settings.retry_config,
        )
    except (UnknownConfigurationKeyError, BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{settings.kind} rejects these storage_options: {_describe(error, settings)}",
            field="storage_options",
        ) from None


def _may_be_repeated(error: BaseError, max_retries: int | None) -> bool:
    """Return whether obstore gave up because the outcome of the request is unknown, without counted retries."""
    if isinstance(error, AlreadyExistsError):
        return False
    text = str(error).partition("\n\nDebug source")[0]
    unsure = "HTTP error" in text or "409 Conflict" in text or "error decoding response body" in text
    return unsure and (max_retries is None or " retries" not in text)


def _translate(error: Exception, where: str, settings: Settings) -> StorageError:
    text = _describe(error, settings)
    code = _CODE.search(str(error))
    if code is not None and code[1] in _NO_BUCKET:
        what = "container" if settings.kind == AZURE else "bucket"
        return BucketMissing(
            f"{where}: the {what} {settings.bucket!r} does not exist on {settings.kind} ({code[1]}); create it, or "
            "correct its name, the endpoint or the account"
        )
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"{where} does not exist")
    if isinstance(error, AlreadyExistsError):
        return ObjectExists(f"{where} already exists")
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if denied or _METADATA_REQUEST.search(text):
        return StorageDenied(
            f"{where}: {'access denied' if denied else 'no credentials'} ({text}); the credentials come from "
            f"{settings.credentials}: check that they are valid and allow read, write, list and delete here, pass "
            "others as storage_options, or set them in the environment"
        )
    if isinstance(error, NotSupportedError):
        return StorageError(f"{where}: the server does not support this request ({text})")
    reason = re.split(r" in [\d.]+[nµm]?s", text, maxsplit=1)[-1]  # the part after the address
    if any(word in reason for word in _FULL):
        return StorageFull(f"{where}: {text}; free some space, keep fewer checkpoints, or raise the quota")
    max_retries = settings.limits.max_retries
    counted, raised = (f" and {max_retries} retries", "max_retries, ") if max_retries is not None else ("", "")
    return StorageUnavailable(
        f"{where}: {text}; tried for up to {settings.limits.retry_timeout_s:g} s{counted}: check the endpoint, the "
        f"region and the network, or raise {raised}retry_timeout_s or timeout_s in storage_options"
    )


def _describe(error: Exception, settings: Settings) -> str:
    """Return one line of the error, without signatures, keys and markup."""
    text = str(error).partition("\n\nDebug source")[0]
    if code := _CODE.search(text):
        text = f"{text[: text.index('<')].rstrip(': ')}: {code[1]}: {code[2] or ''}"
    text = " ".join(re.sub(r"\?\S*", "", text).split())[:500]
    for secret in settings.secrets():
        text = text.replace(secret, "…")
    return text
