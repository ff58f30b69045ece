"""What the driver of a study has to do: the answers of the state machine to an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.tune.space.parameters import Config
    from strata.tune.state.events import Event


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the sampler for the configuration of this trial; answer with `Asked` or `Exhausted`."""

    trial: int


@dataclass(frozen=True, slots=True)
class Start:
    """Run a trial in a slot, or in several: from a checkpoint, or from the start."""

    trial: int
    lease: int
    slot: int
    config: Config
    checkpoint: str
    step: int
    extra_slots: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot, *self.extra_slots)


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the worker of a trial to stop; `is_saving`: to save first, because the trial will be continued."""

    trial: int
    lease: int
    slot: int
    reason: str
    is_saving: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker of a trial, which does not answer; report its death as of any other."""

    trial: int
    lease: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The study has ended."""

    reason: str
    is_complete: bool


Action = Ask | Start | Stop | Kill | Finish


@dataclass(frozen=True, slots=True)
class Handled:
    facts: tuple[Event, ...] = ()
    """To be made durable, in this order, before the actions are carried out."""
    actions: tuple[Action, ...] = ()
    ignored: str = ""
    """Why the event changes nothing."""
