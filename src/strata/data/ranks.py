"""The rank and world size of this process, and broadcasts from rank 0.

Finding the rank imports no library: a library that is not imported cannot be initialised.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import sys
from typing import TYPE_CHECKING, Any

from strata.errors import BY_KIND, ConfigError, DataError, InvalidArgument, LimitExceeded, StrataError
from strata.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

log = logging.getLogger(__name__)

MAX_SHARED_BYTES = 1 << 30
"""Limit of one broadcast. The survey of ten thousand files takes a few megabytes."""
MAX_HEADER_BYTES = 1 << 16
"""Limit of the JSON header; a longer error message is cut."""

_MAX_MESSAGE_LENGTH = 8_000
"""Fits into the header even if every character needs six bytes of JSON."""
_HOROVOD = ("horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras")
_CURE = "correct them, or pass rank= and num_ranks="


def find_ranks(
    *,
    rank: int | None = None,
    num_ranks: int | None = None,
    accelerator: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> Identity:
    """Return the rank from the arguments, or else from the accelerator, torch.distributed, DeepSpeed, Horovod or the
    environment; without any of these, there is one rank.

    If two of these disagree, the first wins and a warning names both. The arguments are compared with nothing: with
    model parallelism there are more processes than ranks that read data.

    Raises:
        InvalidArgument: `rank`, `num_ranks` or `accelerator` is invalid.
        ConfigError: The environment is invalid, and no other source has the rank.
    """
    device = getattr(accelerator, "device", None)
    if rank is not None or num_ranks is not None:
        return _explicit(rank, num_ranks, device)
    found = list(_initialised(accelerator))
    if not found:
        return Identity.from_environment(environment, cure=_CURE) or Identity()
    others: list[Identity | None] = [*found[1:]]
    try:
        others.append(Identity.from_environment(environment, cure=_CURE))
    except ConfigError as error:
        log.warning("using the rank from %s and ignoring the environment: %s", found[0].found_in, error)
    for other in others:
        if other is not None and (other.rank, other.world_size) != (found[0].rank, found[0].world_size):
            log.warning("%s, but %s; using the first", _describe(found[0]), _describe(other))
    return found[0]


def _describe(ranks: Identity) -> str:
    return f"{ranks.found_in} has rank {ranks.rank} of {ranks.world_size}"


def _explicit(rank: int | None, num_ranks: int | None, device: Any) -> Identity:
    if rank is None or num_ranks is None:
        missing, given = ("rank", "num_ranks") if rank is None else ("num_ranks", "rank")
        raise InvalidArgument(
            f"{given}= is given without {missing}=; pass both, or neither to detect them", field=missing
        )
    return _checked(rank, num_ranks, "rank= and num_ranks=", device)


def _initialised(accelerator: Any) -> Iterator[Identity]:
    """Yield the ranks of initialised objects and modules, the most specific first."""
    if accelerator is not None:
        try:
            rank, num_ranks = accelerator.process_index, accelerator.num_processes
        except AttributeError as error:
            raise InvalidArgument(
                f"accelerator is a {type(accelerator).__name__} without process_index and num_processes "
                f"({error}); pass an accelerate.Accelerator, or rank= and num_ranks=",
                field="accelerator",
            ) from error
        yield _checked(rank, num_ranks, "the accelerator", getattr(accelerator, "device", None))
    if (torch := _process_group()) is not None:
        yield _checked(torch.get_rank(), torch.get_world_size(), "torch.distributed")
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed is not None and deepspeed.is_initialized():
        yield _checked(deepspeed.get_rank(), deepspeed.get_world_size(), "DeepSpeed")
    for name in _HOROVOD:
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            yield _checked(horovod.rank(), horovod.size(), name)
            return  # all modules share one Horovod


def _process_group() -> Any:
    """Return `torch.distributed` if it is imported and has a process group, else None."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _checked(rank: Any, num_ranks: Any, found_in: str, device: Any = None) -> Identity:
    """Return valid ranks.

    Raises:
        InvalidArgument: The rank is not one of `num_ranks`.
    """
    try:
        rank, num_ranks = operator.index(rank), operator.index(num_ranks)
    except TypeError:
        raise InvalidArgument(
            f"{found_in}: rank={rank!r} and num_ranks={num_ranks!r} must be whole numbers", field="rank"
        ) from None
    if num_ranks < 1:
        raise InvalidArgument(f"{found_in}: num_ranks={num_ranks} must be at least 1", field="num_ranks")
    if not 0 <= rank < num_ranks:
        raise InvalidArgument(
            f"{found_in}: rank={rank} must be from 0 to {num_ranks - 1} with {num_ranks} ranks", field="rank"
        )
    return Identity(rank=rank, world_size=num_ranks, found_in=found_in, device=device)


def share(ranks: Identity, produce: Callable[[], bytes]) -> bytes:
    """Run `produce` on rank 0 of torch's process group and return its result on all ranks.

    All ranks must call it, and an error on rank 0 is raised on all of them. Without a process group of this world
    size, every rank runs `produce`; the caller should then compare the results.

    Raises:
        StrataError: Rank 0 raised it; the type and the message are the same.
        LimitExceeded: The result is too large to broadcast.
        DataError: Rank 0 raised another error, or the process group failed.
    """
    torch = _process_group()
    if torch is None or ranks.world_size == 1 or torch.get_world_size() != ranks.world_size:
        return produce()
    channel = _Channel(torch, _device(torch, ranks))
    if torch.get_rank() == 0:
        return _send(channel, produce)
    header = json.loads(channel.receive(channel.receive_number(MAX_HEADER_BYTES)))
    if not header["ok"]:
        raise BY_KIND.get(header["kind"], DataError)(header["message"], field=header["field"])
    return channel.receive(channel.receive_number(MAX_SHARED_BYTES))


def _send(channel: _Channel, produce: Callable[[], bytes]) -> bytes:
    """Broadcast the result of `produce`, or its error: the other ranks wait for one of them."""
    try:
        data = _bounded(produce())
    except StrataError as error:
        channel.send_error(type(error).__name__, error.message, error.field)
        raise
    except Exception as error:
        channel.send_error("DataError", f"rank 0 failed: {type(error).__name__}: {error}; see its log")
        raise
    channel.send_header(ok=True)
    channel.send_sized(data)
    return data


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_SHARED_BYTES:
        raise LimitExceeded(
            f"rank 0 has {len(data):,} bytes to broadcast, but the limit is {MAX_SHARED_BYTES:,}; split the "
            "dataset, or write it with fewer, larger files"
        )
    return data


def _device(torch: Any, ranks: Identity) -> Any:
    """Return the device to broadcast from: host memory if the group has a backend for it (gloo), else nccl's device."""
    kinds = [pair.partition(":")[0] for pair in str(torch.get_backend_config()).split(",")]
    if "cpu" in kinds:
        return "cpu"
    return ranks.device if getattr(ranks.device, "type", None) == kinds[0] else kinds[0]


class _Channel:
    """Broadcasts from rank 0 to all others. Bytes travel as tensors: nothing received is ever executed."""

    def __init__(self, distributed: Any, device: Any) -> None:
        self._distributed = distributed
        self._device = device

    def send_error(self, kind: str, message: str, field: str = "") -> None:
        self.send_header(ok=False, kind=kind, message=message[:_MAX_MESSAGE_LENGTH], field=field[:100])

    def send_header(self, **header: Any) -> None:
        self.send_sized(json.dumps(header).encode())

    def send_sized(self, data: bytes) -> None:
        """Send the length first, so that the others can allocate memory."""
        import torch  # noqa: PLC0415 - there is a process group

        self._broadcast(torch.tensor([len(data)], dtype=torch.int64, device=self._device))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))

    def receive_number(self, at_most: int) -> int:
        import torch  # noqa: PLC0415

        number = int(self._broadcast(torch.zeros(1, dtype=torch.int64, device=self._device)).item())
        if not 0 <= number <= at_most:
            raise DataError(
                f"rank 0 announced {number} bytes, but at most {at_most} are allowed; all ranks must make the same "
                "calls in the same order, with the same version of Strata"
            )
        return number

    def receive(self, num_bytes: int) -> bytes:
        import torch  # noqa: PLC0415

        if num_bytes == 0:
            return b""
        data = self._broadcast(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return bytes(data.cpu().numpy().tobytes())

    def _broadcast(self, tensor: Any) -> Any:
        with _raising_data_errors():
            self._distributed.broadcast(tensor, src=0)
        return tensor


@contextlib.contextmanager
def _raising_data_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DataError(
            f"the broadcast from rank 0 failed: {error}; check the log of rank 0, which may have died"
        ) from error
