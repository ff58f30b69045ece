"""A damaged journal returns a true prefix and reports the loss, or refuses to load; it never invents anything."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.coordinator.config import JournalConfig
from strata.coordinator.journal import Damage, Entry, Journal, Record, open_journal
from strata.coordinator.journal.chain import seal
from strata.coordinator.journal.wal import hidden_commits
from strata.errors import JournalDamaged, JournalError, JournalWriteFailed

CONFIG = JournalConfig(history_events=50)
BATCH = 20
PAGE = 4096

Reopen = Callable[..., Journal]


def entry(seq: int) -> Entry:
    return Entry(f"job-{seq % 3}", "stepped", 1_700_000_000.0 + seq, b'{"step":%d,"pad":"%s"}' % (seq, b"x" * 150))


def record(seq: int) -> Record:
    e = entry(seq)
    return Record(seq, e.job_id, e.kind, e.at_s, e.payload)


def snapshot(seq: int) -> bytes:
    return b"state after %d" % seq


def fill(journal: Journal, *, num_batches: int, snapshots_at: tuple[int, ...] = ()) -> int:
    last_seq = journal.load().last_seq
    for _ in range(num_batches):
        seqs = range(last_seq + 1, last_seq + BATCH + 1)
        last_seq += BATCH
        taken = snapshot(last_seq) if last_seq in snapshots_at else None
        assert journal.append([entry(seq) for seq in seqs], snapshot=taken) == last_seq
    return last_seq


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.db"


@pytest.fixture
def opened(path: Path) -> Iterator[list[Journal]]:
    journals: list[Journal] = []
    yield journals
    for journal in journals:
        journal.close()


@pytest.fixture
def reopen(path: Path, opened: list[Journal]) -> Reopen:
    def open_again(*, readonly: bool = False) -> Journal:
        while opened:
            opened.pop().close()
        opened.append(open_journal(str(path), config=CONFIG, readonly=readonly))
        return opened[-1]

    return open_again


@pytest.fixture
def filled(path: Path) -> Path:
    """100 events with snapshots at 40 and 60."""
    journal = open_journal(str(path), config=CONFIG)
    assert fill(journal, num_batches=5, snapshots_at=(40, 60)) == 100
    journal.close()
    return path


def execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement, values).rowcount >= 1


def rows(path: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class TestRows:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ("payload = CAST('{}' AS BLOB)", "event {} does not match its checksum"),
            ("job_id = 'job-9'", "event {} does not match its checksum"),
            ("kind = 'other'", "event {} does not match its checksum"),
            ("at_s = at_s + 1", "event {} does not match its checksum"),
            ("checksum = checksum + 1", "event {} does not match its checksum"),
            ("payload = 'text'", "event {} cannot be decoded"),
            ("payload = 1099511627776", "event {} cannot be decoded"),
            ("checksum = 'text'", "event {} cannot be decoded"),
            ("seq = seq + 1000", "event {} is missing"),
        ],
    )
    @pytest.mark.parametrize("bad_seq", [61, 80, 100])
    def test_a_changed_row_ends_the_good_prefix(
        self, filled: Path, reopen: Reopen, change: str, reason: str, bad_seq: int
    ) -> None:
        execute(filled, f"UPDATE strata_events SET {change} WHERE seq = ?", bad_seq)
        journal = reopen()
        loaded = journal.load()
        assert (loaded.snapshot, loaded.snapshot_seq) == (snapshot(60), 60)
        assert loaded.records == [record(seq) for seq in range(61, bad_seq)]
        assert loaded.damage == Damage(
            seq=bad_seq,
            reason=reason.format(bad_seq),
            num_lost=101 - bad_seq,
            kept_at=f"table strata_quarantine in {filled}",
        )

    def test_undecodable_text_ends_the_good_prefix(self, filled: Path, reopen: Reopen) -> None:
        execute(filled, "UPDATE strata_events SET kind = CAST(x'fffe41' AS TEXT) WHERE seq = 80")
        loaded = reopen().load()
        assert loaded.last_seq == 79
        assert loaded.damage is not None
        assert loaded.damage.num_lost == 21

    @pytest.mark.parametrize("missing", [61, 80, 100])
    def test_a_missing_row_ends_the_good_prefix(self, filled: Path, reopen: Reopen, missing: int) -> None:
        execute(filled, "DELETE FROM strata_events WHERE seq = ?", missing)
        loaded = reopen().load()
        assert loaded.last_seq == missing - 1
        assert loaded.damage is not None
        assert loaded.damage.num_lost == 101 - missing

    def test_rows_after_the_damage_are_kept_and_appends_continue(self, filled: Path, reopen: Reopen) -> None:
        execute(filled, "UPDATE strata_events SET payload = CAST('{}' AS BLOB) WHERE seq = 98")
        journal = reopen()
        assert journal.load().last_seq == 97
        assert fill(journal, num_batches=1) == 117
        loaded = reopen().load()
        assert loaded.damage is None
        assert loaded.records == [record(seq) for seq in range(61, 118)]
        kept = rows(filled, "SELECT source, seq, payload FROM strata_quarantine ORDER BY seq")
        assert kept == [("event", 98, b"{}"), ("event", 99, entry(99).payload), ("event", 100, entry(100).payload)]

    def test_damage_in_the_history_spares_the_state_and_is_reported_when_read(
        self, filled: Path, reopen: Reopen
    ) -> None:
        execute(filled, "UPDATE strata_events SET payload = CAST('{}' AS BLOB) WHERE seq = 50")
        journal = reopen()
        loaded = journal.load()
        assert loaded.damage is None
        assert loaded.last_seq == 100
        with pytest.raises(JournalDamaged, match="event 50 does not match its checksum; continue with after_seq=50"):
            journal.read()
        assert journal.read(after_seq=50) == [record(seq) for seq in range(51, 101)]

    def test_opening_read_only_changes_nothing(self, filled: Path, reopen: Reopen) -> None:
        execute(filled, "UPDATE strata_events SET payload = CAST('{}' AS BLOB) WHERE seq = 98")
        for _ in range(2):
            damage = reopen(readonly=True).load().damage
            assert damage is not None
            assert (damage.seq, damage.num_lost) == (98, 3)
            assert "left in place" in damage.kept_at
        assert rows(filled, "SELECT count(*) FROM strata_quarantine") == [(0,)]

    def test_a_state_without_any_good_row_is_refused_instead_of_starting_empty(
        self, path: Path, reopen: Reopen
    ) -> None:
        fill(reopen(), num_batches=1)
        reopen().close()
        execute(path, "UPDATE strata_events SET payload = CAST('{}' AS BLOB) WHERE seq = 1")
        for _ in range(2):
            with pytest.raises(
                JournalDamaged, match=r"event 1 does not match .* Restore it from a backup, or move it away"
            ):
                reopen().load()
        assert rows(path, "SELECT count(*) FROM strata_events") == [(20,)]

    @pytest.mark.parametrize(
        ("table", "last_seq"), [("strata_events", 60), ("strata_meta", 100), ("strata_quarantine", 100)]
    )
    def test_a_missing_table_is_damage(self, filled: Path, reopen: Reopen, table: str, last_seq: int) -> None:
        with closing(sqlite3.connect(filled)) as connection:
            connection.execute(f"DROP TABLE {table}")
        loaded = reopen().load()
        assert loaded.last_seq == last_seq
        assert loaded.damage is not None
        assert f"the tables are missing: {table}" in loaded.damage.reason

    def test_truncated_events_without_snapshots_are_unusable(self, filled: Path, reopen: Reopen) -> None:
        with closing(sqlite3.connect(filled)) as connection:
            connection.execute("DROP TABLE strata_snapshots")
        with pytest.raises(JournalDamaged, match="the tables are missing: strata_snapshots"):
            reopen().load()


class TestSnapshots:
    def test_a_damaged_snapshot_falls_back_to_the_previous_one(self, filled: Path, reopen: Reopen) -> None:
        execute(filled, "UPDATE strata_snapshots SET payload = CAST('lies' AS BLOB) WHERE seq = 60")
        journal = reopen()
        loaded = journal.load()
        assert (loaded.snapshot, loaded.snapshot_seq) == (snapshot(40), 40)
        assert loaded.records == [record(seq) for seq in range(41, 101)]
        assert loaded.damage == Damage(
            seq=101,
            reason="the snapshot at event 60 does not match its checksum",
            num_lost=0,
            kept_at=f"table strata_quarantine in {filled}",
        )
        assert fill(journal, num_batches=1, snapshots_at=(120,)) == 120
        assert reopen().load().snapshot == snapshot(120)
        assert rows(filled, "SELECT source, seq, payload FROM strata_quarantine") == [("snapshot", 60, b"lies")]

    def test_a_damaged_first_snapshot_falls_back_to_the_events(self, path: Path, reopen: Reopen) -> None:
        fill(reopen(), num_batches=5, snapshots_at=(80,))
        reopen().close()
        execute(path, "UPDATE strata_snapshots SET chain = chain + 1")
        loaded = reopen().load()
        assert loaded.snapshot is None
        assert loaded.records == [record(seq) for seq in range(1, 101)]
        assert loaded.damage is not None

    def test_a_truncated_journal_without_a_good_snapshot_is_refused(self, path: Path, reopen: Reopen) -> None:
        fill(reopen(), num_batches=10, snapshots_at=(100, 120, 140))
        reopen().close()
        execute(path, "UPDATE strata_snapshots SET payload = CAST('lies' AS BLOB)")
        with pytest.raises(JournalDamaged, match="the snapshot at event 140 does not match"):
            reopen().load()


class TestSchema:
    def test_a_newer_schema_is_refused(self, filled: Path, reopen: Reopen) -> None:
        execute(filled, "UPDATE strata_meta SET value = ? WHERE key = 'schema'", seal("schema", "2"))
        with pytest.raises(
            JournalError, match=r"written by a newer Strata .schema 2; this version reads up to 1.; upgrade"
        ):
            reopen().load()

    @pytest.mark.parametrize("key", ["schema", "head", "truncated"])
    def test_a_damaged_setting_loses_no_event(self, filled: Path, reopen: Reopen, key: str) -> None:
        execute(filled, "UPDATE strata_meta SET value = '9 9#0' WHERE key = ?", key)
        journal = reopen()
        loaded = journal.load()
        assert loaded.records == [record(seq) for seq in range(61, 101)]
        assert (loaded.damage is not None) == (key == "head")
        assert fill(journal, num_batches=1) == 120
        assert reopen().load().damage is None

    def test_another_programs_database_is_refused_and_not_changed(self, path: Path, reopen: Reopen) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE theirs (x)")
        with pytest.raises(JournalDamaged, match="the tables are missing: strata_events"):
            reopen().load()
        assert rows(path, "SELECT name FROM sqlite_master") == [("theirs",)]


class TestFile:
    @pytest.fixture
    def large(self, path: Path) -> Path:
        """2000 events on about 120 pages; no snapshot, so that all of them count."""
        journal = open_journal(str(path), config=CONFIG)
        fill(journal, num_batches=100)
        journal.close()
        return path

    def check_prefix(self, journal: Journal, path: Path) -> int:
        loaded = journal.load()
        assert loaded.damage is not None
        assert loaded.records == [record(seq) for seq in range(1, loaded.last_seq + 1)]
        assert (loaded.damage.seq, loaded.damage.num_lost) == (loaded.last_seq + 1, 2000 - loaded.last_seq)
        assert loaded.damage.kept_at == f"{path}.damaged-1"
        return loaded.last_seq

    @pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
    def test_a_truncated_file_gives_its_good_prefix(self, large: Path, reopen: Reopen, kept: float) -> None:
        size = int(large.stat().st_size * kept)
        damaged = large.read_bytes()[:size]
        large.write_bytes(damaged)
        journal = reopen()
        last_seq = self.check_prefix(journal, large)
        assert last_seq > 2000 * kept * 0.5
        assert Path(f"{large}.damaged-1").read_bytes() == damaged
        assert fill(journal, num_batches=1) == last_seq + BATCH
        loaded = reopen().load()
        assert loaded.damage is None
        assert loaded.records == [record(seq) for seq in range(1, last_seq + BATCH + 1)]

    @pytest.mark.parametrize("page", [40, 60, 100])
    def test_garbage_over_a_page_ends_the_prefix_there(self, large: Path, reopen: Reopen, page: int) -> None:
        overwrite(large, page * PAGE, b"\xa5" * PAGE)
        last_seq = self.check_prefix(reopen(), large)
        assert 0 < last_seq < 2000
        assert oct(large.stat().st_mode & 0o777) == "0o600"

    def test_damage_before_the_snapshot_loses_only_history(self, filled: Path, reopen: Reopen) -> None:
        content = filled.read_bytes()
        first = content.index(b'"step":30,') // PAGE
        assert content.index(b'"step":61,') // PAGE > first
        overwrite(filled, first * PAGE, b"\xa5" * PAGE)
        journal = reopen()
        loaded = journal.load()
        assert loaded.damage is not None
        assert loaded.damage.num_lost == 0
        assert (loaded.snapshot, loaded.last_seq) == (snapshot(60), 100)
        assert journal.read() == [record(seq) for seq in range(61, 101)]
        assert fill(journal, num_batches=2, snapshots_at=(120, 140)) == 140

    def test_reading_a_damaged_file_does_not_change_it(self, large: Path, reopen: Reopen) -> None:
        overwrite(large, 60 * PAGE, b"\xa5" * PAGE)
        before = large.read_bytes()
        loaded = reopen(readonly=True).load()
        assert loaded.records == [record(seq) for seq in range(1, loaded.last_seq + 1)]
        assert loaded.damage is not None
        assert "left in place" in loaded.damage.kept_at
        assert large.read_bytes() == before

    def test_a_header_that_claims_read_only_is_damage(self, large: Path, reopen: Reopen) -> None:
        overwrite(large, 18, b"\x07")
        journal = reopen()
        loaded = journal.load()
        assert loaded.last_seq == 2000
        assert loaded.damage is not None
        assert (loaded.damage.reason, loaded.damage.num_lost) == ("attempt to write a readonly database", 0)
        assert journal.append([entry(2001)]) == 2001

    def test_a_changed_definition_of_a_table_is_damage(self, large: Path, reopen: Reopen) -> None:
        """It would change what is stored from now on."""
        overwrite(large, large.read_bytes().index(b"at_s DOUBLE") + 5, b"DATE  ")
        journal = reopen()
        loaded = journal.load()
        assert loaded.last_seq == 2000
        assert loaded.damage is not None
        assert (loaded.damage.reason, loaded.damage.num_lost) == ("the definitions of the tables are damaged", 0)
        assert journal.append([entry(2001)]) == 2001
        assert reopen().load().last_seq == 2001

    @pytest.mark.parametrize("garbage", [b"\xa5" * 100, b"\x00" * PAGE, b"not a database, just a text file\n" * 200])
    def test_a_destroyed_header_is_refused_with_the_cure(self, large: Path, reopen: Reopen, garbage: bytes) -> None:
        overwrite(large, 0, garbage)
        before = large.read_bytes()
        for _ in range(2):
            with pytest.raises(JournalDamaged, match=r"Restore it from a backup, or move it away to start empty"):
                reopen().load()
        assert large.read_bytes() == before

    def test_an_empty_file_beside_a_full_log_is_not_a_new_state(self, path: Path, reopen: Reopen) -> None:
        journal = reopen()
        fill(journal, num_batches=1)
        log = Path(f"{path}-wal").read_bytes()
        journal.close()
        path.write_bytes(b"")
        Path(f"{path}-wal").write_bytes(log)
        with pytest.raises(JournalDamaged, match="is empty, but its log"):
            reopen()
        path.unlink()
        with pytest.raises(JournalDamaged, match="is missing, but its log"):
            reopen()

    def test_every_repair_keeps_its_own_copy(self, large: Path, reopen: Reopen) -> None:
        for number in (1, 2):
            overwrite(large, (90 - 30 * number) * PAGE, b"\xa5" * PAGE)
            damage = reopen().load().damage
            assert damage is not None
            assert damage.kept_at == f"{large}.damaged-{number}"
            reopen().close()

    def test_damage_found_by_an_append_is_repaired_by_the_next_load(self, large: Path, reopen: Reopen) -> None:
        journal = reopen()
        assert journal.load().damage is None
        # Behind the back of the open journal, like a failing disk.
        last = large.read_bytes().index(b'"step":2000,') // PAGE
        overwrite(large, last * PAGE, b"\xa5" * PAGE)
        execute(large, "UPDATE strata_meta SET key = key WHERE key = 'schema'")  # so that no page comes from the cache
        with pytest.raises(JournalWriteFailed, match="malformed"):
            journal.append([entry(2001)])
        last_seq = self.check_prefix(journal, large)
        assert journal.append([entry(last_seq + 1)]) == last_seq + 1


class Cut(BaseException):
    """The power fails."""


class TestCutOffRepair:
    """A repair may be interrupted at any step; the next start finishes it. Half of the state is in SQLite's log."""

    @pytest.mark.parametrize("num_steps", range(6))
    def test_the_next_start_finishes_an_interrupted_repair(
        self, filled: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch, num_steps: int
    ) -> None:
        log = Path(f"{filled}-wal")
        journal = reopen()
        journal.load()
        journal.append([entry(101)])
        content, log_content = filled.read_bytes(), log.read_bytes()
        journal.close()
        # As left by a killed process, with a damaged page in the history.
        filled.write_bytes(content)
        log.write_bytes(log_content)
        overwrite(filled, content.index(b'"step":30,') // PAGE * PAGE, b"\xa5" * PAGE)
        steps = iter(range(num_steps))

        def cut_off(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if next(steps, None) is None:
                    raise Cut
                return function(*args, **kwargs)

            return wrapper

        journal = reopen()
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", cut_off(os.link))
            patch.setattr(os, "fsync", cut_off(os.fsync))
            patch.setattr(Path, "replace", cut_off(Path.replace))
            with pytest.raises(Cut):
                journal.load()
        journal = reopen()
        loaded = journal.load()
        assert loaded.last_seq == 101
        assert loaded.damage is not None
        assert loaded.damage.num_lost == 0
        assert Path(f"{filled}.damaged-1").exists()
        assert not list(filled.parent.glob("*.rebuilt*"))
        assert journal.append([entry(102)]) == 102
        assert reopen().load().damage is None


class TestLog:
    """The state of a killed coordinator: the newest transactions are only in SQLite's log."""

    @pytest.fixture
    def killed(self, path: Path, tmp_path: Path) -> Path:
        journal = open_journal(str(path), config=CONFIG)
        fill(journal, num_batches=5)
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", tmp_path / f"copy{suffix}")
        journal.close()
        for suffix in ("", "-wal"):
            (tmp_path / f"copy{suffix}").replace(f"{path}{suffix}")
        return path

    def test_an_intact_log_hides_nothing(self, killed: Path, reopen: Reopen) -> None:
        assert hidden_commits(Path(f"{killed}-wal")) == 0
        loaded = reopen().load()
        assert (loaded.last_seq, loaded.damage) == (100, None)

    def test_a_damaged_frame_that_hides_commits_is_reported(self, killed: Path, reopen: Reopen) -> None:
        log = Path(f"{killed}-wal")
        overwrite(log, log.read_bytes().index(b'"step":30,'), b"'")
        loaded = reopen().load()
        assert loaded.records == [record(seq) for seq in range(1, 21)]
        assert loaded.damage == Damage(
            seq=21,
            reason="the end of the write-ahead log is truncated or damaged",
            num_lost=3,
            kept_at=f"{killed}.damaged-1",
        )
        assert Path(f"{killed}.damaged-1-wal").exists()

    def test_a_damaged_log_header_is_not_mistaken_for_an_empty_log(self, killed: Path, reopen: Reopen) -> None:
        overwrite(Path(f"{killed}-wal"), 16, b"\xa5")
        with pytest.raises(JournalDamaged, match="the end of the write-ahead log is truncated or damaged"):
            reopen().load()

    def test_a_truncated_log_loses_only_the_missing_part(self, killed: Path, reopen: Reopen) -> None:
        """Nothing in the files distinguishes this from a crash; the state is a true prefix."""
        log = Path(f"{killed}-wal")
        with log.open("r+b") as file:
            file.truncate(log.read_bytes().index(b'"step":90,'))
        loaded = reopen().load()
        assert (loaded.last_seq, loaded.damage) == (80, None)


@dataclass(frozen=True, repr=False)
class Files:
    killed: dict[str, bytes]
    closed: bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A state that was closed, and one whose coordinator was killed; both end at event 200."""
    path = tmp_path_factory.mktemp("journal") / "coordinator.db"
    journal = open_journal(str(path), config=CONFIG)
    fill(journal, num_batches=8, snapshots_at=(60, 100, 120))
    journal.close()
    journal = open_journal(str(path), config=CONFIG)
    assert fill(journal, num_batches=2) == 200
    killed = {"": path.read_bytes(), "-wal": Path(f"{path}-wal").read_bytes()}
    journal.close()
    return Files(killed=killed, closed=path.read_bytes())


ANYWHERE = st.integers(0, 100_000)
# Half of the flips hit the start of a page, where the structure is.
STRUCTURE = st.builds(lambda page, byte: page * PAGE + byte, st.integers(0, 20), st.integers(0, 120))
FLIPS = st.lists(st.tuples(ANYWHERE | STRUCTURE, st.integers(1, 255)), min_size=1, max_size=6)


def flipped(content: bytes, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(content)
    for offset, bits in flips:
        changed[offset % len(changed)] ^= bits
    return bytes(changed)


class TestAnyByte:
    """Flip arbitrary bytes: what is read was written, and what is lost is reported."""

    @settings(max_examples=100)
    @given(flips=FLIPS)
    def test_in_a_closed_state(self, files: Files, flips: list[tuple[int, int]]) -> None:
        self.check({"": flipped(files.closed, flips)}, num_silent=0)

    @settings(max_examples=60)
    @given(where=st.sampled_from(["", "-wal"]), flips=FLIPS)
    def test_in_a_killed_state(self, files: Files, where: str, flips: list[tuple[int, int]]) -> None:
        damaged = files.killed | {where: flipped(files.killed[where], flips)}
        # A damaged last transaction of the log looks as if the crash had interrupted it.
        self.check(damaged, num_silent=BATCH if where == "-wal" else 0)

    def check(self, files: dict[str, bytes], *, num_silent: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "coordinator.db"
            for suffix, content in files.items():
                Path(f"{path}{suffix}").write_bytes(content)
            with closing(open_journal(str(path), config=CONFIG)) as journal:
                try:
                    last_seq = self.check_load(journal, num_silent)
                except JournalDamaged:
                    return
                self.check_history(journal, last_seq)
                assert journal.append([entry(last_seq + 1)]) == last_seq + 1
            with closing(open_journal(str(path), config=CONFIG)) as journal:
                loaded = journal.load()
                assert (loaded.last_seq, loaded.damage) == (last_seq + 1, None)

    def check_load(self, journal: Journal, num_silent: int) -> int:
        loaded = journal.load()
        assert loaded.snapshot == (snapshot(loaded.snapshot_seq) if loaded.snapshot_seq else None)
        assert loaded.records == [record(seq) for seq in range(loaded.snapshot_seq + 1, loaded.last_seq + 1)]
        num_lost = 200 - loaded.last_seq
        if loaded.damage is None:
            assert num_lost in (0, num_silent)
        else:
            assert loaded.damage.seq == loaded.last_seq + 1
        return loaded.last_seq

    def check_history(self, journal: Journal, last_seq: int) -> None:
        try:
            found = journal.read()
        except JournalDamaged:
            return
        assert found == [record(r.seq) for r in found]
        assert all(r.seq <= last_seq for r in found)
