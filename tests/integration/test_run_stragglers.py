"""Waits in collectives of torch on real ranks: DDP, the strategies of the Trainer, and calls of the script.

The runs at the end are `strata run`: the verdict on a straggler and the ledger come from the page of each run.
"""

from __future__ import annotations

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
from servers import STRATA, TorchRanks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strata.identity import Identity
from strata.train.collectives import CollectiveWaits
from strata.train.time_use import TimeUseMeter
from strata.trainer.strategy import AllReduce

if TYPE_CHECKING:
    from nursery import Lifeline

DEADLINE_S = 90.0
VERDICT_DEADLINE_S = 180.0
"""For the start of two runs and ten seconds of training, which a busy machine may stretch."""
NUM_STEPS, SLOW_S = 6, 0.1
SLOW_RANK = 1
STRATEGIES = {
    "memory": AllReduce(),
    "ring": AllReduce(algorithm="ring"),
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
    meter.add_source("collective_s", lambda: bound.waited_s)  # as the Trainer does
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
        dist.barrier,
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


# -- runs --------------------------------------------------------------------------------------------------------------

TRAIN = """
    import pathlib, sys, time
    import torch, strata
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import Dataset

    class Rows(Dataset):
        def __len__(self):
            return 1_000_000

        def __getitem__(self, index):
            if sys.argv[1] == "data" and ctx.rank == 1:
                time.sleep(0.05)
            return torch.ones(8) * (index % 7)

    ctx = strata.init(every=1_000_000)
    torch.set_num_threads(1)
    ctx.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ctx.dataloader(Rows(), batch_size=8)
    end = torch.zeros(1)
    for batch in loader:
        if sys.argv[1] == "compute" and ctx.rank == 1:
            time.sleep(0.2)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        ctx.maybe_checkpoint({"model": model})
        end.fill_(pathlib.Path("enough").exists())
        torch.distributed.all_reduce(end)
        if end.item():
            break
"""


class SlowRun:
    """`strata run` of the script above, whose rank 1 is slow."""

    def __init__(self, place: Path, cause: str) -> None:
        self.place = place
        place.mkdir()
        (place / "train.py").write_text(textwrap.dedent(TRAIN))
        variables = {"STRATA_RUNS_DIR": str(place / "runs"), "OMP_NUM_THREADS": "1"}
        with (place / "output").open("w") as output:
            self._process = subprocess.Popen(
                [str(STRATA), "run", "--workers=2", "--name=job", "train.py", cause],
                cwd=place,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return (self.place / "output").read_text()

    def get(self, path: str) -> Any:
        found = re.search(r"dashboard: (http://\S+)\n", self.output)
        assert found, self.output
        return httpx.get(f"{found[1]}{path}?job=job", timeout=DEADLINE_S).json()

    def until_named(self, rank: int, cause: str) -> Any:
        """Return how the ranks spent their time once this rank is named with this cause."""
        end_s, found = time.monotonic() + VERDICT_DEADLINE_S, None
        while time.monotonic() < end_s:
            assert self._process.poll() is None, self.output
            if "dashboard: " in self.output:
                found = self.get("/api/time")
                verdict = found["straggler"]
                if verdict is not None and (verdict["rank"], verdict["cause"]) == (rank, cause):
                    return found
            time.sleep(0.2)  # the page samples once a second
        raise AssertionError(f"not within {VERDICT_DEADLINE_S} s: {found}\n{self.output}")

    def end(self) -> None:
        with suppress(OSError):
            (self.place / "enough").touch()
        try:
            self._process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SlowRun]]:
    """Runs at the same time: a verdict needs ten seconds of measured time."""
    place = tmp_path_factory.mktemp("runs")
    runs = {cause: SlowRun(place / cause, cause) for cause in ("compute", "data")}
    yield runs
    for run in runs.values():
        run.end()


@pytest.mark.timeout(VERDICT_DEADLINE_S + DEADLINE_S)
@pytest.mark.parametrize("cause", ["compute", "data"])
def test_the_slow_rank_of_a_ddp_script_is_named_with_its_cause(slow_runs: dict[str, SlowRun], cause: str) -> None:
    run = slow_runs[cause]
    time_of_ranks = run.until_named(SLOW_RANK, cause)
    goodput = run.get("/api/goodput")

    workers = time_of_ranks["workers"]["items"]
    assert all(worker["is_collective_known"] for worker in workers)
    blocked = {worker["rank"]: worker["blocked"] for worker in workers}
    assert max(blocked[0]) > 0.5 > min(blocked[SLOW_RANK]), blocked
    for entry in (goodput["run"], *goodput["attempts"]):
        assert sum(entry["parts_s"].values()) == pytest.approx(entry["total_s"], abs=1e-6)
        assert min(entry["parts_s"].values()) >= 0
        assert entry["parts_s"]["barriers"] > 2.0, "rank 0 waits for most of ten seconds"
