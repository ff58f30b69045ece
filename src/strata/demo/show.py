"""Run the demo: generate the data, train twice, kill workers the second time, and compare.

Everything is in one temporary directory, and every process of the demo has it in its environment, so cleaning up finds
all of them. Signals only set a flag, which is checked between two steps of the demo: Ctrl-C cannot interrupt a step and
leave something behind.
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
from strata.demo.job import SCRIPT, SERVERS_SCRIPT, Job, wait_until_gone
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
LINE_S = 5.0
"""Time between two progress lines when the output is not a terminal."""
MAX_TMPDIR_CHARS = 38
"""Longest path of the temporary directory that leaves enough characters for the paths of sockets."""
SHORT_TMPDIR = "/tmp"  # noqa: S108 (the demo creates a private directory in it)
UNDISTURBED, KILLED = "undisturbed", "killed"


class Interrupted(BaseException):
    """A signal asked the demo to end. Only the command line catches it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Context manager in which SIGINT, SIGTERM and SIGHUP only set a flag for `check`."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # the previous handler

    def check(self) -> None:
        """Raise if a signal has arrived.

        Raises:
            Interrupted: A signal has arrived.
        """
        if self._received is not None:
            raise Interrupted(self._received)

    def _receive(self, number: int, _frame: object) -> None:
        self._received = signal.Signals(number)


class Stage:
    """Shows the demo: redrawn on a terminal, as plain lines elsewhere, or not at all (`console` is None)."""

    def __init__(self, console: Console | None) -> None:
        self.shown: list[RenderableType] = []
        """Output that goes into the picture (`--save-svg`), in order."""
        self._console = console
        self._drawn_s = 0.0
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return min(self._console.width, view.MAX_WIDTH) if self._console is not None else view.MIN_WIDTH

    def show(self, *what: RenderableType, is_for_picture: bool = True) -> None:
        assert not any(isinstance(each, str) and "\n" in each for each in what), "a string is one line"
        if is_for_picture:
            self.shown += what
        if self._console is not None:
            for each in what:
                self._console.print(each, width=self.width)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Enable `draw`; whatever it draws is erased at the end of the block."""
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
        """Whether it is time to call `draw` again."""
        if self._console is None:
            return False
        return time.monotonic() - self._drawn_s >= (REFRESH_S if self._live is not None else LINE_S)

    def draw(self, facts: RunFacts) -> None:
        self._drawn_s = time.monotonic()
        if self._live is not None:
            self._live.update(view.live(facts, self.width), refresh=True)
        elif self._console is not None:
            self._console.print(view.progress_line(facts), highlight=False)

    @property
    def _can_draw(self) -> bool:
        # Not `console.is_terminal`: with FORCE_COLOR, rich treats a log file as a terminal.
        assert self._console is not None
        return self._console.file.isatty() and not self._console.is_dumb_terminal


def run(config: DemoConfig, stage: Stage) -> Outcome:
    """Run the demo, show it on the stage and return its outcome.

    Raises:
        Interrupted: A signal arrived; nothing is left behind.
        StrataError: A run failed.
    """
    with Signals() as signals, _directories(config.keep) as (directory, variables):
        outcome = _run_both(config, stage, directory, variables, signals)
    stage.show(view.heading(4, "Results"), view.summary(outcome), "", view.story(outcome))
    stage.show(view.next_steps(_next_steps(config)), "", f"Took {outcome.duration_s:.0f} s", is_for_picture=False)
    return outcome


@contextlib.contextmanager
def _directories(keep: Path | None) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the demo's directory and the environment of its runs; leave only what `--keep` asks for."""
    with Scratch("strata-demo-", _scratch_parent()) as scratch:
        variables = {"TMPDIR": str(scratch.path), "STRATA_CACHE_DIR": str(scratch.path / "cache")}
        try:
            directory = scratch.path / "demo" if keep is None else keep.absolute()
            directory.mkdir(parents=True, exist_ok=True)
            yield directory, variables
        finally:
            wait_until_gone(variables)


def _scratch_parent() -> Path | None:
    """Return a directory with a short path, as sockets need; None if Python's default is short enough."""
    is_long = len(tempfile.gettempdir()) > MAX_TMPDIR_CHARS
    return Path(SHORT_TMPDIR) if is_long and os.access(SHORT_TMPDIR, os.W_OK | os.X_OK) else None


def _run_both(
    config: DemoConfig, stage: Stage, directory: Path, variables: dict[str, str], signals: Signals
) -> Outcome:
    began_s = time.monotonic()
    stage.show(
        view.title(config.num_workers, config.num_kills, config.num_servers), view.heading(1, "Generate a click log")
    )
    files = write_clicks(directory / "clicks", num_rows=config.num_rows, seed=config.seed)
    shutil.copy(_script(config), directory)
    signals.check()
    stage.show(view.data_line(files, time.monotonic() - began_s))
    jobs = {
        UNDISTURBED: Job(UNDISTURBED, config, directory, variables),
        KILLED: Job(KILLED, config, directory, variables, kills=config.kills),
    }
    titles = ("Train a model that predicts clicks, undisturbed", f"Train it again, and kill -9 a {_victim(config)}")
    for number, (job, title) in enumerate(zip(jobs.values(), titles, strict=True), start=2):
        stage.show(view.heading(number, title), view.command(job.command, stage.width))
        _carry_out(job, config, stage, signals)
        for kill in job.kills:
            stage.show(*view.recovery(recovery_of(kill, job.events(), job.entries), stage.width))
        stage.show(view.run_line(_figures(job)))
    signals.check()
    return _outcome(config, directory, jobs, began_s)


def _script(config: DemoConfig) -> Path:
    return SERVERS_SCRIPT if config.num_servers else SCRIPT


def _victim(config: DemoConfig) -> str:
    return "parameter server" if config.num_servers else "worker"


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
    for rank in range(config.num_workers + config.num_servers):
        entry = newest.get(rank)
        name = config.name_of(rank)
        if rank >= config.num_workers:
            state = "killed" if rank in killed else "serving" if newest else "starting"
            workers.append(view.WorkerFacts(name, None, None, state))
            continue
        if entry is None:
            workers.append(view.WorkerFacts(name, 0, None, "starting"))
            continue
        last = entry.trained[-1] if entry.trained else None
        step = last.step if last is not None else entry.restored_step
        state = "killed" if rank in killed else "training"
        workers.append(view.WorkerFacts(name, step, last.loss if last is not None else None, state))
    return view.RunFacts(
        workers=workers,
        num_steps=config.num_steps,
        losses=losses_by_step(entries),
        saved_step=max((save.step for entry in newest.values() for save in entry.saved), default=0),
        recoveries=[recovery_of(kill, job.events(), entries) for kill in job.kills],
        elapsed_s=time.monotonic() - job.began_s,
        servers=job.servers if config.num_servers else None,
    )


def _figures(job: Job) -> RunFigures:
    return run_figures(job.entries, duration_s=job.ended_s - job.began_s)


def _outcome(config: DemoConfig, directory: Path, jobs: dict[str, Job], began_s: float) -> Outcome:
    undisturbed, killed = jobs[UNDISTURBED], jobs[KILLED]
    rows, servers = row_numbers(directory / "clicks"), killed.servers
    return Outcome(
        num_workers=config.num_workers,
        num_servers=config.num_servers,
        servers=None if servers is None else servers.as_plain(),
        num_rows=config.num_rows,
        num_epochs=NUM_EPOCHS,
        seed=config.seed,
        undisturbed=_figures(undisturbed),
        killed=_figures(killed),
        recoveries=tuple(recovery_of(kill, killed.events(), killed.entries) for kill in killed.kills),
        num_kills_planned=config.num_kills,
        rows=check_rows(killed.entries, rows, num_epochs=NUM_EPOCHS),
        rows_undisturbed=check_rows(undisturbed.entries, rows, num_epochs=NUM_EPOCHS),
        weights=check_weights(undisturbed.checkpoints, killed.checkpoints),
        duration_s=time.monotonic() - began_s,
    )


def _next_steps(config: DemoConfig) -> list[tuple[str, str]]:
    """Return pairs of a purpose and a command that works in this directory."""
    strata, option = _program(), " --servers" if config.num_servers else ""
    if config.keep is None:
        return [
            (f"Kill three {_victim(config)}s", f"{strata} demo{option} --kills 3 --seed 8"),
            ("Keep data, logs and checkpoints", f"{strata} demo{option} --keep strata-demo"),
            *_read_on(config, strata),
        ]
    directory = _short(config.keep.absolute())
    checkpoints = f"{directory}/checkpoints/{KILLED}" if option else f"{directory}/runs/{KILLED}/checkpoints"
    again = "--data clicks --step-log steps/mine"
    if option:
        command = f"{sys.executable} {SERVERS_SCRIPT.name} --name mine {again}"
    else:
        command = f"{_program(Path(directory))} run -w 2 {SCRIPT.name} {again}"
    return [
        ("List the two runs", f"STRATA_RUNS_DIR={directory}/runs {strata} ps"),
        ("Print the output of the workers", f"STRATA_RUNS_DIR={directory}/runs {strata} logs {KILLED}"),
        ("List the last checkpoints", f"{strata} checkpoints ls {checkpoints}"),
        (
            f"Run it again, and kill -9 its {_victim(config)}s from another terminal",
            f"cd {directory} && {command}",
        ),
    ]


def _read_on(config: DemoConfig, strata: str) -> list[tuple[str, str]]:
    if config.num_servers:
        return [("Read the training script", f"less {_short(SERVERS_SCRIPT)}")]
    return [
        ("Read the training script; only the lines with ctx are Strata's", f"less {_short(SCRIPT)}"),
        ("Run your own script; scripts for torchrun start unchanged", f"{strata} run --workers 2 YOUR_SCRIPT.py"),
        ("Train with parameter servers, and kill one of them", f"{strata} demo --servers"),
    ]


def _program(directory: Path = Path()) -> str:
    """Return the command that starts this `strata` from a directory: its name if the shell finds it, else its path."""
    beside = Path(sys.executable).with_name("strata")
    found = shutil.which("strata")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "strata"
    short = _short if directory == Path() else str
    return short(beside) if beside.exists() else f"{short(Path(sys.executable))} -m strata.cli"


def _short(path: Path) -> str:
    """Return the path relative to the current directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
