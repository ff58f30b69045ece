"""`strata tune` and `strata studies` with real processes: scripts, kills, interrupts, refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import typer
from documents import ROOT, blocks

from strata import Study
from strata.cli.app import app
from strata.cli.exit_codes import ExitCode
from strata.tune.modes import MODES

pytest.importorskip("cloudpickle")

STRATA = (sys.executable, "-m", "strata.cli")
SPACE = """
parameters:
  learning_rate: {type: float, min: 1e-4, max: 1.0, log: true}
  layers: {type: int, values: [1, 2]}
"""
TRAIN = """
import argparse
import strata

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--layers", type=int)
parser.add_argument("--scale", type=float, default=1.0)
arguments = parser.parse_args()
ctx = strata.init()
for step in range(1, 4):
    ctx.report(step=step, loss=arguments.scale * arguments.learning_rate / step)
ctx.close()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def script(place: Path, text: str) -> str:
    (place / "train.py").write_text(textwrap.dedent(text))
    return "train.py"


def strata(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*STRATA, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done


def tuned(place: Path, *arguments: str, space: str = "space.yaml") -> Study:
    strata("tune", "train.py", "--space", space, "--name", "sweep", *arguments)
    return Study.load(place / "runs" / "sweep")


def started(place: Path, until: str, times: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a study, and return once its journal has this many facts of a kind."""
    command = [*STRATA, "tune", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = place / "runs" / "sweep" / "study.jsonl"
    while process.poll() is None and (not journal.exists() or journal.read_text().count(f'"{until}"') < times):
        time.sleep(0.01)
    return process


def test_a_script_is_tuned_listed_shown_compared_and_removed(place: Path) -> None:
    script(place, TRAIN)
    sweep = ("tune", "train.py", "--space", "space.yaml", "--trials", "4", "--mode", "hyperband")

    done = strata(*sweep, "--name", "one", "--json", "--", "--scale", "2")
    strata(*sweep, "--name", "two", "--quiet", "--seed", "1")

    one, two = Study.load(place / "runs" / "one"), Study.load(place / "runs" / "two")
    result = json.loads(done.stdout)
    assert result["is_complete"]
    assert result["best"]["values"]["loss"] == pytest.approx(2 * result["best"]["config"]["learning_rate"] / 3)
    assert (result["mode"], result["num_trials"], result["path"]) == ("hyperband", 4, str(place / "runs" / "one"))
    assert "started: trial 0, learning_rate=" in done.stderr
    assert "best: trial " in done.stderr
    assert "one done: all 4 trials have ended" in done.stderr

    listed = [json.loads(line) for line in strata("studies", "--json").stdout.splitlines()]
    assert [each["name"] for each in listed] == ["two", "one"]
    assert listed[1]["best"] == result["best"]
    assert listed[1]["command"] == "tune train.py --scale 2"
    table = strata("studies").stdout
    assert "4 of 4" in table
    assert "tune train.py --scale 2" in strata("ps").stdout

    shown = json.loads(strata("studies", "show", "one", "--json", "--series").stdout)
    assert [each["config"] for each in shown["trials"]] == [each.config for each in one.trials]
    assert shown["series"][result["best"]["number"]]["steps"][0] == 1
    text = strata("studies", "show", "one").stdout
    assert f"best: trial {one.best.number}, loss " in text
    assert "checkpoint: none saved" in text

    compared = json.loads(strata("studies", "compare", "one", "two", "--json").stdout)
    assert [each["name"] for each in compared["studies"]] == ["one", "two"]
    assert compared["better"] == min((one, two), key=lambda each: each.best.values).name
    assert "best loss" in strata("studies", "compare", "one", "two").stdout

    strata("rm", "--yes", "one", "two")
    assert "no studies in" in strata("studies").stdout


@pytest.mark.slow
def test_the_script_of_the_guide_is_tuned_as_it_says(place: Path) -> None:
    page = blocks(ROOT / "docs" / "tuning.md")
    for each in page:
        if (title := re.fullmatch(r'\w+ title="(.+)"', each.info)) is not None:
            (place / title[1]).write_text(each.text)
    (command,) = [line for each in page for line in each.text.splitlines() if line.startswith("$ strata tune train.py")]
    words = shlex.split(command.removeprefix("$ strata "))
    words[words.index("--trials") + 1] = "6"

    strata(*words)

    study = Study.load(place / "runs" / "sweep")
    assert study.best.step == 81
    assert study.best_checkpoint


def test_a_configuration_is_passed_as_environment_or_as_a_file(place: Path) -> None:
    script(
        place,
        """
        import os, sys, yaml, strata
        if sys.argv[1] == "env":
            config = {"learning_rate": float(os.environ["LEARNING_RATE"]), "layers": int(os.environ["LAYERS"])}
        else:
            config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
        strata.init().report(step=1, loss=config["learning_rate"] * config["layers"])
        """,
    )
    for how in ("env", "file"):
        command = ("tune", "train.py", "--space", "space.yaml", "--trials", "2", "--name", how, "--config-as", how)
        strata(*command, "--", how)

        best = Study.load(place / "runs" / how).best
        assert best.values[0] == best.config["learning_rate"] * best.config["layers"]


def test_a_pruned_script_releases_its_globals_and_writes_its_open_files(place: Path) -> None:
    script(
        place,
        """
        import argparse, os
        import strata

        class Writer:
            def __init__(self, path):
                self.path = path
            def __del__(self):
                with open(self.path, "w") as file:
                    file.write("closed")

        parser = argparse.ArgumentParser()
        parser.add_argument("--learning_rate", type=float)
        parser.add_argument("--layers", type=int)
        arguments = parser.parse_args()
        writer = Writer(f"{arguments.learning_rate}.closed")
        file = open(f"{arguments.learning_rate}.open", "w")
        file.write("written")
        ctx = strata.init()
        for step in range(1, 10):
            ctx.report(step=step, loss=arguments.learning_rate)
        """,
    )
    study = tuned(place, "--trials", "4", "--workers", "1", "--mode", "asha")

    assert {each.state for each in study.trials} == {"finished", "pruned"}
    for trial in study.trials:
        rate = trial.config["learning_rate"]
        assert (place / f"{rate}.closed").read_text() == "closed", trial
        assert (place / f"{rate}.open").read_text() == "written", trial


def test_a_killed_script_resumes_from_its_checkpoint_in_a_warm_process(place: Path) -> None:
    script(
        place,
        """
        import os, signal, sys
        is_warm = "torch" in sys.modules
        import torch
        import strata

        if __name__ == "__main__":
            ctx = strata.init(every=1)
            model = torch.nn.Linear(1, 1)
            progress = ctx.restore({"model": model})
            with open("starts", "a") as file:
                file.write(f"{is_warm} {progress.step} {__file__}\\n")
            for step in range(progress.step + 1, 7):
                ctx.report(step=step, loss=1.0 / step)
                save = ctx.maybe_checkpoint({"model": model})
                if step == 4 and progress.is_fresh:
                    if save is not None:
                        save.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            ctx.close()
        """,
    )
    (place / "space.yaml").write_text("parameters: {x: {type: float, min: 0, max: 1}}")

    study = tuned(place, "--trials", "1", "--workers", "1")

    path = place / "train.py"
    assert (place / "starts").read_text().splitlines() == [f"True 0 {path}", f"True 4 {path}"]
    assert (study.best.values, study.best.lease) == ((1.0 / 6,), 2)
    assert study.best_checkpoint
    assert study.best_checkpoint in strata("studies", "show", "sweep").stdout


SAVING = """
import argparse, time
from pathlib import Path
import numpy as np
import strata

class Counted:
    def __init__(self):
        self.steps = np.zeros(1, dtype=np.int64)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps[:] = np.asarray(state["steps"])

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--layers", type=int)
arguments = parser.parse_args()
ctx = strata.init(every=1_000_000, saver="thread")
model = Counted()
progress = ctx.restore({"model": model})
for step in range(progress.step + 1, 101):
    model.steps += 1
    with Path(f"steps-{arguments.learning_rate}").open("a") as file:
        file.write(f"{step}\\n")
    ctx.report(step=step, loss=arguments.learning_rate / step)
    ctx.maybe_checkpoint({"model": model})
    if not Path("hurry").exists():
        time.sleep(0.05)
assert model.steps[0] == 100
ctx.close()
"""
"""Saves only if it is asked to, and writes down every step."""
HANGING = TRAIN.replace("ctx.close()", "import time; time.sleep(600)")
SWEEP = ("train.py", "--space", "space.yaml", "--name", "sweep")


def facts_of(place: Path, kind: str) -> int:
    return (place / "runs" / "sweep" / "study.jsonl").read_text().count(f'"kind":"{kind}"')


@pytest.mark.timeout(300)
def test_ctrl_c_lets_trials_save_and_a_resumed_study_repeats_no_step(place: Path) -> None:
    script(place, SAVING)
    process = started(place, "Reported", 8, *SWEEP, "--trials", "2")

    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=50)

    assert process.returncode == ExitCode.INTERRUPTED
    assert out == ""
    assert errors.splitlines()[-1] == "study sweep was interrupted; continue with: strata tune --resume sweep"
    assert "Ctrl-C; waiting up to 30 s for 2 running trials to save at the next report" in errors
    assert "Traceback" not in errors
    assert json.loads(strata("studies", "--json").stdout)["state"] == "stopped"
    assert (facts_of(place, "Stopped"), facts_of(place, "Ended")) == (2, 1)
    (place / "hurry").touch()
    strata("tune", "--resume", "sweep")
    study = Study.load(place / "runs" / "sweep")
    assert [(each.state, each.lease) for each in study.trials] == [("finished", 2)] * 2
    for trial in study.trials:
        steps = (place / f"steps-{trial.config['learning_rate']}").read_text().split()
        assert steps == [str(step) for step in range(1, 101)]


@pytest.mark.parametrize("how", ["strata stop", "SIGTERM"])
def test_strata_stop_and_sigterm_let_trials_save(place: Path, how: str) -> None:
    script(place, SAVING)
    process = started(place, "Reported", 4, *SWEEP, "--trials", "1")
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    else:
        assert "stopping sweep once its running trials have saved" in strata("stop", "sweep").stdout
    _, errors = process.communicate(timeout=50)

    assert process.returncode == (128 + signal.SIGTERM if how == "SIGTERM" else 0)
    assert f"sweep stopped: {how}" in errors
    assert (facts_of(place, "Saved"), facts_of(place, "Stopped")) == (1, 1)


def test_a_second_ctrl_c_ends_a_study_whose_trials_do_not_save(place: Path) -> None:
    script(place, HANGING)
    process = started(place, "Reported", 3, *SWEEP, "--trials", "1")
    process.send_signal(signal.SIGINT)
    while process.poll() is None and not facts_of(place, "StopSent"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=25)  # the trial has 30 s to save

    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in errors
    assert json.loads(strata("studies", "--json").stdout)["state"] == "stopped"


def test_a_study_whose_driver_was_killed_is_resumed_and_extended_from_anywhere(place: Path) -> None:
    script(place, TRAIN)
    command = ("train.py", "--space", "space.yaml", "--name", "sweep", "--trials", "4", "-w", "1", "--", "--scale", "3")
    process = started(place, "Finished", 1, *command)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=50)
    (place / "elsewhere").mkdir()
    os.chdir(place / "elsewhere")
    assert json.loads(strata("studies", "--json").stdout)["state"] == "interrupted"

    strata("tune", "--resume", "swe")
    first = Study.load(place / "runs" / "sweep")
    strata("tune", "--resume", "sweep", "--trials", "6", "--workers", "2")
    study = Study.load(place / "runs" / "sweep")

    assert len(first.trials) == 4
    assert [each.config for each in study.trials[:4]] == [each.config for each in first.trials]
    assert [each.state for each in study.trials] == ["finished"] * 6
    assert all(each.values[0] == 3 * each.config["learning_rate"] / 3 for each in study.trials)
    journal = (place / "runs" / "sweep" / "study.jsonl").read_text()
    assert journal.count('"Finished"') == 6


def test_a_study_is_stopped_by_its_name_and_not_continued_as_a_run(place: Path) -> None:
    script(place, HANGING)
    process = started(place, "Reported", 1, *SWEEP)

    refused = strata("scale", "sweep", "4", code=ExitCode.USAGE)
    stopped = strata("stop", "sweep", "--now")
    process.communicate(timeout=50)

    assert process.returncode == 0
    assert "strata tune --resume sweep --workers N" in refused.stderr
    assert "`strata tune --resume sweep` continues it" in stopped.stdout
    assert "continue it with `strata tune --resume sweep`" in strata("resume", "sweep", code=ExitCode.USAGE).stderr
    assert "`strata tune --resume sweep` continues it" in strata("stop", "sweep", code=ExitCode.USAGE).stderr


def test_a_script_that_never_works_fails_with_its_reason_and_no_control_characters(place: Path) -> None:
    script(place, 'raise ValueError("out of \\x1b]0;T\\x07\\x1b[2J luck\\nFORGED")')
    command = ("tune", "train.py", "--space", "space.yaml", "--trials", "2", "--max-failures", "1", "--name", "sweep")

    done = strata(*command, code=ExitCode.FAILED)

    assert "no trial has finished; 2 trials failed" in done.stderr
    assert "ValueError: out of \\x1b]0;T" in done.stderr
    shown = (
        done.stderr + strata("studies", "show", "sweep").stdout + strata("studies", "show", "sweep", "--json").stdout
    )
    assert [c for c in shown if not c.isprintable() and c != "\n"] == []
    assert not any(line.startswith("FORGED") for line in shown.splitlines())


def test_a_script_that_exits_early_fails_with_its_code(place: Path) -> None:
    script(place, "import sys; sys.exit('no data')")
    command = ("tune", "train.py", "--space", "space.yaml", "--trials", "1", "--max-failures", "1")
    assert "no data" in strata(*command, code=ExitCode.FAILED).stderr


def test_the_help_lists_all_modes() -> None:
    command = typer.main.get_command(app).commands["tune"]  # type: ignore[attr-defined]
    (mode,) = [each for each in command.params if each.name == "mode"]
    assert f": {', '.join(MODES)}. " in mode.help


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "name the script to tune, or a study to continue: --resume NAME"),
        (["tune", "train.py"], "name the file with the space of configurations: --space space.yaml"),
        (["tune", "none.py", "--space", "space.yaml"], "none.py does not exist; to run a module, use strata tune -m"),
        (["tune", "train.py", "--space", "none.yaml"], "none.yaml: no such file; check the path"),
        (["tune", "train.py", "--space", "bad.yaml"], "bad.yaml: parameter 'x': type='flaot' is unknown; use float"),
        (["tune", "train.py", "--space", "space.yaml", "--mode", "best"], "--mode 'best' is unknown; use random"),
        (["tune", "train.py", "--space", "space.yaml", "--direction", "up"], "--direction 'up' is unknown; use min"),
        (["tune", "train.py", "--space", "space.yaml", "--option", "kind"], "--option 'kind' must have the form KEY="),
        (["tune", "train.py", "--space", "space.yaml", "--timeout", "soon"], "--timeout 'soon' is not a duration"),
        (["tune", "train.py", "--space", "space.yaml", "--trails", "3"], "No such option: --trails"),
        (["tune", "--resume", "none"], "no such run: 'none'"),
        (["tune", "--resume", "x", "--mode", "asha"], "--mode cannot change when a study continues; leave it out"),
        (["tune", "train.py", "--resume", "x"], "script cannot change when a study continues; leave it out"),
        (["studies", "show", "none"], "no such run: 'none'"),
        (["studies", "compare", "one"], "compare takes 2 to 8 studies, not 1"),
    ],
)
def test_a_mistake_is_refused_with_the_cure(
    arguments: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from strata import cli

    script(place, TRAIN)
    (place / "bad.yaml").write_text("parameters: {x: {type: flaot, min: 0, max: 1}}")

    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)

    assert raised.value.code == ExitCode.USAGE
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (place / "runs").exists()
