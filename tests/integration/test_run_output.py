"""`strata run` without a terminal: its output, failures that it does not retry, and cleanup."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import DEADLINE_S, STRATA, until

from strata import TrainingOrchestrator, cli

TRAINS = """
    import numpy as np, strata
    ctx = strata.init(every=2)
    for step in range(1, 6):
        ctx.report(step=step)
        print("step", step, "of rank", ctx.rank)
        ctx.maybe_checkpoint({"a": np.zeros(3)})
    ctx.close()
    print("the end", end="")
"""
STAYS = """
    import os, signal, sys, time, strata
    ctx = strata.init()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(sys.argv[1], "w") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
    step = 0
    while True:
        step += 1
        ctx.report(step=step)
        ctx.maybe_checkpoint({})
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def strata(*arguments: str) -> tuple[int, str, str]:
    """Run `strata` in this process and return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "stdin", io.StringIO("n\n"))
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_worker_output_goes_to_stdout_and_the_last_step_is_recorded(
    write: Callable[[str], str], tmp_path: Path
) -> None:
    script = write(TRAINS)

    code, out, err = strata("run", "-w", "2", "--name", "job", script)
    assert code == 0, err
    plan, *lines = out.splitlines()
    assert plan == f"[0] strata: checkpoints in {tmp_path}/runs/job/checkpoints, every 2 steps; the last 3 are kept"
    assert lines == [*(f"[0] step {step} of rank 0" for step in range(1, 6)), "[0] the end"]
    assert "done: 2 workers are done" in err

    _, out, err = strata("run", "-w", "2", "--name", "both", "--logs", "all", "--quiet", script)
    assert err.startswith("both done: 2 workers are done\n")
    assert sorted(line for line in out.splitlines() if "strata: checkpoints in" not in line) == sorted(
        [
            *(f"[{rank}] step {step} of rank {rank}" for rank in (0, 1) for step in range(1, 6)),
            "[0] the end",
            "[1] the end",
        ]
    )
    code, out, _ = strata("ps", "--json")
    assert code == 0
    assert [(row["name"], row["step"]) for row in map(json.loads, out.splitlines())] == [("both", 5), ("job", 5)]
    assert list((tmp_path / "runs").rglob("*.step")) == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import strata\nctx = strata.init(evry=3)\n", "exit code 1: strata.errors.ConfigError: strata.init() "),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args()\n",
            "exit code 2: train.py: ",
        ),
        ("def train(:\n", "exit code 1: SyntaxError: "),
    ],
)
def test_a_programming_error_fails_without_restarts(
    text: str, cause: str, write: Callable[[str], str], tmp_path: Path
) -> None:
    code, _, err = strata("run", "--name", "job", "--no-warm", write(text))

    assert code == 1
    assert f"job failed: rank 0: {cause}" in err
    assert "not retried" in err
    assert [path.name for path in (tmp_path / "runs/job/logs").iterdir()] == ["attempt-000"]
    assert json.loads(strata("ps", "--json")[1])["num_restarts"] == 0


def test_ranks_that_exit_without_close_warn_that_the_last_step_is_not_saved(
    write: Callable[[str], str], tmp_path: Path
) -> None:
    script = write(
        f"""
        import numpy as np, strata
        ctx = strata.init(checkpoints="{tmp_path}/own", every=3)
        for step in range(1, 6) if ctx.attempt == 0 else ():
            ctx.report(step=step)
            ctx.maybe_checkpoint({{"a": np.zeros(3)}})
        """
    )

    code, out, err = strata("run", "-w", "2", "--name", "job", script)
    assert code == 0, err
    assert out.count("the last step, 5, is not saved: with several ranks, end training with ctx.close()") == 1
    code, out, err = strata("checkpoints", "ls", "job", "--json")
    assert code == 0, err
    assert [one["step"] for one in json.loads(out)["checkpoints"]] == [3], "the script's directory is found"

    assert strata("resume", "job")[0] == 0
    assert json.loads(strata("ps", "--json")[1])["step"] == 5, "even if the resumed run makes no step"


def test_step_timeout_s_detects_a_deadlock_before_the_first_report(
    write: Callable[[str], str],
) -> None:
    script = write(
        "import threading, strata\nctx = strata.init()\nthreading.Lock().acquire()\nthreading.Event().wait()\n"
    )

    code, _, err = strata(
        *("run", "--name", "job", "--step-timeout-s", "1.5", "--max-restarts", "0", "--logs", "none", script)
    )

    assert code == 1
    assert "job failed: rank 0: killed by SIGKILL: no step for" in err
    assert "threading" in err, "its stack is shown"


def test_commands_find_the_active_run_and_rm_leaves_nothing(write: Callable[[str], str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    pid_file = os.open(tmp_path / "pid", os.O_RDWR)
    command = [str(STRATA), "run", "--name", "job", "--logs", "none", write(STAYS), str(tmp_path / "pid")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
        try:
            assert select.select([pid_file], [], [], DEADLINE_S)[0]
            daemon = os.pidfd_open(int(os.read(pid_file, 100)))
            until(lambda: "TRAINING" in strata("status")[1], "the run is found without a name")
            assert "job job, generation 1" in strata("status")[1]
            assert strata("status", "job")[0] == 0
            assert "rank-0 joined" in strata("events")[1]
            assert any("strata: job rank 0 of 1: train.py" in title for title in titles())
            code, _, err = strata("rm", "job", "--yes")
            assert (code, err) == (2, "error: run job is active; stop it first: strata stop job\n")

            assert strata("stop", "job", "--now")[0] == 0
            assert agent.wait(DEADLINE_S) == 0
            assert select.select([daemon], [], [], 0)[0], "its double-forked process has ended too"
            os.close(daemon)
        finally:
            agent.kill()
            os.close(pid_file)
    code, _, err = strata("status")
    assert code == 3
    assert err.startswith("error: no run is active on this machine; `strata ps` lists its runs. localhost:50051: ")
    code, _, err = strata("status", "job")
    assert (code, "run job is not active (stopped)" in err) == (2, True)
    assert "rank-0 joined" in strata("events", "job")[1]
    assert strata("rm", "job")[0] == 1, "rm asks first"
    assert strata("rm", "--older-than", "1h", "--yes")[1] == "no run ended more than 1h ago\n"
    assert strata("rm", "job", "--yes")[1] == "deleted job\n"
    assert list((tmp_path / "runs").iterdir()) == []


def titles() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().rstrip(b"\0").decode(errors="replace"))
    return found


def test_the_output_of_a_function_is_shown_and_ps_lists_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    def greet(word: str) -> int:
        print(word)
        return 7

    assert TrainingOrchestrator().run(greet, "hello", workers=2, name="named") == [7, 7]
    assert capfd.readouterr().out == "[0] hello\n"
    assert TrainingOrchestrator().run(greet, "hello", workers=1, name="silent", logs="none") == [7]
    assert capfd.readouterr().out == ""
    rows = {row["name"]: row for row in map(json.loads, strata("ps", "--json")[1].splitlines())}
    assert rows["named"]["command"].endswith("greet()")
