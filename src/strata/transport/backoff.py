"""Pauses between attempts to connect.

Every retry of a connection uses them. They have a random generator of their own: a lost connection must not change the
random numbers of the training program, which checkpoints save and restore.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import tenacity

if TYPE_CHECKING:
    from collections.abc import Callable


def pauses(first_s: float, longest_s: float) -> Callable[[tenacity.RetryCallState], float]:
    """Return a wait strategy with random pauses, whose upper limit grows exponentially."""
    most_s = tenacity.wait_exponential(multiplier=first_s, max=longest_s)
    chance = random.Random()  # noqa: S311 - not a secret
    return lambda state: chance.uniform(0.0, most_s(state))
