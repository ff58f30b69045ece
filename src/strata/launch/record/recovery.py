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

MomentName = Literal["detected", "generation", "started", "chosen", "loaded", "first_step"]
MOMENTS: tuple[MomentName, ...] = get_args(MomentName)


class GenerationMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a generation, from the journal."""

    at_s: float
    generation: int


class RecoveryTimeline(msgspec.Struct, frozen=True, kw_only=True):
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


def recoveries(events: Iterable[RunEvent], generations: Sequence[GenerationMoment] = ()) -> list[RecoveryTimeline]:
    """Return one recovery per failed attempt or worker that was restarted alone, in order."""
    history = _History()
    for event in events:
        history.add(event)
    found = sorted(history.close(), key=lambda each: each.at_s["detected"])
    detected = [each.at_s["detected"] for each in found]
    return [
        _with_generation(each, _next([*detected[number:], *history.finished], each.at_s["detected"]), generations)
        for number, each in enumerate(found, start=1)
    ]


def _next(times: Iterable[float], after_s: float) -> float:
    return min((at_s for at_s in times if at_s >= after_s), default=float("inf"))


class _History:
    """What has followed from the failures so far."""

    def __init__(self) -> None:
        self.finished: list[float] = []
        """When the run has ended; it may be resumed."""
        self._found: list[RecoveryTimeline] = []
        self._waiting: list[RecoveryTimeline] = []
        """Failures of an attempt that nothing has followed yet, in order: the first is the cause of its end, unless its
        worker is restarted alone.
        """

    def close(self) -> list[RecoveryTimeline]:
        """Return all recoveries; nothing follows those that wait."""
        self._found += self._waiting[:1]
        self._waiting = []
        return self._found

    def add(self, event: RunEvent) -> None:
        match event.what:
            case "failed":
                self._failed(event)
            case "cause":
                self._waiting[:1] = [
                    msgspec.structs.replace(each, cause=event.text, rank=failed_rank(event))
                    if each.failed_attempt == event.attempt
                    else each
                    for each in self._waiting[:1]
                ]
            case "restarted":
                self._restarted(event)
            case "started":
                self._found += [_started(each, event) for each in self._waiting[:1]]
                self._waiting = []
            case "finished":
                self.finished.append(event.at_s)
                self.close()  # a later start is a resume, not a recovery
            case "chosen" | "restored" | "first_step":
                self._found = [_gone_on(each, event) if _is_of(event, each) else each for each in self._found]
            case _:
                pass

    def _failed(self, event: RunEvent) -> None:
        if self._waiting and self._waiting[0].failed_attempt != event.attempt:
            self.close()
        self._waiting.append(
            RecoveryTimeline(
                failed_attempt=event.attempt,
                attempt=None,
                rank=failed_rank(event),
                cause=event.text,
                at_s={"detected": event.at_s},
            )
        )

    def _restarted(self, event: RunEvent) -> None:
        rank = failed_rank(event)
        number = next((n for n, each in enumerate(self._waiting) if rank is None or each.rank == rank), None)
        if number is not None:
            self._found.append(_started(self._waiting.pop(number), event))


def _started(found: RecoveryTimeline, event: RunEvent) -> RecoveryTimeline:
    return _at(msgspec.structs.replace(found, attempt=event.attempt), "started", event)


def _is_of(event: RunEvent, found: RecoveryTimeline) -> bool:
    """Whether this moment of a worker belongs to a recovery that is not over. The moments of an attempt are those of
    rank 0. Workers report late: what happened before the failure does not belong to it.
    """
    if found.is_over or found.attempt != event.attempt or event.at_s < found.at_s["detected"]:
        return False
    rank = event.rank or 0
    return rank == (found.rank or 0) if found.attempt == found.failed_attempt else rank == 0


def _gone_on(found: RecoveryTimeline, event: RunEvent) -> RecoveryTimeline:
    if event.what == "chosen":  # again, if the ranks could not load the first choice
        return found if "loaded" in found.at_s else _at(found, "chosen", event)
    if event.what == "restored":
        return _at(msgspec.structs.replace(found, step=event.step), "loaded", event)
    return _at(msgspec.structs.replace(found, first_step=event.step), "first_step", event)


def _at(found: RecoveryTimeline, name: MomentName, event: RunEvent) -> RecoveryTimeline:
    return msgspec.structs.replace(found, at_s={**found.at_s, name: event.at_s})


def _with_generation(
    found: RecoveryTimeline, end_s: float, generations: Sequence[GenerationMoment]
) -> RecoveryTimeline:
    """Add the first generation after the detection. The coordinator may notice the loss a moment before the agent."""
    began_s = found.at_s["detected"] - EARLIER_S
    first = next((each for each in generations if began_s <= each.at_s < end_s), None)
    if first is None:
        return found
    at_s = {**found.at_s, "generation": max(first.at_s, found.at_s["detected"])}
    return msgspec.structs.replace(found, generation=first.generation, at_s=at_s)


EARLIER_S = 1.0
"""How much earlier than the agent the coordinator may notice the loss of a worker."""
