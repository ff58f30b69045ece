"""Follows docs/get-started.md as a reader would: its files, its commands, and the kill in the middle."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT, blocks

PAGE = ROOT / "docs" / "get-started.md"
README = ROOT / "README.md"
RUN = ROOT / "docs" / "run.md"
TITLE = re.compile(r'python title="([\w.]+)"')
EVENT = re.compile(r"^ +[\d.:]+(?: s)?  ([a-z ]+):", re.MULTILINE)
PATIENCE_S = 90.0


def files() -> dict[str, str]:
    """Return every file that the page shows, with shorter waits than on the page."""
    shown = {title[1]: block.text for block in blocks(PAGE) if (title := TITLE.fullmatch(block.info))}
    assert all("time.sleep(0.02)" in text for text in shown.values())
    return {name: text.replace("time.sleep(0.02)", "time.sleep(0.004)") for name, text in shown.items()}


def commands() -> list[str]:
    """Return every `strata …` line of the page, in order."""
    return [
        line.removeprefix("$ strata ")
        for block in blocks(PAGE)
        if block.info == "console"
        for line in block.text.splitlines()
        if line.startswith("$ strata ")
    ]


def events(text: str) -> list[str]:
    """Return the printed events of a run; how often it reports that it is running depends on the machine."""
    return [kind for kind in EVENT.findall(text) if kind != "running"]


def added_lines(diff: str) -> list[str]:
    return [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[1:].strip()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def strata(place: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Start one of the page's commands."""

    def start(line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "strata.cli", *shlex.split(line)],
            cwd=place,
            env={**os.environ, "STRATA_RUNS_DIR": str(place / "runs"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reader_kills_a_worker_and_gets_the_same_weights(strata: Callable[[str], subprocess.Popen[str]]) -> None:
    printed = {}
    for line in commands():
        with strata(line) as process:
            try:
                if "--name killed" in line:
                    printed[line] = killed_in_the_middle(process)
                printed[line] = printed.get(line, "") + process.communicate(timeout=PATIENCE_S)[0]
            finally:
                process.kill()
        assert process.returncode == 0, printed[line]

    plain, calm, killed, listed, compared = printed.values()
    assert "none saved" in plain
    assert "failed" not in events(calm)
    assert events(killed) == events("".join(b.text for b in blocks(PAGE) if "killed" in b.text and b.info == "console"))
    assert events(killed).count("failed") == 1
    assert re.search(r"^killed +done +2 +800 +1 of 3 ", listed, re.MULTILINE), listed
    different = re.findall(r"^changed +(\S+)", compared, re.MULTILINE)
    assert [name for name in different if not name.startswith("strata.generators.")] == []
    assert [name for name in different if ".torch" in name] == []


def killed_in_the_middle(process: subprocess.Popen[str]) -> str:
    """Kill rank 1 once training is well under way, and return what the run had printed by then."""
    assert process.stdout is not None
    lines, worker, deadline_s = [], 0, time.monotonic() + PATIENCE_S
    for line in process.stdout:
        assert time.monotonic() < deadline_s, "".join(lines)
        lines.append(line)
        if found := re.search(r"rank 1 is process (\d+)", line):
            worker = int(found[1])
        if worker and "step 300" in line:
            os.kill(worker, signal.SIGKILL)
            break
    return "".join(lines)


def test_seven_lines_are_added_to_the_script() -> None:
    before, after = (text.splitlines() for text in files().values())
    diff = "\n".join(difflib.unified_diff(before, after, lineterm="", n=0))
    (shown,) = [block.text for block in blocks(PAGE) if block.info == "diff"]
    (short,) = [block.text for block in blocks(README) if block.info == "diff"]

    added = [line for line in added_lines(diff) if not line.startswith("++")]
    assert sorted(added_lines(shown)) == sorted(added)
    assert len(added) == len(added_lines(short)) == 7
    calls = [re.findall(r"(?:strata|ctx)\.\w+", line) for line in (shown, short)]
    assert calls[0] == calls[1]


def test_the_readme_and_the_guide_to_running_show_the_same_diff() -> None:
    readme, guide = ([block.text for block in blocks(page) if block.info == "diff"] for page in (README, RUN))

    assert readme == guide


PREAMBLE = """
import numpy as np, os, pyarrow as pa, pyarrow.parquet as pq, torch
if not os.path.exists("data"):
    os.mkdir("data")
    pq.write_table(pa.table({"x": np.arange(5_120, dtype=np.float32)}), "data/0.parquet", row_group_size=1_000)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
stop_at = int(os.environ["STOP_AT"])
num_batches = 0
"""
BODY = """
        loss = model(batch["x"][:, None]).square().mean()
        loss.backward()
        optimizer.step()
        num_batches += 1
        if ctx.step == stop_at:
            raise RuntimeError("stopped")
"""


@pytest.mark.timeout(120)
def test_the_seven_lines_of_the_readme_resume_a_script(tmp_path: Path) -> None:
    (diff,) = [block.text for block in blocks(README) if block.info == "diff"]
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    script = PREAMBLE + after.replace("\n        …", BODY) + "\nprint(ctx.step, num_batches)\n"
    script = script.replace("strata.init()", "strata.init(every=5)")  # by default, the first save comes after a minute
    (tmp_path / "train.py").write_text(script, encoding="utf-8")

    def run(stop_at: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "STOP_AT": str(stop_at)}
        command = [sys.executable, "train.py"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    stopped, finished = run(stop_at=13), run(stop_at=-1)
    assert "RuntimeError: stopped" in stopped.stderr
    assert (finished.returncode, finished.stdout) == (0, "30 20\n"), finished.stderr  # of 3 × 10 steps, 10 were saved
    assert "step-000000000030" in "".join(path.name for path in tmp_path.glob("checkpoints/*/*"))
