"""Requests as protobuf messages, with mistakes told in the caller's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

M = TypeVar("M", bound="Message")


def message(kind: type[M], /, **fields: Any) -> M:
    """A protobuf message; a value that does not fit its field is the caller's mistake, told by the field's name."""
    try:
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{_misfit(kind, fields)} does not fit: {error}", field=_misfit(kind, fields)) from None


def _misfit(kind: type[Message], fields: Mapping[str, Any]) -> str:
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (ValueError, TypeError):
            return name
    return kind.__name__
