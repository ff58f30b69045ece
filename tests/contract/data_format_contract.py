"""The contract of every file format. An implementation defines how its files are written, and what they can store."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import errno
import io
import itertools
import math
import operator
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.data.filter import expression, literals
from strata.data.filter.expression import Presence
from strata.data.formats.base import FileFacts, Format, Reader, Unit
from strata.data.source.source import DataFile, Source
from strata.data.structured import StructuredDataset
from strata.errors import (
    DataFileChanged,
    DataFileInvalid,
    DataFileMissing,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StrataError,
)

LOCAL = Source(pafs.LocalFileSystem(), is_local=True)
NUM_ROWS = 100
UNIT_ROWS = 30
"""The rows per row group that the suite requests from `write`; the last row group has fewer."""
PLAIN = ("id", "small", "price", "flag", "word")
ALL_COLUMNS = (*PLAIN, "ratio", "day", "time", "amount", "raw", "colour", "tags", "point", "bag", "nothing")
FAILURES = (
    (PermissionError(errno.EACCES, "no"), StorageDenied),
    (TimeoutError(errno.ETIMEDOUT, "slow"), StorageUnavailable),
    (OSError(errno.EIO, "broken"), StorageError),
    (FileNotFoundError(errno.ENOENT, "gone"), DataFileMissing),
)
COMPARISONS: tuple[Callable[[Any, Any], pc.Expression], ...] = (
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
)


def sample(num_rows: int = NUM_ROWS, columns: Sequence[str] = ALL_COLUMNS, *, seed: int = 0) -> pa.Table:
    """Return one column of each kind. `ratio` has NaN but no null, `id` has neither, all others have some nulls."""
    rows = [row + seed for row in range(num_rows)]
    epoch = dt.datetime(2026, 1, 1)  # noqa: DTZ001

    def often(make: Callable[[int], object], every: int) -> list[object]:
        return [None if row % every == 1 else make(row) for row in rows]

    kinds: dict[str, tuple[list[Any], pa.DataType]] = {
        "id": (rows, pa.int64()),
        "small": (often(lambda row: row % 100 - 50, 11), pa.int16()),
        "price": (often(lambda row: row / 4, 7), pa.float64()),
        "flag": (often(lambda row: row % 3 == 0, 5), pa.bool_()),
        "word": (often(lambda row: f"wörd {row}", 13), pa.string()),
        "ratio": ([math.nan if row % 9 == 0 else row / 8 for row in rows], pa.float32()),
        "day": (often(lambda row: epoch.date() + dt.timedelta(days=row), 8), pa.date32()),
        "time": (often(lambda row: epoch + dt.timedelta(seconds=row, microseconds=row), 8), pa.timestamp("us")),
        "amount": (often(lambda row: decimal.Decimal(row).scaleb(-2), 10), pa.decimal128(10, 2)),
        "raw": (often(lambda row: bytes([row % 256]) * (row % 4), 6), pa.binary()),
        "colour": (often(lambda row: ("red", "green", "blue")[row % 3], 9), pa.dictionary(pa.int32(), pa.string())),
        "tags": (often(lambda row: list(range(row % 4)), 6), pa.list_(pa.int64())),
        "point": (
            often(lambda row: {"x": row / 2, "name": None if row % 4 == 2 else f"p{row}"}, 17),
            pa.struct([("x", pa.float64()), ("name", pa.string())]),
        ),
        "bag": (often(lambda row: [(f"k{row % 5}", row)], 12), pa.map_(pa.string(), pa.int32())),
        "nothing": ([None] * num_rows, pa.int32()),
    }
    return pa.table({name: pa.array(kinds[name][0], kinds[name][1]) for name in columns})


def data_file(path: Path) -> DataFile:
    status = path.stat()
    return DataFile(path=str(path), name=path.name, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def remote(handler: pafs.FileSystemHandler) -> Source:
    return Source(pafs.PyFileSystem(handler), is_local=False)


class FarFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Return a source of which every read is a request."""

    protocol = "far"


class Faulty(pafs.FSSpecHandler):  # type: ignore[misc]
    """The local file system, which fails on command: a number of times, or forever."""

    def __init__(self) -> None:
        super().__init__(FarFileSystem())
        self.error: Exception | None = None
        self.num_failures: float = math.inf
        self.num_reads = 0

    def fail(self) -> None:
        if self.error is not None and self.num_failures > 0:
            self.num_failures -= 1
            raise self.error

    def open_input_file(self, path: str) -> pa.NativeFile:
        self.fail()
        return pa.PythonFile(FaultyFile(path, self), mode="r")


class FaultyFile(io.FileIO):
    def __init__(self, path: str, owner: Faulty) -> None:
        super().__init__(path)
        self._owner = owner

    def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        self._owner.fail()
        self._owner.num_reads += 1
        return super().read(-1 if size is None else size)


def same(found: pa.Table, expected: pa.Table) -> bool:
    """Compare tables. NaN equals NaN; dictionary codes and metadata are ignored."""
    if found.num_rows != expected.num_rows or found.column_names != expected.column_names:
        return False
    for one, other in zip(found.columns, expected.columns, strict=True):
        if one.type != other.type:
            return False
        if repr(one.to_pylist()) != repr(other.to_pylist()):
            return False
    return True


def bound(condition: pc.Expression, schema: pa.Schema, columns: Sequence[str]) -> tuple[expression.Node, pa.Schema]:
    """Return a filter as a dataset passes it to a file of the same types."""
    used = pa.schema([schema.field(name) for name in columns])
    return literals.fit_literals(expression.decode(condition), used), used


class FormatContract:
    format: ClassVar[Format]
    columns: ClassVar[tuple[str, ...]] = ALL_COLUMNS
    """The columns of `sample` that the format can store."""
    is_columnar: ClassVar[bool] = True
    """Whether fewer columns take fewer bytes."""
    has_exact_units: ClassVar[bool] = True
    """Whether `write` puts exactly `rows_per_unit` rows in each row group, or only approximately."""
    has_marks: ClassVar[bool] = True
    """Whether files end with bytes of this format only, so that truncated and foreign files are detected."""
    unit_bytes: ClassVar[int] = 1_000
    """The size of row groups, for formats that leave it open."""
    suffix: ClassVar[str] = ""
    """The suffix of its files, if it is not the name of the format."""
    added: ClassVar[tuple[str, ...]] = ()
    """Columns that every file has besides those of the written table; they come first."""
    choices: ClassVar[Mapping[str, Any]] = {}
    """Arguments of `create_dataloader`, for a format that does not deliver nulls by default."""

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        raise NotImplementedError

    def as_stored(self, table: pa.Table) -> pa.Table:
        """Return the table as the format stores it: unchanged, unless the format has fewer types."""
        return table

    def damage(self, path: Path, unit: Unit) -> None:
        """Make a row group unreadable without changing another one, or the metadata of the file."""
        data = bytearray(path.read_bytes())
        data[unit.offset : unit.offset + unit.num_bytes] = b"\xff" * unit.num_bytes
        path.write_bytes(data)

    # -- shared by the tests -----------------------------------------------------------------------------------------

    def plant(self, folder: Path, table: pa.Table | None = None, rows_per_unit: int = UNIT_ROWS) -> DataFile:
        path = folder / f"part-0.{self.suffix or self.format.name}"
        self.write(sample(columns=self.columns) if table is None else table, path, rows_per_unit)
        return data_file(path)

    def inspect(self, file: DataFile, columns: Sequence[str] | None = None, source: Source = LOCAL) -> FileFacts:
        return self.format.inspect(source, file, columns=columns, unit_bytes=self.unit_bytes)

    @contextlib.contextmanager
    def opened(self, file: DataFile, facts: FileFacts, source: Source = LOCAL) -> Iterator[Reader]:
        reader = self.format.open(source, file, facts.schema, facts.version)
        try:
            yield reader
        finally:
            reader.close()

    def read_all(self, file: DataFile, columns: Sequence[str], source: Source = LOCAL) -> pa.Table:
        facts = self.inspect(file, source=source)
        with self.opened(file, facts, source) as reader:
            tables = [reader.read(unit, columns) for unit in facts.units]
        assert [table.num_rows for table in tables] == [unit.num_rows for unit in facts.units]
        return pa.concat_tables(tables) if tables else facts.schema.empty_table().select(list(columns))

    # -- metadata ----------------------------------------------------------------------------------------------------

    def test_row_groups_are_consecutive_and_contain_all_rows(self, tmp_path: Path) -> None:
        facts = self.inspect(self.plant(tmp_path))
        rows = [unit.num_rows for unit in facts.units]
        assert sum(rows) == NUM_ROWS
        assert min(rows) > 0
        if self.has_exact_units:
            assert rows == [30, 30, 30, 10]
        assert [unit.index for unit in facts.units] == list(range(len(rows)))
        assert [unit.first_row for unit in facts.units] == [0, *itertools.accumulate(rows)][:-1]

    def test_row_groups_have_ascending_offsets(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        units = self.inspect(file).units
        assert [unit.offset for unit in units] == sorted({unit.offset for unit in units})
        assert all(unit.num_bytes > 0 for unit in units)
        assert sum(unit.num_bytes for unit in units) <= file.size_bytes

    def test_the_schema_is_the_written_one_without_the_writers_metadata(self, tmp_path: Path) -> None:
        table = sample(columns=self.columns).replace_schema_metadata({"pandas": "{}"})
        schema = self.inspect(self.plant(tmp_path, table)).schema
        assert schema.names == [*self.added, *self.columns]
        assert schema.types[len(self.added) :] == self.as_stored(table).schema.types
        assert schema.metadata is None

    def test_fewer_columns_take_fewer_bytes_for_the_same_rows(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        whole, part = self.inspect(file), self.inspect(file, ["word"])
        assert part.schema == whole.schema
        assert part.version == whole.version
        assert [unit.num_rows for unit in part.units] == [unit.num_rows for unit in whole.units]
        if self.is_columnar:
            for one, other in zip(part.units, whole.units, strict=True):
                assert 0 < one.num_bytes < other.num_bytes
        else:
            assert part.units == whole.units

    def test_columns_that_the_file_lacks_are_ignored(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        assert self.inspect(file, ["word", "stranger", "point.x"]).units == self.inspect(file, ["word"]).units

    def test_null_counts_are_right_or_missing(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        stored = self.read_all(file, self.columns)
        for columns in (None, ["word"], ["id", "price", "stranger"]):
            counts = self.inspect(file, columns).null_counts
            assert columns is None or not self.is_columnar or set(counts) <= set(columns)
            assert all(counts[name] == stored[name].null_count for name in counts if name not in self.added)

    def test_a_file_without_rows_has_a_schema_but_no_row_groups(self, tmp_path: Path) -> None:
        facts = self.inspect(self.plant(tmp_path, sample(0, PLAIN)))
        assert sum(unit.num_rows for unit in facts.units) == 0
        assert not facts.units
        if self.format.is_typed:
            assert facts.schema.names == list(PLAIN)

    def test_a_copied_or_touched_file_keeps_its_version(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        copy = tmp_path / "copy.bin"
        shutil.copyfile(file.path, copy)
        os.utime(copy, ns=(1, 1))
        assert self.inspect(data_file(copy)) == self.inspect(file)

    def test_different_contents_have_different_versions(self, tmp_path: Path) -> None:
        versions = set()
        for seed in (0, 1, 1_000):
            versions.add(self.inspect(self.plant(tmp_path, sample(columns=self.columns, seed=seed))).version)
        if self.has_exact_units:
            versions.add(self.inspect(self.plant(tmp_path, rows_per_unit=UNIT_ROWS + 1)).version)
        assert len(versions) == (4 if self.has_exact_units else 3)

    # -- reading -----------------------------------------------------------------------------------------------------

    def test_every_row_group_contains_its_written_rows(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        expected = self.as_stored(sample(columns=self.columns))
        facts = self.inspect(file)
        with self.opened(file, facts) as reader:
            for unit in reversed(facts.units):
                found = reader.read(unit, self.columns)
                found.validate(full=True)
                assert same(found, expected.slice(unit.first_row, unit.num_rows)), unit

    @pytest.mark.parametrize("columns", [["word"], ["word", "id"], ["flag", "word", "small"]], ids="-".join)
    def test_columns_come_in_the_requested_order(self, tmp_path: Path, columns: list[str]) -> None:
        expected = self.as_stored(sample(columns=self.columns)).select(columns)
        assert same(self.read_all(self.plant(tmp_path), columns), expected)

    def test_each_column_can_be_read_alone(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        expected = self.as_stored(sample(columns=self.columns))
        for name in self.columns:
            assert same(self.read_all(file, [name]), expected.select([name])), name

    def test_all_columns_can_be_read_in_reverse_order(self, tmp_path: Path) -> None:
        backwards = self.columns[::-1]
        expected = self.as_stored(sample(columns=self.columns)).select(list(backwards))
        assert same(self.read_all(self.plant(tmp_path), backwards), expected)

    def test_a_read_without_columns_returns_rows(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        with self.opened(file, facts) as reader:
            for unit in facts.units:
                table = reader.read(unit, [])
                assert (table.num_rows, table.num_columns) == (unit.num_rows, 0)

    def test_a_row_group_can_be_read_twice_with_the_same_result(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        with self.opened(file, facts) as reader:
            first = reader.read(facts.units[-1], self.columns)
            reader.read(facts.units[0], ["id"])
            assert same(reader.read(facts.units[-1], self.columns), first)

    def test_a_table_outlives_its_reader_and_its_file(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        with self.opened(file, facts) as reader:
            table = reader.read(facts.units[0], self.columns)
        Path(file.path).unlink()
        assert same(table, self.as_stored(sample(columns=self.columns)).slice(0, facts.units[0].num_rows))

    def test_the_bytes_of_reads_are_counted(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path, sample(2_000, self.columns), 600)
        counts = []
        for columns in (["id"], self.columns):
            facts = self.inspect(file, columns)
            with self.opened(file, facts) as reader:
                for unit in facts.units:
                    before = reader.bytes_read
                    reader.read(unit, columns)
                    assert reader.bytes_read >= before + unit.num_bytes
                counts.append(reader.bytes_read)
            assert counts[-1] >= sum(unit.num_bytes for unit in facts.units)
            assert counts[-1] <= 2 * file.size_bytes
        if self.is_columnar:
            assert counts[0] < counts[1]

    def test_a_closed_reader_can_be_closed_again(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        with self.opened(file, facts) as reader:
            assert reader.read(facts.units[0], ["id"]).num_rows == facts.units[0].num_rows
            reader.close()

    def test_two_threads_with_their_own_readers_do_not_interfere(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path, sample(1_000, self.columns), 100)
        expected = self.as_stored(sample(1_000, self.columns))
        with ThreadPoolExecutor(2) as pool:
            tables = list(pool.map(lambda _: self.read_all(file, self.columns), range(4)))
        assert all(same(table, expected) for table in tables)

    def test_a_remote_file_reads_like_a_local_one(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        source = remote(Faulty())
        assert self.inspect(file, source=source) == self.inspect(file)
        assert same(self.read_all(file, self.columns, source), self.as_stored(sample(columns=self.columns)))
        assert same(self.read_all(file, ["word", "id"], source), self.read_all(file, ["word", "id"]))

    @pytest.mark.parametrize("columns", [PLAIN, ("id", "word")], ids=["all", "two"])
    def test_a_remote_row_group_takes_one_request_and_opening_a_file_a_few(
        self, tmp_path: Path, columns: tuple[str, ...]
    ) -> None:
        num_rows, num_workers = 6_000, 2
        file = self.plant(tmp_path, sample(num_rows, PLAIN), 500)
        handler = Faulty()
        loader, dataset = StructuredDataset.create_dataloader(
            str(tmp_path),
            self.format.name,
            filesystem=pafs.PyFileSystem(handler),
            columns=list(columns),
            batch_size=100,
            num_workers=num_workers,
            output_format="arrow",
            split_bytes=file.size_bytes // 8,
            prefetch_bytes="1GiB",
            cache=False,
            **self.choices,
        )
        assert not dataset._recipe.source.is_local
        before = handler.num_reads
        expected = self.as_stored(sample(num_rows, ("id",)))["id"].to_pylist()
        assert [number for batch in loader for number in batch["id"].to_pylist()] == expected
        num_requests = handler.num_reads - before
        assert dataset.plan.num_units >= 7
        assert num_requests <= dataset.plan.num_units + 3 * (num_workers + 1)
        assert dataset.get_metrics().total.read_s > 0, "waiting for bytes is not counted as decoding"

    def test_a_format_can_be_sent_to_another_process(self) -> None:
        copy = pickle.loads(pickle.dumps(self.format))
        assert (copy.name, copy.unit_name, copy.is_typed) == (
            self.format.name,
            self.format.unit_name,
            self.format.is_typed,
        )

    @settings(max_examples=12, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])
    @given(rows=st.lists(st.integers(0, 40), min_size=1, max_size=4), data=st.data())
    def test_row_groups_of_different_files_contain_every_row_once(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[int], data: st.DataObject
    ) -> None:
        columns = data.draw(st.lists(st.sampled_from(self.columns), min_size=1, max_size=4, unique=True))
        folder = tmp_path_factory.mktemp("unequal")
        for number, num_rows in enumerate(rows):
            table = sample(num_rows, self.columns, seed=number)
            path = folder / f"part-{number}.{self.suffix or self.format.name}"
            self.write(table, path, data.draw(st.integers(1, 50)))
            if num_rows or self.format.is_typed:
                found = self.read_all(data_file(path), columns)
                assert found.num_rows == num_rows
                if self.format.is_typed:
                    assert same(found, self.as_stored(table).select(list(columns)))

    # -- filters -----------------------------------------------------------------------------------------------------

    @settings(max_examples=30, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])
    @given(data=st.data())
    def test_statistics_never_contradict_the_rows(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        table = data.draw(tables([name for name in self.columns if name in VALUES]))
        file = self.plant(tmp_path_factory.mktemp("filters"), table, data.draw(st.integers(1, 8)))
        facts = self.inspect(file)
        names = facts.schema.names
        with self.opened(file, facts) as reader:
            units = [reader.read(unit, names) for unit in facts.units]
        if not units or pa.concat_tables(units).schema.types != table.schema.types:
            return  # the types of a text with few rows may be guessed differently, so that the filter does not fit
        for _ in range(4):
            condition, used = data.draw(conditions(names))
            presences = self.format.presence(LOCAL, file, facts, *bound(condition, facts.schema, sorted(used)))
            assert len(presences) == len(units)
            for presence, rows in zip(presences, units, strict=True):
                num_passed = rows.filter(condition).num_rows
                if presence is Presence.NONE:
                    assert num_passed == 0, (condition, rows.to_pylist())
                if presence is Presence.ALL:
                    assert num_passed == rows.num_rows, (condition, rows.to_pylist())

    # -- errors ------------------------------------------------------------------------------------------------------

    def test_a_damaged_row_group_is_named_with_its_first_row_and_the_others_are_read(self, tmp_path: Path) -> None:
        written = sample(1_500, self.columns)
        file = self.plant(tmp_path, written, 500)
        facts = self.inspect(file)
        bad = facts.units[1]
        time_ns = Path(file.path).stat().st_mtime_ns
        self.damage(Path(file.path), bad)
        os.utime(file.path, ns=(time_ns, time_ns))  # as a disk would: otherwise the file counts as rewritten
        expected = self.as_stored(written)
        with self.opened(file, facts) as reader:
            for unit in facts.units:
                if unit is not bad:
                    table = reader.read(unit, self.columns)
                    assert same(table, expected.slice(unit.first_row, unit.num_rows))
                    continue
                with pytest.raises(DataFileInvalid) as caught:
                    reader.read(unit, self.columns)
                message = str(caught.value)
                assert file.name in message
                assert f"{self.format.unit_name} 1" in message
                assert f"row {unit.first_row}" in message
                for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
                    assert (error.path, error.row_group, str(error)) == (file.path, unit.index, message)

    @pytest.mark.parametrize("part", [0.02, 0.3, 0.5, 0.9, 0.99, 0.9999], ids="{:.2%}".format)
    def test_a_truncated_file_is_rejected(self, tmp_path: Path, part: float) -> None:
        if not self.has_marks:
            return self.refuses_nothing_that_could_be_text(tmp_path)
        file = self.plant(tmp_path)
        data = Path(file.path).read_bytes()
        Path(file.path).write_bytes(data[: int(len(data) * part)])
        with pytest.raises(DataFileInvalid, match=file.name) as caught:
            self.inspect(data_file(Path(file.path)))
        assert (caught.value.path, caught.value.row_group) == (file.path, None)
        return None

    @pytest.mark.parametrize(
        "contents",
        [b"", b"PAR", b"id,word\n1,a\n2,b\n" * 30, bytes(5_000), b"\xff" * 5_000, b'{"id": 1}\n', b"PAR1" * 3],
        ids=lambda contents: f"{contents[:5]!r}x{len(contents)}",
    )
    def test_a_file_of_another_format_is_rejected_and_both_are_named(self, tmp_path: Path, contents: bytes) -> None:
        if not self.has_marks:
            return self.refuses_nothing_that_could_be_text(tmp_path)
        path = tmp_path / f"part-0.{self.format.name}"
        path.write_bytes(contents)
        with pytest.raises(DataFileInvalid, match="part-0") as caught:
            self.inspect(data_file(path))
        assert self.format.name in str(caught.value).lower()
        assert (caught.value.path, caught.value.row_group) == (str(path), None)
        return None

    def refuses_nothing_that_could_be_text(self, folder: Path) -> None:
        """Check that half a text, which is valid text, has another version."""
        file = self.plant(folder)
        version = self.inspect(file).version
        data = Path(file.path).read_bytes()
        Path(file.path).write_bytes(data[: data.rindex(b"\n", 0, len(data) // 2) + 1])
        assert self.inspect(data_file(Path(file.path))).version != version

    def test_a_deleted_file_is_missing(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        Path(file.path).unlink()
        with pytest.raises(DataFileMissing, match=file.name):
            self.inspect(file)
        with pytest.raises(DataFileMissing, match=file.name), self.opened(file, facts) as reader:
            reader.read(facts.units[0], ["id"])

    @pytest.mark.parametrize("num_rows", [NUM_ROWS, 20, 900])
    def test_a_file_that_was_rewritten_after_planning_is_not_read(self, tmp_path: Path, num_rows: int) -> None:
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        self.plant(tmp_path, sample(num_rows, self.columns, seed=1_000))
        with pytest.raises(DataFileChanged, match=file.name), self.opened(file, facts) as reader:
            reader.read(facts.units[0], ["id"])

    @pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda case: getattr(case, "__name__", ""))
    def test_failing_storage_is_not_reported_as_a_damaged_file(
        self, tmp_path: Path, error: Exception, expected: type[StrataError]
    ) -> None:
        file = self.plant(tmp_path)
        handler = Faulty()
        source = remote(handler)
        facts = self.inspect(file, source=source)
        with self.opened(file, facts, source) as reader:
            reader.read(facts.units[0], self.columns)
            handler.error = error
            with pytest.raises(expected, match=file.name) as caught:
                reader.read(facts.units[1], self.columns)
            assert not isinstance(caught.value, DataFileInvalid)
        with pytest.raises(expected, match=file.name), self.opened(file, facts, source) as reader:
            reader.read(facts.units[0], self.columns)
        with pytest.raises(expected, match=file.name):
            self.inspect(file, source=source)

    def test_a_read_that_fails_once_is_retried(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        handler = Faulty()
        source = remote(handler)
        facts = self.inspect(file, source=source)
        with self.opened(file, facts, source) as reader:
            reader.read(facts.units[0], self.columns)
            handler.error, handler.num_failures = OSError(errno.EIO, "broken"), 1
            with contextlib.suppress(StorageError):
                reader.read(facts.units[1], self.columns)
            handler.error = None
            table = reader.read(facts.units[1], self.columns)
        expected = self.as_stored(sample(columns=self.columns))
        assert same(table, expected.slice(facts.units[1].first_row, facts.units[1].num_rows))


# -- tables and conditions to draw -----------------------------------------------------------------------------------

VALUES: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
    "id": (st.integers(-5, 5), pa.int64()),
    "price": (st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0]), pa.float64()),
    "ratio": (st.sampled_from([math.nan, -math.inf, -1.0, 0.0, 1.0, math.inf]), pa.float32()),
    "flag": (st.booleans(), pa.bool_()),
    "word": (st.sampled_from(["a", "b", "b" * 70, "b" * 70 + "c", "ü"]), pa.string()),
    "time": (st.integers(1, 4).map(lambda day: dt.datetime(2026, 1, day)), pa.timestamp("us")),  # noqa: DTZ001
}


@st.composite
def tables(draw: st.DrawFn, columns: Sequence[str]) -> pa.Table:
    """Draw mostly clustered values, so that statistics decide something."""
    num_rows = draw(st.integers(1, 24))
    arrays = {}
    for name in columns:
        values, kind = VALUES[name]
        may_be_null = name not in ("id", "ratio") and draw(st.booleans())
        drawn = draw(st.lists(st.none() | values if may_be_null else values, min_size=num_rows, max_size=num_rows))
        if draw(st.booleans()):
            drawn.sort(key=lambda value: (value is None, value != value, value if value is not None else 0))
        arrays[name] = pa.array(drawn, kind)
    return pa.table(arrays)


@st.composite
def conditions(draw: st.DrawFn, columns: Sequence[str], depth: int = 2) -> tuple[pc.Expression, set[str]]:
    """Draw a filter and the columns it uses."""
    if depth and draw(st.booleans()):
        one, used = draw(conditions(columns, depth - 1))
        if draw(st.integers(0, 2)) == 0:
            return ~one, used
        other, also = draw(conditions(columns, depth - 1))
        return draw(st.sampled_from([operator.and_, operator.or_]))(one, other), used | also
    name = draw(st.sampled_from(list(columns)))
    column, (values, kind) = pc.field(name), VALUES[name]
    form = draw(st.integers(0, 9))
    if form == 0:
        return column.is_null(nan_is_null=draw(st.booleans()) if pa.types.is_floating(kind) else False), {name}
    if form == 1:
        return column.is_valid(), {name}
    if form == 2:
        members = draw(st.lists(values, min_size=0, max_size=3))
        return column.isin(pa.array(members, kind)), {name}
    if form == 3 and pa.types.is_boolean(kind):
        return column, {name}
    compare = draw(st.sampled_from(COMPARISONS))
    return compare(column, pa.scalar(draw(values), kind)), {name}
