"""A Trainer that writes the demo's step log: which rows each worker has trained on, and how long saves took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.demo.step_log import StepLog
from strata.trainer.trainer import Trainer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strata.checkpoint import Save
    from strata.trainer.batches import Batch


class LoggedTrainer(Trainer):
    """Set `step_log_directory` before `fit`."""

    step_log_directory = ""
    _step_log: StepLog | None = None
    _logged_save: Save | None = None

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        loss = super().training_step(module, batch)
        ctx = self.context
        assert ctx is not None
        if self._step_log is None:
            self._step_log = StepLog(self.step_log_directory, ctx, ctx.step)
        if ctx.last_save is not None and ctx.last_save is not self._logged_save:
            self._logged_save = ctx.last_save
            self._step_log.saved(ctx.last_save)
        self._step_log.trained(ctx.step + 1, ctx.epoch, loss.item(), batch.raw["row"])
        return loss
