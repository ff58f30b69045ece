"""How a batch becomes the arguments of `forward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from strata.errors import InvalidArgument
from strata.trainer.binding import bind, feature_parts

COLUMNS = ["user", "item", "price"]


def batch(rows: int = 3) -> dict[str, torch.Tensor]:
    return {
        "user": torch.arange(rows),
        "item": torch.arange(rows) * 10,
        "price": torch.arange(rows, dtype=torch.float32) / 2,
    }


def test_parameters_named_like_columns_receive_only_these() -> None:
    binding = bind(lambda user, price: None, COLUMNS)

    args, kwargs = binding.arguments(batch())

    assert binding.columns == ("user", "price")
    assert args == ()
    assert kwargs["price"].tolist() == [0.0, 0.5, 1.0]
    assert list(kwargs) == ["user", "price"]


def test_one_parameter_that_is_no_column_receives_the_whole_batch() -> None:
    inputs = batch()

    args, kwargs = bind(lambda features: None, COLUMNS).arguments(inputs)

    assert args == (inputs,)
    assert kwargs == {}


def test_an_optional_parameter_receives_its_column_only_if_there_is_one() -> None:
    assert bind(lambda user, item=None: None, COLUMNS).columns == ("user", "item")
    assert bind(lambda user, age=None: None, COLUMNS).columns == ("user",)


def test_named_inputs_become_one_matrix_for_a_module_with_one_parameter() -> None:
    inputs = {**batch(), "vector": torch.ones(3, 2)}

    (matrix,), kwargs = bind(
        torch.nn.Linear(4, 1).forward, [*COLUMNS, "vector"], inputs=["price", "user", "vector"]
    ).arguments(inputs)

    assert matrix.dtype == torch.float32
    assert matrix.tolist() == [[0.0, 0.0, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]]
    assert kwargs == {}


def test_named_inputs_are_passed_in_their_order_to_as_many_parameters() -> None:
    args, _ = bind(lambda left, right: None, COLUMNS, inputs=["item", "user"]).arguments(batch())

    assert [each.tolist() for each in args] == [[0, 10, 20], [0, 1, 2]]


def test_tuples_are_passed_in_their_order() -> None:
    assert bind(lambda x, y: None, None).arguments([1, 2]) == ((1, 2), {})


def test_a_function_of_any_keyword_receives_all_columns() -> None:
    def forward(**columns: Any) -> None: ...

    assert bind(forward, COLUMNS).columns == tuple(COLUMNS)


@dataclass(frozen=True)
class Field:
    name: str
    kind: str
    width: int = 1


def test_a_feature_is_a_column_of_the_encoded_matrix() -> None:
    fields = [Field("city", "sparse"), Field("age", "dense"), Field("day", "sparse"), Field("geo", "dense", 2)]
    encoded = {"sparse": torch.tensor([[2, 3], [4, 5]]), "dense": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}

    binding = bind(lambda day, geo, age: None, list(encoded), parts=feature_parts(fields))
    _, found = binding.arguments(encoded)

    assert {name: value.tolist() for name, value in found.items()} == {
        "day": [3, 5],
        "geo": [[2.0, 3.0], [5.0, 6.0]],
        "age": [1.0, 4.0],
    }


@pytest.mark.parametrize(
    ("forward", "inputs", "message"),
    [
        (lambda user, prize: None, None, "'prize', which is not a column of the data (did you mean 'price'?)"),
        (
            lambda x: None,
            ["user", "itm"],
            "inputs= names 'itm', which is not a column of the data (did you mean 'item'?)",
        ),
        (lambda a, b, c: None, ["user"], "forward takes 3 arguments (a, b, c), but inputs= names 1 columns"),
    ],
)
def test_a_mismatch_is_refused_with_the_cure(forward: Any, inputs: list[str] | None, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        bind(forward, COLUMNS, inputs=inputs)

    assert message in str(caught.value)


def test_a_column_that_is_no_tensor_cannot_be_part_of_a_matrix() -> None:
    binding = bind(lambda x: None, ["name", "price"], inputs=["name", "price"])

    with pytest.raises(InvalidArgument, match="column 'name' is a list, not a tensor"):
        binding.arguments({"name": ["ann"], "price": torch.ones(1)})
