"""When a rank saves: its strategy, asked so that all ranks save after the same step.

Strategies that count steps reach the same decision on every rank. Those that measure time do not: rank 0 decides, and
asks all ranks to agree on a step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from strata.checkpoint import AnyOf, EverySteps, Manual
from strata.checkpoint.policy import not_before
from strata.errors import ConfigError
from strata.train.membership import NoMembership

if TYPE_CHECKING:
    from strata.checkpoint import CheckpointManager
    from strata.checkpoint.policy import Strategy
    from strata.identity import Identity
    from strata.train.membership import Membership

ASK_AGAIN_S = 60.0
"""Interval between two requests for a checkpoint, if the first had no result."""


class Schedule:
    """The strategy of one rank."""

    def __init__(self, strategy: Strategy | None, checkpoints: CheckpointManager, membership: Membership) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._membership = membership
        self._asked_s = -ASK_AGAIN_S
        self._not_before = 0
        """Step before which the strategy does not save."""

    @property
    def is_automatic(self) -> bool:
        """Whether there is a strategy that saves by itself."""
        return self._strategy is not None and not isinstance(self._strategy, Manual)

    def restored(self) -> None:
        """Steps may be made again."""
        self._not_before = 0

    def saved(self) -> None:
        """A save has begun, so that a request for one has its result."""
        self._asked_s = -ASK_AGAIN_S

    def is_certain(self, step: int) -> bool:
        """Return whether all ranks save after this step without asking each other."""
        if self._strategy is None or not self.is_automatic or not decides_by_steps(self._strategy):
            return False
        return bool(self._checkpoints.should_save(step))

    def is_time(self, step: int, identity: Identity) -> bool:
        """Return whether this rank saves now; for strategies by time, ask all ranks instead.

        Raises:
            ConfigError: The ranks cannot agree on a time.
        """
        if step < self._not_before or self._strategy is None or not self.is_automatic:
            return False
        if identity.world_size == 1 or decides_by_steps(self._strategy):
            is_time = bool(self._checkpoints.should_save(step))
            if not is_time:
                self._not_before = not_before(self._strategy, step)
            return is_time
        if isinstance(self._membership, NoMembership):
            raise ConfigError(
                f"{identity.world_size} ranks without a coordinator cannot agree on a time to save; save by steps "
                f"(strata.init(every=500)), or start them with `strata run --workers {identity.world_size}`",
                field="every",
            )
        now_s = time.monotonic()
        if identity.rank == 0 and now_s - self._asked_s >= ASK_AGAIN_S:
            decision = self._checkpoints.should_save(step)
            if decision:
                self._asked_s = now_s
                self._membership.ask_checkpoint(decision.reason)
        return False


def decides_by_steps(strategy: Strategy) -> bool:
    """Return whether all ranks reach the same decision by themselves."""
    if isinstance(strategy, AnyOf):
        return all(map(decides_by_steps, strategy.strategies))
    return isinstance(strategy, (EverySteps, Manual))
