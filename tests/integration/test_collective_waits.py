"""Waits in collectives of torch on real ranks: DDP, the strategies of the Trainer, and calls of the script.

The runs at the end are `strata run`: the verdict on a straggler and the ledger come from the page of each run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from servers import STRATA, TorchRanks, until
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strata.identity import Identity
from strata.train.collectives import CollectiveWaits
from strata.train.time_use import TimeUseMeter
from strata.trainer.strategy import AllReduce

if TYPE_CHECKING:
    from nursery import Lifeline

DEADLINE_S = 90.0
NUM_STEPS, SLOW_S = 6, 0.1
SLOW_RANK = 1
STRATEGIES = {
    "ring": AllReduce(),
    "lane": AllReduce(compression="fp16"),
    "local steps": AllReduce(local_steps=2),
}


class Net(nn.Module):
    """A model with buffers, which DDP broadcasts before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(rows)
        return found


def train(module: nn.Module, rank: int, *, slow_s: float, after_step: Any = lambda step: None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        if rank == SLOW_RANK:
            time.sleep(slow_s)  # long computing
        optimizer.zero_grad()
        module(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        after_step(step + 1)
    return [weight.detach().clone() for weight in module.parameters()]


def measured() -> tuple[TimeUseMeter, CollectiveWaits]:
    meter = TimeUseMeter()
    waits = CollectiveWaits(meter)
    meter.is_collective_known = waits.is_known
    meter.begin()
    waits.begin()
    return meter, waits


def ddp(rank: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net())


# -- what the ranks do -------------------------------------------------------------------------------------------------


def plain_ddp(rank: int) -> dict[str, Any]:
    untouched = train(ddp(rank), rank, slow_s=0.0)
    meter, waits = measured()
    weights = train(ddp(rank), rank, slow_s=SLOW_S)
    use = meter.read()
    waits.close()
    assert use is not None
    is_equal = all(torch.equal(one, other) for one, other in zip(weights, untouched, strict=True))
    return {"collective_s": use.collective_s, "measured_s": use.measured_s, "is_equal": is_equal}


def of_strategy(rank: int, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    bound = STRATEGIES[name].bind(Net(), Identity(rank=rank, world_size=2, local_rank=rank, local_world_size=2))
    meter, waits = measured()
    train(bound.module, rank, slow_s=SLOW_S, after_step=bound.after_step)
    use = meter.read()
    waits.close()
    assert use is not None
    return {"collective_s": use.collective_s, "measured_s": use.measured_s}


def of_script(rank: int) -> dict[str, Any]:
    """Calls of the script, with the moments between which the first rank certainly waits."""
    meter, waits = measured()
    store: Any = dist.distributed_c10d._get_default_store()
    least_s = 0.0
    calls = (
        lambda: dist.barrier(),
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        lambda: dist.broadcast(torch.ones(1), src=SLOW_RANK),
        lambda: dist.recv(torch.ones(1), SLOW_RANK) if rank == 0 else dist.send(torch.ones(1), 0),
        lambda: dist.all_gather_object([None, None], rank),
    )
    for number, call in enumerate(calls):
        if rank == SLOW_RANK:
            store.wait([f"arrives-{number}"])
            time.sleep(0.02)  # long computing
            store.set(f"comes-{number}", str(time.monotonic()))
        else:
            began_s = time.monotonic()
            store.set(f"arrives-{number}", "")
        call()
        if rank != SLOW_RANK:
            least_s += float(store.get(f"comes-{number}")) - began_s
    use = meter.read()
    waits.close()
    assert use is not None
    return {"collective_s": use.collective_s, "least_s": least_s}


def compiled(rank: int) -> dict[str, Any]:
    """What torch's compiler makes of DDP and of collectives, without and with measuring."""
    graphs: list[list[Any]] = []
    meter: TimeUseMeter | None = None
    for is_measured in (False, True):
        if is_measured:
            meter, waits = measured()
        found: list[Any] = []
        for function in (ddp(rank), _with_all_reduce):
            torch._dynamo.reset()
            compiler = torch._dynamo.testing.CompileCounter()
            step = torch.compile(function, backend=compiler)
            for _ in range(3):
                out = step(torch.ones(4, 8))
                out.sum().backward() if out.requires_grad else None
            found.append((compiler.frame_count, compiler.op_count))
        graphs.append(found)
    assert meter is not None
    use = meter.read()
    waits.close()
    assert use is not None
    return {"graphs": graphs, "collective_s": use.collective_s}


def _with_all_reduce(rows: torch.Tensor) -> torch.Tensor:
    total = rows * 2
    dist.all_reduce(total)
    return total + 1


def rank_main(lifeline: Lifeline, *, case: str, meeting: str, rank: int, num_ranks: int, **arguments: Any) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")  # of torch's own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    found = globals()[case](rank, **arguments)
    dist.barrier()
    dist.destroy_process_group()
    lifeline.send(said=found)


def on_ranks(ranks: TorchRanks, place: Path, case: str, **arguments: Any) -> list[Any]:
    return ranks.run(rank_main, 2, deadline_s=DEADLINE_S, case=case, meeting=str(place / "meeting"), **arguments)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_the_waits_of_plain_ddp_are_measured_and_its_weights_are_the_same(
    tmp_path: Path, torch_ranks: TorchRanks
) -> None:
    fast, slow = on_ranks(torch_ranks, tmp_path, "plain_ddp")

    assert fast["measured_s"] > fast["collective_s"] > 0.5 * (NUM_STEPS - 1) * SLOW_S
    assert slow["measured_s"] - slow["collective_s"] > NUM_STEPS * SLOW_S
    assert fast["is_equal"]
    assert slow["is_equal"]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_the_waits_of_every_kind_of_all_reduce_are_measured_once(
    tmp_path: Path, torch_ranks: TorchRanks, name: str
) -> None:
    fast, slow = on_ranks(torch_ranks, tmp_path, "of_strategy", name=name)

    assert fast["measured_s"] > fast["collective_s"] > 0.5 * (NUM_STEPS - 2) * SLOW_S
    assert slow["measured_s"] - slow["collective_s"] > NUM_STEPS * SLOW_S


def test_calls_of_the_script_are_measured(tmp_path: Path, torch_ranks: TorchRanks) -> None:
    fast, slow = on_ranks(torch_ranks, tmp_path, "of_script")

    assert fast["collective_s"] >= 0.9 * fast["least_s"] > 0
    assert slow["collective_s"] is not None


def test_the_compiler_makes_the_same_graphs_with_measured_waits(tmp_path: Path, torch_ranks: TorchRanks) -> None:
    for found in on_ranks(torch_ranks, tmp_path, "compiled"):
        without, measured_too = found["graphs"]
        assert without == measured_too
        assert found["collective_s"] > 0
