"""Runs of `strata run` as users start them, for tests that kill parts of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from servers import STRATA

from strata.launch import control

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 90.0
"""Deadline for anything that takes a few seconds on an idle machine."""
FILE_ROWS = (251, 150, 49, 450)
NUM_ROWS = sum(FILE_ROWS)


def write_rows(directory: Path) -> Path:
    """Write files of unequal size with numbered rows."""
    rng = np.random.default_rng(1)
    directory.mkdir(parents=True)
    first = 0
    for number, num_rows in enumerate(FILE_ROWS):
        columns: dict[str, Any] = {name: rng.random(num_rows) for name in "abcy"}
        table = pa.table({"id": np.arange(first, first + num_rows), **columns})
        pq.write_table(table, directory / f"rows-{number}.parquet", row_group_size=64)
        first += num_rows
    return directory


def fit_alone(place: Path, data: Path, *arguments: str) -> dict[str, Any]:
    """Run the script with a Trainer by plain python, so that it starts its processes on this machine; return its
    results.
    """
    place.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, SCRIPTS / "train_trainer.py", "--data", data, "--out", place / "out", *arguments],
        cwd=place,
        env={**os.environ, "STRATA_RUNS_DIR": str(place / "runs")},
        check=True,
        capture_output=True,
    )
    (found,) = trainer_results(place / "out")
    return found


def trainer_results(out: Path) -> list[dict[str, Any]]:
    """Return the results of each rank of the script with a Trainer."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]


class Run:
    """A run and its agent's process, as the test sees them."""

    def __init__(
        self,
        place: Path,
        data: Path,
        *options: str,
        name: str = "job",
        script: Path | None = None,
        prefix: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        """`prefix`: a program that starts it, for example in a network namespace."""
        self.place = place
        self.name = name
        self.out = place / "out"
        self._data = data
        self._options = options
        self._script = script or SCRIPTS / "train_rows.py"
        self._prefix = prefix
        self._more_variables = variables
        self._process: subprocess.Popen[str] | None = None

    # -- starting --------------------------------------------------------------------------------------------------

    def start(self, *arguments: str) -> None:
        own = ("--data", str(self._data), "--out", str(self.out), "--rows", str(NUM_ROWS), *arguments)
        self._spawn("run", "--name", self.name, *self._options, str(self._script), *own)

    def start_plain(self, *arguments: str) -> None:
        """Run a script without the arguments above."""
        self._spawn("run", "--name", self.name, *self._options, str(self._script), *arguments)

    def resume(self, *options: str) -> None:
        self._spawn("resume", *options, self.name)

    def _spawn(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [*self._prefix, str(STRATA), *command],
            cwd=self.place,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def variables(self) -> dict[str, str]:
        ours = {"STRATA_RUNS_DIR": str(self.place / "runs"), "PYTHONWARNINGS": "ignore"}
        return {**os.environ, **ours, **self._more_variables}

    def command(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run another command about this run."""
        return subprocess.run(
            [str(STRATA), *command], env=self.variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def ask(self, request: control.Request) -> None:
        """Do what `strata stop` and `strata scale` do, without starting a program."""
        control.ask(json.loads((self.directory / "status.json").read_text())["control"], request)

    # -- watching --------------------------------------------------------------------------------------------------

    @property
    def agent(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def directory(self) -> Path:
        return self.place / "runs" / self.name

    def log(self, attempt: int, rank: int) -> Path:
        return self.directory / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank}.log"

    def text(self, attempt: int, rank: int) -> str:
        path = self.log(attempt, rank)
        return path.read_text() if path.exists() else ""

    def wait_for(self, attempt: int, rank: int, what: str) -> re.Match[str]:
        """Wait until a line of this worker's log matches."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            found = re.search(rf"^{what}$", self.text(attempt, rank), re.MULTILINE)
            if found is not None:
                return found
            if self.agent.poll() is not None or time.monotonic() > end_s:
                output = self.agent.communicate()[1] if self.agent.poll() is not None else "(still running)"
                raise AssertionError(f"no line {what!r} in {self.log(attempt, rank)}:\n{self._all_logs()}\n{output}")
            time.sleep(0.005)

    def found(self, attempt: int, rank: int, what: str) -> re.Match[str]:
        """Return a line of this worker's log."""
        match = re.search(rf"^{what}$", self.text(attempt, rank), re.MULTILINE)
        assert match is not None, self._all_logs()
        return match

    def wait_for_step(self, attempt: int, step: int, rank: int = 0) -> None:
        """Wait until the worker has completed this step or a later one."""
        end_s = time.monotonic() + DEADLINE_S
        while self.last_step(attempt, rank) < step:
            assert self.agent.poll() is None, f"the agent exited:\n{self._all_logs()}\n{self.agent.communicate()[1]}"
            assert time.monotonic() < end_s, f"no step {step} in attempt {attempt}:\n{self._all_logs()}"
            time.sleep(0.005)

    def num_workers(self, attempt: int) -> int:
        """Return the number of workers with a log in this attempt."""
        return len(list(self.log(attempt, 0).parent.glob("rank-*.log")))

    def last_step(self, attempt: int, rank: int) -> int:
        steps = re.findall(r"^step (\d+)$", self.text(attempt, rank), re.MULTILINE)
        return int(steps[-1]) if steps else -1

    def pid(self, attempt: int, rank: int) -> int:
        return int(self.wait_for(attempt, rank, r"pid (\d+)")[1])

    def kill(self, attempt: int, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(attempt, rank), number)

    def wait(self) -> tuple[int, str]:
        """Return the agent's exit code and its last output."""
        out, err = self.agent.communicate(timeout=DEADLINE_S)
        return self.agent.returncode, out + err

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("rank-*.json"))]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]

    def _all_logs(self) -> str:
        logs = sorted((self.directory / "logs").rglob("*.log"))[-6:]
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in logs)

    def bury(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # waits for the process and closes its pipes
                pass
