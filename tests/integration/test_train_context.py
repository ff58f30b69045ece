"""A script's context without an agent: alone, with a coordinator of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strata
from strata.errors import InvalidArgument
from strata.train import Context

NUM_ROWS = 100


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "STRATA_RUN", "STRATA_CHECKPOINT_EVERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": np.arange(NUM_ROWS)}), "rows.parquet", row_group_size=16)


@pytest.fixture
def contexts() -> Iterator[Any]:
    made: list[Context] = []

    def make(**arguments: Any) -> Context:
        made.append(strata.init(checkpoints="ckpt", **{"every": 3, "saver": "thread", **arguments}))
        return made[-1]

    yield make
    for context in made:
        context.close()


class Part:
    """Something with a state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def loader_of(context: Context, **arguments: Any) -> Any:
    return context.dataloader("rows.parquet", batch_size=10, shuffle=True, output_format="numpy", **arguments)


def train(context: Context, loader: Any, part: Part, step: int, *, num_steps: int, epochs: int = 2) -> list[int]:
    """The ids of so many steps."""
    seen: list[int] = []
    for _ in context.epochs(epochs):
        for batch in loader:
            seen += batch["id"].tolist()
            step += 1
            part.value = step
            context.report(step=step)
            context.maybe_checkpoint({"part": part})
            num_steps -= 1
            if not num_steps:
                return seen
    return seen


def test_a_fresh_start_changes_nothing(contexts: Any) -> None:
    context = contexts()
    part = Part(7)
    progress = context.restore({"part": part})
    assert (progress.is_fresh, progress.step, progress.epoch, part.value) == (True, 0, 0, 7)
    assert (context.rank, context.world_size, context.attempt) == (0, 1, 0)
    assert context.generation > 0


def test_everything_goes_on_from_the_last_checkpoint(contexts: Any) -> None:
    context = contexts()
    loader, part = loader_of(context), Part()
    seen = train(context, loader, part, 0, num_steps=13)
    context.close()
    random.seed(1)
    np.random.seed(1)

    context = contexts()
    loader, part = loader_of(context), Part()
    progress = context.restore({"part": part})
    assert (progress.step, progress.epoch, part.value) == (12, 1, 12)
    rest = train(context, loader, part, progress.step, num_steps=100)
    assert sorted(seen[:120] + rest) == sorted([*range(NUM_ROWS)] * 2)


def test_random_numbers_go_on_or_do_not_as_asked(contexts: Any) -> None:
    context = contexts()
    context.checkpoint({"part": Part()}, step=1).wait()
    expected = (random.random(), float(np.random.random()))
    context.close()

    for wanted in (True, False):
        random.seed(5)
        np.random.seed(5)
        unlike = (random.Random(5).random(), float(np.random.RandomState(5).random()))
        context = contexts()
        context.restore({"part": Part()}, generators=wanted)
        assert (random.random(), float(np.random.random())) == (expected if wanted else unlike)
        context.close()


def test_a_loader_that_is_made_after_the_restore_finds_its_place(contexts: Any) -> None:
    context = contexts()
    first = train(context, loader_of(context), Part(), 0, num_steps=3)
    context.close()

    context = contexts()
    progress = context.restore({"part": Part()})
    rest = train(context, loader_of(context), Part(), progress.step, num_steps=100, epochs=1)
    assert sorted(first + rest) == list(range(NUM_ROWS))


def test_a_loop_that_nothing_was_taken_from_keeps_the_restored_place(contexts: Any) -> None:
    """As where a framework begins a loop, and begins it again before it trains."""
    context = contexts()
    first = train(context, loader_of(context), Part(), 0, num_steps=3)
    context.close()

    context = contexts()
    loader = loader_of(context)
    progress = context.restore({"part": Part()})
    iter(loader)
    loader.set_epoch(0)
    iter(loader)
    rest = train(context, loader, Part(), progress.step, num_steps=100, epochs=1)
    assert sorted(first + rest) == list(range(NUM_ROWS))


def test_several_loaders_keep_their_places_by_name(contexts: Any) -> None:
    context = contexts(every=1)
    large, small = loader_of(context, name="large"), loader_of(context, name="small")
    one, other = iter(large), iter(small)
    ids = [next(one)["id"].tolist(), next(other)["id"].tolist(), next(other)["id"].tolist()]
    context.maybe_checkpoint({"part": Part()}, step=1).wait()
    expected = [next(one)["id"].tolist(), next(other)["id"].tolist()]
    assert ids
    context.close()

    context = contexts()
    small, large = loader_of(context, name="small"), loader_of(context, name="large")
    context.restore({"part": Part()})
    assert [next(iter(large))["id"].tolist(), next(iter(small))["id"].tolist()] == expected


def test_what_cannot_be_kept_is_refused_with_the_cure(contexts: Any) -> None:
    context = contexts()
    with pytest.raises(InvalidArgument, match=r"list has no state_dict.*StatefulDataLoader"):
        context.attach([1, 2, 3])
    context.attach(Part(), name="mine")
    with pytest.raises(InvalidArgument, match=r"a loader 'mine' already"):
        context.attach(Part(), name="mine")
    with pytest.raises(InvalidArgument, match=r"'strata' is taken"):
        context.restore({"strata": Part()})
    with pytest.raises(InvalidArgument, match=r"'strata' is taken"):
        context.checkpoint({"strata": Part()}, step=1)


def test_a_closed_context_has_left_nothing_behind(contexts: Any) -> None:
    context = contexts()
    context.checkpoint({"part": Part()}, step=1)
    context.close()
    context.close()
    assert context.checkpoints.latest() is not None
