"""`Trainer.tune` with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import SearchSpace
from strata.errors import InvalidArgument
from strata.train import Trainer
from strata.trainer.callbacks import Callback

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def rows(seed: int, num: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x @ torch.tensor([1.0, -2.0, 0.5]) > 0).float()


def net(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))


def trainer(**changes: Any) -> Trainer:
    given: dict[str, Any] = {"module": net(4), "loss": nn.BCEWithLogitsLoss(), "optimizer": "adam", "metrics": ["auc"]}
    return Trainer(**given | changes)


class Noted(Callback):
    """Writes the step at which each process begins."""

    def __init__(self, path: str, kill_at: int = 0) -> None:
        self.path = path
        self.kill_at = kill_at
        self.first_step = 0

    def on_start(self, run: Any) -> None:
        self.first_step = run.step
        with Path(self.path).open("a") as file:
            file.write(f"{run.step}\n")

    def on_epoch(self, row: Any) -> None:
        if self.kill_at and row["epoch"] + 1 == self.kill_at and not self.first_step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_trainer_has_the_best_configuration_and_its_weights_afterwards() -> None:
    space = SearchSpace().add_float("lr", min=1e-4, max=0.1, log=True).add_int("batch_size", values=[32, 64])
    space.add_int("hidden", min=2, max=8)
    tuned = trainer()

    study = tuned.tune(
        space, rows(0), valid=rows(1), epochs=3, num_trials=4, workers=2, hpt_mode="random", metric="auc", module=net
    )

    assert study.is_complete
    assert [each.state for each in study.trials] == ["finished"] * 4
    assert study.best.values[0] == max(each.values[0] for each in study.trials)  # higher is better for an AUC
    assert [each.step for each in study.trials] == [3] * 4
    best = study.best.config
    assert tuned.optimizer_args == {"lr": best["lr"]}
    assert tuned.module[0].out_features == best["hidden"]  # type: ignore[index]
    assert tuned.evaluate(rows(1))["auc"] == pytest.approx(study.best.values[0])


def test_a_promoted_trial_continues_from_its_checkpoint(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    space = SearchSpace().add_float("lr", min=1e-4, max=0.1, log=True)

    study = trainer(callbacks=Noted(str(marks))).tune(
        space,
        rows(0),
        valid=rows(1),
        epochs=4,
        batch_size=64,
        num_trials=3,
        workers=1,
        hpt_mode="asha",
        options={"eta": 2, "min_step": 1},
    )

    assert study.best.step == 4
    starts = [int(line) for line in marks.read_text().split()]
    assert starts.count(0) == 3
    assert all(each >= 4 for each in starts if each)  # an epoch has 4 steps
    assert len(starts) > 3


def test_a_killed_trial_continues_from_its_checkpoint(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    space = SearchSpace().add_float("lr", min=1e-4, max=0.1, log=True)

    study = trainer(callbacks=Noted(str(marks), kill_at=3)).tune(
        space, rows(0), valid=rows(1), epochs=3, batch_size=64, num_trials=1, workers=1, hpt_mode="random"
    )

    first, *later = [int(line) for line in marks.read_text().split()]
    assert (first, len(later)) == (0, 1)
    assert later[0] >= 4
    assert study.best.step == 3


def test_mistakes_are_found_before_the_first_trial(runs: Path) -> None:
    lr = SearchSpace().add_float("lr", min=1e-4, max=0.1)

    with pytest.raises(InvalidArgument, match="did you mean 'lr'"):
        trainer().tune(SearchSpace().add_float("learning_rate", min=1e-4, max=0.1), rows(0), valid=rows(1))
    with pytest.raises(InvalidArgument, match="monitor='f2' is unknown"):
        trainer().tune(lr, rows(0), valid=rows(1), metric="f2")
    with pytest.raises(InvalidArgument, match="cannot be created with"):
        trainer().tune(SearchSpace().add_float("lr", min=-2, max=-1), rows(0), valid=rows(1))
    assert not runs.exists()
