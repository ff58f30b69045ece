"""The callbacks of the Trainer, and one as a user writes it, under one contract."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_contract import CallbackContract, Make, Recorded, fit
from tensorboardX.proto import event_pb2
from torch import nn

from strata import Trainer
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.train import Callback, JsonLogger, ProgressBar, TensorBoard
from strata.trainer.callbacks import Callbacks
from tests.integration.trainer_models import arrays, network


def json_rows(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def scalars(directory: Path) -> list[tuple[str, int]]:
    """Return the names and steps of the points that TensorBoard shows."""
    found: list[tuple[str, int]] = []
    for path in sorted(directory.glob("events*")):
        for event in _events(path.read_bytes()):
            if event.session_log.status == event.session_log.START:
                found = [(name, step) for name, step in found if step < event.step]
            found += [(value.tag, event.step) for value in event.summary.value]
    return found


def _events(data: bytes) -> Iterator[Any]:
    """Yield the events of a file: each has its length, a checksum of that, its bytes and a checksum of those."""
    while len(data) >= 12:
        (length,) = struct.unpack("<Q", data[:8])
        if len(data) < length + 16:  # a kill cuts the last one
            return
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


class TestJsonLogger(CallbackContract):
    @pytest.fixture
    def make(self) -> Make:
        return JsonLogger

    def reported(self, printed: str) -> list[int]:
        return [int(row["epoch"]) for row in json_rows(Path("history.jsonl"))]


class TestTensorBoard(CallbackContract):
    @pytest.fixture
    def make(self) -> Make:
        return TensorBoard

    def reported(self, printed: str) -> list[int]:
        return [int(step > 4) for name, step in scalars(Path("tensorboard")) if name == "epoch/loss"]


class TestProgressBar(CallbackContract):
    keeps_output = False

    @pytest.fixture
    def make(self) -> Make:
        return ProgressBar

    def reported(self, printed: str) -> list[int]:
        return [int(found) - 1 for found in re.findall(r"^epoch (\d+): loss", printed, flags=re.MULTILINE)]


class Minimal(Callback):
    """As a user writes it."""

    def on_start(self, run: Any) -> None:
        self.epochs = [int(row["epoch"]) for row in run.history]

    def on_epoch(self, row: Mapping[str, float]) -> None:
        self.epochs.append(int(row["epoch"]))


class TestMinimal(CallbackContract):
    @pytest.fixture
    def make(self) -> Make:
        self.made: list[Minimal] = []

        def make() -> Minimal:
            self.made.append(Minimal())
            return self.made[-1]

        return make

    def reported(self, printed: str) -> list[int]:
        return self.made[-1].epochs


# -- several callbacks -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Failing(Callback):
    """Raises in one method."""

    def __init__(self, method: str) -> None:
        setattr(self, method, self.fail)

    def fail(self, *_: Any) -> None:
        raise KeyError("valid_auc")


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_epoch", "on_end", "close"])
def test_an_exception_of_a_callback_keeps_its_type_and_names_the_callback(method: str) -> None:
    first, last = Recorded(Minimal()), Recorded(Minimal())

    with pytest.raises(KeyError, match="valid_auc") as caught:
        fit(first, Failing(method), last)

    assert caught.value.__notes__ == [f"raised by {method} of the callback Failing"]
    assert first.calls[-1] == last.calls[-1] == ("close", 0), "the others are closed"


def test_callbacks_are_called_in_the_order_of_the_list() -> None:
    order: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_epoch(self, row: Mapping[str, float]) -> None:
            order.append(self.name)

    fit(Named("a"), Named("b"))

    assert order == ["a", "b", "a", "b"]


def test_a_callback_that_changes_its_rows_changes_nothing_else() -> None:
    class Changing(Callback):
        def on_start(self, run: Any) -> None:
            run.history.clear()

        def on_epoch(self, row: Any) -> None:
            row.clear()

    result = fit(Changing(), "json")

    assert [row["step"] for row in result.history] == [4.0, 8.0]
    assert [row["step"] for row in json_rows(Path("history.jsonl"))] == [4.0, 8.0]


def test_a_callback_needs_neither_the_base_class_nor_close() -> None:
    class Plain:
        epochs = 0

        def on_start(self, run: Any) -> None: ...
        def on_step(self, step: Any) -> None: ...
        def on_end(self, result: Any) -> None: ...
        def on_epoch(self, row: Any) -> None:
            self.epochs += 1

    plain: Any = Plain()
    fit(plain)

    assert plain.epochs == 2


def test_a_value_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    logger = JsonLogger(tmp_path / "logs" / "rows.jsonl")
    rows = Callbacks([logger])
    rows.on_epoch({"epoch": 0.0, "valid_auc": math.nan, "loss": math.inf})

    assert json_rows(tmp_path / "logs" / "rows.jsonl") == [{"epoch": 0.0, "valid_auc": None, "loss": None}]


# -- processes ---------------------------------------------------------------------------------------------------------


class Ranks(Callback):
    """Records in which processes it is called."""

    def on_start(self, run: Any) -> None:
        Path(f"rank-{os.environ['RANK']}-of-{run.world_size}").touch()


@pytest.mark.timeout(120)
def test_callbacks_are_called_on_rank_0_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    callbacks = [Ranks(), "json", "tensorboard", "progress"]

    Trainer(network(), nn.BCEWithLogitsLoss(), torch.optim.SGD, callbacks=callbacks, workers=2, logs="none").fit(
        arrays(32), epochs=2, batch_size=4
    )

    assert [each.name for each in tmp_path.glob("rank-*")] == ["rank-0-of-2"]
    assert [row["step"] for row in json_rows(Path("history.jsonl"))] == [4.0, 8.0]
    assert len(list(Path("tensorboard").iterdir())) == 1


KILLED = """
import os, signal, sys, time
from callback_contract import fit
from strata.checkpoint import CheckpointManager
from strata.train import Callback

class Killing(Callback):
    def on_start(self, run):
        self.place = run.checkpoints

    def on_step(self, step):
        if step.step == 6:
            deadline_s = time.monotonic() + 60
            with CheckpointManager(self.place) as manager:
                while manager.latest() is None and time.monotonic() < deadline_s:
                    time.sleep(0.01)  # the save of step 3 is in progress
            os.kill(os.getpid(), signal.SIGKILL)

fit("json", "tensorboard", Killing(), every=3)
"""


@pytest.mark.timeout(120)
def test_the_files_of_a_killed_fit_are_valid_and_continued() -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    Path("killed.py").write_text(KILLED)
    ended = subprocess.run([sys.executable, "killed.py"], env=variables, capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr
    assert [row["step"] for row in json_rows(Path("history.jsonl"))] == [4.0]
    assert ("step/loss", 2) in scalars(Path("tensorboard"))

    (place,) = Path("checkpoints/killed").iterdir()
    place.rename("saved")
    fit("json", "tensorboard", resume=True, checkpoints="saved")

    assert [row["step"] for row in json_rows(Path("history.jsonl"))] == [4.0, 8.0]
    steps = [step for name, step in scalars(Path("tensorboard")) if name == "epoch/loss"]
    assert steps == [4, 8]
