"""Accelerate under `strata run`. The script has its own training loop, so this is an object with two calls for it.

    loop = StrataLoop(accelerator, ctx)
    loop.restore()                # once, after accelerator.prepare
    …
        loop.step(loss=loss)      # after every batch

The run's checkpoints contain what `accelerator.save_state` would save: prepared models, optimizers and schedulers, the
gradient scaler, and objects registered for checkpointing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument
from strata.integrations import resume

if TYPE_CHECKING:
    from accelerate import Accelerator

    from strata.train.context import Context, Progress

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class StrataLoop:
    """Report steps, save and restore through the run's checkpoints, and stop between two steps on request.

    Args:
        ctx: The context; default: `strata.init()` with the other arguments.
    """

    def __init__(self, accelerator: Accelerator, ctx: Context | None = None, **arguments: Any) -> None:
        """
        Raises:
            InvalidArgument: The accelerator shards its state, or its world size is not the run's.
        """
        self.accelerator = accelerator
        self.ctx = resume.context_of(ctx, arguments)
        if accelerator.distributed_type.value in _SHARDED:
            raise InvalidArgument(
                f"{accelerator.distributed_type.value} shards the state across ranks, which StrataLoop cannot save "
                "yet; use DDP",
                field="accelerator",
            )
        if accelerator.num_processes != self.ctx.world_size:
            raise InvalidArgument(
                f"the accelerator has {accelerator.num_processes} processes and the run has {self.ctx.world_size}; "
                "create it in the script that `strata run` starts, with cpu=True on machines without a GPU",
                field="accelerator",
            )

    def restore(self) -> Progress:
        """Load the last committed checkpoint into everything that was prepared or registered; return the progress.

        Raises:
            InvalidArgument: A prepared loader has no state, so that rows would be repeated after a failure.
        """
        for loader in self.accelerator._dataloaders:
            if resume.has_global_state(loader):
                continue  # `ctx.dataloader` has attached it
            if not getattr(loader, "use_stateful_dataloader", False):
                raise InvalidArgument(
                    "a loader that Accelerate has prepared has no state, so a resume in the middle of an epoch would "
                    f"repeat rows; {resume.CURE}, or, with a fixed number of workers, pass the Accelerator "
                    "DataLoaderConfiguration(use_stateful_dataloader=True)",
                    field="accelerator",
                )
            self.ctx.attach(loader)
            self.ctx.attach(resume.FixedWorldSize(self.ctx.world_size))
        return self.ctx.restore(self._parts())

    def step(self, **metrics: Any) -> None:
        """Report a step; call it after every batch, on every rank. It does nothing while gradients accumulate."""
        if not self.accelerator.sync_gradients:
            return
        step = self.ctx.step + 1
        numbers: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
        self.ctx.report(step=step, **numbers)
        self.ctx.maybe_checkpoint(self._parts(), step=step)

    def _parts(self) -> dict[str, Any]:
        accelerator = self.accelerator
        # Without the wrapper that depends on the world size, which may differ next time.
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
