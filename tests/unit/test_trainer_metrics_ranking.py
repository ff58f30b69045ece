"""AUC and average precision: exact against pairwise references, and bounded beyond a number of rows."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from strata.errors import InvalidArgument
from strata.trainer.metrics import AUC, AveragePrecision, scores

floats = st.floats(width=32, allow_nan=False)
few_floats = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1e-45, 0.25, 0.5, math.inf, -math.inf])
weights_of_rows = st.sampled_from([0.0, 0.25, 1.0, 3.5])
rows = st.lists(st.tuples(floats | few_floats, st.integers(0, 1), weights_of_rows), min_size=1, max_size=40)
Row = tuple[float, int, float]


def pairwise_auc(drawn: list[Row]) -> float:
    """Compare each positive row with each negative one, in exact arithmetic."""
    won = total = Fraction(0)
    for (score, label, weight), (other, other_label, other_weight) in itertools.product(drawn, drawn):
        if label == 1 and other_label == 0:
            pair = Fraction(weight) * Fraction(other_weight)
            total += pair
            won += pair if score > other else pair / 2 if score == other else 0
    return float(won / total) if total else math.nan


def direct_average_precision(drawn: list[Row]) -> float:
    """For each positive row, take the precision among the rows that score at least as high."""
    found = total = Fraction(0)
    for score, label, weight in drawn:
        if label == 1 and weight > 0:
            above = [(y, Fraction(w)) for other, y, w in drawn if other >= score]
            found += Fraction(weight) * sum(w for y, w in above if y == 1) / sum(w for _, w in above)
            total += Fraction(weight)
    return float(found / total) if total else math.nan


def columns(drawn: list[Row], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    predictions, targets, weights = zip(*drawn, strict=True)
    return torch.tensor(predictions, dtype=dtype), torch.tensor(targets), torch.tensor(weights)


def sampled(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.randn(num_rows, generator=generator)
    return predictions, (torch.rand(num_rows, generator=generator) < predictions.sigmoid()).long()


@given(drawn=rows)
def test_an_unweighted_auc_is_the_correctly_rounded_share_of_pairs(drawn: list[Row]) -> None:
    metric = AUC()
    predictions, targets, _ = columns(drawn)
    metric.update(predictions, targets)

    expected = pairwise_auc([(score, label, 1.0) for score, label, _ in drawn])
    assert metric.compute() == expected or math.isnan(expected)
    assert math.isnan(metric.compute()) == math.isnan(expected)


@given(drawn=rows, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_weighted_auc_is_the_share_of_the_weight_of_pairs(drawn: list[Row], dtype: torch.dtype) -> None:
    metric = AUC()
    metric.update(*columns(drawn, dtype))

    assert metric.compute() == pytest.approx(pairwise_auc(drawn), rel=1e-13, abs=1e-13, nan_ok=True)


@given(drawn=rows, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_average_precision_is_the_mean_precision_at_positive_rows(drawn: list[Row], dtype: torch.dtype) -> None:
    metric = AveragePrecision()
    metric.update(*columns(drawn, dtype))

    assert metric.compute() == pytest.approx(direct_average_precision(drawn), rel=1e-13, nan_ok=True)


@settings(max_examples=30)
@given(drawn=rows)
def test_the_error_of_a_histogram_is_within_its_bound(drawn: list[Row]) -> None:
    for metric, exact in (
        (AUC(max_rows=1), pairwise_auc(drawn)),
        (AveragePrecision(max_rows=1), direct_average_precision(drawn)),
    ):
        predictions, targets, weights = columns([*drawn, (0.0, 0, 0.0), (0.0, 1, 0.0)])
        metric.update(predictions, targets, weights)
        value = metric.compute()

        assert math.isnan(value) == math.isnan(exact)
        assert math.isnan(value) or abs(value - exact) <= metric.error_bound + 1e-12


def test_the_bound_of_a_histogram_holds_where_bins_mix_scores_and_is_small_for_usual_scores() -> None:
    predictions, targets = sampled(20_000)
    for kind, made in ((AUC, predictions), (AUC, predictions.sigmoid()), (AveragePrecision, predictions)):
        exact, binned = kind(), kind(max_rows=1_000)
        exact.update(made, targets)
        binned.update(made, targets)
        error = abs(binned.compute() - exact.compute())

        assert exact.error_bound == 0
        assert 0 < binned.error_bound < 5e-4
        assert error <= binned.error_bound


def test_scores_that_share_a_bin_are_ties_and_the_bound_says_so() -> None:
    metric = AUC(max_rows=1)
    metric.update(torch.tensor([1.0, 1.00001]), torch.tensor([0, 1]))

    assert metric.compute() == 0.5
    assert metric.error_bound == 0.5


@given(left=floats, right=floats)
def test_a_larger_score_never_has_a_smaller_bin(left: float, right: float) -> None:
    low, high = scores.bins_of(np.array(sorted((left, right)), dtype=np.float32))

    assert 0 <= low <= high < scores.NUM_BINS
    assert left != right or low == high


def test_bins_follow_the_order_of_all_exponents() -> None:
    patterns = [struct.unpack("f", struct.pack("I", number << 16))[0] for number in range(1 << 16)]
    ordered = np.sort(np.array([value for value in patterns if not math.isnan(value)], dtype=np.float32))

    assert (np.diff(scores.bins_of(ordered)) >= 0).all()


@pytest.mark.parametrize("num_rows", [1, 7, 1_000])
def test_slices_of_any_length_give_the_same_value(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    predictions, targets = sampled(3_000)
    predictions = (predictions * 20).round() / 20  # Ties across the ends of slices.
    weights = torch.rand(3_000, generator=torch.Generator().manual_seed(1))
    expected = []
    for sliced in (False, True):
        if sliced:
            monkeypatch.setattr(scores, "SLICE_ROWS", num_rows)
        plain, weighted, precision = AUC(), AUC(), AveragePrecision()
        plain.update(predictions, targets)
        weighted.update(predictions, targets, weights)
        precision.update(predictions, targets)
        expected.append((plain.compute(), weighted.compute(), precision.compute()))

    assert expected[0][0] == expected[1][0]
    assert expected[0] == pytest.approx(expected[1], rel=1e-12)


def test_both_agree_with_torchmetrics() -> None:
    predictions, targets = sampled(5_000)
    auc, precision = AUC(), AveragePrecision()
    for metric in (auc, precision):
        metric.update(predictions.double(), targets)

    chances = predictions.double().sigmoid()
    assert auc.compute() == pytest.approx(binary_auroc(chances, targets).item(), abs=1e-6)
    assert precision.compute() == pytest.approx(binary_average_precision(chances, targets).item(), abs=1e-6)


def test_logits_and_probabilities_have_the_same_auc() -> None:
    predictions, targets = sampled(2_000)
    predictions = predictions.double()
    values = []
    for made in (predictions, predictions.sigmoid(), torch.stack((-predictions, predictions), dim=1)):
        metric = AUC()
        metric.update(made, targets)
        values.append(metric.compute())
    probabilities = AUC(from_logits=False)
    probabilities.update(torch.stack((1 - predictions.sigmoid(), predictions.sigmoid()), dim=1), targets)

    assert [*values, probabilities.compute()] == [values[0]] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_other_types_of_scores_are_compared_by_value(dtype: torch.dtype) -> None:
    predictions, targets = sampled(500)
    made = (predictions > 0.3).to(dtype) if dtype in (torch.int64, torch.bool) else predictions.to(dtype)
    metric, expected = AUC(), AUC()
    metric.update(made, targets)
    expected.update(made.double(), targets)

    assert metric.compute() == expected.compute()


@pytest.mark.parametrize("label", [0, 1])
def test_an_auc_of_one_class_is_nan(label: int) -> None:
    for metric in (AUC(), AUC(max_rows=1)):
        metric.update(torch.tensor([0.1, 0.7, 0.7]), torch.full((3,), label))

        assert math.isnan(metric.compute())


def test_average_precision_without_positive_rows_is_nan() -> None:
    metric = AveragePrecision()
    metric.update(torch.tensor([0.1, 0.7]), torch.zeros(2))

    assert math.isnan(metric.compute())


def test_rows_of_all_ranks_count_towards_the_limit() -> None:
    predictions, targets = sampled(100)
    ranks = [AUC(max_rows=99), AUC(max_rows=99)]
    for metric, some, true in zip(ranks, predictions.split(50), targets.split(50), strict=True):
        metric.update(some, true)
    kept = [metric.state() for metric in ranks]
    for metric in ranks:
        metric.prepare(100)
    binned = [metric.state() for metric in ranks]

    whole = AUC(max_rows=99)
    whole.update(predictions, targets)
    for states in (kept, binned, [kept[0], binned[1]]):
        merged = AUC(max_rows=99)
        merged.merge(states)
        assert merged.compute() == whole.compute()
        assert merged.num_rows == 100
        assert merged.error_bound == whole.error_bound
    assert all(len(state["scores"]) == 50 and not len(state["bins"]) for state in kept)
    assert all(not len(state["scores"]) and len(state["bins"]) for state in binned)


def test_a_row_is_stored_in_5_bytes() -> None:
    predictions, targets = sampled(1_000)
    metric = AUC()
    metric.update(predictions, targets)

    assert sum(tensor.nbytes for key, tensor in metric.state().items() if key != "num_rows") == 5 * 1_000


def test_weights_that_begin_later_leave_earlier_rows_at_1() -> None:
    predictions, targets = sampled(100)
    weights = torch.cat((torch.ones(60), torch.full((40,), 2.5)))
    expected, metric = AUC(), AUC()
    expected.update(predictions, targets, weights)
    metric.update(predictions[:60], targets[:60])
    metric.update(predictions[60:], targets[60:], weights[60:])

    assert metric.compute() == expected.compute()


@pytest.mark.parametrize("target", [2, -1, 0.5, math.nan])
def test_a_target_other_than_0_and_1_is_refused_with_its_value(target: float) -> None:
    with pytest.raises(InvalidArgument, match=f"got the target {target}; targets must be 0 or 1"):
        AUC().update(torch.zeros(3), torch.tensor([0, 1, target]))


def test_scores_of_many_classes_are_refused_with_the_metrics_to_use() -> None:
    with pytest.raises(InvalidArgument, match=r"\[4, 3\].*\[4\].*'cross_entropy'"):
        AUC().update(torch.zeros(4, 3), torch.zeros(4))


@pytest.mark.parametrize("max_rows", [0, -1, 1.5, True, 2**31 + 1])
def test_a_limit_that_cannot_be_is_refused(max_rows: object) -> None:
    with pytest.raises(InvalidArgument, match="max_rows"):
        AUC(max_rows=max_rows)


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_constant_scores_have_an_auc_of_one_half(seed: int) -> None:
    _, targets = sampled(1_000, seed)
    metric = AUC()
    metric.update(torch.full((1_000,), 0.3), targets)

    assert metric.compute() == 0.5
