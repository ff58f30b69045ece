"""Hive partitions: columns whose values are part of directory names, as in `year=2026/country=de/f.parquet`.

Pure: names in, columns out. A type is inferred from all files together, so it does not depend on their order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from strata.errors import SchemaMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from strata.data.source.source import DataFile

NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_WILDCARD = re.compile(r"[*?\[]")
_NONE: Mapping[str, str | None] = {}


def hive_partition(name: str, above: Mapping[str, str | None] = _NONE) -> tuple[tuple[str, str | None], ...]:
    """Return the percent-decoded keys and values in a name relative to the dataset's root; None is the null partition.

    `above` holds the keys in the path to the root; those in the name take precedence.

    Raises:
        SchemaMismatch: The name contains a key twice.
    """
    found: dict[str, str | None] = {}
    for key, value in _pairs(name):
        if key in found:
            raise SchemaMismatch(
                f"{name} contains the partition key {key!r} twice; rename one of its directories, "
                "or pass partitioning=None to read only the columns in the files"
            )
        found[key] = value
    return (*((key, value) for key, value in above.items() if key not in found), *found.items())


def hive_keys(written: str) -> dict[str, str | None]:
    """Return the keys in a path or pattern up to its first wildcard; the last value of a repeated key wins."""
    return dict(_pairs(_WILDCARD.split(written, maxsplit=1)[0]))


def _pairs(name: str) -> Iterator[tuple[str, str | None]]:
    for part in name.split("/")[:-1]:
        key, separator, value = part.partition("=")
        if separator and key:
            yield unquote(key), None if value == NULL else unquote(value)


def partition_fields(files: Sequence[DataFile]) -> list[pa.Field]:
    """Return one column per key: int64 if all values are integers without leading zeros, else string.

    Raises:
        SchemaMismatch: Two files differ in their keys or the order of them.
    """
    if not files:
        return []
    keys = _keys(files[0])
    values: dict[str, set[str]] = {key: set() for key in keys}
    for file in files:
        if _keys(file) != keys:
            raise SchemaMismatch(
                f"files disagree on partition keys: {files[0].name} has {_listed(keys)}, {file.name} has "
                f"{_listed(_keys(file))}; put all files under the same keys, or pass partitioning=None"
            )
        for key, value in file.partition:
            if value is not None:
                values[key].add(value)
    return [pa.field(key, pa.int64() if _are_integers(values[key]) else pa.string()) for key in keys]


def partition_values(file: DataFile, fields: Sequence[pa.Field]) -> dict[str, object]:
    """Return the file's partition values with the types of `fields`; None is null.

    Raises:
        SchemaMismatch: The file lacks a key, or its value has another type.
    """
    own = dict(file.partition)
    found: dict[str, object] = {}
    for field in fields:
        if field.name not in own:
            raise SchemaMismatch(
                f"{file.name} has no partition key {field.name!r}, its keys are {_listed(_keys(file))}; "
                "put all files under the same keys, or pass partitioning=None"
            )
        value = own[field.name]
        if value is None or not pa.types.is_int64(field.type):
            found[field.name] = value
        elif _is_integer(value):
            found[field.name] = int(value)
        else:
            raise SchemaMismatch(
                f"{file.name} has {field.name}={value!r}, but this key has integer values in the rest of the "
                "dataset; rename the directory, or move it out of the dataset"
            )
    return found


def _keys(file: DataFile) -> tuple[str, ...]:
    return tuple(key for key, _ in file.partition)


def _listed(keys: tuple[str, ...]) -> str:
    return ", ".join(keys) if keys else "none"


def _are_integers(values: set[str]) -> bool:
    return bool(values) and all(map(_is_integer, values))


def _is_integer(value: str) -> bool:
    return _INTEGER.fullmatch(value) is not None and _MIN_INT64 <= int(value) <= _MAX_INT64
