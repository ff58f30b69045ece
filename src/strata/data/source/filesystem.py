"""From what a user writes to a file system and a path in it.

S3, Google Cloud Storage and Azure are read natively by pyarrow, every other scheme through fsspec, and a file system
that the user made is taken as it is.

A path in a bucket is taken literally, as `aws s3 ls` shows it: `b=x%20y` is a directory of that name, and `?` stands
for any character. Only `file://` is unquoted.
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
from strata.data.source.source import Source, reaching
from strata.data.source.storage_options import azure_arguments, gcs_arguments, question_timeout_s, s3_arguments
from strata.errors import ConfigError, InvalidArgument
from strata.lifecycle import renewed
from strata.storage.object_options import AZURE, GCS, KINDS, S3

if TYPE_CHECKING:
    from collections.abc import Mapping

INSTALL = "pip install 'strata-runtime[data]'"
_KINDS = {**KINDS, "gcs": GCS}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z][A-Za-z0-9+.-]*)*)://")
_QUERY = re.compile(r"\?[A-Za-z_]+=[^/]*$")
_NEAR = ("file", "local", "memory")
"""Protocols of fsspec that cost no round trip."""


def open_source(
    path: str | os.PathLike[str], *, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> tuple[Source, str]:
    """A local path or `file://`, `s3://BUCKET/PATH`, `gs://…`, `az://CONTAINER/PATH`, `abfss://…`, `memory://…`.

    Args:
        filesystem: One of pyarrow's or fsspec's; the path is then as it knows it.
        storage_options: For object stores: region, endpoint, credentials, as for checkpoints; left out, they come from
            the usual places, where the client library looks for them itself. For fsspec: its arguments.

    Raises:
        ConfigError: Nobody knows the scheme, an option is wrong, or a package is missing.
        InvalidArgument: What was passed is no path or no file system.
    """
    text = _checked(path)
    options = storage_options or {}
    if filesystem is not None:
        if options:
            raise ConfigError(
                "storage_options have no effect on a filesystem= that was made already; pass one of the two",
                field="storage_options",
            )
        return _given(filesystem, text)
    scheme, rest = _split(text)
    if scheme in _KINDS:
        bucket, host, found = _in_bucket(scheme, rest)
        return _object_store(scheme, options, bucket, host), found
    if scheme != "file":
        return _by_fsspec(scheme, text, options)
    if options:
        raise ConfigError("storage_options are for object stores; a path takes none", field="storage_options")
    return Source(pafs.LocalFileSystem(), is_local=True), _local_path(text)


def path_of(
    path: str | os.PathLike[str], *, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> str:
    """What `open_source` says is the path, where a file system for paths of its scheme is open already."""
    text = _checked(path)
    if filesystem is not None:
        return _given(filesystem, text)[1]
    scheme, rest = _split(text)
    if scheme in _KINDS:
        return _in_bucket(scheme, rest)[2]
    return _local_path(text) if scheme == "file" else _by_fsspec(scheme, text, storage_options or {})[1]


def store_of(path: str | os.PathLike[str]) -> str:
    """Two paths of which this is the same can share a file system."""
    scheme, rest = _split(os.fspath(path))
    kind = _KINDS.get(scheme, scheme)
    account = rest.partition("/")[0].rpartition("@")[2] if kind == AZURE and "@" in rest.partition("/")[0] else ""
    return f"{kind} {account}"


def _checked(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not text or "\0" in text:
        raise InvalidArgument(f"path={text!r} is no path; give a text that is not empty", field="path")
    return text


def _split(text: str) -> tuple[str, str]:
    """Scheme, and what follows it; a path without one is a file's."""
    matched = _SCHEME.match(text)
    return (matched[1].lower(), text[matched.end() :]) if matched else ("file", text)


def _local_path(text: str) -> str:
    if _SCHEME.match(text):
        host, slash, rest = _split(text)[1].partition("/")
        if host not in ("", "localhost") or not slash:
            raise InvalidArgument(f"{text} names another machine; write file:///PATH", field="path")
        return os.path.abspath(unquote(f"/{rest}"))  # noqa: PTH100
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - links are not to be followed


def _in_bucket(scheme: str, place: str) -> tuple[str, str, str]:
    """Bucket, host if the URL names one, and the path as pyarrow wants it."""
    bucket, _, rest = place.partition("/")
    bucket, at, host = bucket.rpartition("@")
    bucket, host = (bucket, host) if at else (host, "")
    if _QUERY.search(place) or (at and (_KINDS[scheme] != AZURE or ":" in bucket)):
        # Without the URL: what stands in these places is often a secret.
        raise ConfigError(
            f"a {scheme}:// URL has a bucket and a path, no keys and no '?name='; pass these as storage_options",
            field="path",
        )
    if not bucket or re.search(r"[*?\[]", bucket):
        raise ConfigError(f"{scheme}://{place} names no bucket; write it as {scheme}://BUCKET/PATH", field="path")
    return bucket, host, f"{bucket}/{rest.strip('/')}" if rest.strip("/") else bucket


def _object_store(scheme: str, options: Mapping[str, Any], bucket: str, host: str) -> Source:
    kind = _KINDS[scheme]
    try:
        return _MAKERS[kind](options, bucket, host)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// is not in this build of pyarrow ({error}); install another one with: {INSTALL}", field="path"
        ) from error
    except (TypeError, ValueError) as error:
        # Without pyarrow's words, which may repeat a value.
        raise ConfigError(
            f"pyarrow takes these storage_options for {kind} not together, or not with these types: "
            f"{', '.join(sorted(options)) or 'none'}",
            field="storage_options",
        ) from error


def _s3(options: Mapping[str, Any], bucket: str, _: str) -> Source:
    arguments = s3_arguments(options, os.environ)
    attempts = arguments.pop("max_attempts")
    known = arguments.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not known and "endpoint_override" not in arguments:
        with contextlib.suppress(OSError):  # the first look at the bucket says why
            arguments["region"] = pafs.resolve_s3_region(bucket)
    with reaching(f"s3://{bucket}"):
        retries = pafs.AwsStandardS3RetryStrategy(max_attempts=attempts)
        filesystem = pafs.S3FileSystem(**arguments, retry_strategy=retries)
    # Each attempt may wait for so long; the client bounds that itself.
    timeout_s = (arguments["request_timeout"] + arguments["connect_timeout"] + 10) * attempts
    return Source(filesystem, is_local=False, timeout_s=timeout_s, max_attempts=attempts)


def _gcs(options: Mapping[str, Any], bucket: str, _: str) -> Source:
    with reaching(f"gs://{bucket}"):
        filesystem = pafs.GcsFileSystem(**gcs_arguments(options, os.environ))
    return Source(filesystem, is_local=False, timeout_s=question_timeout_s(options))


def _azure(options: Mapping[str, Any], bucket: str, host: str) -> Source:
    with reaching(f"az://{bucket}"):
        filesystem = pafs.AzureFileSystem(**azure_arguments(options, os.environ, host))
    return Source(filesystem, is_local=False, timeout_s=question_timeout_s(options))


_MAKERS = {S3: _s3, GCS: _gcs, AZURE: _azure}


def _by_fsspec(scheme: str, url: str, options: Mapping[str, Any]) -> tuple[Source, str]:
    try:
        import fsspec  # noqa: PLC0415 - only some places need it
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs the package fsspec; install it with: {INSTALL}", field="path") from error
    unknown = [name for name in scheme.split("::") if name not in fsspec.available_protocols()]
    if unknown:
        raise ConfigError(
            f"{unknown[0]}:// is not a kind of store; use a path, one of {', '.join(_KINDS)}, or a scheme of fsspec",
            field="path",
        )
    try:
        with reaching(url):
            made, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a package that is not there: {error}", field="path") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"fsspec takes these storage_options for {scheme}:// not, or not together: "
            f"{', '.join(sorted(options)) or 'none'}",
            field="storage_options",
        ) from error
    return _wrapped(made), path


def _given(filesystem: Any, text: str) -> tuple[Source, str]:
    if isinstance(filesystem, pafs.FileSystem):
        if isinstance(filesystem, pafs.LocalFileSystem):
            return Source(filesystem, is_local=True), _local_path(text)
        path = _split(text)[1]
        return Source(in_turns(filesystem), _is_local(filesystem)), path.rstrip("/") or path[:1]
    if hasattr(filesystem, "_strip_protocol") and hasattr(filesystem, "protocol"):
        return _wrapped(filesystem), str(filesystem._strip_protocol(text))
    raise InvalidArgument(
        f"filesystem={type(filesystem).__name__} is no file system; pass one of pyarrow.fs or of fsspec",
        field="filesystem",
    )


def _is_local(filesystem: pafs.FileSystem) -> bool:
    while isinstance(filesystem, pafs.SubTreeFileSystem):
        filesystem = filesystem.base_fs
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    if isinstance(handler, pafs.FSSpecHandler):
        return _is_near(handler.fs)
    return isinstance(filesystem, pafs.LocalFileSystem)


def _is_near(made: Any) -> bool:
    protocols = [made.protocol] if isinstance(made.protocol, str) else made.protocol
    return any(protocol in _NEAR for protocol in protocols)


def _wrapped(made: Any) -> Source:
    return Source(pafs.PyFileSystem(handler_of(made)), is_local=_is_near(made))


# --- file systems whose files share one position ---

_PROTOCOLS = ("memory", "tar", "libarchive")
_turn = renewed(threading.Lock())
"""One for all: file systems that look like two may be views of the same."""


def handler_of(filesystem: Any) -> pafs.FSSpecHandler:
    """Makes one of fsspec's file systems one of pyarrow's, that several threads can read from."""
    return _InTurns(filesystem) if _shares(filesystem) else pafs.FSSpecHandler(filesystem)


def in_turns(filesystem: pafs.FileSystem) -> pafs.FileSystem:
    """The same for one that was made into one of pyarrow's already."""
    if isinstance(filesystem, pafs.SubTreeFileSystem):
        return pafs.SubTreeFileSystem(filesystem.base_path, in_turns(filesystem.base_fs))
    if isinstance(filesystem, pafs.PyFileSystem) and type(filesystem.handler) is pafs.FSSpecHandler:
        return pafs.PyFileSystem(handler_of(filesystem.handler.fs))
    return filesystem


def _shares(filesystem: Any) -> bool:
    """Also what is a view of another one, as a directory of it."""
    while filesystem is not None:
        protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
        if any(protocol in _PROTOCOLS for protocol in protocols):
            return True
        filesystem = getattr(filesystem, "fs", None)
    return False


class _InTurns(pafs.FSSpecHandler):  # type: ignore[misc]
    def open_input_file(self, path: str) -> pa.PythonFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        with _turn:
            file = self.fs.open(path, mode="rb")
            size_bytes = file.seek(0, 2)

        def read(offset: int, num_bytes: int) -> pa.Buffer:
            with _turn:
                file.seek(offset)
                return pa.py_buffer(file.read(num_bytes))

        return pa.PythonFile(RangedFile(size_bytes, read), mode="r")

    open_input_stream = open_input_file
