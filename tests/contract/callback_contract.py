"""What every callback of the Trainer keeps to and may rely on. An implementation supplies `make` and `reported`.

A fit of the contract has two epochs of four steps, and reports every second step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from strata import Trainer
from strata.train import Batch, Callback
from tests.integration.trainer_models import arrays, network

DEADLINE_S = 10.0
Make = Callable[[], Callback]


class Crash(Exception):
    """Ends a fit without a last save, as a kill does."""


class Crashing(Trainer):
    """Raises in the step with this number, counted from the start of the fit."""

    crash_at = 0
    calls = 0

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.crash_at:
            raise Crash(f"in step {self.calls}")
        return super().training_step(module, batch)


class Recorded(Callback):
    """Records the calls of another callback, and the steps of those that have one."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.calls: list[tuple[str, int]] = []

    def on_start(self, run: Any) -> None:
        self.calls.append(("start", run.step))
        self.callback.on_start(run)

    def on_step(self, step: Any) -> None:
        self.calls.append(("step", step.step))
        self.callback.on_step(step)

    def on_epoch(self, row: Mapping[str, float]) -> None:
        self.calls.append(("epoch", int(row["step"])))
        self.callback.on_epoch(row)

    def on_end(self, result: Any) -> None:
        self.calls.append(("end", result.steps))
        self.callback.on_end(result)

    def close(self) -> None:
        self.calls.append(("close", 0))
        self.callback.close()


def fit(*callbacks: Callback | str, crash_at: int = 0, checkpoints: str | None = None, **arguments: Any) -> Any:
    trainer = Crashing(
        network(),
        nn.BCEWithLogitsLoss(),
        torch.optim.SGD,
        callbacks=callbacks,
        log_every=2,
        checkpoints=checkpoints,
        checkpoint_options={"saver": "thread"},  # starting a process would take most of a test
    )
    trainer.crash_at = crash_at
    return trainer.fit(arrays(32), epochs=2, batch_size=8, **arguments)


class CallbackContract:
    keeps_output = True
    """Whether a resumed fit continues the output of the one before."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    def reported(self, printed: str) -> list[int]:
        """Return the numbers of the epochs that a reader of the output sees, given what the last fit printed."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _in_its_own_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_it_is_called_in_order_and_closed_last(self, make: Make) -> None:
        recorded = Recorded(make())

        fit(recorded)

        first = [("start", 0), ("step", 2), ("step", 4), ("epoch", 4)]
        assert recorded.calls == [*first, ("step", 6), ("step", 8), ("epoch", 8), ("end", 8), ("close", 0)]

    def test_every_epoch_is_reported_once(self, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
        fit(make())

        assert self.reported(capsys.readouterr().err) == [0, 1]

    @pytest.mark.parametrize(
        ("every", "crash_at"),
        [
            pytest.param(3, 6, id="from a checkpoint before the end of an epoch"),
            pytest.param(4, 5, id="from a checkpoint at the end of an epoch, without its row"),
            pytest.param(5, 7, id="from a checkpoint after an epoch"),
        ],
    )
    def test_a_resumed_fit_reports_every_epoch_once(
        self, make: Make, every: int, crash_at: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(Crash):
            fit(make(), every=every, crash_at=crash_at)
        assert self.reported(capsys.readouterr().err) == [0]

        fit(make(), every=every, resume=True)

        has_row = every == 5
        assert self.reported(capsys.readouterr().err) == ([1] if has_row and not self.keeps_output else [0, 1])

    def test_a_fit_that_max_steps_ended_is_continued_without_a_trace(
        self, make: Make, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fit(make(), max_steps=6)
        assert self.reported(capsys.readouterr().err) == [0, 1]

        fit(make(), resume=True)

        assert self.reported(capsys.readouterr().err) == ([0, 1] if self.keeps_output else [1])

    def test_a_fit_that_fails_closes_it_and_leaves_no_thread(self, make: Make) -> None:
        recorded, before = Recorded(make()), set(threading.enumerate())

        with pytest.raises(Crash):
            fit(recorded, crash_at=6)

        assert recorded.calls == [("start", 0), ("step", 2), ("step", 4), ("epoch", 4), ("close", 0)]
        left = [each for each in set(threading.enumerate()) - before if not each.name.startswith("strata")]
        for each in left:
            each.join(DEADLINE_S)  # a progress bar tells its thread to end, and does not wait for it
        assert [each.name for each in left if each.is_alive()] == []

    def test_it_serves_a_second_fit(self, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
        callback = make()
        fit(callback)
        capsys.readouterr()

        fit(callback)

        assert self.reported(capsys.readouterr().err) == [0, 1]

    def test_it_can_be_sent_to_workers_before_and_after_a_fit(self, make: Make) -> None:
        callback = make()

        before = cloudpickle.loads(cloudpickle.dumps(callback))
        fit(callback)
        after = cloudpickle.loads(cloudpickle.dumps(callback))

        assert type(before) is type(after) is type(callback)
