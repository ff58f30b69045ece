"""Parameter servers are added and removed while a fit trains; its result is that of an undisturbed one."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from strata import Trainer
from strata.coordinator.state import ring
from strata.errors import ConfigError
from strata.launch import control
from strata.launch.record.directory import all_runs, open_run
from strata.servers.table.keys import NUM_BUCKETS
from strata.train import Batch, Hybrid, ParameterServer
from tests.integration import servers
from tests.integration.trainer_models import Clicks, UserCounts, clicks, pid_of_server, weights, without_timings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.train import Context

pytestmark = pytest.mark.usefixtures("run_directory")

TABLES = ("user", "item")
NUM_ROWS, EPOCHS, BATCH = 192, 3, 8
until = partial(servers.until, deadline_s=240.0)


class Scaled(Trainer):
    """Rank 0 asks for other numbers of servers in some of its steps."""

    numbers: Mapping[int, int] = MappingProxyType({})
    """Servers, by the call in the first attempt in which they are asked for."""
    is_killing = False
    """Whether rank 0 kills the last server as soon as it uses the new ones."""
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        ctx = self.context
        if ctx is not None and ctx.rank == 0 and ctx.attempt == 0:
            if self.calls in self.numbers:
                layout = ctx.layout
                until(lambda: accepted(control.Scale(servers=self.numbers[self.calls])), "the agent accepts")
                # Steps go on only once the workers have been asked to change over, so that they do before the end.
                until(lambda: is_asked(ctx) or ctx.layout > layout, "the workers are asked")
            if self.is_killing and ctx.layout:
                os.kill(pid_of_server(self.module), signal.SIGKILL)
        return super().training_step(module, batch)


def is_asked(ctx: Context) -> bool:
    return ctx._agreement._limit is not None or bool(ctx._agreement._due)


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


def train(strategy: Any, numbers: Mapping[int, int], *, is_killing: bool = False) -> tuple[Any, Any]:
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
    )
    trainer.numbers, trainer.is_killing = numbers, is_killing
    result = trainer.fit(clicks(203), label="clicked", valid=clicks(61, seed=1), epochs=4, batch_size=16, every=3)
    return weights(module), without_timings(result.history)


def events(*kinds: str) -> list[str]:
    """Return what the timeline of the last run says."""
    run = max(all_runs().found, key=lambda each: each.created_at_s)
    return [each.text for each in run.events() if each.what in kinds]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_servers_added_and_removed_while_training_change_no_bit_and_move_no_row_in_vain() -> None:
    strategy = Hybrid(sparse=ParameterServer(servers=1, tables=TABLES))
    undisturbed = train(strategy, {})

    scaled = train(strategy, {3: 2, 12: 1})

    assert scaled == undisturbed
    assert events("started") == ["attempt 0 with 2 workers and 1 server"]
    found = [re.fullmatch(r"2 workers and (\d) servers?; (\d+) rows have moved", each) for each in events("scaling")]
    (first, num_added), (second, num_removed) = (map(int, each.groups()) for each in found if each is not None)
    assert (first, second) == (2, 1)
    module = Clicks()
    lo, hi = ring.load_bounds(NUM_BUCKETS, [1.0, 1.0])
    unavoidable = ring.unavoidable_moves(np.zeros(NUM_BUCKETS, np.int32), lo, hi) / NUM_BUCKETS
    num_rows = module.user.num_embeddings + module.item.num_embeddings
    assert 0 < num_added == num_removed <= 1.2 * unavoidable * num_rows


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_killed_right_after_rows_have_moved_to_it_changes_no_bit() -> None:
    strategy = ParameterServer(servers=1, tables=TABLES)
    undisturbed = train(strategy, {})

    killed = train(strategy, {4: 2}, is_killing=True)

    assert killed == undisturbed
    assert events("failed") == ["server 1: killed by SIGKILL"]
    assert len(events("started")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Hybrid(sparse=ParameterServer(tables="user", staleness=2, prefetch=2)), id="bounded"),
        pytest.param(ParameterServer(tables="user", staleness=None), id="asynchronous"),
    ],
)
def test_every_row_is_trained_once_per_epoch_though_rows_move_while_batches_are_prefetched(strategy: Any) -> None:
    module = UserCounts(NUM_ROWS)
    trainer = Scaled(
        module,
        lambda output, _: output.mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        strategy=strategy,
        workers=2,
        logs="none",
        max_restarts=0,
    )
    trainer.numbers = {4: 3, 16: 1}
    trainer.fit(
        {"user": torch.arange(NUM_ROWS), "clicked": torch.zeros(NUM_ROWS)},
        label="clicked",
        epochs=EPOCHS,
        batch_size=BATCH,
        every=5,
    )

    assert module.user.weight.unique().tolist() == [-EPOCHS / BATCH]
    assert [each.partition(";")[0] for each in events("scaling") if "moved" in each] == [
        "2 workers and 3 servers",
        "2 workers and 1 server",
    ]
