"""The stage that decodes samples: how far ahead it works, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata.data.batch.assembly import Batches
from strata.data.batch.decoders import Decoding
from strata.data.runtime.decoded import MAX_BATCHES_AHEAD, DecodedBlocks
from strata.errors import DataFileInvalid

TIMEOUT_S = 30


class FakeBlocks:
    """Blocks of batches of two rows, which are taken one after the other."""

    def __init__(self, blocks: list[int]) -> None:
        self.num_taken = 0
        self.is_closed = False
        self._blocks = blocks

    def start(self) -> None:
        pass

    def take(self, *, waits: bool = True) -> Batches | None:
        if self.num_taken == len(self._blocks):
            return None
        num_batches = self._blocks[self.num_taken]
        self.num_taken += 1
        batches = [{"__key__": ["a", "b"], "cls": [b"1", b"2"]} for _ in range(num_batches)]
        return Batches(0, batches, (2,) * num_batches, (0,) * num_batches, (0,) * num_batches, 1)

    def close(self) -> None:
        self.is_closed = True


def decoded(blocks: FakeBlocks, decode: Callable[[bytes], Any], *, prefetch_bytes: int = 1 << 20) -> DecodedBlocks:
    decoding = Decoding({"cls": decode}, "dict")
    return DecodedBlocks(
        blocks, decoding, num_threads=2, prefetch_bytes=prefetch_bytes, on_lacking=lambda num_parts: None
    )


def test_every_batch_comes_once_and_in_order() -> None:
    made = decoded(FakeBlocks([3, 1, 5]), int)
    batches = []
    while (found := made.take()) is not None:
        batches += found.batches
    made.close()
    assert batches == [{"__key__": ["a", "b"], "cls": [1, 2]}] * 9


@pytest.mark.parametrize(("prefetch_bytes", "most"), [(1, 2), (1 << 30, MAX_BATCHES_AHEAD)])
def test_decoded_batches_ahead_are_bounded(prefetch_bytes: int, most: int) -> None:
    made = decoded(FakeBlocks([100]), int, prefetch_bytes=prefetch_bytes)
    for _ in range(20):
        made.take()
        assert len(made._jobs) <= most
    assert len(made._jobs) == most
    made.close()


def test_closing_wakes_a_caller_that_waits_for_a_decoder() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def stuck(data: bytes) -> bytes:
        has_begun.set()
        assert may_end.wait(TIMEOUT_S)
        return data

    blocks = FakeBlocks([2])
    made = decoded(blocks, stuck)
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(made.take()))
    caller.start()
    assert has_begun.wait(TIMEOUT_S)
    closer = threading.Thread(target=made.close)
    closer.start()
    caller.join(TIMEOUT_S)
    assert found == [None]
    may_end.set()
    closer.join(TIMEOUT_S)
    assert blocks.is_closed


def test_an_error_of_a_decoder_reaches_the_caller() -> None:
    made = decoded(FakeBlocks([1]), lambda data: int(data) // 0)
    with pytest.raises(DataFileInvalid, match=r"part 'cls' of sample 'a' .* ZeroDivisionError"):
        made.take()
    made.close()


@pytest.mark.parametrize("kind", [np.float32, np.int16, np.bool_])
def test_scalars_of_numpy_become_one_array_of_their_type(kind: Any) -> None:
    made = Decoding({}, "numpy").stacked([kind(1), kind(0)])
    assert made.dtype == kind
    assert made.tolist() == [1, 0]
