"""The training loop, as it runs on every worker.

`Loop.run` makes the optimizer steps of each epoch and ends the epoch; `step` and `update` make one optimizer step. The
context makes it exact after a failure: it yields the remaining epochs, its loader continues at the next row, and
`maybe_checkpoint` saves, stops or rescales between two optimizer steps.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument, StrataError
from strata.lifecycle import interrupted
from strata.trainer import serving
from strata.trainer.callbacks import StepInfo
from strata.trainer.diagnosis import OF_MODULES, check_loss, explain, not_finite_values, num_not_finite, plain_weights
from strata.trainer.evaluation import summed
from strata.trainer.stream import Pauses

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from strata.train.context import Context
    from strata.trainer.batches import Batch
    from strata.trainer.parts import Parts


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class NotFinite(StrataError):
    """The loss or a gradient is NaN or infinite."""


class Loop:
    """Trains until the last epoch, or until the history asks to stop."""

    def __init__(self, parts: Parts, ctx: Context) -> None:
        self.parts = parts
        self.ctx = ctx
        self.is_interrupted = False
        """Set by a signal handler: save after this step and raise KeyboardInterrupt."""
        self._loss_sum = 0.0
        """Sum of the loss over this rank's rows in this epoch."""
        self._num_rows = 0
        self._last_loss = math.nan
        self._lost_before = 0
        """Lost updates that the restored checkpoint counts."""
        self._finite: dict[str, torch.Tensor] = {}
        """Weights that were finite when training began; none if every gradient is checked."""
        self.seconds = {"train_s": 0.0, "valid_s": 0.0}
        self.first_step_s: float | None = None
        self.state: dict[str, Any] = {"module": parts.module, "optimizer": parts.optimizer, "trainer": self}

    def run(self) -> None:
        history = self.parts.history
        if self.parts.settings.on_nan == "raise":
            self._finite = {
                name: each for name, each in plain_weights(self.parts.module).items() if not num_not_finite(each)
            }
        for epoch in self._epochs():
            if history.num_epochs <= epoch and not history.stop_reason:  # otherwise restored from the epoch's end
                began_s = time.perf_counter()
                is_over = self.is_cut and self.ctx.identity.incarnation > 0  # before this process was restarted alone
                for batches in () if is_over else self.parts.groups():
                    self.step(batches)
                    if self.is_cut or history.stop_reason:
                        break
                if not self.ctx.step and not self.parts.config.is_stream:
                    raise InvalidArgument(self.parts.why_no_batch(), field="data")
                seconds = time.perf_counter() - began_s
                if self.ctx.may_lose_ranks:
                    self.parts.bound.settle()
                with self.ctx.together(f"epoch {epoch}"):
                    if self.is_cut:  # a later fit continues in the middle of the epoch, so its row must not be saved
                        self._save_last()
                    self.end_epoch(epoch, seconds)
                    if self.is_cut or history.stop_reason:
                        self.ctx.will_end()
                self.end_if_interrupted()
            if self.is_cut or history.stop_reason:
                break

    def end(self) -> None:
        """Save the last step, unless it is saved. All workers have arrived."""
        if not self.is_cut:
            self._save_last()

    def _epochs(self) -> Iterator[int]:
        """Yield the remaining epochs: passes over the data, or passes over the new files of a stream."""
        config = self.parts.config
        if not config.is_stream:
            yield from self.ctx.epochs(config.epochs)
            return
        pauses = Pauses(self.ctx, config.train.idle_timeout_s)
        for epoch in self.ctx.epochs(sys.maxsize):
            is_restarted = self.ctx.identity.incarnation > 0 and self.parts.loader.is_begun
            if self.is_cut and not is_restarted:
                self.ctx.will_end()
                return
            # The files of a pass that is complete may have been deleted.
            if self.parts.history.num_epochs <= epoch and not pauses.wait_for_files(self):
                return
            yield epoch

    def continue_alone(self, step: int) -> None:
        """Continue after a step that an earlier process of this rank has pushed; the last checkpoint is restored.

        Every epoch ends with a checkpoint, so this step and the checkpoint's are in the same epoch, unless that one is
        complete.
        """
        ctx, num_steps = self.ctx, step - self.ctx.step
        if num_steps and self.parts.history.num_epochs > ctx.epoch:
            ctx.epoch += 1
        self.parts.skip(num_steps, epoch=ctx.epoch)
        ctx.continue_after(step)

    def step(self, batches: Iterator[tuple[Batch, float, bool]]) -> None:
        """Make one optimizer step from the batches that accumulate into it."""
        parts, is_first = self.parts, self.first_step_s is None
        for batch, weight, is_last in batches:
            with _NOTHING if is_last else parts.bound.accumulating():
                try:
                    with parts.evaluator.autocast(), parts.first_look(batch) if is_first else _NOTHING:
                        loss = parts.trainer.training_step(parts.bound.module, batch)
                except OF_MODULES as error:
                    explain(error, parts.module, batch, is_first=is_first)
                    raise
                check_loss(loss, is_own_step=parts.trainer.has_own_step)
                self._note(loss, batch)
                parts.scaler.scale(loss if weight == 1.0 else loss * weight).backward()
        self.update()

    def update(self) -> None:
        parts, ctx = self.parts, self.ctx
        ctx.completing(ctx.step + 1)
        if parts.are_gradients_usable():
            parts.scaler.step(parts.optimizer)
            parts.bound.push()
        parts.scaler.update()
        parts.optimizer.zero_grad(set_to_none=True)
        step = ctx.step + 1
        parts.after_step(step)
        if self.first_step_s is None:
            self.first_step_s = time.time()
        if step % parts.settings.log_every == 0:
            self._report(step)
        else:
            ctx.report(step=step)
        ctx.maybe_checkpoint(self.state, is_passing=True, **self._save_options())
        self.end_if_interrupted()

    def save(self) -> None:
        """Save the last step, between two of them. All ranks call it together."""
        self.ctx.checkpoint(self.state, **self._save_options()).wait()
        self.ctx.release_alone()

    def end_if_interrupted(self) -> None:
        if self.is_interrupted:
            self.save()
            raise interrupted(f"saved step {self.ctx.step}; continue with fit(…, resume=True)")

    @property
    def is_cut(self) -> bool:
        """Whether `max_steps` ends training before the last epoch is complete."""
        most = self.parts.config.max_steps
        return most is not None and self.ctx.step >= most

    @property
    def stop_reason(self) -> str:
        return f"max_steps={self.parts.config.max_steps} reached" if self.is_cut else self.parts.history.stop_reason

    def end_epoch(self, epoch: int, seconds: float) -> None:
        """Validate, add the epoch to the history, report it, and save it if it is the best."""
        parts, ctx = self.parts, self.ctx
        loss_sum, num_rows = summed([self._loss_sum, float(self._num_rows)])
        row: dict[str, float] = {"epoch": epoch, "step": ctx.step, "loss": loss_sum / max(num_rows, 1.0)}
        if not num_rows:  # no row of a stream's new files passes the filter, or `on_nan` left all steps out
            row["loss"] = math.nan
        if parts.valid is not None:
            began_s = time.perf_counter()
            parts.bound.finish()
            found = parts.evaluator.evaluate(parts.valid)
            row |= {f"valid_{name}": value for name, value in found.items()}
            self.seconds["valid_s"] += time.perf_counter() - began_s
        row |= {"learning_rate": parts.learning_rate, "seconds": seconds, "rows_per_s": num_rows / max(seconds, 1e-9)}
        self.seconds["train_s"] += seconds
        self._loss_sum, self._num_rows = 0.0, 0
        is_best = parts.history.add(row)
        parts.after_epoch(row)
        parts.callbacks.on_epoch(row)
        is_rated = parts.valid is not None and is_best
        if not self.is_cut and (is_rated or ctx.alone.is_begun):
            metadata = {parts.history.monitor: row[parts.history.monitor]} if is_rated else {}
            save = ctx.checkpoint(self.state, metadata=metadata, **self._save_options())
            if ctx.alone.is_begun:  # a worker that is restarted alone finds the history up to here
                save.wait()
                ctx.release_alone()

    def _note(self, loss: torch.Tensor, batch: Batch) -> None:
        value = self._last_loss = loss.item()
        if not math.isfinite(value):
            if self.parts.settings.on_nan != "raise":
                return  # the step is left out, also of the reported loss
            cause = not_finite_values(batch)
            cure = (
                f"{cause}: fill such values, or leave their rows out"
                if cause
                else "its batch has only finite values: lower the learning rate, or clip gradients with clip_norm=1.0"
            )
            raise NotFinite(
                f"the loss is {value} at step {self.ctx.step + 1} on rank {self.ctx.rank}; {cure}; on_nan='skip' "
                "leaves out such steps. Checkpoints contain only earlier steps"
            )
        self._loss_sum += value * (1 if self.parts.is_loss_sum else batch.num_rows)
        self._num_rows += batch.num_rows

    def _report(self, step: int) -> None:
        self.ctx.report(step=step, loss=self._last_loss)
        if self.parts.callbacks:
            rate = self.parts.learning_rate
            info = StepInfo(step=step, epoch=self.ctx.epoch, loss=self._last_loss, learning_rate=rate)
            self.parts.callbacks.on_step(info)

    def _save_last(self) -> None:
        self.parts.bound.finish()
        self.ctx.save_last(self.state, **self._save_options())

    def _save_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"replicated": self.parts.replicated}
        return {**options, "checkpoint_type": "INCREMENTAL"} if self.parts.config.is_stream else options

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Raises:
            NotFinite: A gradient that was not finite has changed the weights, while the loss was finite.
        """
        broken = next((name for name, each in self._finite.items() if num_not_finite(each)), None)
        if broken is not None:
            raise NotFinite(
                f"the weights {broken!r} are NaN or infinite at step {self.ctx.step} on rank {self.ctx.rank}: a "
                "gradient was not finite, although the loss was; check the inputs for infinite values, lower the "
                "learning rate, clip gradients with clip_norm=1.0, or leave out such steps with on_nan='skip'. "
                "Checkpoints contain only earlier steps"
            )
        own = {"loss_sum": self._loss_sum, "num_rows": self._num_rows, "lost_updates": self.lost_updates}
        return {**own, "rank": self.ctx.rank, **self.parts.state_dict()}

    @property
    def lost_updates(self) -> int:
        """Pushes of this worker that servers have lost, and that the rows do not contain."""
        return self._lost_before + serving.num_lost(self.ctx)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A rank that the checkpoint does not have receives the state of rank 0, whose sums must not count twice.
        if state.get("rank", self.ctx.rank) == self.ctx.rank:
            self._loss_sum, self._num_rows = float(state["loss_sum"]), int(state["num_rows"])
            self._lost_before = int(state.get("lost_updates", 0))
        self.parts.load_state_dict(state)
