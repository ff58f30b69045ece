"""The timeline of a run: its events, their text, and the recoveries that they show.

The agent records the events; `recoveries` measures how long the run was interrupted by each failure. Nothing here reads
a clock or a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from strata.printing import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_TEXT = 1_000
"""Characters of an event's text that are stored and shown."""
MAX_WHAT = 40
_SECONDS_UNTIL_S = 1_000.0
"""Above this, show hours and minutes instead of hundredths of a second."""
_RANK = re.compile(r"rank (\d{1,9})\b")


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """Wall time, for people."""
    monotonic_s: float
    """For durations. It starts anew with each boot of the machine."""
    what: str
    """A kind of the supervisor's notes, or `checkpoint`, `restored`, `first_step`, `finished`."""
    text: str = ""
    attempt: int = 0
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure and the recovery from it. Times count from the detection of the failure."""

    attempt: int
    """The attempt that was started."""
    failure: str
    detected_s: float
    """Monotonic time, comparable with other measurements, such as the time of a kill."""
    started_ms: float
    restored_ms: float | None
    """Time until the state was restored. None: there was no checkpoint, or the attempt ended before."""
    first_step_ms: float | None
    """Time until the first step. None: the attempt ended before."""


def recoveries(events: Iterable[RunEvent]) -> list[Recovery]:
    """Return one recovery per failure that was followed by another attempt, in order."""
    found: list[Recovery] = []
    failed: RunEvent | None = None
    alone: set[tuple[int, int]] = set()
    """Attempts and ranks whose workers were restarted alone: their moments are not those of the attempt."""
    for event in events:
        if event.what == "failed":
            # The first failure of an attempt is its cause; the others followed from it.
            if failed is None or event.attempt != failed.attempt:
                failed = event
        elif event.what == "cause":
            # … unless it turned out later that the first followed from another one.
            if failed is not None and event.attempt == failed.attempt:
                failed = msgspec.structs.replace(failed, text=event.text, rank=event.rank)
        elif event.what == "started":
            if failed is not None and _follows(event, failed):
                found.append(_begun(failed, event))
            failed = None
        elif event.what == "restarted":
            failed = None  # this rank alone, in the same attempt
            if event.rank:
                alone.add((event.attempt, event.rank))
        elif event.what == "finished":
            failed = None  # a later start is a resume, not a recovery
        elif event.what in ("restored", "first_step") and (event.attempt, event.rank) not in alone:
            # Workers report their events a little late, perhaps after the detection of their failure.
            found = [_gone_on(each, event) if each.attempt == event.attempt else each for each in found]
    return found


def _follows(started: RunEvent, failed: RunEvent) -> bool:
    """Return whether the start follows the failure: a resume or another boot restarts the counters."""
    return started.attempt > failed.attempt and started.monotonic_s >= failed.monotonic_s


def _begun(failed: RunEvent, started: RunEvent) -> Recovery:
    return Recovery(
        attempt=started.attempt,
        failure=failed.text,
        detected_s=failed.monotonic_s,
        started_ms=_ms(failed.monotonic_s, started),
        restored_ms=None,
        first_step_ms=None,
    )


def _gone_on(recovery: Recovery, event: RunEvent) -> Recovery:
    if recovery.first_step_ms is not None:
        return recovery
    if event.what == "restored":
        return replace(recovery, restored_ms=_ms(recovery.detected_s, event))
    return replace(recovery, first_step_ms=_ms(recovery.detected_s, event))


def _ms(since_s: float, event: RunEvent) -> float:
    return (event.monotonic_s - since_s) * 1_000


def failed_rank(event: RunEvent) -> int | None:
    """Return the rank of a failure, from the event or from its text: `rank 2: exit code 1`."""
    if event.rank is not None:
        return event.rank
    named = _RANK.match(event.text)
    return int(named[1]) if named else None


# -- text --------------------------------------------------------------------------------------------------------------


def in_words(event: RunEvent, since_s: float) -> str:
    """Return an event as one line; `since_s` is the wall time that it counts from."""
    what = printable(event.what.replace("_", " "), max_chars=MAX_WHAT)
    return f"{time_in_words(event.at_s - since_s):>10}  {what}: {text_of(event)}"


def text_of(event: RunEvent) -> str:
    """Return what happened as one line, without its kind and time."""
    if event.text:
        return printable(" ".join(event.text.split()), max_chars=MAX_TEXT)
    known = (("attempt", event.attempt), ("rank", event.rank), ("step", event.step))
    return ", ".join(f"{name} {number}" for name, number in known if number is not None)


def time_in_words(seconds: float) -> str:
    """Return `12.34 s`, or from a quarter of an hour on `0:16:40`. Clocks may be set back, so it may be negative."""
    if abs(seconds) < _SECONDS_UNTIL_S:
        return f"{seconds:.2f} s"
    return hours(seconds)


def hours(seconds: float) -> str:
    """Return `1:02:03`, or `2d 1:02:03`."""
    whole = int(abs(seconds))
    days, rest = divmod(whole, 86_400)
    sign = "-" if seconds < 0 else ""
    return f"{sign}{f'{days}d ' if days else ''}{rest // 3_600}:{rest // 60 % 60:02}:{rest % 60:02}"
