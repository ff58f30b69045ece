"""What happened to a run, one event a line, and what the events say together.

The agent notes them as they come; people read them in words, and `recoveries` measures how long the run stood still
after each failure. Nothing here reads a clock or a file.
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
"""Characters of an event's text that are kept and shown."""
MAX_WHAT = 40
_SECONDS_UNTIL_S = 1_000.0
"""Later than this, hundredths tell nobody anything."""
_RANK = re.compile(r"rank (\d{1,9})\b")


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """Wall time, for people."""
    monotonic_s: float
    """For durations. Another boot of the machine counts from another start."""
    what: str
    """What the supervisor tells of, or `checkpoint`, `restored`, `first_step`, `finished`."""
    text: str = ""
    attempt: int = 0
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure, and how the run came back from it. Times count from the moment at which the failure was seen."""

    attempt: int
    """The one that was started."""
    failure: str
    detected_s: float
    """Monotonic: what was measured elsewhere, as the moment of a kill, can be compared with it."""
    started_ms: float
    restored_ms: float | None
    """When the last worker had its state back. None: none was told of, as there was no checkpoint or no time for it."""
    first_step_ms: float | None
    """When a worker had made a step again. None: the attempt ended before."""


def recoveries(events: Iterable[RunEvent]) -> list[Recovery]:
    """One per failure that was followed by another attempt, in the order of the failures."""
    found: list[Recovery] = []
    failed: RunEvent | None = None
    for event in events:
        if event.what == "failed":
            # The first of an attempt is its cause; the others died of it.
            if failed is None or event.attempt != failed.attempt:
                failed = event
        elif event.what == "cause":
            # Unless it turned out later that the first died of another's death.
            if failed is not None and event.attempt == failed.attempt:
                failed = msgspec.structs.replace(failed, text=event.text, rank=event.rank)
        elif event.what == "started":
            if failed is not None and _follows(event, failed):
                found.append(_begun(failed, event))
            failed = None
        elif event.what == "finished":
            failed = None  # whatever starts later was asked for by somebody
        elif event.what in ("restored", "first_step"):
            # Workers tell of their moments a little late, perhaps after their failure was seen.
            found = [_gone_on(each, event) if each.attempt == event.attempt else each for each in found]
    return found


def _follows(started: RunEvent, failed: RunEvent) -> bool:
    """Not, where somebody has begun to count anew in between: a resumed run, or another boot."""
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
    """Which worker a failure is of; where the event does not say, its words do: `rank 2: exit code 1`."""
    if event.rank is not None:
        return event.rank
    named = _RANK.match(event.text)
    return int(named[1]) if named else None


# -- in words ----------------------------------------------------------------------------------------------------------


def in_words(event: RunEvent, since_s: float) -> str:
    """One line; `since_s` is the wall time that it counts from."""
    what = printable(event.what.replace("_", " "), max_chars=MAX_WHAT)
    return f"{time_in_words(event.at_s - since_s):>10}  {what}: {_text(event)}"


def _text(event: RunEvent) -> str:
    if event.text:
        return printable(" ".join(event.text.split()), max_chars=MAX_TEXT)
    known = (("attempt", event.attempt), ("rank", event.rank), ("step", event.step))
    return ", ".join(f"{name} {number}" for name, number in known if number is not None)


def time_in_words(seconds: float) -> str:
    """`12.34 s`, and from a quarter of an hour on `0:16:40`. Clocks may be set back, so it may be below 0."""
    if abs(seconds) < _SECONDS_UNTIL_S:
        return f"{seconds:.2f} s"
    return hours(seconds)


def hours(seconds: float) -> str:
    """`1:02:03`, with days from the second on."""
    whole = int(abs(seconds))
    days, rest = divmod(whole, 86_400)
    sign = "-" if seconds < 0 else ""
    return f"{sign}{f'{days}d ' if days else ''}{rest // 3_600}:{rest // 60 % 60:02}:{rest % 60:02}"
