"""File formats, each behind the port of `base.py`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.data.formats.base import Format

_HOMES = {
    "parquet": ("parquet.format", "ParquetFormat"),
    "orc": ("orc", "OrcFormat"),
    "csv": ("csv", "CsvFormat"),
    "json": ("json", "JsonFormat"),
    "jsonl": ("json", "JsonlFormat"),
    "arrow": ("arrow", "ArrowFormat"),
}
NAMES = tuple(_HOMES)


def by_name(name: str, options: Mapping[str, Any] | None = None) -> Format:
    """A format by the name that users give; `options` are those of its class.

    Raises:
        InvalidArgument: There is no such format, or it has no such option.
    """
    if name not in _HOMES:
        raise InvalidArgument(f"format={name!r}; use one of {', '.join(NAMES)}", field="format")
    module, kind = _HOMES[name]
    made = getattr(importlib.import_module(f"strata.data.formats.{module}"), kind)
    try:
        format: Format = made(**(options or {}))
    except TypeError as error:
        raise InvalidArgument(f"format_options for {name}: {error}", field="format_options") from error
    return format
