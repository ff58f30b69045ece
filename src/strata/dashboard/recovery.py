"""The recoveries of a run: every failure as a sequence of moments, from its detection to the first step after it.

The moments come from the timeline that the agent of the run records and, for the generation, from the journal of the
coordinator. Pure: events in, recoveries out. A moment that did not happen, or has not happened yet, is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from strata.launch.record.timeline import failed_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.launch.record.timeline import RunEvent

MomentName = Literal["detected", "generation", "started", "loaded", "first_step"]
MOMENTS: tuple[MomentName, ...] = get_args(MomentName)


class GenerationMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a generation, from the journal."""

    at_s: float
    generation: int


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One failure and what followed. Times are wall times."""

    failed_attempt: int
    attempt: int | None
    """The attempt that followed; the same one if the worker was restarted alone, None if there was none."""
    rank: int | None
    cause: str
    at_s: dict[MomentName, float]
    """The moments that happened."""
    generation: int | None = None
    """The generation that the failure started."""
    step: int | None = None
    """Step of the checkpoint that was loaded; None for a start without one."""
    first_step: int | None = None

    @property
    def is_over(self) -> bool:
        return "first_step" in self.at_s

    @property
    def took_s(self) -> float | None:
        """From the detection to the first step."""
        return self.at_s["first_step"] - self.at_s["detected"] if self.is_over else None


def recoveries(events: Iterable[RunEvent], generations: Sequence[GenerationMoment] = ()) -> list[Recovery]:
    """Return one recovery per failed attempt or worker that was restarted alone, in order."""
    found: list[Recovery] = []
    for event in events:
        found = _after(found, event)
    detected = [each.at_s["detected"] for each in found]
    return [
        _with_generation(each, detected[number] if number < len(found) else float("inf"), generations)
        for number, each in enumerate(found, start=1)
    ]


def _after(found: list[Recovery], event: RunEvent) -> list[Recovery]:
    last = found[-1] if found else None
    if event.what == "failed":
        # The first failure of an attempt is its cause; the others followed from it.
        if last is not None and last.failed_attempt == event.attempt and last.attempt is None:
            return found
        new = Recovery(
            failed_attempt=event.attempt,
            attempt=None,
            rank=failed_rank(event),
            cause=event.text,
            at_s={"detected": event.at_s},
        )
        return [*found, new]
    if last is None:
        return found
    if event.what == "cause" and last.failed_attempt == event.attempt:
        changed = msgspec.structs.replace(last, cause=event.text, rank=failed_rank(event))
    elif event.what in ("started", "restarted") and last.attempt is None:
        changed = msgspec.structs.replace(last, attempt=event.attempt, at_s={**last.at_s, "started": event.at_s})
    elif last.is_over or last.attempt != event.attempt:
        return found
    elif event.what == "restored":
        changed = msgspec.structs.replace(last, step=event.step, at_s={**last.at_s, "loaded": event.at_s})
    elif event.what == "first_step":
        changed = msgspec.structs.replace(last, first_step=event.step, at_s={**last.at_s, "first_step": event.at_s})
    else:
        return found
    return [*found[:-1], changed]


def _with_generation(found: Recovery, end_s: float, generations: Sequence[GenerationMoment]) -> Recovery:
    """Add the first generation after the detection. The coordinator may notice the loss a moment before the agent."""
    began_s = found.at_s["detected"] - EARLIER_S
    first = next((each for each in generations if began_s <= each.at_s < end_s), None)
    if first is None:
        return found
    at_s = {**found.at_s, "generation": max(first.at_s, found.at_s["detected"])}
    return msgspec.structs.replace(found, generation=first.generation, at_s=at_s)


EARLIER_S = 1.0
"""How much earlier than the agent the coordinator may notice the loss of a worker."""
