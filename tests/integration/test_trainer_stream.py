"""`fit(stream=True)`: training on files as they arrive, from one process."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from strata import Trainer
from strata.data import stream
from strata.errors import InvalidArgument, NoCheckpoint, NoData
from strata.train import Batch
from strata.trainer.exported import Predictor
from tests.integration.trainer_models import Counts


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stream, "POLL_S", 0.02)
    (tmp_path / "data").mkdir()


def add(number: int, *, rows: int = 10) -> None:
    """Add a file with the ids from `10 * number` on."""
    ids = torch.arange(10 * number, 10 * number + rows)
    pq.write_table(pa.table({"id": ids.numpy()}), f"data/_{number}")
    Path(f"data/_{number}").rename(f"data/{number}.parquet")


class Counting(Trainer):
    """Adds one to the weight of each id that it trains on."""

    arrivals: Iterator[Any] = iter(())

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        next(self.arrivals, None)
        total: torch.Tensor = batch.call(module).sum()
        return total


def trainer(**more: Any) -> Counting:
    return Counting(Counts(100), optimizer=torch.optim.SGD, optimizer_args={"lr": 1.0}, checkpoints="saved", **more)


def fit(of: Counting, **more: Any) -> Any:
    return of.fit("data", batch_size=4, stream=True, **{"idle_timeout_s": 0.3, **more})


def counts(of: Trainer) -> list[int]:
    found: list[int] = of.module.count.weight.detach().reshape(-1).int().tolist()  # type: ignore[union-attr, operator]
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_files_that_arrive_while_training_runs_are_each_trained_on_once() -> None:
    of = trainer()
    add(0)
    of.arrivals = map(add, [3, 1, 2])

    result = fit(of)

    assert result.stop_reason == "no new file for 0.3 s"
    assert counts(of) == [1] * 40 + [0] * 60
    assert len(result.history) >= 2, "a pass over the first file, and others over what came meanwhile"


def test_a_stream_resumes_in_the_middle_of_a_pass_and_does_not_repeat_finished_files() -> None:
    add(0)
    fit(trainer(), every=1)
    add(1)
    assert fit(trainer(), resume=True, max_steps=4).steps == 4
    assert fit(trainer(), resume=True, max_steps=4).steps == 4, "max_steps is reached"
    Path("data/0.parquet").unlink()
    add(2)
    of = trainer()

    fit(of, resume=True)

    assert counts(of) == [1] * 30 + [0] * 70


def test_a_hidden_file_and_one_that_is_still_written_are_not_read() -> None:
    add(0)
    Path("data/_temporary").write_bytes(b"?")
    Path("data/.hidden.parquet").write_bytes(b"?")
    Path("data/other.txt").write_bytes(b"?")
    Path("data/empty.parquet").touch()
    of = trainer()

    fit(of)

    assert counts(of) == [1] * 10 + [0] * 90


def test_ctrl_c_while_a_stream_waits_saves_first() -> None:
    add(0)
    of = trainer()
    timer = threading.Timer(0.0, lambda: None)

    class Interrupt:
        def on_start(self, run: Any) -> None:
            assert run.epochs is None

        def on_step(self, step: Any) -> None: ...

        def on_epoch(self, row: Any) -> None:
            nonlocal timer
            timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()

        def on_end(self, result: Any) -> None: ...

        def close(self) -> None: ...

    of.callbacks = [Interrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt, match="saved step 3"):
        fit(of, idle_timeout_s=None, every="1h")
    timer.join()
    add(1)
    of = trainer()
    fit(of, resume=True)
    assert counts(of) == [1] * 20 + [0] * 80


def test_the_newest_checkpoint_of_a_running_stream_can_be_exported() -> None:
    add(0)
    of, exported = trainer(), list[Any]()

    def export() -> Iterator[None]:
        with pytest.raises(NoCheckpoint, match="has no checkpoint"):
            of.export("none", checkpoints="saved")
        yield None
        wait_for(lambda: any(Path("saved").glob("*/manifest.json")))
        before = counts(of)
        exported.append(Predictor(of.export("model", checkpoints="saved")))
        assert counts(of) == before, "the module that trains is left alone"

    of.arrivals = export()
    fit(of, every=1)

    predicted = exported[0].predict({"id": torch.arange(100)})
    assert predicted.sum() == -4, "the rows of the first step"


def test_a_stream_without_a_file_ends_after_the_idle_timeout() -> None:
    with pytest.raises(NoData, match=r"data has no file after 0\.1 s"):
        fit(trainer(), idle_timeout_s=0.1)


@pytest.mark.parametrize(
    ("data", "arguments", "problem"),
    [
        (["data"], {}, "reads a directory"),
        ("data/0.parquet", {}, "reads a directory"),
        ("data/*.parquet", {}, "reads a directory"),
        ("data", {"epochs": 2}, "leave epochs= out"),
        ("data", {"strings": "codes"}, "vocabularies="),
        ("data", {"idle_timeout_s": -1}, "above 0"),
        ("data", {"stream": False, "idle_timeout_s": 3}, "add stream=True"),
    ],
)
def test_what_does_not_fit_a_stream_is_refused(data: Any, arguments: dict[str, Any], problem: str) -> None:
    add(0)
    with pytest.raises(InvalidArgument, match=problem):
        trainer().fit(data, **{"stream": True, **arguments})


def test_a_pass_whose_rows_do_not_pass_the_filter_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_PASS_FILES", 1)
    add(0)
    add(1)
    of = trainer()

    result = fit(of, filters="id >= 15")

    assert [math.isnan(row["loss"]) for row in result.history] == [True, False]
    assert counts(of) == [0] * 15 + [1] * 5 + [0] * 80
