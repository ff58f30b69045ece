"""torchrec: `DistributedModelParallel` with the table on one rank (table-wise), and fbgemm's fused row-wise Adagrad.

Runs in the peers' environment without Strata.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import logging
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
job = importlib.import_module("servers_job")

NAMES = [f"field{number}" for number in range(job.FIELDS)]
COPIES = 1.5
"""Memory over the weights of the table."""


class Bags(nn.Module):
    """One bag with one id for each field; all fields share the table."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: Any) -> Tensor:
        out: Tensor = self.bags(features).values()
        return out


def train(rank: Any, suffix: str) -> dict[str, float]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, float] = {}
    for units in job.UNITS:
        found |= job.named("torchrec", units, suffix, _measured(rank, units))
    return found


def _measured(rank: Any, units: int) -> tuple[float, float]:
    jagged = importlib.import_module("torchrec.sparse.jagged_tensor")

    def features(batch: Any) -> Any:
        values = batch.ids.T.reshape(-1).contiguous()
        return jagged.KeyedJaggedTensor.from_lengths_sync(NAMES, values, torch.ones(len(values), dtype=torch.int32))

    given = job.batches(rank.size, job.WARM_UP + rank.size.steps, seed=rank.number)
    inputs = [features(batch) for batch in given]
    network = _sharded(rank.size, units)
    optimizer = torch.optim.Adagrad(
        (each for name, each in network.named_parameters() if name.startswith("net.")), lr=job.LR
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        job.LOSS(network(inputs[number]), given[number].labels).backward()  # updates the table, too
        optimizer.step()

    measured: tuple[float, float] = job.measure(rank.size, step)
    return measured


def _sharded(size: Any, units: int) -> nn.Module:
    gc.collect()  # the table of the network before
    torchrec = importlib.import_module("torchrec")
    distributed = importlib.import_module("torchrec.distributed")
    plans = importlib.import_module("torchrec.distributed.sharding_plan")
    optimizers = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    sharder = distributed.embeddingbag.EmbeddingBagCollectionSharder(
        fused_params={"optimizer": optimizers.EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": job.LR, "eps": 1e-8}
    )
    config = torchrec.EmbeddingBagConfig(
        name="table", num_embeddings=size.rows, embedding_dim=job.WIDTH, feature_names=NAMES, init_fn=_fill_shard
    )
    bags = torchrec.EmbeddingBagCollection([config], device=torch.device("meta"))
    world_size = dist.get_world_size()
    plan = plans.construct_module_sharding_plan(
        bags,
        {"table": plans.table_wise(rank=0, device="cpu", compute_kernel="fused")},
        sharder=sharder,
        world_size=world_size,
        local_size=world_size,
        device_type="cpu",
    )
    network: nn.Module = distributed.DistributedModelParallel(
        job.Network(Bags(bags), units),
        env=distributed.types.ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=distributed.types.ShardingPlan({"embedding.bags": plan}),
        sharders=[sharder],
    )
    return network


def _fill_shard(weights: Tensor) -> None:
    if weights.numel():  # the other rank has an empty one
        job.fill(weights)


def main() -> None:
    size = job.Size.given()
    job.require_memory(COPIES * size.table_bytes)
    found: dict[str, float] = {}
    for suffix, variables in job.ALLOCATORS.items():
        with job.environment(variables):
            found |= job.run_ranks(train, size, suffix)
    versions = {name: metadata.version(name) for name in ("torchrec", "fbgemm-gpu-cpu")}
    print(json.dumps({"figures": found, "versions": versions}))


if __name__ == "__main__":
    if importlib.util.find_spec("torchrec") is None:
        print(json.dumps({"not_installed": "torchrec"}))
    else:
        main()
