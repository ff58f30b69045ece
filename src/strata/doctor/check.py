"""One finding of `strata doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    status: Status
    detail: str
    """What was found."""
    cure: str = ""
    """What to do about it, where there is something to do."""
    essential: bool = False
    """Nothing works without it."""
