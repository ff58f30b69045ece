"""A Trainer as new users call it: targets from functions, outputs of any form, options, exports, wrong arguments."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from strata import Trainer
from strata.errors import InvalidArgument
from strata.train import Batch, DenseFeat, EarlyStopping, Features, SparseFeat
from strata.trainer import engine
from strata.trainer.engine import Saving
from tests.integration.trainer_models import Regression, arrays, network, weights

LOSS = nn.BCEWithLogitsLoss()


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(module: nn.Module | None = None, loss: Any = LOSS, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1}}
    defaults["checkpoint_options"] = {"saver": "thread"}  # starting a process would take most of a test
    return Trainer(module or network(), loss, **{**defaults, **arguments})


def frame(rows: int = 40) -> pd.DataFrame:
    random = np.random.default_rng(0)
    a, b = random.normal(size=rows), random.normal(size=rows)
    return pd.DataFrame({"a": a, "b": b, "c": random.choice(list("xyz"), rows), "y": (a - b > 0).astype(np.int64)})


# -- early stopping ----------------------------------------------------------------------------------------------------


def test_a_number_of_epochs_is_enough_for_early_stopping() -> None:
    x, y = arrays(40)

    result = trainer().fit((x, y), valid=(x, 1 - y), epochs=9, batch_size=8, early_stopping=2)

    assert (len(result.history), result.best_epoch) == (3, 0)
    assert "not improved for 2 epochs" in result.stop_reason


def test_early_stopping_follows_the_training_loss_if_that_is_monitored() -> None:
    result = trainer(optimizer_args={"lr": 0.0}).fit(arrays(40), epochs=9, early_stopping=1, monitor="loss")

    assert len(result.history) < 9


# -- targets, inputs and outputs ---------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Has an optional second input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        score: torch.Tensor = self.linear(x)
        return score if mask is None else score + 1000.0 * mask[:, None]


class Outputs(nn.Module):
    """Returns a dictionary, with a loss if it receives the target."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        score = self.linear(x).squeeze(-1)
        return {"score": score, "loss": None if y is None else LOSS(score, y)}


class Whole(nn.Module):
    """Takes the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        score: torch.Tensor = self.linear(torch.stack([batch["a"], batch["b"]], dim=1))
        return score


def test_a_label_function_sees_all_columns_and_is_not_called_for_predictions() -> None:
    data = frame()
    named, computed = Regression(), Regression()
    trainer(named).fit(data, label="y", batch_size=8)

    model = trainer(computed)
    model.fit(data, label=lambda batch: batch["y"].float(), batch_size=8)

    assert weights(computed) == weights(named)
    assert model.predict(data.drop(columns="y")).shape == (40,)


def test_a_label_function_with_features_sees_the_columns_passed_through() -> None:
    data = frame()
    declarations = [DenseFeat("a"), DenseFeat("b")]
    features = Features.fit(data, declarations, passthrough=["y"])

    model = trainer(Regression(), features=features)
    result = model.fit(data, label=lambda batch: batch["y"].float(), batch_size=8)

    assert result.steps == 5
    with pytest.raises(InvalidArgument, match=r"looks for 'y'.*passthrough"):
        trainer(Regression(), features=Features.fit(data, declarations)).fit(data, label=lambda batch: batch["y"])


def test_predictions_with_features_need_no_label_column() -> None:
    data = frame()
    features = Features.fit(data, [DenseFeat("a"), DenseFeat("b"), SparseFeat("c")], label="y")
    model = trainer(Regression(), features=features)
    model.fit(data, label="y", batch_size=8)

    assert model.predict(data.drop(columns="y")).equal(model.predict(data))


def test_predictions_leave_the_target_out_of_optional_inputs() -> None:
    x, y = arrays(20)
    model = trainer(Masked())
    model.fit((x, y))

    assert model.predict((x, y)).equal(model.predict(x))
    # Batches of another size may round differently.
    torch.testing.assert_close(model.predict(DataLoader(TensorDataset(x, y))), model.predict(x))


def test_predictions_have_the_form_of_the_outputs() -> None:
    x, y = arrays(20)
    model = trainer(Outputs(), lambda output, target: LOSS(output["score"], target))
    model.fit((x, y), batch_size=8)

    found = model.predict(x, batch_size=8)

    assert found["loss"] is None
    assert found["score"].equal(model.module(x)["score"].detach())


def test_metrics_of_several_outputs_are_refused_with_the_cure() -> None:
    with pytest.raises(InvalidArgument, match="override prediction_step"):
        trainer(Outputs(), lambda output, y: LOSS(output["score"], y), metrics=["auc"]).evaluate(arrays(20))


def test_a_module_that_returns_its_loss_is_validated_with_it() -> None:
    x, y = arrays(40)
    module = Outputs()
    model = trainer(module, None)

    result = model.fit((x, y), valid=(x, y), epochs=2, batch_size=16)

    assert result.monitor == "valid_loss"
    assert result.history[-1]["valid_loss"] == pytest.approx(module(x, y)["loss"].item(), rel=1e-5)  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match="neither loss= nor label="):
        trainer(Outputs(), None, metrics=["auc"]).fit((x, y), valid=(x, y))


def test_an_own_training_step_without_a_loss_can_be_validated() -> None:
    class Own(Trainer):
        def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
            return LOSS(batch.call(module).squeeze(-1), batch.target)

    model = Own(network(), None, "sgd", ["auc"])

    result = model.fit(
        {"input": arrays(40)[0], "y": arrays(40)[1]}, label="y", valid={"input": arrays(9)[0], "y": arrays(9)[1]}
    )

    assert "valid_auc" in result.history[0]
    plain = Own(network(), None, "sgd").fit(
        {"input": arrays(40)[0], "y": arrays(40)[1]}, label="y", valid={"input": arrays(9)[0], "y": arrays(9)[1]}
    )
    assert plain.monitor == "loss"


def test_a_module_that_takes_the_whole_batch_gets_numbers_of_its_own_type() -> None:
    result = trainer(Whole()).fit(frame(), label="y", batch_size=8)  # float64 columns, float32 weights

    assert result.steps == 5


# -- weights -----------------------------------------------------------------------------------------------------------


def test_class_weights_apply_to_each_label_of_a_row() -> None:
    module = nn.Linear(4, 3)
    x, y = arrays(3)[0], torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    each = nn.BCEWithLogitsLoss(reduction="none")(module(x), y)
    expected = (each * (1 + 4 * y)).mean().item()

    found = trainer(module, class_weights={0: 1.0, 1: 5.0}, optimizer_args={"lr": 0.0}).fit((x, y)).history[0]["loss"]

    assert found == pytest.approx(expected, rel=1e-6)


def test_classes_without_a_weight_count_with_one() -> None:
    data = arrays(40)
    given, left_out = network(), network()

    trainer(given, class_weights={0: 3.0, 1: 1.0}).fit(data, batch_size=8)
    trainer(left_out, class_weights={0: 3.0}).fit(data, batch_size=8)

    assert weights(left_out) == weights(given)


@pytest.mark.parametrize("wrong", [{}, {-1: 1.0}, [1.0, 2.0], {"a": 1.0}])
def test_class_weights_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="is not a mapping from class numbers"):
        trainer(class_weights=wrong)


def test_weights_that_cannot_be_applied_are_refused() -> None:
    x, y = arrays(20)
    with pytest.raises(InvalidArgument, match="weight='w' is not a column of the batch"):
        trainer().fit((x, y), weight="w")
    with pytest.raises(InvalidArgument, match="weight= needs loss="):
        trainer(Outputs(), None).fit({"x": x, "y": y, "w": y}, weight="w")


# -- data and options --------------------------------------------------------------------------------------------------


def test_accumulation_with_dropped_rows_averages_over_the_rows_of_the_step() -> None:
    x, y = arrays(43)
    large, small = network(), network()

    trainer(large, optimizer_args={"lr": 1.0}).fit((x[:40], y[:40]), batch_size=12, shuffle=False)
    trainer(small, accumulate=3, optimizer_args={"lr": 1.0}).fit((x, y), batch_size=4, shuffle=False, drop_last=True)

    assert weights(small) == pytest.approx(weights(large), abs=1e-6)


def test_rows_that_training_leaves_out_are_still_evaluated() -> None:
    x, y = arrays(43)
    model = trainer()

    result = model.fit((x, y), valid=(x, y), batch_size=8, drop_last=True)

    expected = LOSS(model.module(x).squeeze(-1), y).item()
    assert result.history[0]["valid_loss"] == pytest.approx(expected, rel=1e-5)
    assert model.evaluate((x, y))["loss"] == pytest.approx(expected, rel=1e-5)
    assert len(model.predict(x)) == 43


def test_options_of_a_fit_on_files_do_not_reach_other_data() -> None:
    data = frame()
    model = trainer(Regression())
    model.fit(data, label="y", batch_size=8, filters=[("a", ">", 0.0)])

    assert len(model.predict(data)) == 40
    assert len(model.predict({"a": torch.zeros(3), "b": torch.zeros(3)})) == 3


def test_predictions_for_a_shuffled_loader_come_in_the_order_of_the_rows() -> None:
    x, y = arrays(20)
    model = trainer()
    shuffled = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)

    torch.testing.assert_close(model.predict(shuffled), model.predict(x))  # other batch sizes may round differently


def test_weighted_training_can_be_evaluated_on_rows_without_weights() -> None:
    x, y = arrays(40)
    model = trainer(metrics=["auc"])
    model.fit({"input": x, "y": y, "w": y + 1}, label="y", weight="w", batch_size=8)

    loss = LOSS(model.module(x).squeeze(-1), y).item()
    assert model.evaluate({"input": x, "y": y})["loss"] == pytest.approx(loss, rel=1e-5)
    assert model.evaluate({"input": x, "y": y, "v": y * 0}, weight="v")["loss"] == 0.0


def test_columns_can_be_chosen_before_a_fit() -> None:
    data = frame()
    model = trainer(nn.Linear(2, 1))

    assert "loss" in model.evaluate(data, label="y", inputs=["a", "b"])
    assert len(model.predict(data, inputs=["a", "b"])) == 40
    assert len(trainer(nn.Linear(1, 1)).predict(data, inputs="a")) == 40


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*arrays(10), strict=True)


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
def test_a_stateful_loader_without_a_length_trains() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    result = trainer().fit(loaders.StatefulDataLoader(Rows(), batch_size=3), epochs=2)

    assert result.steps == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bacth_size": 3}, "bacth_size= is neither an argument"),
        ({"num_worker": 3}, "did you mean num_workers="),
        ({"valid": (torch.zeros(0, 4), torch.zeros(0))}, "no rows"),
    ],
)
def test_options_that_no_loader_takes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        trainer().fit(arrays(20), **arguments)


def test_options_beside_a_loader_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="A loader has its own options"):
        trainer().fit(DataLoader(TensorDataset(*arrays(20))), num_workers=2)


def test_validation_data_without_the_label_is_refused_before_the_first_step() -> None:
    x, y = arrays(20)
    steps: list[int] = []
    module = network()
    module.register_forward_hook(lambda *_: steps.append(1))

    with pytest.raises(InvalidArgument, match="label='y' is not a column of the data; Columns: input"):
        trainer(module).fit({"input": x, "y": y}, label="y", valid={"input": x})

    assert not steps


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_row_of_a_step_counts_the_same_with_every_tail(tail: str, accumulate: int) -> None:
    x, y = arrays(43)
    ends = 40 if tail == "drop" else 43
    repeated = [40] if tail == "pad" else []  # the first row of the last batch
    rows = torch.tensor([*range(ends), *repeated])
    given, listed = network(), network()

    trainer(given, accumulate=accumulate).fit((x, y), batch_size=4, shuffle=False, tail=tail)
    trainer(listed, accumulate=accumulate).fit((x[rows], y[rows]), batch_size=4, shuffle=False)

    assert weights(given) == pytest.approx(weights(listed), abs=1e-6)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


def test_a_scheduler_that_does_not_fit_is_refused_before_the_first_step() -> None:
    schedulers = torch.optim.lr_scheduler
    with pytest.raises(InvalidArgument, match="scheduler= cannot be called with the optimizer alone"):
        trainer(scheduler=schedulers.StepLR).fit(arrays(20))
    with pytest.raises(InvalidArgument, match="scheduler_every='epoch'"):
        trainer(scheduler=schedulers.ReduceLROnPlateau, scheduler_every="step").fit(arrays(20))
    with pytest.raises(InvalidArgument, match="returned a NoneType"):
        trainer(scheduler=lambda _: None).fit(arrays(20))


def test_a_metric_that_takes_no_weights_is_refused_before_the_first_step() -> None:
    x, y = arrays(20)
    data = {"input": x, "y": y, "w": y + 1}

    with pytest.raises(InvalidArgument, match="metric 'f' cannot use the weights"):
        trainer(metrics={"f": lambda predictions, targets: 0.0}).fit(data, label="y", weight="w", valid=data)


def test_names_may_be_given_without_a_list() -> None:
    result = trainer(callbacks="json").fit(arrays(20))

    assert len(Path("history.jsonl").read_text().splitlines()) == len(result.history)


def test_an_epoch_without_a_value_is_never_the_best() -> None:
    values = iter([math.nan, 0.5, 0.7])
    stopping = EarlyStopping(monitor="valid_error")

    class Error:
        name, better = "error", "lower"

        def reset(self) -> None: ...
        def update(self, *_: Any) -> None: ...
        def state(self) -> dict[str, torch.Tensor]:
            return {}

        def merge(self, _: Any) -> None: ...
        def compute(self) -> float:
            return next(values)

    result = trainer(metrics=[Error()], checkpoint_options={"keep_count": 5}).fit(
        arrays(40), valid=arrays(10), epochs=3, early_stopping=stopping
    )

    assert result.best is not None
    assert result.best.step == result.history[result.best_epoch]["step"] == 2


# -- export ------------------------------------------------------------------------------------------------------------


def run_exported(directory: Path, rows: Any) -> Any:
    """Run predict.py of a copy of an export, where nothing but torch can be imported; return what it prints."""
    copied = directory.parent / f"{directory.name}-copied"
    shutil.copytree(directory, copied)
    (copied / "rows.json").write_text(json.dumps(rows))
    code = (
        "import runpy, sys; sys.argv = ['predict.py', 'rows.json']; runpy.run_path('predict.py', run_name='__main__'); "
        "assert not any(name.split('.')[0] == 'strata' for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=copied, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_export_from_one_row_takes_whole_numbers_and_any_number_of_rows(tmp_path: Path) -> None:
    data = pd.DataFrame({"a": [0.5], "b": [1.5], "y": [1]})
    model = trainer(Whole())
    model.fit(data, label="y")
    rows = {"a": [1, 2, 3], "b": [4, 5, 6]}

    found = run_exported(model.export(tmp_path / "model"), rows)

    assert torch.allclose(torch.tensor(found), model.predict(pd.DataFrame(rows).astype(float)), atol=1e-6)


def test_an_export_leaves_the_target_out_and_keeps_the_form_of_the_outputs(tmp_path: Path) -> None:
    x, y = arrays(20)
    model = trainer(Outputs(), lambda output, target: LOSS(output["score"], target))
    model.fit((x, y), batch_size=8)

    found = run_exported(model.export(tmp_path / "model"), [x.tolist()])

    assert found["loss"] is None
    assert found["score"] == pytest.approx(model.predict(x)["score"].tolist(), abs=1e-6)


# -- interrupts and launchers ------------------------------------------------------------------------------------------


class Interrupting(Trainer):
    """Receives Ctrl-C in the validation after the last epoch."""

    def prediction_step(self, module: nn.Module, batch: Batch) -> Any:
        signal.raise_signal(signal.SIGINT)
        return super().prediction_step(module, batch)


def test_an_interrupt_in_the_last_validation_is_raised_after_a_save() -> None:
    data = arrays(20)

    with pytest.raises(KeyboardInterrupt, match="saved step 3"):
        Interrupting(network(), LOSS, "sgd").fit(data, valid=arrays(8), batch_size=8)

    result = Trainer(network(), LOSS, "sgd").fit(data, valid=arrays(8), batch_size=8, resume=True)
    assert (result.steps, len(result.history)) == (3, 1)


def test_an_evaluation_before_a_fit_does_not_move_the_checkpoints_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a run opens its checkpoints once, for all that its script calls."""
    opened: list[str] = []

    class Recorder:
        def prepared(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def run(self, _: Any, __: Any, saving: Saving) -> dict[str, float]:
            opened.append(saving.checkpoints)
            return {}

    model = trainer(checkpoints="saved")
    monkeypatch.setattr(model, "_engine", lambda **_: Recorder())
    monkeypatch.setattr(engine, "is_worker", lambda: True)

    model.evaluate(arrays(20))

    assert opened == ["saved"]
