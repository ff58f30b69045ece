"""Loggers of a script: what TensorBoard shows after a kill, and loggers that fail."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from servers import DEADLINE_S, STRATA
from tensorboardX.proto import event_pb2

import strata
from strata.errors import ConfigError

LONG_S = 20 * DEADLINE_S

SCRIPT = """
import os, signal
import strata

class State:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

with strata.init(every=4, loggers=["tensorboard"]) as ctx:
    step = ctx.restore({"state": State()}).step
    while step < 10:
        step += 1
        ctx.report(step=step, loss=1.0 / step, attempt=ctx.attempt)
        ctx.maybe_checkpoint({"state": State()})
        ctx.checkpoints.wait()
        if step == 7 and ctx.attempt == ctx.rank == 0:
            ctx._loggers_of_script._members[0]._writer.flush()  # what is younger than 5 s could be lost
            os.kill(os.getpid(), signal.SIGKILL)
"""


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Return the points that TensorBoard shows: names, steps and values."""
    found: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events*")):
        for event in _events(path.read_bytes()):
            if event.session_log.status == event.session_log.START:
                found = [point for point in found if point[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def _events(data: bytes) -> Iterator[event_pb2.Event]:
    while len(data) >= 12:
        (length,) = struct.unpack("<Q", data[:8])
        if len(data) < 16 + length:  # cut off by the kill
            return
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


class Recorder:
    def __init__(self, *, failing: str = "") -> None:
        self.calls: list[object] = []
        self._failing = failing

    def start(self, step: int) -> None:
        self._called("start", step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._called("log", step, dict(metrics))

    def close(self) -> None:
        self._called("close")

    def _called(self, *call: object) -> None:
        self.calls.append(call)
        if call[0] == self._failing:
            raise OSError("the disk is full")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, run_directory: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "STRATA_RUN", "STRATA_CHECKPOINT_EVERY"):
        monkeypatch.delenv(name, raising=False)


def test_a_killed_run_shows_every_step_once_from_rank_0_only(run_directory: Path) -> None:
    (run_directory / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [STRATA, "run", "--workers", "2", "--no-warm", "--name", "logged", "--dashboard", "off", "train.py"],
        cwd=run_directory,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert [each.name for each in (run_directory / "tensorboard").iterdir()] == ["logged"]
    found = scalars(run_directory / "tensorboard" / "logged")
    assert [(step, round(1 / value)) for name, step, value in found if name == "loss"] == [(n, n) for n in range(1, 11)]
    assert {(step, value) for name, step, value in found if name == "attempt"} == {
        (step, float(step > 4)) for step in range(1, 11)
    }


def test_a_logger_gets_every_report_and_the_step_that_a_restored_script_repeats() -> None:
    logger = Recorder()
    with strata.init(checkpoints="c", every="1h", saver="thread", loggers=[logger]) as ctx:
        ctx.report(step=1, loss=1.0)
        ctx.report(step=2)
        ctx.report(step=2, loss=0.5)
        ctx.report(step=1, loss=1.0)

    assert logger.calls == [
        ("start", 1),
        ("log", 1, {"loss": 1.0}),
        ("log", 2, {"loss": 0.5}),
        ("start", 1),
        ("log", 1, {"loss": 1.0}),
        ("close",),
    ]


@pytest.mark.parametrize("failing", ["start", "log", "close"])
def test_a_logger_that_fails_is_dropped_with_one_warning_and_the_others_go_on(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = Recorder(failing=failing), Recorder()
    with strata.init(checkpoints="c", every="1h", saver="thread", loggers=[broken, healthy]) as ctx:
        for step in range(1, 4):
            ctx.report(step=step, loss=1.0)

    assert [each.getMessage() for each in caplog.records if "logs nothing more" in each.getMessage()] == [
        "Recorder failed and logs nothing more; training continues: OSError: the disk is full"
    ]
    assert len(healthy.calls) == 5


def test_what_is_no_logger_and_a_missing_package_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (["mlflow"], [Recorder], ["tensorboard", 3], 3):
        with pytest.raises(ConfigError, match="use 'tensorboard', or an object with start"):
            strata.init(checkpoints="c", loggers=wrong)  # type: ignore[arg-type]
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        strata.init(checkpoints="c", loggers=["tensorboard"])
    strata.init(checkpoints="c", saver="thread").close()
