"""What the workers of a stream do between two passes, while there are no new files: wait, save, stop or end.

A rank that waits makes no steps, so what `maybe_checkpoint` does after a step is done here: rank 0 decides, and all
ranks learn it together with the files that it has found. Workers that can be restarted alone meet only for that: rank
0 lists the directory by itself, and the others wait for it at the meeting. There they save the names of the files, so
that a worker that is restarted within the pass finds them.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Literal

from strata.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.clock import Clock
    from strata.data.stream import Look
    from strata.train.context import Context
    from strata.trainer.loop import Loop

Kind = Literal["interrupt", "stop", "end", "save"]


class Pauses:
    """The waits of one worker."""

    def __init__(self, ctx: Context, idle_timeout_s: float | None, *, clock: Clock | None = None) -> None:
        self._ctx = ctx
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock or SystemClock()

    def wait_for_files(self, loop: Loop) -> bool:
        """Wait until a pass has begun; return whether it has, or training is to end.

        Raises:
            SystemExit: The run was asked to stop; everything is saved.
            KeyboardInterrupt: Ctrl-C in a run of one process; everything is saved.
        """
        ctx, began_s = self._ctx, self._clock.monotonic_s()

        def wish(is_active: bool) -> str:
            return self._wish(loop, 0.0 if is_active else self._clock.monotonic_s() - began_s)

        while True:
            meets = ctx.may_lose_ranks and not loop.parts.loader.is_begun
            found = self._met(loop, wish) if meets else loop.parts.loader.look(wish)
            if found.files:
                return True
            kind, _, reason = found.wish.partition(" ")
            if kind == "end":
                loop.parts.history.stop_reason = reason
                return False
            loop.end_if_interrupted()
            if kind and not ctx.is_saved:
                loop.save()
            if kind == "stop":
                ctx.stop(reason)
            ctx.idle()
            time.sleep(found.pause_s)

    def _met(self, loop: Loop, wish: Callable[[bool], str]) -> Look:
        """Return what rank 0 has found, once that is files or a wish, on workers that can be restarted alone."""
        ctx, loader = self._ctx, loop.parts.loader
        found: Look | None = None
        while ctx.rank == 0 and (found is None or not (found.files or found.wish)):
            if found is not None:
                ctx.idle()
                time.sleep(found.pause_s)
            found = loader.find(wish)
        with ctx.together(f"pass {ctx.epoch}", timeout_s=math.inf):
            shared: Look = loader.begin(lambda: found)
            if shared.files:
                loop.save()
            else:
                ctx.will_end()
        return shared

    def _wish(self, loop: Loop, idle_s: float) -> str:
        """Return what all ranks do next, and why; nothing if they begin a pass or wait."""
        ctx = self._ctx
        wishes: dict[Kind, str] = {
            "interrupt": "Ctrl-C" if loop.is_interrupted else "",
            "stop": ctx.stop_reason(),
            "end": self._end(idle_s),
            "save": "" if ctx.is_saved or not ctx.checkpoints.should_save(ctx.step) else "it is due",
        }
        return next((f"{kind} {reason}" for kind, reason in wishes.items() if reason), "")

    def _end(self, idle_s: float) -> str:
        limit_s = self._idle_timeout_s
        return "" if limit_s is None or idle_s < limit_s else f"no new file for {limit_s:g} s"
