"""Hyperparameter search: which configuration to try next, which trial to stop, pause or resume, and on which worker.

`space` describes configurations, `samplers` propose them, `schedulers` decide from intermediate results which trials go
on, and `state` is the state machine of a study. The last two perform no I/O; `journal` makes the events of a study
durable. Samplers load Optuna or scipy only when one of theirs is used.
"""

from strata.tune.space import SearchSpace

__all__ = ["SearchSpace"]
