"""Rows that the caller reports as changed, with `dirty=`: by name, or by a `RowTracker` that watches gradients.

The rows are collected over all saves that were requested since the last snapshot, because a save may be skipped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import InvalidArgument
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from strata.checkpoint.format.tree import Leaf

Rows = np.ndarray[Any, np.dtype[np.int64]]


class RowTracker:
    """Tracks which rows of embedding tables change, by their sparse gradients, for `save(dirty=tracker)`.

        tracker = RowTracker(model, optimizer)
        ...
        manager.save(state, step=step, checkpoint_type="INCREMENTAL", dirty=tracker)

    A table is tracked if it is an `nn.Embedding` or `nn.EmbeddingBag` with `sparse=True` and without `max_norm` (which
    changes rows that are only looked up), and if its optimizer changes only rows with a gradient: SparseAdam, Adagrad,
    SGD without momentum. The optimizer state of each row is tracked too. All other tensors are compared, and so is a
    table whose rows changed in another way: by a dense gradient or by `load_state_dict`. A tracker serves one manager.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """
        Raises:
            InvalidArgument: No table can be tracked; the message names the reasons.
        """
        self._optimizer = optimizer
        self._lock = renewed(threading.Lock())
        self._tables = _tables(model, optimizer)
        self._rows: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(self._tables)))
        """Index in `_tables` → mask of changed rows; None: unknown, so the table is compared."""
        self._manager: weakref.ref[object] | None = None
        self._hooks: list[Any] = [
            model.register_load_state_dict_post_hook(lambda *_: self._forget()),  # type: ignore[no-untyped-call]
            optimizer.register_load_state_dict_post_hook(lambda *_: self._forget()),
        ]
        for number, table in enumerate(self._tables):
            hook = _GradientHook(self, number)
            self._hooks.append(table.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop tracking: from now on all tables are compared."""
        for hook in self._hooks:
            hook.remove()
        self._forget()

    def take(self, leaves: Sequence[Leaf], *, by: object) -> dict[str, Rows]:
        """Return the rows that changed since the last call, for the tracked tensors among these.

        Raises:
            InvalidArgument: Another manager has taken rows before, which this one would miss.
        """
        if self._manager is None:
            self._manager = weakref.ref(by)
        elif self._manager() is not by:
            raise InvalidArgument(
                "this RowTracker serves another CheckpointManager; create one tracker for each manager", field="dirty"
            )
        by_memory = {_place_of(leaf.source): leaf for leaf in leaves if leaf.kind == "torch" and leaf.num_bytes}
        found = {}
        with self._lock:
            for number, table in enumerate(self._tables):
                mask, self._rows[number] = self._rows[number], self._pending(table)
                if mask is None:
                    continue
                rows: Rows = mask.nonzero().reshape(-1).cpu().numpy()
                for tensor in (table, *self._optimizer_state(table)):
                    leaf = by_memory.get(_place_of(tensor))
                    if leaf is not None:
                        found[leaf.name] = rows
        return found

    def note_gradient(self, number: int, table: torch.Tensor) -> None:
        """Mark the rows of a new gradient."""
        with self._lock:
            mask, new = self._rows[number], self._pending(table)
            self._rows[number] = None if mask is None or new is None else mask.logical_or_(new)

    def _pending(self, table: torch.Tensor) -> torch.Tensor | None:
        """Return the rows with a gradient, which the optimizer may change at any time; None if it is dense."""
        import torch  # noqa: PLC0415 - torch is optional

        mask = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        gradient = table.grad
        if gradient is None:
            return mask
        if not gradient.is_sparse:
            return None
        mask[gradient._indices()[0]] = True
        return mask

    def _forget(self) -> None:
        with self._lock:
            self._rows = dict.fromkeys(self._rows)

    def _optimizer_state(self, table: torch.Tensor) -> list[torch.Tensor]:
        """Return the optimizer's tensors that have a row for each row of the table."""
        import torch  # noqa: PLC0415 - torch is optional

        kept = self._optimizer.state.get(table, {}).values()
        return [v for v in kept if isinstance(v, torch.Tensor) and v.layout is torch.strided and v.shape == table.shape]


class _GradientHook:
    """A hook that does not keep its tracker alive."""

    def __init__(self, tracker: RowTracker, number: int) -> None:
        self._tracker = weakref.ref(tracker)
        self._number = number

    def __call__(self, table: torch.Tensor) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.note_gradient(self._number, table)


def _tables(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    import torch  # noqa: PLC0415 - torch is optional

    tracked, others = [], []
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        name = name or type(module).__name__
        group = group_of.get(id(module.weight))
        if not module.sparse:
            others.append(f"{name} is not created with sparse=True")
        elif module.max_norm is not None:
            others.append(f"{name} has max_norm")
        elif group is None:
            others.append(f"{name} does not belong to this optimizer")
        elif not _is_by_row(optimizer, group):
            others.append(f"{type(optimizer).__name__} changes rows of {name} without a gradient")
        else:
            tracked.append(module.weight)
    if not tracked:
        why = "; ".join(others[:5]) or "it has no nn.Embedding"
        raise InvalidArgument(f"the model has no table to track ({why}); save without dirty=", field="model")
    return list({id(table): table for table in tracked}.values())


def _is_by_row(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    import torch  # noqa: PLC0415 - torch is optional

    if isinstance(optimizer, torch.optim.SparseAdam | torch.optim.Adagrad):
        return not group.get("weight_decay")
    return type(optimizer) is torch.optim.SGD and not group["momentum"] and not group["weight_decay"]


def _place_of(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape)


# -- dirty= of one or more saves -----------------------------------------------------------------------------------


def resolve_dirty(
    dirty: Mapping[str, Any] | RowTracker | None, leaves: Sequence[Leaf], *, by: object
) -> Mapping[str, Any] | None:
    """Return the rows by tensor name; a tracker knows tensors, not names.

    Raises:
        InvalidArgument: `dirty` is neither a dict nor a tracker, or the tracker serves another manager.
    """
    if isinstance(dirty, RowTracker):
        return dirty.take(leaves, by=by)
    if dirty is not None and not isinstance(dirty, Mapping):
        raise InvalidArgument(
            f"dirty is a {type(dirty).__name__}; pass a dict of tensor names and rows, or a RowTracker", field="dirty"
        )
    return dirty


class DirtyRows:
    """The rows that `dirty=` reported since the last snapshot."""

    def __init__(self) -> None:
        self._rows: dict[str, Rows] | None = None
        """None: no save was requested since the last snapshot."""

    def add(self, dirty: Mapping[str, Any] | None, leaves: Sequence[Leaf]) -> None:
        """Add the rows of one save.

        Raises:
            InvalidArgument: A tensor or a row does not exist.
        """
        new: dict[str, Rows] = {}
        known: dict[tuple[int, tuple[int, ...]], Rows] = {}  # the arrays of a table have the same rows
        for name, rows in (dirty or {}).items():
            leaf = _find_leaf(name, leaves)
            key = id(rows), leaf.shape[:1]
            if key not in known:
                known[key] = _check_rows(rows, leaf)
            new[leaf.name] = known[key]
        if self._rows is None:
            self._rows = new
        else:  # a tensor that one of the saves did not report must be compared
            before = self._rows
            self._rows = {name: np.concatenate((before[name], rows)) for name, rows in new.items() if name in before}

    def take(self) -> dict[str, Rows]:
        """Return and clear all reported rows, which may repeat."""
        taken, self._rows = self._rows or {}, None
        return taken


def _find_leaf(name: str, leaves: Sequence[Leaf]) -> Leaf:
    """Find a leaf by its full name, or by a unique suffix: `emb.weight` for `model.emb.weight`."""
    exact = [leaf for leaf in leaves if leaf.name == name]
    found = exact or [leaf for leaf in leaves if leaf.name.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(leaf.name for leaf in (found or leaves)[:5])
    what = (
        f"matches {names}"
        if found
        else f"matches none of the state's tensors ({names}, …; a tied tensor has the name of its first occurrence)"
    )
    raise InvalidArgument(f"dirty={{{name!r}: …}} {what}; use the full name of a tensor", field="dirty")


def _check_rows(rows: Any, leaf: Leaf) -> Rows:
    if hasattr(rows, "detach"):
        rows = rows.detach().cpu().numpy()
    try:
        found = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows))
    except TypeError:
        raise InvalidArgument(f"dirty[{leaf.name!r}]={rows!r} is not a list of row indices", field="dirty") from None
    if found.dtype == np.bool_ and found.shape == leaf.shape[:1]:
        found = np.flatnonzero(found)
    if found.size and found.dtype.kind not in "iu":
        raise InvalidArgument(f"dirty[{leaf.name!r}] has the dtype {found.dtype}; use integers", field="dirty")
    num_rows = leaf.shape[0] if leaf.shape else 0
    found = found.astype(np.int64).reshape(-1)
    if found.size and not 0 <= found.min() <= found.max() < num_rows:
        raise InvalidArgument(
            f"dirty[{leaf.name!r}] has row {found.max() if found.max() >= num_rows else found.min()}, but the tensor "
            f"has {num_rows} rows",
            field="dirty",
        )
    return found
