"""A worker that restarts alone finds its next rows by arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.map_style import map_loader
from strata.errors import StrataError
from strata.identity import Identity
from strata.trainer.parts import skip_steps


class Rows(torch.utils.data.Dataset[int]):
    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, row: int) -> int:
        return row


def loader_of(num_rows: int, rank: int, tail: Any) -> Any:
    ranks = Identity(rank=rank, world_size=2)
    loader = map_loader(Rows(num_rows), ranks=ranks, batch_size=3, shuffle=True, shuffle_seed=4, tail=tail)
    loader.set_epoch(1)
    return loader


@settings(deadline=None, max_examples=40)
@given(
    st.integers(7, 60),
    st.integers(0, 1),
    st.sampled_from(["uneven", "pad", "drop"]),
    st.integers(1, 3),
    st.integers(1, 12),
)
def test_skipped_steps_are_those_that_were_made(
    num_rows: int, rank: int, tail: str, accumulate: int, num_steps: int
) -> None:
    batches = [batch.tolist() for batch in loader_of(num_rows, rank, tail)]
    groups = [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]
    loader = loader_of(num_rows, rank, tail)
    if num_steps > len(groups):
        with pytest.raises(StrataError, match="steps need more than"):
            skip_steps(loader, num_steps, accumulate=accumulate)
        return

    skip_steps(loader, num_steps, accumulate=accumulate)
    loader.set_epoch(1)  # as the next pass over the data does

    assert [batch.tolist() for batch in loader] == list(itertools.chain.from_iterable(groups[num_steps:]))
