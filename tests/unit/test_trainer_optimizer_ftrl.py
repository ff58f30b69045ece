"""FTRL against the paper's algorithm, coordinate by coordinate."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from strata.errors import InvalidArgument
from strata.trainer.optimizer import FTRL

gradients = st.integers(-40, 40).map(lambda number: number / 8)
settings_of_ftrl = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.01, 0.1, 1.0]),
        "beta": st.sampled_from([0.5, 1.0]),
        "l1": st.sampled_from([0.0, 0.5, 2.0]),
        "l2": st.sampled_from([0.0, 0.1, 3.0]),
    }
)


class Paper:
    """Algorithm 1 of the paper for one coordinate; a start other than zero is a z that gives it."""

    def __init__(self, start: float, *, lr: float, beta: float, l1: float, l2: float) -> None:
        self.lr, self.beta, self.l1, self.l2 = lr, beta, l1, l2
        self.n = 0.0
        self.z = -start * (beta / lr + l2) - math.copysign(l1, start) if start else 0.0

    @property
    def weight(self) -> float:
        if abs(self.z) <= self.l1:
            return 0.0
        strength = (self.beta + math.sqrt(self.n)) / self.lr + self.l2
        return -(self.z - math.copysign(self.l1, self.z)) / strength

    def step(self, gradient: float) -> None:
        sigma = (math.sqrt(self.n + gradient**2) - math.sqrt(self.n)) / self.lr
        self.z += gradient - sigma * self.weight
        self.n += gradient**2


def parameter(values: list[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def stepped(weights: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: list[float] | torch.Tensor) -> None:
    weights.grad = torch.as_tensor(gradient, dtype=weights.dtype)
    optimizer.step()


@given(
    start=st.sampled_from([0.0, 0.25, -1.5]),
    steps=st.lists(gradients, min_size=1, max_size=12),
    chosen=settings_of_ftrl,
)
def test_every_step_is_that_of_the_paper(start: float, steps: list[float], chosen: dict[str, float]) -> None:
    expected = Paper(start, **chosen)
    weights = parameter([start])
    optimizer = FTRL([weights], **chosen)
    for gradient in steps:
        expected.step(gradient)
        stepped(weights, optimizer, [gradient])

        assert weights.item() == pytest.approx(expected.weight, rel=1e-9, abs=1e-12)


@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 5), st.tuples(gradients, gradients), max_size=4), min_size=1, max_size=6
    ),
    chosen=settings_of_ftrl,
)
def test_sparse_gradients_give_the_weights_of_dense_ones(
    steps: list[dict[int, tuple[float, float]]], chosen: dict[str, float]
) -> None:
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
    dense, sparse = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = FTRL([dense], **chosen), FTRL([sparse], **chosen)
    for rows in steps:
        indices = torch.tensor(list(rows), dtype=torch.int64)
        values = torch.tensor(list(rows.values()), dtype=torch.float64).reshape(-1, 2)
        sparse.grad = torch.sparse_coo_tensor(indices[None], values, (6, 2), check_invariants=True)
        dense.grad = sparse.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()

        torch.testing.assert_close(sparse.data, dense.data, rtol=1e-10, atol=1e-12)
        untouched = [row for row in range(6) if all(row not in earlier for earlier in steps)]
        assert torch.equal(sparse.data[untouched], start[untouched])


def test_a_row_that_occurs_twice_in_a_sparse_gradient_is_updated_once() -> None:
    twice, once = parameter([1.0, 2.0]), parameter([1.0, 2.0])
    twice.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([0.5, 0.25]).double(), (2,), check_invariants=True
    )
    FTRL([twice]).step()
    stepped(once, FTRL([once]), [0.0, 0.75])

    torch.testing.assert_close(twice.data, once.data)


def test_an_embedding_with_sparse_gradients_is_trained() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 1, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = FTRL(table.parameters(), lr=0.5, l1=0.5)
    ids = torch.tensor([0, 1, 1, 2])
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.mse_loss(table(ids).squeeze(1), torch.tensor([2.0, -3.0, -3.0, 0.01])).backward()
        optimizer.step()
    weights = table.weight.detach().squeeze(1)

    assert weights[0] > 0.5
    assert weights[1] < -1
    assert not weights[2:].any()  # Too weak for the penalty, or never seen.


@pytest.mark.parametrize("start", [0.0, 0.8])
def test_l1_sets_weights_to_exactly_zero(start: float) -> None:
    weights = parameter([start] * 2)
    optimizer = FTRL([weights], lr=0.1, l1=3.0)
    for step in range(60):
        stepped(weights, optimizer, [0.3 * (-1) ** step + 1.5 * (weights[0].item() > 0), -1.0])

    assert weights[0].item() == 0
    assert weights[1].item() > start


def test_a_coordinate_without_a_gradient_stays() -> None:
    weights = parameter([0.3, -0.7, 0.0])
    optimizer = FTRL([weights], lr=0.1, l1=0.5, l2=0.5)
    for _ in range(20):
        stepped(weights, optimizer, [0.0, 0.0, 0.0])

    torch.testing.assert_close(weights.data, parameter([0.3, -0.7, 0.0]).data, rtol=1e-12, atol=0)


def test_a_change_of_the_learning_rate_moves_no_weight_by_itself() -> None:
    weights = parameter([0.5])
    optimizer = FTRL([weights], lr=0.1, l1=0.1, l2=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    for _ in range(3):
        stepped(weights, optimizer, [0.4])
    before = weights.item()
    scheduler.step()
    stepped(weights, optimizer, [1e-12])

    assert weights.item() == pytest.approx(before, rel=1e-9)


def test_weights_that_something_else_has_changed_are_the_new_start() -> None:
    weights = parameter([0.5])
    optimizer = FTRL([weights], lr=0.1, l1=0.1)
    stepped(weights, optimizer, [0.4])
    with torch.no_grad():
        weights.fill_(2.0)  # An average over ranks, for example.
    stepped(weights, optimizer, [0.1])

    assert weights.item() == pytest.approx(2.0, abs=0.02)


def test_a_learning_rate_of_zero_leaves_the_weights() -> None:
    weights = parameter([0.5, 0.0])
    optimizer = FTRL([weights], lr=0.0, l1=0.1)
    stepped(weights, optimizer, [1.0, 1.0])

    assert weights.tolist() == [0.5, 0.0]


@settings(max_examples=20)
@given(steps=st.lists(st.tuples(gradients, gradients), min_size=2, max_size=8), data=st.data())
def test_a_restored_optimizer_continues_with_the_same_bits(
    steps: list[tuple[float, float]], data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(steps) - 1))
    weights = nn.Parameter(torch.tensor([0.3, 0.0]))
    optimizer = FTRL([weights], lr=0.3, l1=0.2, l2=0.1)
    for gradient in steps[:at]:
        stepped(weights, optimizer, list(gradient))
    restored = nn.Parameter(weights.detach().clone())
    continued = FTRL([restored], lr=9.0)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for gradient in steps[at:]:
        stepped(weights, optimizer, list(gradient))
        stepped(restored, continued, list(gradient))

    assert torch.equal(weights, restored)


def test_groups_have_their_own_settings_and_parameters_without_gradients_are_skipped() -> None:
    first, second, third = parameter([1.0]), parameter([1.0]), parameter([1.0])
    optimizer = FTRL([{"params": [first, third]}, {"params": [second], "lr": 0.5}], lr=0.1)
    first.grad = second.grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()

    assert 1 - second.item() == pytest.approx(5 * (1 - first.item()))
    assert third.item() == 1


def test_a_closure_is_evaluated_with_gradients() -> None:
    weights = parameter([1.0])
    optimizer = FTRL([weights])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weights.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1
    assert weights.item() < 1


def test_veloces_names_are_the_same_parameters() -> None:
    ours = FTRL([parameter([1.0])], lr=0.925, l2=1e-3)
    theirs = FTRL([parameter([1.0])], alpha=0.925, weight_decay=1e-3)

    assert ours.defaults == theirs.defaults


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"lr": -1}, "lr=-1"),
        ({"lr": math.nan}, "lr=nan"),
        ({"beta": 0}, "beta=0 is outside its range; use more than 0"),
        ({"l1": -0.5}, "l1=-0.5 is outside its range; use 0 or more"),
        ({"weight_decay": math.inf}, "l2=inf"),
        ({"lr": 1, "alpha": 2}, "lr=1 and alpha=2 are the same parameter"),
        ({"l2": 1, "weight_decay": 1}, "are the same parameter"),
    ],
)
def test_values_outside_their_range_are_refused(chosen: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        FTRL([parameter([1.0])], **chosen)


def test_complex_weights_and_wholly_sparse_gradients_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="complex"):
        FTRL([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    weights = nn.Parameter(torch.zeros(2, 2))
    weights.grad = torch.eye(2).to_sparse()
    with pytest.raises(InvalidArgument, match="2 sparse dimensions"):
        FTRL([weights]).step()
