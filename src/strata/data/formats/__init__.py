"""File formats, each behind the port in `base.py`: Parquet, ORC, Arrow, CSV, JSON, tar shards.

`text` and `records` are shared by CSV and JSON, `damage` by all. The suffixes by which a format is detected are in
`source/paths.py`. May import `source`, `filter`, `memory` and `pyarrow_private`. Never decides which rows come when:
that is `order`.
"""

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
    "webdataset": ("webdataset.format", "WebDatasetFormat"),
}
NAMES = tuple(_HOMES)


def by_name(name: str, options: Mapping[str, Any] | None = None) -> Format:
    """Return a format by its public name; `options` are passed to its class.

    Raises:
        InvalidArgument: The format or an option of it is unknown.
    """
    if name not in _HOMES:
        raise InvalidArgument(f"format={name!r} is unknown; use one of {', '.join(NAMES)}", field="format")
    module, kind = _HOMES[name]
    made = getattr(importlib.import_module(f"strata.data.formats.{module}"), kind)
    try:
        format: Format = made(**(options or {}))
    except TypeError as error:
        raise InvalidArgument(f"format_options for {name}: {error}", field="format_options") from error
    return format
