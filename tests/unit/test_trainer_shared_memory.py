"""Averages in shared memory: the same bits as a sum in rank order, whatever the buckets; and meetings that end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strata.trainer.strategy.shared_memory import ALIGNMENT, Neighbors, RankLost, SharedMemory, part_of

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Bucket:
    """What DDP hands over."""

    flat: Tensor
    number: int
    count: int

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def is_last(self) -> bool:
        return self.number == self.count - 1

    def gradients(self) -> list[Tensor]:
        return [self.flat]

    def parameters(self) -> list[Tensor]:
        return [self.flat]


class Barrier:
    """Ranks as threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)

    def meet(self) -> None:
        self._barrier.wait()


def on_ranks(num_ranks: int, work: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, range(num_ranks)))


def gradients(step: int, rank: int, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def memory_for(num_ranks: int, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    num_bytes = sum(-(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT for size in sizes)
    return [torch.zeros(2 * num_bytes, dtype=torch.uint8) for _ in range(num_ranks)]


def mean_in_rank_order(of_ranks: list[Tensor]) -> Tensor:
    scaled = [each * (1 / len(of_ranks)) for each in of_ranks]
    total = scaled[0]
    for each in scaled[1:]:
        total = total + each
    return total


@given(
    num_ranks=st.integers(2, 5),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_every_rank_gets_the_bits_of_a_sum_in_rank_order(num_ranks: int, sizes: list[int], dtype: torch.dtype) -> None:
    memory, barrier = memory_for(num_ranks, sizes, dtype), Barrier(num_ranks)

    def train(rank: int) -> list[Tensor]:
        hook, means = SharedMemory(memory, rank, barrier), []
        for step in range(3):
            flats = gradients(step, rank, sizes, dtype)
            futures = [hook.submit(Bucket(flat, i, len(flats))) for i, flat in enumerate(flats)]
            means += [future.value() for future in futures]
        return means

    found = on_ranks(num_ranks, train)
    of_ranks = [
        [flat for step in range(3) for flat in gradients(step, rank, sizes, dtype)] for rank in range(num_ranks)
    ]
    expected = [mean_in_rank_order(list(each)) for each in zip(*of_ranks, strict=True)]
    for means in found:
        assert all(map(torch.equal, means, expected))


@given(num_ranks=st.integers(1, 9), num_elements=st.integers(0, 5_000))
def test_the_parts_of_all_ranks_are_the_whole(num_ranks: int, num_elements: int) -> None:
    parts = [range(num_elements)[part_of(rank, num_ranks, num_elements)] for rank in range(num_ranks)]

    assert [element for part in parts for element in part] == list(range(num_elements))


def test_buckets_of_a_pass_that_failed_are_forgotten() -> None:
    sizes = [100, 50]
    memory, barrier = memory_for(2, sizes, torch.float32), Barrier(2)

    def train(rank: int) -> list[Tensor]:
        hook = SharedMemory(memory, rank, barrier)
        hook.submit(Bucket(torch.full((100,), 7.0), 0, 2))  # the error came before the last bucket
        flats = gradients(0, rank, sizes, torch.float32)
        futures = [hook.submit(Bucket(flat, i, 2)) for i, flat in enumerate(flats)]
        return [future.value() for future in futures]

    expected = [mean_in_rank_order([gradients(0, rank, sizes, torch.float32)[i] for rank in (0, 1)]) for i in (0, 1)]
    for means in on_ranks(2, train):
        assert all(map(torch.equal, means, expected))


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Return a function that connects two ranks."""
    with contextlib.ExitStack() as stack:

        def connected() -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return stack.enter_context(ours), stack.enter_context(theirs)

        yield connected


Pair = Callable[[], tuple[socket.socket, socket.socket]]


def test_a_rank_that_does_not_arrive_is_named_after_the_time_limit(pair: Pair) -> None:
    (first, _), (second, second_end) = pair(), pair()
    second_end.send(b"\1")

    with pytest.raises(RankLost, match=r"^rank 1 has not finished its backward pass 0\.05 s after this one"):
        Neighbors({1: first, 2: second}, [], timeout_s=0.05).meet()


def test_a_rank_that_is_gone_is_named_at_once(pair: Pair) -> None:
    first, its_end = pair()
    its_end.close()

    with pytest.raises(RankLost, match=r"^rank 1 left the all-reduce: Connection closed by peer"):
        Neighbors({1: first}, [], timeout_s=DEADLINE_S).meet()


def test_a_fast_rank_may_arrive_at_the_next_meeting_before_the_slow_one_leaves_the_last(pair: Pair) -> None:
    ours, its_end = pair()
    its_end.send(b"\1")
    its_end.send(b"\1")
    neighbors = Neighbors({1: ours}, [], timeout_s=DEADLINE_S)

    neighbors.meet()
    neighbors.meet()

    with pytest.raises(BlockingIOError):
        ours.recv(1)
