"""Parameter servers are added and removed while a fit trains; its result is that of an undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from strata import Trainer
from strata.errors import ConfigError
from strata.launch import control
from strata.launch.record.directory import DIRECTORY_VARIABLE, all_runs, open_run
from strata.train import Batch, Hybrid, ParameterServer
from strata.trainer.history import TIMINGS
from tests.fault.test_trainer_servers_kill import pid_of_server
from tests.integration.trainer_models import Clicks, clicks, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TABLES = ("user", "item")
WAIT_S = 240.0


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


class Scaled(Trainer):
    """Rank 0 asks for other numbers of servers in some of its steps, and kills a server in another."""

    numbers: Mapping[int, int] = MappingProxyType({})
    """Servers, by the call in the first attempt in which they are asked for."""
    kill_at = 0
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        ctx = self.context
        if ctx is not None and ctx.rank == 0 and ctx.attempt == 0:
            if self.calls in self.numbers:
                layout = ctx.layout
                until(lambda: accepted(control.Scale(servers=self.numbers[self.calls])))
                # Steps go on only once the workers have been asked to change over, so that they do before the end.
                until(lambda: ctx._agreement._limit is not None or ctx._agreement._due or ctx.layout > layout)
            if self.calls == self.kill_at:
                os.kill(pid_of_server(self.module), signal.SIGKILL)
        return super().training_step(module, batch)


def accepted(request: control.Request) -> bool:
    """Ask the agent, which refuses as long as it has not seen the first step or the end of the last change."""
    status = open_run(os.environ["STRATA_RUN"]).status
    assert status is not None
    try:
        control.ask(status.control, request)
    except ConfigError as error:
        if "try again" in str(error) or "first step" in str(error):
            return False
        raise
    return True


def until(is_true: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def train(strategy: Any, numbers: dict[int, int], *, kill_at: int = 0, **arguments: Any) -> tuple[Any, Any]:
    module = Clicks(dropout=0.2)
    trainer = Scaled(
        module,
        nn.BCEWithLogitsLoss(),
        torch.optim.Adam,
        ["auc"],
        strategy=strategy,
        workers=2,
        logs="none",
        max_restarts=2,
        scheduler=None,
        **arguments,
    )
    trainer.numbers, trainer.kill_at = numbers, kill_at
    result = trainer.fit(clicks(203), label="clicked", valid=clicks(61, seed=1), epochs=4, batch_size=16, every=3)
    return weights(module), [{k: v for k, v in row.items() if k not in TIMINGS} for row in result.history]


def events() -> list[str]:
    """Return what the timeline of the last run says about numbers of servers."""
    run = max(all_runs().found, key=lambda each: each.created_at_s)
    return [each.text for each in run.events() if each.what in ("scaling", "started", "failed")]


@pytest.mark.timeout(600)
def test_servers_added_and_removed_while_training_change_no_bit_and_move_no_row_in_vain() -> None:
    strategy = Hybrid(sparse=ParameterServer(servers=1, tables=TABLES))
    undisturbed = train(strategy, {})

    scaled = train(strategy, {3: 2, 12: 1})

    print(events())
    assert scaled == undisturbed
