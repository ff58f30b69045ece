"""The traces of recoveries: a recovery is exported once it is over, or once it is known that it never will be.

Pure, but for the events that are remembered.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from strata.launch.record.recovery import MOMENTS, GenerationMoment, recoveries
from strata.tracing import Span

if TYPE_CHECKING:
    from strata.launch.record.recovery import MomentName, RecoveryTimeline
    from strata.launch.record.timeline import RunEvent

NAMES: dict[MomentName, str] = {
    "detected": "detect",
    "generation": "new generation",
    "started": "start workers",
    "chosen": "choose checkpoint",
    "loaded": "load",
    "first_step": "first step",
}
"""The span that ends with each moment."""
WHATS = ("failed", "cause", "started", "restarted", "chosen", "restored", "first_step", "finished")
MAX_EVENTS = 10_000
MAX_GENERATIONS = 100


class RecoveryTraces:
    """Follows the events of a run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._events: deque[RunEvent] = deque(maxlen=MAX_EVENTS)
        """Since the first failure whose trace is not complete."""
        self._generations: deque[GenerationMoment] = deque(maxlen=MAX_GENERATIONS)
        self._done: set[tuple[int, float]] = set()

    def changed(self, generation: int, at_s: float) -> None:
        """Note the generation of the membership; the same again changes nothing."""
        if not self._generations or generation > self._generations[-1].generation:
            self._generations.append(GenerationMoment(at_s=at_s, generation=generation))

    def add(self, event: RunEvent) -> list[Span]:
        """Return the traces that are complete with this event."""
        if event.what not in WHATS or (not self._events and event.what != "failed"):
            return []
        self._events.append(event)
        if event.what not in ("first_step", "finished"):
            return []
        found = recoveries(self._events, self._generations)
        last_over = max((number for number, each in enumerate(found) if each.is_over), default=-1)
        spans = []
        for number, each in enumerate(found):
            key = (each.failed_attempt, each.at_s["detected"])
            if key not in self._done and (each.is_over or number < last_over or event.what == "finished"):
                self._done.add(key)
                next_s = found[number + 1].at_s["detected"] if number + 1 < len(found) else event.at_s
                spans.append(trace_of(each, run=self._run, given_up_s=next_s))
        if len(self._done) == len(found):
            self._events.clear()
            self._done.clear()
        return spans


def trace_of(found: RecoveryTimeline, *, run: str, given_up_s: float) -> Span:
    """Return the trace of a recovery: a span for what led to each moment, since the moment before.

    `given_up_s`: when the run ended or failed again, which ends a recovery that is not over.
    """
    began_s = found.at_s["detected"]
    order = sorted(found.at_s, key=lambda name: (found.at_s[name], MOMENTS.index(name)))
    children, before_s = [], began_s
    for name in order:
        children.append(Span(name=NAMES[name], began_s=before_s, ended_s=found.at_s[name]))
        before_s = found.at_s[name]
    known = {
        "strata.rank": found.rank,
        "strata.attempt": found.attempt,
        "strata.generation": found.generation,
        "strata.checkpoint.step": found.step,
        "strata.first_step": found.first_step,
    }
    return Span(
        name="recovery",
        began_s=began_s,
        ended_s=before_s if found.is_over else max(before_s, given_up_s),
        attributes={
            "strata.run": run,
            "strata.cause": found.cause,
            "strata.failed_attempt": found.failed_attempt,
            **{name: number for name, number in known.items() if number is not None},
        },
        error="" if found.is_over else "training made no step after this failure",
        children=tuple(children),
    )
