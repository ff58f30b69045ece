"""Evaluation and prediction: every row once, metrics over all rows of all ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils._pytree import tree_map, tree_map_only

from strata.errors import InvalidArgument
from strata.trainer.diagnosis import OF_MODULES, explain
from strata.trainer.objective import own_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.trainer.batches import Batch, Splitter
    from strata.trainer.metrics import MetricSet
    from strata.trainer.optimizer import Ema
    from strata.trainer.trainer import Trainer

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Evaluator:
    """Runs a module without training it."""

    def __init__(self, trainer: Trainer, splitter: Splitter, metrics: MetricSet, device: torch.device) -> None:
        self._trainer = trainer
        self._module = trainer.module
        self._objective = trainer.objective
        self._splitter = splitter
        self._metrics = metrics
        self._device = device
        self.averaged: Ema | None = None
        """Averaged weights to use instead of the module's."""

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Return the loss and the metrics over all rows, the same on every rank. All ranks must call it."""
        objective, metrics = self._objective, self._metrics
        metrics.reset()
        loss_sum = num_rows = 0.0
        for batch, output in self._outputs(loader):
            if objective.loss is not None or own_loss(output) is not None:
                with self._explained(batch, is_first=not num_rows):
                    loss = objective(output, batch.target, batch.weight).item()
                loss_sum += loss * (1 if objective.is_sum else batch.num_rows)
                num_rows += batch.num_rows
            if metrics and not isinstance(output, torch.Tensor):
                raise InvalidArgument(
                    f"metrics need one tensor of predictions, but the module returns a {type(output).__name__}; "
                    "override prediction_step to return that tensor, or leave metrics= out",
                    field="metrics",
                )
            metrics.update(*objective.aligned(output, batch.target), batch.weight)
        loss_sum, num_rows = summed([loss_sum, num_rows])
        metrics.gather()
        found = {} if objective.loss is None and not num_rows else {"loss": loss_sum / max(num_rows, 1.0)}
        return {**found, **metrics.compute()}

    def predict(self, loader: Any) -> Any:
        """Return this rank's predictions in the order of the loader's rows, on the CPU, in the form of the outputs."""
        found = [tree_map_only(torch.Tensor, _on_cpu, output) for _, output in self._outputs(loader)]
        return tree_map(_joined, *found) if found else torch.empty(0)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass, for the precision that the user chose."""
        precision = self._trainer.settings.precision
        if precision == "fp32":
            return _NOTHING
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast(self._device.type, dtype=dtype)

    def _outputs(self, loader: Any) -> Iterator[tuple[Batch, Any]]:
        """Yield batches with the module's predictions, without gradients."""
        with self._evaluating(), torch.inference_mode():
            for number, raw in enumerate(loader):
                batch = self._splitter(raw)
                with self.autocast(), self._explained(batch, is_first=not number):
                    output = self._trainer.prediction_step(self._module, batch)
                yield batch, output

    @contextlib.contextmanager
    def _explained(self, batch: Batch, *, is_first: bool) -> Iterator[None]:
        """Explain an error of the module or the loss."""
        try:
            yield
        except OF_MODULES as error:
            explain(error, self._module, batch, is_first=is_first)
            raise

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch the module to evaluation mode, and to the averaged weights if there are any."""
        was_training = self._module.training
        self._module.eval()
        try:
            with _NOTHING if self.averaged is None else self.averaged.applied(self._module):
                yield
        finally:
            self._module.train(was_training)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _joined(*values: Any) -> Any:
    """Join the values of one output over all batches; a scalar per batch, such as a loss, becomes one vector."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values) if values[0].dim() else torch.stack(values)
    return None if values[0] is None else list(values)


def summed(values: Sequence[float]) -> list[float]:
    """Add up numbers over all ranks, in float64."""
    if not distributed.is_available() or not distributed.is_initialized():
        return list(values)
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    result: list[float] = total.tolist()
    return result
