"""The worker's side of a run: `strata.init()`, its context with data, checkpoints and coordinator in a few calls.

`context` is what a script uses; `schedule` decides when it saves, `membership` is its connection to the coordinator.
`orchestrator` has the same calls without a run, `function_run` runs a function on workers. It may import `launch` and
everything below, and starts no processes itself except through `launch`. A name is loaded when it is first used; the
names of the Trainer live in `strata.trainer`, which is a layer above.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.train.context import Context as Context
    from strata.train.context import Progress as Progress
    from strata.train.orchestrator import TrainingOrchestrator as TrainingOrchestrator
    from strata.train.startup import init as init
    from strata.trainer.batches import Batch as Batch
    from strata.trainer.callbacks import Callback as Callback
    from strata.trainer.callbacks import JsonLogger as JsonLogger
    from strata.trainer.callbacks import ProgressBar as ProgressBar
    from strata.trainer.callbacks import TensorBoard as TensorBoard
    from strata.trainer.features import DenseFeat as DenseFeat
    from strata.trainer.features import Features as Features
    from strata.trainer.features import SparseFeat as SparseFeat
    from strata.trainer.features import VarLenFeat as VarLenFeat
    from strata.trainer.graph import Graph as Graph
    from strata.trainer.graph import NeighborDataset as NeighborDataset
    from strata.trainer.history import EarlyStopping as EarlyStopping
    from strata.trainer.history import Result as Result
    from strata.trainer.models import DLRM as DLRM
    from strata.trainer.models import FM as FM
    from strata.trainer.models import FNN as FNN
    from strata.trainer.models import LR as LR
    from strata.trainer.models import PNN as PNN
    from strata.trainer.models import DCNv2 as DCNv2
    from strata.trainer.models import DeepFM as DeepFM
    from strata.trainer.models import TwoTower as TwoTower
    from strata.trainer.models import WideDeep as WideDeep
    from strata.trainer.optimizer import FTRL as FTRL
    from strata.trainer.optimizer import LossFnStack as LossFnStack
    from strata.trainer.optimizer import OptimizerStack as OptimizerStack
    from strata.trainer.strategy import AllReduce as AllReduce
    from strata.trainer.strategy import Hybrid as Hybrid
    from strata.trainer.strategy import ParameterServer as ParameterServer
    from strata.trainer.strategy import PowerSGD as PowerSGD
    from strata.trainer.strategy import TorchRec as TorchRec
    from strata.trainer.trainer import Trainer as Trainer
    from strata.trainer.veloce import Arch as Arch
    from strata.trainer.veloce import HeterogeneousStrategy as HeterogeneousStrategy
    from strata.trainer.veloce import NeuralNetTrainer as NeuralNetTrainer
    from strata.trainer.veloce import PSStrategy as PSStrategy
    from strata.trainer.veloce import UpdateStrategy as UpdateStrategy

_HOMES = {
    "AllReduce": "trainer.strategy",
    "Arch": "trainer.veloce",
    "Batch": "trainer.batches",
    "Callback": "trainer.callbacks",
    "Context": "train.context",
    "DCNv2": "trainer.models",
    "DeepFM": "trainer.models",
    "DenseFeat": "trainer.features",
    "DLRM": "trainer.models",
    "EarlyStopping": "trainer.history",
    "Features": "trainer.features",
    "FM": "trainer.models",
    "FNN": "trainer.models",
    "FTRL": "trainer.optimizer",
    "Graph": "trainer.graph",
    "HeterogeneousStrategy": "trainer.veloce",
    "Hybrid": "trainer.strategy",
    "init": "train.startup",
    "JsonLogger": "trainer.callbacks",
    "LossFnStack": "trainer.optimizer",
    "LR": "trainer.models",
    "NeighborDataset": "trainer.graph",
    "NeuralNetTrainer": "trainer.veloce",
    "OptimizerStack": "trainer.optimizer",
    "PNN": "trainer.models",
    "ParameterServer": "trainer.strategy",
    "PowerSGD": "trainer.strategy",
    "Progress": "train.context",
    "ProgressBar": "trainer.callbacks",
    "PSStrategy": "trainer.veloce",
    "Result": "trainer.history",
    "SparseFeat": "trainer.features",
    "TensorBoard": "trainer.callbacks",
    "TorchRec": "trainer.strategy",
    "Trainer": "trainer.trainer",
    "TrainingOrchestrator": "train.orchestrator",
    "TwoTower": "trainer.models",
    "UpdateStrategy": "trainer.veloce",
    "VarLenFeat": "trainer.features",
    "WideDeep": "trainer.models",
}

__all__ = [*sorted(_HOMES)]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strata.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"strata.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
