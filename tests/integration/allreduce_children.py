"""What the ranks of `test_trainer_allreduce.py` do: each case trains on all ranks and returns figures to compare."""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from strata.errors import InvalidArgument
from strata.identity import Identity
from strata.trainer.strategy import AllReduce, Bound, PowerSGD, Strategy, shared_memory
from strata.trainer.strategy import links as measured_links
from strata.trainer.strategy.cost import Choice, predict_s
from strata.trainer.strategy.lane import StreamLane, ThreadLane
from strata.trainer.strategy.reduce import Averager, make_algorithm, make_groups
from strata.trainer.strategy.replicas import DataParallel
from strata.trainer.strategy.shared_memory import RankLost
from strata.trainer.strategy.topology import Grid, Topology

if TYPE_CHECKING:
    from nursery import Lifeline

NUM_STEPS = 4
MICRO_BATCHES = 2
ROWS = 5
SMALL_BUCKET_MB = 0.004
"""Bytes for about a thousand weights, so that a tiny module has several buckets of different sizes."""
UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"fp16": 2.0**-24, "bf16": 2.0**-133}
"""Distance of the numbers next to zero."""


def rank_main(
    lifeline: Lifeline,
    *,
    case: str,
    meeting: str,
    rank: int,
    num_ranks: int,
    ranks_per_node: int,
    interface: str = "lo",
    **arguments: Any,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    ranks = Identity(
        rank=rank,
        world_size=num_ranks,
        local_rank=rank % ranks_per_node,
        local_world_size=ranks_per_node,
        node_rank=rank // ranks_per_node,
        num_nodes=num_ranks // ranks_per_node,
    )
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    found = globals()[case](ranks, **arguments)
    dist.barrier()
    dist.destroy_process_group()
    lifeline.send(said=found)


# -- training ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of odd sizes, a convolution in another memory format, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 4)
        self.first = nn.Linear(3 * 28, 29)
        self.normal = nn.BatchNorm1d(29)
        self.layers = nn.Sequential(*(nn.Linear(29, 29) for _ in range(3)))
        self.last = nn.Linear(29, 1, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.convolution(rows[:, None]).flatten(1)
        hidden = torch.tanh(self.normal(self.first(hidden)))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden)


class Linear(nn.Module):
    """Weights whose gradients are sums of few outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(31, 24)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def rows_of(step: int, micro: int, rank: int, num_rows: int = ROWS) -> Tensor:
    return torch.randn(num_rows, 31, generator=torch.Generator().manual_seed(step * 1_000 + micro * 100 + rank))


def loss_of(module: nn.Module, rows: Tensor) -> Tensor:
    return (module(rows) - rows.mean(1, keepdim=True)).square().mean()


def fit(bound: Bound, optimizer: torch.optim.Optimizer, ranks: Identity, steps: range, num_rows: int = ROWS) -> None:
    for step in steps:
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES - 1):
            with bound.accumulating():
                (loss_of(bound.module, rows_of(step, micro, ranks.rank, num_rows)) / MICRO_BATCHES).backward()
        last = rows_of(step, MICRO_BATCHES - 1, ranks.rank, num_rows)
        (loss_of(bound.module, last) / MICRO_BATCHES).backward()
        optimizer.step()
        bound.after_step(step + 1)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def train(strategy: Strategy, ranks: Identity, make: Callable[[], nn.Module] = Net, num_rows: int = ROWS) -> nn.Module:
    module = seeded(make)
    bound = strategy.bind(module, ranks)
    fit(bound, sgd(module), ranks, range(NUM_STEPS), num_rows)
    bound.finish()
    return module


class PlainDDP:
    """The peer: DDP as its documentation shows it, as a strategy."""

    is_replicated = True

    def bind(self, module: nn.Module, ranks: Identity) -> Bound:
        self.module = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKET_MB)
        return self

    def accumulating(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def after_step(self, step: int) -> None:
        pass

    def finish(self) -> None:
        for buffer in self.module.module.buffers():
            dist.broadcast(buffer, 0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def flat(tensors: Iterator[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def weights(module: nn.Module) -> Tensor:
    return flat(iter([*module.parameters(), *module.buffers()]))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def is_everywhere(tensor: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(each, gathered[0]) for each in gathered)


# -- cases ---------------------------------------------------------------------------------------------------------


def equality(ranks: Identity) -> dict[str, Any]:
    """Every algorithm against plain DDP, over several steps with accumulation."""
    expected = weights(train(PlainDDP(), ranks))
    found = {}
    for algorithm in ("ring", "group", "2d", "auto"):
        module = train(AllReduce(algorithm=algorithm, bucket_mb=SMALL_BUCKET_MB), ranks)
        found[algorithm] = (relative_error(weights(module), expected), is_everywhere(weights(module)))
    return found


def memory(ranks: Identity) -> dict[str, Any]:
    """Averages in shared memory against plain DDP and its own bits with other buckets, one of them on one machine."""
    found: dict[str, Any] = {}
    expected = weights(train(PlainDDP(), ranks))
    in_parts = weights(train(AllReduce(algorithm="memory", bucket_mb=SMALL_BUCKET_MB), ranks))
    module = seeded(Net)
    bound = AllReduce().bind(module, ranks)
    assert isinstance(bound, DataParallel)
    found["choice"] = str(bound.decision.choice)
    fit(bound, sgd(module), ranks, range(NUM_STEPS))
    bound.finish()
    bound.close()
    found["error"] = relative_error(in_parts, expected)
    found["is_everywhere"] = is_everywhere(in_parts)
    found["is_free_of_buckets"] = torch.equal(weights(module), in_parts)
    found["resumes"] = _resumes_exactly(AllReduce(algorithm="memory", bucket_mb=SMALL_BUCKET_MB), ranks)
    sparse = [_sparse_gradient(strategy, ranks) for strategy in (PlainDDP(), AllReduce(algorithm="memory"))]
    found["sparse"] = (sparse[1].is_sparse, relative_error(sparse[1].to_dense(), sparse[0].to_dense()))
    unused = AllReduce(algorithm="memory", find_unused_parameters=True)
    plain = AllReduce(algorithm="ring", find_unused_parameters=True)
    found["unused"] = relative_error(*(weights(train(each, ranks, Fork)) for each in (unused, plain)))
    return found


def no_memory(ranks: Identity) -> dict[str, Any]:
    """What happens where one of the ranks has no memory to share."""
    if ranks.rank == 1:
        shared_memory.MAX_MEMORY_SHARE = 0.0
    bound = AllReduce().bind(Net(), ranks)
    assert isinstance(bound, DataParallel)
    try:
        AllReduce(algorithm="memory").bind(Net(), ranks)
    except InvalidArgument as error:
        return {"choice": str(bound.decision.choice), "error": str(error)}
    finally:
        shared_memory.MAX_MEMORY_SHARE = 0.25
    return {}


def rank_lost(ranks: Identity) -> dict[str, Any]:
    """One rank leaves between two steps: the others get an error instead of waiting."""
    module = seeded(Linear)
    bound = AllReduce(algorithm="memory").bind(module, ranks)
    fit(bound, sgd(module), ranks, range(2))  # in the second step, DDP forms its final buckets
    if ranks.rank == 1:
        bound.close()
        return {}
    try:
        fit(bound, sgd(module), ranks, range(2, 3))
    except RankLost as error:
        return {"error": str(error)}
    return {}


def compressed(ranks: Identity) -> dict[str, Any]:
    """Gradients of one backward pass in 16 bits: the largest error as a share of the format's bound."""
    found = {}
    reference, own = _gradients(AllReduce(), ranks)
    dist.all_reduce(own.abs_())
    mean_size = own / ranks.world_size
    for compression in ("fp16", "bf16"):
        for algorithm in ("ring", "group", "2d"):
            strategy = AllReduce(algorithm=algorithm, compression=compression, bucket_mb=SMALL_BUCKET_MB)
            averaged, _ = _gradients(strategy, ranks)
            num_roundings = ranks.world_size + 1
            grown = (1 + UNIT_ROUNDOFF[compression]) ** num_roundings - 1
            bound = grown * mean_size + num_roundings * SMALLEST[compression] + 1e-7 * mean_size
            found[f"{algorithm} {compression}"] = ((averaged - reference).abs() / bound).max().item()
    return found


def _gradients(strategy: Strategy, ranks: Identity) -> tuple[Tensor, Tensor]:
    """Gradients of one pass, averaged and of this rank alone."""
    module = seeded(Net)
    bound = strategy.bind(module, ranks)
    with bound.accumulating():
        loss_of(bound.module, rows_of(0, 0, ranks.rank)).backward()
    own = flat(p.grad for p in module.parameters())
    module.zero_grad()
    loss_of(bound.module, rows_of(0, 0, ranks.rank)).backward()
    return flat(p.grad for p in module.parameters()), own


def power_sgd(ranks: Identity) -> dict[str, Any]:
    """One row per rank and micro-batch: the mean gradient has a rank of at most ranks × micro-batches."""
    full = MICRO_BATCHES * ranks.world_size
    expected = weights(train(AllReduce(), ranks, Linear, num_rows=1))
    found = {}
    for algorithm in ("ring", "group", "2d"):
        config = PowerSGD(matrix_rank=full, start_step=1, min_ratio=1.0)
        module = train(AllReduce(algorithm=algorithm, compression=config), ranks, Linear, num_rows=1)
        found[algorithm] = (relative_error(weights(module), expected), is_everywhere(weights(module)))
    return {"is_compressed": PowerSGD(matrix_rank=full, min_ratio=1.0).is_worthwhile((24, 31)), **found}


def resume(ranks: Identity) -> dict[str, Any]:
    """Train twice as long, or stop in the middle and continue with new objects: whether all bits are the same."""
    settings: dict[str, AllReduce] = {
        "ring": AllReduce(),
        "group": AllReduce(algorithm="group"),
        "2d fp16": AllReduce(algorithm="2d", compression="fp16"),
        "powersgd": AllReduce(compression=PowerSGD(matrix_rank=2, start_step=1)),
        "unused": AllReduce(find_unused_parameters=True),
        "local": AllReduce(local_steps=3),
        "diloco": AllReduce(local_steps=3, outer_lr=0.7, outer_momentum=0.9, compression="bf16"),
    }
    return {
        name: _resumes_exactly(replace(strategy, bucket_mb=SMALL_BUCKET_MB), ranks)
        for name, strategy in settings.items()
    }


def _resumes_exactly(strategy: AllReduce, ranks: Identity) -> bool:
    half, whole = NUM_STEPS, 2 * NUM_STEPS
    module = seeded(Net)
    bound, optimizer = strategy.bind(module, ranks), sgd(module)
    fit(bound, optimizer, ranks, range(half))
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict(), bound.state_dict()))
    fit(bound, optimizer, ranks, range(half, whole))
    bound.finish()
    expected = weights(module)

    module = seeded(Net, seed=1)
    bound, optimizer = strategy.bind(module, ranks), sgd(module)
    for each, state in zip((module, optimizer, bound), saved, strict=True):
        each.load_state_dict(state)
    fit(bound, optimizer, ranks, range(half, whole))
    bound.finish()
    return torch.equal(weights(module), expected)


def local(ranks: Identity) -> dict[str, Any]:
    """Local steps against a simulation of all ranks in this process."""
    settings = {
        "local": AllReduce(local_steps=3),
        "diloco": AllReduce(local_steps=3, outer_lr=0.7, outer_momentum=0.9, algorithm="2d"),
        "outer one": AllReduce(local_steps=3, compression="bf16"),
    }
    found = {}
    for name, strategy in settings.items():
        module = train(strategy, ranks, Linear)
        expected = _simulated(strategy, ranks.world_size)
        found[name] = (relative_error(weights(module), expected), is_everywhere(weights(module)))
    return found


def _simulated(strategy: AllReduce, world_size: int) -> Tensor:
    replicas = [seeded(Linear) for _ in range(world_size)]
    optimizers = [sgd(replica) for replica in replicas]
    anchor = seeded(Linear)
    outer = torch.optim.SGD(
        anchor.parameters(),
        lr=strategy.outer_lr,
        momentum=strategy.outer_momentum,
        nesterov=strategy.outer_momentum > 0,
    )
    for step in range(NUM_STEPS):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(MICRO_BATCHES):
                (loss_of(replica, rows_of(step, micro, rank)) / MICRO_BATCHES).backward()
            optimizer.step()
        if (step + 1) % strategy.local_steps and step + 1 < NUM_STEPS:
            continue
        for name, parameter in anchor.named_parameters():
            mean = torch.stack([dict(replica.named_parameters())[name].detach() for replica in replicas]).mean(0)
            parameter.grad = parameter.detach() - mean
        outer.step()
        for replica in replicas:
            replica.load_state_dict(anchor.state_dict())
    return weights(anchor)


class Table(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(40, 6, sparse=True, mode="sum")
        self.layer = nn.Linear(6, 1)

    def forward(self, rows: Tensor) -> Tensor:
        ids = (rows[:, :4].abs() * 10).long() % 40
        return self.layer(self.embedding(ids))


def sparse(ranks: Identity) -> dict[str, Any]:
    """Sparse gradients keep their layout and have the mean of all ranks."""
    reference = _sparse_gradient(PlainDDP(), ranks)
    settings: dict[str, AllReduce] = {
        "ring": AllReduce(),
        "group": AllReduce(algorithm="group", compression="fp16"),
        "2d": AllReduce(algorithm="2d"),
        "powersgd": AllReduce(compression=PowerSGD(start_step=0)),
    }
    found = {}
    for name, strategy in settings.items():
        gradient = _sparse_gradient(strategy, ranks)
        found[name] = (gradient.is_sparse, relative_error(gradient.to_dense(), reference.to_dense()))
    return found


def _sparse_gradient(strategy: Strategy, ranks: Identity) -> Tensor:
    module = seeded(Table)
    bound = strategy.bind(module, ranks)
    loss_of(bound.module, rows_of(0, 0, ranks.rank)).backward()
    return module.embedding.weight.grad


class Fork(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.frozen = nn.Linear(31, 1), nn.Linear(31, 1), nn.Linear(31, 1)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.left(rows) + self.frozen(rows)


def unused(ranks: Identity) -> dict[str, Any]:
    """A parameter without gradient, and one that is frozen."""
    found = {}
    expected = weights(train(AllReduce(find_unused_parameters=True), ranks, Fork))
    for algorithm in ("group", "2d"):
        strategy = AllReduce(algorithm=algorithm, find_unused_parameters=True)
        found[algorithm] = relative_error(weights(train(strategy, ranks, Fork)), expected)
    # DDP exchanges which parameters were used while lanes are busy.
    expected = weights(train(AllReduce(compression="bf16"), ranks))
    strategy = AllReduce(compression="bf16", find_unused_parameters=True, bucket_mb=SMALL_BUCKET_MB)
    found["beside a lane"] = relative_error(weights(train(strategy, ranks)), expected)
    static = train(AllReduce(algorithm="2d", static_graph=True, bucket_mb=SMALL_BUCKET_MB), ranks)
    found["static"] = relative_error(weights(static), weights(train(AllReduce(static_graph=True), ranks)))
    module = train(AllReduce(local_steps=2), ranks, Fork)
    found["local keeps unused weights"] = torch.equal(module.right.weight, seeded(Fork).right.weight)
    return found


def refusals(ranks: Identity) -> dict[str, str]:
    """Errors of `bind`, by what is wrong."""
    found = {}
    attempts: dict[str, Callable[[], Any]] = {
        "group_size": lambda: AllReduce(algorithm="2d", group_size=4).bind(Net(), ranks),
        "ranks": lambda: AllReduce().bind(Net(), replace(ranks, rank=(ranks.rank + 1) % ranks.world_size)),
        "module": lambda: AllReduce().bind(nn.Linear(3, 3 + ranks.rank), ranks),
        "wrapped": lambda: AllReduce().bind(DistributedDataParallel(Net()), ranks),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except InvalidArgument as error:
            found[name] = str(error)
    return found


def overlap(ranks: Identity) -> dict[str, Any]:
    """Whether the backward pass goes on while a lane works, and an error of the lane ends it."""
    found: dict[str, Any] = {}
    for lane in (ThreadLane(), StreamLane(torch.device("cpu"))):
        averager = Averager(make_algorithm(Choice(algorithm="ring"), rank=ranks.rank, world_size=2), 2)
        buffer = torch.full((8,), float(ranks.rank))
        future = lane.submit(lambda buffer=buffer, averager=averager: averager.average_(buffer), buffer)
        found[type(lane).__name__] = future.wait().tolist()
    strategy = AllReduce(algorithm="group", bucket_mb=SMALL_BUCKET_MB, compression="fp16")
    module = seeded(Net)
    bound = strategy.bind(module, ranks)
    assert isinstance(bound, DataParallel)

    def fail(tensor: Tensor) -> None:
        raise OSError("the cable is cut")

    bound._averager.average_ = fail  # type: ignore[union-attr, method-assign]
    try:
        loss_of(bound.module, rows_of(0, 0, ranks.rank)).backward()
    except RuntimeError as error:
        found["error"] = str(error).splitlines()[0]
    return found


def measuring(ranks: Identity) -> dict[str, Any]:
    """Measured links, how long that took, and that process groups are made once."""
    topology = Topology(world_size=ranks.world_size, ranks_per_node=ranks.local_world_size)
    start_s = time.perf_counter()
    links = measured_links.measure(topology, ranks.rank, torch.device("cpu"))
    elapsed_s = time.perf_counter() - start_s
    figures = [
        figure for link in (links.intra, links.inter, links.shared) for figure in (link.latency_s, link.bytes_per_s)
    ]
    grid = Grid(world_size=ranks.world_size, group_size=ranks.local_world_size)
    bound = AllReduce(algorithm="auto").bind(seeded(Net), ranks)
    assert isinstance(bound, DataParallel)
    return {
        "figures": figures,
        "elapsed_s": elapsed_s,
        "is_same_group": make_groups(grid, ranks.rank) is make_groups(grid, ranks.rank),
        "reason": bound.decision.reason,
        "choice": str(bound.decision.choice),
    }


def slow_links(ranks: Identity) -> dict[str, Any]:
    """What `auto` chooses, and how long it and the ring really take."""
    bound = AllReduce(algorithm="auto").bind(seeded(Linear), ranks)
    assert isinstance(bound, DataParallel)
    topology = Topology(world_size=ranks.world_size, ranks_per_node=ranks.local_world_size)
    links = measured_links.measure(topology, ranks.rank, torch.device("cpu"))
    found: dict[str, Any] = {"choice": bound.decision.choice.algorithm, "reason": bound.decision.reason}
    for name, choice in (("chosen", bound.decision.choice), ("ring", Choice(algorithm="ring"))):
        algorithm = make_algorithm(choice, rank=ranks.rank, world_size=ranks.world_size)
        tensor = torch.ones(3_000)
        times_s = []
        for _ in range(4):
            dist.barrier()
            start_s = time.perf_counter()
            algorithm.sum_(tensor)
            times_s.append(time.perf_counter() - start_s)
        slowest = torch.tensor(statistics.median(times_s))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[name] = (slowest.item(), predict_s(choice, tensor.nbytes, topology, links))
    return found


# -- bytes ---------------------------------------------------------------------------------------------------------


def traffic(ranks: Identity, *, num_bytes: int, repeats: int, choices: list[list[Any]]) -> dict[str, Any]:
    """Bytes that this rank's node has sent for each all-reduce, within the node and to others."""
    found = {}
    for name, group_size in choices:
        algorithm = make_algorithm(
            Choice(algorithm=name, group_size=group_size), rank=ranks.rank, world_size=ranks.world_size
        )
        tensor = torch.ones(num_bytes // 4)
        algorithm.sum_(tensor)  # connections and groups exist
        before = _sent_bytes()
        for _ in range(repeats):
            algorithm.sum_(tensor.fill_(1.0))
        after = _sent_bytes()
        assert math.isclose(tensor[-1].item(), ranks.world_size)
        found[f"{name} {group_size}"] = [(now - then) / repeats for then, now in zip(before, after, strict=True)]
    return found


def _sent_bytes() -> tuple[int, int]:
    """Of the namespace: over its loopback interface, and to other nodes. All ranks look while none is sending."""
    dist.barrier()
    sent = {"lo": 0, "strata0": 0}
    for line in Path(f"/proc/{os.getpid()}/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        sent[name.strip()] = int(figures.split()[8])
    dist.barrier()
    return sent["lo"], sent["strata0"]
