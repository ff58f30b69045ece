"""Every journal passes the same suite; below it are the promises of journals in files."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_contract import CONFIG, JournalContract, entries, records
from postgres import PostgresServer

from strata.coordinator.config import JournalConfig
from strata.coordinator.journal import Journal, MemoryJournal, describe, open_journal, open_leadership
from strata.errors import ConfigError, JournalFenced, JournalLocked, JournalWriteFailed


class MemoryState:
    def __init__(self) -> None:
        self._journal: MemoryJournal | None = None

    def open(self, config: JournalConfig) -> Journal:
        self._journal = MemoryJournal(config)
        return self._journal

    def reopen(self, journal: Journal, config: JournalConfig) -> Journal:
        return journal

    def clear(self) -> None:
        pass


class DatabaseState:
    """For every journal in a database; `clear` creates a new one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_states = 0
        self._open: list[Journal] = []

    @property
    def url(self) -> str:
        return str(self._directory / f"coordinator-{self._num_states}.db")

    def open(self, config: JournalConfig) -> Journal:
        self._open.append(open_journal(self.url, config=config))
        return self._open[-1]

    def reopen(self, journal: Journal, config: JournalConfig) -> Journal:
        journal.close()
        return self.open(config)

    def clear(self) -> None:
        for journal in self._open:
            journal.close()
        self._open.clear()
        self._num_states += 1


class TestMemoryJournal(JournalContract):
    @pytest.fixture
    def state(self) -> MemoryState:
        return MemoryState()


class TestSqliteJournal(JournalContract):
    @pytest.fixture
    def state(self, tmp_path: Path) -> Iterator[DatabaseState]:
        state = DatabaseState(tmp_path)
        yield state
        state.clear()


class PostgresState:
    """A journal opened by a leader, behind the fence; `clear` creates a new database."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._url = server.new_state()
        self._open: list[Journal] = []

    def open(self, config: JournalConfig) -> Journal:
        leadership = open_leadership(self._url)
        term = leadership.try_acquire("test", "here:1")
        leadership.release()  # no other candidate takes it, so the term continues; and the next one need not wait
        leadership.close()
        assert term is not None
        self._open.append(open_journal(self._url, config=config, term=term))
        return self._open[-1]

    def reopen(self, journal: Journal, config: JournalConfig) -> Journal:
        journal.close()
        return self.open(config)

    def clear(self) -> None:
        for journal in self._open:
            journal.close()
        self._open.clear()
        self._server.sql(
            "DROP TABLE IF EXISTS strata_events, strata_snapshots, strata_meta, strata_quarantine", self._url
        )


class TestPostgresJournal(JournalContract):
    @pytest.fixture
    def state(self, postgres: PostgresServer) -> Iterator[PostgresState]:
        state = PostgresState(postgres)
        yield state
        state.clear()

    def test_an_append_of_an_older_term_writes_nothing(self, state: PostgresState) -> None:
        old = state.open(CONFIG)
        old.load()
        old.append(entries(1))
        new = state.open(CONFIG)
        assert new.load().last_seq == 1
        with pytest.raises(JournalFenced, match=r"another coordinator leads .* term 1 is over"):
            old.append(entries(1, start=2))
        with pytest.raises(JournalFenced):
            old.load()
        assert new.append(entries(1, start=2)) == 2
        assert new.read() == records(entries(2))

    def test_the_state_of_a_running_coordinator_can_be_read(
        self, state: PostgresState, postgres: PostgresServer
    ) -> None:
        journal = state.open(CONFIG)
        journal.load()
        journal.append(entries(3), snapshot=b"after 3")
        looking = open_journal(state._url, readonly=True)
        assert looking.load().snapshot == b"after 3"
        assert looking.read() == records(entries(3))
        with pytest.raises(JournalWriteFailed, match="reading only"):
            looking.append(entries(1))
        looking.close()

    def test_the_journal_recovers_from_lost_connections(self, state: PostgresState, postgres: PostgresServer) -> None:
        journal = state.open(CONFIG)
        journal.load()
        journal.append(entries(2))
        assert postgres.cut(state._url) >= 1
        with pytest.raises(JournalWriteFailed, match="acknowledged data is safe"):
            journal.append(entries(1, start=3))
        assert journal.load().last_seq == 2
        assert journal.append(entries(1, start=3)) == 3


class TestFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "new" / "directory" / "coordinator.db"

    @pytest.fixture
    def journal(self, path: Path) -> Iterator[Journal]:
        journal = open_journal(str(path), config=CONFIG)
        journal.load()
        yield journal
        journal.close()

    def test_created_files_are_private_to_the_user(self, path: Path, journal: Journal) -> None:
        journal.append(entries(1))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        assert modes == dict.fromkeys((f"coordinator.db{end}" for end in ("", ".lock", "-wal", "-shm")), 0o600)
        for directory in (path.parent, path.parent.parent):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700

    def test_an_existing_directory_keeps_its_mode(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        open_journal(str(tmp_path / "coordinator.db")).close()
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755

    def test_an_empty_file_is_a_new_state(self, tmp_path: Path) -> None:
        path = tmp_path / "coordinator.db"
        path.touch()
        journal = open_journal(str(path))
        assert journal.load().last_seq == 0
        assert journal.append(entries(1)) == 1
        journal.close()

    def test_a_second_coordinator_is_refused_with_the_holder_of_the_state(self, path: Path, journal: Journal) -> None:
        with pytest.raises(JournalLocked, match=rf"is open in process {os.getpid()}; stop that coordinator, or use"):
            open_journal(str(path))
        journal.append(entries(1))
        journal.close()
        again = open_journal(str(path))
        assert again.load().last_seq == 1
        again.close()

    def test_a_link_to_the_state_is_the_same_state(self, path: Path, journal: Journal) -> None:
        link = path.with_name("link.db")
        link.symlink_to(path)
        with pytest.raises(JournalLocked):
            open_journal(str(link))

    def test_the_state_of_a_running_coordinator_can_be_read(self, path: Path, journal: Journal) -> None:
        journal.append(entries(3), snapshot=b"after 3")
        journal.append(entries(2, start=4))
        looking = open_journal(str(path), readonly=True)
        loaded = looking.load()
        assert (loaded.snapshot, loaded.records) == (b"after 3", records(entries(5))[3:])
        journal.append(entries(1, start=6))
        assert looking.read() == records(entries(6))
        with pytest.raises(JournalWriteFailed, match="reading only"):
            looking.append(entries(1))
        looking.close()
        assert journal.append(entries(1, start=7)) == 7

    def test_reading_a_missing_state_creates_nothing(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="is missing"):
            open_journal(str(path), readonly=True)
        assert not path.parent.exists()

    def test_the_size_is_that_of_the_files(self, journal: Journal) -> None:
        before = journal.size_bytes()
        journal.append(entries(1000))
        assert journal.size_bytes() > before + 10_000

    def test_the_file_stays_bounded_when_snapshots_are_taken(self, path: Path, journal: Journal) -> None:
        sizes = []
        for i in range(40):
            journal.append(entries(500, start=500 * i), snapshot=b"s" * 10_000)
            sizes.append(path.stat().st_size)
        assert sizes[-1] <= sizes[10] * 1.2
        assert len(journal.read(limit=10_000)) == 500


class TestOpen:
    def test_memory(self) -> None:
        assert isinstance(open_journal("memory"), MemoryJournal)
        assert describe("memory") == "memory"

    def test_no_state_means_the_users_state_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        open_journal("").close()
        assert (tmp_path / "strata" / "coordinator.db").is_file()
        assert describe("") == str(tmp_path / "strata" / "coordinator.db")

    def test_the_home_directory_may_be_written_as_a_tilde(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        open_journal("~/a.db").close()
        open_journal("sqlite:///~/b.db").close()
        assert {"a.db", "b.db"} <= {file.name for file in tmp_path.iterdir()}

    def test_a_sqlite_url_is_a_path(self, tmp_path: Path) -> None:
        journal = open_journal(f"sqlite:///{tmp_path}/by-url.db")
        journal.load()
        journal.close()
        assert (tmp_path / "by-url.db").is_file()

    def test_a_name_with_special_characters_is_only_a_name(self, tmp_path: Path) -> None:
        path = tmp_path / "a?mode=ro&[x]*#%20 ü.db"
        journal = open_journal(str(path))
        journal.load()
        journal.append(entries(1))
        journal.close()
        assert path.stat().st_size > 0

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ("sqlite://", "contains no path; use sqlite:///PATH or 'memory'"),
            ("sqlite:///:memory:", "contains no path"),
            ("mysql://root:secret@db/x", "mysql is not supported; use a path"),
            ("postgresql+asyncpg://u:secret@db/x", "is not supported"),
            ("://secret", "is not a valid database URL"),
            ("postgresql://u:secret@db:port/x", "is not a valid database URL"),
        ],
    )
    def test_a_state_that_cannot_be_used_is_refused_with_the_cure(self, state: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as refusal:
            open_journal(state)
        assert refusal.value.field == "state"
        assert "secret" not in str(refusal.value)

    def test_a_path_that_cannot_be_used_is_refused_with_the_cure(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="another state"):
            open_journal(str(tmp_path / "file" / "coordinator.db"))
        with pytest.raises(ConfigError, match="is a directory"):
            open_journal(str(tmp_path))

    def test_a_missing_driver_is_named_with_the_command_that_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(ConfigError, match=r"pip install 'strata-runtime\[postgres\]'") as refusal:
            open_journal("postgresql://user:secret@db/strata")
        assert "secret" not in str(refusal.value)

    def test_a_description_hides_the_password(self) -> None:
        assert describe("postgresql://user:secret@db/strata") == "postgresql+psycopg://user:***@db/strata"
        assert describe("postgresql+psycopg://u@db/strata?password=secret") == "postgresql+psycopg://u@db/strata"
