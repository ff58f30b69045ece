"""Accelerate under `strata run`. The training loop is the script's own, so this is an object with two calls for it.

    loop = StrataLoop(accelerator, ctx)
    loop.restore()                # once, after accelerator.prepare
    …
        loop.step(loss=loss)      # after every batch

What `accelerator.save_state` would save goes into the run's checkpoints: prepared models, optimizers and schedulers,
the gradient scaler, and objects that were registered for checkpointing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument
from strata.integrations import resume

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    from strata.train.context import Context, Progress

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class StrataLoop:
    """Reports steps, saves and restores through the run's checkpoints, and stops between two steps when asked to.

    Args:
        ctx: Of `strata.init()`; left out, it is made, with the other arguments.
    """

    def __init__(self, accelerator: Accelerator, ctx: Context | None = None, **arguments: Any) -> None:
        """
        Raises:
            InvalidArgument: The accelerator shards its state, or has other ranks than the run.
        """
        self.accelerator = accelerator
        self.ctx = resume.context_of(ctx, arguments)
        if accelerator.distributed_type.value in _SHARDED:
            raise InvalidArgument(
                f"{accelerator.distributed_type.value} keeps parts of the state on each rank, which StrataLoop cannot "
                "save yet; use DDP",
                field="accelerator",
            )
        if accelerator.num_processes != self.ctx.world_size:
            raise InvalidArgument(
                f"the accelerator has {accelerator.num_processes} processes and the run {self.ctx.world_size}; make it "
                "in the script that `strata run` starts, with cpu=True where there is no GPU",
                field="accelerator",
            )

    def restore(self) -> Progress:
        """Puts the last committed checkpoint into everything that was prepared or registered; returns where it stands.

        Raises:
            InvalidArgument: A prepared loader keeps no state, so that after a failure rows would be repeated.
        """
        for loader in self.accelerator._dataloaders:
            if resume.has_global_state(loader):
                continue  # `ctx.dataloader` has attached it
            if not getattr(loader, "use_stateful_dataloader", False):
                raise InvalidArgument(
                    "a loader that Accelerate has prepared keeps no state, so that a resume in the middle of an epoch "
                    f"would repeat rows; {resume.CURE}, or, with a fixed number of workers, give the Accelerator "
                    "DataLoaderConfiguration(use_stateful_dataloader=True)",
                    field="accelerator",
                )
            self.ctx.attach(loader)
            self.ctx.attach(resume.FixedWorldSize(self.ctx.world_size))
        return self.ctx.restore(self._parts())

    def step(self, **metrics: Any) -> None:
        """After every batch, on every rank. While gradients are accumulated nothing happens."""
        if not self.accelerator.sync_gradients:
            return
        step = self.ctx.step + 1
        numbers: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
        self.ctx.report(step=step, **numbers)
        self.ctx.maybe_checkpoint(self._parts(), step=step)

    def _parts(self) -> dict[str, Any]:
        accelerator = self.accelerator
        # Without what the number of processes puts around a model: there may be another number next time.
        models = [accelerator.unwrap_model(model) for model in accelerator._models]
        parts = {
            **_named("model", models),
            **_named("optimizer", accelerator._optimizers),
            **_named("scheduler", accelerator._schedulers),
            **_named("registered", accelerator._custom_objects),
        }
        return parts if accelerator.scaler is None else {**parts, "scaler": accelerator.scaler}


def _named(kind: str, things: list[Any]) -> dict[str, Any]:
    return {kind if number == 0 else f"{kind}-{number}": thing for number, thing in enumerate(things)}
