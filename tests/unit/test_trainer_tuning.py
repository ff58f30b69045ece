"""Which argument of a Trainer a parameter of a search space sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strata import SearchSpace
from strata.errors import ConfigError, InvalidArgument
from strata.trainer.optimizer import LossFnStack
from strata.trainer.strategy import ParameterServer
from strata.trainer.trainer import Trainer
from strata.trainer.tuning import Tuning, resolve


def net(hidden: int = 4, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))


def trainer(**changes: Any) -> Trainer:
    given: dict[str, Any] = {"module": net(), "loss": nn.MSELoss(), "optimizer": "sgd", "optimizer_args": {"lr": 0.5}}
    return Trainer(**given | changes)


def tuning(of: Trainer, space: SearchSpace, factory: Any = None, **arguments: Any) -> Tuning:
    return Tuning.of(of, space, data=None, arguments=arguments, factory=factory)


def test_a_parameter_sets_the_argument_of_its_name() -> None:
    stack = LossFnStack(mse=nn.MSELoss(), mae=(nn.L1Loss(), 0.5))

    found = resolve(trainer(loss=stack), ["lr", "momentum", "batch_size", "clip_norm", "hidden", "mae"], net)

    assert found == {
        "lr": "optimizer",
        "momentum": "optimizer",
        "batch_size": "fit",
        "clip_norm": "trainer",
        "hidden": "module",
        "mae": "loss",
    }


@pytest.mark.parametrize(
    ("name", "factory", "cure"),
    [
        ("learning_rate", None, "did you mean 'lr'?"),
        ("momentun", None, "did you mean 'momentum'?"),
        ("hidden", None, "pass module= with a function to tune the arguments of the module"),
        ("hiden", net, "did you mean 'hidden'?"),
        ("depth", net, "module: hidden, dropout"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_cure(name: str, factory: Any, cure: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter '{name}' of the space") as caught:
        resolve(trainer(), [name], factory)

    assert cure in str(caught.value)


def test_a_name_with_two_meanings_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'lr' is an argument of the optimizer and of the module"):
        resolve(trainer(), ["lr"], lambda lr: net(int(lr)))


def test_an_optimizer_that_exists_has_no_arguments_to_tune() -> None:
    module = net()
    of = trainer(module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), optimizer_args=None)

    with pytest.raises(InvalidArgument, match="parameter 'lr' of the space"):
        resolve(of, ["lr"], None)


def test_a_configuration_becomes_a_trainer_and_leaves_the_original_as_it_is() -> None:
    of = trainer(loss=LossFnStack(mse=nn.MSELoss(), mae=(nn.L1Loss(), 0.5)))
    space = SearchSpace()
    for name in ("lr", "mae", "clip_norm", "dropout"):
        space.add_float(name, min=0.1, max=0.9)
    space.add_int("hidden", min=2, max=8).add_int("batch_size", values=[8, 16])
    made = tuning(of, space, net, epochs=3)
    config = {"lr": 0.2, "mae": 0.7, "clip_norm": 0.3, "dropout": 0.4, "hidden": 8, "batch_size": 16}

    tuned: Any = made.trainer_for(config)

    assert made.fit_arguments(config) == {"epochs": 3, "batch_size": 16}
    assert tuned.optimizer_args == {"lr": 0.2}
    assert tuned.settings.clip_norm == 0.3
    assert tuned.loss.weights == {"mse": 1.0, "mae": 0.7}
    assert (tuned.module[0].out_features, tuned.module[2].p) == (8, 0.4)
    assert of.optimizer_args == {"lr": 0.5}
    assert of.settings.clip_norm is None
    assert isinstance(of.loss, LossFnStack)
    assert of.loss.weights == {"mse": 1.0, "mae": 0.5}


def test_all_trials_start_from_the_same_weights() -> None:
    space = SearchSpace().add_float("lr", min=0.1, max=0.9)
    of = trainer()

    for factory in (None, net):
        made = tuning(of, space, factory)
        one, other = (made.trainer_for({"lr": lr}).module.state_dict() for lr in (0.1, 0.9))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "message"),
    [
        ({"workers": 2}, {}, ConfigError, "a trial starts with one worker .* pass max_workers_per_trial="),
        ({"strategy": ParameterServer(servers=2)}, {}, ConfigError, r"strategy=ParameterServer\(…\); leave it out"),
        ({}, {"resume": True}, InvalidArgument, "a trial resumes by itself"),
        ({}, {"monitor": "auc"}, InvalidArgument, "pass metric="),
        ({}, {"batch_size": 8}, InvalidArgument, "batch_size=8 is also a parameter of the space"),
    ],
)
def test_arguments_that_do_not_fit_tuning_are_refused(
    changes: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    space = SearchSpace().add_int("batch_size", values=[8, 16])

    with pytest.raises(error, match=message):
        tuning(trainer(**changes), space, **arguments)


def test_a_space_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="space has no parameters"):
        tuning(trainer(), SearchSpace())


def test_other_weights_of_a_loss_stack_are_a_copy_and_are_checked() -> None:
    stack = LossFnStack(mse=nn.MSELoss(), mae=(nn.L1Loss(), 0.5))

    assert stack.with_weights(mae=2.0).weights == {"mse": 1.0, "mae": 2.0}
    assert stack.weights == {"mse": 1.0, "mae": 0.5}
    with pytest.raises(InvalidArgument, match="weight=-1"):
        stack.with_weights(mae=-1)
    with pytest.raises(InvalidArgument, match="no loss 'huber'; it has mse, mae"):
        stack.with_weights(huber=1.0)
