"""Optimizers and losses: what users pass as `optimizer`, `loss` and `ema`.

`build` turns any form of an optimizer into one of a module. `OptimizerStack` gives parts of a module their own,
`LossFnStack` adds losses, `FTRL` suits sparse linear models, `Ema` averages weights. This folder imports torch, and no
other part of `strata.trainer`.
"""

from strata.trainer.optimizer.builder import OptimizerSpec, build
from strata.trainer.optimizer.ema import Ema
from strata.trainer.optimizer.ftrl import FTRL
from strata.trainer.optimizer.losses import LossFnStack
from strata.trainer.optimizer.stack import OptimizerStack, Part, StackedOptimizer

__all__ = ["FTRL", "Ema", "LossFnStack", "OptimizerSpec", "OptimizerStack", "Part", "StackedOptimizer", "build"]
