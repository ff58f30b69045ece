"""What trainer and saver process say to each other, over a socket pair that nobody else has."""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from strata.checkpoint.saver.executor import Outcome  # noqa: TC001 - msgspec looks it up
from strata.errors import StrataError

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""By a saver: they are sent to everybody, and the trainer wants to save then. It ends when its trainer has."""
MAX_BYTES = 64 << 20


class Open(msgspec.Struct, frozen=True, tag=True):
    """Where checkpoints go. Credentials among the options are not to be seen in a list of processes."""

    url: str
    storage_options: dict[str, Any]


class Map(msgspec.Struct, frozen=True, tag=True):
    """The memory has this size now: look at its pages before they are needed."""

    num_bytes: int


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """A snapshot is complete in the memory, and behind it the job."""

    id: str
    memory_bytes: int
    job_offset: int
    job_bytes: int
    is_second_try: bool = False
    """Another saver has begun with it, and died."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Stop the statistics: the memory is wanted."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """No more jobs."""


class BytesWritten(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    outcome: Outcome


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What an error consists of."""

    kind: str
    text: str
    field: str = ""
    missing: dict[str, str] = {}


def failed(error: BaseException) -> Failed:
    if isinstance(error, StrataError):
        return Failed(type(error).__name__, error.message, error.field, error.missing)
    return Failed(type(error).__name__, str(error))


class Free(msgspec.Struct, frozen=True, tag=True):
    """Nobody reads the memory any more."""


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
