"""Gather the states of metrics over the ranks of a process group, without pickle.

States differ in size from rank to rank. A header of fixed size, with the type and shape of every tensor, is gathered
first. Then each rank knows the sizes of all, and the tensors travel as bytes in one collective, padded to the longest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DTYPES = (
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Types that travel; the header holds the index. Other types become float64 or int64."""
MAX_DIMS = 8
ALIGNMENT = 16
"""Bytes; a tensor is a view of the received bytes only at a multiple of its element size."""

_HEADER = 2 + MAX_DIMS


def is_alone(group: Any = None) -> bool:
    """Return whether there is no other rank to gather from."""
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size(group) == 1


def gather_numbers(numbers: Sequence[int], group: Any = None) -> list[list[int]]:
    """Return the numbers of every rank, in rank order. Collective: every rank passes as many."""
    own = torch.tensor(numbers, dtype=torch.int64, device=_device(group))
    return [row.tolist() for row in _all_gather(own, group)]


def gather_states(
    states: Sequence[Mapping[str, torch.Tensor]], group: Any = None
) -> list[list[dict[str, torch.Tensor]]]:
    """Return the states of every rank, in rank order. Collective: every rank passes states with the same keys."""
    tensors = [_portable(state[key]) for state in states for key in sorted(state)]
    headers = gather_numbers([number for tensor in tensors for number in _header(tensor)], group)
    sizes = [_num_bytes(header) for header in headers]
    payload = torch.zeros(max(sum(each) for each in sizes), dtype=torch.uint8)
    own_rank = distributed.get_rank(group)
    for place, tensor in zip(_unpack(payload, headers[own_rank], sizes[own_rank]), tensors, strict=True):
        place.copy_(tensor)
    received = _all_gather(payload.to(_device(group)), group)
    gathered = []
    for payload, header, size in zip(received, headers, sizes, strict=True):
        unpacked = iter(_unpack(payload.cpu(), header, size))
        gathered.append([{key: next(unpacked) for key in sorted(state)} for state in states])
    return gathered


def _all_gather(own: torch.Tensor, group: Any) -> list[torch.Tensor]:
    received = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(received, own, group=group)
    return received


def _device(group: Any) -> torch.device:
    """Return where tensors of a collective have to be: NCCL moves only those of GPUs."""
    if distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in DTYPES:
        return tensor
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _header(tensor: torch.Tensor) -> list[int]:
    if tensor.dim() > MAX_DIMS:
        raise InvalidArgument(
            f"a metric has a state of {tensor.dim()} dimensions; at most {MAX_DIMS} can be gathered: flatten it",
            field="metrics",
        )
    return [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]


def _fields(header: Sequence[int]) -> list[tuple[torch.dtype, list[int]]]:
    """Return the type and shape of each tensor of a rank."""
    parts = [header[at : at + _HEADER] for at in range(0, len(header), _HEADER)]
    return [(DTYPES[code], list(dims[:num_dims])) for code, num_dims, *dims in parts]


def _num_bytes(header: Sequence[int]) -> list[int]:
    return [_aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in _fields(header)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _unpack(payload: torch.Tensor, header: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors of a rank as views of its payload."""
    tensors, at = [], 0
    for (dtype, shape), size in zip(_fields(header), sizes, strict=True):
        raw = payload[at : at + math.prod(shape) * dtype.itemsize]
        tensors.append(raw.view(dtype).reshape(shape))
        at += size
    return tensors
