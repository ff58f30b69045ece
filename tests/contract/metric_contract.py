"""The contract of every metric. An implementation supplies a fixture `case`."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import InvalidArgument
from strata.trainer.metrics import Metric

NUM_ROWS = 60

Draw = Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]

cuts = st.lists(st.integers(0, NUM_ROWS), max_size=8).map(sorted)
"""Where rows are cut into batches or ranks; equal cuts give empty ones."""
seeds = st.integers(0, 2**32)
together = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[], Metric]
    draw: Draw
    """Returns predictions and targets for a number of rows."""
    has_weights: bool = True
    tolerance: float = 1e-12
    """Relative; 0 for a metric that must be exact."""


def same(found: float, expected: float, tolerance: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)


def parts(tensor: torch.Tensor, at: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.tensor_split(tensor, list(at)))


class MetricContract:
    def rows(self, case: Case, seed: int, *, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        generator = torch.Generator().manual_seed(seed)
        predictions, targets = case.draw(generator, NUM_ROWS)
        # Quarters, so that rows may weigh nothing and equal weights occur.
        weights = torch.randint(0, 8, (NUM_ROWS,), generator=generator) / 4 if weighted and case.has_weights else None
        return predictions, targets, weights

    def whole(self, case: Case, seed: int, *, weighted: bool) -> float:
        metric = case.make()
        metric.update(*self.rows(case, seed, weighted=weighted))
        return metric.compute()

    def test_it_has_a_name_and_a_direction(self, case: Case) -> None:
        metric = case.make()

        assert isinstance(metric, Metric)
        assert metric.name
        assert metric.better in ("lower", "higher")

    @given(seed=seeds, at=cuts, weighted=st.booleans())
    @together
    def test_the_value_does_not_depend_on_the_batches(
        self, case: Case, seed: int, at: list[int], weighted: bool
    ) -> None:
        predictions, targets, weights = self.rows(case, seed, weighted=weighted)
        metric = case.make()
        for number, (some, true) in enumerate(zip(parts(predictions, at), parts(targets, at), strict=True)):
            metric.update(some, true, None if weights is None else parts(weights, at)[number])

        assert same(metric.compute(), self.whole(case, seed, weighted=weighted), case.tolerance)

    @given(seed=seeds, at=cuts, weighted=st.booleans())
    @together
    def test_the_merged_value_is_that_of_one_process(
        self, case: Case, seed: int, at: list[int], weighted: bool
    ) -> None:
        predictions, targets, weights = self.rows(case, seed, weighted=weighted)
        ranks = []
        for number, (some, true) in enumerate(zip(parts(predictions, at), parts(targets, at), strict=True)):
            metric = case.make()
            metric.update(some, true, None if weights is None else parts(weights, at)[number])
            ranks.append(metric.state())
        merged = case.make()
        merged.merge(ranks)

        assert same(merged.compute(), self.whole(case, seed, weighted=weighted), case.tolerance)

    @given(seed=seeds, at=st.integers(0, NUM_ROWS))
    @together
    def test_a_restored_state_continues_where_it_was_saved(self, case: Case, seed: int, at: int) -> None:
        predictions, targets, _ = self.rows(case, seed, weighted=False)
        saved = case.make()
        saved.update(predictions[:at], targets[:at])
        restored = case.make()
        restored.merge([saved.state()])
        restored.update(predictions[at:], targets[at:])
        saved.update(predictions[at:], targets[at:])

        assert same(restored.compute(), saved.compute(), 0.0)

    @given(seed=seeds)
    @together
    def test_a_merge_replaces_what_was_there(self, case: Case, seed: int) -> None:
        source, other = case.make(), case.make()
        source.update(*self.rows(case, seed, weighted=False))
        other.update(*self.rows(case, seed + 1, weighted=False))
        other.merge([source.state()])

        assert same(other.compute(), source.compute(), 0.0)

    def test_a_state_is_detached_on_the_cpu_and_has_the_same_keys_on_an_empty_rank(self, case: Case) -> None:
        metric = case.make()
        predictions, targets, _ = self.rows(case, 1, weighted=False)
        metric.update(predictions.clone().requires_grad_(), targets)

        state = metric.state()

        assert state.keys() == case.make().state().keys()
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
        assert not any(tensor.requires_grad or tensor.is_cuda for tensor in state.values())

    def test_a_saved_state_does_not_change_with_further_rows(self, case: Case) -> None:
        metric = case.make()
        predictions, targets, _ = self.rows(case, 1, weighted=False)
        metric.update(predictions[:30], targets[:30])
        state = metric.state()
        before = copy.deepcopy(state)
        metric.update(predictions[30:], targets[30:])

        assert all(torch.equal(state[key], before[key]) for key in state)

    def test_it_keeps_no_reference_to_the_batch(self, case: Case) -> None:
        predictions, targets, _ = self.rows(case, 1, weighted=False)
        metric = case.make()
        metric.update(predictions, targets)
        predictions.zero_()
        targets.zero_()

        assert same(metric.compute(), self.whole(case, 1, weighted=False), 0.0)

    def test_computing_changes_nothing(self, case: Case) -> None:
        metric = case.make()
        metric.update(*self.rows(case, 1, weighted=False))

        assert same(metric.compute(), metric.compute(), 0.0)

    def test_without_rows_the_value_is_nan(self, case: Case) -> None:
        predictions, targets, _ = self.rows(case, 1, weighted=False)
        fresh, empty, reset, merged = case.make(), case.make(), case.make(), case.make()
        empty.update(predictions[:0], targets[:0])
        reset.update(predictions, targets)
        reset.reset()
        merged.merge([fresh.state(), empty.state()])

        assert all(math.isnan(metric.compute()) for metric in (fresh, empty, reset, merged))

    def test_a_reset_metric_starts_anew(self, case: Case) -> None:
        metric = case.make()
        metric.update(*self.rows(case, 1, weighted=False))
        metric.reset()
        metric.update(*self.rows(case, 2, weighted=False))

        assert same(metric.compute(), self.whole(case, 2, weighted=False), 0.0)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_nan_prediction_on_any_rank_makes_the_value_nan(self, case: Case, rank: int) -> None:
        states = []
        for number in range(2):
            metric = case.make()
            predictions, targets, _ = self.rows(case, number, weighted=False)
            if number == rank:
                predictions[7] = math.nan
            metric.update(predictions, targets)
            states.append(metric.state())
        merged = case.make()
        merged.merge(states)

        assert math.isnan(merged.compute())
        merged.reset()
        merged.update(*self.rows(case, 3, weighted=False))
        assert not math.isnan(merged.compute())

    def test_other_numbers_of_rows_are_refused(self, case: Case) -> None:
        predictions, targets, _ = self.rows(case, 1, weighted=False)

        with pytest.raises(InvalidArgument, match="shape"):
            case.make().update(predictions, targets[:-1])

    def test_weights_are_one_per_row_or_refused(self, case: Case) -> None:
        predictions, targets, _ = self.rows(case, 1, weighted=False)

        with pytest.raises(InvalidArgument, match="weights"):
            case.make().update(predictions, targets, torch.ones(NUM_ROWS - 1))

    def test_it_is_pickled_with_its_rows(self, case: Case) -> None:
        metric = case.make()
        metric.update(*self.rows(case, 1, weighted=False))

        assert same(pickle.loads(pickle.dumps(metric)).compute(), metric.compute(), 0.0)
