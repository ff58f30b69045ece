"""Batches in five output formats, which callers may modify."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from accelerate.utils import send_to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_convert

from strata.data.batch.columns import ArrowColumn, Chunk, Dense, Ragged, gather
from strata.data.batch.conversion import Converter, vocabulary_values
from strata.data.batch.output import PaddedRows, Presenter, RaggedRows, pad
from strata.data.batch.policy import decide
from strata.data.batch.vocabulary import Vocabulary
from strata.errors import ConfigError, InvalidArgument

TABLE = pa.table(
    {
        "id": pa.array(range(10), pa.int64()),
        "x": pa.array([n / 2 for n in range(10)], pa.float32()),
        "e": pa.array([[n, -n] for n in range(10)], pa.list_(pa.int16(), 2)),
        "h": pa.array([list(range(n % 3)) for n in range(10)]),
        "s": pa.array([None if n == 4 else "é" * n for n in range(10)]),
    }
)


def batches(
    table: pa.Table, sizes: list[int], output_format: str, index: np.ndarray[Any, Any] | None = None, **options: Any
) -> list[Any]:
    policies = decide(table.schema, {}, output_format=output_format, **options)
    vocabularies = {
        policy.name: Vocabulary.found(policy.name, vocabulary_values(policy, table))
        for policy in policies
        if policy.is_coded
    }
    chunk = gather([Converter(policies, vocabularies).convert(table, "here")], index)
    return Presenter(output_format, policies).present(chunk, sizes)


def as_lists(ragged: RaggedRows) -> list[list[Any]]:
    bounds = [*ragged.offsets.tolist(), len(ragged.values)]
    return [ragged.values[first:last].tolist() for first, last in itertools.pairwise(bounds)]


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(0, 4), max_size=6), seed=st.integers(0, 2**32 - 1) | st.none())
@pytest.mark.parametrize("output_format", ["torch", "numpy", "arrow", "pandas", "dict"])
def test_batches_hold_the_rows_of_the_chunk_in_order(output_format: str, sizes: list[int], seed: int | None) -> None:
    index = np.random.default_rng(0 if seed is None else seed).integers(0, 10, sum(sizes))
    table = TABLE.take(pa.array(index))
    found = batches(table, sizes, output_format) if seed is None else batches(TABLE, sizes, output_format, index)
    assert len(found) == len(sizes)
    first = 0
    for batch, size in zip(found, sizes, strict=True):
        expected = table.slice(first, size).to_pydict()
        first += size
        if output_format == "arrow":
            assert batch.to_pydict() == expected
            assert batch.schema.types == TABLE.schema.types
        elif output_format == "pandas":
            assert batch["id"].tolist() == expected["id"]
            assert batch["x"].tolist() == expected["x"]
            assert [row.tolist() for row in batch["h"]] == expected["h"]
            assert list(batch.index) == list(range(size))
        elif output_format == "dict":
            assert batch == expected
        else:
            assert list(batch) == TABLE.column_names
            assert as_lists(batch["h"]) == expected["h"]
            assert len(batch["h"].offsets) == size
            assert {name: batch[name].tolist() for name in ("id", "x", "e")} == {
                name: expected[name] for name in ("id", "x", "e")
            }
            assert list(batch["s"]) == expected["s"]


def test_torch_tensors_are_contiguous_and_have_the_dtypes_of_the_policy() -> None:
    _, batch = batches(TABLE, [3, 7], "torch", strings="codes")
    assert [(name, batch[name].dtype) for name in ("id", "x", "e", "s")] == [
        ("id", torch.int64),
        ("x", torch.float32),
        ("e", torch.int16),
        ("s", torch.int32),
    ]
    assert all(batch[name].is_contiguous() for name in ("id", "x", "e", "s"))
    assert batch["h"].values.dtype == batch["h"].offsets.dtype == torch.int64
    assert type(batches(TABLE, [10], "torch")[0]["s"]) is list
    assert batches(TABLE, [10], "numpy")[0]["s"].dtype == object


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.string()], ids=str)
def test_lists_are_valid_arguments_of_an_embedding_bag(kind: pa.DataType) -> None:
    rows = [[1, 2], [], [3], [0, 0, 2]]
    texts = [[f"t{value}" for value in row] for row in rows]
    table = pa.table({"h": pa.array(texts if kind == pa.string() else rows, pa.list_(kind))})
    bag = torch.nn.EmbeddingBag(6, 3, mode="sum")
    shift = 1 if kind == pa.string() else 0
    for batch, expected in zip(batches(table, [1, 3], "torch", strings="codes"), (rows[:1], rows[1:]), strict=True):
        found = bag(batch["h"].values, batch["h"].offsets)
        sums = [bag.weight[[value + shift for value in row]].sum(0) for row in expected]
        assert torch.allclose(found, torch.stack(sums))


def test_batches_work_with_pytree_tools() -> None:
    (batch,) = batches(TABLE, [10], "torch")
    for walked in (send_to_device(batch, torch.device("cpu")), default_convert(batch)):
        assert isinstance(walked["h"], RaggedRows)
        assert as_lists(walked["h"]) == TABLE["h"].to_pylist()
        assert walked["s"] == TABLE["s"].to_pylist()


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
def test_a_batch_may_be_modified_without_changing_its_neighbours(output_format: str, tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write(TABLE)
    with pa.memory_map(str(tmp_path / "a.arrow")) as mapped:
        from_file = pa.ipc.open_file(mapped).read_all()
    for table in (from_file, pa.Table.from_pydict(TABLE.to_pydict(), TABLE.schema)):
        first, second = batches(table, [4, 6], output_format)
        for name in ("id", "x", "e"):
            first[name][:] = 77
        first["h"].values[:] = 77
        assert second["id"].tolist() == [4, 5, 6, 7, 8, 9]
        assert as_lists(second["h"]) == TABLE["h"].to_pylist()[4:]
        assert first["e"].tolist() == [[77, 77]] * 4
    assert from_file["id"].to_pylist() == list(range(10))


def test_a_tensor_may_be_changed_in_place_with_a_gradient() -> None:
    first, second = batches(TABLE, [4, 6], "torch")
    weight = torch.ones(4, requires_grad=True)
    first["x"].mul_(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert not second["x"].requires_grad


def test_memory_that_a_transform_keeps_is_copied() -> None:
    kept = np.arange(6)
    table = pa.table({"x": kept})
    policies = decide(table.schema, {})
    chunk = Converter(policies, is_private=False).convert(table, "here")
    (batch,) = Presenter("torch", policies).present(chunk, [6])
    batch["x"].zero_()
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]


TEXTS = ["", "plain", "naïve", "日本語", "🙂🙂", "\x00zero"]


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
@settings(max_examples=20)
@given(rows=st.lists(st.sampled_from(TEXTS) | st.text(max_size=5), max_size=12), cut=st.integers(0, 12))
def test_padded_strings_are_as_wide_as_the_longest_of_their_batch(
    output_format: str, rows: list[str], cut: int
) -> None:
    sizes = [min(cut, len(rows)), len(rows) - min(cut, len(rows))]
    table = pa.table({"s": pa.array(rows, pa.string())})
    found = batches(table, sizes, output_format, strings="bytes")
    remaining = iter(rows)
    for batch, size in zip(found, sizes, strict=True):
        encoded = [text.encode() for text in itertools.islice(remaining, size)]
        padded = batch["s"]
        assert isinstance(padded, PaddedRows)
        assert tuple(padded.values.shape) == (size, max(map(len, encoded), default=0))
        assert padded.lengths.tolist() == [len(text) for text in encoded]
        matrix = np.asarray(padded.values)
        assert [bytes(row[: len(text)]) for row, text in zip(matrix, encoded, strict=True)] == encoded
        assert not any(row[len(text) :].any() for row, text in zip(matrix, encoded, strict=True))


@pytest.mark.parametrize("width", [1, 4, 50])
def test_a_fixed_width_cuts_strings_and_keeps_their_lengths(width: int) -> None:
    table = pa.table({"s": TEXTS})
    first, second = batches(table.slice(1), [2, 3], "torch", strings="bytes", string_width=width)
    encoded = [text.encode() for text in TEXTS[1:]]
    rows = [bytes(row.tolist()) for batch in (first, second) for row in batch["s"].values]
    assert rows == [text[:width].ljust(width, b"\0") for text in encoded]
    assert [length for batch in (first, second) for length in batch["s"].lengths.tolist()] == list(map(len, encoded))


def test_padding_a_slice_uses_only_its_rows() -> None:
    column = Ragged.of(np.arange(1, 7, dtype=np.uint8), np.array([1, 2, 3]))
    assert pad(column.slice(1, 3), 3).tolist() == [[2, 3, 0], [4, 5, 6]]
    assert pad(column.slice(1, 3), 2).tolist() == [[2, 3], [4, 5]]
    assert pad(column.slice(0, 0), 2).shape == (0, 2)


def test_objects_of_any_type_become_python() -> None:
    table = pa.table(
        {
            "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "l": pa.array([["a"], [None, "b"]]),
            "n": pa.array([1, None]),
        }
    )
    how = {"m": "python", "l": "python", "n": "python"}
    (batch,) = batches(table, [2], "torch", strings=how)
    assert batch == table.to_pydict()
    (batch,) = batches(table, [2], "numpy", strings=how)
    assert {name: column.tolist() for name, column in batch.items()} == table.to_pydict()


@pytest.mark.parametrize("output_format", ["torch", "numpy", "arrow", "pandas", "dict"])
def test_masks_are_columns_of_the_batch(output_format: str) -> None:
    table = pa.table({"x": pa.array([1, None, 3])})
    _, batch = batches(table, [1, 2], output_format, nulls="mask")
    mask = batch["x_mask"]
    assert [bool(value) for value in (mask.to_pylist() if output_format == "arrow" else mask)] == [False, True]


def test_a_frame_of_one_column_may_be_modified() -> None:
    (frame,) = batches(TABLE.select(["id"]), [10], "pandas")
    assert isinstance(frame, pd.DataFrame)
    frame.loc[0, "id"] = 5
    assert frame["id"].tolist()[:2] == [5, 1]


@pytest.mark.parametrize("output_format", ["torch", "numpy", "arrow", "dict"])
def test_rows_without_columns_still_make_batches(output_format: str) -> None:
    found = Presenter(output_format, ()).present(Chunk({}, 5), [2, 3])
    assert len(found) == 2
    assert all(len(batch) == 0 for batch in found) or [batch.num_rows for batch in found] == [2, 3]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="output_format='csv' is unknown; use one of torch, numpy"):
        Presenter("csv", ())


@pytest.mark.parametrize("package", ["torch", "pandas"])
def test_a_format_whose_package_is_missing_names_the_cure(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}, or use output_format="):
        Presenter(package, ())


def test_arrays_need_no_torch() -> None:
    script = (
        "import sys, numpy as np; from strata.data.batch.output import Presenter; "
        "from strata.data.batch.columns import Chunk, Dense; "
        "print(Presenter('numpy', ()).present(Chunk({'x': Dense(np.arange(3))}, 3), [3])[0]['x'].sum(), "
        "'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.split() == ["3", "False"]


def test_a_batch_must_take_every_row() -> None:
    chunk = Chunk({"x": Dense(np.arange(3)), "s": ArrowColumn(pa.array(["a", "b", "c"]))}, 3)
    with pytest.raises(AssertionError, match="all rows"):
        Presenter("numpy", ()).present(chunk, [2])
