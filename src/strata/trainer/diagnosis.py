"""Explains errors of a user's objects: which inputs a module received, which id is outside which table, and which
argument cannot be sent to workers.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.errors import InvalidArgument, StrataError
from strata.train.function import why_not_picklable
from strata.trainer.binding import describe

if TYPE_CHECKING:
    from strata.trainer.batches import Batch
    from strata.trainer.config import FitConfig
    from strata.trainer.trainer import Trainer

OF_MODULES = (IndexError, RuntimeError, TypeError, ValueError)
"""What a module raises if it does not fit the data."""


def explain(error: BaseException, module: nn.Module, batch: Batch, *, is_first: bool) -> None:
    """Raise an error that shows what the module received; return if the given one is better.

    `is_first`: No step was made before, so the module does not fit the data. A later error may have any reason and is
    left as it is, except for an id that is outside its table.

    Raises:
        InvalidArgument: With the inputs, or the id and the table.
    """
    if isinstance(error, StrataError):
        return
    outside = _id_outside_its_table(module, batch) if isinstance(error, IndexError | RuntimeError) else ""
    if outside:
        raise InvalidArgument(outside, field="data") from error
    if is_first:
        raise InvalidArgument(
            f"the module does not fit the data: {type(error).__name__}: {error}. "
            f"forward{inspect.signature(module.forward)} received {describe(batch.kwargs or batch.args)}; the target "
            f"is {describe(batch.target)}. Choose the columns with inputs=[…], or change the module",
            field="module",
        ) from error


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
