"""Parquet files that are inspected together have the same metadata as each one alone."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.formats.base import FileFacts
from strata.data.formats.parquet import chunks, footer_batch
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.pyarrow_private import LowLevelReader, open_parquet
from strata.data.source.source import DataFile, Source
from strata.errors import DataError, DataFileInvalid, DataFileMissing, StorageError

LOCAL = Source(pafs.LocalFileSystem(), is_local=True)
FORMAT = ParquetFormat()


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footer_batch, "_families", ())


@pytest.fixture
def num_opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of row groups of every footer that pyarrow parses."""
    found: list[int] = []

    def counting(*arguments: Any, **options: Any) -> LowLevelReader:
        reader = open_parquet(*arguments, **options)
        found.append(reader.metadata.num_row_groups)
        return reader

    monkeypatch.setattr(footer_batch, "open_parquet", counting)
    return found


def written(path: Path, table: pa.Table, **options: Any) -> DataFile:
    pq.write_table(table, path, **options)
    return data_file(path)


def data_file(path: Path) -> DataFile:
    size = path.stat().st_size if path.exists() else 100
    return DataFile(str(path), path.name, size, 1)


def rows(number: int, num_rows: int = 10) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(number, number + num_rows), pa.int64()),
            "name": [None if row % 3 == 0 else "x" * (row + number) for row in range(num_rows)],
            "point": [{"x": row, "y": [1.0] * row} for row in range(num_rows)],
        }
    )


def alone(file: DataFile, columns: Sequence[str] | None, with_nulls: bool) -> FileFacts | tuple[type, str]:
    try:
        return FORMAT.inspect(LOCAL, file, columns=columns, unit_bytes=1, with_nulls=with_nulls)
    except (DataError, StorageError) as error:
        return type(error), str(error)


def together(
    files: Sequence[DataFile], columns: Sequence[str] | None, with_nulls: Sequence[bool], source: Source = LOCAL
) -> list[FileFacts | tuple[type, str]]:
    found = FORMAT.inspect_all(source, files, columns=columns, with_nulls=with_nulls)
    return [(type(each), str(each)) if isinstance(each, Exception) else each for each in found]


def check(files: Sequence[DataFile], columns: Sequence[str] | None = None, source: Source = LOCAL) -> None:
    with_nulls = [number % 2 == 0 for number in range(len(files))]
    expected = [alone(file, columns, nulls) for file, nulls in zip(files, with_nulls, strict=True)]
    assert together(files, columns, with_nulls, source) == expected


@pytest.mark.parametrize("columns", [None, ["name"], ["point", "nobody has it"], []], ids=str)
def test_files_of_one_writer_are_parsed_together_with_the_same_result(
    tmp_path: Path, num_opened: list[int], columns: list[str] | None
) -> None:
    files = [written(tmp_path / f"{n}.parquet", rows(n, 10 + n), row_group_size=7) for n in range(40)]
    check(files, columns)
    assert num_opened[:2] == [
        sum(-(-(10 + n) // 7) for n in range(1, 17)),
        sum(-(-(10 + n) // 7) for n in range(17, 33)),
    ]
    assert len(num_opened) == 3  # 39 files; the first was opened alone
    num_opened.clear()
    check(files, columns)
    assert len(num_opened) == 3  # the common parts are known by now, for all 40


def test_files_of_several_schemas_and_writers_are_distinguished(tmp_path: Path) -> None:
    def one(number: int) -> DataFile:
        table = rows(number)
        options: dict[str, Any] = {}
        match number % 6:
            case 1:
                table = table.rename_columns(["id", "other", "point"])
            case 2:
                table = table.replace_schema_metadata({"number": str(number)})
            case 3:
                options = {"store_schema": False, "version": "1.0"}
            case 4:
                options = {"write_statistics": False, "compression": "zstd"}
            case 5:
                table = table.slice(0, 0)
        return written(tmp_path / f"{number:02d}.parquet", table, **options)

    files = [one(number) for number in range(36)]
    for _ in range(3):
        check(files)
        check(files, ["id", "other"])
    assert len(footer_batch._families) == footer_batch.MAX_FAMILIES


def test_an_unreadable_file_does_not_affect_others(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.parquet", rows(n)) for n in range(12)]
    (tmp_path / "2.parquet").write_bytes(b"")
    whole = (tmp_path / "4.parquet").read_bytes()
    (tmp_path / "4.parquet").write_bytes(whole[:-1])
    (tmp_path / "5.parquet").write_text("id,name\n1,x\n" * 50)
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    (tmp_path / "7.parquet").write_bytes(whole[:start] + b"\xff" * (len(whole) - 8 - start) + whole[-8:])
    (tmp_path / "9.parquet").unlink()
    (tmp_path / "10.parquet").unlink()
    (tmp_path / "10.parquet").mkdir()
    found = FORMAT.inspect_all(LOCAL, files, columns=None, with_nulls=[True] * len(files))
    assert [number for number, each in enumerate(found) if isinstance(each, Exception)] == [2, 4, 5, 7, 9, 10]
    for number in (2, 4, 5, 7):
        assert isinstance(found[number], DataFileInvalid)
        assert str(found[number]) == alone(files[number], None, True)[1]  # type: ignore[index]
    assert isinstance(found[9], DataFileMissing)
    assert isinstance(found[10], StorageError)
    good = [number for number in range(12) if isinstance(found[number], FileFacts)]
    assert [found[number] for number in good] == [alone(files[number], None, True) for number in good]


@pytest.mark.parametrize(
    "damage",
    [
        lambda own: own.replace(b"\x16\x14\x19\x1c", b"\x16\x16\x19\x1c"),  # 11 rows, unlike any row group
        lambda own: own.replace(b"\x16\x14\x19\x1c", b"\x16\x14\x19\x2c"),  # states one row group too many
        lambda own: own[:-20] + b"\xff" * 20,
        lambda own: own[:40] + b"\xff" * 20 + own[60:],
    ],
    ids=["rows", "row groups", "their end", "their beginning"],
)
def test_a_file_with_damaged_row_groups_is_opened_alone_as_are_those_parsed_with_it(
    tmp_path: Path, num_opened: list[int], damage: Callable[[bytes], bytes]
) -> None:
    files = [written(tmp_path / f"{n}.parquet", rows(n)) for n in range(5)]
    layout = footer_batch.common_parts_of(footer_of(tmp_path / "2.parquet"))
    assert layout is not None
    whole, footer = (tmp_path / "2.parquet").read_bytes(), footer_of(tmp_path / "2.parquet")
    own = footer[len(layout.head) : -len(layout.tail)]
    assert damage(own) != own
    assert len(damage(own)) == len(own)
    (tmp_path / "2.parquet").write_bytes(whole.replace(own, damage(own)))
    check(files)
    assert len(num_opened) <= 1  # they were parsed together once


def test_large_footers_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_opened: list[int]) -> None:
    monkeypatch.setattr(footer_batch, "MAX_TAIL_BYTES", 100)
    check([written(tmp_path / f"{n}.parquet", rows(n)) for n in range(4)])
    assert not num_opened
    assert not footer_batch._families


def test_files_of_another_file_system_are_read_through_it(tmp_path: Path, num_opened: list[int]) -> None:
    files = [written(tmp_path / f"{n}.parquet", rows(n)) for n in range(4)]
    below = [DataFile(file.name, file.name, file.size_bytes, 1) for file in files]
    source = Source(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), is_local=True)
    assert together(below, None, [True] * 4, source) == [alone(file, None, True) for file in files]
    assert num_opened == [3]
    assert source.counter.total == sum(file.size_bytes for file in files)


def test_threads_with_different_schemas_do_not_interfere(tmp_path: Path) -> None:
    kinds: list[Callable[[int], pa.Table]] = [
        lambda n, k=kind: pa.table({f"column_{k}": [n] * (k + 1)})  # type: ignore[misc]
        for kind in range(footer_batch.MAX_FAMILIES + 2)
    ]
    sets = [[written(tmp_path / f"{k}-{n}.parquet", make(n)) for n in range(8)] for k, make in enumerate(kinds)]
    expected = [[alone(file, None, True) for file in files] for files in sets]
    num_right: list[int] = []

    def look(kind: int) -> None:
        num_right.append(sum(together(sets[kind], None, [True] * 8) == expected[kind] for _ in range(20)))

    threads = [threading.Thread(target=look, args=(kind,)) for kind in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_right == [20] * len(kinds)


# --- footers ---


def footer_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def test_joining_one_footer_returns_it_except_for_the_form_of_a_length(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", rows(1, 100), row_group_size=5)  # 20 row groups: as a long list
    footer = footer_of(tmp_path / "a.parquet")
    layout = footer_batch.common_parts_of(footer)
    assert layout is not None
    part = footer_batch.row_groups_of(footer, layout)
    assert part is not None
    assert (part.num_rows, part.num_groups) == (100, 20)
    assert footer_batch.join_footers(layout, [part]) == footer


def test_a_footer_of_another_layout_is_not_split(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", rows(1))
    written(tmp_path / "b.parquet", rows(1).select(["id"]))
    one, other = footer_of(tmp_path / "a.parquet"), footer_of(tmp_path / "b.parquet")
    layout = footer_batch.common_parts_of(one)
    assert layout is not None
    assert footer_batch.row_groups_of(other, layout) is None
    assert footer_batch.row_groups_of(layout.head + layout.tail, layout) is None
    assert footer_batch.row_groups_of(layout.head, footer_batch.CommonParts(layout.head, b"")) is None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_have_no_layout_or_one_that_contains_them(data: bytes) -> None:
    for footer in (data, b"\x15\x04\x19" + data, b"\x15\x04\x19\x0c\x16\x02\x19" + data):
        layout = footer_batch.common_parts_of(footer)
        if layout is not None:
            assert footer.startswith(layout.head)
            assert footer.endswith(layout.tail)
            assert footer_batch.row_groups_of(footer, layout) is not None


def test_endlessly_nested_structs_have_no_layout() -> None:
    assert footer_batch.common_parts_of(b"\x1c" * 10_000) is None
    assert footer_batch.common_parts_of(b"\x15\x04\x19" + b"\x19" * 10_000) is None


def test_threads_learn_a_new_form_of_footers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1], "b": ["x"], "c": [1.5]}), sink)
    data = sink.getvalue()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    made: list[bytes] = []

    def pattern(group: bytes, leaves: Sequence[chunks.Leaf]) -> re.Pattern[bytes]:
        made.append(group)
        return compile_(group, leaves)

    compile_ = chunks._pattern
    monkeypatch.setattr(chunks, "_pattern", pattern)
    monkeypatch.setattr(chunks, "_forms", ())
    monkeypatch.setattr(chunks, "_remembered", {})
    with ThreadPoolExecutor(8) as pool:
        hidden = list(pool.map(lambda number: chunks.hidden_leaves(footer, str(number)), range(64)))
    assert hidden == [frozenset()] * 64
    assert len(made) == 1
