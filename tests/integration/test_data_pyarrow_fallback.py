"""With a pyarrow whose internals are unknown, every filter and format still delivers the same rows."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest

from strata.data import StructuredDataset, pyarrow_private
from strata.data.filter import filter as filters
from strata.data.formats.parquet import pages as parquet_pages
from strata.data.formats.parquet.format import ParquetFormat
from strata.data.plan.plan import Pruning
from strata.data.pyarrow_private import Call, Field, Literal, Opaque
from strata.data.source.source import DataFile, Source
from strata.errors import DataFileInvalid, InvalidArgument, SchemaMismatch

NUM_ROWS = 4_000
GATES = (pyarrow_private.reads_expressions, pyarrow_private.has_native_reader)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("other internals")


@pytest.fixture(autouse=True)
def _fresh_gates() -> Any:
    for gate in GATES:
        gate.cache_clear()
    yield
    for gate in GATES:
        gate.cache_clear()


@pytest.fixture
def unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyarrow_private, "is_verified", lambda *_: False)


@pytest.fixture
def other_pickles(unknown_version: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expressions are pickled in another form."""
    read = pyarrow_private._metadata_pairs
    monkeypatch.setattr(
        pyarrow_private, "_metadata_pairs", lambda schema: [(b"v2:" + key, value) for key, value in read(schema)]
    )


@pytest.fixture
def other_reader(unknown_version: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pyarrow.parquet.core` has another `ParquetReader`."""
    monkeypatch.setattr(pyarrow_private, "_native_class", lambda: fail)


def rows() -> pa.Table:
    numbers = range(NUM_ROWS)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "x": pa.array([None if n % 7 == 0 else n // 10 for n in numbers], pa.int32()),
            "y": pa.array([math.nan if n % 11 == 0 else n / 8 for n in numbers], pa.float64()),
            "word": [f"w{n // 500}" for n in numbers],
            "day": pa.array([dt.date(2024, 1, 1) + dt.timedelta(n // 100) for n in numbers], pa.date32()),
            "point": [{"a": n // 50, "b": [n]} for n in numbers],
            "a.b": pa.array([n % 3 for n in numbers], pa.int8()),
        }
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for number in range(2):
        place = tmp_path / "data" / f"part={number}"
        place.mkdir(parents=True)
        pq.write_table(
            rows().slice(number * 2_000, 2_000),
            place / "f.parquet",
            row_group_size=500,
            data_page_size=512,
            write_page_index=True,
        )
    return tmp_path / "data"


def read(path: Path, condition: Any) -> tuple[list[int], Pruning]:
    loader, dataset = StructuredDataset.create_dataloader(
        str(path),
        format="parquet",
        columns=["id", "point", "a.b"],
        filters=condition,
        output_format="arrow",
        shuffle=False,
        cache=False,
    )
    found = [row for batch in loader for row in batch.to_pylist()]
    assert all(row["point"] == {"a": row["id"] // 50, "b": [row["id"]]} for row in found)
    assert all(row["a.b"] == row["id"] % 3 for row in found)
    return [row["id"] for row in found], dataset.plan.pruning


CONDITIONS: dict[str, Any] = {
    "text": "x > 120 and x <= 300 and word in ('w3', 'w5') or part == 1 and day == date('2024-02-05')",
    "tuples": [("x", ">", 120.5), ("part", "=", 0), ("word", "not in", ["w1"])],
    "comparison": (pc.field("x") > pa.scalar(120, pa.int32())) & (pc.field("part") == 1),
    "nested": pc.field("point", "a") == 12,
    "nan": pc.field("y").is_nan() | (pc.field("y") > 400.0),
    "null": pc.field("x").is_null() & ~pc.field("word").isin(["w1", "w2"]),
    "function": pc.starts_with(pc.field("word"), "w7") | (pc.field("day") < dt.date(2024, 1, 4)),
    "dotted name": pc.field("a.b") == pa.scalar(2, pa.int8()),
    "none": None,
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("broken", ["other_pickles", "other_reader", "unknown_version"])
def test_the_rows_are_the_same_without_private_api(
    dataset: Path, condition: Any, broken: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_pages, "MIN_SAVED_BYTES", 0)
    expected, _ = read(dataset, condition)
    assert expected
    for gate in GATES:
        gate.cache_clear()
    request.getfixturevalue(broken)

    assert read(dataset, condition)[0] == expected


def test_an_opaque_filter_prunes_nothing_and_a_text_filter_prunes_as_before(dataset: Path, other_pickles: None) -> None:
    by_text, text_pruning = read(dataset, "x < 40")
    by_expression, opaque_pruning = read(dataset, pc.field("x") < pa.scalar(40, pa.int32()))

    assert by_expression == by_text
    assert (text_pruning.num_units_pruned, text_pruning.num_units_counted) == (7, 1)
    assert opaque_pruning.num_units_counted == 8


def test_an_unreadable_pickle_of_a_known_version_makes_one_filter_opaque(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = read(dataset, pc.field("x") < pa.scalar(40, pa.int32()))
    monkeypatch.setattr(pyarrow_private, "_metadata_pairs", lambda schema: [(b"what", b"ever")])
    condition = filters.parse(pc.field("x") < pa.scalar(40, pa.int32()))

    assert isinstance(condition.tree, Opaque)
    assert read(dataset, condition.expression)[0] == expected


def test_orc_files_are_filtered_by_an_opaque_filter(tmp_path: Path, other_pickles: None) -> None:
    paorc.write_table(rows().drop_columns(["a.b"]), tmp_path / "f.orc", stripe_size=1 << 16)
    loader, _ = StructuredDataset.create_dataloader(
        str(tmp_path), format="orc", columns=["id"], filters=pc.field("x") == 7, output_format="arrow", cache=False
    )

    assert [row for batch in loader for row in batch.column("id").to_pylist()] == [71, 72, 73, 74, 75, 76, 78, 79]


def test_a_failed_check_is_logged_once_and_names_the_cure(
    other_reader: None, other_pickles: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "strata.data"):
        for _ in range(3):
            assert not pyarrow_private.reads_expressions()
            assert not pyarrow_private.has_native_reader()

    assert [record.message.partition("Install pyarrow")[0] != record.message for record in caplog.records] == [True] * 2
    assert "filters given as pyarrow expressions prune nothing" in caplog.text


def test_an_unknown_version_with_the_same_internals_passes_the_check(unknown_version: None) -> None:
    assert pyarrow_private.reads_expressions()
    assert pyarrow_private.has_native_reader()
    tree = filters.parse((pc.field("a", "b") > 3) & pc.field("c").is_valid()).tree

    assert isinstance(tree, Call)
    assert (tree.function, len(tree.arguments)) == ("and_kleene", 2)


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("20.0.0", False), ("21.0.0", True), ("26.0.1", True), ("27.0.0", False), ("27.0.0.dev12", False), ("x", False)],
)
def test_only_major_versions_that_were_tested_are_trusted(version: str, is_known: bool) -> None:
    assert pyarrow_private.is_verified(version) is is_known


def test_the_installed_version_is_a_tested_one() -> None:
    assert pyarrow_private.is_verified(), "add it to VERIFIED_MAJORS once the suite passes"


@pytest.mark.parametrize(
    ("expression", "columns"),
    [
        (pc.field("x") > 3, ("x",)),
        (pc.field("a", "b") == 1, ("a",)),
        (pc.field("a.b") == 1, ("a.b",)),
        ((pc.field("x") > 0.5) & ~pc.field("c").isin(["y", "and z > 1", "{q}"]), ("c", "x")),
        (pc.field("t") < dt.datetime(2024, 1, 1), ("t",)),  # noqa: DTZ001
        (pc.field("z") == pa.scalar(None, pa.int64()), ("z",)),
        (pc.if_else(pc.field("k"), pc.field("l"), pc.field("m")) == 1e10, ("k", "l", "m")),
        (pc.field("x").cast(pa.float32()) > math.inf, ("x",)),
        (pc.field("flag"), ("flag",)),
        (pc.field("b") == b"ab", ("b",)),
    ],
    ids=str,
)
def test_the_columns_of_an_opaque_filter_are_found(
    expression: pc.Expression, columns: tuple[str, ...], other_pickles: None
) -> None:
    condition = filters.parse(expression)

    assert isinstance(condition.tree, Opaque)
    assert condition.columns == columns
    assert condition.expression.equals(expression)


def test_a_column_of_an_opaque_filter_that_cannot_be_found_is_an_error_and_never_wrong_rows(
    other_pickles: None,
) -> None:
    condition = filters.parse(pc.field("two words") > 1)

    with pytest.raises(SchemaMismatch, match="'two', which does not exist"):
        filters.bind(condition, pa.schema([("two words", pa.int64())]))


@pytest.mark.parametrize(
    "expression",
    [
        (pc.field("a", "b") >= 3) | ~(pc.field("x") != "y"),
        pc.field("x").isin([1, None]) & pc.field("x").is_null(),
        pc.field("x").is_null(nan_is_null=True) | pc.field("y").is_nan() | pc.field("z").is_valid(),
        pc.starts_with(pc.field("s"), "a") & (pc.field("x") < 1),
        (pc.field("x") + pc.field("y")) > 3,
        pc.field("x").cast(pa.int8()) == 1,
        pc.is_in(pc.field("x"), options=pc.SetLookupOptions(pa.array([1]), skip_nulls=True)),
        pc.field("flag"),
    ],
    ids=str,
)
def test_a_tree_becomes_the_expression_it_came_from(expression: pc.Expression) -> None:
    tree = pyarrow_private.decode_expression(expression)

    assert not isinstance(tree, Opaque)
    assert pyarrow_private.encode_expression(tree).equals(expression)
    assert pyarrow_private._encode(tree).equals(expression)


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("x > 3 and not y == 'a'", (pc.field("x") > 3) & ~(pc.field("y") == "a")),
        ("x in (1, None) or a.b is None", pc.field("x").isin([1, None]) | pc.field("a", "b").is_null()),
        ("x is not None", ~pc.field("x").is_null()),
    ],
)
def test_text_becomes_the_same_tree_as_the_expression(text: str, expression: pc.Expression) -> None:
    condition = filters.parse(text)

    assert condition.expression.equals(expression)
    assert condition.text == filters.parse(expression).text
    assert pyarrow_private._encode(condition.tree).equals(expression)


def test_text_and_tuples_need_no_private_api(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_decode", "_encode", "_metadata_pairs"):
        monkeypatch.setattr(pyarrow_private, name, fail)
    schema = pa.schema([("x", pa.int64()), ("c", pa.string())])
    for condition in ("x > 0.5 and c in ('a', 'b')", [("x", ">", 0.5), ("c", "in", ["a", "b"])]):
        bound = filters.bind(filters.parse(condition), schema)
        table = pa.table({"x": [0, 1, 2**60], "c": ["a", "b", "z"]}, schema=schema)

        assert filters.count(bound, table, "here") == 1


def test_a_tree_that_cannot_be_rebuilt_is_an_error(other_pickles: None) -> None:
    tree = Call("starts_with", (Field(("s",)),), pa.array([{"pattern": "a"}]))

    with pytest.raises(pyarrow_private.UnreadableExpression, match="cannot rebuild"):
        pyarrow_private.encode_expression(tree)
    opaque = filters.parse(pc.starts_with(pc.field("s"), "a"))
    both = filters.from_tree(Call("and_kleene", (opaque.tree, Call("equal", (Field(("x",)), Literal(pa.array([1])))))))

    assert both.columns == ("s", "x")
    assert filters.count(both, pa.table({"s": ["ab", "ac", "b"], "x": [1, 2, 1]}), "here") == 1


def test_filters_that_are_too_large_are_refused_in_every_form() -> None:
    deep = functools.reduce(lambda found, _: ~found, range(300), pc.field("x") > 1)
    with pytest.raises(InvalidArgument, match="nested more than 200 levels deep"):
        filters.parse(deep)


def test_both_readers_return_the_same_row_groups(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(rows(), path, row_group_size=1_000)
    found = []
    for broken in (None, "other_reader"):
        if broken:
            pyarrow_private.has_native_reader.cache_clear()
            request.getfixturevalue(broken)
        with pa.OSFile(str(path)) as opened:
            reader = pyarrow_private.open_parquet(opened, verify_checksums=True)
            assert reader.metadata.num_row_groups == 4
            table = reader.read_row_group(2, column_indices=[0, 5, 6], use_threads=False).select(["id", "point"])
            batches = list(reader.iter_batches(300, [1], column_indices=[0], use_threads=False))
            found.append((reader.schema_arrow, table, [batch.column("id").to_pylist() for batch in batches]))
            reader.close()

    native, public = found
    assert native[0].equals(public[0])
    assert native[1].equals(public[1])
    assert native[1].num_rows == 1_000
    assert [len(batch) for batch in native[2]] == [300, 300, 300, 100]
    assert native[2] == public[2]


def test_damage_is_reported_by_the_public_reader_too(tmp_path: Path, other_reader: None) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(rows(), path, row_group_size=1_000)
    source = Source(pafs.LocalFileSystem(), is_local=True)
    file = DataFile(str(path), path.name, path.stat().st_size, 0)
    facts = ParquetFormat().inspect(source, file, columns=None, unit_bytes=1)
    with path.open("r+b") as damaged:
        damaged.seek(facts.units[2].offset + 100)
        damaged.write(bytes(2_000))
    reader = ParquetFormat().open(source, file, facts.schema, facts.version)
    try:
        with pytest.raises(DataFileInvalid, match=r"row group 2, which begins with row 2000, is damaged") as caught:
            reader.read(facts.units[2], facts.schema.names)
        assert (caught.value.path, caught.value.row_group) == (str(path), 2)
        assert reader.read(facts.units[1], ["id"]).column("id").to_pylist() == list(range(1_000, 2_000))
    finally:
        reader.close()
