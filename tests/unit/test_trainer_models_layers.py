"""The layers of the reference models, each against a loop over its paper's formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_fields import PlainField, dense, random_batch, sparse, varlen
from torch import Tensor, nn

from strata.errors import InvalidArgument
from strata.trainer.models.dcn import CrossNetwork
from strata.trainer.models.embedding import (
    EmbeddingBlock,
    FeatureInputs,
    FeatureVectors,
    FeatureWeights,
    FieldIds,
    FlatInput,
    pool,
)
from strata.trainer.models.fields import Layout
from strata.trainer.models.layers import (
    MLP,
    BatchNorm,
    CrossLayer,
    InnerProducts,
    LowRankCrossLayer,
    MixtureCrossLayer,
    fm_interaction,
    outer_product,
)
from strata.trainer.models.wide_deep import CrossedWeights

MIXED = [sparse("a", 5), dense("x", 2), varlen("tags", 7, 3), sparse("b", 4), dense("y"), varlen("words", 6, 2, "max")]


def vectors_of(rows: int, features: int, dim: int, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, features, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- embedding ---------------------------------------------------------------------------------------------------------


def naive_pool(vectors: Tensor, ids: list[int], combiner: str) -> Tensor:
    present = [vectors[at] for at, own in enumerate(ids) if own != 0]
    if not present:
        return torch.zeros(vectors.shape[1], dtype=vectors.dtype)
    stacked = torch.stack(present)
    return {"mean": stacked.mean(0), "sum": stacked.sum(0), "max": stacked.amax(0)}[combiner]


@given(
    ids=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=6),
    combiner=st.sampled_from(["mean", "sum", "max"]),
)
def test_pooling_combines_the_vectors_of_a_row_without_its_padding(ids: list[list[int]], combiner: str) -> None:
    vectors = vectors_of(len(ids), 3, 2)
    pooled = pool(vectors, torch.tensor(ids) != 0, combiner)
    for row, own in enumerate(ids):
        assert torch.allclose(pooled[row], naive_pool(vectors[row], own, combiner))


def test_each_field_has_its_own_rows_of_the_one_table() -> None:
    block = EmbeddingBlock(Layout.of(MIXED), 4)
    batch = random_batch(MIXED, 9)
    table = block.table.weight
    assert table.shape == (5 + 4 + 7 + 6, 4)

    vectors = block(batch)

    assert vectors.shape == (9, 4, 4)
    for row in range(9):
        a, b = batch["sparse"][row].tolist()
        tags, words = batch["tags"][row], batch["words"][row]
        expected = [
            table[a],
            table[5 + b],
            naive_pool(table[9 + tags], tags.tolist(), "mean"),
            naive_pool(table[16 + words], words.tolist(), "max"),
        ]
        assert torch.allclose(vectors[row], torch.stack(expected))


@pytest.mark.parametrize("combiner", ["mean", "sum", "max"])
def test_padding_of_a_varlen_field_gets_no_gradient(combiner: str) -> None:
    field = varlen("tags", 5, 3, combiner)
    block = EmbeddingBlock(Layout.of([field]), 4)
    block({"tags": torch.tensor([[2, 0, 0], [0, 0, 0]])}).sum().backward()
    gradient = block.table.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.abs().sum(dim=1).nonzero().flatten().tolist() == [2]


def test_the_flat_input_has_one_table_per_dimension_and_the_dense_columns() -> None:
    fields = [
        sparse("a", 5, embedding_dim=2),
        sparse("b", 4, embedding_dim=3),
        dense("x", 2),
        sparse("c", 6, embedding_dim=2),
    ]
    inputs = FlatInput(fields, embedding_dim=None)
    batch = random_batch(fields, 7)
    assert [tuple(block.table.weight.shape) for block in inputs.embeddings] == [(11, 2), (4, 3)]
    assert inputs.width == 2 + 2 + 3 + 2

    rows = inputs(batch)

    narrow, wide = (block.table.weight for block in inputs.embeddings)
    a, b, c = batch["sparse"].unbind(1)
    assert torch.equal(rows, torch.cat([narrow[a], narrow[5 + c], wide[b], batch["dense"]], dim=1))


def test_a_part_of_the_fields_reads_its_own_columns_of_a_full_or_a_partial_batch() -> None:
    inputs = FlatInput(MIXED, ["b", "y"], embedding_dim=3)
    batch = random_batch(MIXED, 5)
    full = inputs(batch)
    assert torch.equal(full[:, :3], inputs.embeddings[0].table.weight[batch["sparse"][:, 1]])
    assert torch.equal(full[:, 3:], batch["dense"][:, 2:])
    partial = {"sparse": batch["sparse"][:, 1:], "dense": batch["dense"][:, 2:]}
    assert torch.equal(inputs(partial), full)


def test_features_of_a_factorization_machine_are_vectors_times_values() -> None:
    inputs = FeatureInputs(Layout.of(MIXED))
    vectors, weights = FeatureVectors(inputs, 4), FeatureWeights(inputs)
    nn.init.normal_(weights.table.weight)  # type: ignore[union-attr]
    nn.init.normal_(weights.dense)  # type: ignore[arg-type]
    batch = random_batch(MIXED, 6)
    ids, values = inputs(batch)

    found = vectors(ids, values)

    assert inputs.num_features == 4 + 3
    assert torch.equal(found[:, :4], vectors.table(ids))  # type: ignore[misc]
    for column in range(3):
        assert torch.equal(found[:, 4 + column], batch["dense"][:, column, None] * vectors.dense[column])  # type: ignore[index]
    each = weights.each(ids, values)
    assert each.shape == (6, 7)
    assert torch.allclose(weights(ids, values), each.sum(1))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "no 'sparse', only nothing"),
        ({"sparse": torch.zeros(2, 3, dtype=torch.int64)}, r"batch\['sparse'\] has shape \[2, 3\].* \[rows, 2\]"),
        ({"sparse": torch.zeros(2, dtype=torch.int64)}, r"batch\['sparse'\] has shape \[2\]"),
        ({"sparse": torch.zeros(2, 2, dtype=torch.int64)}, "no 'tags', only sparse"),
        (
            {"sparse": torch.zeros(2, 2, dtype=torch.int64), "tags": torch.zeros(2, 5, dtype=torch.int64)},
            "max_length=3; pad or cut its rows to 3 ids",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: dict[str, Tensor], message: str) -> None:
    block = EmbeddingBlock(Layout.of(MIXED[:4]), 4)
    with pytest.raises(InvalidArgument, match=message):
        block(batch)


@pytest.mark.parametrize(("field", "wrong"), [("a", 5), ("a", -1), ("b", 4), ("tags", 7), ("words", -3)])
def test_an_id_outside_the_table_is_named_with_its_field_and_the_size_of_the_table(field: str, wrong: int) -> None:
    ids = FieldIds(Layout.of(MIXED))
    batch = random_batch(MIXED, 4)
    ids.check_ids(batch)
    column = {"a": batch["sparse"][:, 0], "b": batch["sparse"][:, 1]}.get(field, batch.get(field))
    assert column is not None
    column[2] = wrong
    size = {each.name: each.num_ids for each in MIXED}[field]
    with pytest.raises(
        InvalidArgument, match=f"field '{field}' has the id {wrong}, but its table has {size} ids"
    ) as error:
        ids.check_ids(batch)
    assert error.value.field == field


def test_an_empty_batch_has_no_wrong_ids() -> None:
    FieldIds(Layout.of(MIXED)).check_ids(random_batch(MIXED, 0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "fields is empty"),
        ([sparse("a", 3), dense("a")], "two fields are named 'a'"),
        ([PlainField("a", "image")], "field 'a' has kind='image'"),
        ([sparse("a", 0)], "field 'a' has num_ids=0"),
        ([dense("x", 0)], "field 'x' has width=0"),
        ([varlen("t", 4, 0)], "field 't' has max_length=0"),
        ([varlen("t", 4, 2, "median")], "field 't' has combiner='median'"),
        ([varlen("sparse", 4, 2)], "a varlen field cannot be named 'sparse'"),
    ],
)
def test_an_invalid_field_is_refused_by_name(fields: list[PlainField], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Layout.of(fields)


def test_an_unknown_name_of_a_field_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no field is named 'c'; the fields are a, x, tags"):
        Layout.of(MIXED[:3], ["a", "c"])


# -- interactions ------------------------------------------------------------------------------------------------------


@given(rows=st.integers(0, 3), features=st.integers(1, 6), dim=st.integers(1, 4), seed=st.integers(0, 1_000))
def test_interactions_equal_loops_over_pairs(rows: int, features: int, dim: int, seed: int) -> None:
    vectors = vectors_of(rows, features, dim, seed=seed)
    second_order, inner, outer = fm_interaction(vectors), InnerProducts(features)(vectors), outer_product(vectors)
    assert second_order.shape == (rows,)
    assert inner.shape == (rows, features * (features - 1) // 2)
    for row in range(rows):
        pairs = [float(vectors[row, i] @ vectors[row, j]) for i in range(features) for j in range(i + 1, features)]
        assert inner[row].tolist() == pytest.approx(pairs)
        assert float(second_order[row]) == pytest.approx(sum(pairs))
        products = torch.zeros(dim, dim, dtype=torch.float64)
        for i in range(features):
            for j in range(features):
                products += torch.outer(vectors[row, i], vectors[row, j])
        assert torch.allclose(outer[row], products.flatten())


def test_a_cross_layer_is_x0_times_a_linear_layer_plus_x() -> None:
    layer = CrossLayer(5).double()
    nn.init.normal_(layer.linear.bias)
    start, rows = vectors_of(2, 4, 5)
    weight, bias = layer.linear.weight, layer.linear.bias
    for row in range(4):
        expected = [
            start[row, i] * (sum(weight[i, j] * rows[row, j] for j in range(5)) + bias[i]) + rows[row, i]
            for i in range(5)
        ]
        assert torch.allclose(layer(start, rows)[row], torch.stack(expected))


def test_a_low_rank_cross_layer_is_a_cross_layer_with_the_product_of_its_factors() -> None:
    low, full = LowRankCrossLayer(5, 2).double(), CrossLayer(5).double()
    nn.init.normal_(low.expand.bias)
    full.linear.weight.data = low.expand.weight.data @ low.reduce.weight.data
    full.linear.bias.data = low.expand.bias.data
    start, rows = vectors_of(2, 4, 5)
    assert torch.allclose(low(start, rows), full(start, rows))


def test_a_mixture_weights_its_experts_by_a_softmax_of_the_gates() -> None:
    layer = MixtureCrossLayer(5, 2, 3).double()
    nn.init.normal_(layer.bias)
    start, rows = vectors_of(2, 4, 5)
    for row in range(4):
        x0, x = start[row], rows[row]
        gates = torch.softmax(layer.gate.weight @ x, dim=0)
        expected = x.clone()
        for k in range(3):
            inner = torch.tanh(layer.mix[k].T @ torch.tanh(layer.reduce[k].T @ x))
            expected = expected + gates[k] * (x0 * (layer.expand[k].T @ inner + layer.bias))
        assert torch.allclose(layer(start, rows)[row], expected)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_layers": 0}, "cross_layers"),
        ({"num_layers": 1, "low_rank": 0}, "low_rank"),
        ({"num_layers": 1, "low_rank": 9}, "low_rank"),
        ({"num_layers": 1, "experts": 2}, "experts"),
        ({"num_layers": 1, "low_rank": 2, "experts": 0}, "experts"),
    ],
)
def test_an_impossible_cross_network_is_refused(arguments: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        CrossNetwork(8, **arguments)  # type: ignore[arg-type]
    assert error.value.field == field


# -- crossed weights ---------------------------------------------------------------------------------------------------


def test_a_small_cross_numbers_its_combinations_without_collisions() -> None:
    fields = [sparse("a", 3), sparse("b", 4), sparse("c", 5)]
    crossed = CrossedWeights(fields, [("a", "b"), ("c", "a", "b")], buckets=60, sparse_gradients=False)
    every = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(5))
    combinations = crossed.combinations({"sparse": every})
    assert combinations[:, 0].tolist() == (every[:, 0] * 4 + every[:, 1]).tolist()
    assert sorted(combinations[:, 1].tolist()) == list(range(60))

    nn.init.normal_(crossed.table.weight)
    weights = crossed.table.weight[:, 0]
    expected = weights[combinations[:, 0]] + weights[12 + combinations[:, 1]]
    assert torch.allclose(crossed({"sparse": every}), expected)


def test_a_large_cross_is_hashed_and_every_member_matters() -> None:
    """With 1,000 buckets and 1,000 ids, a plain remainder would drop a member."""
    fields = [sparse("a", 1_000), sparse("b", 1_000)]
    crossed = CrossedWeights(fields, [("a", "b")], buckets=1_000, sparse_gradients=False)
    every = torch.cartesian_prod(torch.arange(1_000), torch.arange(1_000))
    combinations = crossed.combinations({"sparse": every}).view(1_000, 1_000)
    assert combinations.min() >= 0
    assert combinations.max() < 1_000
    loads = torch.bincount(combinations.flatten(), minlength=1_000)
    assert 850 < loads.min() <= loads.max() < 1_150  # 1,000 ± 31.6 if uniform
    # In a fixed column or row, uniform hashing hits 632 of 1,000 buckets on average.
    assert all(len(combinations[at].unique()) > 550 for at in range(0, 1_000, 50))
    assert all(len(combinations[:, at].unique()) > 550 for at in range(0, 1_000, 50))


@pytest.mark.parametrize("cross", [("a",), ("a", "a"), ("a", "x"), ("a", "nothing")])
def test_a_cross_of_other_than_different_sparse_fields_is_refused(cross: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as error:
        CrossedWeights([sparse("a", 3), dense("x")], [cross], buckets=10, sparse_gradients=False)
    assert error.value.field == "crosses"


# -- perceptron --------------------------------------------------------------------------------------------------------


def test_a_perceptron_has_its_layers_in_order() -> None:
    kinds = [type(layer) for layer in MLP(3, (4, 5), out_features=1, dropout=0.5, batch_norm=True)]
    block = [nn.Linear, BatchNorm, nn.ReLU, nn.Dropout]
    assert kinds == [*block, *block, nn.Linear]
    assert [type(layer) for layer in MLP(3, (4,), activation="tanh")] == [nn.Linear, nn.Tanh]


def test_batch_norm_trains_on_one_row_and_on_none() -> None:
    norm = BatchNorm(3)
    norm(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) * 5 + 1)
    statistics = norm.running_mean.clone()  # type: ignore[union-attr]
    row = torch.ones(1, 3)
    expected = (row - norm.running_mean) / torch.sqrt(norm.running_var + norm.eps)  # type: ignore[operator]
    assert torch.allclose(norm(row), expected)
    assert norm(torch.empty(0, 3)).shape == (0, 3)
    assert torch.equal(norm.running_mean, statistics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"hidden": ()}, "hidden"),
        ({"hidden": (4, 0)}, "hidden"),
        ({"hidden": (4,), "activation": "sine"}, "activation"),
        ({"hidden": (4,), "dropout": 1.0}, "dropout"),
        ({"hidden": (4,), "dropout": -0.1}, "dropout"),
    ],
)
def test_an_impossible_perceptron_is_refused(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        MLP(3, **arguments)  # type: ignore[arg-type]
    assert error.value.field == field
