"""Runs the demo: makes the data, trains twice, kills workers the second time, and compares.

Everything is in one directory that is removed at the end, and every process of it has that directory in its
environment. Signals are looked at between two steps of this program, never in the middle of one: so there is no moment
at which Ctrl-C could leave something behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.live import Live

from strata.demo import view
from strata.demo.clicks import row_numbers, write_clicks
from strata.demo.config import NUM_EPOCHS
from strata.demo.job import SCRIPT, Job, wait_until_gone
from strata.demo.outcome import Outcome, check_rows, check_weights, losses_by_step, recovery_of, run_figures
from strata.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from strata.demo.config import DemoConfig
    from strata.demo.outcome import RunFigures
    from strata.demo.view import RunFacts

POLL_S = 0.005
REFRESH_S = 0.125
TOLD_S = 5.0
"""Between two lines, where nothing can be drawn over."""
MAX_BASE = 38
"""Characters of the path of a directory for temporary files."""
SHORT = "/tmp"  # noqa: S108 - a directory is made in it that only its user can enter
UNDISTURBED, KILLED = "undisturbed", "killed"


class Interrupted(BaseException):
    """Asked to end by a signal. Nothing may catch it but who ends the program."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Notes Ctrl-C and the like, for whoever looks; as long as it is entered, they do nothing else."""

    def __init__(self) -> None:
        self._heard: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as it was

    def check(self) -> None:
        """
        Raises:
            Interrupted: One has come.
        """
        if self._heard is not None:
            raise Interrupted(self._heard)

    def _hear(self, number: int, _frame: object) -> None:
        self._heard = signal.Signals(number)


class Stage:
    def __init__(self, console: Console | None) -> None:
        """None: nobody looks."""
        self.shown: list[RenderableType] = []
        """What stays and is worth a picture, in order."""
        self._console = console
        self._drawn_s = 0.0
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return min(self._console.width, view.MAX_WIDTH) if self._console is not None else view.MIN_WIDTH

    def say(self, *what: RenderableType, is_for_picture: bool = True) -> None:
        assert not any(isinstance(each, str) and "\n" in each for each in what), "a string is one line"
        if is_for_picture:
            self.shown += what
        if self._console is not None:
            for each in what:
                self._console.print(each, width=self.width)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """What is drawn in it is gone at its end."""
        self._drawn_s = time.monotonic()
        if self._console is None or not self._can_draw:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw again."""
        if self._console is None:
            return False
        return time.monotonic() - self._drawn_s >= (REFRESH_S if self._live is not None else TOLD_S)

    def draw(self, facts: RunFacts) -> None:
        self._drawn_s = time.monotonic()
        if self._live is not None:
            self._live.update(view.live(facts, self.width), refresh=True)
        elif self._console is not None:
            self._console.print(view.progress_line(facts), highlight=False)

    @property
    def _can_draw(self) -> bool:
        # Not rich's own opinion: FORCE_COLOR makes it take a log file for a terminal.
        assert self._console is not None
        return self._console.file.isatty() and not self._console.is_dumb_terminal


def run(config: DemoConfig, stage: Stage) -> Outcome:
    """Shows it on the stage. Whether all went well is in what it returns.

    Raises:
        Interrupted: By a signal; nothing is left.
        StrataError: A run has failed.
    """
    with Signals() as signals, _directories(config.keep) as (place, variables):
        outcome = _play(config, stage, place, variables, signals)
    stage.say(view.heading(4, "What was promised, and what came of it"), view.summary(outcome), "", view.story(outcome))
    stage.say(view.next_steps(_next_steps(config)), "", f"{outcome.duration_s:.0f} s in all", is_for_picture=False)
    return outcome


@contextlib.contextmanager
def _directories(keep: Path | None) -> Iterator[tuple[Path, dict[str, str]]]:
    """Where everything is, and what the runs find in their environment. Only what was asked for is there afterwards."""
    with Scratch("strata-demo-", _base()) as scratch:
        variables = {"TMPDIR": str(scratch.path), "STRATA_CACHE_DIR": str(scratch.path / "cache")}
        try:
            place = scratch.path / "demo" if keep is None else keep.absolute()
            place.mkdir(parents=True, exist_ok=True)
            yield place, variables
        finally:
            wait_until_gone(variables)


def _base() -> Path | None:
    """Where temporary files go; None: where Python puts them. Sockets will be there, whose paths must be short."""
    is_long = len(tempfile.gettempdir()) > MAX_BASE
    return Path(SHORT) if is_long and os.access(SHORT, os.W_OK | os.X_OK) else None


def _play(config: DemoConfig, stage: Stage, place: Path, variables: dict[str, str], signals: Signals) -> Outcome:
    began_s = time.monotonic()
    stage.say(view.title(config.num_workers, config.num_kills), view.heading(1, "A log of clicks"))
    written = write_clicks(place / "clicks", num_rows=config.num_rows, seed=config.seed)
    shutil.copy(SCRIPT, place)
    signals.check()
    stage.say(view.data_line(written, time.monotonic() - began_s))
    jobs = {
        UNDISTURBED: Job(UNDISTURBED, config, place, variables),
        KILLED: Job(KILLED, config, place, variables, kills=config.kills),
    }
    titles = ("A model learns who clicks on what; nobody disturbs it", "The same once more, and kill -9 of a worker")
    for number, (job, title) in enumerate(zip(jobs.values(), titles, strict=True), start=2):
        stage.say(view.heading(number, title), view.command(["strata", *job.arguments], stage.width))
        _carry_out(job, config, stage, signals)
        for kill in job.kills:
            stage.say(*view.recovery(recovery_of(kill, job.events(), job.entries), stage.width))
        stage.say(view.run_line(_figures(job)))
    signals.check()
    return _outcome(config, place, jobs, began_s)


def _carry_out(job: Job, config: DemoConfig, stage: Stage, signals: Signals) -> None:
    try:
        job.start()
        with stage.drawing():
            while job.look():
                signals.check()
                if stage.is_due:
                    stage.draw(_facts(job, config))
                time.sleep(POLL_S)
    finally:
        job.stop()


def _facts(job: Job, config: DemoConfig) -> view.RunFacts:
    entries = job.entries
    attempt = max((entry.attempt for entry in entries), default=0)
    newest = {entry.rank: entry for entry in entries if entry.attempt == attempt}
    killed = {kill.rank for kill in job.kills if kill.attempt == attempt}
    workers = []
    for rank in range(config.num_workers):
        entry = newest.get(rank)
        if entry is None:
            workers.append(view.WorkerFacts(rank, 0, None, "starting"))
            continue
        last = entry.trained[-1] if entry.trained else None
        step = last.step if last is not None else entry.restored_step
        state = "killed" if rank in killed else "training"
        workers.append(view.WorkerFacts(rank, step, last.loss if last is not None else None, state))
    return view.RunFacts(
        workers=workers,
        num_steps=config.num_steps,
        losses=losses_by_step(entries),
        saved_step=max((save.step for entry in newest.values() for save in entry.saved), default=0),
        recoveries=[recovery_of(kill, job.events(), entries) for kill in job.kills],
        elapsed_s=time.monotonic() - job.began_s,
    )


def _figures(job: Job) -> RunFigures:
    return run_figures(job.entries, duration_s=job.ended_s - job.began_s)


def _outcome(config: DemoConfig, place: Path, jobs: dict[str, Job], began_s: float) -> Outcome:
    undisturbed, killed = jobs[UNDISTURBED], jobs[KILLED]
    rows = row_numbers(place / "clicks")
    return Outcome(
        num_workers=config.num_workers,
        num_rows=config.num_rows,
        num_epochs=NUM_EPOCHS,
        seed=config.seed,
        undisturbed=_figures(undisturbed),
        killed=_figures(killed),
        recoveries=tuple(recovery_of(kill, killed.events(), killed.entries) for kill in killed.kills),
        num_kills_planned=config.num_kills,
        rows=check_rows(killed.entries, rows, num_epochs=NUM_EPOCHS),
        rows_undisturbed=check_rows(undisturbed.entries, rows, num_epochs=NUM_EPOCHS),
        weights=check_weights(undisturbed.directory / "checkpoints", killed.directory / "checkpoints"),
        duration_s=time.monotonic() - began_s,
    )


def _next_steps(config: DemoConfig) -> list[tuple[str, str]]:
    """What it is for, and a command that works here."""
    strata = _program()
    if config.keep is None:
        return [
            ("kill more of them", f"{strata} demo --kills 3 --seed 8"),
            ("keep data, logs and checkpoints, and look at them", f"{strata} demo --keep strata-demo"),
            ("read the training script: what makes it survive is in the lines with ctx", f"less {_short(SCRIPT)}"),
            ("run one of your own; scripts for torchrun start unchanged", f"{strata} run --workers 2 YOUR_SCRIPT.py"),
        ]
    place = _short(config.keep.absolute())
    checkpoints = f"{place}/runs/{KILLED}/checkpoints"
    again = "train.py --data clicks --step-log steps/mine"
    return [
        ("list the two runs", f"STRATA_RUNS_DIR={place}/runs {strata} ps"),
        ("read what the workers said", f"STRATA_RUNS_DIR={place}/runs {strata} logs {KILLED}"),
        ("list the last checkpoints", f"{strata} checkpoints ls {checkpoints}"),
        (
            "run it again, and kill -9 its workers from another terminal",
            f"cd {place} && {_program(Path(place))} run -w 2 {again}",
        ),
    ]


def _program(directory: Path = Path()) -> str:
    """How this `strata` is called from a directory: by its name, if that is what a shell would find."""
    beside = Path(sys.executable).with_name("strata")
    found = shutil.which("strata")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "strata"
    short = _short if directory == Path() else str
    return short(beside) if beside.exists() else f"{short(Path(sys.executable))} -m strata.cli"


def _short(path: Path) -> str:
    """From here, where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
