"""Parquet files pass the contract of every format; the other tests are specific to Parquet."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.register_assert_rewrite("data_format_contract")

from data_format_contract import LOCAL, Faulty, FormatContract, bound, data_file, remote, same, sample  # noqa: E402

from strata.data.filter.expression import Presence  # noqa: E402
from strata.data.formats.parquet.footer import MAX_FOOTER_BYTES, TAIL_BYTES  # noqa: E402
from strata.data.formats.parquet.format import ParquetFormat  # noqa: E402
from strata.data.source.source import Source  # noqa: E402
from strata.errors import DataFileChanged, DataFileInvalid  # noqa: E402

NONE, SOME, ALL = Presence


class TestParquetFormat(FormatContract):
    format: ClassVar[ParquetFormat] = ParquetFormat()

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        pq.write_table(table, path, row_group_size=rows_per_unit)

    def asked(self, folder: Path, table: pa.Table, condition: pc.Expression, columns: list[str]) -> list[Presence]:
        """Return what statistics decide, with row groups of 4 rows."""
        file = self.plant(folder, table, 4)
        facts = self.inspect(file)
        return self.format.presence(LOCAL, file, facts, *bound(condition, facts.schema, columns))

    # -- footers -----------------------------------------------------------------------------------------------------

    def test_a_file_is_inspected_with_one_read(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        handler = Faulty()
        self.inspect(file, source=remote(handler))
        assert handler.num_reads == 1

    def test_the_bytes_of_all_columns_are_the_sum_of_each(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        assert self.inspect(file).units == self.inspect(file, self.inspect(file).schema.names).units

    def test_nulls_are_counted_only_on_request(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        facts = self.format.inspect(LOCAL, file, columns=None, unit_bytes=1, with_nulls=False)
        assert facts == dataclasses.replace(self.inspect(file), null_counts={})
        assert self.inspect(file).null_counts

    def test_a_large_footer_takes_a_second_read(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path, pa.table({f"column {number:0100}": [1.0, 2.0] for number in range(500)}))
        assert pq.read_metadata(file.path).serialized_size > TAIL_BYTES
        handler = Faulty()
        facts = self.inspect(file, source=remote(handler))
        assert handler.num_reads == 2
        assert (len(facts.schema), facts.units[0].num_rows) == (500, 2)
        assert same(self.read_all(file, facts.schema.names), pq.read_table(file.path))

    @pytest.mark.parametrize("num_bytes", [MAX_FOOTER_BYTES + 1, 10_000_000, 2**32 - 1])
    def test_a_footer_length_beyond_the_file_is_rejected(self, tmp_path: Path, num_bytes: int) -> None:
        path = Path(self.plant(tmp_path).path)
        path.write_bytes(path.read_bytes()[:-8] + num_bytes.to_bytes(4, "little") + b"PAR1")
        with pytest.raises(DataFileInvalid, match=rf"part-0.*{num_bytes} bytes.*copy it again"):
            self.inspect(data_file(path))

    def test_an_overwritten_footer_is_damage(self, tmp_path: Path) -> None:
        path = Path(self.plant(tmp_path).path)
        data = bytearray(path.read_bytes())
        num_bytes = int.from_bytes(data[-8:-4], "little")
        data[-8 - num_bytes : -8] = b"\xff" * num_bytes
        path.write_bytes(data)
        with pytest.raises(DataFileInvalid, match=r"part-0.*footer is damaged"):
            self.inspect(data_file(path))

    def test_an_encrypted_footer_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "secret.parquet"
        path.write_bytes(b"PARE" + bytes(100) + b"PARE")
        with pytest.raises(DataFileInvalid, match=r"secret.*encrypted.*decrypt"):
            self.inspect(data_file(path))

    @settings(max_examples=40, suppress_health_check=[HealthCheck.differing_executors])
    @given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=5))
    def test_changed_bytes_in_pages_are_read_or_rejected(
        self, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]]
    ) -> None:
        columns = ["id", "word", "colour", "tags"]
        path = Path(self.plant(tmp_path_factory.mktemp("fuzz"), sample(20, columns), 10).path)
        data = bytearray(path.read_bytes())
        num_page_bytes = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for place, value in changes:
            data[int(place * num_page_bytes)] = value
        path.write_bytes(data)
        try:
            self.read_all(data_file(path), columns)["colour"].validate(full=True)
            refused = ""
        except DataFileInvalid as error:
            refused = str(error)
        assert not refused or "row group" in refused

    # -- columns -----------------------------------------------------------------------------------------------------

    def test_a_nested_column_includes_the_bytes_of_its_leaves(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        group = pq.read_metadata(file.path).row_group(0)
        chunks = [group.column(leaf) for leaf in range(group.num_columns)]
        for name, num_leaves in (("point", 2), ("tags", 1), ("bag", 2), ("id", 1)):
            sizes = [chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == name]
            assert len(sizes) == num_leaves
            assert self.inspect(file, [name]).units[0].num_bytes == sum(sizes)

    def test_a_dot_in_a_name_is_not_a_path(self, tmp_path: Path) -> None:
        table = pa.table({"a": [{"b": 1, "c": 2}], "a.b": [3], "a.": [4]})
        file = self.plant(tmp_path, table)
        for names in (["a.b"], ["a"], ["a.", "a"], ["a.b", "a.", "a"]):
            assert same(self.read_all(file, names), table.select(names))

    def test_bytes_read_are_those_of_the_tail_and_of_the_columns(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path, sample(5_000), 2_000)
        source = Source(LOCAL.filesystem, is_local=True)
        facts = self.inspect(file, ["word", "point"], source)
        with self.opened(file, facts, source) as reader:
            tail_bytes = reader.bytes_read
            assert tail_bytes == min(file.size_bytes, TAIL_BYTES)
            for unit in facts.units:
                reader.read(unit, ["point", "word"])
            assert reader.bytes_read == tail_bytes + sum(unit.num_bytes for unit in facts.units)
        assert source.counter.total == 2 * tail_bytes + sum(unit.num_bytes for unit in facts.units)

    def test_the_columns_of_a_remote_row_group_take_one_read(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path)
        handler = Faulty()
        source = remote(handler)
        facts = self.inspect(file, source=source)
        with self.opened(file, facts, source) as reader:
            before = handler.num_reads
            reader.read(facts.units[1], self.columns)
            assert handler.num_reads == before + 1

    def test_nulls_of_flat_columns_are_known_from_statistics(self, tmp_path: Path) -> None:
        counts = self.inspect(self.plant(tmp_path)).null_counts
        nested = {"tags", "point", "bag"}
        assert dict(counts) == {name: sample()[name].null_count for name in self.columns if name not in nested}

    def test_null_counts_are_missing_without_statistics(self, tmp_path: Path) -> None:
        path = tmp_path / "part-0.parquet"
        pq.write_table(sample(), path, write_statistics=["id"])
        assert dict(self.inspect(data_file(path)).null_counts) == {"id": 0}

    def test_empty_row_groups_are_ignored(self, tmp_path: Path) -> None:
        path = tmp_path / "part-0.parquet"
        rows = sample(columns=["id"])
        with pq.ParquetWriter(path, rows.schema) as writer:
            for num_rows in (0, 3, 0, 4):
                writer.write_table(rows.slice(0, num_rows))
        file = data_file(path)
        assert [(unit.num_rows, unit.first_row) for unit in self.inspect(file).units] == [(3, 0), (4, 3)]
        assert self.read_all(file, ["id"])["id"].to_pylist() == [0, 1, 2, 0, 1, 2, 3]

    # -- damage ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip"])
    def test_a_damaged_page_is_found_only_when_it_is_read(self, tmp_path: Path, compression: str) -> None:
        path = tmp_path / "part-0.parquet"
        table = sample(3_000, ["id", "word", "price"])
        options = {"compression": compression, "data_page_size": 2_000, "use_dictionary": False}
        pq.write_table(table, path, row_group_size=1_000, **options)
        chunk = pq.read_metadata(path).row_group(1).column(1)
        data = bytearray(path.read_bytes())
        middle = chunk.data_page_offset + chunk.total_compressed_size // 2
        data[middle : middle + 400] = b"\xa5" * 400
        path.write_bytes(data)
        file = data_file(path)
        assert same(self.read_all(file, ["price", "id"]), table.select(["price", "id"]))
        facts = self.inspect(file)
        with self.opened(file, facts) as reader:
            assert same(reader.read(facts.units[2], ["word"]), table.select(["word"]).slice(2_000))
            with pytest.raises(DataFileInvalid, match=r"part-0\.parquet: row group 1, .* row 1000, .*copy it again"):
                reader.read(facts.units[1], ["id", "word"])
            assert same(reader.read(facts.units[1], ["id"]), table.select(["id"]).slice(1_000, 1_000))

    def test_a_changed_value_is_found_if_pages_have_checksums(self, tmp_path: Path) -> None:
        path = tmp_path / "part-0.parquet"
        pq.write_table(sample(columns=["id"]), path, compression="none", use_dictionary=False, write_page_checksum=True)
        data = bytearray(path.read_bytes())
        chunk = pq.read_metadata(path).row_group(0).column(0)
        data[chunk.data_page_offset + chunk.total_compressed_size - 8] ^= 1
        path.write_bytes(data)
        with pytest.raises(DataFileInvalid, match="row group 0"):
            self.read_all(data_file(path), ["id"])

    # -- statistics --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("condition", "expected"),
        [
            (pc.field("n") < 4, [ALL, NONE, NONE]),
            (pc.field("n") < 6, [ALL, SOME, NONE]),
            (pc.field("n") >= 0, [ALL, ALL, ALL]),
            (pc.field("n") == 5, [NONE, SOME, NONE]),
            (~(pc.field("n") < 4), [NONE, ALL, ALL]),
            ((pc.field("n") < 2) | (pc.field("n") > 7), [SOME, NONE, ALL]),
            ((pc.field("n") > 1) & (pc.field("n") < 9), [SOME, ALL, SOME]),
            (pc.field("n").isin([1, 2]), [SOME, NONE, NONE]),
            (pc.field("n").is_null(), [NONE, NONE, NONE]),
            (pc.field("n").is_valid(), [ALL, ALL, ALL]),
        ],
        ids=str,
    )
    def test_statistics_exclude_row_groups_and_pass_others_entirely(
        self, tmp_path: Path, condition: pc.Expression, expected: list[Presence]
    ) -> None:
        assert self.asked(tmp_path, pa.table({"n": range(12)}), condition, ["n"]) == expected

    @pytest.mark.parametrize(
        ("values", "condition", "expected"),
        [
            ([1.0, 2.0, 3.0, math.nan], pc.field("x") < 5, SOME),
            ([1.0, 2.0, 3.0, math.nan], pc.field("x") > 5, NONE),
            ([1.0, 2.0, 3.0, math.nan], ~(pc.field("x") < 5), SOME),
            ([2.0, 2.0, 2.0, math.nan], pc.field("x") != 2, SOME),
            ([1.0, 2.0, 3.0, 4.0], pc.field("x") != 7, ALL),
            ([0.0, 0.0, 0.0, 0.0], pc.field("x").isin([0.0]), SOME),
            ([-0.0, -0.0, -0.0, -0.0], pc.field("x").isin([0.0]), SOME),
            ([1.0, 2.0, None, 4.0], pc.field("x") != 7, SOME),
            ([1, 2, None, 4], pc.field("x") < 7, SOME),
            ([1, 2, None, 4], pc.field("x").is_valid(), SOME),
            ([None, None, None, None], pc.field("x").is_null(), ALL),
            (["a", "b", "c", "d"], pc.field("x") < "b" * 100, SOME),
            (["a", "b", "c", "d"], pc.field("x") < "e", ALL),
            ([[1], [2], [3], [4]], pc.list_value_length(pc.field("x")) == 1, SOME),
        ],
    )
    def test_missing_statistics_decide_nothing(
        self, tmp_path: Path, values: list[Any], condition: pc.Expression, expected: Presence
    ) -> None:
        array = pa.array(values, pa.float64() if any(isinstance(value, float) for value in values) else None)
        if array.type == pa.null():
            array = array.cast(pa.int64())
        assert self.asked(tmp_path, pa.table({"x": array}), condition, ["x"]) == [expected]

    def test_a_filter_that_is_always_null_passes_nothing(self, tmp_path: Path) -> None:
        condition = (pc.field("n") < 2) | pc.scalar(pa.scalar(None, pa.bool_()))
        table = pa.table({"n": range(8)})
        assert self.asked(tmp_path, table, condition, ["n"])[0] is not ALL

    def test_a_filter_that_does_not_fit_the_file_is_left_to_the_evaluation(self, tmp_path: Path) -> None:
        assert self.asked(tmp_path, pa.table({"n": range(8)}), pc.field("n") == "word", ["n"]) == [SOME, SOME]

    def test_a_file_without_statistics_decides_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "part-0.parquet"
        pq.write_table(pa.table({"n": range(8)}), path, row_group_size=4, write_statistics=False)
        file = data_file(path)
        facts = self.inspect(file)
        asked = bound(pc.field("n") < 4, facts.schema, ["n"])
        assert self.format.presence(LOCAL, file, facts, *asked) == [SOME, SOME]

    def test_statistics_of_another_file_are_not_used(self, tmp_path: Path) -> None:
        file = self.plant(tmp_path, pa.table({"n": range(8)}))
        facts = self.inspect(file)
        self.plant(tmp_path, pa.table({"n": range(1, 9)}))
        with pytest.raises(DataFileChanged, match="part-0"):
            self.format.presence(LOCAL, file, facts, *bound(pc.field("n") < 4, facts.schema, ["n"]))
