"""Explains errors of a user's objects: which inputs a module received, which id is outside which table, which batch is
too small for a BatchNorm, what is wrong with a loss, and which argument cannot be sent to workers.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.data.order.bins import BinSteps
from strata.errors import InvalidArgument, StrataError
from strata.train.function import why_not_picklable
from strata.trainer.binding import describe
from strata.trainer.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.data.order.steps import Steps
    from strata.trainer.batches import Batch
    from strata.trainer.config import FitConfig
    from strata.trainer.trainer import Trainer

OF_MODULES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a module or a loss raises if it does not fit the data."""
_NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""What torch raises for an operation that deterministic=True forbids."""
_ONE_VALUE = "Expected more than 1 value per channel"
"""What torch's BatchNorm raises for a single row."""


def explain(error: BaseException, module: nn.Module, batch: Batch, *, is_first: bool) -> None:
    """Raise an error that shows what the module received; return if the given one is better.

    `is_first`: No step was made before, so the module does not fit the data. A later error may have any reason and is
    left as it is, except for an id that is outside its table.

    Raises:
        InvalidArgument: With the inputs, the id and the table, the number of rows, or the forbidden operation.
    """
    if isinstance(error, StrataError):
        return
    if _ONE_VALUE in str(error) and batch.num_rows == 1:
        raise InvalidArgument(
            "a batch has a single row, and BatchNorm needs two to train on; leave incomplete batches out with "
            "drop_last=True, or choose another batch_size",
            field="batch_size",
        ) from error
    if _NOT_DETERMINISTIC in str(error):
        raise InvalidArgument(
            f"deterministic=True forbids an operation of the module: {str(error).partition(', but you set')[0]}; use "
            "another operation, or leave deterministic=True out",
            field="deterministic",
        ) from error
    outside = _id_outside_its_table(module, batch) if isinstance(error, IndexError | RuntimeError) else ""
    if outside:
        raise InvalidArgument(outside, field="data") from error
    if not is_first:
        return
    what = f"{type(error).__name__}: {str(error).rstrip('.')}"
    if (values := _values_of_loss(error)) is not None:
        raise InvalidArgument(
            f"the loss does not fit: {what}. It received the predictions {describe([values[0]])} and the target "
            f"{describe([values[1]])}. Change loss=, the label, or what the module returns",
            field="loss",
        ) from error
    raise InvalidArgument(
        f"the module does not fit the data: {what}. forward{inspect.signature(module.forward)} received "
        f"{describe(batch.kwargs or batch.args)}; the target is {describe([batch.target])}. Choose the columns with "
        "inputs=[…], or change the module",
        field="module",
    ) from error


def _values_of_loss(error: BaseException) -> tuple[Any, Any] | None:
    """Return the predictions and the target if the loss raised the error, not the module."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is Objective.forward.__code__:
            return frame.f_locals["output"], frame.f_locals["target"]
    return None


def check_loss(loss: Any, *, is_own_step: bool) -> None:
    """Check that a loss is one number with a gradient.

    Raises:
        InvalidArgument: It is not.
    """
    what = "training_step returned" if is_own_step else "the loss is"
    if not isinstance(loss, torch.Tensor):
        raise InvalidArgument(
            f"{what} {loss!r}, a {type(loss).__name__}; it must be a tensor that was computed from the predictions, "
            "without .item()",
            field="loss",
        )
    if loss.numel() != 1:
        raise InvalidArgument(
            f"{what} {describe([loss])}, but training needs one number; take the mean over the rows: loss.mean()",
            field="loss",
        )
    if not loss.requires_grad:
        raise InvalidArgument(
            f"{what} a number without a gradient, so nothing can be learned; compute it from the predictions with "
            "functions of torch, without .detach(), argmax or torch.no_grad()",
            field="loss",
        )


def not_finite_values(batch: Batch) -> str:
    """Return how many values of a batch are NaN or infinite, in the first of its tensors that has some; or nothing."""
    named = {"the target": batch.target, **{f"the input {name!r}": each for name, each in batch.kwargs.items()}}
    named |= {f"input {nth}": each for nth, each in enumerate(batch.args)} | {"the weights": batch.weight}
    for name, value in named.items():
        found = value if isinstance(value, dict) else {"": value}
        for part, tensor in found.items():
            if isinstance(tensor, torch.Tensor) and (num := num_not_finite(tensor)):
                where = f"{part!r} of {name}" if part else name
                return f"{where} has {num} values of {tensor.numel()} in this batch that are NaN or infinite"
    return ""


@contextlib.contextmanager
def single_rows_refused(module: nn.Module, steps: Steps | BinSteps, *, num_rows: int, cure: str) -> Iterator[None]:
    """Within this context, a forward pass raises if the last batch of the epoch has a row that BatchNorm cannot take.

    Whether it can is known in any batch: a BatchNorm over images gets many values per row, one over a matrix gets one.
    All ranks raise together, since each knows the rows of all.

    Args:
        num_rows: Rows of the batch of this forward pass.
        cure: How to leave the last batch out.

    Raises:
        InvalidArgument: The last batch has a single row on some rank.
    """
    if not steps.num_batches or steps.fewest_rows > 1:
        yield
        return
    workers = f" on {steps.world_size} workers" if steps.world_size > 1 else ""

    def check(layer: Any, inputs: tuple[Any, ...]) -> None:
        uses_batch = layer.training or layer.running_mean is None
        values = inputs[0] if inputs else None
        if not uses_batch or not isinstance(values, torch.Tensor) or values.dim() < 2:
            return
        if values.numel() == num_rows * values.shape[1]:
            if isinstance(steps, BinSteps):
                raise InvalidArgument(
                    f"a batch of this epoch has one row{workers}, and BatchNorm needs two to train on; raise "
                    "batch_tokens= or batch_bytes="
                )
            raise InvalidArgument(
                f"{steps.num_rows} rows in batches of batch_size={steps.batch_size}{workers} end with a batch of one "
                f"row, and BatchNorm needs two to train on; leave the last batch out with {cure}, or choose another "
                "batch_size",
                field="batch_size",
            )

    handles = [
        each.register_forward_pre_hook(check)
        for each in module.modules()
        if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _id_outside_its_table(module: nn.Module, batch: Batch) -> str:
    """Run the module again, with a check before each embedding; return what is wrong, or nothing."""
    found: list[str] = []

    def check(name: str, table: Any, ids: Any) -> None:
        if not found and isinstance(ids, torch.Tensor) and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= table.num_embeddings:
                found.append(
                    f"id {low if low < 0 else high} is outside the table {name or 'of the module'}, which has "
                    f"{table.num_embeddings} rows (0 to {table.num_embeddings - 1}); enlarge the table, or fit a "
                    "vocabulary with SparseFeat in features="
                )

    handles = [
        each.register_forward_pre_hook(lambda table, inputs, name=name: check(name, table, inputs[0]))
        for name, each in module.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    ]
    try:
        if handles:
            with contextlib.suppress(Exception), torch.no_grad():
                batch.call(module)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def num_not_finite(tensor: torch.Tensor) -> int:
    """Return how many elements are NaN or infinite."""
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def plain_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that training changes and that this process holds whole."""
    return {
        name: each.data
        for name, each in module.named_parameters()
        if each.requires_grad and not each.is_meta and type(each.data) is torch.Tensor
    }


def explain_unpicklable(trainer: Trainer, config: FitConfig) -> InvalidArgument:
    """Return an error that names the argument that workers cannot receive."""
    arguments = {
        **{
            name: getattr(trainer, name) for name in ("module", "loss", "optimizer", "metrics", "callbacks", "features")
        },
        "scheduler": trainer.settings.scheduler,
        "strategy": trainer.strategy,
        "data": config.train,
        "valid": config.valid,
        "label": config.label,
    }
    reasons = {name: why_not_picklable(value) for name, value in arguments.items()}
    culprit = next((name for name, reason in reasons.items() if reason), None)
    if culprit is None:  # an attribute that a subclass has added, or its methods
        what, reason = f"the {type(trainer).__name__}", why_not_picklable(trainer)
    else:
        what, reason = f"{culprit}=, a {type(arguments[culprit]).__name__},", reasons[culprit]
    return InvalidArgument(
        f"{what} cannot be pickled for the workers ({reason}); create objects that belong to a process, such as open "
        "files, locks and connections, where they are used, or move the code into a file and import it, so that "
        "workers import it too",
        field=culprit or "trainer",
    )
