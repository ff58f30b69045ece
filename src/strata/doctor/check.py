"""The result of one check."""

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
    """What the check found."""
    cure: str = ""
    """How to fix it; empty if there is nothing to fix."""
    essential: bool = False
    """Strata does not work without it."""
