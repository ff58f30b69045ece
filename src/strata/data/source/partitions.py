"""Hive partitions: columns whose values stand in the names of directories, `year=2026/country=de/f.parquet`.

Pure: names in, columns out. A type is inferred from all files together, so that it does not depend on which is first.
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
_LEAST, _MOST = -(2**63), 2**63 - 1
_WILDCARD = re.compile(r"[*?\[]")
_NONE: Mapping[str, str | None] = {}


def hive_partition(name: str, above: Mapping[str, str | None] = _NONE) -> tuple[tuple[str, str | None], ...]:
    """Keys and values from a name relative to the dataset's root, percent-decoded; the null partition is None.

    `above`: keys that the path to the root has. Those in the name win over them.

    Raises:
        SchemaMismatch: A key stands twice in the name.
    """
    found: dict[str, str | None] = {}
    for key, value in _pairs(name):
        if key in found:
            raise SchemaMismatch(
                f"{name} names the partition {key!r} twice; rename one of its directories, "
                "or pass partitioning=None to read the files' own columns only"
            )
        found[key] = value
    return (*((key, value) for key, value in above.items() if key not in found), *found.items())


def hive_keys(written: str) -> dict[str, str | None]:
    """Of the directories in a path or pattern up to its first wildcard; of a key that stands twice, the last."""
    return dict(_pairs(_WILDCARD.split(written, maxsplit=1)[0]))


def _pairs(name: str) -> Iterator[tuple[str, str | None]]:
    for part in name.split("/")[:-1]:
        key, separator, value = part.partition("=")
        if separator and key:
            yield unquote(key), None if value == NULL else unquote(value)


def partition_fields(files: Sequence[DataFile]) -> list[pa.Field]:
    """One column per key: int64 if all values are integers without leading zeros, else string.

    Raises:
        SchemaMismatch: Two files have other keys, or the same in another order.
    """
    if not files:
        return []
    keys = _keys(files[0])
    values: dict[str, set[str]] = {key: set() for key in keys}
    for file in files:
        if _keys(file) != keys:
            raise SchemaMismatch(
                f"files disagree on partitions: {files[0].name} has {_told(keys)}, {file.name} has "
                f"{_told(_keys(file))}; put all files under the same keys, or pass partitioning=None"
            )
        for key, value in file.partition:
            if value is not None:
                values[key].add(value)
    return [pa.field(key, pa.int64() if _are_integers(values[key]) else pa.string()) for key in keys]


def partition_values(file: DataFile, fields: Sequence[pa.Field]) -> dict[str, object]:
    """The file's constants, with the types of `fields`; None is null.

    Raises:
        SchemaMismatch: The file lacks one of them, or its value is not of that type.
    """
    own = dict(file.partition)
    found: dict[str, object] = {}
    for field in fields:
        if field.name not in own:
            raise SchemaMismatch(
                f"{file.name} has no partition {field.name!r}, only {_told(_keys(file))}; "
                "put all files under the same keys, or pass partitioning=None"
            )
        value = own[field.name]
        if value is None or not pa.types.is_int64(field.type):
            found[field.name] = value
        elif _is_integer(value):
            found[field.name] = int(value)
        else:
            raise SchemaMismatch(
                f"{file.name} has {field.name}={value!r}, where the dataset has integers; "
                "look for a directory that does not belong there"
            )
    return found


def _keys(file: DataFile) -> tuple[str, ...]:
    return tuple(key for key, _ in file.partition)


def _told(keys: tuple[str, ...]) -> str:
    return ", ".join(keys) if keys else "none"


def _are_integers(values: set[str]) -> bool:
    return bool(values) and all(map(_is_integer, values))


def _is_integer(value: str) -> bool:
    return _INTEGER.fullmatch(value) is not None and _LEAST <= int(value) <= _MOST
