"""PowerSGD: gradients as products of two thin matrices (Vogels et al., 2019).

A gradient M of n × m elements becomes P Qᵀ with P of n × r and Q of m × r elements. Ranks average P and Q instead of M.
One power iteration per step keeps Q close to the leading singular vectors, because it starts from the last step's Q.
What the approximation leaves out stays in an error matrix on each rank and is added to its next gradient.

Torch has a hook for this, too. It starts collectives in callbacks, whose order gloo does not keep (see `lane.py`), it
supports torch's all-reduce only, and its state refers to buckets. Here state refers to parameters, so a resumed run
continues with the same bits; it works with every algorithm; and a gradient of zeros yields zeros, not NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from strata.errors import InvalidArgument
from strata.trainer.strategy.reduce import Scratch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from strata.trainer.strategy.reduce import Averager, Bucket

KEY = "powersgd"
"""Name of this part of a strategy's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Settings of the compression."""

    matrix_rank: int = 2
    """Columns of P and Q: a higher rank approximates better and sends more."""
    start_step: int = 1_000
    """Optimizer steps with uncompressed gradients at the start, when compression harms most."""
    min_ratio: float = 2.0
    """Compress only matrices that shrink by this factor; all others and vectors are averaged as they are."""
    seed: int = 0
    """Of the first Q."""

    def __post_init__(self) -> None:
        for name, least in (("matrix_rank", 1), ("start_step", 0), ("min_ratio", 1.0)):
            value = getattr(self, name)
            if not value >= least:
                raise InvalidArgument(f"{name}={value} is below {least}; set it to {least} or more", field=name)

    def is_worthwhile(self, shape: Sequence[int]) -> bool:
        """Return whether a gradient of this shape is compressed."""
        if len(shape) < 2:
            return False
        size, num_rows = torch.Size(shape).numel(), shape[0]
        if size == 0:
            return False
        return (num_rows + size // num_rows) * self.matrix_rank * self.min_ratio < size

    def num_elements(self, shape: Sequence[int]) -> int:
        """Return how many elements a rank contributes for a gradient of this shape."""
        size = torch.Size(shape).numel()
        return (shape[0] + size // shape[0]) * self.matrix_rank if self.is_worthwhile(shape) else size


class PowerSGDAverager:
    """Averages the gradients of a module's parameters, bucket by bucket."""

    def __init__(self, config: PowerSGD, averager: Averager, parameters: Mapping[str, Tensor], world_size: int) -> None:
        self._config = config
        self._averager = averager
        self._parameters = parameters
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._world_size = world_size
        self._step = 0
        self._errors: dict[str, Tensor] = {}
        """By parameter: what the ranks have not sent yet. Differs between ranks."""
        self._bases: dict[str, Tensor] = {}
        """By parameter: the last Q."""
        self._first, self._second = Scratch(), Scratch()

    def average_bucket_(self, bucket: Bucket) -> None:
        """Replace the gradients of a bucket by the approximation of their mean."""
        if self._step < self._config.start_step or bucket.buffer().is_sparse:
            self._averager.average_(bucket.buffer())
        else:
            self._average_compressed(bucket)
        self._step += bucket.is_last()

    def _average_compressed(self, bucket: Bucket) -> None:
        gradients = {self._names[p]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        thin = [name for name, gradient in gradients.items() if self._config.is_worthwhile(gradient.shape)]
        plain = [gradient for name, gradient in gradients.items() if name not in thin]
        matrices = [self._with_error(name, gradients[name]) for name in thin]
        bases = [self._basis(name, matrix) for name, matrix in zip(thin, matrices, strict=True)]

        products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        averaged = self._average_all([*products, *plain], self._first)  # one message for both
        for gradient, mean in zip(plain, averaged[len(products) :], strict=True):
            gradient.copy_(mean)
        lefts = [torch.linalg.qr(product)[0] for product in averaged[: len(products)]]
        rights = self._average_all([m.T @ left for m, left in zip(matrices, lefts, strict=True)], self._second)

        for name, matrix, left, right in zip(thin, matrices, lefts, rights, strict=True):
            approximation = left @ right.T
            matrix.sub_(approximation)  # `matrix` is this parameter's error
            gradients[name].copy_(approximation.view_as(gradients[name]))
            self._bases[name] = right.clone()

    def _with_error(self, name: str, gradient: Tensor) -> Tensor:
        """Add the gradient to the parameter's error, in place, and return the sum as a matrix."""
        matrix = gradient.flatten(1)
        error = self._errors.get(name)
        if error is None:
            error = self._errors[name] = torch.zeros_like(matrix, dtype=_precision(matrix.dtype))
        return error.add_(matrix)

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        """Return the Q to start from; the first one is random, and the same on all ranks."""
        basis = self._bases.get(name)
        if basis is None:
            place = list(self._parameters).index(name)
            generator = torch.Generator().manual_seed(self._config.seed * 1_000_003 + place)
            size = (matrix.shape[1], self._config.matrix_rank)
            basis = torch.randn(size, generator=generator, dtype=matrix.dtype).to(matrix.device)
        return basis

    def _average_all(self, tensors: list[Tensor], scratch: Scratch) -> list[Tensor]:
        """Return the means of several tensors, sent as one message."""
        if not tensors:
            return []
        sizes = [tensor.numel() for tensor in tensors]
        flat = scratch.take(sum(sizes), like=tensors[0])
        for part, tensor in zip(flat.split_with_sizes(sizes), tensors, strict=True):
            part.view_as(tensor).copy_(tensor)
        self._averager.average_(flat)
        return [part.view_as(tensor) for part, tensor in zip(flat.split_with_sizes(sizes), tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {
            KEY: {
                "step": self._step,
                "world_size": self._world_size,
                "errors": dict(self._errors),
                "bases": dict(self._bases),
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; without one of PowerSGD, start anew.

        Errors belong to ranks, so they are dropped if the world size has changed.
        """
        found = state.get(KEY, {"step": 0, "world_size": self._world_size, "errors": {}, "bases": {}})
        self._step = int(found["step"])
        fitting = {name: q for name, q in found["bases"].items() if q.shape[1] == self._config.matrix_rank}
        self._bases = _placed(fitting, self._parameters)
        self._errors = _placed(found["errors"], self._parameters) if found["world_size"] == self._world_size else {}


def _placed(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the devices of the parameters that they belong to."""
    return {name: tensors[name].to(parameters[name].device, copy=True) for name in tensors if name in parameters}


def _precision(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: 16 bits are too few for a QR decomposition."""
    return dtype if dtype.itemsize >= 4 else torch.float32
