"""Which rows of embedding tables training has touched, heard from their gradients."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from strata.checkpoint.tree import Leaf


class RowTracker:
    """Listens to the sparse gradients of a model's tables, and tells a save which rows have changed.

        tracker = RowTracker(model, optimizer)
        ...
        manager.save(state, step=step, checkpoint_type="INCREMENTAL", dirty=tracker)

    A table is followed if its gradient is sparse (`nn.Embedding(…, sparse=True)`): only then does the optimizer leave
    all other rows alone. With the optimizer, what it keeps for each row is followed, too. A table that gets a dense
    gradient is not told of, so it is compared like everything else.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """
        Raises:
            InvalidArgument: The model has no parameter that could have a sparse gradient.
        """
        self._optimizer = optimizer
        self._lock = threading.Lock()
        self._rows: dict[int, Any] = {}
        """By the place in `_tables`: a mask of rows, or None where nobody knows."""
        self._sparse: set[int] = set()
        """Tables that have had a sparse gradient: no row changes without one."""
        self._tables = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
        if not self._tables:
            raise InvalidArgument("the model has no trainable tables; save without dirty=", field="model")
        self._hooks = [
            table.register_post_accumulate_grad_hook(lambda p, number=number: self._heard(number, p))  # type: ignore[no-untyped-call]
            for number, table in enumerate(self._tables)
        ]

    def close(self) -> None:
        """Listens no longer."""
        for hook in self._hooks:
            hook.remove()

    def take(self, leaves: Sequence[Leaf]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The rows that have changed since the last call, of the tensors among these that are followed."""
        with self._lock:
            heard, self._rows = self._rows, {}
        by_memory = {_place_of(leaf.source): leaf for leaf in leaves if leaf.kind == "torch" and leaf.num_bytes}
        found = {}
        for number, table in enumerate(self._tables):
            mask = heard.get(number)
            if mask is None and (number in heard or number not in self._sparse):
                continue  # a dense gradient, or none so far
            rows = np.empty(0, np.int64) if mask is None else mask.nonzero().reshape(-1).cpu().numpy()
            for tensor in (table, *self._kept_for(table)):
                leaf = by_memory.get(_place_of(tensor))
                if leaf is not None and leaf.shape == tuple(tensor.shape):
                    found[leaf.name] = rows
        return found

    def _heard(self, number: int, table: torch.Tensor) -> None:
        gradient = table.grad
        if gradient is None:
            return
        with self._lock:
            if not gradient.is_sparse:
                self._rows[number] = None
                return
            import torch  # noqa: PLC0415 - only who has a model needs torch

            mask = self._rows.get(number)
            if mask is None:
                if number in self._rows:
                    return  # dense before, in the same time
                mask = self._rows[number] = torch.zeros(len(table), dtype=torch.bool, device=table.device)
            mask[gradient._indices()[0]] = True
            self._sparse.add(number)

    def _kept_for(self, table: torch.Tensor) -> list[torch.Tensor]:
        """What the optimizer has for each row of it."""
        if self._optimizer is None:
            return []
        import torch  # noqa: PLC0415 - only who has a model needs torch

        kept = self._optimizer.state.get(table, {}).values()
        return [value for value in kept if isinstance(value, torch.Tensor) and value.shape == table.shape]


def _place_of(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape)
