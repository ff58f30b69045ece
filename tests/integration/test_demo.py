"""`strata demo` is the first thing a newcomer sees, so it is run as they would."""

import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

from strata.cli.exit_codes import ExitCode

STRATA = [sys.executable, "-m", "strata.cli"]


def test_the_demo_loses_a_worker_and_ends_with_every_shard_done_exactly_once(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    ended = subprocess.run(
        [*STRATA, "demo", "--workers", "3", "--shards", "120", "--save-svg", str(picture)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "worker-2 left: connection lost" in ended.stdout
    assert "worker-3 joined" in ended.stdout
    assert "120 of 120 shards done, 0 of them twice" in ended.stdout
    assert "every shard exactly once" in ended.stdout
    assert picture.read_text().startswith("<svg")


def test_on_a_terminal_the_demo_draws_a_live_table() -> None:
    """Through a real pseudo-terminal, as a person would have it."""
    leader, follower = pty.openpty()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*STRATA, "demo", "--workers", "2", "--shards", "40"], stdout=follower, stderr=errors, stdin=follower
        )
        os.close(follower)
        drawn = b""
        while chunk := _read(leader):
            drawn += chunk
        os.close(leader)
        errors.seek(0)
        assert process.wait(30) == 0, errors.read()
    text = drawn.decode(errors="replace")
    assert "what the journal says" in text
    assert "killed -9" in text
    assert "every shard exactly once" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # Linux says EIO when the other side has closed
        return b""


def test_a_demo_without_anyone_to_lose_is_refused_with_the_cure() -> None:
    ended = subprocess.run([*STRATA, "demo", "--workers", "1"], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == ExitCode.USAGE
    assert "--workers must be at least 2" in ended.stderr
