"""Dense parameters as rows of a table, so that parameter servers can keep them like embeddings.

The parameters of one optimizer group are laid out one after the other in rows of `WIDTH` numbers, each parameter from a
new row on. The update of an element depends on this element alone, so it is the same as in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows

WIDTH = 256


class DenseTable:
    """The rows of some parameters."""

    def __init__(self, name: str, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.name = name
        self.parameters = list(parameters)
        starts = np.cumsum([0, *(-(-each.numel() // WIDTH) for each in self.parameters)])
        self.num_rows = int(starts[-1])
        self.keys: Keys = np.arange(self.num_rows, dtype=np.uint64)
        self._places = [
            slice(int(start) * WIDTH, int(start) * WIDTH + each.numel())
            for start, each in zip(starts[:-1], self.parameters, strict=True)
        ]

    def values(self) -> Rows:
        """Return the rows of the parameters as they are now."""
        return self._packed([each.detach() for each in self.parameters])

    def take_gradients(self) -> Rows:
        """Return the rows of the gradients and clear them; a parameter without one has zeros."""
        packed = self._packed([each.grad for each in self.parameters])
        for each in self.parameters:
            each.grad = None
        return packed

    def put(self, rows: Rows) -> None:
        """Set the parameters."""
        flat = torch.from_numpy(rows.reshape(-1))
        with torch.no_grad():
            for each, place in zip(self.parameters, self._places, strict=True):
                each.copy_(flat[place].view(each.shape))

    def _packed(self, tensors: Sequence[torch.Tensor | None]) -> Rows:
        rows = np.zeros((self.num_rows, WIDTH), np.float32)
        flat = rows.reshape(-1)
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor is not None:
                flat[place] = tensor.detach().reshape(-1).to("cpu", torch.float32).numpy()
        return rows
