"""What a failure of a worker shows about the program: whether another start can help, and how soon. Pure.

A programming error fails again, and so does input that a worker cannot handle: the same worker then fails at the same
step with the same message. Everything else, such as a lost machine, is worth another start.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
MAX_ALIKE = 3
"""Failures of the same rank at the same step with the same message that end the run: its input is at fault."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that are no evidence against the program."""
_USAGE = 2
"""Exit code of argparse, click and Python itself for an invalid command line."""
_EXCEPTION = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")
_OF_PYTHON = {
    *("SyntaxError", "IndentationError", "TabError"),
    *("ImportError", "ModuleNotFoundError"),
    *("NameError", "UnboundLocalError", "AttributeError", "TypeError"),
}
_OF_STRATA = ("strata.errors.ConfigError", "strata.errors.InvalidArgument")
_NO_MODULE = ": No module named "
"""What `python -m` prints, without a traceback."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a worker, as evidence about the program and its input."""

    rank: int
    code: int
    last_words: str
    saved_step: int
    step: int | None
    """Last step that was reported, which may lie a little before the failure. None: no step was reported."""


def pause_s(num_idle: int) -> float:
    """Return how long to wait before the next start, after as many failures in a row without a step."""
    return min(FIRST_PAUSE_S * 2 ** (num_idle - 1), LONGEST_PAUSE_S) if num_idle else 0.0


def is_input_at_fault(history: Sequence[Failure], *, stride: int) -> bool:
    """Return whether the last failures are alike. Steps are known to within `stride`, the most steps between two
    reports.
    """
    last = history[-MAX_ALIKE:]
    if len(last) < MAX_ALIKE or last[0].code in _FROM_OUTSIDE:
        return False
    if len({(each.rank, each.code, each.last_words, each.saved_step) for each in last}) > 1:
        return False
    steps = [each.step for each in last if each.step is not None]
    return not steps or max(steps) - min(steps) <= 2 * stride


def is_programming_error(code: int, last_words: str) -> bool:
    """Return whether a worker without a step failed because of how its program is written or called.

    Running such a program again would fail the same way. An error that data or the machine may have caused is worth
    another attempt and does not count.
    """
    if code == _USAGE:
        return True
    if code != 1:
        return False
    named = _EXCEPTION.match(last_words)
    return (
        (named is not None and named[0].rstrip(":") == named[1] and named[1] in _OF_PYTHON)
        or last_words.startswith(_OF_STRATA)
        or _NO_MODULE in last_words
    )
