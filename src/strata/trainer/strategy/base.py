"""The port of strategies: how the replicas of a module on all ranks stay the same module.

A `Strategy` is a description that travels with the job. On every worker, `bind` turns it and the module into a `Bound`,
which the training loop calls around the backward pass and after each optimizer step:

    bound = strategy.bind(module, ranks)
    for step, micro_batches in enumerate(batches, start=1):
        for micro_batch in micro_batches[:-1]:
            bound.prepare([Upcoming(micro_batch, 0)])
            with bound.accumulating():
                loss(bound.module(micro_batch)).backward()
        bound.prepare([Upcoming(micro_batches[-1], 0)])
        loss(bound.module(micro_batches[-1])).backward()
        optimizer.step()
        bound.push()
        bound.after_step(step)
    bound.finish()
    bound.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from strata.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

Ranks: TypeAlias = Identity
"""The rank of this process, the world size, and its place among the nodes."""


class Upcoming(NamedTuple):
    """A batch that is about to be trained."""

    batch: Any
    """What the loader delivered."""
    steps_ahead: int
    """Optimizer steps before the one that the batch belongs to; 0: the current one."""


class Strategy(Protocol):
    """A frozen, picklable description of how ranks train together."""

    def bind(self, module: nn.Module, ranks: Ranks) -> Bound:
        """Prepare the module for training on these ranks. Collective: all ranks call it with the same module.

        With more than one rank, torch's process group must exist. Parameters and buffers are broadcast from rank 0.
        """
        ...


class Bound(Protocol):
    """A strategy at work on one rank. All ranks make the same calls in the same order. An implementation inherits from
    it, and with it the calls that it has no use for.
    """

    module: nn.Module
    """Call this one in the forward pass. It shares its parameters with the module that was bound."""

    is_replicated: bool
    """Whether all ranks hold the same parameters after every step. If not, a checkpoint must store those of each
    rank, so they must not be listed in `replicated=`."""

    num_ahead: int = 0
    """How many batches after the current one the strategy wants to see."""

    def prepare(self, batches: Sequence[Upcoming]) -> None:  # noqa: ARG002 - for implementations
        """Called before each forward pass with its batch, and with up to `num_ahead` batches after it where the loader
        allows it.
        """
        return

    def settle(self) -> None:
        """Called before all ranks do something together. Wait until the steps of this rank have taken effect."""
        return

    def accumulating(self) -> AbstractContextManager[None]:
        """Run forward and backward passes inside it without communication; their gradients add up locally."""
        ...

    def begin(self) -> None:
        """Called once, after a checkpoint was restored and before the first step."""
        return

    def push(self) -> None:
        """Send gradients to where their parameters live, if that is not this process. Called after each optimizer
        step, before gradients are cleared.
        """
        return

    def close(self) -> None:
        """Leave the module as plain as it was bound. Called once, after the last step."""
        return

    @property
    def waited_s(self) -> float:
        """Seconds in total for which the training thread has waited for other ranks, without torch's collectives."""
        return 0.0

    def after_step(self, step: int) -> None:
        """Do what is due after an optimizer step, such as averaging the weights every few steps."""
        ...

    def finish(self) -> None:
        """Leave the same parameters and buffers on all ranks. Call it before a validation and at the end of training;
        training may continue afterwards.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, beyond the module and the optimizer, to resume exactly."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, which may come from another world size."""
        ...
