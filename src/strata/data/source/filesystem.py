"""Resolve a path or URL to a file system and a path in it.

pyarrow reads S3, Google Cloud Storage and Azure natively; every other scheme goes through fsspec; a file system that
the user passes is used as it is.

A path in a bucket is literal, as `aws s3 ls` prints it: `b=x%20y` is a directory with that name, and `?` is a wildcard
for one character. Only `file://` URLs are percent-decoded.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from strata.data.source.ranges import RangedFile
from strata.data.source.source import Source, translate_errors
from strata.data.source.storage_options import azure_arguments, gcs_arguments, metadata_timeout_s, s3_arguments
from strata.errors import ConfigError, InvalidArgument
from strata.lifecycle import renewed
from strata.storage.object_options import AZURE, GCS, KINDS, S3

if TYPE_CHECKING:
    from collections.abc import Mapping

INSTALL = "pip install 'strata-runtime[data]'"
_KINDS = {**KINDS, "gcs": GCS}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z][A-Za-z0-9+.-]*)*)://")
_QUERY = re.compile(r"\?[A-Za-z_]+=[^/]*$")
_LOCAL_PROTOCOLS = ("file", "local", "memory")
"""fsspec protocols without round trips."""


def open_source(
    path: str | os.PathLike[str], *, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> tuple[Source, str]:
    """Open the file system of a path, and return it with the path in it.

    Args:
        path: A local path, `file://`, `s3://BUCKET/PATH`, `gs://…`, `az://CONTAINER/PATH`, `abfss://…`, `memory://…`.
        filesystem: A file system of pyarrow or fsspec; `path` is then a path in it.
        storage_options: For object stores: region, endpoint, credentials, as for checkpoints. By default the client
            library looks for them in the usual places. For fsspec: its arguments.

    Raises:
        ConfigError: The scheme is unknown, an option is wrong, or a package is missing.
        InvalidArgument: `path` is not a path, or `filesystem` is not a file system.
    """
    text = _check_path(path)
    options = storage_options or {}
    if filesystem is not None:
        if options:
            raise ConfigError(
                "storage_options have no effect on an existing filesystem=; pass one of the two",
                field="storage_options",
            )
        return _wrap_given(filesystem, text)
    scheme, rest = _split_scheme(text)
    if scheme in _KINDS:
        bucket, host, found = _split_bucket(scheme, rest)
        return _open_object_store(scheme, options, bucket, host), found
    if scheme != "file":
        return _open_fsspec(scheme, text, options)
    if options:
        raise ConfigError(
            "storage_options apply to object stores; remove them for a local path", field="storage_options"
        )
    return Source(pafs.LocalFileSystem(), is_local=True), _local_path(text)


def resolve_path(
    path: str | os.PathLike[str], *, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> str:
    """Return the path that `open_source` would return, without opening a file system."""
    text = _check_path(path)
    if filesystem is not None:
        return _wrap_given(filesystem, text)[1]
    scheme, rest = _split_scheme(text)
    if scheme in _KINDS:
        return _split_bucket(scheme, rest)[2]
    return _local_path(text) if scheme == "file" else _open_fsspec(scheme, text, storage_options or {})[1]


def store_key(path: str | os.PathLike[str]) -> str:
    """Return a key that is equal for paths that can share a file system."""
    scheme, rest = _split_scheme(os.fspath(path))
    kind = _KINDS.get(scheme, scheme)
    account = rest.partition("/")[0].rpartition("@")[2] if kind == AZURE and "@" in rest.partition("/")[0] else ""
    return f"{kind} {account}"


def _check_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise InvalidArgument(f"path={text!r} is not a path; pass a non-empty string", field="path")
    return text


def _split_scheme(text: str) -> tuple[str, str]:
    """Return the scheme and the rest of a URL; the scheme of a plain path is `file`."""
    matched = _SCHEME.match(text)
    return (matched[1].lower(), text[matched.end() :]) if matched else ("file", text)


def _local_path(text: str) -> str:
    if _SCHEME.match(text):
        host, slash, rest = _split_scheme(text)[1].partition("/")
        if host not in ("", "localhost") or not slash:
            raise InvalidArgument(f"{text} names another machine; write file:///PATH", field="path")
        return os.path.abspath(unquote(f"/{rest}"))  # noqa: PTH100
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - does not follow symbolic links


def _split_bucket(scheme: str, location: str) -> tuple[str, str, str]:
    """Return the bucket, the host if the URL names one, and the path as pyarrow expects it."""
    bucket, _, rest = location.partition("/")
    bucket, at, host = bucket.rpartition("@")
    bucket, host = (bucket, host) if at else (host, "")
    if _QUERY.search(location) or (at and (_KINDS[scheme] != AZURE or ":" in bucket)):
        # The message leaves out the URL, which often contains a secret here.
        raise ConfigError(
            f"a {scheme}:// URL must contain only a bucket and a path, no keys and no '?name='; "
            "pass these as storage_options",
            field="path",
        )
    if not bucket or re.search(r"[*?\[]", bucket):
        raise ConfigError(f"{scheme}://{location} has no bucket; write it as {scheme}://BUCKET/PATH", field="path")
    return bucket, host, f"{bucket}/{rest.strip('/')}" if rest.strip("/") else bucket


def _open_object_store(scheme: str, options: Mapping[str, Any], bucket: str, host: str) -> Source:
    kind = _KINDS[scheme]
    try:
        return _OPENERS[kind](options, bucket, host)
    except ImportError as error:
        raise ConfigError(
            f"this build of pyarrow does not support {scheme}:// ({error}); install another one with: {INSTALL}",
            field="path",
        ) from error
    except (TypeError, ValueError) as error:
        # The message leaves out pyarrow's text, which may repeat a secret value.
        raise ConfigError(
            f"pyarrow rejects the combination or the types of these storage_options for {kind}: "
            f"{', '.join(sorted(options)) or 'none'}; check them against the documentation of pyarrow.fs",
            field="storage_options",
        ) from error


def _open_s3(options: Mapping[str, Any], bucket: str, _: str) -> Source:
    arguments = s3_arguments(options, os.environ)
    attempts = arguments.pop("max_attempts")
    known = arguments.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not known and "endpoint_override" not in arguments:
        with contextlib.suppress(OSError):  # the first request to the bucket reports the reason
            arguments["region"] = pafs.resolve_s3_region(bucket)
    with translate_errors(f"s3://{bucket}"):
        retries = pafs.AwsStandardS3RetryStrategy(max_attempts=attempts)
        filesystem = pafs.S3FileSystem(**arguments, retry_strategy=retries)
    # The client bounds each attempt itself; this adds up all of them.
    timeout_s = (arguments["request_timeout"] + arguments["connect_timeout"] + 10) * attempts
    return Source(filesystem, is_local=False, timeout_s=timeout_s, max_attempts=attempts)


def _open_gcs(options: Mapping[str, Any], bucket: str, _: str) -> Source:
    with translate_errors(f"gs://{bucket}"):
        filesystem = pafs.GcsFileSystem(**gcs_arguments(options, os.environ))
    return Source(filesystem, is_local=False, timeout_s=metadata_timeout_s(options))


def _open_azure(options: Mapping[str, Any], bucket: str, host: str) -> Source:
    with translate_errors(f"az://{bucket}"):
        filesystem = pafs.AzureFileSystem(**azure_arguments(options, os.environ, host))
    return Source(filesystem, is_local=False, timeout_s=metadata_timeout_s(options))


_OPENERS = {S3: _open_s3, GCS: _open_gcs, AZURE: _open_azure}


def _open_fsspec(scheme: str, url: str, options: Mapping[str, Any]) -> tuple[Source, str]:
    try:
        import fsspec  # noqa: PLC0415 - few schemes need it
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs the package fsspec; install it with: {INSTALL}", field="path") from error
    unknown = [name for name in scheme.split("::") if name not in fsspec.available_protocols()]
    if unknown:
        raise ConfigError(
            f"unknown scheme {unknown[0]}://; use a local path, one of {', '.join(_KINDS)}, or a scheme of fsspec",
            field="path",
        )
    try:
        with translate_errors(url):
            made, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed ({error}); install it", field="path"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"fsspec rejects these storage_options for {scheme}:// or their combination: "
            f"{', '.join(sorted(options)) or 'none'}; check them against the documentation of the file system",
            field="storage_options",
        ) from error
    return _wrap_fsspec(made), path


def _wrap_given(filesystem: Any, text: str) -> tuple[Source, str]:
    if isinstance(filesystem, pafs.FileSystem):
        if isinstance(filesystem, pafs.LocalFileSystem):
            return Source(filesystem, is_local=True), _local_path(text)
        path = _split_scheme(text)[1]
        return Source(_serialize_reads(filesystem), _is_local(filesystem)), path.rstrip("/") or path[:1]
    if hasattr(filesystem, "_strip_protocol") and hasattr(filesystem, "protocol"):
        return _wrap_fsspec(filesystem), str(filesystem._strip_protocol(text))
    raise InvalidArgument(
        f"filesystem={type(filesystem).__name__} is not a file system; pass one of pyarrow.fs or of fsspec",
        field="filesystem",
    )


def _is_local(filesystem: pafs.FileSystem) -> bool:
    while isinstance(filesystem, pafs.SubTreeFileSystem):
        filesystem = filesystem.base_fs
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    if isinstance(handler, pafs.FSSpecHandler):
        return _is_local_fsspec(handler.fs)
    return isinstance(filesystem, pafs.LocalFileSystem)


def _is_local_fsspec(filesystem: Any) -> bool:
    protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
    return any(protocol in _LOCAL_PROTOCOLS for protocol in protocols)


def _wrap_fsspec(filesystem: Any) -> Source:
    return Source(pafs.PyFileSystem(_handler_for(filesystem)), is_local=_is_local_fsspec(filesystem))


# --- file systems whose files share one position ---
#
# In fsspec's memory file system, every `open` of a path returns the same file object; in an archive, all files are read
# through the archive's file. Two threads that seek and read at once would get each other's bytes without an error. So
# reads of these file systems are serialized, and each open file keeps its own position.

_SHARING_PROTOCOLS = ("memory", "tar", "libarchive")
_read_lock = renewed(threading.Lock())
"""One lock for all, because two file system objects may be views of the same files."""


def _handler_for(filesystem: Any) -> pafs.FSSpecHandler:
    """Wrap an fsspec file system for pyarrow so that several threads can read from it."""
    return _SerializedHandler(filesystem) if _shares_position(filesystem) else pafs.FSSpecHandler(filesystem)


def _serialize_reads(filesystem: pafs.FileSystem) -> pafs.FileSystem:
    """Wrap an fsspec file system again that the user has already wrapped for pyarrow."""
    if isinstance(filesystem, pafs.SubTreeFileSystem):
        return pafs.SubTreeFileSystem(filesystem.base_path, _serialize_reads(filesystem.base_fs))
    if isinstance(filesystem, pafs.PyFileSystem) and type(filesystem.handler) is pafs.FSSpecHandler:
        return pafs.PyFileSystem(_handler_for(filesystem.handler.fs))
    return filesystem


def _shares_position(filesystem: Any) -> bool:
    """Return whether open files share a position, also through a view such as a subdirectory."""
    while filesystem is not None:
        protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
        if any(protocol in _SHARING_PROTOCOLS for protocol in protocols):
            return True
        filesystem = getattr(filesystem, "fs", None)
    return False


class _SerializedHandler(pafs.FSSpecHandler):  # type: ignore[misc]
    def open_input_file(self, path: str) -> pa.PythonFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        with _read_lock:
            file = self.fs.open(path, mode="rb")
            size_bytes = file.seek(0, 2)

        def read(offset: int, num_bytes: int) -> pa.Buffer:
            with _read_lock:
                file.seek(offset)
                return pa.py_buffer(file.read(num_bytes))

        return pa.PythonFile(RangedFile(size_bytes, read), mode="r")

    open_input_stream = open_input_file
