"""Joining the parts of a batch that come from several sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from strata.data.batch.joining import check_types, join, num_rows
from strata.data.batch.output import PaddedRows, RaggedRows
from strata.errors import SchemaMismatch


def joined(*parts: Any, order: list[int] | None = None) -> Any:
    return join(list(zip("abcdef", parts, strict=False)), None if order is None else np.array(order))


def test_tensors_of_decoded_images_with_different_sizes_become_a_list() -> None:
    small, large = torch.zeros(2, 3, 4, 4), torch.ones(1, 3, 8, 8)
    found = joined({"jpg": small}, {"jpg": large}, order=[2, 0, 1])["jpg"]
    assert [tuple(image.shape) for image in found] == [(3, 8, 8), (3, 4, 4), (3, 4, 4)]
    mixed = joined({"jpg": small}, {"jpg": [torch.zeros(3, 2, 2), None]})["jpg"]
    assert [None if image is None else tuple(image.shape) for image in mixed] == [
        *[(3, 4, 4)] * 2,
        (3, 2, 2),
        None,
    ]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_ragged_and_padded_rows_are_joined_and_reordered(make: Any) -> None:
    ragged = joined(
        {"x": RaggedRows(make([1, 2, 3]), make([0, 2]))},
        {"x": RaggedRows(make([7, 8]), make([0, 0]))},
        order=[3, 0, 2, 1],
    )["x"]
    assert ragged.values.tolist() == [7, 8, 1, 2, 3]
    assert ragged.offsets.tolist() == [0, 2, 4, 4]
    padded = joined(
        {"x": PaddedRows(make([[1, 1]]), make([2]))},
        {"x": PaddedRows(make([[5, 5, 5], [6, 0, 0]]), make([3, 1]))},
        order=[1, 0, 2],
    )["x"]
    assert padded.values.tolist() == [[5, 5, 5], [1, 1, 0], [6, 0, 0]]
    assert padded.lengths.tolist() == [3, 2, 1]
    assert [num_rows({"x": each}) for each in (ragged, padded)] == [4, 3]


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (
            {"x": torch.zeros(1)},
            {"x": torch.zeros(1, dtype=torch.int64)},
            "torch.float32 in source 'a' and torch.int64",
        ),
        ({"x": ["a"]}, {"x": [b"a"]}, "str in source 'a' and bytes in source 'b'"),
        ({"x": ["a"]}, {"x": torch.zeros(1)}, "str in source 'a' and float in source 'b'"),
        ({"x": torch.zeros(1, 2)}, {"x": [{"y": 1}]}, "Tensor of torch.float32 in source 'a' and dict"),
        ({"x": torch.zeros(1)}, {"x": RaggedRows(torch.zeros(1), torch.zeros(1))}, "torch.float32 values, offsets"),
        ({"x": torch.zeros(1)}, {"y": torch.zeros(1)}, "source 'a' has a column 'x', and source 'b' has not"),
        (pa.record_batch({"x": [1]}), pa.record_batch({"x": [0.5]}), "int64 in source 'a' and double in source 'b'"),
        (pd.DataFrame({"x": [1]}), pd.DataFrame({"x": [0.5]}), "int64 in source 'a' and float64 in source 'b'"),
    ],
)
def test_parts_of_different_types_are_refused_with_the_column_and_both_sources(
    left: Any, right: Any, message: str
) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        joined(left, right)


def test_missing_values_have_no_type() -> None:
    assert joined({"x": [None, None]}, {"x": ["a", None]})["x"] == [None, None, "a", None]


def test_arrow_columns_are_joined_by_name() -> None:
    left = pa.record_batch({"x": [1], "y": ["a"]})
    right = pa.record_batch({"y": ["b"], "x": [2]})
    assert joined(left, right, order=[1, 0]).to_pydict() == {"x": [2, 1], "y": ["b", "a"]}


def test_only_types_that_are_known_are_compared() -> None:
    check_types({"a": {"x": "", "y": "int64"}, "b": {"x": "float64", "y": "int64"}})
    with pytest.raises(SchemaMismatch, match="'y' is int64 in source 'a' and int32 in source 'c'"):
        check_types({"a": {"y": "int64"}, "b": {"y": "int64"}, "c": {"y": "int32"}})
