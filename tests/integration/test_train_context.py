"""A script's context without an agent: a single process with its own coordinator."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strata
from strata.checkpoint import Manual
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
    """An object with a state."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def loader_of(context: Context, **arguments: Any) -> Any:
    return context.dataloader("rows.parquet", batch_size=10, shuffle=True, output_format="numpy", **arguments)


def train(context: Context, loader: Any, part: Part, step: int, *, num_steps: int, epochs: int = 2) -> list[int]:
    """Return the ids of this many steps."""
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


def test_everything_resumes_from_the_last_checkpoint(contexts: Any) -> None:
    context = contexts()
    loader, part = loader_of(context), Part()
    seen = train(context, loader, part, 0, num_steps=13)
    context.close(is_failing=True)
    random.seed(1)
    np.random.seed(1)

    context = contexts()
    loader, part = loader_of(context), Part()
    progress = context.restore({"part": part})
    assert (progress.step, progress.epoch, part.value) == (12, 1, 12)
    rest = train(context, loader, part, progress.step, num_steps=100)
    assert sorted(seen[:120] + rest) == sorted([*range(NUM_ROWS)] * 2)


# -- the last step -------------------------------------------------------------------------------------------------


def steps_saved() -> list[int]:
    with strata.CheckpointManager("ckpt", saver="thread") as manager:
        return [one.step for one in manager.list()]


def test_the_last_step_is_saved_as_it_is_when_the_epochs_end(contexts: Any) -> None:
    context = contexts()
    loader, part = loader_of(context), Part()
    seen = train(context, loader, part, 0, num_steps=100, epochs=1)
    part.value = -1  # changes that a script makes to its model afterwards are not training
    context.close()
    assert steps_saved() == [6, 9, 10]

    context = contexts()
    loader, part = loader_of(context), Part()
    progress = context.restore({"part": part})
    assert (progress.step, progress.epoch, part.value) == (10, 1, 10)
    assert train(context, loader, part, progress.step, num_steps=100, epochs=1) == []
    rest = train(context, loader, part, progress.step, num_steps=100, epochs=2)
    assert sorted(seen) == sorted(rest) == [*range(NUM_ROWS)]


def test_the_last_step_is_saved_when_the_context_is_closed(contexts: Any) -> None:
    with contexts() as context:
        train(context, loader_of(context), Part(), 0, num_steps=5)
    assert steps_saved() == [3, 5]


def test_a_loop_that_has_taken_one_more_batch_does_not_save_its_last_step(
    contexts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint would contain the batch as trained, and a resume would skip it."""
    seen: list[int] = []
    for saved in ([3], [3, 6, 9, 10]):
        context = contexts(keep_count=9)
        loader, part = loader_of(context), Part()
        step = context.restore({"part": part}).step
        del seen[step * 10 :]
        for batch in loader:
            if step == 5 and saved == [3]:
                break
            seen += batch["id"].tolist()
            step += 1
            context.maybe_checkpoint({"part": part}, step=step)
        context.close()
        assert steps_saved() == saved
    assert sorted(seen) == [*range(NUM_ROWS)]
    assert "the last step, 5, is not saved: a batch was taken from a loader after it" in caplog.text


def test_a_last_step_that_is_saved_already_is_not_saved_again(contexts: Any) -> None:
    context = contexts()
    train(context, loader_of(context), Part(), 0, num_steps=6)
    context.close()
    assert steps_saved() == [3, 6]


def test_a_failing_script_saves_nothing_more(contexts: Any) -> None:
    def script() -> None:
        with contexts() as context:
            train(context, loader_of(context), Part(), 0, num_steps=5)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        script()
    assert steps_saved() == [3]


def test_a_step_that_is_left_in_its_middle_is_not_saved_as_the_last(contexts: Any) -> None:
    context = contexts(every=2)
    for step in (1, 2, 3):
        context.report(step=step)
        context.maybe_checkpoint({"part": Part()})
    context.report(step=4)
    context.close()
    assert [each.step for each in context.checkpoints.list()] == [2]


def test_the_last_step_of_a_frameworks_loop_is_saved_only_where_its_training_ends(contexts: Any) -> None:
    for ends, saved in ((False, [2]), (True, [2, 3])):
        context = contexts(every=2)
        context.restore({"part": Part()})
        for step in range(context.step + 1, 4):
            context.maybe_checkpoint({"part": Part()}, step=step, is_passing=True)
        if ends:
            context.save_last({"part": Part()})
            context.save_last({"part": Part()})
        context.close()
        assert [each.step for each in context.checkpoints.list()] == saved


def test_a_script_that_decides_by_itself_when_to_save_is_left_alone(contexts: Any) -> None:
    with contexts(every=Manual()) as context:
        train(context, loader_of(context), Part(), 0, num_steps=100, epochs=1)
    assert steps_saved() == []


@pytest.mark.parametrize(("ending", "code", "saved"), [("", 0, [5]), ("sys.exit(3)", 3, [5]), ("1 / 0", 1, [])])
def test_a_script_without_epochs_and_close_saves_its_last_step_at_exit(
    tmp_path: Path, ending: str, code: int, saved: list[int]
) -> None:
    script = f"""
import sys
import numpy as np
import strata

ctx = strata.init(checkpoints="ckpt", every=100)
for step in range(1, 6):
    ctx.report(step=step)
    ctx.maybe_checkpoint({{"state": {{"step": np.array(step)}}}})
{ending}
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert steps_saved() == saved
    assert f"strata: checkpoints in {tmp_path}/ckpt, every 100 steps; the last 3 are kept" in ended.stderr


def test_random_generators_resume_unless_disabled(contexts: Any) -> None:
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


def test_a_loader_created_after_the_restore_finds_its_position(contexts: Any) -> None:
    context = contexts()
    first = train(context, loader_of(context), Part(), 0, num_steps=3)
    context.close()

    context = contexts()
    progress = context.restore({"part": Part()})
    rest = train(context, loader_of(context), Part(), progress.step, num_steps=100, epochs=1)
    assert sorted(first + rest) == list(range(NUM_ROWS))


def test_a_loop_without_a_delivered_batch_keeps_the_restored_position(contexts: Any) -> None:
    """A framework may start a loop twice before it trains."""
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


def test_several_loaders_keep_their_positions_by_name(contexts: Any) -> None:
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


def test_what_cannot_be_saved_is_refused_with_the_cure(contexts: Any) -> None:
    context = contexts()
    with pytest.raises(InvalidArgument, match=r"list has no state_dict.*StatefulDataLoader"):
        context.attach([1, 2, 3])
    context.attach(Part(), name="mine")
    with pytest.raises(InvalidArgument, match=r"a loader 'mine' is already attached"):
        context.attach(Part(), name="mine")
    with pytest.raises(InvalidArgument, match=r"'strata' is reserved"):
        context.restore({"strata": Part()})
    with pytest.raises(InvalidArgument, match=r"'strata' is reserved"):
        context.checkpoint({"strata": Part()}, step=1)


def test_a_closed_context_leaves_nothing_behind(contexts: Any) -> None:
    context = contexts()
    context.checkpoint({"part": Part()}, step=1)
    context.close()
    context.close()
    assert context.checkpoints.latest() is not None


def steps_saved_by(context: Context) -> list[int]:
    context.checkpoints.wait()
    return [each.step for each in context.checkpoints.list()]


def test_steps_are_counted_by_a_script_that_reports_none(contexts: Any) -> None:
    context = contexts(every=2, keep_count=9)
    for _ in range(5):
        context.report(loss=0.5)  # this is not a step
        context.maybe_checkpoint({"part": Part()})
    assert (context.step, steps_saved_by(context)) == (5, [2, 4])
    context.close()

    context = contexts(every=2, keep_count=9)
    assert context.restore({"part": Part()}).step == 5
    context.maybe_checkpoint({"part": Part()})
    context.maybe_checkpoint({"part": Part()})
    assert (context.step, steps_saved_by(context)) == (7, [2, 4, 5, 6])


def test_steps_between_two_reports_are_counted_and_a_reported_one_is_believed(contexts: Any) -> None:
    context = contexts(every=10, keep_count=9)
    seen = []
    for step in range(1, 8):
        if step % 3 == 0:
            context.report(step=10 * step)
        context.maybe_checkpoint({"part": Part()})
        seen.append(context.step)
    context.maybe_checkpoint({"part": Part()}, step=100)
    assert seen == [1, 2, 30, 31, 32, 60, 61]
    assert steps_saved_by(context) == [30, 60, 100]


def test_counted_steps_reach_the_coordinator(contexts: Any) -> None:
    context = contexts(every=100)
    for _ in range(3):
        context.maybe_checkpoint({"part": Part()})
    membership = context._membership
    membership.worker.heartbeat()
    (worker,) = membership._client.list_workers(job_id=context.identity.run).workers
    assert (worker.step, worker.state) == (3, "TRAINING")


def test_a_process_group_of_one_needs_no_place_to_meet(contexts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    context = contexts(every=1)
    context.init_process_group()
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert (torch.distributed.get_world_size(), total.item()) == (1, 1.0)
        context.maybe_checkpoint({"model": model})
        assert steps_saved_by(context) == [1]
    finally:
        torch.distributed.destroy_process_group()
