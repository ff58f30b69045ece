"""Deletion vectors and equality deletes identify the deleted rows."""

from __future__ import annotations

import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyroaring import BitMap

from strata.data.iceberg.deletes import ValueDeletes, decode_vector


def vector(rows: set[int]) -> bytes:
    high = sorted({row >> 32 for row in rows})
    body = b"\xd1\xd3\x39\x64" + len(high).to_bytes(8, "little")
    for key in high:
        body += key.to_bytes(4, "little") + BitMap(row & 0xFFFFFFFF for row in rows if row >> 32 == key).serialize()
    return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


@given(rows=st.sets(st.integers(0, 2**34)))
@example(rows=set(range(100_000, 170_000)))
def test_a_deletion_vector_round_trips(rows: set[int]) -> None:
    assert decode_vector(vector(rows)).tolist() == sorted(rows)


@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_damaged_deletion_vector_is_rejected(place: int, change: int) -> None:
    blob = bytearray(vector({1, 5, 2**33}))
    blob[place % len(blob)] ^= change
    with pytest.raises(ValueError, match=r"not a deletion vector|checksum"):
        decode_vector(bytes(blob))


def test_a_truncated_deletion_vector_is_rejected() -> None:
    blob = vector({1, 5, 2**33})
    for length in range(len(blob)):
        with pytest.raises(ValueError, match=r"not a deletion vector|checksum"):
            decode_vector(blob[:length])


COLUMNS = {"number": pa.int64(), "text": pa.string(), "flag": pa.bool_()}
records = st.fixed_dictionaries(
    {
        "number": st.none() | st.integers(0, 3),
        "text": st.none() | st.sampled_from(["", "a", "b"]),
        "flag": st.none() | st.booleans(),
    }
)


def table(rows: list[dict[str, Any]], names: list[str]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], COLUMNS[name]) for name in names})


@given(
    keys=st.lists(records, max_size=6),
    rows=st.lists(records, max_size=30),
    names=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, unique=True),
)
def test_rows_match_an_equality_delete_if_all_its_columns_are_equal_null_included(
    keys: list[dict[str, Any]], rows: list[dict[str, Any]], names: list[str]
) -> None:
    wanted = {tuple(key[name] for name in names) for key in keys}
    found = ValueDeletes(table(keys, names)).matches(table(rows, names))
    assert found.tolist() == [tuple(row[name] for name in names) in wanted for row in rows]
