"""`Served`: a module on one worker, some or all of whose parameters live on parameter servers.

Large embeddings are replaced by lookups, which pull the rows of a batch. Dense parameters on servers stay in the module
as a copy, which every push renews.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from strata.servers.clocks import Push
from strata.trainer.strategy.base import Bound
from strata.trainer.strategy.lookup import StepRows
from strata.trainer.strategy.tables import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows
    from strata.trainer.strategy.dense_table import DenseTable
    from strata.trainer.strategy.tables import FoundTable


class Link(Protocol):
    """The connection to the servers."""

    def pull(self, wanted: Mapping[str, Keys]) -> dict[str, Rows]: ...

    def push(self, gradients: Mapping[str, Push], rates: Mapping[str, float]) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Served(Bound):
    """A bound module with parameters on servers."""

    def __init__(
        self,
        module: nn.Module,
        tables: Sequence[FoundTable],
        dense: Sequence[DenseTable],
        link: Link,
        *,
        is_synchronous: bool,
        rates: Callable[[], Mapping[str, float]],
        bind: Callable[[nn.Module], Bound],
    ) -> None:
        """
        Args:
            is_synchronous: Whether the servers average the dense gradients of all workers in every step.
            rates: Returns the current learning rates, by table.
            bind: Binds what stays in the workers, once the tables have left the module.
        """
        self._module = module
        self._link = link
        self._rates = rates
        self._dense = list(dense)
        self._rows = StepRows(link)
        self._originals = {place: module.get_submodule(place) for table in tables for place in table.places}
        replace(module, tables, self._rows)
        for table in tables:  # its rows are on servers, which have copied them
            empty = nn.Parameter(torch.empty_like(table.weight, device="meta"))
            for place in table.places:
                self._originals[place].weight = empty
        self._inner = bind(module)
        self.module = self._inner.module
        self.is_replicated = self._inner.is_replicated and (is_synchronous or not self._dense)

    def begin(self) -> None:
        self._renew()
        self._inner.begin()

    def accumulating(self) -> AbstractContextManager[None]:
        return self._inner.accumulating()

    def push(self) -> None:
        """Send the gradients of a step to the servers, and renew the dense parameters that live there."""
        gradients = self._rows.take_gradients()
        for dense in self._dense:
            gradients[dense.name] = Push(dense.keys, dense.take_gradients())
        self._link.push(gradients, self._rates())
        self._renew()

    def _renew(self) -> None:
        if self._dense:
            rows = self._link.pull({dense.name: dense.keys for dense in self._dense})
            for dense in self._dense:
                dense.put(rows[dense.name])

    def after_step(self, step: int) -> None:
        self._inner.after_step(step)

    def finish(self) -> None:
        self._renew()
        self._inner.finish()

    def close(self) -> None:
        """Put the embeddings back into the module, without rows: a checkpoint has them."""
        for place, original in self._originals.items():
            parent, _, attribute = place.rpartition(".")
            setattr(self._module.get_submodule(parent), attribute, original)
        self._link.close()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)
