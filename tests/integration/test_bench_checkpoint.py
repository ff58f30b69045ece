"""The checkpoint benchmark at a small size: its contenders measure, verify their results and leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from s3 import S3Server, s3
from servers import until

from strata.bench import weed
from strata.bench.contenders.checkpoint_incremental import Saves, Table
from strata.checkpoint import CheckpointManager
from strata.errors import StrataError
from strata.storage import open_store

__all__ = ["s3"]

MIB = 1 << 20


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def figures(module: str, cwd: Path, **environment: str) -> dict[str, float]:
    """Return the figures of a contender and check that it leaves nothing in its directory."""
    ended = run(f"strata.bench.contenders.{module}", "--quick", cwd=cwd, **environment)
    assert ended.returncode == 0, ended.stderr
    assert not list(cwd.iterdir())
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])["figures"]
    return found


def test_an_incremental_save_of_one_percent_is_compared_with_full_saves(tmp_path: Path) -> None:
    found = figures("checkpoint_incremental", tmp_path, STRATA_BENCH_GIB="0.008")
    assert 0.01 <= found["incremental_bytes_fraction"] <= 0.05
    assert all(value > 0 for value in found.values())
    for kind in ("full_", "", "told_"):
        assert found[f"incremental_{kind}stall_ms"] < found[f"incremental_{kind}ms"]


def test_an_incremental_save_that_became_full_is_refused(tmp_path: Path) -> None:
    table = Table(64 * 256, 64)
    with CheckpointManager(str(tmp_path), saver="thread") as manager:
        saves = Saves(manager, table)
        with pytest.raises(StrataError, match=r"expected a save of type INCREMENTAL, got .*first save"):
            saves.save("INCREMENTAL")
        saves.save("FULL")
        table.change(100)
        with pytest.raises(StrataError, match="of the state changed since"):
            saves.save("INCREMENTAL")


def test_saves_and_loads_are_measured_with_the_given_sizes(tmp_path: Path) -> None:
    found = figures(
        "checkpoint_strata",
        tmp_path,
        STRATA_BENCH_GIB="0.004",
        STRATA_BENCH_TENSORS="2",
        STRATA_BENCH_SMALL_TENSORS="50",
    )
    assert all(value > 0 for value in found.values())
    assert found["stall_ms"] < found["durable_ms"]
    assert found["first_stall_over_warm"] == pytest.approx(found["first_stall_ms"] / found["stall_ms"])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_s3_is_compared_with_plain_obstore_and_its_server_ends(
    s3: S3Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The fixture skips the test without a server; the contender starts its own."""
    temporary = tmp_path_factory.mktemp("temporary")
    found = figures("checkpoint_s3", tmp_path, STRATA_BENCH_S3_MIB="16", TMPDIR=str(temporary))
    assert not list(temporary.iterdir())
    assert found.keys() == {
        *("s3_put_over_bare", "s3_get_over_bare", "s3_put_ms", "s3_bare_put_ms", "s3_get_ms", "s3_bare_get_ms"),
        *("s3_client_cpu_s", "s3_bare_client_cpu_s"),
    }
    assert all(value > 0 for key, value in found.items() if "cpu" not in key)  # counted in hundredths of a second
    running = [process.info["cwd"] or "" for process in psutil.process_iter(["cwd"])]
    assert not [cwd for cwd in running if cwd.startswith(str(tmp_path))]


@pytest.mark.slow
def test_vacuum_frees_the_disk_space_of_removed_objects(s3: S3Server) -> None:
    def is_given_back() -> bool:
        s3.vacuum()
        return sum(file.stat().st_size for file in (s3._directory / "data").rglob("*.dat")) < 8 * MIB

    store = open_store(s3.new_url(), s3.options())
    store.put_large("large", memoryview(os.urandom(16 * MIB)))
    store.delete(["large"])
    store.close()
    until(is_given_back, "weed frees the disk space")


def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "weed"
    broken.write_text("#!/bin/sh\necho the disk is on holiday\nexec cat\n")
    broken.chmod(0o755)
    monkeypatch.setattr(weed, "START_S", 0.5)
    server = weed.WeedServer(broken, directory=tmp_path)
    try:
        with pytest.raises(StrataError, match=r"stored no object within 0\.5 s(?s:.*)the disk is on holiday"):
            server.start()
    finally:
        server.close()
    assert list(tmp_path.iterdir()) == [broken]


def test_settings_on_the_command_line_reach_the_contenders(tmp_path: Path) -> None:
    command = ("strata.cli", "bench", "checkpoint", "--only", "raw disk", "--rounds", "1", "--json")
    ended = run(*command, "--set", "gib=0.002", "--set", "tensors=2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["figures"]["raw_write_ms"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["checkpoint", "--set", "gigs=1"], "no setting 'gigs'"),
        (["checkpoint", "--set", "gib=much"], "use a number, at least"),
        (["--all", "--set", "gib=1"], "to one benchmark"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_valid_values(flags: list[str], message: str, tmp_path: Path) -> None:
    ended = run("strata.cli", "bench", *flags, cwd=tmp_path, NO_COLOR="1", COLUMNS="400")
    assert ended.returncode == 2
    assert message in ended.stderr
