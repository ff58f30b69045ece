"""Messages between the driver of a study and the processes of a trial, as JSON lines over a connection.

The driver answers every message but the first with `Answer`. The process reads the answer only before its next report
or save: so it never waits for a decision while it could train, and a stop always takes effect one report later, however
busy the machine is. A message without an answer is sent again over a new connection; its number shows whether it has
arrived.
"""

from __future__ import annotations

import msgspec

from strata.launch.environment import WorkerSpec  # noqa: TC001 - msgspec evaluates it
from strata.tune.state.events import Values  # noqa: TC001 - msgspec evaluates it

MAX_BYTES = 256 << 10


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to reach the driver."""

    address: str
    ca: str = ""
    """Certificate of the authority that signed the driver's, as PEM; empty: no TLS, on a Unix socket."""
    token: str = ""

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r}, …)"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", omit_defaults=True):
    pass


# -- from the process of a trial ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a connection: which process this is. Answered with `Order` or `StopTrial`."""

    launch: int
    rank: int
    """Rank at the nodes, which tells the running processes of a study apart."""
    token: str = ""


class Numbered(Message, frozen=True, kw_only=True):
    lease: int
    number: int
    """Messages of a process are numbered from 1."""


class Report(Numbered, frozen=True, kw_only=True):
    step: int
    values: Values


class Settle(Numbered, frozen=True, kw_only=True):
    """The process is about to save. It waits for the answer, which follows once all its reports are durable: a trial
    that resumes from the checkpoint does not make these steps again.
    """


class Result(Numbered, frozen=True, kw_only=True):
    """The function has returned."""

    values: Values | None = None


class Failure(Numbered, frozen=True, kw_only=True):
    """The function has raised."""

    reason: str


# -- to the process of a trial -----------------------------------------------------------------------------------------


class Order(Message, frozen=True, kw_only=True):
    """What to run."""

    trial: int
    lease: int
    config: dict[str, bool | int | float | str | None]
    metrics: tuple[str, ...]
    worker: WorkerSpec
    """Rank of a run of its own that this process takes on. The coordinator's address is the process's own."""
    seats: tuple[int, ...] = ()
    """Slots of the process's node that the trial has, which determine the GPUs that it sees."""
    num_seats: int = 0
    """All slots of the node."""


class Answer(Message, frozen=True, kw_only=True):
    """The messages up to this number have arrived."""

    number: int


class StopTrial(Message, frozen=True, kw_only=True):
    """Stop at the next report. No answer follows."""

    reason: str
    is_saving: bool


FromTrial = Hello | Report | Settle | Result | Failure
ToTrial = Order | Answer | StopTrial

_encoder = msgspec.json.Encoder()
from_trial: msgspec.json.Decoder[FromTrial] = msgspec.json.Decoder(FromTrial)
to_trial: msgspec.json.Decoder[ToTrial] = msgspec.json.Decoder(ToTrial)


def encode(message: FromTrial | ToTrial) -> bytes:
    return _encoder.encode(message) + b"\n"
