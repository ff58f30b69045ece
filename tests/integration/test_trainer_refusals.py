"""A Trainer refuses what cannot work before the first step: the error names the cause and the cure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strata import Trainer
from strata.data.order.steps import Steps
from strata.errors import InvalidArgument, StrataError
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.train import AllReduce, JsonLogger, NeuralNetTrainer
from strata.trainer.diagnosis import single_rows_refused
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
