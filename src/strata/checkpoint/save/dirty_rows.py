"""Which rows of embedding tables training has touched, heard from their gradients."""

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
    """Listens to the sparse gradients of a model's tables, and tells a save which rows have changed.

        tracker = RowTracker(model, optimizer)
        ...
        manager.save(state, step=step, checkpoint_type="INCREMENTAL", dirty=tracker)

    A table is followed if it is an `nn.Embedding` or `nn.EmbeddingBag` with `sparse=True` and without `max_norm` (which
    changes rows that are only looked at), and if its optimizer changes no row but those with a gradient: SparseAdam,
    Adagrad, SGD without momentum. What the optimizer keeps for each row is followed, too. All else in a state is
    compared, and so is a table whose rows have come to change in another way: by a dense gradient, by
    `load_state_dict`. One tracker tells one manager.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """
        Raises:
            InvalidArgument: There is no table that could be followed, and why.
        """
        self._optimizer = optimizer
        self._lock = renewed(threading.Lock())
        self._tables = _tables(model, optimizer)
        self._rows: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(self._tables)))
        """By the place in `_tables`: a mask of rows; None where nobody knows, so that all are compared."""
        self._manager: weakref.ref[object] | None = None
        self._hooks: list[Any] = [
            model.register_load_state_dict_post_hook(lambda *_: self._know_nothing()),  # type: ignore[no-untyped-call]
            optimizer.register_load_state_dict_post_hook(lambda *_: self._know_nothing()),
        ]
        for number, table in enumerate(self._tables):
            hear = _Listener(self, number)
            self._hooks.append(table.register_post_accumulate_grad_hook(hear))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Listens no longer, and knows nothing."""
        for hook in self._hooks:
            hook.remove()
        self._know_nothing()

    def take(self, leaves: Sequence[Leaf], *, by: object) -> dict[str, Rows]:
        """The rows that have changed since the last call, of the tensors among these that are followed.

        Raises:
            InvalidArgument: Another manager has been told, so this one would hear of half.
        """
        if self._manager is None:
            self._manager = weakref.ref(by)
        elif self._manager() is not by:
            raise InvalidArgument("this tracker tells another manager; make one for each", field="dirty")
        by_memory = {_place_of(leaf.source): leaf for leaf in leaves if leaf.kind == "torch" and leaf.num_bytes}
        found = {}
        with self._lock:
            for number, table in enumerate(self._tables):
                mask, self._rows[number] = self._rows[number], self._waiting(table)
                if mask is None:
                    continue
                rows: Rows = mask.nonzero().reshape(-1).cpu().numpy()
                for tensor in (table, *self._kept_for(table)):
                    leaf = by_memory.get(_place_of(tensor))
                    if leaf is not None:
                        found[leaf.name] = rows
        return found

    def heard(self, number: int, table: torch.Tensor) -> None:
        """A gradient has come."""
        with self._lock:
            mask, new = self._rows[number], self._waiting(table)
            self._rows[number] = None if mask is None or new is None else mask.logical_or_(new)

    def _waiting(self, table: torch.Tensor) -> torch.Tensor | None:
        """The rows whose gradient is there: the optimizer may change them at any time. None: it is a dense one."""
        import torch  # noqa: PLC0415 - only who has a model needs torch

        mask = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        gradient = table.grad
        if gradient is None:
            return mask
        if not gradient.is_sparse:
            return None
        mask[gradient._indices()[0]] = True
        return mask

    def _know_nothing(self) -> None:
        with self._lock:
            self._rows = dict.fromkeys(self._rows)

    def _kept_for(self, table: torch.Tensor) -> list[torch.Tensor]:
        """What the optimizer has for each row of it."""
        import torch  # noqa: PLC0415 - only who has a model needs torch

        kept = self._optimizer.state.get(table, {}).values()
        return [v for v in kept if isinstance(v, torch.Tensor) and v.layout is torch.strided and v.shape == table.shape]


class _Listener:
    """Holds no tracker that nobody else holds."""

    def __init__(self, tracker: RowTracker, number: int) -> None:
        self._tracker = weakref.ref(tracker)
        self._number = number

    def __call__(self, table: torch.Tensor) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.heard(self._number, table)


def _tables(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    import torch  # noqa: PLC0415 - only who has a model needs torch

    followed, others = [], []
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        group = group_of.get(id(module.weight))
        if not module.sparse:
            others.append(f"{name} has no sparse gradients (sparse=True)")
        elif module.max_norm is not None:
            others.append(f"{name} has max_norm")
        elif group is None:
            others.append(f"{name} is not of this optimizer")
        elif not _is_by_row(optimizer, group):
            others.append(f"{type(optimizer).__name__} changes rows of {name} that have no gradient")
        else:
            followed.append(module.weight)
    if not followed:
        why = "; ".join(others[:5]) or "there is no nn.Embedding"
        raise InvalidArgument(f"the model has no table to follow ({why}); save without dirty=", field="model")
    return list({id(table): table for table in followed}.values())


def _is_by_row(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    import torch  # noqa: PLC0415 - only who has a model needs torch

    if isinstance(optimizer, torch.optim.SparseAdam | torch.optim.Adagrad):
        return not group.get("weight_decay")
    return type(optimizer) is torch.optim.SGD and not group["momentum"] and not group["weight_decay"]


def _place_of(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape)


# -- what the caller tells -----------------------------------------------------------------------------------------


def resolve_dirty(
    dirty: Mapping[str, Any] | RowTracker | None, leaves: Sequence[Leaf], *, by: object
) -> Mapping[str, Any] | None:
    """Name → rows, also from a tracker, which knows tensors and not their names.

    Raises:
        InvalidArgument: It is neither, or the tracker is another manager's.
    """
    if isinstance(dirty, RowTracker):
        return dirty.take(leaves, by=by)
    if dirty is not None and not isinstance(dirty, Mapping):
        raise InvalidArgument(
            f"dirty is a {type(dirty).__name__}; give a dict of tensor names and rows, or a RowTracker", field="dirty"
        )
    return dirty


class DirtyRows:
    """Rows that the caller says have changed since the last snapshot, until one is made: a save may be skipped."""

    def __init__(self) -> None:
        self._rows: dict[str, Rows] | None = None
        """None: no save has asked since the last snapshot."""

    def add(self, dirty: Mapping[str, Any] | None, leaves: Sequence[Leaf]) -> None:
        """
        Raises:
            InvalidArgument: There is no such tensor, or it has no such row.
        """
        told: dict[str, Rows] = {}
        for name, rows in (dirty or {}).items():
            leaf = _named(name, leaves)
            told[leaf.name] = _checked(rows, leaf)
        if self._rows is None:
            self._rows = told
        else:  # of a tensor that one of the calls did not tell of, nothing is known
            before = self._rows
            self._rows = {name: np.concatenate((before[name], rows)) for name, rows in told.items() if name in before}

    def take(self) -> dict[str, Rows]:
        """All that was told; a row may be there several times."""
        taken, self._rows = self._rows or {}, None
        return taken


def _named(name: str, leaves: Sequence[Leaf]) -> Leaf:
    """By the whole name, or by the end of it if that is enough: `emb.weight` for `model.emb.weight`."""
    exact = [leaf for leaf in leaves if leaf.name == name]
    found = exact or [leaf for leaf in leaves if leaf.name.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(leaf.name for leaf in (found or leaves)[:5])
    what = (
        f"could be any of {names}"
        if found
        else f"is none of the state's tensors ({names}, …; one that is there twice goes by its first name)"
    )
    raise InvalidArgument(f"dirty={{{name!r}: …}}: it {what}; write the tensor's whole name", field="dirty")


def _checked(rows: Any, leaf: Leaf) -> Rows:
    if hasattr(rows, "detach"):
        rows = rows.detach().cpu().numpy()
    try:
        found = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows))
    except TypeError:
        raise InvalidArgument(f"dirty[{leaf.name!r}]={rows!r} is not a list of rows", field="dirty") from None
    if found.dtype == np.bool_ and found.shape == leaf.shape[:1]:
        found = np.flatnonzero(found)
    if found.size and found.dtype.kind not in "iu":
        raise InvalidArgument(f"dirty[{leaf.name!r}] holds {found.dtype}, not numbers of rows", field="dirty")
    num_rows = leaf.shape[0] if leaf.shape else 0
    found = found.astype(np.int64).reshape(-1)
    if found.size and not 0 <= found.min() <= found.max() < num_rows:
        raise InvalidArgument(
            f"dirty[{leaf.name!r}] names row {found.max() if found.max() >= num_rows else found.min()}; the tensor has "
            f"{num_rows}",
            field="dirty",
        )
    return found
