"""Averages gradients in memory that all ranks of one machine share, instead of sending them through sockets.

Every rank has a slab. During the backward pass, it writes its buckets there, already divided by the world size. After
the last bucket it meets the others: then all slabs are complete, and every rank adds the same element of all slabs in
rank order. With many ranks, each adds only its own part, meets the others again, and copies the parts of the others.
The order of a sum thus depends neither on buckets nor on timing, and two ranks get the bits of DDP.

Ranks meet by a byte to each of the others, over Unix sockets: the kernel orders it after the writes to the slabs and
reports a rank that died. A slab has two halves, for alternating steps, because a rank may write its next gradients
while another one still reads the last. It reaches the half after that only once all have met again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from strata.errors import StrataError
from strata.transport.slab import Slab
from strata.transport.sockets import MAX_PATH, place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from strata.trainer.strategy.lane import Future
    from strata.trainer.strategy.reduce import Bucket

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes of a cache line, which two ranks should not write to."""
MAX_DIRECT_RANKS = 2
"""Up to this number, every rank adds everything: that is cheaper than to meet twice."""
MAX_MEMORY_SHARE = 0.25
"""Of the memory available on the machine, for the slabs of all ranks."""
CONNECT_S = 30.0
MEET_S = default_pg_timeout.total_seconds()
"""Seconds to wait for the slowest rank, as in torch's collectives. A run detects workers that hang much sooner."""
_PEER = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
_HELLO = struct.Struct("<I")
_ARRIVED = b"\1"


class RankLost(StrataError):
    """Another rank of this machine left the all-reduce, or did not arrive."""


class Meeting(Protocol):
    """Where ranks wait for each other."""

    def meet(self) -> None:
        """Wait until all ranks have called it. What they wrote to shared memory before is then visible.

        Raises:
            RankLost: A rank is gone, or has not called it in time.
        """
        ...


class Neighbors:
    """Connections to the other ranks, which are all on this machine, and the slabs of all."""

    def __init__(self, peers: dict[int, socket.socket], slabs: Sequence[Slab], *, timeout_s: float = MEET_S) -> None:
        self.slabs = list(slabs)
        """By rank; one of them is our own."""
        self.waited_s = 0.0
        """Seconds for which this rank has waited for others."""
        self._peers = peers
        self._timeout_s = timeout_s
        for peer in peers.values():
            peer.setblocking(False)

    def meet(self) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.send(_ARRIVED)  # the socket is nearly empty: a rank is at most one meeting ahead
            except OSError as error:
                raise _lost(rank) from error
        missing = {rank: peer for rank, peer in self._peers.items() if not _has_arrived(rank, peer)}
        if missing:
            began_s = time.monotonic()
            self._wait(missing, began_s + self._timeout_s)
            self.waited_s += time.monotonic() - began_s

    def close(self) -> None:
        """Close the connections; ranks that still wait for this one get an error."""
        for peer in self._peers.values():
            peer.close()
        for slab in self.slabs:
            slab.close()

    def _wait(self, missing: dict[int, socket.socket], deadline_s: float) -> None:
        poll = select.poll()
        ranks = {peer.fileno(): rank for rank, peer in missing.items()}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        while ranks:
            left_s = deadline_s - time.monotonic()
            for fd, _ in poll.poll(left_s * 1_000) if left_s > 0 else ():
                if _has_arrived(ranks[fd], missing[ranks[fd]]):
                    poll.unregister(fd)
                    del ranks[fd]
            if ranks and left_s <= 0:
                late = ", ".join(str(rank) for rank in sorted(ranks.values()))
                raise RankLost(
                    f"rank {late} has not finished its backward pass {self._timeout_s:g} s after this one; "
                    "its log or its stack shows where it waits"
                )


def _has_arrived(rank: int, peer: socket.socket) -> bool:
    try:
        found = peer.recv(1)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _lost(rank) from error
    if found != _ARRIVED:
        raise _lost(rank)
    return True


def _lost(rank: int) -> RankLost:
    return RankLost(f"rank {rank} left the all-reduce: Connection closed by peer; its log shows why")


class _Written(NamedTuple):
    """A bucket whose gradients are in the slabs."""

    bucket: Tensor
    start: int
    done: Future


class SharedMemory:
    """DDP's communication hook: writes buckets to our slab, and averages all of a step after the last one."""

    def __init__(self, memory: Sequence[Tensor], rank: int, meeting: Meeting) -> None:
        """`memory`: the slabs of all ranks as bytes, of the same size."""
        self._rank = rank
        self._world_size = len(memory)
        self._meeting = meeting
        self._half_bytes = len(memory[0]) // 2 // ALIGNMENT * ALIGNMENT
        self._halves = [[each[half * self._half_bytes :][: self._half_bytes] for each in memory] for half in (0, 1)]
        self._written: list[_Written] = []
        self._end = 0
        """Bytes of the half that this step has used."""

    def submit(self, bucket: Bucket) -> Future:
        """Return a future of the bucket's mean. After the last bucket of a pass, all futures are complete."""
        if bucket.index() == 0:  # an earlier pass may have ended with an error
            self._written, self._end = [], 0
        flat = bucket.buffer()
        if flat.is_sparse or self._end + flat.nbytes > self._half_bytes:
            future = _all_reduce(flat, self._world_size)
        else:
            future = torch.futures.Future()
            torch.mul(flat, 1 / self._world_size, out=self._view(self._rank, flat, self._end))
            self._written.append(_Written(flat, self._end, future))
            self._end += -(-flat.nbytes // ALIGNMENT) * ALIGNMENT
        if bucket.is_last():
            self._average()
        return future

    def _average(self) -> None:
        self._meeting.meet()
        is_direct = self._world_size <= MAX_DIRECT_RANKS
        for bucket, start, _ in self._written:
            part = slice(None) if is_direct else part_of(self._rank, self._world_size, bucket.numel())
            first, second, *others = (self._view(rank, bucket, start)[part] for rank in range(self._world_size))
            mean = torch.add(first, second, out=bucket[part])
            for other in others:
                mean.add_(other)
            if not is_direct:
                self._view(self._rank, bucket, start)[part].copy_(mean)
        if not is_direct:
            self._meeting.meet()
            self._copy_parts()
        for bucket, _, done in self._written:
            done.set_result(bucket)
        self._written = []
        self._halves.reverse()

    def _copy_parts(self) -> None:
        for bucket, start, _ in self._written:
            for rank in range(self._world_size):
                if rank != self._rank:
                    part = part_of(rank, self._world_size, bucket.numel())
                    bucket[part].copy_(self._view(rank, bucket, start)[part])

    def _view(self, rank: int, like: Tensor, start: int) -> Tensor:
        """Return the place of a bucket in a rank's slab."""
        return self._halves[0][rank][start : start + like.nbytes].view(like.dtype)


def part_of(rank: int, num_ranks: int, num_elements: int) -> slice:
    """Return the part of a bucket that a rank adds. Parts do not share cache lines."""
    unit = ALIGNMENT
    share = -(-num_elements // (num_ranks * unit)) * unit
    return slice(min(rank * share, num_elements), min((rank + 1) * share, num_elements))


def _all_reduce(flat: Tensor, world_size: int) -> Future:
    """Average by torch's own all-reduce: sparse gradients, of which ranks have different rows."""
    work = dist.all_reduce(flat.mul_(1 / world_size), async_op=True)
    future: Future = work.get_future().then(lambda done: done.value()[0])
    return future


# -- setup -------------------------------------------------------------------------------------------------------------


def connect(num_bytes: int, *, rank: int, world_size: int) -> Neighbors | None:
    """Connect all ranks, each with a slab for `num_bytes` of gradients. Collective.

    Returns None on all ranks if one of them cannot: they have no directory in common, or there is too little memory.
    """
    with contextlib.ExitStack() as stack:
        own, path = None, ""
        try:
            own = stack.enter_context(_opened(num_bytes, world_size))
            path = own.path
        except OSError as error:
            log.info("rank %d has no shared memory for gradients: %s", rank, error)
        paths = _gathered(path, world_size)
        if own is None or not all(paths):
            return None
        peers: dict[int, socket.socket] = {}
        slabs = {rank: own.slab}
        try:
            for peer in _connections(own.listener, paths, rank):
                other, slab = _introduced(peer, own.slab, rank)
                peers[other], slabs[other] = peer, slab
        except (OSError, ValueError) as error:
            log.info("rank %d cannot share memory with the others: %s", rank, error)
        neighbors = Neighbors(peers, [slabs[each] for each in sorted(slabs)])
        if not _is_everywhere(len(slabs) == world_size):
            neighbors.close()
            return None
        return neighbors


class _Own(NamedTuple):
    slab: Slab
    listener: socket.socket
    path: str


@contextlib.contextmanager
def _opened(num_bytes: int, world_size: int) -> Iterator[_Own]:
    """Create a slab, and a socket that exists until the block ends."""
    slab_bytes = 2 * -(-num_bytes // ALIGNMENT) * ALIGNMENT
    available = psutil.virtual_memory().available
    if slab_bytes * world_size > available * MAX_MEMORY_SHARE:
        raise OSError(f"{world_size} × {slab_bytes / 1e9:.1f} GB are too much of {available / 1e9:.1f} GB")
    with place() as scratch, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        path = str(scratch.path / "gradients")
        listener.bind(path)
        listener.listen(world_size)
        listener.settimeout(CONNECT_S)
        yield _Own(Slab.create(slab_bytes), listener, path)


def _connections(listener: socket.socket, paths: Sequence[str], rank: int) -> Iterator[socket.socket]:
    """Yield a connection to every other rank: made to those before this one, accepted from those after it."""
    for path in paths[:rank]:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(CONNECT_S)
        peer.connect(path)
        yield peer
    for _ in paths[rank + 1 :]:
        peer, _address = listener.accept()
        peer.settimeout(CONNECT_S)
        yield peer


def _introduced(peer: socket.socket, slab: Slab, rank: int) -> tuple[int, Slab]:
    """Exchange ranks and slabs; return those of the peer.

    Raises:
        OSError, ValueError: It is not a rank of this user with a slab like ours.
    """
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise ValueError(f"the process at the other end belongs to user {user}")
    socket.send_fds(peer, [_HELLO.pack(rank)], [slab.fd])
    hello, fds, _, _ = socket.recv_fds(peer, _HELLO.size, 1)
    if len(hello) != _HELLO.size or len(fds) != 1:
        raise ValueError("the process at the other end closed the connection")
    theirs = Slab.received(fds[0])
    if theirs.num_bytes != slab.num_bytes:
        theirs.close()
        raise ValueError(f"the slab of another rank has {theirs.num_bytes:,} bytes, ours {slab.num_bytes:,}")
    return _HELLO.unpack(hello)[0], theirs


def _gathered(path: str, world_size: int) -> list[str]:
    own = torch.zeros(MAX_PATH, dtype=torch.uint8)
    own[: len(path.encode())] = torch.tensor(list(path.encode()), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own)
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in gathered]


def _is_everywhere(is_true: bool) -> bool:
    flag = torch.tensor([int(is_true)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
