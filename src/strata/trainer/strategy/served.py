"""`Served`: a module on one worker, some or all of whose parameters live on parameter servers.

Large embeddings are replaced by lookups, which get the rows of a batch. Dense parameters on servers stay in the module
as a copy, which every push renews. With staleness, rows are asked for some steps before they are needed. Dense
parameters are by default asked for after the push, so that they include this worker's own last step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from strata.servers.clocks import Push
from strata.trainer.strategy.base import Bound
from strata.trainer.strategy.lookup import StepRows
from strata.trainer.strategy.prefetch import RowSource
from strata.trainer.strategy.tables import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from strata.trainer.strategy.base import Upcoming
    from strata.trainer.strategy.dense_table import DenseTable
    from strata.trainer.strategy.prefetch import Asked
    from strata.trainer.strategy.tables import FoundTable


class ServerLink(RowSource, Protocol):
    """The connection to the servers."""

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
        link: ServerLink,
        *,
        is_synchronous: bool,
        num_ahead: int,
        dense_ahead: int,
        frozen_ahead: int = 0,
        rates: Callable[[], Mapping[str, float]],
        bind: Callable[[nn.Module], Bound],
    ) -> None:
        """
        Args:
            is_synchronous: Whether the servers average the dense gradients of all workers in every step.
            num_ahead: Batches whose rows are prefetched.
            dense_ahead: Steps for which the dense parameters are prefetched.
            frozen_ahead: Batches whose rows of frozen tables are prefetched, which needs no staleness.
            rates: Returns the current learning rates, by table.
            bind: Binds what stays in the workers, once the tables have left the module.
        """
        self._module = module
        self._link = link
        self._rates = rates
        self._dense = list(dense)
        self._dense_ahead = dense_ahead
        self._asked: deque[Asked] = deque()
        """Dense parameters of the next steps."""
        frozen = {table.name for table in tables if table.is_frozen}
        self.num_ahead = max(num_ahead, frozen_ahead if frozen else 0)
        self._rows = StepRows(link, frozen=frozen, num_ahead=num_ahead)
        self._originals = {place: module.get_submodule(place) for table in tables for place in table.places}
        replace(module, tables, self._rows)
        for table in tables:  # its rows are on servers, which have copied them
            empty = nn.Parameter(torch.empty_like(table.weight, device="meta"), requires_grad=not table.is_frozen)
            for place in table.places:
                self._originals[place].weight = empty
        self._inner = bind(module)
        self.module = self._inner.module
        self.is_replicated = self._inner.is_replicated and (is_synchronous or not self._dense)

    def begin(self) -> None:
        self._renew()
        self._inner.begin()

    def prepare(self, batches: Sequence[Upcoming]) -> None:
        self._rows.prepare(batches)

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
        """Set the dense parameters for the next step, and ask for those of the steps after it."""
        if self._dense:
            wanted = {dense.name: dense.keys for dense in self._dense}
            while len(self._asked) <= self._dense_ahead:
                self._asked.append(self._link.ask(wanted, len(self._asked)))
            rows = self._asked.popleft().rows()
            for dense in self._dense:
                dense.put(rows[dense.name])

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    def after_step(self, step: int) -> None:
        self._inner.after_step(step)

    def settle(self) -> None:
        self._link.wait()

    def finish(self) -> None:
        self._asked.clear()  # later changes count, too
        self._renew()
        self._inner.finish()

    def close(self) -> None:
        """Put the embeddings back into the module, without rows: a checkpoint has them."""
        for place, original in self._originals.items():
            parent, _, attribute = place.rpartition(".")
            setattr(self._module.get_submodule(parent), attribute, original)
        self._link.close()
        self._inner.close()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)
