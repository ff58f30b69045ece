"""Lightning under `strata run`: `Trainer(callbacks=[StrataCallback()])`.

Lightning dumps its whole state (model, optimizers, schedulers, loops, callbacks, precision plugin) into one dict and
restores from one. We store that dict in the run's checkpoints, and return it at the point where Lightning would have
loaded its own file. So everything that Lightning resumes is resumed, without a list here.

A step boundary is the end of a batch in which an optimizer has stepped. The last batch of an epoch is not one, because
validation and the hooks at the end of an epoch follow: there the boundary is the end of the epoch. The last step is
saved at the end of the last epoch. A fit that is interrupted saves nothing more.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from strata.errors import InvalidArgument
from strata.integrations import resume
from strata.train import rng

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from strata.train.context import Context

MODEL, OPTIMIZERS, REST = "model", "optimizers", "lightning"
"""Parts of a checkpoint."""
_LIGHTNINGS_NAMES = {MODEL: "state_dict", OPTIMIZERS: "optimizer_states"}
_NOT_STATE = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")
"""Constructor arguments, which may be any objects. A restarted script has them anyway."""


class StrataCallback(Checkpoint):  # Lightning runs callbacks of this base last
    """Report steps, save and restore through the run's checkpoints, and stop between two steps on request.

    Args:
        ctx: The context; default: `strata.init()` with the other arguments.
    """

    def __init__(self, ctx: Context | None = None, **arguments: Any) -> None:
        super().__init__()
        self.ctx = resume.context_of(ctx, arguments)
        self._step = 0
        """Number of optimizer steps after the last batch."""
        self._saved_world_size = 0
        """World size of the checkpoint that the fit resumes from; 0: a fresh start."""
        self._generators: dict[str, Any] = {}
        self._on_sigterm: Any = None

    # -- restoring -------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """
        Raises:
            InvalidArgument: The strategy shards its state, or the trainer's world size is not the run's.
        """
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            raise InvalidArgument(
                f"the strategy {type(trainer.strategy).__name__} shards the state across ranks, which this callback "
                f"cannot "
                'save yet; use strategy="ddp", or save with ctx.checkpoint',
                field="strategy",
            )
        if trainer.world_size != self.ctx.world_size:
            raise InvalidArgument(
                f"the trainer has {trainer.world_size} ranks and the run has {self.ctx.world_size}; pass it "
                'devices=ctx.identity.local_world_size, num_nodes=ctx.identity.num_nodes and strategy="ddp"',
                field="devices",
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Pass our state to Lightning, which is about to restore the state of training."""
        parts = {name: resume.Part() for name in (MODEL, OPTIMIZERS, REST)}
        if self.ctx.restore(parts).is_fresh:
            return
        self._generators = rng.take()
        self._saved_world_size = parts[REST].state["world_size"]
        trainer.should_stop = parts[REST].state.get("should_stop", False)
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = {
            **parts[REST].state["checkpoint"],
            **{name: parts[part].state for part, name in _LIGHTNINGS_NAMES.items()},
        }
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Restore the loaders. Their first epoch has begun, but no batch was taken.

        Raises:
            InvalidArgument: A loader has no state, so that rows would be repeated after a failure.
        """
        # Lightning's own handler calls a collective from inside the signal, and never saves.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._step = trainer.global_step
        fit_loop: Any = trainer.fit_loop
        loaders = fit_loop._combined_loader.flattened
        for loader in loaders:
            if not hasattr(loader, "load_state_dict"):
                raise InvalidArgument(
                    f"a {type(loader).__name__} has no state, so a resume in the middle of an epoch would repeat rows; "
                    f"{resume.CURE}, or, with a fixed number of workers, on torchdata's StatefulDataLoader",
                    field="train_dataloaders",
                )
        is_elastic = all(map(resume.has_global_state, loaders))
        if not is_elastic:
            self.ctx.attach(resume.FixedWorldSize(self.ctx.world_size), name="lightning")
        if self._saved_world_size:
            self._resume_data(trainer, loaders, is_elastic=is_elastic)

    def _resume_data(self, trainer: pl.Trainer, loaders: list[Any], *, is_elastic: bool) -> None:
        fit_loop: Any = trainer.fit_loop
        if not fit_loop.restarted_mid_epoch:  # the next epoch begins
            rng.put(self._generators)
            for loader in loaders:
                if resume.has_global_state(loader):
                    # With max_steps, Lightning still counts the completed epoch as the current one.
                    loader.set_epoch(fit_loop.epoch_progress.current.processed)
            if fit_loop.restarted_on_epoch_end:  # Lightning ends that epoch again and would count it twice
                fit_loop.epoch_progress.current.processed -= 1  # samplers receive it as the epoch
                fit_loop.epoch_progress.total.processed -= 1
            else:
                iter(fit_loop._data_fetcher)
            return
        if not is_elastic:
            # Lightning has begun the epoch before it set the epoch of the samplers.
            states = fit_loop._combined_loader._state_dicts()
            for loader in loaders:
                _set_epoch(loader, trainer.current_epoch)
            fit_loop._combined_loader._load_state_dicts(states)
            iter(fit_loop._data_fetcher)
        elif self._saved_world_size != self.ctx.world_size:
            done = resume.batches_done(loaders[0], accumulate=trainer.accumulate_grad_batches)
            now = fit_loop.epoch_loop.batch_progress.current
            now.ready = now.started = now.processed = done
            now.completed = done - 1  # as when the checkpoint was saved, in the hook at the end of a batch
        rng.put(self._generators)

    # -- after steps -----------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self,
        trainer: Any,  # untyped: its constructor sets some attributes elsewhere
        pl_module: pl.LightningModule,  # noqa: ARG002
        outputs: Any,
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        self._step = trainer.global_step
        metrics = {}
        if self._step % trainer.log_every_n_steps == 0 and isinstance(outputs, dict) and "loss" in outputs:
            metrics["loss"] = float(outputs["loss"])  # not after every step: it synchronizes with the device
        self.ctx.report(step=self._step, epoch=trainer.current_epoch, **metrics)
        if not trainer.fit_loop.epoch_loop._is_training_done and not _is_stopping(trainer):
            state = resume.LazyState(lambda: self._state(trainer, is_mid_epoch=True))
            self.ctx.maybe_checkpoint(state, step=self._step, is_passing=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        state = resume.LazyState(lambda: self._state(trainer, is_mid_epoch=False))
        self.ctx.maybe_checkpoint(state, step=self._step, is_passing=True)
        if _is_last_epoch(trainer):  # `on_train_end` is too late: Lightning resumes from the end of an epoch
            self.ctx.save_last(state, saves_again=_is_stopping(trainer))

    def _state(self, trainer: pl.Trainer, *, is_mid_epoch: bool) -> dict[str, Any]:
        dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        parts = {part: dumped.pop(name) for part, name in _LIGHTNINGS_NAMES.items()}
        kept = {name: value for name, value in dumped.items() if name not in _NOT_STATE}
        if not is_mid_epoch:  # a loader at the end of its epoch starts anew, without a state
            kept["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        rest = {"world_size": self.ctx.world_size, "should_stop": _is_stopping(trainer), "checkpoint": kept}
        return {**parts, REST: rest}


def _is_stopping(trainer: Any) -> bool:
    """Return whether the fit stops before its limits, as by `EarlyStopping`. Lightning's checkpoints do not have it."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def _is_last_epoch(trainer: Any) -> bool:
    """Return whether the epoch that ends is the last: as `fit_loop.done`, which also sets a counter."""
    fit_loop = trainer.fit_loop
    is_last = fit_loop.max_epochs not in (None, -1) and fit_loop.epoch_progress.current.processed >= fit_loop.max_epochs
    return bool(is_last or 0 <= fit_loop.max_steps <= trainer.global_step or _is_stopping(trainer))


def _set_epoch(loader: Any, epoch: int) -> None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
