"""Strata inside the training loops of others: Lightning, the Trainer of transformers, and Accelerate.

Each module imports its framework and is imported by its full name, so that nothing else depends on any of them:

    from strata.integrations.lightning import StrataCallback
    from strata.integrations.transformers import StrataCallback
    from strata.integrations.accelerate import StrataLoop

What they do is the same. After every optimizer step they report it and ask the context whether to save or to stop;
what the framework keeps (weights, optimizers, schedulers, its own counters) goes into the run's checkpoints, and comes
back from them before the first step.
"""
