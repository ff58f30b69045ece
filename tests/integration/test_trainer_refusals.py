"""A Trainer refuses what cannot work before the first step: the error names the cause and the cure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strata import CheckpointManager, Trainer
from strata.data.order.steps import Steps
from strata.errors import ConfigError, InvalidArgument, StrataError
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.train import AllReduce, JsonLogger, NeuralNetTrainer
from strata.trainer.diagnosis import single_rows_refused
from strata.trainer.loop import NotFinite
from tests.integration.trainer_models import arrays, network, weights


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))


def trainer(**arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"module": network(), "loss": nn.BCEWithLogitsLoss(), "optimizer": torch.optim.SGD}
    defaults["checkpoint_options"] = {"saver": "thread"}  # starting a process would take most of a test
    return Trainer(**{**defaults, **arguments})


def refusal(work: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        work()
    return str(caught.value)


# -- a BatchNorm and a batch of one row --------------------------------------------------------------------------------


def two_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_a_single_row_at_the_end_is_refused_before_the_first_step_of_a_batch_norm() -> None:
    module = two_norms()
    before = weights(module)

    message = refusal(lambda: trainer(module=module).fit(arrays(17), batch_size=8))

    assert "17 rows in batches of batch_size=8 end with a batch of one row" in message
    assert "leave the last batch out with drop_last=True, or choose another batch_size" in message
    assert weights(module) == before
    assert trainer(module=module).fit(arrays(17), batch_size=8, drop_last=True).steps == 2
    assert trainer(module=module).fit(arrays(17), batch_size=7).steps == 3


def test_a_refusal_of_single_rows_names_the_option_of_the_data() -> None:
    x, y = arrays(9)
    torch_loader = DataLoader(TensorDataset(x, y), batch_size=4)
    table = {"input": x, "y": y}

    assert "drop_last=True of the DataLoader" in refusal(lambda: trainer(module=two_norms()).fit(torch_loader))
    assert "drop_last=True," in refusal(lambda: trainer(module=two_norms()).fit(table, label="y", batch_size=4))


def test_a_batch_norm_over_images_trains_on_a_single_row() -> None:
    module = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 1))

    assert trainer(module=module).fit(arrays(17), batch_size=8).steps == 3


def test_a_single_row_that_is_never_reached_is_no_obstacle() -> None:
    assert trainer(module=two_norms()).fit(arrays(17), batch_size=8, max_steps=2).steps == 2


class Batches:
    """A loader that does not know its rows in advance."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = arrays(9)
        yield x[:8], y[:8]
        yield x[8:], y[8:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_single_row_that_nothing_announced_is_explained() -> None:
    message = refusal(lambda: trainer(module=two_norms()).fit(Batches()))

    assert "a batch has a single row, and BatchNorm needs two to train on" in message


@pytest.mark.parametrize(("num_rows", "is_refused"), [(16, False), (17, False), (18, True), (19, True), (20, False)])
def test_a_single_row_counts_on_each_rank(num_rows: int, is_refused: bool) -> None:
    steps = Steps(num_rows=num_rows, first=0, batch_size=8, world_size=2, tail="uneven")
    module = two_norms()

    def look() -> None:
        with single_rows_refused(module, steps, num_rows=8, cure="drop_last=True"):
            module(torch.randn(8, 4))

    if is_refused:
        assert "on 2 workers end with a batch of one row" in refusal(look)
    else:
        look()


# -- a loss that cannot be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, t: (p - t) ** 2, "the loss is float32[8], but training needs one number; take the mean"),
        (lambda p, t: 1.0, "the loss is 1.0, a float; it must be a tensor"),
        (lambda p, t: None, "the loss is None, a NoneType; it must be a tensor"),
        (lambda p, t: (p.detach() - t).mean(), "the loss is a number without a gradient"),
        (lambda p: p.mean(), "the loss does not fit: TypeError"),
        (nn.NLLLoss(), "received the predictions float32[8] and the target float32[8]"),
    ],
)
def test_a_loss_that_is_no_number_with_a_gradient_is_refused(loss: Any, message: str) -> None:
    assert message in refusal(lambda: trainer(loss=loss).fit(arrays(16), batch_size=8))


def test_an_own_training_step_that_returns_no_loss_is_refused() -> None:
    class Forgetful(Trainer):
        def training_step(self, module: nn.Module, batch: Any) -> Any:
            self.loss(batch.call(module).squeeze(-1), batch.target)

    assert "training_step returned None" in refusal(lambda: Forgetful(network(), nn.MSELoss()).fit(arrays(16)))


def test_a_label_of_strings_is_named_with_the_loss_that_cannot_use_it() -> None:
    x, _ = arrays(6)
    table = pd.DataFrame({"x0": x[:, 0].numpy(), "y": ["yes", "no"] * 3})

    message = refusal(lambda: trainer(module=nn.Linear(1, 1)).fit(table, label="y", inputs=["x0"]))

    assert "the loss does not fit: AttributeError" in message
    assert "the target a list of 6 str" in message


def test_an_evaluation_and_predictions_explain_what_does_not_fit() -> None:
    x, y = arrays(6)
    classes = trainer(module=nn.Linear(4, 3), loss=nn.CrossEntropyLoss())

    assert "the loss does not fit: IndexError" in refusal(lambda: classes.evaluate((x, y.long() - 1)))
    assert "the module does not fit the data: RuntimeError" in refusal(lambda: classes.predict(x[:, :2]))


@pytest.mark.parametrize("place", ["a_file", "a_file/below"])
def test_a_place_of_checkpoints_that_cannot_be_a_directory_is_refused_before_the_first_step(place: str) -> None:
    Path("a_file").write_text("")
    module = network()
    before = weights(module)

    assert f"checkpoints={place!r} cannot be created as a directory" in refusal(
        lambda: trainer(module=module, checkpoints=place).fit(arrays(6))
    )
    assert weights(module) == before


# -- values that are not finite ----------------------------------------------------------------------------------------


def test_a_loss_that_is_nan_because_of_the_data_names_the_column() -> None:
    x, y = arrays(16)
    bad_y, bad_x = y.clone(), x.clone()
    bad_y[3], bad_x[5, 0] = math.nan, math.inf

    with pytest.raises(NotFinite, match="the target has 1 values of 16 in this batch that are NaN or infinite"):
        trainer(loss=nn.MSELoss()).fit((x, bad_y))
    with pytest.raises(NotFinite, match="input 0 has 1 values of 64 in this batch"):
        trainer(module=nn.Linear(4, 1), loss=nn.MSELoss()).fit((bad_x, y))
    with pytest.raises(NotFinite, match="its batch has only finite values: lower the learning rate"):
        trainer(loss=lambda p, t: (p - t).sum() * math.nan).fit((x, y))


def test_weights_that_a_gradient_made_nan_are_not_saved_although_the_loss_is_finite(tmp_path: Path) -> None:
    x, y = arrays(16)
    x[13, 0] = math.inf  # tanh makes it finite, and its gradient NaN

    with pytest.raises(NotFinite, match=r"the weights '0.weight' are NaN or infinite at step 2"):
        trainer(loss=nn.MSELoss(), checkpoints=tmp_path / "saved").fit((x, y), batch_size=8, shuffle=False, every=1)

    with CheckpointManager(tmp_path / "saved") as manager:
        assert [each.step for each in manager.list()] == [1]


def test_a_rank_that_shares_no_gradients_cannot_stop_the_others() -> None:
    local = AllReduce(local_steps=4)

    with pytest.raises(
        ConfigError, match=r"on_nan='stop' does not work with local_steps=4: .*; use 'skip', or 'raise'"
    ):
        trainer(strategy=local, on_nan="stop", workers=2).fit(arrays(16))
    assert trainer(strategy=local, on_nan="skip").fit(arrays(16), batch_size=8).steps == 2


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_an_epoch_whose_steps_are_all_left_out_has_no_loss(on_nan: str) -> None:
    x, y = arrays(16)

    result = trainer(loss=nn.MSELoss(), on_nan=on_nan).fit((x, y * math.nan), batch_size=8)

    assert math.isnan(result.history[0]["loss"])


# -- data without a batch ----------------------------------------------------------------------------------------------


def test_data_that_do_not_fill_a_batch_are_refused_if_incomplete_batches_are_left_out() -> None:
    message = refusal(lambda: trainer().fit(arrays(6), batch_size=8, drop_last=True))

    assert "6 rows do not fill a batch of batch_size=8, and incomplete batches are left out" in message


def test_a_loader_that_delivers_nothing_is_refused() -> None:
    class Nothing(Batches):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return iter(())

    assert "the data delivered no batch, so nothing was trained" in refusal(lambda: trainer().fit(Nothing()))


def test_a_single_column_is_no_table() -> None:
    series = pd.Series([1.0, 2.0])

    assert "a Series is not a table; pass a DataFrame" in refusal(lambda: trainer().fit(series, label="y"))


@pytest.mark.parametrize(("wrong", "meant"), [("lable", "label"), ("batchsize", "batch_size"), ("filter", "filters")])
def test_a_misspelt_argument_of_fit_names_the_one_that_was_meant(wrong: str, meant: str) -> None:
    assert f"did you mean {meant}=? The loader takes" in refusal(lambda: trainer().fit("rows", **{wrong: "y"}))


# -- another module than the checkpoint's ------------------------------------------------------------------------------


def test_a_checkpoint_of_another_module_is_refused_with_the_names_and_shapes() -> None:
    data = arrays(16)
    trainer(checkpoints="saved").fit(data)
    wider = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    before = weights(wider)

    message = refusal(lambda: trainer(module=wider, checkpoints="saved").fit(data, epochs=2, resume=True))

    assert "the module, Sequential, does not fit checkpoint " in message
    assert f"in {Path('saved').absolute()}" in message.replace("file://", "")
    assert "the checkpoint has no '2.weight', '2.bias'" in message
    assert "the module has no '3.weight', '3.bias'" in message
    assert "'0.weight' ([8, 4] in the checkpoint, [16, 4] in the module)" in message
    assert "start a new one without resume=True" in message
    assert weights(wider) == before


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    data, one_layer = arrays(16), network()
    for parameter in one_layer[0].parameters():
        parameter.requires_grad_(False)
    trainer(optimizer="adam", checkpoints="saved").fit(data)

    other = refusal(lambda: trainer(checkpoints="saved").fit(data, epochs=2, resume=True))
    fewer = refusal(lambda: trainer(module=one_layer, checkpoints="saved").fit(data, epochs=2, resume=True))

    assert "the optimizer, SGD, does not fit checkpoint " in other
    assert "amsgrad" in other
    assert "saved with groups of [4] parameters and has groups of [2]" in fewer
    assert trainer(optimizer="adamw", checkpoints="saved").fit(data, epochs=2, resume=True).steps == 2


# -- what a loader has already decided ---------------------------------------------------------------------------------


def test_a_batch_size_beside_a_loader_is_refused_unless_it_is_equal() -> None:
    loader = DataLoader(TensorDataset(*arrays(16)), batch_size=8)
    model = trainer()

    message = refusal(lambda: model.fit(loader, batch_size=4))

    assert message == "batch_size=4 has no effect on a DataLoader, whose batches have 8 rows; set it on the DataLoader"
    assert "set it on the Batches" in refusal(lambda: model.fit(Batches(), batch_size=4))
    assert model.fit(loader, batch_size=8).steps == model.fit(loader).steps == 2
    assert "batch_size=4 has no effect" in refusal(lambda: model.evaluate(loader, batch_size=4))
    assert "batch_size=4 has no effect" in refusal(lambda: model.predict(loader, batch_size=4))


def test_an_order_beside_a_loader_is_refused_unless_it_has_an_effect() -> None:
    data = TensorDataset(*arrays(16))

    assert "shuffle=True has no effect on a DataLoader" in refusal(
        lambda: trainer().fit(DataLoader(data, batch_size=8), shuffle=True)
    )
    assert "shuffle=False has no effect on a Batches" in refusal(lambda: trainer().fit(Batches(), shuffle=False))
    assert trainer().fit(DataLoader(data, batch_size=8, shuffle=True), shuffle=False).steps == 2


def test_the_default_batch_size_of_veloce_does_not_apply_to_a_loader() -> None:
    loader = DataLoader(TensorDataset(*arrays(16)), batch_size=8)

    rows = NeuralNetTrainer(network(), dataset=loader, loss_fn=nn.BCEWithLogitsLoss()).run()

    assert [row["step"] for row in rows] == [2.0]


# -- every argument ----------------------------------------------------------------------------------------------------

OF_TRAINER: list[tuple[str, Any, str]] = [
    ("module", 3, "module=3 is not an nn.Module"),
    ("module", nn.Linear, "pass Linear(…)"),
    ("loss", 3, "loss=3 is not callable"),
    ("loss", nn.MSELoss, "loss=MSELoss is a class; pass an instance"),
    ("optimizer", 3, "optimizer=3 is not an optimizer"),
    ("optimizer", "adm", "did you mean 'adam'"),
    ("optimizer", torch.optim.LBFGS, "LBFGS computes the loss several times in a step, but a Trainer computes it once"),
    ("metrics", 3, "metrics=3 is not a list"),
    ("metrics", "auc", "write metrics=["),
    ("metrics", ["acu"], "metric 'acu' is unknown"),
    ("metrics", [3], "metric 3 is neither a name"),
    ("strategy", 3, "strategy=3 is not a strategy"),
    ("strategy", AllReduce, "pass AllReduce(…)"),
    ("workers", True, "workers='True' is invalid; pass a number such as 4 or a range such as 2:8"),
    ("workers", 0, "workers=0 is invalid"),
    ("workers", -1, "workers=-1 is invalid"),
    ("workers", 1.5, "workers='1.5' is invalid"),
    ("workers", "two", "workers='two' is invalid"),
    ("workers", "3:2", "workers=3:2 is invalid"),
    ("workers", None, "workers='None' is invalid"),
    ("engine", "slurm", "engine='slurm' is unknown; use 'local' or 'ray'"),
    ("engine", None, "engine=None is unknown"),
    ("features", 3, "features= is a int; pass Features.fit"),
    ("optimizer_args", 3, "optimizer_args=3 must be a dict"),
    ("optimizer_args", {1: 2}, "optimizer_args={1: 2} must be a dict"),
    ("optimizer_args", {"lrr": 2}, "cannot be created with {'lrr': 2}"),
    ("callbacks", 3, "callbacks= has 3; use 'json'"),
    ("callbacks", "csv", "callbacks= has 'csv'"),
    ("callbacks", [JsonLogger], "pass an instance: JsonLogger()"),
    ("dashboard", 3, "dashboard=3 must be True, False or HOST:PORT"),
    ("dashboard", "8000", "dashboard='8000' is not an address"),
    ("dashboard", "0.0.0.0:80", "0.0.0.0:80 is not an address of this machine's loopback"),
    ("checkpoints", 3, "checkpoints=3 is not a directory or URL"),
    ("checkpoint_options", 3, "checkpoint_options=3 must be a dict"),
    ("checkpoint_options", {"keep_cuont": 1}, "did you mean keep_count=?"),
    ("checkpoint_options", {"every": 5}, "checkpoint_options= has 'every', which fit(every=…) sets"),
    ("checkpoint_options", {"strategy": 5}, "fit(every=…)"),
    ("checkpoint_options", {"keep_count": 0}, "keep_count=0 is invalid; use an integer of 1 or more"),
    ("checkpoint_options", {"saver": "pigeon"}, "saver='pigeon' is invalid"),
    ("name", 3, "name=3 is not a valid directory name"),
    ("name", "../up", "name='../up' is not a valid directory name"),
    ("name", "x" * 64, "use up to 63 letters"),
    ("max_restarts", -1, "max_restarts=-1 is not a number of restarts; use a whole number, 0 for none"),
    ("max_restarts", "3", "max_restarts='3' is not a number"),
    ("max_restarts", True, "max_restarts=True is not a number"),
    ("logs", "some", "logs='some' is not one of"),
    ("logs", None, "logs=None is not one of"),
    ("accumulate", 0, "accumulate=0 must be a whole number, at least 1"),
    ("accumulate", True, "accumulate=True must be a whole number"),
    ("clip_norm", 0, "clip_norm=0 must be a number above 0"),
    ("clip_norm", True, "clip_norm=True must be a number"),
    ("clip_value", math.nan, "clip_value=nan must be a number"),
    ("precision", "fp8", "precision='fp8' is unknown; use one of fp32"),
    ("compile", 3, "compile=3 must be True, False or a dict"),
    ("ema", 1, "ema=1 is the decay; it must be between 0 and 1"),
    ("ema", "0.9", "ema='0.9' is the decay"),
    ("scheduler", 3, "scheduler=3 is not a function of the optimizer"),
    ("scheduler_every", "batch", "scheduler_every='batch' is unknown"),
    ("class_weights", {0: "heavy"}, "is not a mapping from class numbers to weights"),
    ("class_weights", {0: -1.0}, "is not a mapping from class numbers to weights"),
    ("on_nan", "ignore", "on_nan='ignore' is unknown"),
    ("seed", -1, "seed=-1 must be a whole number"),
    ("seed", True, "seed=True must be a whole number"),
    ("deterministic", "yes", "deterministic='yes' must be True or False"),
    ("log_every", 0, "log_every=0 must be a whole number"),
]
OF_FIT: list[tuple[str, Any, str]] = [
    ("data", 3, "cannot train on a int"),
    ("data", (torch.zeros(0, 4), torch.zeros(0)), "the dataset has no rows"),
    ("label", 3, "label=3 must be the name of a column or several"),
    ("label", [], "label=[] must be the name of a column or several"),
    ("label", [3], "label=[3] must be the name of a column or several"),
    ("valid", 3, "cannot train on a int"),
    ("epochs", 0, "epochs=0 must be a whole number, at least 1"),
    ("epochs", True, "epochs=True must be a whole number"),
    ("batch_size", 0, "batch_size=0 must be a whole number"),
    ("batch_size", "8", "batch_size='8' must be a whole number"),
    ("inputs", 3, "inputs=3 must be the name of a column or several"),
    ("inputs", [], "inputs=[] must be the name of a column or several"),
    ("weight", 3, "weight=3 must be the name of a column"),
    ("shuffle", "no", "shuffle='no' must be True or False"),
    ("max_steps", 0, "max_steps=0 must be a whole number"),
    ("early_stopping", 0, "patience=0 must be a whole number, at least 1"),
    ("early_stopping", "3", "write early_stopping=3"),
    ("early_stopping", True, "write early_stopping=3"),
    ("monitor", 3, "monitor=3 must be a key of the history"),
    ("monitor", "auk", "monitor='auk' is unknown; use one of loss"),
    ("restore_best", "yes", "restore_best='yes' must be True, False or None"),
    ("resume", 1, "resume=1 must be True or False"),
    ("stream", True, "stream=True reads a directory or a prefix in a bucket"),
    ("idle_timeout_s", 5.0, "idle_timeout_s= is for streams; add stream=True, or leave it out"),
    ("every", 0, "every=0 is neither a number of steps nor a time; write 500, 90s, 10m or 1h"),
    ("every", True, "every=True is neither"),
    ("every", 1.5, "every=1.5 is neither"),
    ("every", "often", "every='often' is neither"),
    ("num_workers", -1, "a DataLoader cannot be created with {"),
    ("tail", "cut", "tail='cut' is unknown; use one of uneven"),
    ("bacth_size", 8, "bacth_size= is neither an argument of this method"),
]


def names(cases: list[tuple[str, Any, str]]) -> list[str]:
    return [f"{name}={value!r:.20}" for name, value, _ in cases]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "value", "message"), OF_TRAINER, ids=names(OF_TRAINER))
def test_a_wrong_argument_of_a_trainer_is_refused_before_anything_starts(
    name: str, value: Any, message: str, workers: int, tmp_path: Path
) -> None:
    with pytest.raises(StrataError) as caught:
        trainer(**{"workers": workers, name: value}).fit(arrays(8))

    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "value", "message"), OF_FIT, ids=names(OF_FIT))
def test_a_wrong_argument_of_fit_is_refused_before_anything_starts(
    name: str, value: Any, message: str, workers: int, tmp_path: Path
) -> None:
    with pytest.raises(StrataError) as caught:
        trainer(workers=workers).fit(**{"data": arrays(8), name: value})

    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_value_is_tried_for_every_argument() -> None:
    for function, cases in ((Trainer.__init__, OF_TRAINER), (Trainer.fit, OF_FIT)):
        arguments = inspect.signature(function).parameters.keys() - {"self", "data_options"}
        assert arguments <= {name for name, _, _ in cases}


def test_one_worker_may_be_given_as_text() -> None:
    result = trainer(workers="1").fit(arrays(8))

    assert result.steps == 1
    assert not Path("runs").exists()
