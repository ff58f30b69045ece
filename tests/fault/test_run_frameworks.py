"""The scripts of the pages on Lightning, transformers and Accelerate under `strata run`, killed, stopped and scaled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import ROOT, blocks
from leftovers import nothing_is_left
from runs import Run
from servers import until

from strata.launch.control import Scale, Stop

EPOCHS = 2
NUM_ROWS = 450
pytestmark = pytest.mark.timeout(300)  # each run starts processes that import a framework, and is started again

BEFORE = """
import hashlib, json, os, time
from pathlib import Path

import strata.train.context
from strata.data.torch import Loader

print("pid", os.getpid(), flush=True)
gate, seen = Path("gate"), Path(f"seen-{os.environ['RANK']}").open("a")
save, restore, begin = (
    strata.train.context.Context.maybe_checkpoint, strata.train.context.Context.restore, Loader.__iter__
)

def slow_save(self, *arguments, **options):
    saved = save(self, *arguments, **options)
    print("step", self.step, flush=True)
    agreement = self._agreement
    while self.step >= int(gate.read_text()) and agreement._limit is None and not agreement._due:
        time.sleep(0.01)
    return saved

def loud_restore(self, *arguments, **options):
    progress = restore(self, *arguments, **options)
    print("restored", progress.step, flush=True)
    return progress

def noting_begin(self):
    for batch in begin(self):
        print(json.dumps(batch["id"].tolist()), file=seen, flush=True)
        yield batch

strata.train.context.Context.maybe_checkpoint = slow_save
strata.train.context.Context.restore = loud_restore
Loader.__iter__ = noting_begin
"""
"""Makes the script report its progress, wait after a step that the test sets unless a stop was requested, and record
the rows that it gets.
"""

AFTER = """
digest = hashlib.sha256()
for tensor in model.parameters():
    digest.update(tensor.detach().numpy().tobytes())
Path(f"digest-{ctx.rank}").write_text(digest.hexdigest())
"""


class Job:
    """The script of a page, and a directory to run it in."""

    def __init__(self, page: str, place: Path, *options: str) -> None:
        place.mkdir()
        rng = np.random.default_rng(1)
        columns = {name: rng.random(NUM_ROWS) for name in "abcy"}
        (place / "rows").mkdir()
        pq.write_table(
            pa.table({"id": np.arange(NUM_ROWS), **columns}), place / "rows" / "0.parquet", row_group_size=64
        )
        block = next(each for each in blocks(ROOT / "docs" / f"{page}.md") if each.info == "python no-run")
        script = place / "train.py"
        script.write_text(BEFORE + block.text + AFTER)
        self.place = place
        self.run = Run(place, place / "rows", *options, script=script, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

    def open(self, step: int) -> None:
        """Let workers continue up to this step."""
        draft = self.place / "gate.new"
        draft.write_text(str(step))
        draft.replace(self.place / "gate")

    def ended(self) -> None:
        code, output = self.run.wait()
        assert code == 0, output

    @property
    def digest(self) -> str:
        found = {path.read_text() for path in self.place.glob("digest-*")}
        assert len(found) == 1
        return found.pop()

    @property
    def counts(self) -> set[int]:
        """Return how often each row was delivered, by all workers of all attempts."""
        lines = [line for path in self.place.glob("seen-*") for line in path.read_text().splitlines()]
        rows = Counter(number for line in lines for number in json.loads(line))
        assert len(rows) == NUM_ROWS
        return set(rows.values())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(page: str, name: str, *options: str) -> Job:
        pytest.importorskip(page)
        made.append(Job(page, tmp_path / name, *options))
        return made[-1]

    with nothing_is_left(tmp_path):
        yield make
        for each in made:
            each.run.bury()


PAGES = ("lightning", "transformers", "accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_killed_and_stopped_run_has_the_weights_of_an_undisturbed_one(job: Any, page: str) -> None:
    calm = job(page, "calm", "--workers", "2")
    calm.open(1_000)
    calm.run.start_plain()
    calm.ended()
    assert calm.counts == {EPOCHS}

    disturbed = job(page, "disturbed", "--workers", "2", "--grace-s", "60")
    disturbed.open(9)
    disturbed.run.start_plain()
    disturbed.run.wait_for_step(0, 7)
    until(lambda: list(disturbed.run.directory.glob("checkpoints/*/manifest.json")), "step 5 is committed")
    disturbed.run.kill(0, 1)
    assert disturbed.run.wait_for(1, 0, r"restored ([1-9]\d*)")[1] == "5"  # in the first epoch
    disturbed.open(20)
    disturbed.run.wait_for_step(1, 18)
    disturbed.run.ask(Stop())
    disturbed.ended()
    stopped_at = disturbed.run.found(1, 0, r"saved step (\d+) and stopping: .*")[1]
    disturbed.open(1_000)
    disturbed.run.resume()
    assert disturbed.run.wait_for(2, 0, r"restored ([1-9]\d*)")[1] == stopped_at  # in the second
    disturbed.ended()
    assert disturbed.digest == calm.digest


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_with_fewer_and_more_workers_every_row_still_counts_once_per_epoch(job: Any, page: str) -> None:
    scaled = job(page, "scaled", "--workers", "1:2")
    scaled.open(6)
    scaled.run.start_plain()
    scaled.run.wait_for_step(0, 4)
    for attempt, num_workers in enumerate((1, 2), start=1):
        scaled.run.ask(Scale(num_workers))
        start = int(scaled.run.wait_for(attempt, 0, r"restored ([1-9]\d*)")[1])
        scaled.open(start + 6)
        scaled.run.wait_for_step(attempt, start + 2)
    scaled.open(1_000)
    scaled.ended()
    assert scaled.counts == {EPOCHS}
    assert [event["what"] for event in scaled.run.events()].count("failed") == 0
