"""A Trainer with parameter servers at its edges: a slow worker, an empty batch, ids and gradients that are refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strata import Trainer
from strata.errors import RunFailed
from strata.servers.table.initial import Initial
from strata.train import AllReduce, Batch, Hybrid, ParameterServer
from tests.integration.trainer_models import Clicks, clicks, weights

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("run_directory")]
LOSS = nn.BCEWithLogitsLoss()
TABLES = ("user", "item")
BATCH = 16
DEADLINE_S = 90.0


def trainer_of(strategy: Any, *, kind: Any = Trainer, module: Any = None, workers: int = 2, **more: Any) -> Any:
    options: dict[str, Any] = {"optimizer_args": {"lr": 0.5}, "logs": "none", "max_restarts": 0, **more}
    return kind(module or Clicks(), LOSS, torch.optim.SGD, strategy=strategy, workers=workers, **options)


def fit(trainer: Trainer, data: dict[str, torch.Tensor]) -> Any:
    return trainer.fit(data, label="clicked", epochs=1, batch_size=BATCH)


# -- a slow worker -----------------------------------------------------------------------------------------------------


class SlowSecond(Trainer):
    """In each step, rank 1 waits until rank 0 is as far ahead as it may be, and records how far that is.

    Rank 0 counts a step once its rows have been pulled, so its count shows which pulls the servers have answered.
    """

    place = Path()
    staleness: int | None = 0
    steps = 0
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        loss = super().training_step(module, batch)
        self.calls += 1
        if os.environ["RANK"] == "0":
            (self.place / "written").write_text(str(self.calls))
            (self.place / "written").rename(self.place / "fast")
        else:
            allowed = self.steps if self.staleness is None else min(self.calls + self.staleness, self.steps)
            self._wait(allowed)
            with (self.place / "ahead").open("a") as file:
                file.write(json.dumps([self.calls, self._fast()]) + "\n")
        return loss

    def _fast(self) -> int:
        path = self.place / "fast"
        return int(path.read_text()) if path.exists() else 0

    def _wait(self, steps: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while self._fast() < steps:
            if time.monotonic() > end_s:
                raise TimeoutError(f"rank 0 has made {self._fast()} steps instead of {steps}")
            time.sleep(0.005)


@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), None]
)
def test_a_fast_worker_makes_as_many_steps_ahead_of_a_slow_one_as_the_staleness_allows(
    tmp_path: Path, staleness: int | None
) -> None:
    steps = 6
    trainer = trainer_of(ParameterServer(tables=TABLES, staleness=staleness), kind=SlowSecond)
    trainer.place, trainer.staleness, trainer.steps = tmp_path, staleness, steps

    result = fit(trainer, clicks(2 * BATCH * steps))

    assert result.steps == steps
    ahead = [json.loads(line) for line in (tmp_path / "ahead").read_text().splitlines()]
    most = steps if staleness is None else staleness
    assert ahead == [[slow, min(slow + most, steps)] for slow in range(1, steps + 1)]


# -- batches -----------------------------------------------------------------------------------------------------------


class WithRare(Clicks):
    """Looks up a third table for some rows only, so that a batch of a worker may have no id of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Embedding(300, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        is_rare = user < 2
        score = super().forward(user, item)
        return score.index_add(0, is_rare.nonzero()[:, 0], self.rare(user[is_rare]).squeeze(1))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ParameterServer(tables=("rare", *TABLES)), id="all on servers"),
        pytest.param(Hybrid(sparse=ParameterServer(servers=2, tables="rare")), id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_a_batch_without_ids_on_one_worker_changes_no_bit(strategy: Any) -> None:
    data = clicks(6 * BATCH)
    data["user"].clamp_(min=2)
    data["user"][5] = 1  # in one batch of one worker
    plain, served = trainer_of(AllReduce(), module=WithRare()), trainer_of(strategy, module=WithRare())
    before = plain.module.rare.weight[1].item()

    assert fit(plain, data).steps == fit(served, data).steps == 3

    assert served.module.rare.weight[1].item() != before
    assert weights(served.module) == weights(plain.module)


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ids_that_no_batch_has_contained_have_their_initial_values() -> None:
    initial = Initial(seed=5)
    module = Clicks(device="meta")
    data = clicks(2 * BATCH)
    trainer = trainer_of(Hybrid(sparse=ParameterServer(servers=2, tables=("user",), initial=initial)), module=module)
    fit(trainer, data)

    unseen = sorted(set(range(300)) - set(data["user"].tolist()))
    expected = initial.values(np.array(unseen, np.uint64), 8)
    assert module.user.weight[unseen].detach().numpy().tobytes() == expected.tobytes()
    seen = sorted(set(data["user"].tolist()))
    before = initial.values(np.array(seen, np.uint64), 8)
    assert (module.user.weight[seen].detach().numpy() != before).any(axis=1).all()
    some = {"user": torch.tensor(unseen[:4]), "item": torch.arange(4)}
    assert trainer.predict(some).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [-1, 300])
def test_an_id_outside_its_table_is_named_with_the_cure(wrong: int) -> None:
    data = clicks(2 * BATCH)
    data["user"][7] = wrong

    with pytest.raises(RunFailed, match=rf"id {wrong} is outside the table user\.weight.*0 to 299.*SparseFeat"):
        fit(trainer_of(ParameterServer(tables=TABLES)), data)


# -- gradients ---------------------------------------------------------------------------------------------------------


class NotFinite(Clicks):
    """The loss is finite, and the gradient of the row of user 7 is not: that of √x at 0 is infinite."""

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return super().forward(user, item) + (self.user(torch.tensor([7])) * 0).sqrt().sum()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, None])
def test_a_gradient_that_is_not_finite_is_refused_with_its_table_and_id(staleness: int | None) -> None:
    trainer = trainer_of(Hybrid(sparse=ParameterServer(tables=TABLES, staleness=staleness)), module=NotFinite())

    with pytest.raises(RunFailed, match=r"id 7 of table 'user\.weight'"):
        fit(trainer, clicks(4 * BATCH))
