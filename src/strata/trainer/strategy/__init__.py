"""Strategies: how the replicas of a module on all ranks learn together.

`base` is the port. `all_reduce` holds the settings of data-parallel training and turns them into a `Bound`: `replicas`
averages gradients in every step, `local_steps` weights every few steps. Below them, `shared_memory` averages on one
machine, `reduce` sums tensors by one of three algorithms on several, `power_sgd` compresses gradients, and `lane` moves
communication off the training thread. `topology`, `cost`, `traffic` and `table` are pure arithmetic: grids of ranks,
predicted times, bytes per link; `links` measures what `cost` needs.

`parameter_server` holds the settings of parameter servers. `tables` finds the embeddings that move and replaces them by
the lookups of `lookup`, `dense_table` lays out dense parameters as rows, and `served` is their `Bound`.

`torch_rec` holds the settings of tables that torchrec shards over the workers. `embedding_collections` finds them and
stands in for them, `torch_rec_shards` is their rows on one worker, and `sharded` is their `Bound`.

This folder imports torch, `servers`, errors, the identity, and `Shard`, which describes a part of a tensor in a
checkpoint. It never touches data, and torch's optimizers only as objects that it is given.
"""

from strata.trainer.strategy.all_reduce import AllReduce
from strata.trainer.strategy.base import Bound, Ranks, Strategy
from strata.trainer.strategy.parameter_server import (
    Hybrid,
    ParameterServer,
    ServerStrategy,
    is_asynchronous,
    num_servers,
    torch_rec_of,
)
from strata.trainer.strategy.power_sgd import PowerSGD
from strata.trainer.strategy.torch_rec import TorchRec

__all__ = [
    "AllReduce",
    "Bound",
    "Hybrid",
    "ParameterServer",
    "PowerSGD",
    "Ranks",
    "ServerStrategy",
    "Strategy",
    "TorchRec",
    "is_asynchronous",
    "num_servers",
    "torch_rec_of",
]
