"""`strata journal backup` of a coordinator that runs and writes, and restoring from it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
from postgres import PostgresServer
from servers import EAGER_CLIENT, STRATA, CoordinatorProcess

from strata.cli.exit_codes import ExitCode
from strata.coordinator.backup import back_up
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import ConfigError, JournalDamaged


def strata(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, "journal", "backup", *args], capture_output=True, text=True, check=False)


def test_a_backup_under_load_contains_everything_acknowledged_before_it(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    target = tmp_path / "backups" / "coordinator.db"
    target.parent.mkdir()
    acknowledged = 0
    stopping = threading.Event()
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        worker = client.register_worker("a", job_id="resnet")
        client.register_dataset("d", job_id="resnet", total_samples=100_000, shard_size=1)
        shards = worker.shards("d")
        begun = threading.Event()

        def acknowledge() -> None:
            nonlocal acknowledged
            while not stopping.is_set():
                worker.ack([shards[acknowledged]])
                acknowledged += 1
                if acknowledged == 50:
                    begun.set()

        thread = threading.Thread(target=acknowledge)
        thread.start()
        assert begun.wait(30)
        num_before = acknowledged
        made = strata(str(target), "--state", str(coordinator.state), "--json")
        num_after = acknowledged + 1
        stopping.set()
        thread.join(30)
    assert (made.returncode, made.stderr) == (0, "")
    assert json.loads(made.stdout)["jobs"] == 1
    assert [path.name for path in target.parent.iterdir()] == ["coordinator.db"]
    assert target.stat().st_mode & 0o777 == 0o600
    with (
        EmbeddedCoordinator(CoordinatorConfig(state=str(target))) as restored,
        CoordinatorClient(restored.address) as client,
    ):
        (dataset,) = client.list_datasets(job_id="resnet")
        assert num_before <= dataset.num_done <= num_after
        assert [w.worker_id for w in client.list_workers(job_id="resnet").workers] == ["a"]


def test_a_postgresql_dump_is_a_backup_as_documented(postgres: PostgresServer, tmp_path: Path) -> None:
    state, other = postgres.new_state(), postgres.new_state()
    dump = str(tmp_path / "coordinator.dump")
    with (
        EmbeddedCoordinator(CoordinatorConfig(state=state)) as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        worker = client.register_worker("a", job_id="resnet")
        client.register_dataset("d", job_id="resnet", total_samples=100, shard_size=10)
        worker.ack(worker.shards("d")[:4])
        run(postgres, "pg_dump", "--format=custom", "--table=strata_*", f"--file={dump}", plain(state))
        worker.ack(worker.shards("d")[:1])
    run(postgres, "pg_restore", "--clean", "--if-exists", f"--dbname={plain(other)}", dump)
    with (
        EmbeddedCoordinator(CoordinatorConfig(state=other)) as restored,
        CoordinatorClient(restored.address) as client,
    ):
        (dataset,) = client.list_datasets(job_id="resnet")
        assert dataset.num_done == 4
        assert [w.worker_id for w in client.list_workers(job_id="resnet").workers] == ["a"]


def plain(state: str) -> str:
    """Return the URL in the form that PostgreSQL's own tools accept."""
    return state.replace("postgresql+psycopg://", "postgresql://")


def run(postgres: PostgresServer, program: str, *arguments: str) -> None:
    ran = subprocess.run([postgres.binaries / program, *arguments], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_backup_overwrites_nothing(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    refused = strata(str(tmp_path / "precious"), "--state", str(coordinator.state))
    assert refused.returncode == ExitCode.USAGE
    assert "name a new file in an existing directory" in refused.stderr
    assert (tmp_path / "precious").read_text() == "keep me"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("memory", "nothing to back up"),
        ("postgresql+psycopg://strata:secret@db/strata", "pg_dump"),
        ("nowhere.db", "no state at"),
        ("sqlite:///nowhere.db", "no state at"),
    ],
)
def test_a_state_without_a_backup_is_refused_with_the_cure(state: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        back_up(state, tmp_path / "backup.db")
    assert "secret" not in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_state_gives_no_backup(tmp_path: Path) -> None:
    state = tmp_path / "coordinator.db"
    with (
        EmbeddedCoordinator(CoordinatorConfig(state=str(state))) as coordinator,
        CoordinatorClient(coordinator.address) as client,
    ):
        client.register_worker("a").deregister()
    with closing(sqlite3.connect(state)) as database:
        database.execute("UPDATE strata_events SET payload = X'00' WHERE seq = 2")
        database.commit()
    with pytest.raises(JournalDamaged, match="damaged from entry 2 on"):
        back_up(str(state), tmp_path / "backup.db")
    assert not (tmp_path / "backup.db").exists()
