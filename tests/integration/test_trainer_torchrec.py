"""A Trainer with torchrec: shards make the steps of one process, and checkpoints load on any number of workers."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import CheckpointManager, Trainer
from strata.servers.table.optimizers import RowWiseAdagrad
from strata.train import AllReduce, Hybrid, ParameterServer, TorchRec
from tests.integration.trainer_models import weights

pytestmark = pytest.mark.usefixtures("run_directory")

LOSS = nn.BCEWithLogitsLoss()
SHARDED = Hybrid(sparse=TorchRec(min_bytes=0))
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def models() -> Any:
    """Import torchrec when a test needs it; collecting tests does not."""
    return importlib.import_module("tests.integration.torchrec_models")


def fit(
    strategy: Any, *, workers: int = 2, optimizer: str = "adagrad", module: Any = None, epochs: int = 2, **more: Any
) -> Trainer:
    """Train with 32 rows per step on all workers together."""
    resume = more.pop("resume", False)
    chosen = OPTIMIZERS[optimizer]
    trainer = Trainer(module or models().Bags(), LOSS, chosen, strategy=strategy, workers=workers, logs="none", **more)
    trainer.fit(
        models().visits(203),
        label="clicked",
        valid=models().visits(61, seed=1),
        epochs=epochs,
        batch_size=32 // workers,
        resume=resume,
    )
    return trainer


def one_process(module: Any = None, **more: Any) -> list[float]:
    return weights(fit(AllReduce(), workers=1, module=module, **more).module)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_a_fit_resumes_on_one_worker_and_on_two_again(tmp_path: Path, optimizer: str) -> None:
    place = {"checkpoints": tmp_path / "saved", "optimizer": optimizer}
    fit(SHARDED, epochs=1, **place)
    fit(SHARDED, epochs=2, workers=1, resume=True, **place)
    module = models().Bags()
    fit(SHARDED, epochs=3, resume=True, module=module, **place)

    assert weights(module) == pytest.approx(one_process(epochs=3, optimizer=optimizer), abs=1e-6)
    with CheckpointManager(tmp_path / "saved") as manager:
        saved = manager.load(only=["trainer.strategy.tables.bags.*.user.weight.rows"])["trainer"]["strategy"]["tables"]
    (rows,) = [table["rows"] for table in saved.values() if "rows" in table]
    assert torch.equal(rows, module.bags.embedding_bags["user"].weight)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_makes_the_same_steps_on_shards_as_in_one_process(optimizer: str) -> None:
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    sharded = fit(SHARDED, optimizer=optimizer, scheduler=scheduler)

    assert weights(sharded.module) == pytest.approx(one_process(optimizer=optimizer, scheduler=scheduler), abs=1e-6)
    assert sharded.predict(models().visits(5)).shape == (5,)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("more", [{"accumulate": 2}, {"clip_value": 0.001}], ids=str)
def test_gradients_that_change_after_the_backward_pass_are_applied_afterwards(more: dict[str, Any]) -> None:
    assert weights(fit(SHARDED, **more).module) == pytest.approx(one_process(**more), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("arguments", [{"is_weighted": True}, {"mean": True}], ids=str)
def test_weighted_bags_make_the_same_steps_on_shards_and_all_bags_on_servers(arguments: dict[str, Any]) -> None:
    expected = one_process(models().Bags(**arguments))
    served = Hybrid(sparse=ParameterServer(min_bytes=0))
    for strategy in (served,) if "mean" in arguments else (served, SHARDED):
        assert weights(fit(strategy, module=models().Bags(**arguments)).module) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_embeddings_of_torch_with_padding_and_odd_widths_are_sharded_too() -> None:
    assert weights(fit(SHARDED, module=models().Tower()).module) == pytest.approx(
        one_process(models().Tower()), abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_row_wise_adagrad_gives_the_same_rows_on_shards_and_on_servers() -> None:
    optimizer = RowWiseAdagrad(lr=0.05)
    sharded = fit(Hybrid(sparse=TorchRec(min_bytes=0, optimizer=optimizer)))
    served = fit(Hybrid(sparse=ParameterServer(min_bytes=0, optimizer=optimizer)))

    assert weights(sharded.module) == pytest.approx(weights(served.module), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_plan_of_torchrec_decides_where_rows_and_columns_go() -> None:
    module = models().Bags()
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    of_bags = construct_module_sharding_plan(
        module.bags,
        {"user": column_wise(ranks=[1, 0], compute_kernel="fused"), "item": row_wise(compute_kernel="dense")},
        sharder=EmbeddingBagCollectionSharder(),
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    plan = ShardingPlan({"bags": of_bags})
    fit(Hybrid(sparse=TorchRec(plan=plan)), module=module)

    assert weights(module) == pytest.approx(one_process(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tables_without_values_start_with_the_same_rows_on_any_number_of_workers() -> None:
    one, two = models().Bags(device="meta"), models().Bags(device="meta")
    fit(SHARDED, module=one, workers=1, epochs=1)
    fit(SHARDED, module=two, workers=2, epochs=1)

    assert weights(one) == pytest.approx(weights(two), abs=1e-6)
