"""Kills a rank of a job that keeps diaries, and waits until it trains again."""

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
"""For a whole job, which takes 10 to 30 s. One that has not come back by then is lost."""
KILL_AFTER = 25
"""Steps, of which some are saved."""
NUM_STEPS = 60
NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Measured:
    start_s: float
    """From the command to the first step."""
    killed_at_s: float
    recovery_s: float
    """From the kill to the first step after it."""


class JobLost(Exception):
    """The job failed for good, or did not come back in time."""


def kill_one(command: Callable[[Path], Sequence[str]], variables: dict[str, str] | None = None) -> Measured:
    """Runs the command, which gets a directory for diaries; kills rank 1 in the middle.

    Raises:
        JobLost: It did not train again. Nothing of it runs any more.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name, killed_with_descendants():
        place = Path(name)
        began_s = time.time()
        with (
            (place / "said").open("wb") as said,
            subprocess.Popen(
                command(place), stdout=said, stderr=said, env={**os.environ, **(variables or {})}, cwd=place
            ) as job,
        ):
            try:
                wait = partial(_wait, place, job, deadline_s)
                first_s = wait(lambda steps: next((at_s for _, at_s in steps), None))
                wait(lambda steps: next((at_s for number, at_s in steps if number >= KILL_AFTER), None))
                victim = _pids(place / "rank-1")[-1]
                killed_at_s = time.time()
                os.kill(victim, signal.SIGKILL)
                num_begun = len(_pids(place / "rank-0"))
                again_s = wait(lambda _: _first_step_of(place / "rank-0", num_begun))
                if job.wait(max(0.0, deadline_s - time.monotonic())) != 0:
                    raise JobLost(f"the job failed:\n{_said(place)}")
            except subprocess.TimeoutExpired:
                raise JobLost(f"the job did not end within {TIMEOUT_S:g} s:\n{_said(place)}") from None
            finally:
                job.kill()
        return Measured(first_s - began_s, killed_at_s, again_s - killed_at_s)


def _wait(
    place: Path,
    job: subprocess.Popen[bytes],
    deadline_s: float,
    find: Callable[[list[tuple[int, float]]], float | None],
) -> float:
    while True:
        found = find(_steps(place / "rank-0"))
        if found is not None:
            return found
        if job.poll() is not None or time.monotonic() > deadline_s:
            raise JobLost(f"it did not train within {TIMEOUT_S:g} s:\n{_said(place)}")
        time.sleep(0.005)


def _said(place: Path) -> str:
    return (place / "said").read_text(errors="replace")[-2000:]


def _lines(diary: Path) -> list[list[str]]:
    text = diary.read_text() if diary.exists() else ""
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _steps(diary: Path) -> list[tuple[int, float]]:
    return [(int(words[1]), float(words[2])) for words in _lines(diary) if words[0] == "step"]


def _pids(diary: Path) -> list[int]:
    return [int(words[1]) for words in _lines(diary) if words[0] == "pid"]


def _first_step_of(diary: Path, begun_before: int) -> float | None:
    """When the first process after so many made its first step.

    Raises:
        JobLost: It began anew instead of going on.
    """
    num_begun = 0
    for words in _lines(diary):
        num_begun += words[0] == "pid"
        if words[0] == "step" and num_begun > begun_before:
            if int(words[1]) <= 1:
                raise JobLost("it did not go on from a checkpoint")
            return float(words[2])
    return None
