"""The port of schedulers: which trials go on.

After each report a scheduler decides whether the trial continues, ends, or pauses until a slot is worth more with it
than with another trial. When a slot is free, it chooses what runs there. Decisions are a function of the order of the
calls, and each carries its reason in words, for the journal and the terminal. Nothing here performs I/O.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from strata.tune.space.parameters import Config


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a trial after its report: a stopped trial has ended, a paused one may be resumed."""

    what: Literal["continue", "stop", "pause"]
    reason: str = ""


CONTINUE = Verdict("continue")


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a paused trial go on from its checkpoint."""

    trial: int
    reason: str
    donor: int | None = None
    """Continue from the checkpoint of this trial instead."""
    config: Config | None = None
    """Continue with this configuration; None: with its own."""


@dataclass(frozen=True, slots=True)
class StartNew:
    """Start a trial with another configuration."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the slot free until another trial has reported or ended."""


Decision = Resume | StartNew | Wait
Losses = tuple[float, ...]
"""One per objective. Lower is better; infinite if the metric was not a number."""
Compare = Literal["dominance", "first"]
"""How trials with several objectives are compared: a trial is better if it is better in one objective and worse in
none, or if it is better in the first.
"""


def check_compare(compare: str) -> None:
    """
    Raises:
        ConfigError: It is unknown.
    """
    if compare not in ("dominance", "first"):
        raise ConfigError(f"compare={compare!r} is unknown; use 'dominance' or 'first'", field="compare")


class Scheduler(abc.ABC):
    """Trials are numbers."""

    def started(self, trial: int, config: Config) -> None:  # noqa: B027 - optional
        """A new trial has started."""

    @abc.abstractmethod
    def reported(self, trial: int, step: int, losses: Losses, *, is_contended: bool) -> Verdict:
        """Return what follows from a report. Steps of a trial increase. `is_contended`: others wait for a slot."""

    def resumed(self, trial: int, config: Config) -> None:  # noqa: B027 - optional
        """A paused trial runs again, as this scheduler has chosen."""

    def ended(self, trial: int, *, is_failed: bool) -> None:  # noqa: B027 - optional
        """A trial reports no more."""

    def choose(self, paused: Collection[int], running: Collection[int], *, has_new: bool) -> Decision:  # noqa: ARG002
        """Return what to run in a free slot, without changing anything. `has_new`: a new trial can be started."""
        return StartNew() if has_new else Wait()


class RunAll(Scheduler):
    """Let every trial run to its end."""

    def reported(self, trial: int, step: int, losses: Losses, *, is_contended: bool) -> Verdict:  # noqa: ARG002
        return CONTINUE
