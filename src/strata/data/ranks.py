"""Which of how many processes this one is, wherever that is known, and how rank 0 hands bytes to the others.

Nothing is imported to find out: a library that nobody imported cannot have been initialised.
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
"""What rank 0 hands over at once. The survey of ten thousand files is a few megabytes."""
MAX_HEADER_BYTES = 1 << 16
"""Of JSON: an error's message that is longer is cut."""

_MAX_MESSAGE_LENGTH = 8_000
"""Even if every character needs six bytes of JSON, the header holds it."""
_HOROVOD = ("horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras")
_CURE = "correct them, or give rank= and num_ranks="


def find_ranks(
    *,
    rank: int | None = None,
    num_ranks: int | None = None,
    accelerator: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> Identity:
    """What the caller says, else the accelerator, torch.distributed, DeepSpeed, Horovod, the environment, else alone.

    When two of these disagree, the first counts and a warning names both. What the caller says is compared with
    nothing: with model parallelism there are more processes than there are ranks that read data.

    Raises:
        InvalidArgument: `rank`, `num_ranks` or `accelerator` is wrong.
        ConfigError: The environment is, and nobody else knows.
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
        log.warning("ranks are taken from %s; the environment is not used: %s", found[0].found_in, error)
    for other in others:
        if other is not None and (other.rank, other.world_size) != (found[0].rank, found[0].world_size):
            log.warning("%s, but %s; the first counts", _said(found[0]), _said(other))
    return found[0]


def _said(ranks: Identity) -> str:
    return f"{ranks.found_in} says rank {ranks.rank} of {ranks.world_size}"


def _explicit(rank: int | None, num_ranks: int | None, device: Any) -> Identity:
    if rank is None or num_ranks is None:
        missing, given = ("rank", "num_ranks") if rank is None else ("num_ranks", "rank")
        raise InvalidArgument(
            f"{given}= is given without {missing}=; give both, or neither to find them", field=missing
        )
    return _checked(rank, num_ranks, "rank= and num_ranks=", device)


def _initialised(accelerator: Any) -> Iterator[Identity]:
    """From objects and modules that know it; the most telling first."""
    if accelerator is not None:
        try:
            rank, world_size = accelerator.process_index, accelerator.num_processes
        except AttributeError as error:
            raise InvalidArgument(
                f"accelerator is a {type(accelerator).__name__} that does not tell process_index and num_processes "
                f"({error}); give an accelerate.Accelerator, or rank= and num_ranks=",
                field="accelerator",
            ) from error
        yield _checked(rank, world_size, "the accelerator", getattr(accelerator, "device", None))
    if (torch := _process_group()) is not None:
        yield _checked(torch.get_rank(), torch.get_world_size(), "torch.distributed")
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed is not None and deepspeed.is_initialized():
        yield _checked(deepspeed.get_rank(), deepspeed.get_world_size(), "DeepSpeed")
    for name in _HOROVOD:
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            yield _checked(horovod.rank(), horovod.size(), name)
            return  # whichever module was asked, it is one Horovod


def _process_group() -> Any:
    """`torch.distributed`, if it is imported and has a process group."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _checked(rank: Any, world_size: Any, found_in: str, device: Any = None) -> Identity:
    """
    Raises:
        InvalidArgument: There is no such rank.
    """
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise InvalidArgument(
            f"{found_in}: rank {rank!r} of {world_size!r} are not both whole numbers", field="rank"
        ) from None
    if world_size < 1:
        raise InvalidArgument(f"{found_in}: there cannot be {world_size} ranks; there is 1 at least", field="num_ranks")
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"{found_in}: rank {rank} is not one of {world_size}; they are 0 to {world_size - 1}", field="rank"
        )
    return Identity(rank=rank, world_size=world_size, found_in=found_in, device=device)


def share(ranks: Identity, produce: Callable[[], bytes]) -> bytes:
    """What `produce` makes on rank 0, on all ranks of torch's process group; an error there is an error everywhere.

    All ranks must call it. Without a process group of as many ranks, everybody produces: the same, one must hope, so
    whoever calls should have a way to compare.

    Raises:
        StrataError: What rank 0 raised, of the same kind and with the same words.
        LimitExceeded: It is too much to hand over.
        DataError: Rank 0 failed in another way, or the process group did.
    """
    torch = _process_group()
    if torch is None or ranks.world_size == 1 or torch.get_world_size() != ranks.world_size:
        return produce()
    channel = _Channel(torch, _device(torch, ranks))
    if torch.get_rank() == 0:
        return _give(channel, produce)
    header = json.loads(channel.receive(channel.receive_number(MAX_HEADER_BYTES)))
    if not header["ok"]:
        raise BY_KIND.get(header["kind"], DataError)(header["message"], field=header["field"])
    return channel.receive(channel.receive_number(MAX_SHARED_BYTES))


def _give(channel: _Channel, produce: Callable[[], bytes]) -> bytes:
    """Whatever happens in `produce`, the others hear of it: they wait."""
    try:
        data = _bounded(produce())
    except StrataError as error:
        channel.send_error(type(error).__name__, error.message, error.field)
        raise
    except Exception as error:
        channel.send_error("DataError", f"rank 0 failed: {type(error).__name__}: {error}; its log tells more")
        raise
    channel.send_header(ok=True)
    channel.send_sized(data)
    return data


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_SHARED_BYTES:
        raise LimitExceeded(
            f"rank 0 has {len(data):,} bytes for the other ranks, and can hand over {MAX_SHARED_BYTES:,}; split the "
            "dataset, or write it with fewer, larger files"
        )
    return data


def _device(torch: Any, ranks: Identity) -> Any:
    """Where the group can send from: host memory if it has a backend for that (gloo), else its device (nccl)."""
    kinds = [pair.partition(":")[0] for pair in str(torch.get_backend_config()).split(",")]
    if "cpu" in kinds:
        return "cpu"
    return ranks.device if getattr(ranks.device, "type", None) == kinds[0] else kinds[0]


class _Channel:
    """From rank 0 to all others. Bytes travel as tensors: nothing that is received is ever executed."""

    def __init__(self, distributed: Any, device: Any) -> None:
        self._distributed = distributed
        self._device = device

    def send_error(self, kind: str, message: str, field: str = "") -> None:
        self.send_header(ok=False, kind=kind, message=message[:_MAX_MESSAGE_LENGTH], field=field[:100])

    def send_header(self, **header: Any) -> None:
        self.send_sized(json.dumps(header).encode())

    def send_sized(self, data: bytes) -> None:
        """The length first, so that the others can make room."""
        import torch  # noqa: PLC0415 - there is a process group

        self._broadcast(torch.tensor([len(data)], dtype=torch.int64, device=self._device))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))

    def receive_number(self, at_most: int) -> int:
        import torch  # noqa: PLC0415

        number = int(self._broadcast(torch.zeros(1, dtype=torch.int64, device=self._device)).item())
        if not 0 <= number <= at_most:
            raise DataError(
                f"rank 0 announced {number} bytes, at most {at_most} were expected; all ranks must make the same calls "
                "in the same order, with the same version of Strata"
            )
        return number

    def receive(self, num_bytes: int) -> bytes:
        import torch  # noqa: PLC0415

        if num_bytes == 0:
            return b""
        data = self._broadcast(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return bytes(data.cpu().numpy().tobytes())

    def _broadcast(self, tensor: Any) -> Any:
        with _told_as_data_error():
            self._distributed.broadcast(tensor, src=0)
        return tensor


@contextlib.contextmanager
def _told_as_data_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DataError(
            f"the ranks could not be told what rank 0 found: {error}; look at rank 0's log, it may have died"
        ) from error
