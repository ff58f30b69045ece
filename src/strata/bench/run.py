"""Runs contenders: one fresh process per contender and round.

A contender that is not installed or fails is not run again; one that misses its deadline counts as lost and gets a
second chance. The other contenders continue. Every process that a contender started is killed with it, even if the
benchmark itself is ended.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from strata.bench.frame import (
    Absent,
    Benchmark,
    Contender,
    Failure,
    Outcome,
    Sample,
    interleave,
    is_left_out,
    quotients,
    read_answer,
)
from strata.bench.processes import ended_by_signals, killed_with_descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROUND_VARIABLE = "STRATA_BENCH_ROUND"
"""Holds the number of the round, from 0: the seed of contenders whose figures depend on random numbers."""

MAX_OUTPUT_BYTES = 1024 * 1024
"""Maximum size of the end of a contender's output that is read."""

STDERR_LINES = 15
"""Last lines of a failed contender's stderr that are shown."""


def run_benchmark(
    benchmark: Benchmark,
    *,
    rounds: int | None = None,
    quick: bool = False,
    on_start: Callable[[int, Contender], None] | None = None,
) -> Outcome:
    """Run every contender in every round, interleaved; call `on_start` before each process."""
    known = frozenset(figure.key for figure in benchmark.figures)
    samples: list[Sample] = []
    absent: dict[str, Absent] = {}
    failures: dict[str, list[Failure]] = {contender.name: [] for contender in benchmark.contenders}
    with ended_by_signals():
        for number, contender in interleave(benchmark.contenders, benchmark.num_rounds(rounds, quick=quick)):
            if on_start:
                on_start(number, contender)
            if contender.name in absent or is_left_out(failures[contender.name]):
                continue
            answer = _run_once(
                contender,
                number,
                quick=quick,
                known=known,
                environment={**benchmark.environment, ROUND_VARIABLE: str(number)},
            )
            match answer:
                case Sample():
                    samples.append(answer)
                case Absent():
                    absent[contender.name] = answer
                case Failure():
                    failures[contender.name].append(answer)
    return Outcome(
        samples=(*samples, *quotients(benchmark.figures, samples)),
        absent=tuple(absent.values()),
        failures=tuple(failure for each in failures.values() for failure in each),
    )


def run_with_progress(benchmark: Benchmark, *, rounds: int | None = None, quick: bool = False) -> Outcome:
    """Run a benchmark; print an estimate of the time to stderr, and a progress bar if it is a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = Console(stderr=True)
    console.print(benchmark.estimate(rounds, quick=quick), style="dim", highlight=False, soft_wrap=True)
    total = benchmark.num_rounds(rounds, quick=quick) * len(benchmark.contenders)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(benchmark.name, total=total)
        started = 0

        def on_start(number: int, contender: Contender) -> None:
            nonlocal started
            progress.update(task, completed=started, description=f"round {number + 1} · {contender.name}")
            started += 1

        return run_benchmark(benchmark, rounds=rounds, quick=quick, on_start=on_start)


def venv_variable(venv: str) -> str:
    """Return the name of the variable for an environment of peers, such as STRATA_PEERS_VENV."""
    return f"STRATA_{venv.upper().replace('-', '_')}_VENV"


def find_peers_python(venv: str = "peers") -> Path | None:
    """Return the interpreter of an environment of peers: from its variable, the checkout or the current directory."""
    named = os.environ.get(venv_variable(venv))
    checkout = Path(__file__).resolve().parents[3]
    venvs = [Path(named)] if named else [checkout / f".venv-{venv}", Path.cwd() / f".venv-{venv}"]
    return next((venv / "bin" / "python" for venv in venvs if (venv / "bin" / "python").exists()), None)


def _run_once(
    contender: Contender,
    number: int,
    *,
    quick: bool,
    known: frozenset[str],
    environment: Mapping[str, str],
) -> Sample | Absent | Failure:
    interpreter = Path(sys.executable) if contender.venv == "ours" else find_peers_python(contender.venv)
    if interpreter is None:
        return Absent(contender.name, "the peers' environment does not exist; run `make bench-setup`")
    command = [*_command(contender, interpreter), *(["--quick"] if quick else [])]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        # Files instead of pipes: a surviving grandchild can neither block this process nor fill its memory.
        code = _wait(command, stdout, stderr, timeout_s=contender.timeout_s, environment=environment)
        if code == 0:
            answer = read_answer(_tail(stdout), contender=contender.name, round_=number, known=known)
            if not isinstance(answer, Failure):
                return answer
            reason = answer.reason
        elif code is None:
            reason = f"lost: killed after its deadline of {contender.timeout_s:g} s"
        elif code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
        else:
            reason = f"failed with exit code {code}"
        last_lines = "\n".join(_tail(stderr).strip().splitlines()[-STDERR_LINES:])
        return Failure(contender.name, number, reason, last_lines, is_lost=code is None)


def _command(contender: Contender, interpreter: Path) -> list[str]:
    if contender.venv == "ours":
        return [str(interpreter), "-m", contender.module]
    # The peers' environments have no strata: they run the file, and -P keeps this directory off its import path.
    spec = importlib.util.find_spec(contender.module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"module {contender.module} of contender {contender.name!r} does not exist")
    return [str(interpreter), "-P", spec.origin]


def _wait(
    command: list[str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
) -> int | None:
    """Return the exit code, or None if the deadline passed. No process is left behind."""
    with (
        killed_with_descendants(),
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")
