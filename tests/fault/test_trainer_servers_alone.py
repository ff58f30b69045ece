"""In an asynchronous run, a process that is killed restarts alone: the others continue, and every row counts once."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import Trainer
from strata.launch.environment import ALONE, MAY_RESTART_ALONE
from strata.launch.record.directory import open_run
from strata.launch.record.recovery import recoveries
from strata.train import Batch, ParameterServer
from tests.integration import servers
from tests.integration.trainer_models import pid_of_server

pytestmark = pytest.mark.usefixtures("run_directory")

NUM_USERS, BATCH_SIZE, EPOCHS = 160, 4, 2
until = partial(servers.until, deadline_s=120.0)
"""A process restarts in seconds, unless the machine is busy."""


class Counts(nn.Module):
    """Its weights count: with SGD and a sum as the loss, each row lowers its user and the bias by one."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(NUM_USERS, 4)
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.user.weight)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.user(user)[:, 0] + self.bias


class Killed(Trainer):
    """Some ranks kill themselves in some of their steps. With `is_paced`, the other rank waits for the kill, and the
    killed one returns once the other has made more steps.
    """

    marks = Path()
    kills: tuple[tuple[int, int], ...] = ()
    """(rank, number of the call in its process)"""
    server_kills: tuple[int, ...] = ()
    """Calls of rank 0 in which it kills the last server."""
    is_paced = True
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        rank = int(os.environ["RANK"])
        self.calls += 1
        if self.is_paced:
            self._keep_pace(rank)
        with (self.marks / f"steps-{rank}").open("ab") as steps:
            steps.write(b".")
        for victim, call in self.kills:
            mark = self.marks / f"killed-{victim}-{call}"
            if rank == victim and self.calls == call and not mark.exists():
                mark.touch()
                (self.marks / f"killed-{rank}").write_text(str(self._num_steps(1 - rank)))
                os.kill(os.getpid(), signal.SIGKILL)
        for call in self.server_kills:
            mark = self.marks / f"killed-server-{call}"
            if rank == 0 and self.calls == call and not mark.exists():
                mark.touch()
                until(may_restart_alone, "the server takes part in nothing collective")
                os.kill(pid_of_server(self.module), signal.SIGKILL)
        return super().training_step(module, batch)

    def _num_steps(self, rank: int) -> int:
        file = self.marks / f"steps-{rank}"
        return file.stat().st_size if file.exists() else 0

    def _keep_pace(self, rank: int) -> None:
        other = 1 - rank
        for victim, call in self.kills:
            if victim == other and self._num_steps(rank) == call - 2:
                until((self.marks / f"killed-{victim}-{call}").exists, "the other worker has been killed")
        killed = self.marks / f"killed-{rank}"
        if self.calls == 1 and killed.exists():
            before = int(killed.read_text())
            until(lambda: self._num_steps(other) >= before + 2, "the other worker has made steps meanwhile")
            (self.marks / f"continued-{other}").touch()


def may_restart_alone() -> bool:
    """Return what the last server has declared."""
    return Path(os.environ[ALONE]).with_name("rank-3.alone").read_bytes() == MAY_RESTART_ALONE


def sum_of(predicted: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return predicted.sum()


def train(
    tmp_path: Path,
    kills: tuple[tuple[int, int], ...],
    *,
    server_kills: tuple[int, ...] = (),
    is_paced: bool = True,
    replicas: int = 0,
    **arguments: Any,
) -> tuple[Counts, Any, list[Any]]:
    module = Counts()
    strategy = ParameterServer(servers=2, tables="user", staleness=None, replicas=replicas)
    trainer = Killed(
        module,
        sum_of,
        torch.optim.SGD,
        strategy=strategy,
        optimizer_args={"lr": 1.0},
        workers=2,
        logs="none",
        name="counts",
        max_restarts=5,
    )
    trainer.kills, trainer.marks, trainer.is_paced = kills, tmp_path, is_paced
    trainer.server_kills = server_kills
    data = {"user": torch.arange(NUM_USERS), "target": torch.zeros(NUM_USERS)}
    result = trainer.fit(data, label="target", epochs=EPOCHS, batch_size=BATCH_SIZE, **arguments)
    return module, result, open_run("counts").events()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_worker_restarts_alone_and_every_row_is_trained_once(tmp_path: Path) -> None:
    module, result, events = train(tmp_path, ((1, 5), (0, 25)), every=1_000)

    assert len(list(tmp_path.glob("killed-*-*"))) == 2
    assert len(list(tmp_path.glob("continued-*"))) == 2, "the other worker made steps while one was away"
    assert [event.rank for event in events if event.what == "restarted"] == [1, 0]
    recovered = recoveries(events)
    assert [(each.rank, each.failed_attempt, each.attempt) for each in recovered] == [(1, 0, 0), (0, 0, 0)]
    assert recovered[0].took_s is not None, "the run goes on for long after its first step"
    assert all(each.took_s is None or each.took_s > 0 for each in recovered)
    assert {event.attempt for event in events} == {0}
    require_each_row_once(module)
    assert len(result.history) == EPOCHS
    assert result.steps == EPOCHS * NUM_USERS // 2 // BATCH_SIZE


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_killed_between_checkpoints_and_during_them_train_every_row_once(tmp_path: Path) -> None:
    module, result, _ = train(tmp_path, ((1, 4), (0, 8), (1, 11), (0, 3), (1, 2)), is_paced=False, every=3)

    assert len(list(tmp_path.glob("killed-*-*"))) == 5
    require_each_row_once(module)
    assert len(result.history) == EPOCHS


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_server_restarts_alone_and_reports_the_updates_that_it_has_lost(tmp_path: Path) -> None:
    module, result, events = train(tmp_path, (), server_kills=(6, 8, 26), every=1_000)

    assert len(list(tmp_path.glob("killed-server-*"))) == 3
    assert [event.rank for event in events if event.what == "restarted"] == [3, 3, 3]
    assert {event.attempt for event in events} == {0}
    assert result.lost_updates > 0
    logged = "".join(log.path.read_text() for log in open_run("counts").logs() if log.rank == 3)
    assert "updates of the workers are lost" in logged
    counts = -module.user.weight[:, 0]
    missing = EPOCHS * NUM_USERS - counts.sum().item()
    assert counts.min() >= 0
    assert counts.max() <= EPOCHS, "no push was applied twice"
    assert 0 < missing <= result.lost_updates * BATCH_SIZE
    assert len(result.history) == EPOCHS


@pytest.mark.timeout(180)
def test_a_killed_worker_and_a_server_with_a_copy_restart_alone_and_no_update_is_lost(tmp_path: Path) -> None:
    module, result, events = train(tmp_path, ((1, 30),), server_kills=(6, 12), replicas=1, every=1_000)

    assert len(list(tmp_path.glob("killed-server-*"))) == 2
    assert (tmp_path / "continued-0").exists(), "the other worker made steps while one was away"
    assert sorted(event.rank or 0 for event in events if event.what == "restarted") == [1, 3, 3]
    assert {event.attempt for event in events} == {0}
    assert result.lost_updates == 0
    require_each_row_once(module)


def require_each_row_once(module: Counts) -> None:
    assert module.user.weight[:, 0].tolist() == [-float(EPOCHS)] * NUM_USERS
    assert module.bias.item() == -EPOCHS * NUM_USERS
