"""Ranks agree on a step at which to save or stop, without the training thread ever waiting inside a step.

A request may come at any time. All ranks must act after the same step, and none may wait for the others before that
step is known: a rank that waits at step 5 while another is inside the collective of step 6 would wait for ever. So a
thread beside training answers. It sets a limit, the current step plus one, beyond which training does not go for now,
publishes it and learns the limits of the others. The highest limit is the step. Training waits only if it reaches its
own limit before that, and then between two steps, where no collective needs it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Wish = Literal["checkpoint", "stop", "resize"]


@dataclass(frozen=True, slots=True)
class Due:
    """What to do after a step."""

    wish: Wish
    step: int
    reason: str
    args: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the command, such as the number of servers."""


class Agreement:
    """The limit and the agreed steps, shared by the training thread and the thread beside it."""

    def __init__(self, step: int = 0, *, on_limit: Callable[[], None] = lambda: None) -> None:
        """`on_limit` is called before a limit is set: from then on, the other ranks rely on this one."""
        self._on_limit = on_limit
        self._lock = renewed(threading.Lock())
        self._changed = threading.Condition(self._lock)
        self._step = step
        """The last completed step."""
        self._limit: int | None = None
        self.waited_s = 0.0
        """Time for which training has waited for an agreement."""
        self._due: list[Due] = []

    # -- beside training -------------------------------------------------------------------------------------------

    def set_limit(self) -> int:
        """Let training go no further than the returned step until `agree` or `give_up`."""
        with self._changed:
            self._on_limit()
            self._limit = self._step + 1
            return self._limit

    def agree(self, due: Due) -> None:
        with self._changed:
            self._due.append(due)
            self._limit = None
            self._changed.notify_all()

    def give_up(self) -> None:
        """Remove the limit without an agreement: a rank has died, and the attempt ends anyway."""
        with self._changed:
            self._limit = None
            self._changed.notify_all()

    # -- the training thread ---------------------------------------------------------------------------------------

    def restored(self, step: int) -> None:
        """Training continues after this step. What was agreed on before is due after the next one."""
        with self._changed:
            self._step = step

    def take_due(self, step: int, *, timeout_s: float) -> list[Due]:
        """Record a completed step and return what to do after it; wait while the ranks are agreeing on a step.

        Recording the step and reading the limit share one lock, so no limit is set below a completed step.
        """
        with self._lock:  # cheaper than the condition, and this runs after every step
            self._step = step
            if self._limit is None and not self._due:
                return []
            began_s = time.monotonic()
            self._changed.wait_for(lambda: self._limit is None or step < self._limit, timeout_s)
            self.waited_s += time.monotonic() - began_s
            now = [due for due in self._due if due.step <= step]
            self._due = [due for due in self._due if due.step > step]
            return now

    def reason_of(self, wish: Wish) -> str:
        """Return why this was agreed on, without taking it; empty if it was not."""
        with self._lock:
            return next((due.reason for due in self._due if due.wish == wish), "")

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call `action` unless the ranks are agreeing on a step, or have agreed on one that is still to come."""
        with self._lock:
            if self._limit is None and not self._due:
                action()

    def take_all(self) -> list[Due]:
        """Return everything that was agreed on, whatever its step: for a rank that makes no steps of its own."""
        with self._lock:
            taken, self._due = self._due, []
            return taken
