"""The messages between a trainer and its saver process, over a private socket pair."""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from strata.checkpoint.saver.executor import Outcome  # noqa: TC001 - msgspec resolves it at run time
from strata.errors import BY_KIND, CheckpointCorrupt, StorageError, StrataError

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ignored by the saver: terminals and schedulers send them to all processes, and the trainer may want to save then."""
MAX_BYTES = 64 << 20


class Open(msgspec.Struct, frozen=True, tag=True):
    """The store. Sent as a message, because a list of processes would show credentials in arguments."""

    url: str
    storage_options: dict[str, Any]


class Map(msgspec.Struct, frozen=True, tag=True):
    """The memory has this size now: map its pages before they are needed."""

    num_bytes: int


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """A snapshot is complete in the memory, followed by its job."""

    id: str
    memory_bytes: int
    job_offset: int
    job_bytes: int
    is_retry: bool = False
    """Another saver began this job and died."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a job."""

    id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Stop computing statistics: the memory is needed."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """No more jobs will follow."""


class BytesWritten(msgspec.Struct, frozen=True, tag=True):
    """Progress since the last message."""

    num_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The job succeeded."""

    outcome: Outcome


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job failed with this error."""

    kind: str
    text: str
    field: str = ""
    missing: dict[str, str] = {}
    details: dict[str, str] = {}
    """The fields that only errors of this kind have."""


def encode_error(error: BaseException) -> Failed:
    """Return the message for an error."""
    if isinstance(error, StrataError):
        details = error.details() if isinstance(error, CheckpointCorrupt) else {}
        return Failed(type(error).__name__, error.message, error.field, error.missing, details)
    return Failed(type(error).__name__, str(error))


def decode_error(message: Failed) -> Exception:
    """Return the error of a message; an unknown one becomes a `StorageError`."""
    kind = BY_KIND.get(message.kind)
    if kind is not None:
        details: dict[str, Any] = dict(message.details)
        return kind(message.text, field=message.field, missing=message.missing, **details)
    return StorageError(f"{message.kind}: {message.text}")


class Free(msgspec.Struct, frozen=True, tag=True):
    """The saver no longer reads the memory."""


ToSaver = Open | Map | RunJob | Cancel | Release | Close
FromSaver = BytesWritten | Done | Failed | Free

_encoder = msgspec.msgpack.Encoder()
_to_saver = msgspec.msgpack.Decoder(ToSaver)
_from_saver = msgspec.msgpack.Decoder(FromSaver)


def encode(message: ToSaver | FromSaver) -> bytes:
    return _encoder.encode(message)


def decode_to_saver(data: bytes) -> ToSaver:
    message: ToSaver = _to_saver.decode(data)
    return message


def decode_from_saver(data: bytes) -> FromSaver:
    message: FromSaver = _from_saver.decode(data)
    return message
