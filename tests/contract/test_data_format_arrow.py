"""Arrow files and streams pass the contract of every format; the other tests are specific to Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.register_assert_rewrite("data_format_contract")

from data_format_contract import LOCAL, Faulty, FormatContract, bound, data_file, remote, same, sample  # noqa: E402

from strata.data.filter.expression import Presence  # noqa: E402
from strata.data.formats.arrow import SAMPLE_BYTES, ArrowFormat  # noqa: E402
from strata.data.formats.base import Unit  # noqa: E402
from strata.data.source.source import DataFile, Source  # noqa: E402
from strata.errors import DataFileInvalid  # noqa: E402


class ArrowContract(FormatContract):
    format: ClassVar[ArrowFormat] = ArrowFormat()
    compression: ClassVar[str | None] = None

    def open_writer(self, path: Path, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        return pa.ipc.new_file(str(path), schema, options=options)

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        with self.open_writer(path, table.schema) as writer:
            writer.write_table(table.combine_chunks(), max_chunksize=rows_per_unit)

    def damage(self, path: Path, unit: Unit) -> None:
        """Damage only bytes that the version does not cover: after the header and the sample."""
        data = bytearray(path.read_bytes())
        header_bytes = 8 + int.from_bytes(data[unit.offset + 4 : unit.offset + 8], "little")
        first, last = unit.offset + header_bytes + SAMPLE_BYTES, unit.offset + unit.num_bytes
        assert first < last
        data[first:last] = b"\xff" * (last - first)
        path.write_bytes(data)

    def test_statistics_never_contradict_the_rows(self, tmp_path: Path) -> None:
        """Return SOME for every row group: Arrow has no statistics."""
        file = self.plant(tmp_path)
        facts = self.inspect(file)
        assert (
            self.format.presence(LOCAL, file, facts, *bound(pc.field("id") < 0, facts.schema, ["id"]))
            == [Presence.SOME] * 4
        )


class TestArrowFile(ArrowContract):
    @settings(max_examples=40, suppress_health_check=[HealthCheck.differing_executors])
    @given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5))
    def test_a_file_with_changed_bytes_is_read_or_rejected(
        self, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]]
    ) -> None:
        path = Path(self.plant(tmp_path_factory.mktemp("fuzz"), sample(20, ("id", "word", "colour", "tags")), 10).path)
        data = bytearray(path.read_bytes())
        for place, value in changes:
            data[int(place * len(data))] = value
        path.write_bytes(data)
        try:
            file = data_file(path)
            self.read_all(file, self.inspect(file).schema.names).validate(full=True)
            refused = ""
        except DataFileInvalid as error:
            refused = str(error)
        assert not refused or path.name in refused

    def test_a_feather_file_is_an_arrow_file(self, tmp_path: Path) -> None:
        path = tmp_path / "part-0.feather"
        feather.write_feather(sample(), path, compression="zstd", chunksize=30)
        assert same(self.read_all(data_file(path), self.columns), sample())

    def test_a_feather_file_of_version_1_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "old.feather"
        path.write_bytes(b"FEA1" + bytes(100) + b"FEA1")
        with pytest.raises(DataFileInvalid, match=r"old\.feather.*feather version 1"):
            self.inspect(data_file(path))

    def test_a_footer_length_beyond_the_file_is_rejected(self, tmp_path: Path) -> None:
        path = Path(self.plant(tmp_path).path)
        path.write_bytes(path.read_bytes()[:-10] + (2**31).to_bytes(4, "little") + b"ARROW1")
        with pytest.raises(DataFileInvalid, match=r"footer should have 2147483648 bytes"):
            self.inspect(data_file(path))

    def test_delta_dictionaries_are_combined(self, tmp_path: Path) -> None:
        batches = [growing(number) for number in range(3)]
        path = tmp_path / "part-0.arrow"
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        with pa.ipc.new_file(str(path), batches[0].schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        found = self.read_all(data_file(path), ["d"])
        assert found["d"].to_pylist() == ["v0", "v0", "v1", "v0", "v2", "v0"]

    def test_other_values_of_the_same_size_have_another_version(self, tmp_path: Path) -> None:
        """Check two files with equal footers and headers."""
        versions = {self.inspect(self.plant(tmp_path, pa.table({"n": [1, value]}))).version for value in (2, 3)}
        assert len(versions) == 2


class TestArrowFileWithLz4(ArrowContract):
    compression = "lz4"


class TestArrowStream(ArrowContract):
    def open_writer(self, path: Path, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        options = pa.ipc.IpcWriteOptions(compression=self.compression)
        return pa.ipc.new_stream(str(path), schema, options=options)

    def write_growing(self, folder: Path, *, deltas: bool) -> DataFile:
        path = folder / "part-0.arrow"
        options = pa.ipc.IpcWriteOptions(compression=self.compression, emit_dictionary_deltas=deltas)
        with pa.ipc.new_stream(str(path), growing(0).schema, options=options) as writer:
            for number in (0, 1, 2, 0, 1):
                writer.write_batch(growing(number))
        return data_file(path)

    @pytest.mark.parametrize("deltas", [False, True])
    @pytest.mark.parametrize("source", [LOCAL, remote(Faulty())], ids=["near", "far"])
    def test_each_batch_has_the_dictionary_that_was_valid_when_it_was_written(
        self, tmp_path: Path, source: Source, deltas: bool
    ) -> None:
        file = self.write_growing(tmp_path, deltas=deltas)
        facts = self.inspect(file, source=source)
        assert [unit.num_rows for unit in facts.units] == [2] * 5
        with self.opened(file, facts, source) as reader:
            for unit, number in reversed(list(zip(facts.units, (0, 1, 2, 0, 1), strict=True))):
                found = reader.read(unit, ["d"])["d"]
                assert found.to_pylist() == growing(number)["d"].to_pylist()

    def test_a_stream_without_an_end_marker_is_rejected(self, tmp_path: Path) -> None:
        path = Path(self.plant(tmp_path).path)
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(DataFileInvalid, match=r"part-0.*no end mark"):
            self.inspect(data_file(path))

    def test_a_second_stream_in_a_file_is_rejected(self, tmp_path: Path) -> None:
        path = Path(self.plant(tmp_path).path)
        path.write_bytes(path.read_bytes() * 2)
        with pytest.raises(DataFileInvalid, match=r"part-0.*only one stream"):
            self.inspect(data_file(path))


class TestArrowStreamWithZstd(TestArrowStream):
    compression = "zstd"


class TestEveryType:
    """Check that the buffers of every type are assigned to the right column."""

    @pytest.mark.parametrize("legacy", [False, True], ids=["now", "before 0.15"])
    @pytest.mark.parametrize("is_file", [False, True], ids=["stream", "file"])
    def test_each_column_is_read_alone(self, tmp_path: Path, is_file: bool, legacy: bool) -> None:
        table = every_type()
        if legacy:
            table = table.drop(["dense", "sparse"])
        path = tmp_path / "part-0.arrow"
        version = pa.ipc.MetadataVersion.V4 if legacy else pa.ipc.MetadataVersion.V5
        options = pa.ipc.IpcWriteOptions(use_legacy_format=legacy, metadata_version=version)
        new = pa.ipc.new_file if is_file else pa.ipc.new_stream
        with new(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
        file = data_file(path)
        arrow = ArrowFormat()
        for name in table.column_names:
            facts = arrow.inspect(LOCAL, file, columns=[name], unit_bytes=1)
            reader = arrow.open(LOCAL, file, facts.schema, facts.version)
            (unit,) = facts.units
            assert same(reader.read(unit, [name]), table.select([name])), name
            reader.close()
            if not legacy:  # a legacy union has unneeded buffers, so all are read
                assert unit.num_bytes < file.size_bytes / 2
                assert facts.null_counts == {name: table[name].null_count}


def growing(number: int) -> pa.RecordBatch:
    values = pa.DictionaryArray.from_arrays(pa.array([number, 0]), [f"v{value}" for value in range(number + 1)])
    return pa.record_batch({"n": pa.array([number, number]), "d": values})


def every_type() -> pa.Table:
    """Return columns with much text between them, so that skipping the gap pays."""
    numbers = pa.array(range(4), pa.int64())
    texts = ["a", None, "much longer than twelve bytes", "d"]
    lists = [[1], None, [], [2, 3]]
    types = pa.array([0, 1, 0, 1], pa.int8())
    columns = {
        "null": pa.nulls(4),
        "view": pa.array(texts, pa.string_view()),
        "binary view": pa.array([b"x" * 40, b"", None, b"y" * 40], pa.binary_view()),
        "views": pa.array([["x" * 40], None, ["y" * 40, "z"], []], pa.list_(pa.string_view())),
        "large": pa.array(texts, pa.large_string()),
        "bytes": pa.array([b"ab", None, b"cd", b"ef"], pa.binary(2)),
        "large list": pa.array(lists, pa.large_list(pa.int8())),
        "list view": pa.array(lists, pa.list_view(pa.int8())),
        "fixed": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
        "map": pa.array([[("a", 1)], None, [], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
        "struct": pa.array([{"x": [1], "y": "a"}, None, {"x": None, "y": None}, {"x": [], "y": "b"}]),
        "dense": pa.UnionArray.from_dense(types, pa.array([0, 0, 1, 1], pa.int32()), [numbers, pa.array(texts)]),
        "sparse": pa.UnionArray.from_sparse(types, [numbers, pa.array(texts)]),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 4], pa.int32()), pa.array(["a", "b"])),
        "codes": pa.array(texts).dictionary_encode(),
        "codes in lists": pa.ListArray.from_arrays([0, 1, 2, 3, 4], pa.array(texts).dictionary_encode()),
        "uuid": pa.array([b"0123456789abcdef", None] * 2, pa.uuid()),
        "decimal": pa.array([1, None, 2, 3], pa.decimal256(50, 2)),
        "interval": pa.array([(1, 2, 3), None, (4, 5, 6), (7, 8, 9)], pa.month_day_nano_interval()),
        "flag": pa.array([True, None, False, True]),
    }
    filler = pa.array(["filler" * 1_000] * 4)
    spread = {}
    for number, (name, column) in enumerate(columns.items()):
        spread[name] = column
        spread[f"filler {number}"] = filler
    return pa.table(spread)
