"""The Trainer of transformers under `strata run`.

    callback = StrataCallback()
    trainer = Trainer(…, callbacks=[callback])
    callback.train(trainer)  # instead of trainer.train()

The Trainer decides where to resume before any callback is asked, from files in a directory. So `train` gives it one
that holds its counters and no weights; these are loaded in place, from the run's checkpoint, when everything is
prepared. The Trainer itself skips the batches that were trained on: its own loader skips indices; ours, which stands at
the right row already, is seen through placeholders for what was read before.

A step boundary is the end of an optimizer step after which nothing else happens: not one after which the Trainer
evaluates, nor the last of an epoch. The end of training is one, too: there the last step is saved. Training that is
abandoned saves nothing more.
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
"""Where nearly every step is followed by something, a save cannot wait for one that is not."""
_SCRATCH = "strata-resume-"
_STATE_FILE = "trainer_state.json"
"""Where the Trainer keeps its counters, in a directory that it resumes from."""


class StrataCallback(TrainerCallback):
    """Reports steps, saves and restores through the run's checkpoints, and stops between two steps when asked to.

    Args:
        ctx: Of `strata.init()`; left out, it is made, with the other arguments.
        loader: Of `ctx.dataloader`, to train on instead of the Trainer's `train_dataset`: then the run can be scaled.
    """

    def __init__(self, ctx: Context | None = None, *, loader: Any = None, **arguments: Any) -> None:
        if loader is not None and not resume.has_global_state(loader):
            raise InvalidArgument(
                f"loader= takes one of ctx.dataloader(…), not a {type(loader).__name__}; leave it out, and give the "
                "Trainer its train_dataset",
                field="loader",
            )
        self.ctx = resume.context_of(ctx, arguments)
        self._loader = None if loader is None else _Loader(loader)
        self._trainer: Trainer | None = None
        self._offset = 0
        """Steps of the run, less those of the Trainer, which counts anew when the number of workers changes."""
        self._steps_per_epoch = 1
        self._saved: Mapping[str, Any] = {}
        """The part of the checkpoint that is resumed from that is ours; empty on a fresh start."""
        self._generators: dict[str, Any] = {}
        """To be put back when the loader has begun."""
        self._num_deferred = 0
        """Steps in a row after which it was no time to save."""

    def train(self, trainer: Trainer, **arguments: Any) -> Any:
        """`trainer.train()`, from the run's last checkpoint if it has one.

        Raises:
            InvalidArgument: The Trainer shards its state, has other ranks than the run, or resumes elsewhere.
            ConfigError: Another number of workers cannot go on from the checkpoint.
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
                "DeepSpeed and FSDP keep parts of the state on each rank, which this callback cannot save yet; use DDP",
                field="args",
            )
        if trainer.args.world_size != self.ctx.world_size:
            raise InvalidArgument(
                f"the Trainer has {trainer.args.world_size} ranks and the run {self.ctx.world_size}; make its "
                "TrainingArguments in the script that `strata run` starts, with use_cpu=True where there is no GPU",
                field="args",
            )
        if self._loader is None and not getattr(trainer.args.accelerator_config, "use_seedable_sampler", True):
            raise InvalidArgument(
                "without use_seedable_sampler the Trainer resumes an epoch in another order, so that rows would be "
                f"repeated; leave it on, or {resume.CURE}: StrataCallback(ctx, loader=loader)",
                field="use_seedable_sampler",
            )
        if trainer.args.ignore_data_skip:
            raise InvalidArgument(
                "ignore_data_skip would repeat the rows of the epoch under way; leave it out", field="ignore_data_skip"
            )

    # -- restoring -------------------------------------------------------------------------------------------------

    def _write_counters(self, trainer: Trainer, directory: Path) -> bool:
        """Whether there is a checkpoint. In the directory is then what the Trainer finds out from where it resumes."""
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
        """The same place in the data, in steps of the present number of workers."""
        if self._loader is None or self._saved["world_size"] == self.ctx.world_size:
            return saved
        if trainer.args.max_steps > 0:
            raise ConfigError(
                f"max_steps={trainer.args.max_steps} counts steps of {self._saved['world_size']} workers, and now "
                f"there are {self.ctx.world_size}; say how long to train with num_train_epochs instead",
                field="max_steps",
            )
        accumulate = trainer.args.gradient_accumulation_steps
        steps_per_epoch = -(-len(self._loader) // accumulate)
        done = resume.batches_done(self._loader.dataset.loader, accumulate=accumulate) if self._saved["is_mid"] else 0
        return int(self._saved["epoch"]) * steps_per_epoch + done // accumulate

    def on_train_begin(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:
        """Everything is prepared: the state goes into place.

        Raises:
            InvalidArgument: Training was begun by `trainer.train()`.
        """
        if self._trainer is None:
            raise InvalidArgument(
                "start training with callback.train(trainer); trainer.train() would begin anew after every failure",
                field="callbacks",
            )
        batches = prepared["train_dataloader"]
        accumulate = args.gradient_accumulation_steps
        # Without a length the Trainer takes all of its steps for one epoch.
        self._steps_per_epoch = -(-len(batches) // accumulate) if hasattr(batches, "__len__") else state.max_steps
        if self._saved:
            self.ctx.restore(self._parts(prepared))
            if self._saved["world_size"] != self.ctx.world_size and isinstance(prepared["lr_scheduler"], LambdaLR):
                prepared["lr_scheduler"].last_epoch = state.global_step  # as far along the schedule as in the data
            done = state.global_step % self._steps_per_epoch
            if done:
                self._generators = rng.take()
                if self._loader is not None:
                    self._loader.dataset.num_skipped = done * accumulate
            if self._saved.get("is_over", False) or state.global_step >= state.max_steps:
                self._trainer._run_epoch = _run_no_epoch(control)  # type: ignore[method-assign]  # it would step again
        self._offset = self.ctx.step - state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:  # noqa: ARG002
        if self._generators:  # the loader has begun, for which torch draws random numbers
            rng.put(self._generators)
            self._generators = {}

    # -- after steps -----------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:  # noqa: ARG002
        step = state.global_step + self._offset
        epoch, done = divmod(state.global_step, self._steps_per_epoch)
        self.ctx.report(step=step, epoch=epoch)
        # What follows in the same step would be left out after a resume.
        is_followed = control.should_evaluate or control.should_training_stop or not done
        self._num_deferred = self._num_deferred + 1 if is_followed else 0
        if self._num_deferred in (0, MAX_DEFERRED):
            self._num_deferred = 0
            now = resume.LazyState(lambda: self._state(state, prepared))
            self.ctx.maybe_checkpoint(now, step=step, is_passing=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **prepared: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            return  # the model is no longer that of the last step
        is_over = bool(control.should_training_stop and state.global_step < state.max_steps)
        last = resume.LazyState(lambda: self._state(state, prepared, is_over=is_over))
        self.ctx.save_last(last, saves_again=is_over)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        metrics: dict[str, Any] = {name: value for name, value in numbers.items() if name not in ("step", "epoch")}
        if state.global_step:
            self.ctx.report(step=state.global_step + self._offset, **metrics)

    def _state(self, state: Any, prepared: Mapping[str, Any], *, is_over: bool = False) -> dict[str, Any]:
        """`is_over`: before the limits of the Trainer, which would train on."""
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
    """A loader of ours, as the Trainer and Accelerate can skip batches of it that were read before."""

    dataset: _Batches

    def __init__(self, loader: Any) -> None:
        # With a generator of its own: torch would draw from the one of training.
        super().__init__(_Batches(loader), batch_size=None, collate_fn=_as_it_is, generator=torch.Generator())

    def __len__(self) -> int:
        return len(self.dataset.loader)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.loader.set_epoch(epoch)


class _Batches(IterableDataset[Any]):
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.num_skipped = 0
        """Batches that the next pass hands out as placeholders, which the Trainer drops."""

    def __iter__(self) -> Iterator[Any]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        return chain(repeat(None, num_skipped), self.loader)


def _as_it_is(batch: Any) -> Any:
    return batch


def _load_no_weights(*_: Any, **__: Any) -> None:
    """In place of the Trainer's method, which wants to find a file: they are not in the directory, and come later."""


def _run_no_epoch(control: Any) -> Any:
    def run_epoch(**_: Any) -> None:
        control.should_training_stop = True

    return run_epoch
