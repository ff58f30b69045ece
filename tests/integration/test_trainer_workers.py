"""A Trainer with several workers: the same steps as one worker with a larger batch, on every engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata import Trainer
from strata.errors import InvalidArgument, RunFailed
from strata.train import FTRL, OptimizerStack
from strata.trainer.optimizer.factory import BY_NAME
from tests.integration.trainer_models import Regression, arrays, network, weights, write_parquet

pytestmark = pytest.mark.usefixtures("run_directory")

LOSS = nn.BCEWithLogitsLoss()
OPTIMIZERS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.Adadelta: {"lr": 1.0},
    torch.optim.Adafactor: {"lr": 0.01},
    torch.optim.Adagrad: {"lr": 0.05},
    torch.optim.Adam: {"lr": 0.01},
    torch.optim.Adamax: {"lr": 0.01},
    torch.optim.AdamW: {"lr": 0.01, "weight_decay": 0.1},
    torch.optim.ASGD: {"lr": 0.1},
    FTRL: {"lr": 0.1, "l1": 0.001},
    torch.optim.NAdam: {"lr": 0.01},
    torch.optim.RAdam: {"lr": 0.01},
    torch.optim.RMSprop: {"lr": 0.005},
    torch.optim.Rprop: {"lr": 0.005},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


class Many(nn.Module):
    """A network for each optimizer, and a table for the one that takes sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({kind.__name__: network() for kind in OPTIMIZERS})
        self.table = nn.Embedding(10, 1, sparse=True)

    def forward(self, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(each(x) for each in self.of.values()), self.table(key)], dim=1)


def sum_of_losses(predictions: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum over the networks of their mean losses, so that each is trained as if it were alone."""
    rows = nn.functional.binary_cross_entropy_with_logits(
        predictions, target.unsqueeze(1).expand_as(predictions), reduction="none"
    )
    return rows.mean(dim=0).sum()


@pytest.mark.timeout(120)
def test_two_workers_make_the_steps_of_one_with_twice_the_batch_for_every_optimizer() -> None:
    x, y = arrays(101)
    data = {"x": x, "key": torch.arange(101) % 10, "y": y}
    stack = OptimizerStack(
        *({"cls": kind, "args": args, "model_key": f"of.{kind.__name__}"} for kind, args in OPTIMIZERS.items()),
        {"cls": torch.optim.SparseAdam, "args": {"lr": 0.01}, "model_key": "table"},
    )
    found = []
    for workers, batch_size in ((1, 16), (2, 8)):
        module = Many()
        before = {name: weights(each) for name, each in [*module.of.items(), ("table", module.table)]}
        Trainer(module, sum_of_losses, stack, workers=workers, logs="none").fit(
            data, label="y", epochs=2, batch_size=batch_size
        )
        found.append({name: weights(each) for name, each in [*module.of.items(), ("table", module.table)]})
        assert [name for name, values in found[-1].items() if values == before[name]] == [], "all are trained"

    one, two = found
    assert {*OPTIMIZERS, torch.optim.SparseAdam} >= set(BY_NAME.values())
    for name, expected in one.items():
        assert two[name] == pytest.approx(expected, abs=1e-6), name


@pytest.mark.timeout(120)
def test_a_fit_prints_where_its_checkpoints_are_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    Trainer(network(), LOSS, torch.optim.SGD, workers=2, logs="all").fit(arrays(64), batch_size=16)

    printed = capfd.readouterr()
    lines = [*printed.out.splitlines(), *printed.err.splitlines()]
    assert [line for line in lines if "strata: checkpoints in" not in line] == []


@pytest.mark.timeout(120)
def test_two_workers_read_the_same_files_to_the_same_weights_and_metrics(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data", rows=1003)  # the last batch is uneven
    found = []
    for workers, batch_size in ((1, 32), (2, 16)):
        module = Regression()
        trainer = Trainer(
            module, nn.MSELoss(), torch.optim.Adam, ["mse", "mae"], optimizer_args={"lr": 0.05}, workers=workers
        )
        result = trainer.fit(path, label="y", valid=path, epochs=2, batch_size=batch_size)
        found.append((weights(module), result, trainer.evaluate(path)))

    (one, first, evaluated_one), (two, second, evaluated_two) = found
    assert two == pytest.approx(one, abs=1e-6)
    assert (second.steps, len(second.history)) == (first.steps, 2)
    assert second.history[-1]["valid_mae"] == pytest.approx(first.history[-1]["valid_mae"], abs=1e-6)
    assert evaluated_two == pytest.approx(evaluated_one, abs=1e-6)
    assert second.timings["start_s"] > 0


@pytest.mark.timeout(120)
def test_a_fit_of_one_worker_resumes_on_two(tmp_path: Path) -> None:
    data, whole, moved = arrays(120), network(), network()
    expected = Trainer(whole, LOSS, torch.optim.Adam).fit(data, epochs=2, batch_size=16)

    Trainer(moved, LOSS, torch.optim.Adam).fit(data, epochs=2, batch_size=16, max_steps=5)
    result = Trainer(moved, LOSS, torch.optim.Adam, workers=2).fit(data, epochs=2, batch_size=8, resume=True)

    assert result.steps == 16
    losses = [row["loss"] for row in expected.history]
    assert [row["loss"] for row in result.history] == pytest.approx(losses, abs=1e-6), "every row counts once"
    assert weights(moved) == pytest.approx(weights(whole), abs=1e-6)


SCRIPT = """
import os, torch
from strata import Trainer
from tests.integration.trainer_models import arrays, network, weights

module = network()
trainer = Trainer(module, torch.nn.BCEWithLogitsLoss(), torch.optim.Adam, ["auc"], workers=1)
result = trainer.fit(arrays(120), valid=arrays(40, seed=1), epochs=2, batch_size=8)
found = trainer.evaluate(arrays(40, seed=1))
if os.environ.get("RANK", "0") == "0":
    print("weights", weights(module), "steps", result.steps, "auc", found["auc"] == result.history[-1]["valid_auc"])
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["-m", "strata.cli", "run", "--workers", "2", "--logs", "rank0"], id="strata run"),
        pytest.param(
            ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
            id="torchrun",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_with_a_trainer_runs_under_a_launcher(tmp_path: Path, launcher: list[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    alone = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True).stdout
    launched = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert launched.returncode == 0, launched.stderr
    line = next(line for line in launched.stdout.splitlines() if "weights" in line)
    assert "steps 16 auc True" in line
    assert "steps 30 auc True" in alone  # one worker with half the global batch


BEST = """
import os, torch
from strata import Trainer
from tests.integration.trainer_models import arrays, network, weights

def climb(optimizer):  # the second epoch ruins the weights
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch == 0 else -10.0)

module = network()
trainer = Trainer(module, torch.nn.BCEWithLogitsLoss(), torch.optim.SGD, optimizer_args={"lr": 0.1}, scheduler=climb)
result = trainer.fit(arrays(120), valid=arrays(40, seed=1), epochs=2, batch_size=8, restore_best=True)
scores = trainer.evaluate(arrays(40, seed=1))
print("rank", os.environ["RANK"], "best", result.best_epoch, result.best.step, weights(module)[:3])
assert scores["loss"] == result.history[0]["valid_loss"]
"""


@pytest.mark.timeout(120)
def test_all_ranks_under_a_launcher_end_with_the_weights_of_the_best_epoch() -> None:
    Path("train.py").write_text(BEST)
    command = [sys.executable, "-m", "strata.cli", "run", "--workers", "2", "--logs", "all", "train.py"]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.partition(" best ")[2] for line in (ended.stdout + ended.stderr).splitlines() if " best " in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("0 8 ")


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_second_fit_under_a_launcher_is_refused_with_the_cure() -> None:
    Path("train.py").write_text(SCRIPT + "trainer.fit(arrays(8))\n")
    command = [sys.executable, "-m", "strata.cli", "run", "--workers", "1", "--logs", "rank0", "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode != 0
    assert "can call fit once; give each fit a script of its own" in ended.stdout + ended.stderr


COUNTING = """
import torch
from strata import Trainer
from strata.launch.processes import local
from tests.integration.trainer_models import arrays, network

hosts, start = [], local._start_host
local._start_host = lambda *arguments: hosts.append(arguments) or start(*arguments)

if __name__ == "__main__":
    Trainer(network(), torch.nn.BCEWithLogitsLoss(), workers=2, logs="none").fit(arrays(32), batch_size=8)
    print(len(hosts), hosts[0][0])
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_fit_imports_once_for_all_workers_although_its_own_imports_change_the_environment() -> None:
    Path("train.py").write_text(COUNTING)  # in a new interpreter, where torch has not set its variables yet

    ended = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)

    assert ended.stdout.startswith("1 "), ended.stdout + ended.stderr
    assert "'strata.trainer.work'" in ended.stdout


@pytest.mark.timeout(120)
def test_an_error_of_the_module_in_a_worker_is_not_retried_and_is_shown() -> None:
    with pytest.raises(RunFailed) as caught:
        Trainer(network(inputs=5), LOSS, workers=2, logs="none").fit(arrays(32), batch_size=8)

    assert "the module does not fit the data" in str(caught.value)
    assert "not retried" in str(caught.value)


def test_code_that_cannot_be_pickled_is_refused_with_its_name() -> None:
    module = network()
    module.lock = threading.Lock()  # type: ignore[assignment]

    with pytest.raises(InvalidArgument, match="module=, a Sequential, cannot be pickled for the workers"):
        Trainer(module, LOSS, workers=2, logs="none").fit(arrays(32), batch_size=8)


INTERRUPTED = """
import os, signal, torch
from strata import Trainer

class Interrupted(Trainer):
    steps = 0

    def training_step(self, module, batch):
        self.steps += 1
        if self.steps == 3 and os.environ.get("RANK", "0") == "0":
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGINT)
        return super().training_step(module, batch)

if __name__ == "__main__":
    os.environ["LAUNCHER"] = str(os.getpid())
    module = torch.nn.Linear(3, 1)
    trainer = Interrupted(module, torch.nn.MSELoss(), torch.optim.SGD, workers=int(os.environ["WORKERS"]), logs="none")
    trainer.fit((torch.ones(4_000, 3), torch.ones(4_000)), epochs=1_000, batch_size=4)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("is_script", "workers", "line"),
    [
        pytest.param(True, 2, "the workers have saved", id="script"),
        pytest.param(False, 1, "saved step", id="python -c", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_a_fit_with_one_line_and_the_exit_code_of_an_interrupt(
    *, is_script: bool, workers: int, line: str
) -> None:
    Path("interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, *(["interrupted.py"] if is_script else ["-c", INTERRUPTED])]
    environment = {**os.environ, "WORKERS": str(workers)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert ended.returncode == -signal.SIGINT
    *printed, last = ended.stderr.splitlines()
    assert last.startswith("KeyboardInterrupt: ")
    assert line in last
    assert [each for each in printed if "strata: checkpoints in" not in each] == []
