"""Untrusted text reaches a terminal only as text: every command is given text with control sequences and markup.

A command that is missing from `CASES` fails the first test. A new command needs a case with untrusted text.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from strata import cli
from strata.checkpoint import CheckpointManager
from strata.cli.app import app
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import InvalidArgument
from strata.launch.record.directory import RunDirectory, RunStatus, create
from strata.launch.record.timeline import RunEvent
from strata.launch.spec import RunSpec
from strata.tune import SearchSpace
from strata.tune.journal import StudyJournal
from strata.tune.search import Search
from strata.tune.state import events as e
from strata.tune.state.events import StudySpec

HOSTILE = "\x1b]0;T\x07\x1b[2J\u202e\u2066\x85\x9b31m\r\nFORGED\x08\x7f[bold]X[/bold]"
"""Sets a title, clears the screen, reverses the text direction, uses C1 controls, breaks the line, has rich markup."""
NAME = "a\x1b[2J\u202e\x9b31m\rFORGED"
"""The part of it that a file name may contain."""


@dataclass
class Stage:
    """A run, a checkpoint, a dataset and a coordinator that contain hostile text."""

    place: Path
    address: str
    state: Path
    checkpoints: Path
    data: Path
    run: RunDirectory
    space: Path

    @property
    def damaged_tar(self) -> Path:
        path = self.place / f"{NAME}.tar"
        path.write_bytes(HOSTILE.encode() * 40)
        return path

    def checkpoint_step(self, step: int) -> str:
        with CheckpointManager(self.checkpoints, saver="thread") as manager:
            manager.save({HOSTILE: np.ones(4), "same": np.zeros(2)}, step=step, metadata={"note": HOSTILE}).wait()
        return str(step)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    place = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_RUNS_DIR", str(place / "runs"))
        patch.setenv("COLUMNS", "2000")
        config = CoordinatorConfig(state=str(place / "state.db"))
        with EmbeddedCoordinator(config) as coordinator, CoordinatorClient(coordinator.address) as client:
            client.register_worker("here", job_id="job")
            client.register_worker("left", job_id="job").deregister(HOSTILE)
            pq_path = place / f"{NAME}.parquet"
            pq.write_table(pa.table({HOSTILE: [HOSTILE, "b"]}), pq_path)
            run = _a_run(place)
            space = _a_study(place)
            made = Stage(place, coordinator.address, place / "state.db", place / NAME, pq_path, run, space)
            made.checkpoint_step(1)
            made.checkpoint_step(2)
            yield made


def _a_run(place: Path) -> RunDirectory:
    script = place / "script.py"
    script.write_text(f"print({HOSTILE!r}); raise ValueError({HOSTILE!r})")
    spec = RunSpec(name="hostile", script=str(script), directory=str(place), checkpoints=str(place / "c"))
    run = create(msgspec.structs.replace(spec, arguments=(HOSTILE,), max_restarts=0))
    status = RunStatus.of_this_process(now_s=1.0)
    run.write_status(msgspec.structs.replace(status, state="failed", reason=HOSTILE))
    run.log_path(0, 0).write_text(f"{HOSTILE}\n")
    run.note(RunEvent(at_s=1.0, monotonic_s=1.0, what="failed", text=HOSTILE, rank=0))
    return run


def _a_study(place: Path) -> Path:
    """Create a study, and a file with its space."""
    space = SearchSpace().add_categorical("kind", [HOSTILE])
    spec = RunSpec(name="study", script="strata.tune.worker", is_module=True, directory="/", checkpoints="/c")
    run = create(msgspec.structs.replace(spec, shown=HOSTILE))
    run.write_status(msgspec.structs.replace(RunStatus.of_this_process(now_s=1.0), state="done"))
    study = StudySpec(name="study", space=space.to_dict(), metrics=(HOSTILE,), num_trials=2, max_failures=1)
    search = Search(study)
    with StudyJournal(run.path / "study.jsonl") as journal:
        journal.append([e.Opened(spec=study)])
        journal.append(search.handle(e.Resized(num_slots=1)).facts)
        journal.append(search.handle(search.answer(0)).facts)
        journal.append(search.handle(e.Finished(trial=0, lease=1, values=(0.5,))).facts)
        journal.append(search.handle(search.answer(1)).facts)
        journal.append(search.handle(e.Failed(trial=1, lease=1, reason=HOSTILE)).facts)
    (place / "space.yaml").write_text(space.to_yaml())
    return place / "space.yaml"


CASES: dict[str, Callable[[Stage], list[list[str]]]] = {
    "run": lambda s: [
        ["run", "--name", "fails", "--max-restarts", "0", str(s.run.spec.script)],
        ["run", "--name", HOSTILE, str(s.run.spec.script)],
        ["run", "-q", "--name", "module", "--max-restarts", "0", "-m", HOSTILE],
    ],
    "resume": lambda s: [["resume", "hostile"], ["resume", HOSTILE]],
    "ps": lambda s: [["ps"], ["ps", "--json"]],
    "logs": lambda s: [["logs", "hostile"], ["logs", HOSTILE]],
    "rm": lambda s: [["rm", HOSTILE], ["rm", "hostile"]],
    "stop": lambda s: [["stop", HOSTILE]],
    "scale": lambda s: [["scale", HOSTILE, "2"]],
    "tune": lambda s: [
        ["tune", str(s.run.spec.script), "--space", str(s.space), "--trials", "1", "--max-failures", "1"],
        ["tune", HOSTILE, "--space", str(s.space)],
        ["tune", str(s.run.spec.script), "--space", HOSTILE],
        ["tune", "--resume", HOSTILE],
    ],
    "studies": lambda s: [["studies"], ["studies", "--json"]],
    "studies show": lambda s: [["studies", "show", "study"], ["studies", "show", "study", "--json"]],
    "studies compare": lambda s: [
        ["studies", "compare", "study", "study"],
        ["studies", "compare", "study", "study", "--json"],
        ["studies", "compare", HOSTILE, "study"],
    ],
    "status": lambda s: [
        ["status", "--address", s.address],
        ["status", "--address", s.address, "--json"],
        ["status", "--address", s.address, "--job", HOSTILE],
        ["status", HOSTILE],
    ],
    "top": lambda s: [["top", HOSTILE], ["top", "--http", HOSTILE], ["top", "--http", f"http://127.0.0.1:1/{NAME}"]],
    "events": lambda s: [["events", "--state", str(s.state)], ["events", "--state", str(s.state), "--json"]],
    "jobs ls": lambda s: [["jobs", "ls", "--address", f"unix:{s.place}/{NAME}", "--timeout-s", "0.1"]],
    "jobs drop": lambda s: [["jobs", "drop", HOSTILE, "--address", s.address]],
    "journal replay": lambda s: [
        ["journal", "replay", "--state", str(s.state)],
        ["journal", "replay", "--state", str(s.state), "--json"],
    ],
    "journal backup": lambda s: [["journal", "backup", str(s.place / f"backup{NAME}"), "--state", str(s.state)]],
    "checkpoints ls": lambda s: [["checkpoints", "ls", str(s.checkpoints)]],
    "checkpoints show": lambda s: [
        ["checkpoints", "show", str(s.checkpoints)],
        ["checkpoints", "show", str(s.checkpoints), "--json"],
    ],
    "checkpoints verify": lambda s: [["checkpoints", "verify", str(s.checkpoints), "--id", HOSTILE]],
    "checkpoints diff": lambda s: [["checkpoints", "diff", str(s.checkpoints), "1", HOSTILE]],
    "checkpoints export": lambda s: [
        ["checkpoints", "export", str(s.checkpoints), "--output", str(s.place / f"{NAME}.safetensors")]
    ],
    "checkpoints rm": lambda s: [["checkpoints", "rm", str(s.checkpoints), "--step", s.checkpoint_step(3)]],
    "checkpoints compact": lambda s: [["checkpoints", "compact", str(s.checkpoints), "--id", HOSTILE]],
    "checkpoints repair": lambda s: [["checkpoints", "repair", str(s.checkpoints), "--lift", HOSTILE]],
    "dashboard": lambda s: [
        ["dashboard", HOSTILE],
        ["dashboard", str(s.place / NAME / "none")],
        ["dashboard", str(s.checkpoints), "--host", HOSTILE],
        ["dashboard", str(s.checkpoints), "--tokens", HOSTILE],
    ],
    "data plan": lambda s: [["data", "plan", str(s.data)], ["data", "plan", str(s.data), "--json"]],
    "data peek": lambda s: [["data", "peek", str(s.data)], ["data", "peek", str(s.data), "--json"]],
    "data bench": lambda s: [["data", "bench", str(s.data), "--output-format", HOSTILE]],
    "data index": lambda s: [["data", "index", str(s.damaged_tar)], ["data", "index", str(s.damaged_tar), "--check"]],
    "data pack": lambda s: [
        ["data", "pack", str(s.place / f"no{NAME}"), str(s.place / "shards")],
        ["data", "pack", str(s.place / "runs"), str(s.data)],
    ],
    "coordinator": lambda s: [["coordinator", "--config", str(s.place / NAME / "none.yaml")]],
    "relay": lambda s: [["relay", "--upstream", f"unix:{s.place}/{NAME}", "--listen", HOSTILE, "--timeout-s", "0.1"]],
    "certs": lambda s: [["certs", str(s.place / NAME / "certs")]],
    "bench": lambda s: [["bench", HOSTILE]],
    "demo": lambda s: [["demo", "--keep", str(s.checkpoints)]],
    "doctor": lambda s: [["doctor", "--path", str(s.checkpoints)], ["doctor", "--path", str(s.checkpoints), "--json"]],
}


LOGS = ("run", "resume", "logs")
"""Commands that print log lines, in which a worker may use colours."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    below = getattr(command, "commands", None)
    if below is None or (path and command.invoke_without_command):
        yield " ".join(path)
    if below is not None:
        for name, each in below.items():
            yield from commands(each, (*path, name))


def printed(arguments: list[str]) -> str:
    out = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.suppress(SystemExit),
    ):
        patch.setattr(sys, "stdin", io.StringIO("n\n"))
        cli.main(arguments)
    return out.getvalue()


def test_every_command_is_given_hostile_text() -> None:
    assert set(commands(typer.main.get_command(app))) == CASES.keys()


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "doctor" else []) for name in CASES],  # imports all extras
)
@pytest.mark.timeout(60)
def test_no_command_passes_control_sequences_to_the_terminal(command: str, stage: Stage) -> None:
    for arguments in CASES[command](stage):
        shown = printed(arguments)

        assert "FORGED" in shown, f"no hostile text was printed: {arguments}"
        assert [c for c in shown if not c.isprintable() and c != "\n"] == []
        assert command in LOGS or not any(line.strip().startswith("FORGED") for line in shown.split("\n")), shown
        assert shown.count("FORGED\\x08\\x7f") == shown.count("FORGED\\x08\\x7f[bold]"), "markup was interpreted"
        if "--json" in arguments:
            assert [json.loads(line) for line in shown.splitlines()] != []


@pytest.mark.parametrize("bad", ["a/../../b", "a//b", "a/./b", "a/", "a/.."])
def test_an_id_that_is_a_path_out_of_the_directory_is_refused(bad: str, stage: Stage) -> None:
    with CoordinatorClient(stage.address) as client:
        for call in (
            lambda: client.register_worker("w", job_id=bad),
            lambda: client.register_worker(bad, job_id="job"),
            lambda: client.register_dataset(bad, job_id="job", total_samples=1, shard_size=1),
        ):
            with pytest.raises(InvalidArgument, match="unsafe path"):
                call()
    assert "is not a valid directory name" in printed(["run", "--name", bad, __file__])
