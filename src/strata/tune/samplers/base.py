"""The port of samplers: which configuration to try next.

A sampler is deterministic: its answers depend only on its seed and on the order of the calls. A study that is resumed
repeats the calls from its journal, so it continues with the configuration that it would have tried anyway. A sampler
belongs to one thread, keeps what it needs in memory, and never touches a file.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from strata.tune.space.parameters import Config

Direction = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial has come to. One that has paused may continue, and has another outcome later."""

    state: Literal["finished", "paused", "pruned", "failed"]
    values: tuple[float, ...] = ()
    """One finite value per objective; empty if the trial has none. Those of a paused or pruned trial are from its last
    report.
    """
    step: int | None = None
    """Step of these values."""
    violations: tuple[float, ...] = ()
    """One finite number per constraint on metrics; it holds up to 0."""


FAILED = Outcome("failed")


class Sampler(abc.ABC):
    """Trials are identified by their numbers, which the caller chooses."""

    @abc.abstractmethod
    def ask(self, number: int) -> Config | None:
        """Return the configuration of a new trial, which counts as running from now on; None if the space has no other.

        Raises:
            ConfigError: The constraints leave nothing to find.
        """

    @abc.abstractmethod
    def add(self, number: int, config: Config) -> None:
        """Add a running trial whose configuration was chosen elsewhere: a default, or a trial of an earlier study."""

    @abc.abstractmethod
    def tell(self, number: int, outcome: Outcome) -> None:
        """Report the end of a trial, or that it has paused. Outcomes may come in any order; a second end of the same
        trial is ignored.
        """

    def replay(self, number: int, config: Config) -> None:
        """Repeat an `ask` of which the journal has the answer. The answer counts, even if a newer version of a sampler
        would give another one.
        """
        if self.ask(number) != config:
            self.tell(number, FAILED)
            self.add(number, config)
