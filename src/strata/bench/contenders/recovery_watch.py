"""Kill a rank of a job that writes step logs, and wait until it trains again."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.processes import killed_with_descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMEOUT_S = 90.0
"""Deadline of a job, which takes 10 to 30 s. A job that has not recovered by then is lost."""
KILL_AFTER = 25
"""The step of the kill; some steps before it are saved."""
NUM_STEPS = 60
NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Recovery:
    start_s: float
    """From the command to the first step."""
    killed_at_s: float
    recovery_s: float
    """From the kill to the first step after it."""


class JobLost(Exception):
    """The job failed or did not recover in time."""


def kill_one(command: Callable[[Path], Sequence[str]], variables: dict[str, str] | None = None) -> Recovery:
    """Run the command, which receives a directory for step logs, and kill rank 1 in the middle.

    Raises:
        JobLost: The job did not train again. None of its processes is left.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, killed_with_descendants():
        directory = Path(name)
        began_s = time.time()
        with (
            (directory / "output").open("wb") as output,
            subprocess.Popen(
                command(directory), stdout=output, stderr=output, env={**os.environ, **(variables or {})}, cwd=directory
            ) as job,
        ):
            try:
                wait = partial(_wait, directory, job, deadline_s)
                first_s = wait(lambda steps: next((at_s for _, at_s in steps), None))
                wait(lambda steps: next((at_s for number, at_s in steps if number >= KILL_AFTER), None))
                victim = _pids(directory / "rank-1")[-1]
                killed_at_s = time.time()
                os.kill(victim, signal.SIGKILL)
                num_begun = len(_pids(directory / "rank-0"))
                again_s = wait(lambda _: _first_step_of(directory / "rank-0", num_begun))
                if job.wait(max(0.0, deadline_s - time.monotonic())) != 0:
                    raise JobLost(f"the job failed:\n{_output(directory)}")
            except subprocess.TimeoutExpired:
                raise JobLost(f"the job did not finish within {TIMEOUT_S:g} s:\n{_output(directory)}") from None
            finally:
                job.kill()
        return Recovery(first_s - began_s, killed_at_s, again_s - killed_at_s)


def _wait(
    directory: Path,
    job: subprocess.Popen[bytes],
    deadline_s: float,
    find: Callable[[list[tuple[int, float]]], float | None],
) -> float:
    while True:
        found = find(_steps(directory / "rank-0"))
        if found is not None:
            return found
        if job.poll() is not None or time.monotonic() > deadline_s:
            raise JobLost(f"the job did not train within {TIMEOUT_S:g} s:\n{_output(directory)}")
        time.sleep(0.005)


def _output(directory: Path) -> str:
    return (directory / "output").read_text(errors="replace")[-2000:]


def _lines(step_log: Path) -> list[list[str]]:
    text = step_log.read_text() if step_log.exists() else ""
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _steps(step_log: Path) -> list[tuple[int, float]]:
    return [(int(words[1]), float(words[2])) for words in _lines(step_log) if words[0] == "step"]


def _pids(step_log: Path) -> list[int]:
    return [int(words[1]) for words in _lines(step_log) if words[0] == "pid"]


def _first_step_of(step_log: Path, begun_before: int) -> float | None:
    """Return when the first process after `begun_before` others finished its first step.

    Raises:
        JobLost: It started over instead of resuming.
    """
    num_begun = 0
    for words in _lines(step_log):
        num_begun += words[0] == "pid"
        if words[0] == "step" and num_begun > begun_before:
            if int(words[1]) <= 1:
                raise JobLost("the job did not resume from a checkpoint")
            return float(words[2])
    return None
