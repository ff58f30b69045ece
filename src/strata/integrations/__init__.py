"""Callbacks that run Strata inside the training loops of Lightning, transformers and Accelerate.

Each module imports its framework and is imported by its full name, so that nothing else depends on any of them:

    from strata.integrations.lightning import StrataCallback
    from strata.integrations.transformers import StrataCallback
    from strata.integrations.accelerate import StrataLoop

They all do the same: report every optimizer step, let the context decide whether to save or stop, store the framework's
state (weights, optimizers, schedulers, counters) in the run's checkpoints, and restore it before the first step. They
use `strata.train` only.
"""
