"""Ranks that train on their own for several steps and then meet: LocalSGD and DiLoCo.

No gradient is sent. After `local_steps` optimizer steps, the ranks average their weights (LocalSGD; Stich, 2019). With
an outer optimizer (DiLoCo; Douillard et al., 2023), they average how far they have moved from the last common weights,
the *anchor*, and take that as the gradient of a Nesterov step from the anchor. With `outer_lr=1` and no momentum, this
is LocalSGD again.

Optimizer states stay local. Floating-point buffers, such as the statistics of BatchNorm, are averaged with the weights;
all other buffers become those of rank 0.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from strata.trainer.strategy.base import Bound
from strata.trainer.strategy.reduce import Scratch
from strata.trainer.strategy.replicas import broadcast_from_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from strata.trainer.strategy.cost import Decision
    from strata.trainer.strategy.reduce import Averager

KEY = "local_steps"
"""Name of this part of a strategy's state."""


class LocalSteps(Bound):
    """Averages weights every few steps."""

    is_replicated = False

    def __init__(
        self,
        module: nn.Module,
        decision: Decision,
        averager: Averager,
        *,
        local_steps: int,
        outer: OuterStep | None,
        bucket_mb: float,
    ) -> None:
        """`outer`: None averages the weights themselves."""
        self.module = module
        self.decision = decision
        self._averager = averager
        self._local_steps = local_steps
        self._outer = outer
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._scratch = Scratch()
        self._step = self._synchronized_step = 0
        broadcast_from_first([*module.parameters(), *module.buffers()])
        if outer is not None:
            outer.drop_anchor(self._weights())

    def accumulating(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def after_step(self, step: int) -> None:
        """Average the weights if this was the last of `local_steps` steps."""
        self._step = step
        if step - self._synchronized_step >= self._local_steps:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Average the weights, unless no step was made since the last time."""
        if self._step == self._synchronized_step:
            return
        self._synchronized_step = self._step
        weights, buffers = self._weights(), dict(self.module.named_buffers())
        if self._outer is None:
            self._average_(weights.values())
        else:
            self._outer.step(weights, self._average_)
        self._average_(buffer for buffer in buffers.values() if buffer.is_floating_point())
        broadcast_from_first(buffer for buffer in buffers.values() if not buffer.is_floating_point())

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.module.named_parameters() if weight.requires_grad}

    def _average_(self, tensors: Iterable[Tensor]) -> None:
        """Average tensors in place, in messages of about a bucket."""
        for bucket in cut(tensors, self._bucket_bytes):
            sizes = [tensor.numel() for tensor in bucket]
            flat = self._scratch.take(sum(sizes), like=bucket[0])
            torch.cat([tensor.reshape(-1) for tensor in bucket], out=flat)
            self._averager.average_(flat)
            for tensor, mean in zip(bucket, flat.split_with_sizes(sizes), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the last average, and the anchor and velocity of the outer optimizer."""
        outer = {} if self._outer is None else self._outer.state_dict()
        return {KEY: {"step": self._step, "synchronized_step": self._synchronized_step, **outer}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, after the module's own. Without one, the module's weights become the anchor."""
        found = state.get(KEY, {})
        self._step, self._synchronized_step = (int(found.get(name, 0)) for name in ("step", "synchronized_step"))
        if self._outer is not None:
            self._outer.drop_anchor(self._weights())
            self._outer.load_state_dict(found)


class OuterStep:
    """Nesterov SGD on the anchor; its gradient is the mean way from the ranks' weights back to the anchor."""

    def __init__(self, *, lr: float, momentum: float) -> None:
        self._lr = lr
        self._momentum = momentum
        self._anchor: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}

    def drop_anchor(self, weights: Mapping[str, Tensor]) -> None:
        """Make these weights the anchor, without velocity."""
        self._anchor = {name: weight.clone() for name, weight in weights.items()}
        self._velocity = {}

    def step(self, weights: Mapping[str, Tensor], average_: Callable[[Iterable[Tensor]], None]) -> None:
        """Move the anchor, and the weights to it."""
        gradients = {name: self._anchor[name] - weight for name, weight in weights.items()}
        average_(gradients.values())
        for name, gradient in gradients.items():
            if self._momentum:
                velocity = self._velocity.setdefault(name, torch.zeros_like(gradient))
                velocity.mul_(self._momentum).add_(gradient)
                gradient.add_(velocity, alpha=self._momentum)
            self._anchor[name].sub_(gradient, alpha=self._lr)
            weights[name].copy_(self._anchor[name])

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": dict(self._anchor), "velocity": dict(self._velocity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore anchor and velocity of the parameters that still exist."""
        for name, anchor in self._anchor.items():
            if name in state.get("anchor", ()):
                anchor.copy_(state["anchor"][name])
            if name in state.get("velocity", ()):
                self._velocity[name] = state["velocity"][name].to(anchor.device, copy=True)


def cut(tensors: Iterable[Tensor], limit_bytes: int) -> list[list[Tensor]]:
    """Group tensors of the same type and device, in order, into lists of at most `limit_bytes` or one tensor."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket, held_bytes = open_buckets.get(key, ([], 0))
        if not bucket or held_bytes + tensor.nbytes > limit_bytes:
            bucket, held_bytes = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        open_buckets[key] = (bucket, held_bytes + tensor.nbytes)
    return buckets
