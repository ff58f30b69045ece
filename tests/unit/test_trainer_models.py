"""The reference models: parameter counts of their papers, learning, fields they accept, export, state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from model_fields import PlainField, dense, random_batch, sparse, varlen
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from strata.errors import InvalidArgument
from strata.trainer.models import (
    DLRM,
    FM,
    FNN,
    LR,
    PNN,
    DCNv2,
    DeepFM,
    InBatchSoftmax,
    Recommender,
    TwoTower,
    WideAndDeep,
    WideDeep,
    in_batch_softmax,
)

FIELDS = [*(sparse(f"s{at}", 90 + at) for at in range(6)), dense("x", 3), varlen("tags", 40, 4), dense("y")]
K = 8  # dimension of embeddings
HIDDEN = (32, 16)
N = sum(range(90, 96)) + 4 + 40  # features: ids and dense columns
IDS, WIDTH = N - 4, 4
M = 6 + 4 + 1  # features of one row

Make = Callable[..., Recommender]


def two_tower(fields: list[PlainField], **options: object) -> TwoTower:
    names = [each.name for each in fields]
    return TwoTower(fields, user=names[::2], item=names[1::2], **options)  # type: ignore[arg-type]


MODELS: dict[str, tuple[Make, dict[str, object]]] = {
    "LR": (LR, {}),
    "FM": (FM, {"embedding_dim": K}),
    "FNN": (FNN, {"embedding_dim": K, "hidden": HIDDEN}),
    "PNN inner": (PNN, {"embedding_dim": K, "hidden": HIDDEN}),
    "PNN outer": (PNN, {"embedding_dim": K, "hidden": HIDDEN, "product": "outer"}),
    "PNN both": (PNN, {"embedding_dim": K, "hidden": HIDDEN, "product": "both"}),
    "WideDeep": (WideDeep, {"embedding_dim": K, "hidden": HIDDEN}),
    "DeepFM": (DeepFM, {"embedding_dim": K, "hidden": HIDDEN}),
    "DCNv2 parallel": (DCNv2, {"embedding_dim": K, "hidden": HIDDEN}),
    "DCNv2 stacked": (DCNv2, {"embedding_dim": K, "hidden": HIDDEN, "structure": "stacked"}),
    "DCNv2 low rank": (DCNv2, {"embedding_dim": K, "hidden": HIDDEN, "low_rank": 5}),
    "DCNv2 mixture": (DCNv2, {"embedding_dim": K, "hidden": HIDDEN, "low_rank": 5, "experts": 3}),
    "DLRM": (DLRM, {"embedding_dim": K, "bottom": (24,), "hidden": HIDDEN}),
    "TwoTower": (two_tower, {"embedding_dim": K, "hidden": HIDDEN, "output_dim": 12}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def model_of(name: str, fields: list[PlainField] = FIELDS, **options: object) -> Recommender:
    torch.manual_seed(0)
    make, arguments = MODELS[name]
    return make(fields, **{**arguments, **options})


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- size --------------------------------------------------------------------------------------------------------------


def perceptron(*sizes: int) -> int:
    """Σ (in + 1) · out over the layers."""
    return sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))


def deep(width: int) -> int:
    return perceptron(width, *HIDDEN, 1)


FLAT = 7 * K + WIDTH  # embeddings of the fields with ids, and dense columns
COUNTS = {
    # w₀ and a weight per feature
    "LR": 1 + N,
    # Rendle 2010: w₀ ∈ ℝ, w ∈ ℝⁿ, V ∈ ℝ^{n×k}
    "FM": 1 + N + N * K,
    # Zhang 2016: the machine's parameters, and z = (w₀, z₁ … z_m) with zᵢ ∈ ℝ^{k+1} into the perceptron
    "FNN": 1 + N + N * K + deep(1 + M * (K + 1)),
    # Qu 2016: z has m·k signals, p has m(m-1)/2 inner products, or k × k superposed outer products
    "PNN inner": N * K + deep(M * K + M * (M - 1) // 2),
    "PNN outer": N * K + deep(M * K + K * K),
    "PNN both": N * K + deep(M * K + M * (M - 1) // 2 + K * K),
    # Cheng 2016: a wide weight per feature, embeddings of ids, one joint bias (the perceptron's)
    "WideDeep": N + IDS * K + deep(FLAT),
    # Guo 2017: w ∈ ℝⁿ and V ∈ ℝ^{n×k}, shared with the perceptron over m·k inputs
    "DeepFM": N + N * K + deep(M * K),
    # Wang 2021: W ∈ ℝ^{d×d} and b ∈ ℝᵈ per cross layer; the logit layer sees d + h inputs, or h when stacked
    "DCNv2 parallel": IDS * K + 3 * (FLAT**2 + FLAT) + perceptron(FLAT, *HIDDEN) + FLAT + HIDDEN[-1] + 1,
    "DCNv2 stacked": IDS * K + 3 * (FLAT**2 + FLAT) + perceptron(FLAT, *HIDDEN) + HIDDEN[-1] + 1,
    # … U, V ∈ ℝ^{d×r}
    "DCNv2 low rank": IDS * K + 3 * (2 * FLAT * 5 + FLAT) + perceptron(FLAT, *HIDDEN) + FLAT + HIDDEN[-1] + 1,
    # … per expert U, V ∈ ℝ^{d×r}, C ∈ ℝ^{r×r} and a gate ∈ ℝᵈ
    "DCNv2 mixture": IDS * K
    + 3 * (3 * (2 * FLAT * 5 + 5 * 5 + FLAT) + FLAT)
    + perceptron(FLAT, *HIDDEN)
    + FLAT
    + HIDDEN[-1]
    + 1,
    # Naumov 2019: bottom over dense columns; top over k + (s+1)s/2 inputs for s fields with ids
    "DLRM": IDS * K + perceptron(WIDTH, 24, K) + deep(K + 8 * 7 // 2),
    # a table and a perceptron per tower: s0 s2 s4 x y, and s1 s3 s5 tags
    "TwoTower": IDS * K + perceptron(3 * K + 4, *HIDDEN, 12) + perceptron(4 * K, *HIDDEN, 12),
}


@every_model
def test_the_number_of_parameters_is_that_of_the_paper(name: str) -> None:
    assert num_parameters(model_of(name)) == COUNTS[name]


def test_crosses_and_batch_norm_add_their_parameters() -> None:
    plain = num_parameters(WideDeep(FIELDS, hidden=HIDDEN))
    crossed = WideDeep(FIELDS, hidden=HIDDEN, crosses=[("s0", "s1"), ("s0", "s1", "s2")], cross_buckets=10_000)
    assert num_parameters(crossed) == plain + 90 * 91 + 10_000
    assert num_parameters(WideDeep(FIELDS, hidden=HIDDEN, batch_norm=True)) == plain + 2 * sum(HIDDEN)


# -- formulas ----------------------------------------------------------------------------------------------------------


def test_the_factorization_machine_is_the_sum_over_all_pairs_of_features() -> None:
    fields = [sparse("a", 4), dense("x", 2), sparse("b", 3)]
    model = FM(fields, embedding_dim=3).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    batch = random_batch(fields, 8)
    batch["dense"] = batch["dense"].double()
    weights = torch.cat([model.weights.table.weight, model.weights.dense])[:, 0]  # type: ignore[union-attr, list-item]
    vectors = torch.cat([model.vectors.table.weight, model.vectors.dense])  # type: ignore[union-attr, list-item]
    for row in range(8):
        x = torch.zeros(4 + 3 + 2, dtype=torch.float64)  # Rendle's sparse vector of all features
        a, b = batch["sparse"][row].tolist()
        x[a] = x[4 + b] = 1.0
        x[7:] = batch["dense"][row]
        expected = model.bias[0] + weights @ x
        for i in range(len(x)):
            for j in range(i + 1, len(x)):
                expected = expected + (vectors[i] @ vectors[j]) * x[i] * x[j]
        assert model(batch)[row].item() == pytest.approx(expected.item())


def test_fnn_starts_from_a_trained_factorization_machine_and_owns_its_copy() -> None:
    fm = FM(FIELDS, embedding_dim=K)
    for parameter in fm.parameters():
        nn.init.normal_(parameter)
    before = copy.deepcopy(fm.state_dict())

    model = FNN.from_fm(fm, hidden=HIDDEN)

    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert num_parameters(model) == COUNTS["FNN"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(fm.state_dict()[key], value) for key, value in before.items())


def test_wide_and_deep_read_only_their_own_fields() -> None:
    model = WideDeep(FIELDS, wide=["s0"], deep=["s1", "x"], embedding_dim=K, hidden=HIDDEN)
    assert num_parameters(model) == 90 + 91 * K + deep(K + 3)
    nn.init.normal_(model.wide.table.weight)  # type: ignore[union-attr]
    batch = random_batch(FIELDS, 16)
    before = model(batch)
    batch["sparse"][:, 2:] = 1
    batch["dense"][:, 3] = 9.0
    assert torch.equal(model(batch), before)
    batch["sparse"][:, 0] = (batch["sparse"][:, 0] + 1) % 90
    assert not torch.equal(model(batch), before)
    assert WideAndDeep is WideDeep


# -- learning ----------------------------------------------------------------------------------------------------------


def loss_after(model: nn.Module, batch: dict[str, Tensor], labels: Tensor, *, num_steps: int, lr: float) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loss = torch.tensor(torch.inf)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch), labels)
        if loss.item() < 0.05:
            break
        loss.backward()
        optimizer.step()
    return loss.item()


@every_model
def test_a_model_overfits_256_random_rows(name: str) -> None:
    batch = random_batch(FIELDS, 256, seed=1)
    labels = torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(2)).float()
    assert loss_after(model_of(name), batch, labels, num_steps=300, lr=0.02) < 0.1


@every_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = model_of(name)
    loss = model(random_batch(FIELDS, 64)).square().sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    # Weights that start at 0 or stand behind a ReLU may have a gradient of 0 in the first step, but not for ever.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moved = dict.fromkeys(dict(model.named_parameters()), False)
    for step in range(5):
        optimizer.zero_grad()
        (model(random_batch(FIELDS, 64, seed=step)) - 1.0).square().mean().backward()
        optimizer.step()
        for key, parameter in model.named_parameters():
            moved[key] = moved[key] or bool(parameter.grad is not None and parameter.grad.abs().sum() > 0)
    assert all(moved.values()), moved


@every_model
def test_sparse_gradients_equal_dense_ones(name: str) -> None:
    batch = random_batch(FIELDS, 32)
    plain, lean = model_of(name), model_of(name, sparse_gradients=True)
    for model in (plain, lean):
        model(batch).sum().backward()
    gradients = dict(plain.named_parameters())
    kinds = set()
    for key, parameter in lean.named_parameters():
        assert parameter.grad is not None
        kinds.add((key.endswith("table.weight"), parameter.grad.is_sparse))
        assert torch.allclose(parameter.grad.to_dense(), gradients[key].grad, atol=1e-6), key  # type: ignore[arg-type]
    assert kinds <= {(True, True), (False, False)}


@every_model
def test_dropout_and_batch_norm_train_and_are_off_in_evaluation(name: str) -> None:
    if name in ("LR", "FM"):
        with pytest.raises(TypeError, match="dropout"):
            model_of(name, dropout=0.5)
        return
    model = model_of(name, dropout=0.5, batch_norm=True)
    batch = random_batch(FIELDS, 32)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


# -- fields and batches ------------------------------------------------------------------------------------------------

KINDS = {
    "sparse": [sparse("a", 9), sparse("b", 5), sparse("c", 4), sparse("d", 3)],
    "dense": [dense("x"), dense("y", 3)],
    "varlen": [varlen("t", 9, 3), varlen("u", 5, 2, "sum"), varlen("v", 5, 2, "max")],
    "sparse and dense": [sparse("a", 9), dense("y", 3)],
    "varlen and dense": [varlen("t", 9, 3), dense("y", 3)],
}
NEEDS = {
    ("DLRM", "sparse"): "DLRM needs a dense field",
    ("DLRM", "varlen"): "DLRM needs a dense field",
    ("DLRM", "dense"): "DLRM needs a sparse or varlen field",
}


@every_model
@pytest.mark.parametrize("kinds", KINDS)
def test_a_model_takes_fields_of_one_kind_or_names_the_kind_it_needs(name: str, kinds: str) -> None:
    if (name, kinds) in NEEDS:
        with pytest.raises(InvalidArgument, match=NEEDS[name, kinds]):
            model_of(name, KINDS[kinds])
        return
    options = {"low_rank": 2} if "low_rank" in MODELS[name][1] else {}
    model = model_of(name, KINDS[kinds], **options)
    batch = random_batch(KINDS[kinds], 10)
    model.check_ids(batch)
    logits = model(batch)
    assert logits.shape == (10,)
    assert logits.isfinite().all()
    logits.sum().backward()


@every_model
@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_batch_of_no_row_or_one_row_works(name: str, num_rows: int) -> None:
    """Ranks may have an empty last batch."""
    options = {} if name in ("LR", "FM") else {"batch_norm": True}
    model = model_of(name, **options)
    logits = model(random_batch(FIELDS, num_rows))
    assert logits.shape == (num_rows,)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_model
def test_a_row_has_the_same_logit_in_any_batch(name: str) -> None:
    model = model_of(name).eval()
    batch = random_batch(FIELDS, 12)
    alone = torch.cat([model({key: value[at : at + 1] for key, value in batch.items()}) for at in range(12)])
    assert torch.allclose(model(batch), alone, atol=1e-5)


@every_model
def test_a_model_names_an_id_outside_its_table(name: str) -> None:
    model = model_of(name)
    batch = random_batch(FIELDS, 4)
    batch["tags"][3, 1] = 40
    with pytest.raises(InvalidArgument, match="field 'tags' has the id 40, but its table has 40 ids, from 0 to 39"):
        model.check_ids(batch)


@every_model
@pytest.mark.parametrize("sparse_gradients", [False, True])
def test_an_id_outside_all_tables_is_an_index_error(name: str, sparse_gradients: bool) -> None:
    batch = random_batch(FIELDS, 4)
    batch["sparse"][1] = 10_000
    with pytest.raises(IndexError):
        model_of(name, sparse_gradients=sparse_gradients)(batch)


@pytest.mark.parametrize("name", ["FM", "FNN", "PNN inner", "DeepFM", "DLRM"])
def test_models_that_multiply_vectors_need_one_dimension(name: str) -> None:
    fields = [sparse("a", 9, embedding_dim=4), sparse("b", 9, embedding_dim=6), dense("x")]
    with pytest.raises(InvalidArgument, match=r"the fields have \[4, 6\]; pass embedding_dim=16"):
        model_of(name, fields, embedding_dim=None)
    assert model_of(name, fields[1:], embedding_dim=None)(random_batch(fields[1:], 3)).shape == (3,)


@pytest.mark.parametrize("name", ["WideDeep", "DCNv2 parallel", "TwoTower"])
def test_models_that_concatenate_vectors_may_use_the_dimension_of_each_field(name: str) -> None:
    fields = [sparse("a", 9, embedding_dim=4), sparse("b", 9, embedding_dim=6), dense("x")]
    model = model_of(name, fields, embedding_dim=None)
    shapes = {tuple(each.shape) for key, each in model.named_parameters() if key.endswith("table.weight")}
    assert {(9, 4), (9, 6)} <= shapes
    assert model(random_batch(fields, 3)).shape == (3,)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FM(FIELDS, embedding_dim=0), "embedding_dim"),
        (lambda: DCNv2(FIELDS, embedding_dim=-1), "embedding_dim"),
        (lambda: DeepFM(FIELDS, hidden=()), "hidden"),
        (lambda: PNN(FIELDS, product="cross"), "product"),
        (lambda: PNN([sparse("a", 3)]), "fields"),
        (lambda: DCNv2(FIELDS, structure="serial"), "structure"),
        (lambda: WideDeep(FIELDS, wide=[]), "wide"),
        (lambda: WideDeep(FIELDS, deep=["nothing"]), "fields"),
        (lambda: WideDeep(FIELDS, crosses=[("s0", "x")]), "crosses"),
        (lambda: WideDeep(FIELDS, crosses=[("s0", "s1")], cross_buckets=0), "cross_buckets"),
        (lambda: TwoTower(FIELDS, user=["s0"], item=[]), "item"),
        (lambda: TwoTower(FIELDS, user="s0", item=["s1"]), "user"),
        (lambda: TwoTower(FIELDS, user=["s0"], item=["s1"], temperature=0.0), "temperature"),
        (lambda: TwoTower(FIELDS, user=["s0"], item=["s1"], output_dim=0), "output_dim"),
    ],
)
def test_an_invalid_argument_is_refused_by_name(make: Callable[[], Recommender], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        make()
    assert error.value.field == field


# -- export and state --------------------------------------------------------------------------------------------------


@every_model
def test_a_model_can_be_exported_for_any_number_of_rows(name: str) -> None:
    model = model_of(name).eval()
    example = random_batch(FIELDS, 5)
    rows = torch.export.Dim("rows")
    exported = torch.export.export(model, (example,), dynamic_shapes=({key: {0: rows} for key in example},))
    batch = random_batch(FIELDS, 33, seed=3)
    assert torch.allclose(exported.module()(batch), model(batch), atol=1e-5)


@every_model
def test_a_model_is_restored_from_its_state(name: str) -> None:
    model = model_of(name)
    torch.manual_seed(9)
    make, arguments = MODELS[name]
    other = make(FIELDS, **arguments)
    state = model.state_dict()
    assert sum(value.numel() for value in state.values()) == COUNTS[name], "only weights are saved"
    other.load_state_dict(state)
    batch = random_batch(FIELDS, 20)
    assert torch.equal(other(batch), model(batch))


@every_model
def test_a_model_can_be_pickled(name: str) -> None:
    model = model_of(name)
    batch = random_batch(FIELDS, 20)
    assert torch.equal(pickle.loads(pickle.dumps(model))(batch), model(batch))


# -- retrieval ---------------------------------------------------------------------------------------------------------


def test_the_score_matrix_holds_the_logits_of_rows_on_its_diagonal() -> None:
    model = two_tower(FIELDS, hidden=HIDDEN, temperature=0.2)
    batch = random_batch(FIELDS, 6)
    users, items = model.embed_users(batch), model.embed_items(batch)
    assert torch.allclose(users.norm(dim=1), torch.ones(6))
    assert torch.allclose(model.score(users, items).diagonal(), model(batch), atol=1e-5)
    assert model.score(users[:2], items).shape == (2, 6)


def test_without_normalization_vectors_keep_their_length() -> None:
    users = two_tower(FIELDS, hidden=HIDDEN, normalize=False).embed_users(random_batch(FIELDS, 6))
    assert not torch.allclose(users.norm(dim=1), torch.ones(6))


def test_items_are_embedded_from_their_own_columns() -> None:
    model = TwoTower(FIELDS, user=["s0", "x"], item=["s3", "s5", "tags", "y"], hidden=HIDDEN)
    batch = random_batch(FIELDS, 6)
    own = {"sparse": batch["sparse"][:, [3, 5]], "dense": batch["dense"][:, 3:], "tags": batch["tags"]}
    assert torch.equal(model.embed_items(own), model.embed_items(batch))


def naive_in_batch_softmax(
    users: Tensor, items: Tensor, temperature: float, log_q: Tensor, ids: list[int]
) -> list[float]:
    losses = []
    for i in range(len(users)):
        scores = [
            (users[i] @ items[j]) / temperature - log_q[j] for j in range(len(items)) if i == j or ids[i] != ids[j]
        ]
        own = (users[i] @ items[i]) / temperature - log_q[i]
        losses.append(float(torch.logsumexp(torch.stack(scores), dim=0) - own))
    return losses


def test_the_in_batch_softmax_corrects_by_log_q_and_skips_repeated_items() -> None:
    rng = torch.Generator().manual_seed(3)
    users, items = torch.randn(2, 7, 4, generator=rng, dtype=torch.float64)
    log_q = torch.rand(7, generator=rng, dtype=torch.float64).log()
    ids = [3, 5, 3, 8, 5, 3, 1]
    found = in_batch_softmax(users, items, temperature=0.3, log_q=log_q, item_ids=torch.tensor(ids))
    assert found.tolist() == pytest.approx(naive_in_batch_softmax(users, items, 0.3, log_q, ids))
    plain = in_batch_softmax(users, items)
    assert plain.tolist() == pytest.approx(
        torch.nn.functional.cross_entropy(users @ items.T, torch.arange(7), reduction="none").tolist()
    )
    assert in_batch_softmax(users[:0], items[:0], item_ids=torch.tensor([])).shape == (0,)


def test_counts_of_items_enable_the_log_q_correction() -> None:
    fields = [sparse("user", 6), sparse("item", 5)]
    model = TwoTower(fields, user=["user"], item=["item"], hidden=(8,), output_dim=4)
    batch = {"sparse": torch.tensor([[1, 2], [2, 3], [3, 4]])}
    counts = torch.tensor([0, 0, 90, 9, 1])
    plain, corrected = InBatchSoftmax(model, item="item"), InBatchSoftmax(model, item="item", counts=counts)
    log_q = (torch.tensor([90.0, 9.0, 1.0]) / 100.0).log()
    users, items = model.embed_users(batch), model.embed_items(batch)
    assert torch.allclose(plain(batch), in_batch_softmax(users, items, temperature=0.05))
    assert torch.allclose(corrected(batch), in_batch_softmax(users, items, temperature=0.05, log_q=log_q))
    assert set(plain.state_dict()) == set(corrected.state_dict())


def test_two_towers_learn_which_item_belongs_to_which_user() -> None:
    torch.manual_seed(0)
    fields = [sparse("user", 40), sparse("item", 40)]
    model = TwoTower(fields, user=["user"], item=["item"], hidden=(32,), output_dim=16)
    task = InBatchSoftmax(model, item="item", counts=torch.ones(40))
    every = torch.stack([torch.arange(40), torch.arange(40).flip(0)], dim=1)
    optimizer = torch.optim.Adam(task.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        task({"sparse": every}).mean().backward()
        optimizer.step()
    best = model.score(model.embed_users({"sparse": every}), model.embed_items({"sparse": every})).argmax(dim=1)
    assert best.tolist() == list(range(40))


@pytest.mark.parametrize(
    ("arguments", "field"), [({"item": "x"}, "item"), ({"item": "s1", "counts": torch.ones(3)}, "counts")]
)
def test_an_impossible_in_batch_softmax_is_refused(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        InBatchSoftmax(two_tower(FIELDS), **arguments)  # type: ignore[arg-type]
    assert error.value.field == field
