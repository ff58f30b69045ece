"""The order of a mix: exact shares at every prefix, and the same rows on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.order.mix_cursor import read_mix_cursor
from strata.data.order.mixture import Mixture, SourceSteps, Turns
from strata.errors import InvalidArgument, PlanChanged

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


def counts(mixture: Mixture, *positions: int) -> list[list[int]]:
    found: list[list[int]] = mixture.counts(np.array(positions)).tolist()
    return found


def test_two_sources_take_turns_by_their_weights() -> None:
    mixture = Mixture([0.7, 0.3])
    sources = np.diff(mixture.counts(np.arange(11)), axis=0).argmax(axis=1)
    assert sources.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


@settings(deadline=None, max_examples=60)
@given(weights, st.integers(0, 1 << 40))
def test_every_prefix_has_the_shares_of_the_weights_within_the_bound(given_weights: list[float], first: int) -> None:
    mixture = Mixture(given_weights)
    positions = first + np.arange(300)
    found = mixture.counts(positions)
    assert (found.sum(axis=1) == positions).all()
    assert (np.diff(found, axis=0) >= 0).all()
    deviation = np.abs(found - positions[:, None] * mixture.weights)
    assert (deviation <= 0.5 + mixture.weights * len(given_weights) / 2 + 1e-3).all()


@settings(deadline=None, max_examples=60)
@given(weights, st.integers(0, 1 << 40), st.data())
def test_a_row_is_found_where_it_is_delivered(given_weights: list[float], row: int, data: st.DataObject) -> None:
    mixture, source = Mixture(given_weights), data.draw(st.integers(0, len(given_weights) - 1))
    position = mixture.find(source, row)
    before, after = counts(mixture, position, position + 1)
    assert (before[source], after[source]) == (row, row + 1)


@settings(deadline=None, max_examples=40)
@given(weights, st.integers(0, 1 << 40), st.integers(1, 200))
def test_the_order_within_a_batch_is_that_of_the_mix(given_weights: list[float], first: int, size: int) -> None:
    mixture = Mixture(given_weights)
    taken = mixture.counts(first + np.arange(size + 1))
    firsts, lasts = taken[0], taken[-1]
    listed = np.repeat(np.arange(len(given_weights)), lasts - firsts)
    assert listed[mixture.interleaved(firsts, lasts)].tolist() == np.diff(taken, axis=0).argmax(axis=1).tolist()


@st.composite
def mixes(draw: st.DrawFn) -> tuple[list[float], list[int], bool, int]:
    shares = draw(st.lists(st.floats(0.05, 1), min_size=1, max_size=3))
    rows = [draw(st.integers(1, 40)) for _ in shares]
    return shares, rows, draw(st.booleans()), draw(st.integers(0, 60))


def delivered(turns: Turns, source: int, num_rows: int, *, position: int, num_steps: int, world: int) -> list[int]:
    """Return the stream of a source as the passes of all ranks over its epochs deliver it, step by step."""
    stream: list[list[int]] = [[] for _ in range(num_steps)]
    first, last = (
        turns.taken_at(np.array([at]))[0, source] for at in (position, position + num_steps * turns.batch_rows)
    )
    starts = position + np.arange(num_steps + 1) * turns.batch_rows
    borders = turns.taken_at(starts)[:, source]
    for epoch in range(int(first) // num_rows, int(last) // num_rows + 1):
        for rank in range(world):
            steps = SourceSteps(
                turns,
                source,
                position=position,
                num_steps=num_steps,
                rank=rank,
                world_size=world,
                epoch=epoch,
                num_rows=num_rows,
            )
            assert steps.num_rows == num_rows
            for batch in range(steps.num_batches):
                begin, stop = steps.bounds(batch)
                low, high = steps.run(batch, rank)
                assert 0 <= low < high <= stop - begin
                step = int(np.searchsorted(borders, epoch * num_rows + begin, side="right")) - 1
                stream[step] += range(epoch * num_rows + begin + low, epoch * num_rows + begin + high)
    return [row for step in stream for row in sorted(step)]


@settings(deadline=None, max_examples=60)
@given(mixes(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12))
def test_all_ranks_together_read_every_row_of_every_epoch_of_a_source_once(
    mixed: tuple[list[float], list[int], bool, int], world: int, batch_size: int, num_steps: int
) -> None:
    shares, rows, by_batch, steps_before = mixed
    batch_rows = world * batch_size
    turns = Turns(mixture=Mixture(shares), by_batch=by_batch, batch_rows=batch_rows, taken=(0,) * len(shares))
    position = steps_before * batch_rows
    firsts, lasts = turns.taken_at(np.array([position, position + num_steps * batch_rows])).tolist()
    assert sum(lasts) - sum(firsts) == num_steps * batch_rows
    for source, num_rows in enumerate(rows):
        stream = delivered(turns, source, num_rows, position=position, num_steps=num_steps, world=world)
        assert stream == list(range(firsts[source], lasts[source]))


@settings(deadline=None, max_examples=60)
@given(mixes(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 12))
def test_every_rank_gets_full_batches_of_all_sources_together(
    mixed: tuple[list[float], list[int], bool, int], world: int, batch_size: int, step: int
) -> None:
    shares, _, by_batch, _ = mixed
    turns = Turns(mixture=Mixture(shares), by_batch=by_batch, batch_rows=world * batch_size, taken=(0,) * len(shares))
    starts = step * world * batch_size + np.arange(world) * batch_size
    sizes = turns.taken_at(starts + batch_size) - turns.taken_at(starts)
    assert (sizes >= 0).all()
    assert (sizes.sum(axis=1) == batch_size).all()
    if by_batch:
        assert np.count_nonzero(sizes.sum(axis=0)) == 1


STATE: dict[str, Any] = {
    "version": 1,
    "kind": "mix",
    "epoch": 0,
    "position": 10,
    "mix_by": "row",
    "batch_rows": 10,
    "weights": {"a": 1.0},
    "since": 0,
    "sources": {
        "a": {
            "fingerprint": "x",
            "seed": 0,
            "shuffle": False,
            "epoch": 0,
            "position": 0,
            "num_rows": 5,
            "lanes": 1,
            "window": 0,
        }
    },
}


def test_a_state_is_read_as_it_was_written() -> None:
    cursor = read_mix_cursor(STATE)
    assert read_mix_cursor(cursor.to_dict()) == cursor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "map"}, "not the state of a mix"),
        ({"since": 11}, "contradict"),
        ({"weights": {"b": 1.0}}, "contradict"),
        ({"weights": {"a": 0.0}}, "contradict"),
        ({"batch_rows": 0}, "contradict"),
    ],
)
def test_an_impossible_state_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_mix_cursor({**STATE, **change})


def test_the_state_of_a_newer_version_is_refused() -> None:
    with pytest.raises(PlanChanged, match="version 2"):
        read_mix_cursor({**STATE, "version": 2})
