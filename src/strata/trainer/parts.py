"""The objects that the loop combines on one worker, and what they do in a step: batches and their weights, gradients,
the scheduler, the moving average, and their state in a checkpoint. `assembly.py` builds them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.data.order.bins import BinSteps
from strata.errors import InvalidArgument, StrataError
from strata.trainer import sources
from strata.trainer.diagnosis import single_rows_refused
from strata.trainer.lookahead import Batches
from strata.trainer.optimizer import Ema
from strata.trainer.strategy.base import Upcoming

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from strata.data.order.steps import Steps
    from strata.identity import Identity
    from strata.trainer.batches import Batch, Splitter
    from strata.trainer.callbacks import Callbacks
    from strata.trainer.config import FitConfig, Settings
    from strata.trainer.evaluation import Evaluator
    from strata.trainer.history import History
    from strata.trainer.strategy import Bound
    from strata.trainer.trainer import Trainer


class Parts:
    """The objects of one worker. `build` creates it."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        config: FitConfig,
        bound: Bound,
        optimizer: Any,
        loader: Any,
        valid: Any,
        splitter: Splitter,
        evaluator: Evaluator,
        history: History,
        callbacks: Callbacks,
        ranks: Identity,
        device: torch.device,
    ) -> None:
        self.trainer = trainer
        self.settings: Settings = trainer.settings
        self.config = config
        self.module: nn.Module = trainer.module
        self.bound = bound
        self.is_loss_sum = trainer.objective.is_sum
        self.optimizer = optimizer
        self.loader = loader
        self.valid = valid
        self.evaluator = evaluator
        self.history = history
        self.callbacks = callbacks
        self.replicated = _replicated_names(self.module, bound)
        settings = trainer.settings
        self._splitter = splitter
        self._world_size = ranks.world_size
        self._steps: Steps | BinSteps | None = None
        """The batches of the current pass over the data; None if the loader does not know them."""
        self._parameters = [each for each in self.module.parameters() if each.requires_grad]
        self._scheduler = make_scheduler(settings, optimizer)
        self._ema = None if settings.ema is None else Ema(settings.ema)
        if self._ema is not None:
            evaluator.averaged = self._ema
        is_scaled = settings.precision == "fp16"
        self.scaler: Any = torch.amp.GradScaler(device.type) if is_scaled else _NoScaler()
        self._checks_gradients = settings.on_nan != "raise"

    # -- a step ----------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[Iterator[tuple[Batch, float, bool]]]:
        """Yield the batches of each optimizer step, with their weights and whether they are the last of the step."""
        self.module.train()
        clock = _RowClock(self.loader)
        self._steps = clock.steps
        raw = iter(self.loader)
        for first in raw:
            yield self._group(first, raw, clock)

    def why_no_batch(self) -> str:
        """Explain why a pass over the data had no batch."""
        if self._steps is None or not self._steps.num_rows:
            return "the data delivered no batch, so nothing was trained; check what the loader returns"
        workers = f" on {self._world_size} workers" if self._world_size > 1 else ""
        if isinstance(self._steps, BinSteps):
            return (
                f"{self._steps.num_rows} rows form fewer batches than the {self._world_size} workers, and incomplete "
                "steps are left out, so nothing was trained; lower batch_tokens= or batch_bytes=, or remove tail='drop'"
            )
        return (
            f"{self._steps.num_rows} rows do not fill a batch of batch_size={self._steps.batch_size}{workers}, and "
            f"incomplete batches are left out, so nothing was trained; choose a smaller batch_size, or remove "
            f"{sources.how_to_drop(self.config.train)}"
        )

    def _group(self, current: Any, raw: Iterator[Any], clock: _RowClock) -> Iterator[tuple[Batch, float, bool]]:
        most = self.settings.accumulate
        group_rows = clock.group_rows(most)
        place = 0
        while place < most - 1:
            following = next(raw, _END)
            if following is _END:
                break
            self._prepare([current, following], place, raw)
            yield self._weighted(current, group_rows, is_last=False)
            current = following
            place += 1
        self._prepare([current], place, raw)
        yield self._weighted(current, group_rows, is_last=True)

    def _prepare(self, batches: list[Any], place: int, raw: Iterator[Any]) -> None:
        """Show the strategy the batch at this place of its step, and the batches after it if the loader allows it."""
        if isinstance(raw, Batches):
            batches = [*batches, *raw.upcoming(self.bound.num_ahead)]
        shown = batches[: 1 + self.bound.num_ahead]
        most = self.settings.accumulate
        self.bound.prepare([Upcoming(batch, (place + nth) // most) for nth, batch in enumerate(shown)])

    def _weighted(self, raw: Any, group_rows: int | None, *, is_last: bool) -> tuple[Batch, float, bool]:
        """Return a batch and the weight of its mean loss, with which all ranks together average over all rows."""
        batch = self._splitter(raw)
        if self.is_loss_sum:
            weight = float(self._world_size)
        elif group_rows is None or not self.bound.is_replicated:  # ranks that train alone average over their own rows
            weight = 1.0 / self.settings.accumulate
        else:
            weight = batch.num_rows * self._world_size / group_rows
        return batch, weight, is_last

    def skip(self, num_steps: int, *, epoch: int) -> None:
        """Skip the batches of steps that were made already, and advance the scheduler as they did.

        Raises:
            StrataError: The epoch has fewer steps.
        """
        if not num_steps:
            return
        self.loader.set_epoch(epoch)
        passed = self.loader.opened() if self.config.is_stream else self.loader
        skip_steps(passed, num_steps, accumulate=self.settings.accumulate)
        for _ in range(num_steps if self._scheduler is not None and self.settings.scheduler_every == "step" else 0):
            self._scheduler.step()

    def first_look(self, batch: Batch) -> AbstractContextManager[None]:
        """Return a context for the forward passes of the first step, which refuses what would fail in the last one."""
        may_end_sooner = self.config.max_steps is not None
        if self._steps is None or may_end_sooner or self.settings.compile:  # compiled code has no hooks
            return contextlib.nullcontext()
        cure = sources.how_to_drop(self.config.train)
        return single_rows_refused(self.module, self._steps, num_rows=batch.num_rows, cure=cure)

    def are_gradients_usable(self) -> bool:
        """Clip the gradients; return whether to apply them. All ranks decide the same: they share the gradients."""
        settings = self.settings
        if not self._checks_gradients and settings.clip_norm is None and settings.clip_value is None:
            return True
        if settings.precision == "fp16":
            self.scaler.unscale_(self.optimizer)
        if settings.clip_value is not None:
            nn.utils.clip_grad_value_(self._parameters, settings.clip_value)
        limit = float("inf") if settings.clip_norm is None else settings.clip_norm
        norm = nn.utils.clip_grad_norm_(self._parameters, limit)
        if not self._checks_gradients or torch.isfinite(norm):
            return True
        if settings.on_nan == "stop":
            self.history.stop_reason = f"a gradient is not finite (norm {norm.item():g})"
        return False

    def after_step(self, step: int) -> None:
        if self._scheduler is not None and self.settings.scheduler_every == "step":
            self._scheduler.step()
        if self._ema is not None:
            self._ema.update(self.module)
        self.bound.after_step(step)

    def after_epoch(self, row: Mapping[str, float]) -> None:
        if self._scheduler is None or self.settings.scheduler_every != "epoch":
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(row[self.history.monitor])
        else:
            self._scheduler.step()

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        stateful = {"scheduler": self._scheduler, "ema": self._ema, "strategy": self.bound, "history": self.history}
        states = {name: each.state_dict() for name, each in stateful.items() if each is not None}
        return {**states, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self.bound.load_state_dict(state["strategy"])
        self.scaler.load_state_dict(state["scaler"])
        for name, part in (("scheduler", self._scheduler), ("ema", self._ema)):
            if part is not None and name in state:
                part.load_state_dict(state[name])


def make_scheduler(settings: Settings, optimizer: Any) -> Any:
    """Return the learning rate scheduler, or None.

    Raises:
        InvalidArgument: The function does not return a scheduler, or it needs a value at every step.
    """
    if settings.scheduler is None:
        return None
    try:
        scheduler = settings.scheduler(optimizer)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"scheduler= cannot be called with the optimizer alone: {error}; write scheduler=lambda optimizer: "
            "StepLR(optimizer, step_size=10)",
            field="scheduler",
        ) from error
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise InvalidArgument(
            f"scheduler= returned a {type(scheduler).__name__}; it must return a scheduler such as StepLR",
            field="scheduler",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and settings.scheduler_every == "step":
        raise InvalidArgument(
            "ReduceLROnPlateau follows the monitored value, which each epoch computes; use scheduler_every='epoch'",
            field="scheduler_every",
        )
    return scheduler


def _replicated_names(module: nn.Module, bound: Bound) -> tuple[str, ...]:
    """Return patterns of what is equal on all ranks, which they share the work of saving.

    Buffers, such as the statistics of a BatchNorm, differ until the next forward pass, so each rank saves its own.
    """
    if not bound.is_replicated:
        return ()
    if next(module.buffers(), None) is None:
        return ("module.*", "optimizer.*", "trainer.ema.*")
    return (*(f"module.{name}" for name, _ in module.named_parameters()), "optimizer.*", "trainer.ema.*")


def remaining_steps(loader: Any) -> Steps | BinSteps:
    """Return the batches of the epoch from the loader's position on."""
    rows = getattr(loader, "map_rows", None)
    found: Steps | BinSteps = (loader.dataset if rows is None else rows).steps(loader.position[1])
    return found


def skip_steps(loader: Any, num_steps: int, *, accumulate: int) -> None:
    """Move a loader past the batches of as many optimizer steps, without reading them: the order is arithmetic.

    Raises:
        StrataError: The epoch has fewer steps.
    """
    steps = remaining_steps(loader)
    num_batches = min(num_steps * accumulate, steps.num_batches)
    if num_batches <= (num_steps - 1) * accumulate:
        raise StrataError(f"{num_steps} steps need more than the {steps.num_batches} batches that the epoch has left")
    loader.load_state_dict({**loader.state_dict(), "position": steps.position_after(num_batches - 1)})


class _RowClock:
    """Counts the rows of all ranks in each step of a pass, without communication: the order is arithmetic."""

    def __init__(self, loader: Any) -> None:
        self.steps: Steps | BinSteps | None = None
        """The batches from the loader's position on; None if the loader does not know them."""
        self._next_batch = 0
        if getattr(loader, "has_global_state", False):
            self.steps = remaining_steps(loader)

    def group_rows(self, accumulate: int) -> int | None:
        """Return the rows of the next `accumulate` batches; None if the loader does not know. Counts repeated rows."""
        if self.steps is None:
            return None
        first = self._next_batch
        self._next_batch += accumulate
        batches = range(first, min(first + accumulate, self.steps.num_batches))
        return sum(map(self.steps.given_rows, batches))


class _NoScaler:
    """Stands in for a gradient scaler where none is needed."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def update(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


_END = object()
