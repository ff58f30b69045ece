"""Each metric against an independent reference, and the errors of wrong input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics.functional import classification as peers
from torchmetrics.functional import regression as regression_peers

from strata.errors import InvalidArgument, LimitExceeded
from strata.trainer import metrics
from strata.trainer.metrics import (
    AUC,
    F1,
    Accuracy,
    Calibration,
    CrossEntropy,
    FunctionMetric,
    LogLoss,
    MetricSet,
    Precision,
    Recall,
    RecallAtK,
    TopKAccuracy,
    TorchMetric,
    create,
)
from strata.trainer.metrics.base import Metric

NUM_CLASSES = 4

rows = st.lists(
    st.tuples(st.integers(-20, 20).map(lambda number: number / 8), st.integers(0, 1), st.sampled_from([0.5, 1.0, 3.0])),
    min_size=1,
    max_size=30,
)
class_rows = st.lists(
    st.tuples(
        st.lists(st.integers(-4, 4).map(float), min_size=NUM_CLASSES, max_size=NUM_CLASSES),
        st.integers(0, NUM_CLASSES - 1),
        st.sampled_from([0.5, 1.0, 3.0]),
    ),
    min_size=1,
    max_size=30,
)


def value_of(metric: Metric, drawn: Sequence[tuple[object, int | float, float]]) -> float:
    predictions, targets, weights = zip(*drawn, strict=True)
    metric.update(torch.tensor(predictions), torch.tensor(targets), torch.tensor(weights))
    return metric.compute()


def mean(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of values with weights."""
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@given(drawn=rows)
def test_binary_losses_are_those_of_their_formulas(drawn: list[tuple[float, int, float]]) -> None:
    chances = [(sigmoid(logit), target, weight) for logit, target, weight in drawn]
    loss = mean([(-math.log(p if y else 1 - p), w) for p, y, w in chances])
    observed = mean([(y, w) for _, y, w in chances])

    assert value_of(LogLoss(from_logits=True), drawn) == pytest.approx(loss, rel=1e-9)
    assert value_of(LogLoss(), chances) == pytest.approx(loss, rel=1e-5)
    if observed:
        expected = mean([(p, w) for p, _, w in chances]) / observed
        assert value_of(Calibration(from_logits=True), drawn) == pytest.approx(expected, rel=1e-9)


@given(drawn=rows, threshold=st.sampled_from([0.5, 0.2, 0.9]))
def test_binary_decisions_are_counted(drawn: list[tuple[float, int, float]], threshold: float) -> None:
    counts = {(predicted, actual): 0.0 for predicted in (False, True) for actual in (0, 1)}
    for logit, target, weight in drawn:
        counts[sigmoid(logit) > threshold, target] += weight
    true, false, missed = counts[True, 1], counts[True, 0], counts[False, 1]

    def found(kind: Callable[..., Metric]) -> float:
        return value_of(kind(from_logits=True, threshold=threshold), drawn)

    assert found(Accuracy) == pytest.approx((true + counts[False, 0]) / sum(counts.values()))
    assert found(Precision) == pytest.approx(true / (true + false) if true + false else 0.0)
    assert found(Recall) == pytest.approx(true / (true + missed) if true + missed else 0.0)
    assert found(F1) == pytest.approx(2 * true / (2 * true + false + missed) if true + false + missed else 0.0)


@given(drawn=class_rows)
def test_class_metrics_are_those_of_their_formulas(drawn: list[tuple[list[float], int, float]]) -> None:
    right, losses, top_two = [], [], []
    tallies = [[0.0, 0.0, 0.0] for _ in range(NUM_CLASSES)]
    for scores, target, weight in drawn:
        order = sorted(range(NUM_CLASSES), key=lambda each: (-scores[each], each))
        right.append((float(order[0] == target), weight))
        top_two.append((float(target in order[:2]), weight))
        losses.append((math.log(sum(map(math.exp, scores))) - scores[target], weight))
        tallies[order[0]][0 if order[0] == target else 1] += weight
        tallies[target][2] += weight if order[0] != target else 0.0
    seen = [tally for tally in tallies if sum(tally)]

    def macro(quotient: Callable[[float, float, float], tuple[float, float]]) -> float:
        parts = [quotient(*tally) for tally in seen]
        return sum(part / whole if whole else 0.0 for part, whole in parts) / len(parts)

    assert value_of(Accuracy(), drawn) == pytest.approx(mean(right))
    assert value_of(TopKAccuracy(k=2), drawn) == pytest.approx(mean(top_two))
    assert value_of(RecallAtK(k=2), drawn) == pytest.approx(mean(top_two))
    assert value_of(TopKAccuracy(k=9), drawn) == 1.0
    assert value_of(CrossEntropy(from_logits=True), drawn) == pytest.approx(mean(losses), rel=1e-9, abs=1e-12)
    assert value_of(Precision(), drawn) == pytest.approx(macro(lambda true, false, _: (true, true + false)))
    assert value_of(Recall(), drawn) == pytest.approx(macro(lambda true, _, missed: (true, true + missed)))
    assert value_of(F1(), drawn) == pytest.approx(
        macro(lambda true, false, missed: (2 * true, 2 * true + false + missed))
    )


@given(
    drawn=st.lists(
        st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.sampled_from([0.5, 1.0, 3.0])), min_size=2, max_size=30
    )
)
def test_errors_of_regression_are_those_of_their_formulas(drawn: list[tuple[float, float, float]]) -> None:
    drawn = [(float(torch.tensor(guess)), float(torch.tensor(target)), weight) for guess, target, weight in drawn]
    squared = mean([((guess - target) ** 2, weight) for guess, target, weight in drawn])
    centre = mean([(target, weight) for _, target, weight in drawn])
    spread = mean([((target - centre) ** 2, weight) for _, target, weight in drawn])

    assert value_of(create("mse"), drawn) == pytest.approx(squared, rel=1e-9)
    assert value_of(create("rmse"), drawn) == pytest.approx(math.sqrt(squared), rel=1e-9)
    absolute = mean([(abs(guess - target), weight) for guess, target, weight in drawn])
    assert value_of(create("mae"), drawn) == pytest.approx(absolute, rel=1e-9)
    if spread > 1e-3:
        assert value_of(create("r2"), drawn) == pytest.approx(1 - squared / spread, rel=1e-6, abs=1e-6)


def test_metrics_agree_with_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2_000, generator=generator).double()
    labels = (torch.rand(2_000, generator=generator) < logits.sigmoid()).long()
    scores = torch.randn((2_000, NUM_CLASSES), generator=generator).double()
    classes = torch.randint(0, NUM_CLASSES, (2_000,), generator=generator)
    chances = logits.sigmoid()
    expected = {
        "accuracy": peers.binary_accuracy(chances, labels),
        "precision": peers.binary_precision(chances, labels),
        "recall": peers.binary_recall(chances, labels),
        "f1": peers.binary_f1_score(chances, labels),
    }
    for name, value in expected.items():
        metric = create(name, from_logits=True)
        metric.update(logits, labels)
        assert metric.compute() == pytest.approx(value.item(), abs=1e-6), name
    expected = {
        "accuracy": peers.multiclass_accuracy(scores, classes, NUM_CLASSES, average="micro"),
        "accuracy@2": peers.multiclass_accuracy(scores, classes, NUM_CLASSES, average="micro", top_k=2),
        "precision": peers.multiclass_precision(scores, classes, NUM_CLASSES, average="macro"),
        "recall": peers.multiclass_recall(scores, classes, NUM_CLASSES, average="macro"),
        "f1": peers.multiclass_f1_score(scores, classes, NUM_CLASSES, average="macro"),
        "cross_entropy": nn.functional.cross_entropy(scores, classes),
    }
    for name, value in expected.items():
        metric = create(name, from_logits=True)
        metric.update(scores, classes)
        assert metric.compute() == pytest.approx(value.item(), abs=1e-6), name
    expected = {
        "mse": regression_peers.mean_squared_error(scores[:, 0], scores[:, 1]),
        "mae": regression_peers.mean_absolute_error(scores[:, 0], scores[:, 1]),
        "r2": regression_peers.r2_score(scores[:, 0], scores[:, 1]),
    }
    for name, value in expected.items():
        metric = create(name)
        metric.update(scores[:, 0], scores[:, 1])
        assert metric.compute() == pytest.approx(value.item(), rel=1e-6), name


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(1_000, generator=generator).double()
    guesses = spread + 0.5 * torch.randn(1_000, generator=generator).double()
    near, far = create("r2"), create("r2")
    for part in range(0, 1_000, 100):
        near.update(guesses[part : part + 100], spread[part : part + 100])
        far.update(guesses[part : part + 100] + 1e9, spread[part : part + 100] + 1e9)

    assert far.compute() == pytest.approx(near.compute(), abs=1e-6)


def test_equal_targets_have_no_r2() -> None:
    metric = create("r2")
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]))

    assert math.isnan(metric.compute())


def test_a_certain_error_costs_100_as_in_torch() -> None:
    binary, classes = LogLoss(), CrossEntropy()
    binary.update(torch.tensor([0.0]), torch.tensor([1.0]))
    classes.update(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))

    assert binary.compute() == classes.compute() == nn.BCELoss()(torch.tensor([0.0]), torch.tensor([1.0])).item() == 100


def test_large_logits_lose_no_precision() -> None:
    metric = LogLoss(from_logits=True)
    metric.update(torch.tensor([-200.0, 30.0]), torch.tensor([1.0, 1.0]))

    assert metric.compute() == pytest.approx((200 + math.log1p(math.exp(-30))) / 2, rel=1e-12)


def test_class_weights_weigh_as_in_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((50, 3), generator=generator)
    targets = torch.randint(0, 3, (50,), generator=generator)
    metric = CrossEntropy(from_logits=True, class_weights=[1.0, 4.0, 0.25])
    metric.update(scores, targets)

    expected = nn.CrossEntropyLoss(torch.tensor([1.0, 4.0, 0.25]))(scores, targets)
    assert metric.compute() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(InvalidArgument, match="2 weights for 3 classes"):
        CrossEntropy(class_weights=[1, 2]).update(scores, targets)
    with pytest.raises(InvalidArgument, match="negative"):
        CrossEntropy(class_weights=[1, -2])


def test_further_dimensions_and_ignored_rows_follow_torchs_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((6, 5, 7), generator=generator)
    targets = torch.randint(0, 5, (6, 7), generator=generator)
    targets[2, 3:] = -100
    loss, accuracy = CrossEntropy(from_logits=True), Accuracy()
    for metric in (loss, accuracy):
        metric.update(scores, targets)

    kept = targets != -100
    assert loss.compute() == pytest.approx(nn.CrossEntropyLoss()(scores, targets).item(), rel=1e-5)
    assert accuracy.compute() == (scores.argmax(dim=1) == targets)[kept].double().mean().item()


def test_recall_at_k_of_several_relevant_items_is_a_mean_over_queries() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.2]])
    relevant = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    metric = RecallAtK(k=2)
    metric.update(scores, relevant)

    assert metric.compute() == (0.5 + 1.0) / 2
    with pytest.raises(InvalidArgument, match="neither 0 nor 1"):
        metric.update(scores, relevant * 3)


def test_equal_scores_of_all_classes_are_not_right_about_all() -> None:
    metric = TopKAccuracy(k=2)
    metric.update(torch.zeros(5, 5), torch.arange(5))

    assert metric.compute() == 2 / 5


@pytest.mark.parametrize("name", ["logloss", "accuracy", "precision", "calibration", "cross_entropy"])
@pytest.mark.parametrize(("from_logits", "cure"), [(None, "from_logits=True"), (False, "sigmoid or softmax")])
def test_logits_that_are_read_as_probabilities_are_refused(name: str, from_logits: bool | None, cure: str) -> None:
    metric = create(name, from_logits=from_logits)
    predictions = torch.tensor([[0.2, 3.0], [0.1, -1.5]]) if name == "cross_entropy" else torch.tensor([-1.5, 3.0])

    with pytest.raises(InvalidArgument, match=rf"from -1\.5 to 3, which are not probabilities.*{cure}"):
        metric.update(predictions, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("predictions", "targets", "words"),
    [
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]), "class index 3 for predictions with 3 classes"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, -1]), "class index -1"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 0.5]), "target 0.5, which is not a class index"),
        (torch.zeros(4, 3), torch.zeros(4, 2), r"\[4, 3\] and targets of shape \[4, 2\]"),
        (torch.zeros(4), torch.zeros(4), r"\[N, C\] scores"),
    ],
)
def test_targets_that_are_no_classes_are_refused(predictions: torch.Tensor, targets: torch.Tensor, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        CrossEntropy(from_logits=True).update(predictions, targets)


def test_classes_must_not_change_between_batches() -> None:
    metric = F1()
    metric.update(torch.zeros(2, 3), torch.tensor([0, 1]))

    with pytest.raises(InvalidArgument, match="predictions for 4 classes after predictions for 3"):
        metric.update(torch.zeros(2, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_negative_and_infinite_weights_are_refused(weight: float) -> None:
    with pytest.raises(InvalidArgument, match="negative or not finite"):
        create("mse").update(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, weight]))


@pytest.mark.parametrize("threshold", [0, 1, -0.5, math.nan])
def test_a_threshold_that_is_no_probability_is_refused(threshold: float) -> None:
    with pytest.raises(InvalidArgument, match="threshold"):
        Accuracy(threshold=threshold)


@pytest.mark.parametrize("name", metrics.NAMES)
def test_every_name_creates_a_metric_of_this_name(name: str) -> None:
    name = name.replace("@k", "@3")

    assert create(name).name == name


@pytest.mark.parametrize(
    ("name", "suggestion"), [("acc", "'accuracy'"), ("AUC", "'auc'"), ("log_loss", "'logloss'"), ("recall@0", "recall")]
)
def test_an_unknown_name_is_refused_with_close_ones_and_the_list(name: str, suggestion: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}.*did you mean.*{suggestion}.*average_precision") as caught:
        create(name)

    assert caught.value.field == "metrics"


def test_a_class_and_other_objects_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"pass an instance: AUC\(\)"):
        create(AUC)
    with pytest.raises(InvalidArgument, match="neither a name"):
        create(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="one by one"):
        create(torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]))


def test_an_instance_is_copied_and_learns_what_the_loss_knows() -> None:
    given_metric, decided = Accuracy(threshold=0.3), LogLoss(from_logits=False)
    given_metric.update(torch.tensor([0.9]), torch.tensor([1]))

    created = create(given_metric, from_logits=True)

    assert isinstance(created, Accuracy)
    assert (created.from_logits, created.threshold) == (True, 0.3)
    assert math.isnan(created.compute())
    assert given_metric.from_logits is None
    assert given_metric.compute() == 1
    assert create(decided, from_logits=True).from_logits is False  # type: ignore[attr-defined]


def test_a_function_gets_all_rows_in_the_order_of_its_parameters() -> None:
    calls = []

    def squared_error(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append((predictions, targets))
        return ((predictions - targets) ** 2).mean()

    def score(y_true: torch.Tensor, y_pred: torch.Tensor) -> float:
        return float(y_pred.sum() - 100 * y_true.sum())

    error, scored = create(squared_error), create(score)
    for metric in (error, scored):
        metric.update(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 1.0]))
        metric.update(torch.tensor([[5.0]]), torch.tensor([1.0]))

    assert (error.name, error.better, scored.name, scored.better) == ("squared_error", "lower", "score", "higher")
    assert error.compute() == 6
    assert scored.compute() == 8 - 200
    assert calls[0][0].tolist() == [1, 2, 5]


def test_a_function_may_keep_a_bounded_number_of_predictions() -> None:
    metric = FunctionMetric(lambda predictions, targets: 0.0, max_elements=5, name="mine")
    metric.update(torch.zeros(2, 2), torch.zeros(2))

    with pytest.raises(LimitExceeded, match="6 predictions, more than max_elements=5"):
        metric.update(torch.zeros(1, 2), torch.zeros(1))


def test_weights_reach_a_function_that_takes_them() -> None:
    def score(y_true: torch.Tensor, y_pred: torch.Tensor, sample_weight: torch.Tensor) -> float:
        return float(sample_weight.sum())

    metric = create(score)
    metric.update(torch.zeros(2), torch.zeros(2))
    metric.update(torch.zeros(2), torch.zeros(2), torch.tensor([3.0, 4.0]))

    assert metric.compute() == 9
    with pytest.raises(InvalidArgument, match="no parameter sample_weight"):
        create(max).update(torch.zeros(2), torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize("value", [torch.zeros(3), {"a": 1}, "x"])
def test_a_function_that_returns_no_number_is_refused(value: object) -> None:
    metric = FunctionMetric(lambda predictions, targets: value, name="mine")
    metric.update(torch.zeros(2), torch.zeros(2))

    with pytest.raises(InvalidArgument, match="'mine' returned"):
        metric.compute()


def test_small_logits_are_logits_for_torchmetrics_too() -> None:
    logits, labels = torch.tensor([0.2, 0.9, 0.4, -3.0]), torch.tensor([0, 1, 0, 0])
    metric = create(torchmetrics.classification.BinaryAccuracy(), from_logits=True)
    assert isinstance(metric, TorchMetric)
    metric.update(logits[:3], labels[:3])  # Alone, torchmetrics takes this batch for probabilities.
    metric.update(logits[3:], labels[3:])

    assert metric.compute() == 0.5
    assert (metric.name, metric.better) == ("BinaryAccuracy", "higher")
    assert create(torchmetrics.MeanSquaredError()).better == "lower"


def test_a_torchmetric_that_does_not_merge_or_fit_is_refused() -> None:
    class Averaged(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

        def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
            """Do nothing."""

        def compute(self) -> torch.Tensor:
            return torch.zeros(())

    with pytest.raises(InvalidArgument, match="averages its state 'value'"):
        create(Averaged())
    per_class = create(torchmetrics.classification.MulticlassAccuracy(3, average=None))
    per_class.update(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(InvalidArgument, match="3 values"):
        per_class.compute()
    with pytest.raises(InvalidArgument, match="refused predictions of shape"):
        per_class.update(torch.rand(4, 5), torch.tensor([0, 1, 2, 0]))


def test_a_torchmetric_whose_states_are_stacked_merges() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn((2, 200), generator=generator)
    ranks = []
    for part in (slice(0, 150), slice(150, 200)):
        metric = create(torchmetrics.PearsonCorrCoef())
        metric.update(left[part], right[part])
        ranks.append(metric.state())
    merged = create(torchmetrics.PearsonCorrCoef())
    merged.merge(ranks)

    assert merged.compute() == pytest.approx(torch.corrcoef(torch.stack((left, right)))[0, 1].item(), abs=1e-5)


def test_a_set_computes_what_its_metrics_compute() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1_000, generator=generator)
    labels = (torch.rand(1_000, generator=generator) < logits.sigmoid()).float()
    together = MetricSet(["auc", "logloss", F1(threshold=0.3)], from_logits=True, buffer_elements=300)
    for some, true in zip(logits.split(64), labels.split(64), strict=True):
        together.update(some, true)

    for name in together.names:
        alone = create(F1(threshold=0.3) if name == "f1" else name, from_logits=True)
        alone.update(logits, labels)
        assert together.compute()[name] == pytest.approx(alone.compute(), rel=1e-12)
    assert together.better == {"auc": "higher", "logloss": "lower", "f1": "higher"}
    assert len(together) == 3
    assert "auc" in together
    assert isinstance(together["auc"], AUC)


def test_a_set_reports_the_bound_of_a_value_that_is_not_exact() -> None:
    logits = torch.linspace(0.9, 1, 5_000)
    labels = (torch.arange(5_000) % 3 == 0).float()
    together = MetricSet({"exact": "auc", "binned": AUC(max_rows=100)})
    together.update(logits, labels)

    values = together.compute()
    assert list(values) == ["exact", "binned", "binned.error_bound"]
    assert abs(values["exact"] - values["binned"]) <= values["binned.error_bound"] < 1e-3


def test_a_set_copies_batches_so_that_loaders_may_reuse_their_memory() -> None:
    together, batch, labels = MetricSet(["mse"]), torch.zeros(4), torch.zeros(4)
    for number in range(5):
        batch.fill_(number)
        together.update(batch, labels)

    assert together.compute() == {"mse": (0 + 1 + 4 + 9 + 16) / 5}


def test_a_set_takes_batches_of_changing_types_and_shapes() -> None:
    together = MetricSet(["mse"])
    together.update(torch.ones(2), torch.zeros(2))
    together.update(torch.ones(2), torch.zeros(2))
    together.update(torch.ones(3, 1, dtype=torch.bfloat16), torch.zeros(3))
    together.update(torch.tensor(2.0, requires_grad=True), torch.zeros(1), torch.tensor([3.0]))

    assert together.compute() == {"mse": (7 + 3 * 4) / (7 + 3)}


def test_a_set_passes_the_first_batch_on_at_once() -> None:
    together = MetricSet(["auc"])

    with pytest.raises(InvalidArgument, match="target 7"):
        together.update(torch.zeros(2), torch.tensor([0, 7]))


def test_the_state_of_a_set_restores_it_with_buffered_rows() -> None:
    saved, restored = MetricSet(["mse", "auc"]), MetricSet(["mse", "auc"])
    predictions, labels = torch.linspace(0, 1, 40), (torch.arange(40) % 2).float()
    saved.update(predictions[:10], labels[:10])
    saved.update(predictions[10:20], labels[10:20])
    restored.update(torch.ones(1), torch.zeros(1))
    restored.merge([saved.state()])
    for each in (saved, restored):
        each.update(predictions[20:], labels[20:])

    assert restored.compute() == saved.compute()
    with pytest.raises(InvalidArgument, match=r"\['auc', 'mse'\], not of \['mae'\]"):
        MetricSet(["mae"]).merge([saved.state()])
    saved.reset()
    assert all(math.isnan(value) for value in saved.compute().values())


def test_a_set_refuses_equal_names_and_what_is_no_list() -> None:
    with pytest.raises(InvalidArgument, match="two metrics are called 'auc'"):
        MetricSet(["auc", AUC(max_rows=7)])
    with pytest.raises(InvalidArgument, match=r"write metrics=\["):
        MetricSet("auc")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({"a": torch.zeros(2)}, torch.zeros(2)), "predictions of type dict"),
        ((torch.zeros(2), [0, 1]), "targets of type list"),
        ((torch.zeros(2), torch.zeros(3)), r"targets of shape \[3\] and predictions of shape \[2\]"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(3)), "weights of shape"),
    ],
)
def test_a_set_refuses_what_are_no_rows(arguments: tuple[object, ...], words: str) -> None:
    together = MetricSet(["mse"])

    with pytest.raises(InvalidArgument, match=words):
        together.update(*arguments)  # type: ignore[arg-type]


def test_an_empty_set_does_nothing_and_gathering_alone_changes_nothing() -> None:
    empty, alone = MetricSet(), MetricSet(["mse"])
    empty.update(torch.zeros(2), torch.zeros(2))
    empty.gather()
    alone.update(torch.ones(2), torch.zeros(2))
    alone.gather()

    assert empty.compute() == {}
    assert alone.compute() == {"mse": 1}
