"""`Sharded`: a module on one worker, whose large tables torchrec shards over all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strata.errors import InvalidArgument
from strata.trainer.strategy.base import Bound
from strata.trainer.strategy.embedding_collections import stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from strata.trainer.strategy.torch_rec_shards import ShardedTables

TABLES, REST = "tables", "rest"


class Sharded(Bound):
    """A bound module with sharded tables."""

    def __init__(
        self,
        module: nn.Module,
        sharded: Sequence[ShardedTables],
        *,
        bind: Callable[[nn.Module], Bound],
        leave: Callable[[], None],
    ) -> None:
        """
        Args:
            sharded: The tables, which hold their rows.
            bind: Binds what stays in every worker, once the tables have left the module.
            leave: Called at the end, when no worker uses a table any more.
        """
        self._module = module
        self._sharded = list(sharded)
        self._leave = leave
        for each in sharded:
            _put(module, each.collection.place, stand_in(each.collection, each))
            for table, weight in each.collection.tables.items():  # its rows are in the shards
                each.collection.put(table, nn.Parameter(torch.empty_like(weight, device="meta")))
        self._inner = bind(module)
        self.module = self._inner.module
        self.is_replicated = self._inner.is_replicated

    def accumulating(self) -> AbstractContextManager[None]:
        return self._inner.accumulating()

    def begin(self) -> None:
        self._inner.begin()

    def push(self) -> None:
        """Make the optimizer step of the tables that torchrec has not updated in the backward pass."""
        for each in self._sharded:
            each.step()

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    def after_step(self, step: int) -> None:
        self._inner.after_step(step)

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        """Put the embeddings back into the module, without rows: a checkpoint has them."""
        for each in self._sharded:
            _put(self._module, each.collection.place, each.collection.module)
        self._inner.close()
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        tables = {name: state for each in self._sharded for name, state in each.state_dict().items()}
        return {TABLES: tables, REST: self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidArgument: The state is that of another strategy.
        """
        if TABLES not in state:
            raise InvalidArgument(
                "the checkpoint was saved without tables that torchrec shards; resume with the strategy that saved it, "
                "or start a new fit with another directory in checkpoints=",
                field="strategy",
            )
        for each in self._sharded:
            each.load_state_dict(state[TABLES])
        self._inner.load_state_dict(state[REST])


def _put(module: nn.Module, place: str, submodule: nn.Module) -> None:
    parent, _, attribute = place.rpartition(".")
    setattr(module.get_submodule(parent), attribute, submodule)
