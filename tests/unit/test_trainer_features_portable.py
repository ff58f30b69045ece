"""The exported encoder gives the same tensors as the one of the training loader, for every value."""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.trainer.features import DenseFeat, Features, PortableEncoder, SparseFeat, VarLenFeat, portable

PER_KIND = settings(max_examples=30)
"""The kinds share their code: together they have a thousand examples."""
EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - a time without a zone counts as UTC
TIMES = st.datetimes(EPOCH - dt.timedelta(30_000), EPOCH + dt.timedelta(60_000))
CATEGORIES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), st.sampled_from(["", "a", "ä", "\u0000", "𝔘", "a\u0301"]) | st.text(max_size=9)),
    "long text": (pa.large_string(), st.text(alphabet="aé", min_size=120, max_size=300)),
    "text in a dictionary": (pa.dictionary(pa.int16(), pa.string()), st.sampled_from(["a", "b", "c"]) | st.text()),
    "bytes": (pa.binary(), st.binary(max_size=9)),
    "fixed bytes": (pa.binary(2), st.binary(min_size=2, max_size=2)),
    "int64": (pa.int64(), st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)),
    "extreme integers": (pa.int64(), st.sampled_from([-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1])),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "uint64": (pa.uint64(), st.integers(0, 3) | st.integers(0, 2**64 - 1)),
    "integers in a dictionary": (pa.dictionary(pa.uint8(), pa.int32()), st.integers(-3, 3)),
    "bool": (pa.bool_(), st.booleans()),
    "whole floats": (pa.float64(), st.integers(-3, 3).map(float) | st.just(math.nan) | st.just(2.0**62)),
    "date": (pa.date32(), st.dates()),
    "date64": (pa.date64(), st.dates()),
    "timestamp": (pa.timestamp("us"), TIMES),
    "timestamp in ns": (pa.timestamp("ns", "UTC"), TIMES),
    "time": (pa.time64("us"), st.times()),
    "duration": (pa.duration("us"), st.timedeltas(-dt.timedelta(9), dt.timedelta(9))),
}
NUMBERS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "float64": (pa.float64(), st.floats(-10, 10) | st.floats()),
    "float32": (pa.float32(), st.floats(width=32)),
    "float16": (pa.float16(), st.floats(width=16).map(np.float16)),
    "int64": (pa.int64(), st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "decimal": (pa.decimal128(30, 7), st.decimals(-(10**20), 10**20, places=7)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (
        pa.timestamp("ms"),
        TIMES.map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000)),
    ),
}


def both(features: Features, array: pa.Array) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Encode one column in Arrow, and in Python from the objects that Arrow gives out."""
    batch = features.encode(pa.record_batch({"x": array}))
    made = {
        name: torch.from_numpy(np.array(column.flatten())).reshape(len(array), column.type.list_size)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return made, features.portable()({"x": array.to_pylist()})


def assert_same(features: Features, array: pa.Array) -> None:
    made, ported = both(features, array)
    assert made.keys() == ported.keys()
    for name, tensor in made.items():
        assert ported[name].dtype == tensor.dtype
        assert torch.equal(ported[name], tensor), (ported[name], tensor)


def is_value(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize("kind", CATEGORIES)
@PER_KIND
@given(data=st.data())
def test_categories_have_the_same_ids(kind: str, data: st.DataObject) -> None:
    arrow, values = CATEGORIES[kind]
    fitted = data.draw(st.lists(values | st.none(), min_size=1).filter(lambda rows: any(map(is_value, rows))))
    rows = data.draw(st.lists(values | st.none() | st.sampled_from(fitted)))
    buckets = data.draw(st.none() | st.sampled_from([1, 2, 1000, 2**31]))

    features = Features.fit({"x": pa.array(fitted, arrow)}, [SparseFeat("x", hash_buckets=buckets)], num_workers=1)

    assert_same(features, pa.array(rows, arrow))
    assert_same(features, pa.array(fitted, arrow))


@pytest.mark.parametrize("kind", ["text", "int64", "uint64", "bool", "date", "integers in a dictionary"])
@PER_KIND
@given(data=st.data())
def test_lists_of_categories_have_the_same_ids(kind: str, data: st.DataObject) -> None:
    arrow, values = CATEGORIES[kind]
    lists = st.lists(st.lists(values | st.none(), max_size=6) | st.none(), max_size=6)
    rows = data.draw(lists)
    declared = VarLenFeat(
        "x",
        max_length=data.draw(st.integers(1, 5)),
        hash_buckets=data.draw(st.none() | st.just(7)),
        min_count=1,
    )
    fitted = [data.draw(st.lists(values, min_size=1)), *rows]
    make = data.draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view]))
    kind_of_list = make(arrow) if not pa.types.is_dictionary(arrow) else pa.list_(arrow)

    features = Features.fit({"x": pa.array(fitted, kind_of_list)}, [declared], num_workers=1)

    assert_same(features, pa.array(rows, kind_of_list))


@given(
    st.lists(st.text(alphabet="ab|ä ", max_size=9) | st.none(), max_size=9),
    st.sampled_from(["|", "a", "||", " ", "ä|"]),
)
def test_separated_texts_have_the_same_ids(rows: list[str | None], separator: str) -> None:
    features = Features.fit({"x": ["b", *rows]}, [VarLenFeat("x", separator=separator)], num_workers=1)

    for kind in (pa.string(), pa.dictionary(pa.int32(), pa.string())):
        assert_same(features, pa.array(rows, kind))


@pytest.mark.parametrize("kind", NUMBERS)
@PER_KIND
@given(data=st.data())
def test_numbers_have_the_same_values(kind: str, data: st.DataObject) -> None:
    arrow, values = NUMBERS[kind]
    finite = values.filter(lambda value: not isinstance(value, float | np.float16) or abs(float(value)) <= 1e150)
    fitted = [data.draw(finite), *data.draw(st.lists(values | st.none()))]
    rows = data.draw(st.lists(values | st.none()))
    declared = DenseFeat(
        "x",
        scale=data.draw(st.sampled_from(["standard", "minmax", None])),
        fill=data.draw(st.just("mean") | st.floats(-9, 9)),
    )

    features = Features.fit({"x": pa.array(fitted, arrow)}, [declared], num_workers=1)

    assert_same(features, pa.array(rows, arrow))
    assert bool(torch.isfinite(both(features, pa.array(rows, arrow))[1]["dense"]).all())


@given(st.lists(st.floats() | st.none(), min_size=1).filter(lambda rows: any(abs(x or 0) < 1e150 for x in rows if x)))
def test_logarithms_agree_to_the_precision_of_float32(rows: list[float | None]) -> None:
    """Two libraries compute them, which may differ in the last bit of a float64."""
    features = Features.fit({"x": [1.0, *rows]}, [DenseFeat("x", scale="log")], num_workers=1)
    made, ported = both(features, pa.array(rows, pa.float64()))

    torch.testing.assert_close(ported["dense"], made["dense"], rtol=1e-6, atol=1e-6)


@given(st.lists(st.lists(st.floats(-9, 9) | st.none(), min_size=2, max_size=2) | st.none()))
def test_wide_numbers_have_the_same_values(rows: list[list[float | None] | None]) -> None:
    kind = pa.list_(pa.float64())
    features = Features.fit({"x": pa.array([[1, 2], *rows], kind)}, [DenseFeat("x", width=2)], num_workers=1)

    for each in (kind, pa.list_(pa.float64(), 2)):
        assert_same(features, pa.array(rows, each))


def test_types_may_differ_between_fitting_and_encoding_if_the_values_are_the_same() -> None:
    features = Features.fit({"x": pa.array([1, 2, 2], pa.int8())}, [SparseFeat("x")])
    wanted = [[2], [3], [1], [0]]

    for kind in (pa.int16(), pa.uint64(), pa.float32(), pa.dictionary(pa.int8(), pa.int64())):
        made, ported = both(features, pa.array([2, 1, 7, None], kind))
        assert made["sparse"].tolist() == ported["sparse"].tolist() == wanted
    made, ported = both(features, pa.array([2.0, 1.5, math.inf, math.nan]))
    assert made["sparse"].tolist() == ported["sparse"].tolist() == [[2], [1], [1], [0]]
    assert_same(features, pa.nulls(3))


def test_times_in_another_unit_are_the_same_times() -> None:
    times = [EPOCH, EPOCH + dt.timedelta(days=1, hours=3)]
    features = Features.fit({"x": pa.array(times, pa.timestamp("ms"))}, [SparseFeat("x")])

    for unit in ("s", "us", "ns"):
        assert_same(features, pa.array(times, pa.timestamp(unit)))
    assert_same(features, pa.array([EPOCH.date()], pa.date32()))
    with pytest.raises(ValueError, match="in us that are not 64-bit integers in ms"):
        features.encode(pa.record_batch({"x": pa.array([1], pa.timestamp("us"))}))
    with pytest.raises(ValueError, match="not a whole number of ms"):
        features.portable()({"x": [EPOCH + dt.timedelta(microseconds=1)]})


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (torch.tensor([1, 2, 9]), [3, 2, 1]),
        (np.array([1, 2, 9], np.int8), [3, 2, 1]),
        ([np.int64(1), np.float32(2), np.nan], [3, 2, 0]),
        ((True, 2.5, None), [3, 1, 0]),
        (pd.Series([1, 2, None]), [3, 2, 0]),
    ],
)
def test_the_exported_encoder_takes_tensors_arrays_and_scalars(values: Any, wanted: list[int]) -> None:
    encoder = Features.fit({"x": [1, 2, 2]}, [SparseFeat("x")]).portable()

    assert encoder({"x": values})["sparse"].ravel().tolist() == wanted


def test_the_exported_encoder_takes_missing_times_of_pandas() -> None:
    encoder = Features.fit({"x": [EPOCH]}, [SparseFeat("x")]).portable()

    assert encoder({"x": [pd.NaT, pd.Timestamp(EPOCH), np.datetime64("1970-01-01")]})["sparse"].tolist() == [
        [0],
        [2],
        [2],
    ]


def test_the_exported_encoder_takes_numbers_of_every_kind() -> None:
    encoder = Features.fit({"x": [0.0, 2.0]}, [DenseFeat("x", scale=None)]).portable()

    values = [10**400, -(10**400), decimal.Decimal("1.5"), True, np.float16(0.5), None]
    assert encoder({"x": values})["dense"].ravel().tolist() == [2.0, 0.0, 1.5, 1.0, 0.5, 1.0]


def test_the_exported_encoder_refuses_wrong_rows_with_the_column() -> None:
    rows: dict[str, list[Any]] = {
        "t": ["a"], "i": [1], "b": [b"a"], "d": [1.0], "w": [[1.0, 2.0]], "v": [["a"]], "s": ["a|b"]
    }  # fmt: skip
    declared = [
        *map(SparseFeat, "tib"), *(DenseFeat("d"), DenseFeat("w", width=2)),
        *(VarLenFeat("v"), VarLenFeat("s", separator="|")),
    ]  # fmt: skip
    encoder = Features.fit(rows, declared).portable()

    for changes, problem in (
        ({"t": [1]}, "'t' has 1, but the model knows text"),
        ({"i": ["a"]}, "'i' has 'a', but the model knows integers"),
        ({"i": [EPOCH]}, "'i' has .* but the model knows integers"),
        ({"b": ["a"]}, "'b' has 'a', but the model knows bytes"),
        ({"d": ["1.0"]}, "'d' has '1.0'; pass numbers"),
        ({"d": [[1.0]]}, "'d' has .*; pass numbers"),
        ({"w": [[1.0]]}, "pass 2 numbers per row"),
        ({"v": ["ab"]}, "pass a list per row"),
        ({"s": [["a"]]}, r"pass text separated by '\|'"),
        ({"t": "a"}, "pass a list with one value per row"),
        ({"t": []}, "different lengths"),
    ):
        with pytest.raises(ValueError, match=problem):
            encoder(rows | changes)
    with pytest.raises(ValueError, match="'i' is missing"):
        encoder({"t": ["a"]})


def test_the_exported_encoder_reads_the_saved_file(tmp_path: Path) -> None:
    Features.fit({"x": ["a"]}, [SparseFeat("x")]).save(tmp_path / "features.json")

    assert PortableEncoder.load(tmp_path / "features.json")({"x": ["a", "b"]})["sparse"].tolist() == [[2], [1]]


def test_the_exported_file_imports_only_torch_and_the_standard_library() -> None:
    tree = ast.parse(Path(portable.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]

    assert relative == []
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == {"torch"}
