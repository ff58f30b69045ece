"""The transformers `Trainer` under `strata run`.

    callback = StrataCallback()
    trainer = Trainer(…, callbacks=[callback])
    callback.train(trainer)  # instead of trainer.train()

The Trainer decides where to resume before it calls any callback, from files in a directory. So `train` gives it a
directory with its counters but no weights; these are loaded in place from the run's checkpoint once everything is
prepared. The Trainer itself skips the batches that were trained on: its own loader skips indices; ours is already at
the right row, so it yields placeholders for the batches to skip.

A step boundary is the end of an optimizer step that is followed by nothing else: neither by an evaluation nor by the
end of an epoch. The end of training is one, too: there the last step is saved. Training that is interrupted saves
nothing more.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from strata.errors import ConfigError, InvalidArgument
from strata.integrations import resume
from strata.scratch import Scratch
from strata.train import rng

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import Trainer

    from strata.train.context import Context

MAX_DEFERRED = 3
"""Most steps by which a save is postponed because something follows them."""
_SCRATCH = "strata-resume-"
_STATE_FILE = "trainer_state.json"
"""File with the Trainer's counters, in the directory that it resumes from."""


class StrataCallback(TrainerCallback):
    """Report steps, save and restore through the run's checkpoints, and stop between two steps on request.

    Args:
        ctx: The context; default: `strata.init()` with the other arguments.
        loader: A loader of `ctx.dataloader` to use instead of the Trainer's `train_dataset`; then the run can scale.
    """

    def __init__(self, ctx: Context | None = None, *, loader: Any = None, **arguments: Any) -> None:
        if loader is not None and not resume.has_global_state(loader):
            raise InvalidArgument(
                f"loader= must be a loader of ctx.dataloader(…), not a {type(loader).__name__}; leave it out and pass "
                "the Trainer its train_dataset",
                field="loader",
            )
        self.ctx = resume.context_of(ctx, arguments)
        self._loader = None if loader is None else _Loader(loader)
        self._trainer: Trainer | None = None
        self._offset = 0
        """Steps of the run minus those of the Trainer, which recounts when the world size changes."""
        self._steps_per_epoch = 1
        self._saved: Mapping[str, Any] = {}
        """Our part of the checkpoint that training resumes from; empty on a fresh start."""
        self._generators: dict[str, Any] = {}
        """States to restore once the loader has started."""
        self._num_deferred = 0
        """Steps in a row that were no step boundary."""

    def train(self, trainer: Trainer, **arguments: Any) -> Any:
        """Call `trainer.train()`, resuming from the run's last checkpoint if there is one.

        Raises:
            InvalidArgument: The Trainer shards its state, its world size is not the run's, or it resumes elsewhere.
            ConfigError: This world size cannot resume from the checkpoint.
        """
        self._check(trainer, arguments)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        loader = self._loader
        if loader is not None:
            trainer.get_train_dataloader = lambda: loader  # type: ignore[method-assign]
        trainer._load_from_checkpoint = _load_no_weights  # type: ignore[method-assign]
        try:
            with Scratch(_SCRATCH) as scratch:
                has_checkpoint = self._write_counters(trainer, scratch.path)
                return trainer.train(resume_from_checkpoint=str(scratch.path) if has_checkpoint else None, **arguments)
        finally:
            del trainer._load_from_checkpoint
            trainer.__dict__.pop("_run_epoch", None)

    def _check(self, trainer: Trainer, arguments: Mapping[str, Any]) -> None:
        if arguments.get("resume_from_checkpoint") or trainer.args.resume_from_checkpoint:
            raise InvalidArgument(
                "the run resumes from its own checkpoints; leave out resume_from_checkpoint",
                field="resume_from_checkpoint",
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise InvalidArgument(
                "DeepSpeed and FSDP shard the state across ranks, which this callback cannot save yet; use DDP",
                field="args",
            )
        if trainer.args.world_size != self.ctx.world_size:
            raise InvalidArgument(
                f"the Trainer has {trainer.args.world_size} ranks and the run has {self.ctx.world_size}; create its "
                "TrainingArguments in the script that `strata run` starts, with use_cpu=True on machines without a GPU",
                field="args",
            )
        if self._loader is None and not getattr(trainer.args.accelerator_config, "use_seedable_sampler", True):
            raise InvalidArgument(
                "without use_seedable_sampler the Trainer resumes an epoch in another order, and rows would be "
                f"repeated; leave it on, or {resume.CURE}: StrataCallback(ctx, loader=loader)",
                field="use_seedable_sampler",
            )
        if trainer.args.ignore_data_skip:
            raise InvalidArgument(
                "ignore_data_skip would repeat rows of the current epoch; leave it out", field="ignore_data_skip"
            )

    # -- restoring -------------------------------------------------------------------------------------------------

    def _write_counters(self, trainer: Trainer, directory: Path) -> bool:
        """Write what the Trainer needs to find its resume point; return whether there is a checkpoint."""
        if self._loader is None:
            self.ctx.attach(resume.FixedWorldSize(self.ctx.world_size), name="transformers")
        part = resume.Part()
        if self.ctx.restore({"trainer": part}).is_fresh:
            return False
        self._saved = part.state
        state = json.loads(self._saved["state"])
        state["global_step"] = self._global_step(trainer, state["global_step"])
        (directory / _STATE_FILE).write_text(json.dumps(state))
        return True

    def _global_step(self, trainer: Trainer, saved: int) -> int:
        """Return the current position in the data, in steps of the current world size."""
        if self._loader is None or self._saved["world_size"] == self.ctx.world_size:
            return saved
        if trainer.args.max_steps > 0:
            raise ConfigError(
                f"max_steps={trainer.args.max_steps} counts steps of {self._saved['world_size']} workers, and now "
                f"there are {self.ctx.world_size}; set num_train_epochs instead",
                field="max_steps",
            )
        accumulate = trainer.args.gradient_accumulation_steps
        steps_per_epoch = -(-len(self._loader) // accumulate)
        done = resume.batches_done(self._loader.dataset.loader, accumulate=accumulate) if self._saved["is_mid"] else 0
        return int(self._saved["epoch"]) * steps_per_epoch + done // accumulate

    def on_train_begin(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:
        """Load the state, now that everything is prepared.

        Raises:
            InvalidArgument: Training was started with `trainer.train()`.
        """
        if self._trainer is None:
            raise InvalidArgument(
                "start training with callback.train(trainer); trainer.train() would start anew after every failure",
                field="callbacks",
            )
        batches = prepared["train_dataloader"]
        accumulate = args.gradient_accumulation_steps
        # Without a length, the Trainer counts all of its steps as one epoch.
        self._steps_per_epoch = -(-len(batches) // accumulate) if hasattr(batches, "__len__") else state.max_steps
        if self._saved:
            self.ctx.restore(self._parts(prepared))
            if self._saved["world_size"] != self.ctx.world_size and isinstance(prepared["lr_scheduler"], LambdaLR):
                prepared[
                    "lr_scheduler"
                ].last_epoch = state.global_step  # the same position in the schedule as in the data
            done = state.global_step % self._steps_per_epoch
            if done:
                self._generators = rng.take()
                if self._loader is not None:
                    self._loader.dataset.num_skipped = done * accumulate
            if self._saved.get("is_over", False) or state.global_step >= state.max_steps:
                self._trainer._run_epoch = _run_no_epoch(control)  # type: ignore[method-assign]  # it would make another step
        self._offset = self.ctx.step - state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:  # noqa: ARG002
        if self._generators:  # torch has drawn random numbers to start the loader
            rng.put(self._generators)
            self._generators = {}

    # -- after steps -----------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:  # noqa: ARG002
        step = state.global_step + self._offset
        epoch, done = divmod(state.global_step, self._steps_per_epoch)
        self.ctx.report(step=step, epoch=epoch)
        # What follows in the same step would be skipped after a resume.
        is_followed = control.should_evaluate or control.should_training_stop or not done
        self._num_deferred = self._num_deferred + 1 if is_followed else 0
        if self._num_deferred in (0, MAX_DEFERRED):
            self._num_deferred = 0
            now = resume.LazyState(lambda: self._state(state, prepared))
            self.ctx.maybe_checkpoint(now, step=step, is_passing=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            return  # the model is the best one, not that of the last step
        is_over = bool(control.should_training_stop and state.global_step < state.max_steps)
        last = resume.LazyState(lambda: self._state(state, prepared, is_over=is_over))
        self.ctx.save_last(last, saves_again=is_over)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        metrics: dict[str, Any] = {name: value for name, value in numbers.items() if name not in ("step", "epoch")}
        if state.global_step:
            self.ctx.report(step=state.global_step + self._offset, **metrics)

    def _state(self, state: Any, prepared: Mapping[str, Any], *, is_over: bool = False) -> dict[str, Any]:
        """Return the state to save. `is_over`: training stops before the Trainer's limits."""
        assert self._trainer is not None
        epoch, done = divmod(state.global_step, self._steps_per_epoch)
        everyone = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        stateful: list[Any] = [each for each in everyone if isinstance(each, ExportableState)]
        named = TrainerState(stateful_callbacks=stateful)
        counters = {**dataclasses.asdict(state), "stateful_callbacks": named.stateful_callbacks}
        ours = {"state": json.dumps(counters), "world_size": self.ctx.world_size, "epoch": epoch, "is_mid": done > 0}
        return {**self._parts(prepared), "trainer": {**ours, "is_over": is_over}}

    def _parts(self, prepared: Mapping[str, Any]) -> dict[str, Any]:
        parts = {name: prepared[name] for name in ("model", "optimizer", "lr_scheduler")}
        scaler = getattr(prepared["optimizer"], "scaler", None)
        return parts if scaler is None else {**parts, "scaler": scaler}


class _Loader(DataLoader[Any]):
    """One of our loaders, in a form whose batches the Trainer and Accelerate can skip."""

    dataset: _Batches

    def __init__(self, loader: Any) -> None:
        # With its own generator: otherwise torch would draw from the training script's.
        super().__init__(_Batches(loader), batch_size=None, collate_fn=_as_it_is, generator=torch.Generator())

    def __len__(self) -> int:
        return len(self.dataset.loader)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.loader.set_epoch(epoch)


class _Batches(IterableDataset[Any]):
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.num_skipped = 0
        """Number of placeholders that the next epoch yields first, which the Trainer skips."""

    def __iter__(self) -> Iterator[Any]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        return chain(repeat(None, num_skipped), self.loader)


def _as_it_is(batch: Any) -> Any:
    return batch


def _load_no_weights(*_: Any, **__: Any) -> None:
    """Replace the Trainer's method, which needs a file: the weights are loaded later."""


def _run_no_epoch(control: Any) -> Any:
    def run_epoch(**_: Any) -> None:
        control.should_training_stop = True

    return run_epoch
