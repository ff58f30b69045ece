"""Messages between the driver of a study and the process of a trial, as JSON lines on a Unix socket.

The driver answers every report, with `Continue` or `StopTrial`. The process reads the answer only before its next
report: so it never waits for a decision while it could train, and a stop always takes effect one report later, however
busy the machine is.
"""

from __future__ import annotations

import msgspec

from strata.tune.state.events import Values  # noqa: TC001 - msgspec evaluates it

MAX_BYTES = 256 << 10


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", omit_defaults=True):
    pass


# -- from the process of a trial ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """The first message: which process this is."""

    slot: int
    launch: int


class Report(Message, frozen=True, kw_only=True):
    step: int
    values: Values


class Result(Message, frozen=True, kw_only=True):
    """The function has returned."""

    values: Values | None = None


class Failure(Message, frozen=True, kw_only=True):
    """The function has raised."""

    reason: str


# -- to the process of a trial -----------------------------------------------------------------------------------------


class Order(Message, frozen=True, kw_only=True):
    """The answer to `Hello`: what to run."""

    trial: int
    config: dict[str, bool | int | float | str | None]
    metrics: tuple[str, ...]
    environment: dict[str, str]
    """Variables that make this process the only rank of a run of its own."""


class Continue(Message, frozen=True, kw_only=True):
    """The answer to a report."""


class StopTrial(Message, frozen=True, kw_only=True):
    """Also the answer to a report, and to all later ones."""

    reason: str
    is_saving: bool


FromTrial = Hello | Report | Result | Failure
ToTrial = Order | Continue | StopTrial

_encoder = msgspec.json.Encoder()
from_trial: msgspec.json.Decoder[FromTrial] = msgspec.json.Decoder(FromTrial)
to_trial: msgspec.json.Decoder[ToTrial] = msgspec.json.Decoder(ToTrial)


def encode(message: FromTrial | ToTrial) -> bytes:
    return _encoder.encode(message) + b"\n"
