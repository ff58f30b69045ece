"""Loggers of a script: what TensorBoard, MLflow and W&B show after a kill, and loggers that fail."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from servers import DEADLINE_S, STRATA
from tensorboardX.proto import event_pb2

import strata
from strata.errors import ConfigError
from strata.train.loggers import create

LONG_S = 20 * DEADLINE_S

SCRIPT = """
import os, signal
import strata

class State:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

with strata.init(every=4, loggers=["NAME"]) as ctx:
    step = ctx.restore({"state": State()}).step
    while step < 10:
        step += 1
        ctx.report(step=step, loss=1.0 / step, attempt=ctx.attempt)
        ctx.maybe_checkpoint({"state": State()})
        ctx.checkpoints.wait()
        if step == 7 and ctx.attempt == ctx.rank == 0:
            logger = ctx._loggers_of_script._members[0]
            logger.flush(100) if hasattr(logger, "flush") else logger._writer.flush()  # the newest could be lost
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


def tensorboard_points(directory: Path) -> list[tuple[str, int, float]]:
    assert [each.name for each in (directory / "tensorboard").iterdir()] == ["logged"]
    return scalars(directory / "tensorboard" / "logged")


def wandb_points(directory: Path) -> list[tuple[str, int, float]]:
    """Return what is in the offline files of W&B: blocks of 32 KiB with records of protobuf."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    data, at, message = path.read_bytes(), 7, b""
    found = []
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, message = wandb_internal_pb2.Record.FromString(message), b""
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found += [(name, record.history.step.num, values[name]) for name in values if not name.startswith("_")]
    return found


def mlflow_points(directory: Path) -> list[tuple[str, int, float]]:
    """Return the points of the fake in `fake_mlflow.py`."""
    (run,) = json.loads((directory / "mlflow.json").read_text())["runs"]
    assert (run["name"], run["status"], run["experiment"]) == ("logged", "FINISHED", "1")
    return [(name, step, value) for name, value, _, step in run["points"]]


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


@pytest.mark.timeout(180)  # W&B starts a program of its own, twice
@pytest.mark.parametrize(
    ("name", "points", "first_of_attempt_1"),
    [("tensorboard", tensorboard_points, 5), ("mlflow", mlflow_points, 8), ("wandb", wandb_points, 8)],
)
def test_a_killed_run_shows_every_step_once_from_rank_0_only(
    run_directory: Path, name: str, points: Callable[[Path], list[tuple[str, int, float]]], first_of_attempt_1: int
) -> None:
    if name == "wandb":
        pytest.importorskip("wandb")
    (run_directory / "train.py").write_text(SCRIPT.replace("NAME", name))
    shutil.copy(Path(__file__).parent / "fake_mlflow.py", run_directory / "mlflow.py")
    done = subprocess.run(
        [STRATA, "run", "--workers", "2", "--no-warm", "--name", "logged", "--dashboard", "off", "train.py"],
        cwd=run_directory,
        env={**os.environ, "MLFLOW_EXPERIMENT_NAME": "of-a-test"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "logs nothing more" not in done.stdout + done.stderr
    found = points(run_directory)
    assert [(step, round(1 / value)) for name, step, value in found if name == "loss"] == [(n, n) for n in range(1, 11)]
    assert [(step, value) for name, step, value in found if name == "attempt"] == [
        (step, float(step >= first_of_attempt_1)) for step in range(1, 11)
    ]


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
    for wrong in (["comet"], [Recorder], ["tensorboard", 3], 3):
        with pytest.raises(ConfigError, match="use 'tensorboard', 'mlflow' or 'wandb', or an object with start"):
            strata.init(checkpoints="c", loggers=wrong)  # type: ignore[arg-type]
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        strata.init(checkpoints="c", loggers=["tensorboard"])
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=rf"pip install 'strata-runtime\[{package}\]'"):
            strata.init(checkpoints="c", loggers=package)
    strata.init(checkpoints="c", saver="thread").close()


def test_a_real_store_of_mlflow_has_every_step_once(monkeypatch: pytest.MonkeyPatch, run_directory: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow requires older packages than the tests; see pyproject.toml")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run_directory}/runs.db")
    for attempt, steps in ((0, range(1, 8)), (1, range(5, 11))):
        loggers = create(["mlflow"], run="real", checkpoints="c", attempt=attempt)
        for step in steps:
            loggers.log(step, {"loss": 1.0 / step})
        loggers.close(is_failing=not attempt)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("real", "FINISHED")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == list(range(1, 11))
