"""Validate what callers send: each error names the field and the fix, and nothing has been changed."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from strata.errors import InvalidArgument, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ID_LENGTH = 128
MAX_TEXT_LENGTH = 4096
MAX_COUNT = 2**53
"""Beyond this, JSON parsers of other languages lose digits."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
_NO_PARTS = ("", ".", "..")
"""Ids become parts of paths and URLs, also in other programs."""


def check_id(value: str, field: str) -> str:
    if not value:
        raise InvalidArgument(f"{field} is empty; set it", field=field)
    if len(value) > MAX_ID_LENGTH:
        raise InvalidArgument(
            f"{field} has {len(value)} characters; shorten it to at most {MAX_ID_LENGTH}", field=field
        )
    if not _ID.fullmatch(value):
        raise InvalidArgument(
            f"{field}={value!r} is malformed; use letters, digits and ._:/@+- starting with a letter or digit",
            field=field,
        )
    if any(part in _NO_PARTS for part in value.split("/")):
        raise InvalidArgument(
            f"{field}={value!r} would be an unsafe path; no part between slashes may be empty, '.' or '..'",
            field=field,
        )
    return value


def check_count(value: int, field: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
    if not least <= value <= most:
        raise InvalidArgument(f"{field}={value} is out of range; it must be between {least} and {most}", field=field)
    return value


def check_number(value: float, field: str, *, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidArgument(f"{field}={value} is out of range; it must be between {least} and {most}", field=field)
    return value


def check_text(value: str, field: str) -> str:
    if len(value) > MAX_TEXT_LENGTH:
        raise InvalidArgument(
            f"{field} has {len(value)} characters; shorten it to at most {MAX_TEXT_LENGTH}", field=field
        )
    return value


def map_size(values: Mapping[str, str]) -> int:
    """Return the size in bytes, as sent."""
    return sum(len(k.encode()) + len(v.encode()) for k, v in values.items())


def check_map_size(values: Mapping[str, str], field: str, *, max_bytes: int) -> None:
    size = map_size(values)
    if size > max_bytes:
        raise LimitExceeded(f"{field} has {size} bytes; the limit is {max_bytes}", field=field)


def check_room(count: int, limit: int, what: str, setting: str, *, field: str) -> None:
    """Check that one more of `what` fits under the limit."""
    if count >= limit:
        raise LimitExceeded(
            f"there are already {count} {what}, the maximum; raise limits.{setting} to allow more", field=field
        )
