"""The Trainer: give it a plain `nn.Module`, a loss, an optimizer and metrics; it trains on any number of workers.

`trainer.py` is what users call. It describes the work, and an `engine` runs it on every worker: `assembly` builds the
`parts` (data, module, strategy, optimizer, metrics), and the `loop` combines them. This package imports torch and may
import `train` and everything below. Exactness after failures comes from the context of `strata.train`; nothing here
saves, restores or counts rows by itself.
"""
