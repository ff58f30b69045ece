"""How ranks agree on a step, without the training thread ever waiting inside one.

Somebody asks for a checkpoint, or for a stop, at any moment. All ranks must do it after the same step, and none may
wait for the others before that step is known: a rank that waits at step 5 while another is inside the collective of
step 6 waits for ever. So it is a thread beside training that answers. It sets a limit, the step under way plus one,
beyond which training does not go for now; makes the limit known; and learns the others'. The greatest limit is the
step. Training waits only if it comes to its own limit before that, and then between two steps, where nobody needs it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from strata.lifecycle import renewed

Wish = Literal["checkpoint", "stop"]


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done after a step."""

    wish: Wish
    step: int
    reason: str


class Agreement:
    """The limit and the steps that were agreed on; for the training thread and the one beside it."""

    def __init__(self, step: int = 0) -> None:
        self._lock = renewed(threading.Lock())
        self._changed = threading.Condition(self._lock)
        self._step = step
        """The last one that is done."""
        self._limit: int | None = None
        self._due: list[Due] = []

    # -- beside training -------------------------------------------------------------------------------------------

    def set_limit(self) -> int:
        """Training goes no further than this until `agree` or `give_up`."""
        with self._changed:
            self._limit = self._step + 1
            return self._limit

    def agree(self, due: Due) -> None:
        with self._changed:
            self._due.append(due)
            self._limit = None
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nothing came of it: somebody has died, and the attempt ends anyway."""
        with self._changed:
            self._limit = None
            self._changed.notify_all()

    # -- the training thread ---------------------------------------------------------------------------------------

    def restored(self, step: int) -> None:
        """Training goes on after this step. What was agreed on before is due after the next one."""
        with self._changed:
            self._step = step

    def take_due(self, step: int, *, timeout_s: float) -> list[Due]:
        """What is to be done now, after this step. Waits while that is being found out.

        The step is noted and the limit looked at under one lock: no limit is ever set below a step that has passed.
        """
        with self._lock:  # not by way of the condition, which costs more: this is done after every step
            self._step = step
            if self._limit is None and not self._due:
                return []
            self._changed.wait_for(lambda: self._limit is None or step < self._limit, timeout_s)
            now = [due for due in self._due if due.step <= step]
            self._due = [due for due in self._due if due.step > step]
            return now
