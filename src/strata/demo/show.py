"""Runs the demo: starts the processes, kills one, and checks at the end that nothing was lost or done twice."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from strata.coordinator import events as e
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.replay import Replay
from strata.demo.view import TOLD, Facts, picture, plain, svg
from strata.errors import ConfigError, StrataError, UnknownWorker

if TYPE_CHECKING:
    from strata.coordinator.replay import ReplayLine

JOB = "demo"
DATASET = "clicks"
REFRESH_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    num_workers: int = 4
    num_shards: int = 400
    kill_at: float = 0.35
    """How much of the epoch is done when a worker is killed; a new one takes its place at twice that."""
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.num_workers < 2:
            raise ConfigError("--workers must be at least 2, so that one can be lost", field="workers")
        if self.num_shards < self.num_workers * 20:
            raise ConfigError(
                f"--shards must be at least {self.num_workers * 20} for the story to unfold", field="shards"
            )


class Cast:
    """The worker processes."""

    def __init__(self, address: str, logs: Path) -> None:
        self._address = address
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, worker_id: str, *, wait_for: int) -> None:
        arguments = ["--address", self._address, "--job", JOB, "--worker", worker_id, "--dataset", DATASET]
        with (self._logs / f"{worker_id}.log").open("wb") as log:
            self._processes[worker_id] = subprocess.Popen(
                [sys.executable, "-m", "strata.demo.worker", *arguments, "--wait-for", str(wait_for)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, worker_id: str) -> int:
        """SIGKILL: no good-bye, no cleaning up."""
        process = self._processes.pop(worker_id)
        process.kill()
        process.wait()
        return process.pid

    def finished(self) -> bool:
        """Whether all have ended by themselves; a failed one is an error with its last words."""
        codes = {worker_id: process.poll() for worker_id, process in self._processes.items()}
        for worker_id, code in codes.items():
            if code:
                last = (self._logs / f"{worker_id}.log").read_text(errors="replace").strip().splitlines()[-5:]
                raise StrataError(f"{worker_id} ended with code {code}: " + " / ".join(last))
        return all(code == 0 for code in codes.values())

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Demo:
    def __init__(self, config: DemoConfig, client: CoordinatorClient, cast: Cast, replay: Replay) -> None:
        self._config = config
        self._client = client
        self._cast = cast
        self._replay = replay
        self._story: list[ReplayLine] = []
        self._num_barriers = 0
        self._seen_seq = 0
        self._victim = f"worker-{config.num_workers - 1}"
        self._spare = f"worker-{config.num_workers}"
        self._acts: list[str] = ["kill", "join"]
        self._headline = f"{config.num_workers} worker processes are starting …"
        self._killed: set[str] = set()
        self._started_at_s = time.time()

    def begin(self) -> None:
        self._client.register_dataset(
            DATASET, job_id=JOB, total_samples=self._config.num_shards * 1_000, shard_size=1_000, shuffle=True, seed=42
        )
        for number in range(self._config.num_workers):
            self._cast.start(f"worker-{number}", wait_for=self._config.num_workers)

    def look(self) -> tuple[Facts, list[ReplayLine]]:
        """The facts now, and the lines of the story that are new."""
        new = []
        for entry in self._replay.lines(job_id=JOB, after=self._seen_seq):
            self._seen_seq = entry.seq
            self._num_barriers += entry.kind == "BarrierReleased"
            if entry.kind in TOLD:
                new.append(entry)
        self._story += new
        members = self._client.list_workers(job_id=JOB)
        facts = Facts(
            members=members,
            dataset=self._client.list_datasets(job_id=JOB)[0],
            num_barriers=self._num_barriers,
            left_by_worker={w.worker_id: self._num_left(w.worker_id) for w in members.workers},
            story=self._story,
            started_at_s=self._started_at_s,
            headline=self._headline,
            killed=self._killed,
        )
        return facts, new

    def _num_left(self, worker_id: str) -> int:
        try:
            return len(self._client.assigned_shards(worker_id, job_id=JOB))
        except UnknownWorker:
            return 0  # it left between two looks

    def taken_over(self, facts: Facts) -> bool:
        """Whether the killed worker is out, and the others have gone on."""
        members = {w.worker_id for w in facts.members.workers}
        return bool(self._killed) and not self._killed & members

    def act(self, facts: Facts) -> None:
        """The plot: at some point one is killed, and later a new one comes."""
        done = facts.dataset.num_done / facts.dataset.num_shards
        if done > 0 and not self._killed:
            self._headline = "shards are dealt out; after each round all meet at a barrier"
        if self._acts[:1] == ["kill"] and done >= self._config.kill_at:
            self._acts.pop(0)
            pid = self._cast.kill(self._victim)
            self._killed.add(self._victim)
            self._headline = f"kill -9 {pid}: {self._victim} is gone; the others take over its shards and go on"
        elif self._acts[:1] == ["join"] and done >= min(self._config.kill_at * 2, 0.9):
            self._acts.pop(0)
            self._cast.start(self._spare, wait_for=1)
            self._headline = f"{self._spare} joins and gets its share"


def run(config: DemoConfig, *, console: Console | None = None, save_svg: Path | None = None) -> int:
    """Shows the demo; 0 when the epoch ended with every shard done exactly once.

    `save_svg` keeps the picture of the moment when the lost worker's shards have been taken over.
    """
    console = console or Console()
    with tempfile.TemporaryDirectory(prefix="strata-demo-") as directory:
        state = str(Path(directory) / "state.db")
        with (
            EmbeddedCoordinator(CoordinatorConfig(state=state)) as coordinator,
            CoordinatorClient(coordinator.address) as client,
            Replay(state) as replay,
        ):
            cast = Cast(coordinator.address, Path(directory))
            try:
                _play(Demo(config, client, cast, replay), cast, config, console, save_svg)
            finally:
                cast.stop()
            return _verdict(config, replay, console)


def _play(demo: Demo, cast: Cast, config: DemoConfig, console: Console, save_svg: Path | None) -> None:
    deadline_s = time.monotonic() + config.timeout_s
    demo.begin()
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while not cast.finished():
            if time.monotonic() > deadline_s:
                raise StrataError(f"the demo did not end within {config.timeout_s:g} s; try fewer --shards")
            time.sleep(REFRESH_S)
            facts, new = demo.look()
            demo.act(facts)
            if save_svg is not None and demo.taken_over(facts):
                save_svg.write_text(svg(facts))
                save_svg = None
            if live is not None:
                live.update(picture(facts), refresh=True)
            else:
                for entry in new:
                    console.print(plain(entry, facts.started_at_s), highlight=False, soft_wrap=True)


def _verdict(config: DemoConfig, replay: Replay, console: Console) -> int:
    """From the journal alone: what was done, how often, and by whom."""
    times_done: Counter[int] = Counter()
    by_worker: Counter[str] = Counter()
    num_generations = 0
    for event in replay.events(job_id=JOB):
        if isinstance(event, e.ShardsDone):
            times_done.update(event.indices)
            by_worker[event.worker_id] += len(event.indices)
        num_generations += isinstance(event, e.GenerationStarted)
    num_twice = sum(times > 1 for times in times_done.values())
    shares = ", ".join(f"{worker} {count}" for worker, count in sorted(by_worker.items()))
    console.print(
        f"\n{len(times_done)} of {config.num_shards} shards done, {num_twice} of them twice, "
        f"through {num_generations} generations ({shares})",
        highlight=False,
    )
    good = len(times_done) == config.num_shards and not num_twice
    console.print("[bold green]every shard exactly once[/bold green]" if good else "[bold red]that is wrong[/bold red]")
    return 0 if good else 1
