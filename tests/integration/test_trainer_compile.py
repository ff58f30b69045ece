"""A Trainer with `compile`: the same training, and checkpoints and exports without a trace of the compiler."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from strata import Trainer
from strata.checkpoint import CheckpointManager
from strata.errors import InvalidArgument
from strata.launch.record.directory import DIRECTORY_VARIABLE
from tests.integration.trainer_models import arrays, network, weights

LOSS = nn.BCEWithLogitsLoss()
EAGER = types.MappingProxyType({"backend": "aot_eager"})
"""Traces the module and its gradient, without the minute that generating code takes."""


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
    torch.compiler.reset()


class OwnModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def trained(workers: int = 1, make: Callable[[], nn.Module] = network, **arguments: Any) -> tuple[Trainer, float]:
    """Train two epochs, whose last batches are smaller; return the Trainer and the last loss."""
    trainer = Trainer(make(), LOSS, torch.optim.Adam, ["auc"], workers=workers, logs="none", **arguments)
    result = trainer.fit(arrays(100), valid=arrays(40, seed=1), epochs=2, batch_size=16 // workers)
    return trainer, result.history[-1]["valid_loss"]


@pytest.mark.parametrize("make", [OwnModule, network])
def test_a_compiled_module_trains_alike_and_keeps_its_names(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    calls: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(graph)
        return graph

    plain, plain_loss = trained(make=make)
    compiled, compiled_loss = trained(make=make, compile={"backend": backend}, checkpoints=tmp_path / "saved")

    assert calls, "the backend was used"
    assert compiled_loss == pytest.approx(plain_loss, abs=1e-6)
    assert weights(compiled.module) == pytest.approx(weights(plain.module), abs=1e-6)
    assert compiled.module.state_dict().keys() == make().state_dict().keys()
    into = {"module": make()}
    with CheckpointManager(tmp_path / "saved") as manager:
        manager.restore(into)
    assert weights(into["module"]) == weights(compiled.module)


@pytest.mark.parametrize("is_first_compiled", [True, False])
def test_a_fit_resumes_between_compiled_and_plain(is_first_compiled: bool) -> None:
    data, moved = arrays(100), network()
    whole, _ = trained()
    first, second = (EAGER, False) if is_first_compiled else (False, EAGER)

    Trainer(moved, LOSS, torch.optim.Adam, compile=first).fit(data, epochs=2, batch_size=16, max_steps=5)
    again = network(seed=1)
    result = Trainer(again, LOSS, torch.optim.Adam, compile=second).fit(data, epochs=2, batch_size=16, resume=True)

    assert result.steps == 14
    assert weights(again) == pytest.approx(weights(whole.module), abs=1e-6)


def test_a_compiled_module_is_exported_with_its_program() -> None:
    trainer, _ = trained(compile=EAGER)
    x, _ = arrays(7, seed=2)

    directory = trainer.export("model")

    assert json.loads((directory / "model.json").read_text())["has_program"]
    assert load_file(directory / "model.safetensors").keys() == network().state_dict().keys()
    program = torch.export.load(directory / "model.pt2").module()
    torch.testing.assert_close(program(x), trainer.predict(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arguments", [{"backend": "unknown"}, {"unknown": 1}])
def test_arguments_that_torch_refuses_are_shown(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"compile=.* is refused by torch.compile: .*unknown"):
        trained(compile=arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # when inductor is imported
@pytest.mark.parametrize("workers", [1, 2])
def test_the_code_of_inductor_trains_to_the_same_loss(workers: int) -> None:
    _, plain_loss = trained()

    trainer, compiled_loss = trained(workers, compile=True)

    assert compiled_loss == pytest.approx(plain_loss, abs=1e-5)
    assert json.loads((trainer.export("model") / "model.json").read_text())["has_program"]
