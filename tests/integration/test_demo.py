"""`strata demo` as a newcomer runs it: small, with real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import until

from strata.cli.exit_codes import ExitCode

STRATA = [sys.executable, "-m", "strata.cli"]
SMALL = ["demo", "--rows", "51200"]
"""Leaves half of the steps after the kill, enough for the demo to notice it even on a busy machine."""
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a directory for temporary files. Sockets need a shorter path than pytest's."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        yield Path(name)


def variables(temporary: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(temporary), "TERM": "xterm-256color", "COLUMNS": "80"}


def test_the_demo_kills_a_worker_and_reports_intact_results_as_json(tmp_path: Path, temporary: Path) -> None:
    kept = tmp_path / "kept"
    ended = subprocess.run(
        [*STRATA, *SMALL, "--seed", "3", "--json", "--keep", str(kept)],
        env=variables(temporary),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found = json.loads(ended.stdout)
    assert found["is_good"] is True
    assert found["rows"]["is_good"]
    assert found["rows"]["num_exact"] == found["rows"]["num_rows"] == 51_200
    assert found["weights"]["is_good"]
    assert found["weights"]["num_tensors"] == 32
    (back,) = found["recoveries"]
    assert 0 < back["detected_ms"] < back["started_ms"] < back["restored_ms"] < back["first_step_ms"]
    assert found["undisturbed"]["num_steps"] == found["killed"]["num_steps"] == 200
    assert list(temporary.iterdir()) == [], "only the kept directory remains"
    listed = subprocess.run(
        [*STRATA, "checkpoints", "ls", "--json", str(kept / "runs" / "killed" / "checkpoints")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(listed.stdout)["checkpoints"][-1]["step"] == 200


@pytest.mark.slow
def test_the_demo_kills_a_parameter_server_and_the_weights_are_those_of_an_undisturbed_run(temporary: Path) -> None:
    ended = subprocess.run(
        [*STRATA, *SMALL, "--servers", "--json"],
        env=variables(temporary),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found = json.loads(ended.stdout)
    assert found["is_good"] is True
    assert found["weights"]["different"] == []
    assert found["weights"]["num_elements"] > 3 * 16 * 1_000, "with all rows of the servers"
    assert found["servers"]["rows"] == 4_000
    (back,) = found["recoveries"]
    assert back["name"].startswith("server ")
    assert 0 < back["detected_ms"] < back["started_ms"] < back["restored_ms"] < back["first_step_ms"]
    assert list(temporary.iterdir()) == []
    until(lambda: not _processes_of(temporary), "all processes have ended")


@pytest.mark.parametrize("more", [[], pytest.param(["--servers"], marks=pytest.mark.slow)])
def test_the_demo_draws_on_a_terminal_and_ctrl_c_leaves_nothing_behind(temporary: Path, more: list[str]) -> None:
    """Uses a real pseudo-terminal."""
    leader, follower = pty.openpty()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*STRATA, "demo", *more], stdout=follower, stderr=errors, stdin=follower, env=variables(temporary)
        )
        os.close(follower)
        drawn = b""
        while b"rank 1" not in drawn and (chunk := _read(leader)):
            drawn += chunk
        process.send_signal(signal.SIGINT)
        while chunk := _read(leader):
            drawn += chunk
        os.close(leader)
        errors.seek(0)
        assert process.wait(60) == ExitCode.INTERRUPTED, errors.read()
    text = drawn.decode(errors="replace")
    assert "predicts clicks, undisturbed" in text
    assert "starting" in text
    assert list(temporary.iterdir()) == []
    until(lambda: not _processes_of(temporary), "all processes have ended")


def _processes_of(temporary: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={temporary}".encode() in entry.read_bytes() and entry.parent.name != str(os.getpid()):
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # Linux raises EIO when the other side has closed
        return b""


def test_without_torch_the_error_names_the_install_command() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom strata.cli import main\nmain(['demo'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == ExitCode.USAGE
    assert 'pip install "strata-runtime[torch,data]"' in ended.stderr
