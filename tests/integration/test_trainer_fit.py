"""A Trainer with one worker, in this process: data of all kinds, the options of a step, exact resume, bad input."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from strata import Trainer
from strata.checkpoint import CheckpointManager
from strata.errors import InvalidArgument, StrataError
from strata.train import Batch, Callback, EarlyStopping
from strata.trainer.loop import NotFinite
from tests.integration.trainer_models import Regression, arrays, network, weights, without_timings, write_parquet

LOSS = nn.BCEWithLogitsLoss()


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(module: nn.Module | None = None, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {"loss": LOSS, "optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.1}}
    defaults["checkpoint_options"] = {"saver": "thread"}  # starting a process would take most of a test
    return Trainer(module or network(), **{**defaults, **arguments})


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_training_equals_a_hand_written_loop_bit_for_bit() -> None:
    x, y = arrays(100)
    ours, plain = network(), network()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, fused=True)
    for _ in range(3):
        for start in range(0, 100, 16):
            optimizer.zero_grad()
            LOSS(plain(x[start : start + 16]).squeeze(-1), y[start : start + 16]).backward()
            optimizer.step()

    result = trainer(ours, optimizer=torch.optim.Adam, optimizer_args={"lr": 0.01}).fit(
        (x, y), epochs=3, batch_size=16, shuffle=False
    )

    assert weights(ours) == weights(plain)
    assert (result.steps, len(result.history)) == (21, 3)


def test_the_reported_loss_is_the_mean_over_all_rows() -> None:
    x, y = arrays(50)
    module = network()
    expected = LOSS(module(x).squeeze(-1), y).item()

    result = trainer(module, optimizer_args={"lr": 0.0}).fit((x, y), batch_size=16)

    assert result.history[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_accumulated_batches_make_the_step_of_one_large_batch() -> None:
    data = arrays(110)  # 27 batches of 4 and one of 2: the last step has fewer batches and rows
    large, small = network(), network()

    trainer(large).fit(data, batch_size=16, epochs=2)
    result = trainer(small, accumulate=4).fit(data, batch_size=4, epochs=2)

    assert result.steps == 14
    assert weights(small) == pytest.approx(weights(large), abs=1e-6)


def test_a_loss_that_sums_makes_the_steps_of_the_sum() -> None:
    x, y = arrays(32)
    module, plain = network(), network()
    loss = nn.BCEWithLogitsLoss(reduction="sum")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    loss(plain(x).squeeze(-1), y).backward()
    optimizer.step()

    trainer(module, loss=loss, optimizer_args={"lr": 0.01}, accumulate=2).fit((x, y), batch_size=16, shuffle=False)

    assert weights(module) == pytest.approx(weights(plain), abs=1e-6)


def test_gradients_are_clipped_and_the_scheduler_advances() -> None:
    data = arrays(64)
    module = network()
    before = torch.tensor(weights(module))

    result = trainer(
        module,
        clip_norm=0.01,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        scheduler_every="step",
    ).fit(data, batch_size=16)

    moved = (torch.tensor(weights(module)) - before).norm().item()
    assert moved <= 0.01 * 0.1 * (1 + 0.5 + 0.25 + 0.125) + 1e-6
    assert result.history[0]["learning_rate"] == pytest.approx(0.1 * 0.5**4)


def test_a_plateau_scheduler_follows_the_monitored_value() -> None:
    data = arrays(32)

    result = trainer(
        optimizer_args={"lr": 0.0},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0),
    ).fit(data, valid=data, epochs=3, batch_size=32)

    assert "valid_loss" in result.history[0]


def test_bf16_trains_close_to_fp32() -> None:
    data = arrays(256)
    exact, rounded = network(), network()

    trainer(exact).fit(data, batch_size=32, epochs=2)
    trainer(rounded, precision="bf16").fit(data, batch_size=32, epochs=2)

    assert weights(rounded) != weights(exact)
    assert weights(rounded) == pytest.approx(weights(exact), abs=0.05)


def test_the_average_of_the_weights_is_what_remains() -> None:
    data = arrays(64)
    plain, averaged = network(), network()
    start = torch.tensor(weights(plain))

    trainer(plain).fit(data, batch_size=16)
    result = trainer(averaged, ema=0.9).fit(data, batch_size=16, valid=data)

    assert (torch.tensor(weights(averaged)) - start).norm() < (torch.tensor(weights(plain)) - start).norm()
    found = trainer(averaged).evaluate(data)
    assert found["loss"] == pytest.approx(result.history[-1]["valid_loss"], rel=1e-6)


class Overwriting(nn.Module):
    """Uses an operation that torch has no deterministic implementation of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return self.layer(x)


def test_deterministic_training_uses_deterministic_algorithms_only() -> None:
    data = arrays(32)
    exact, usual = network(dropout=0.2), network(dropout=0.2)
    flags: list[bool] = []

    class Recorder(Trainer):
        def prediction_step(self, module: nn.Module, batch: Batch) -> Any:
            flags.append(torch.are_deterministic_algorithms_enabled())
            return super().prediction_step(module, batch)

    options: dict[str, Any] = {"optimizer_args": {"lr": 0.1}, "checkpoint_options": {"saver": "thread"}}
    recorder = Recorder(exact, LOSS, torch.optim.SGD, deterministic=True, **options)
    recorder.fit(data, valid=data, batch_size=16)
    recorder.evaluate(data)
    recorder.predict(data)
    trainer(usual).fit(data, valid=data, batch_size=16)

    assert flags == [True] * 6, "in two batches each of the validation, the evaluation and the prediction"
    assert not torch.are_deterministic_algorithms_enabled()
    assert weights(exact) == weights(usual)


def test_an_operation_that_cannot_be_deterministic_is_named() -> None:
    trainer(Overwriting()).fit(arrays(8))

    message = refusal(InvalidArgument, lambda: trainer(Overwriting(), deterministic=True).fit(arrays(8)))

    assert message == (
        "deterministic=True forbids an operation of the module: put_ does not have a deterministic implementation; use "
        "another operation, or leave deterministic=True out"
    )


def test_class_weights_and_row_weights_multiply_the_loss_of_a_row() -> None:
    x, y = arrays(40)
    by_class, by_row = network(), network()
    weight = torch.where(y > 0, 3.0, 1.0)

    trainer(by_class, class_weights={0: 1.0, 1: 3.0}).fit((x, y), batch_size=8)
    trainer(by_row).fit({"x": x, "y": y, "w": weight}, inputs=["x"], label="y", weight="w", batch_size=8)

    assert weights(by_class) == pytest.approx(weights(by_row), abs=1e-6)
    assert weights(by_class) != pytest.approx(weights(network()), abs=1e-3)


def test_a_module_may_return_its_own_loss_and_a_subclass_may_override_the_step() -> None:
    x, y = arrays(32)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": LOSS(self.net(x).squeeze(-1), y)}

    class Doubled(Trainer):
        def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
            return 2 * super().training_step(module, batch)

    own, plain, doubled, faster = WithLoss(), network(), network(), network()
    trainer(own, loss=None).fit({"x": x, "y": y}, batch_size=8)
    trainer(plain).fit((x, y), batch_size=8)
    Doubled(doubled, LOSS, torch.optim.SGD, optimizer_args={"lr": 0.1}).fit((x, y), batch_size=8)
    trainer(faster, optimizer_args={"lr": 0.2}).fit((x, y), batch_size=8)

    assert weights(own.net) == pytest.approx(weights(plain), abs=1e-6)
    assert weights(doubled) == pytest.approx(weights(faster), abs=1e-6)


# -- data --------------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, rows: int) -> None:
        self.x, self.y = arrays(rows)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[row], self.y[row]


def test_tensors_datasets_and_loaders_give_the_same_weights() -> None:
    x, y = arrays(60)
    found = []
    for data in (
        (x, y),
        (x.numpy(), y.numpy()),
        TensorDataset(x, y),
        Rows(60),
        DataLoader(Rows(60), batch_size=16, shuffle=True),
    ):
        module = network()
        trainer(module).fit(data, batch_size=16, epochs=2)
        found.append(weights(module))

    assert found[1:] == found[:1] * 4


def test_files_tables_and_frames_give_the_same_weights(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data", files=1)
    table = ds.dataset(path).to_table()
    found = []
    for data in (path, str(path / "*.parquet"), [str(path)], table, table.to_pandas(), table.to_pydict()):
        module = Regression()
        columns = ["a", "b", "y"]
        chosen = (
            data.select(columns)
            if isinstance(data, pa.Table)
            else data[columns]
            if isinstance(data, pd.DataFrame)
            else data
        )
        if isinstance(data, dict):
            chosen = {name: torch.tensor(data[name]) for name in columns}
        trainer(module, loss=nn.MSELoss()).fit(chosen, label="y", batch_size=100, shuffle=False)
        found.append(weights(module))

    assert found[1:] == found[:1] * 5


def test_only_the_columns_that_forward_names_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")
    seen: list[Any] = []

    class Watching(Trainer):
        def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
            seen.append(sorted(batch.raw))
            return super().training_step(module, batch)

    module = Regression()
    result = Watching(module, nn.MSELoss(), torch.optim.SGD, optimizer_args={"lr": 0.3}).fit(
        path, label="y", epochs=3, batch_size=50
    )

    assert seen[0] == ["a", "b", "y"]
    assert module.weight.tolist() == pytest.approx([1.0, -2.0], abs=1e-3)
    assert result.history[-1]["loss"] < 1e-5


def test_named_columns_become_the_matrix_of_a_plain_network(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")

    result = trainer(network(inputs=3), metrics=["auc"], optimizer="adam", optimizer_args={"lr": 0.02}).fit(
        path, label="late", inputs=["a", "b", "c"], valid=path, epochs=5, batch_size=64
    )

    assert result.history[-1]["valid_auc"] > 0.99


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_metrics_are_computed_over_all_rows_not_averaged_over_batches() -> None:
    x, y = arrays(203)
    module = network()
    with torch.no_grad():
        scores = module(x).squeeze(-1)
    positive, negative = scores[y > 0], scores[y == 0]
    pairs = (positive[:, None] > negative[None, :]).double().mean().item()

    found = trainer(module, metrics=["auc", "logloss"]).evaluate((x, y), batch_size=10)

    assert found["auc"] == pytest.approx(pairs, abs=1e-12)
    assert found["logloss"] == pytest.approx(LOSS(scores, y).item(), rel=1e-6)
    assert found["loss"] == pytest.approx(found["logloss"], rel=1e-6)


def test_predictions_come_in_the_order_of_the_rows() -> None:
    x, y = arrays(37)
    module = network(dropout=0.5)
    module.eval()

    expected = module(x).detach()

    for data in (x, (x, y), TensorDataset(x, y)):
        torch.testing.assert_close(trainer(module).predict(data, batch_size=8), expected)


def test_training_stops_early_and_keeps_the_best_weights() -> None:
    data = arrays(64)
    module = network()
    stopping = EarlyStopping(monitor="valid_loss", patience=2)

    result = trainer(module, optimizer_args={"lr": 3.0}, seed=1).fit(
        data, valid=arrays(64, seed=5), epochs=50, batch_size=8, early_stopping=stopping
    )

    assert len(result.history) == result.best_epoch + 3 < 50
    assert "has not improved for 2 epochs" in result.stop_reason
    assert result.best is not None
    assert result.best.metadata["valid_loss"] == result.history[result.best_epoch]["valid_loss"]
    found = trainer(module).evaluate(arrays(64, seed=5))
    assert found["loss"] == pytest.approx(result.metrics["valid_loss"], rel=1e-6)


def test_early_stopping_may_be_a_number_of_epochs_and_evaluation_follows() -> None:
    data, unlike = arrays(64), arrays(64, seed=5)
    stopped = trainer(optimizer_args={"lr": 0.0})

    result = stopped.fit(data, valid=unlike, epochs=50, batch_size=16, early_stopping=2)

    assert len(result.history) == 3
    assert stopped.evaluate(unlike)["loss"] == pytest.approx(result.history[0]["valid_loss"])


def test_callbacks_see_every_epoch_and_the_json_file_has_one_line_each() -> None:
    calls: list[str] = []

    class Recorder(Callback):
        def on_start(self, run: Any) -> None:
            calls.append(f"start {run.epochs} {run.steps_per_epoch}")

        def on_step(self, step: Any) -> None:
            calls.append(f"step {step.step}")

        def on_epoch(self, row: Any) -> None:
            calls.append(f"epoch {row['epoch']:.0f}")

        def on_end(self, result: Any) -> None:
            calls.append(f"end {result.steps}")

    trainer(callbacks=[Recorder(), "json", "tensorboard"], log_every=3).fit(arrays(32), epochs=2, batch_size=8)

    assert calls == ["start 2 4", "step 3", "epoch 0", "step 6", "epoch 1", "end 8"]
    rows = [json.loads(line) for line in Path("history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4.0, 8.0]
    assert list(Path("tensorboard").glob("events*"))


# -- resume ------------------------------------------------------------------------------------------------------------

KILLED = """
import os, sys
import torch
from strata import Trainer
from strata.train import EarlyStopping
from tests.integration.trainer_models import arrays, network, weights, without_timings

kill_at, resume, accumulate = int(sys.argv[1]), sys.argv[2] == "resume", int(sys.argv[3])

class Killed(Trainer):
    calls = 0
    def training_step(self, module, batch):
        Killed.calls += 1
        if Killed.calls == kill_at:
            os._exit(9)
        return super().training_step(module, batch)

module = network(dropout=0.3, batch_norm=True)
result = Killed(
    module, torch.nn.BCEWithLogitsLoss(), torch.optim.AdamW, ["auc"], ema=0.9, clip_norm=1.0,
    accumulate=accumulate, seed=3,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100), scheduler_every="step",
).fit(arrays(200), valid=arrays(50, seed=1), epochs=4, batch_size=16, resume=resume, every=3)
print(weights(module))
print([{k: v for k, v in row.items() if k not in ("seconds", "rows_per_s")} for row in result.history])
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_killed_fit_resumes_with_identical_weights_and_history(tmp_path: Path, accumulate: int) -> None:
    def run(directory: str, kill_at: int, mode: str) -> subprocess.CompletedProcess[str]:
        place = tmp_path / directory
        place.mkdir(exist_ok=True)
        command = [sys.executable, "-c", KILLED, str(kill_at), mode, str(accumulate)]
        root = str(Path(__file__).parents[2])
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, check=False)

    whole = run("whole", 0, "new")
    assert whole.returncode == 0, whole.stderr
    assert run("killed", 8, "new").returncode == 9  # in the first epoch
    assert run("killed", 15, "resume").returncode == 9  # in a later one
    resumed = run("killed", 0, "resume")

    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout


def test_a_fit_that_max_steps_ended_resumes_in_the_middle_of_the_epoch() -> None:
    data, whole, cut = arrays(100), network(dropout=0.2), network(dropout=0.2)

    expected = trainer(whole).fit(data, epochs=2, batch_size=8)
    first = trainer(cut).fit(data, epochs=2, batch_size=8, max_steps=17)
    second = trainer(network(seed=9, dropout=0.2)).fit(data, epochs=2, batch_size=8, resume=True)

    assert (first.steps, first.stop_reason) == (17, "max_steps=17 reached")
    assert without_timings(second.history) == without_timings(expected.history)
    last = CheckpointManager(second.checkpoints).load()
    assert torch.cat([each.reshape(-1) for each in last["module"].values()]).tolist() == weights(whole)


def test_a_new_fit_never_continues_an_old_one_by_accident(tmp_path: Path) -> None:
    data = arrays(16)
    one, two = trainer().fit(data), trainer().fit(data)
    trainer(checkpoints="saved").fit(data)

    assert one.checkpoints != two.checkpoints
    with pytest.raises(InvalidArgument, match="has a checkpoint of step 1; pass resume=True to continue from it"):
        trainer(checkpoints="saved").fit(data)


# -- bad input ---------------------------------------------------------------------------------------------------------


def refusal(error: type[StrataError], work: Any) -> str:
    with pytest.raises(error) as caught:
        work()
    return str(caught.value)


def test_a_label_that_does_not_exist_is_refused_before_the_first_step(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data")

    unknown = refusal(InvalidArgument, lambda: trainer(Regression(), loss=nn.MSELoss()).fit(path, label="yy"))
    missing = refusal(InvalidArgument, lambda: trainer(Regression(), loss=nn.MSELoss()).fit(path))

    assert "label='yy' is not a column of the data; did you mean 'y'?" in unknown
    assert "label= is missing" in missing
    assert not Path("checkpoints").exists()


def test_a_module_that_does_not_fit_the_batch_is_refused_with_its_shapes() -> None:
    x, y = arrays(16)

    message = refusal(InvalidArgument, lambda: trainer(network(inputs=5)).fit((x, y)))

    assert "float32[16, 4]" in message
    assert "mat1 and mat2 shapes cannot be multiplied" in message


def test_an_id_outside_the_table_is_named() -> None:
    module = nn.Sequential(nn.Embedding(10, 1), nn.Flatten(0))

    message = refusal(InvalidArgument, lambda: trainer(module).fit((torch.tensor([1, 12]), torch.ones(2))))

    assert "12" in message
    assert "10" in message


def test_a_loss_that_is_not_finite_is_raised_skipped_or_stops_the_training() -> None:
    x, y = arrays(32)
    x[9, 2] = math.nan
    kept = network()

    message = refusal(NotFinite, lambda: trainer().fit((x, y), batch_size=8, shuffle=False))
    skipped = trainer(kept, on_nan="skip").fit((x, y), batch_size=8, shuffle=False)
    stopped = trainer(on_nan="stop").fit((x, y), batch_size=8, shuffle=False)

    assert "the loss is nan at step 2 on rank 0" in message
    assert skipped.steps == 4
    assert all(map(math.isfinite, weights(kept)))
    assert math.isfinite(skipped.history[0]["loss"])
    assert stopped.steps == 2
    assert "a gradient is not finite" in stopped.stop_reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": ["acu"]}, "acu"),
        ({"engine": "spark"}, "engine='spark' is unknown; use 'local' or 'ray'"),
        ({"accumulate": 0}, "accumulate=0 must be a whole number, at least 1"),
        ({"precision": "fp8"}, "precision='fp8' is unknown"),
        ({"precision": "fp16"}, "precision='fp16' needs an accelerator; use 'bf16' or 'fp32' on a CPU"),
        ({"loss": nn.MSELoss}, "loss=MSELoss is a class; pass an instance: MSELoss()"),
        ({"loss": nn.MSELoss(reduction="none")}, "use reduction='mean'"),
        ({"callbacks": ["csv"]}, "callbacks= has 'csv'"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "optimizer"),
        ({"class_weights": {0: 1.0}, "loss": lambda a, b: (a - b).mean()}, "class_weights= needs the loss of each row"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_cure(arguments: dict[str, Any], message: str) -> None:
    def work() -> None:
        trainer(**{**arguments, "optimizer_args": {}}).fit(arrays(8))

    assert message in refusal(StrataError, work)


def test_data_that_cannot_be_resumed_are_refused() -> None:
    message = refusal(InvalidArgument, lambda: trainer().fit(iter([1, 2])))
    lengths = refusal(InvalidArgument, lambda: trainer().fit((torch.ones(3, 4), torch.ones(4))))

    assert "pass a path or URL, a map-style Dataset" in message
    assert "arrays must have the same number of rows: 0 has 3, 1 has 4" in lengths
