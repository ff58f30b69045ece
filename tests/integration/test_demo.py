"""`strata demo` is the first thing a newcomer sees, so it is run as they would: small, and with everything real."""

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
"""Half of the steps are left when a worker is to be killed: enough for the demo to see it, on a busy machine, too."""
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the demo has its temporary files: sockets need a short path, which pytest's is not."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        yield Path(name)


def variables(temporary: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(temporary), "TERM": "xterm-256color", "COLUMNS": "80"}


def test_the_demo_kills_a_worker_for_programs_and_all_is_proved(tmp_path: Path, temporary: Path) -> None:
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
    assert list(temporary.iterdir()) == [], "nothing is left but what was to be kept"
    told = subprocess.run(
        [*STRATA, "checkpoints", "ls", "--json", str(kept / "runs" / "killed" / "checkpoints")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(told.stdout)["checkpoints"][-1]["step"] == 200


def test_on_a_terminal_it_draws_and_ctrl_c_leaves_nothing(temporary: Path) -> None:
    """Through a real pseudo-terminal, as a person would have it."""
    leader, follower = pty.openpty()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*STRATA, "demo"], stdout=follower, stderr=errors, stdin=follower, env=variables(temporary)
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
    assert "nobody disturbs it" in text
    assert "starting" in text
    assert list(temporary.iterdir()) == []
    until(lambda: not _processes_of(temporary), "nobody is left")


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
    except OSError:  # Linux says EIO when the other side has closed
        return b""


def test_without_torch_the_cure_is_told() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom strata.cli import main\nmain(['demo'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == ExitCode.USAGE
    assert 'pip install "strata-runtime[torch,data]"' in ended.stderr
