"""A Trainer with parameter servers: the same steps as without, the same checkpoints on any number of processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import StructuredDataset, Trainer
from strata.errors import ConfigError, InvalidArgument, RunFailed
from strata.launch.record.directory import all_runs
from strata.servers.table.optimizers import RowWiseAdagrad
from strata.train import (
    FTRL,
    AllReduce,
    Arch,
    HeterogeneousStrategy,
    Hybrid,
    OptimizerStack,
    ParameterServer,
    PSStrategy,
    UpdateStrategy,
)
from strata.trainer import serving
from strata.trainer.lookahead import LookAhead
from strata.trainer.strategy import ServerStrategy
from tests.integration.trainer_models import Clicks, clicks, weights, write_parquet

pytestmark = pytest.mark.usefixtures("run_directory")

LOSS = nn.BCEWithLogitsLoss()
TABLES = ("user", "item")
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "ftrl": partial(FTRL, lr=0.1, l1=0.001),
    "stack": OptimizerStack({"user": partial(torch.optim.Adagrad, lr=0.1), "*": partial(torch.optim.SGD, lr=0.1)}),
}


def trainer_of(strategy: Any, *, workers: int = 2, optimizer: Any = "sgd", module: Any = None, **more: Any) -> Trainer:
    chosen = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
    return Trainer(module or Clicks(), LOSS, chosen, ["auc"], strategy=strategy, workers=workers, logs="none", **more)


def fit(trainer: Trainer, *, batch_size: int = 16, **more: Any) -> Any:
    options = {"epochs": 2, "valid": clicks(90, seed=1), **more}
    return trainer.fit(clicks(203), label="clicked", batch_size=batch_size, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Hybrid(sparse=ParameterServer(servers=2, tables=TABLES)), id="hybrid"),
        pytest.param(ParameterServer(tables=("user",)), id="all on servers", marks=pytest.mark.slow),
    ],
)
def test_synchronous_servers_end_with_the_bits_of_all_reduce(strategy: Any) -> None:
    plain, served = trainer_of(AllReduce()), trainer_of(strategy)
    expected, found = fit(plain), fit(served)

    assert weights(served.module) == weights(plain.module)
    assert [row["valid_auc"] for row in found.history] == [row["valid_auc"] for row in expected.history]
    assert served.predict(clicks(5)).tolist() == plain.predict(clicks(5)).tolist()
    num_rows = sum(spec.max_rows for part in planned_of(served).parts for spec in part.tables)
    assert sum(each["rows"] for each in found.servers) == num_rows
    assert all(each["bytes"] > 0 and each.keys() == {"rows", "bytes", "evicted"} for each in found.servers)
    status = all_runs().found[0].status
    assert status is not None
    assert (status.world_size, status.num_servers) == (2 + len(found.servers), len(found.servers))
    assert expected.servers == []


def planned_of(trainer: Trainer) -> serving.Plan:
    assert isinstance(trainer.strategy, ServerStrategy)
    return serving.plan(trainer.strategy, trainer.module, torch.optim.SGD(trainer.module.parameters(), lr=0.5))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_makes_the_same_steps_on_servers_as_in_one_process(optimizer: str) -> None:
    alone = trainer_of(AllReduce(), workers=1, optimizer=optimizer)
    fit(alone, batch_size=32)
    for strategy in (Hybrid(sparse=ParameterServer(tables=TABLES)), ParameterServer(tables=TABLES)):
        served = trainer_of(strategy, optimizer=optimizer)
        fit(served)

        assert weights(served.module) == pytest.approx(weights(alone.module), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adam_on_servers_is_the_lazy_adam_of_torch() -> None:
    module = Clicks()
    for each in (module.user, module.item):
        each.sparse = True
    stack = OptimizerStack({"user": torch.optim.SparseAdam, "item": torch.optim.SparseAdam, "*": torch.optim.Adam})
    alone = trainer_of(AllReduce(), workers=1, optimizer=stack, module=module)
    fit(alone, batch_size=32)

    served = trainer_of(ParameterServer(tables=TABLES), optimizer=stack)
    fit(served)

    assert weights(served.module) == pytest.approx(weights(alone.module), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_schedule_on_the_workers_changes_the_learning_rate_of_the_servers() -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    found = []
    for strategy in (AllReduce(), ParameterServer(tables=TABLES)):
        trainer = trainer_of(strategy, scheduler=schedule)
        fit(trainer)
        found.append(weights(trainer.module))

    assert found[0] == found[1]


def test_a_table_with_its_own_optimizer_follows_the_schedule_from_its_own_rate() -> None:
    module = Clicks()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    strategy = ParameterServer(tables=TABLES, optimizer=RowWiseAdagrad(lr=0.1))
    planned = serving.plan(strategy, module, optimizer)

    assert planned.rates() == {"user.weight": 0.1, "item.weight": 0.1, "dense.0": 0.5}
    optimizer.param_groups[0]["lr"] = 0.25
    assert planned.rates() == {"user.weight": 0.05, "item.weight": 0.05, "dense.0": 0.25}


def test_a_module_without_values_is_refused_until_it_is_trained() -> None:
    trainer = trainer_of(Hybrid(sparse=ParameterServer(tables="user")), module=Clicks(device="meta"))
    for call in (trainer.predict, partial(trainer.evaluate, label="clicked")):
        with pytest.raises((InvalidArgument, RunFailed), match=r"user\.weight has no values in this process"):
            call(clicks(8))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_other_numbers_of_servers_and_workers_resume_a_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    whole = trainer_of(ParameterServer(tables=TABLES), workers=1, optimizer="adagrad")
    fit(whole, batch_size=32, epochs=3)

    first = trainer_of(ParameterServer(servers=1, tables=TABLES), workers=2, optimizer="adagrad", checkpoints=place)
    fit(first, epochs=1)
    second = trainer_of(ParameterServer(servers=3, tables=TABLES), workers=1, optimizer="adagrad", checkpoints=place)
    fit(second, batch_size=32, epochs=2, resume=True)
    third = trainer_of(ParameterServer(servers=2, tables=TABLES), workers=2, optimizer="adagrad", checkpoints=place)
    result = fit(third, epochs=3, resume=True)

    assert len(result.history) == 3
    assert weights(third.module) == pytest.approx(weights(whole.module), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_frozen_table_on_servers_is_saved_once_and_resumes_with_the_bits_of_one_process(tmp_path: Path) -> None:
    def with_frozen_users() -> Clicks:
        module = Clicks()
        module.user.requires_grad_(False)
        return module

    plain = trainer_of(AllReduce(), workers=1, optimizer="adagrad", module=with_frozen_users())
    fit(plain, epochs=2)

    place = tmp_path / "checkpoints"
    for epochs, servers in ((1, 1), (2, 2)):
        strategy = Hybrid(sparse=ParameterServer(servers=servers, tables=TABLES))
        served = trainer_of(strategy, workers=1, optimizer="adagrad", module=with_frozen_users(), checkpoints=place)
        result = fit(served, epochs=epochs, every=5, resume=epochs > 1)
    assert weights(served.module) == weights(plain.module)
    assert not served.module.user.weight.requires_grad
    assert sum(each["rows"] for each in result.servers) == 300 + 100
    assert (served.export(tmp_path / "model") / "predict.py").exists()

    manifests = [json.loads(path.read_text())["manifest"] for path in sorted(place.glob("*/manifest.json"))]
    deltas = [each for each in manifests if each["type"] == "INCREMENTAL"]
    changed = {
        tensor["name"]
        for manifest in deltas
        for tensor in manifest["tensors"]
        for piece in tensor["slices"]
        if piece.get("patches") or "/" not in manifest["files"][piece["file"]]["path"]
    }
    assert any("item.weight" in name for name in changed)
    assert not any("user.weight" in name for name in changed), "frozen rows are in full checkpoints only"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("staleness", [None, 2])
def test_workers_that_do_not_wait_for_each_other_learn_too(staleness: int | None) -> None:
    trainer = trainer_of(
        Hybrid(dense=ParameterServer(staleness=None), sparse=ParameterServer(tables=TABLES, staleness=staleness)),
        optimizer=partial(torch.optim.Adagrad, lr=0.2),
    )
    result = fit(trainer, epochs=4, every=5)

    assert result.history[-1]["loss"] < 0.9 * result.history[0]["loss"]
    assert trainer.evaluate(clicks(203))["auc"] > 0.7
    assert trainer.predict(clicks(203)).shape == (203,)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_table_without_values_gets_its_rows_on_the_servers(tmp_path: Path) -> None:
    module = Clicks(device="meta")
    strategy = Hybrid(sparse=ParameterServer(servers=2, tables=("user",), optimizer=RowWiseAdagrad(lr=0.1)))
    trainer = trainer_of(strategy, module=module)

    fit(trainer)

    assert not module.user.weight.is_meta
    assert module.user.weight.std() > 0.01, "rows have been trained"
    exported = trainer.export(tmp_path / "model")
    assert (exported / "predict.py").exists()


@pytest.mark.timeout(60)
def test_what_cannot_work_with_servers_is_refused_before_workers_start() -> None:
    strategy = ParameterServer(tables=TABLES)
    for more, reason in (
        ({"clip_norm": 1.0}, "clip_value"),
        ({"ema": 0.9}, "not averaged"),
        ({"on_nan": "skip"}, "use 'raise'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            fit(trainer_of(strategy, **more))
    with pytest.raises(InvalidArgument, match=r"momentum=0\.9.*user\.weight.*OptimizerStack"):
        fit(trainer_of(strategy, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)))
    with pytest.raises(InvalidArgument, match="RMSprop cannot update"):
        fit(trainer_of(strategy, optimizer=torch.optim.RMSprop))
    with pytest.raises(InvalidArgument, match=r"no embedding has 1048576 bytes"):
        fit(trainer_of(Hybrid()))
    with pytest.raises(InvalidArgument, match=r"user\.weight has no values"):
        fit(trainer_of(AllReduce(), module=Clicks(device="meta")))
    huge = Clicks(num_users=1 << 33, device="meta")
    huge.user.weight = nn.Parameter(torch.empty(1, 8).expand(1 << 33, 8))
    with pytest.raises(ConfigError, match=r"user\.weight: [\d,]+\), and this machine has"):
        fit(trainer_of(strategy, module=huge))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_gradient_that_is_not_finite_is_refused_by_name() -> None:
    module = Clicks()
    with torch.no_grad():
        module.top[0].weight.fill_(float("inf"))
    with pytest.raises(RunFailed, match=r"not finite|the loss is"):
        fit(trainer_of(ParameterServer(tables=TABLES), module=module, max_restarts=0))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"servers": 0}, "servers=0 is not a whole number, from 1 to 1024"),
        ({"staleness": -1}, "staleness=-1"),
        ({"optimizer": torch.optim.SGD}, "not an optimizer of rows"),
        ({"min_bytes": 1.5}, r"min_bytes=1\.5"),
        ({"wire": "fp8"}, "use 'fp32' or 'fp16'"),
        ({"prefetch": -1}, "prefetch=-1 is not a whole number, from 0 to 64"),
    ],
)
def test_settings_of_servers_are_checked_when_they_are_made(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        ParameterServer(**arguments)


@pytest.mark.parametrize(("staleness", "expected"), [(0, 0), (1, 1), (2, 2), (9, 3), (None, 3)])
def test_prefetching_spends_staleness(staleness: int | None, expected: int) -> None:
    strategy = ParameterServer(staleness=staleness, prefetch=3)
    assert (strategy.num_ahead, strategy.num_dense_ahead) == (expected, expected)
    default = ParameterServer(staleness=staleness)
    assert (default.num_ahead, default.num_dense_ahead) == (min(expected, 1), 0), "dense parameters are current"


def test_batches_of_files_are_seen_ahead_without_moving_the_position(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data", rows=230)
    loaders = [StructuredDataset.create_dataloader(str(path), batch_size=16, shuffle=True)[0] for _ in range(2)]
    plain, ours = loaders[0], LookAhead(loaders[1])
    for epoch in range(2):
        batches = iter(ours)
        for expected in plain:
            following = batches.upcoming(2)
            assert torch.equal(following[0]["key"], expected["key"])
            assert torch.equal(next(batches)["key"], expected["key"])
            assert (ours.position, ours.state_dict()) == (plain.position, plain.state_dict())
        assert next(batches, None) is None
        assert ours.position == plain.position == (epoch, 230)


def test_the_architectures_of_veloce_are_strategies() -> None:
    asynchronous = ParameterServer(staleness=None)
    for given, expected in (
        (PSStrategy(), ParameterServer()),
        (PSStrategy(UpdateStrategy.Async), asynchronous),
        (HeterogeneousStrategy(sparse_arch=Arch.PS, sparse_update_strategy="async"), Hybrid(sparse=asynchronous)),
        (HeterogeneousStrategy(), AllReduce()),
    ):
        assert given.strategy() == expected
    with pytest.raises(ConfigError, match=r"Arch\.RingAllreduce is synchronous"):
        HeterogeneousStrategy(dense_update_strategy=UpdateStrategy.Async).strategy()
    with pytest.raises(ConfigError, match=r"use Arch\.PS for the sparse part"):
        HeterogeneousStrategy(dense_arch=Arch.PS).strategy()
