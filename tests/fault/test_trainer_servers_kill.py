"""A fit whose workers and parameter servers are killed ends with the weights and the history of an undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata.train import Batch, Hybrid, ParameterServer
from tests.integration.trainer_models import Clicks, Killed, UserCounts, clicks, weights, without_timings

pytestmark = pytest.mark.usefixtures("run_directory")

TABLES = ("user", "item")


def train(tmp_path: Path, strategy: Any, kills: tuple[tuple[int | str, int], ...], **arguments: Any) -> tuple[Any, Any]:
    module = Clicks(dropout=0.2)
    trainer = Killed(
        module,
        nn.BCEWithLogitsLoss(),
        torch.optim.Adagrad,
        ["auc"],
        strategy=strategy,
        workers=2,
        logs="none",
        max_restarts=5,
        **arguments,
    )
    trainer.kills, trainer.marks = kills, tmp_path
    result = trainer.fit(clicks(203), label="clicked", valid=clicks(61, seed=1), epochs=3, batch_size=16, every=3)
    return weights(module), without_timings(result.history)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        pytest.param(Hybrid(sparse=ParameterServer(servers=2, tables=TABLES)), {}, id="hybrid"),
        pytest.param(ParameterServer(tables=TABLES), {"accumulate": 2}, id="all on servers", marks=pytest.mark.slow),
    ],
)
def test_workers_and_servers_killed_change_neither_weights_nor_history(
    tmp_path: Path, strategy: Any, arguments: dict[str, Any]
) -> None:
    undisturbed = train(tmp_path, strategy, (), **arguments)

    killed = train(tmp_path, strategy, (("server", 5), (0, 7), ("server", 4)), **arguments)

    assert len(list(tmp_path.glob("killed-*"))) == 3
    assert killed == undisturbed


NUM_ROWS, EPOCHS, BATCH = 192, 3, 8


class Prefetching(Killed):
    """Leaves a mark if rows of a later batch are on their way."""

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        lookup: Any = self.module.user
        if any(each.keys for each in lookup._rows._prefetch._following):
            (self.marks / "prefetched").touch()
        return super().training_step(module, batch)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_row_is_trained_once_per_epoch_though_batches_are_prefetched_and_processes_killed(tmp_path: Path) -> None:
    module = UserCounts(NUM_ROWS)
    trainer = Prefetching(
        module,
        lambda output, _: output.mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        strategy=Hybrid(sparse=ParameterServer(servers=2, tables="user", staleness=2, prefetch=2)),
        workers=2,
        logs="none",
        max_restarts=5,
    )
    trainer.kills, trainer.marks = (("server", 8), (0, 17), (0, 6)), tmp_path
    trainer.fit(
        {"user": torch.arange(NUM_ROWS), "clicked": torch.zeros(NUM_ROWS)},
        label="clicked",
        epochs=EPOCHS,
        batch_size=BATCH,
        every=5,
    )

    assert len(list(tmp_path.glob("killed-*"))) == 3
    assert (tmp_path / "prefetched").exists()
    assert module.user.weight.unique().tolist() == [-EPOCHS / BATCH]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_asynchronous_servers_survive_the_loss_of_any_process(tmp_path: Path) -> None:
    strategy = ParameterServer(servers=2, tables=TABLES, staleness=None)

    found, history = train(tmp_path, strategy, (("server", 5), (0, 7)))

    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert len(history) == 3
    assert all(map(torch.isfinite, map(torch.tensor, found)))
