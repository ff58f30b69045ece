"""Real processes die while they append: acknowledged batches are stored, and no batch is stored in part.

The state continues from round to round, like that of an unlucky coordinator. The contents of event n, and its batch,
follow from n alone, so that the parent can check all of it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

from strata.coordinator.config import JournalConfig
from strata.coordinator.journal import Entry, Journal, Loaded, Record, open_journal
from strata.errors import JournalWriteFailed

CONFIG = JournalConfig(history_events=30)
SNAPSHOT_EVERY_BATCHES = 3
ANSWER_TIMEOUT_S = 20.0

# Children are forked from a small server that has imported everything and has no threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["strata.coordinator.journal", "pytest", "sqlalchemy"])


def entry(seq: int) -> Entry:
    return Entry(
        f"job-{seq % 3}", "stepped", 1_700_000_000.0 + seq, b'{"step":%d,"pad":"%s"}' % (seq, b"x" * (seq % 211))
    )


def record(seq: int) -> Record:
    e = entry(seq)
    return Record(seq, e.job_id, e.kind, e.at_s, e.payload)


def batch_size(start_seq: int) -> int:
    return 1 + (start_seq * 2_654_435_761 >> 7) % 40


def snapshot(seq: int) -> bytes:
    return b"state after %d" % seq + b"." * 5_000


def append_batch(journal: Journal, last_seq: int, *, with_snapshot: bool) -> int:
    end = last_seq + batch_size(last_seq + 1)
    taken = snapshot(end) if with_snapshot else None
    return journal.append([entry(seq) for seq in range(last_seq + 1, end + 1)], snapshot=taken)


def check(loaded: Loaded) -> None:
    assert loaded.snapshot == (snapshot(loaded.snapshot_seq) if loaded.snapshot_seq else None)
    assert loaded.records == [record(seq) for seq in range(loaded.snapshot_seq + 1, loaded.last_seq + 1)]
    # The log may end in a commit that was never acknowledged; reporting it is not a loss.
    assert loaded.damage is None or loaded.damage.num_lost == 0


def load(path: Path) -> Loaded:
    journal = open_journal(str(path), config=CONFIG)
    try:
        loaded = journal.load()
        check(loaded)
        history = journal.read(limit=100_000)
        assert history == [record(seq) for seq in range(loaded.last_seq - len(history) + 1, loaded.last_seq + 1)]
        assert len(history) >= min(loaded.last_seq, CONFIG.history_events)
        return loaded
    finally:
        journal.close()


class Child:
    """A process that runs `target(connection, *args)`."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._connection, theirs = PROCESSES.Pipe(duplex=False)
        self._process = PROCESSES.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Return the next message of the child, or None when it is dead."""
        assert self._connection.poll(ANSWER_TIMEOUT_S), "the child neither answers nor dies"
        try:
            return self._connection.recv()
        except EOFError:
            return None

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> int:
        self._process.join(ANSWER_TIMEOUT_S)
        exit_code = self._process.exitcode
        assert exit_code is not None
        self._process.close()
        self._connection.close()
        return exit_code


def append_for_ever(connection: Connection, path: str) -> None:
    journal = open_journal(path, config=CONFIG)
    last_seq = journal.load().last_seq
    connection.send(last_seq)
    num_batches = 0
    while True:
        num_batches += 1
        last_seq = append_batch(journal, last_seq, with_snapshot=num_batches % SNAPSHOT_EVERY_BATCHES == 0)
        connection.send(last_seq)


@pytest.mark.parametrize("seed", range(3))
def test_everything_acknowledged_survives_a_kill_at_any_moment(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "coordinator.db"
    last_seq = 0
    for _ in range(15):
        child = Child(append_for_ever, str(path))
        acknowledged = child.receive()
        assert acknowledged == last_seq
        for _ in range(rng.randrange(8)):
            acknowledged = child.receive()
        # The moment of death, not a wait: somewhere in the next batches.
        dies_at_s = time.perf_counter() + rng.random() * 0.004
        while time.perf_counter() < dies_at_s:
            pass
        child.kill()
        while (answer := child.receive()) is not None:
            acknowledged = answer
        assert child.join() == -signal.SIGKILL
        last_seq = load(path).last_seq
        assert last_seq in (acknowledged, acknowledged + batch_size(acknowledged + 1))
    assert last_seq > 200


class Points:
    """Counts the points at which a process could die, and dies at one of them."""

    def __init__(self, dies_at: int) -> None:
        self._dies_at = dies_at
        self.names: list[str] = []

    def reach(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        def after_statement(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if not statement.startswith(("SELECT", "PRAGMA")):  # these change nothing
                self.reach(f"after {' '.join(statement.split()[:3])}")

        sqlalchemy.event.listen(Engine, "after_cursor_execute", after_statement)
        commit = DefaultDialect.do_commit

        def do_commit(dialect: DefaultDialect, connection: Any) -> None:
            self.reach("before COMMIT")
            commit(dialect, connection)
            self.reach("after COMMIT")

        DefaultDialect.do_commit = do_commit
        for owner, name in ((os, "link"), (os, "fsync"), (Path, "replace"), (Path, "unlink")):
            self._around(owner, name)

    def _around(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.reach(f"after {name}")
            return result

        setattr(owner, name, wrapper)


def append_and_die(connection: Connection, path: str, dies_at: int) -> None:
    """An append that does everything possible: events, a snapshot, and the truncation it allows."""
    journal = open_journal(path, config=CONFIG)
    last_seq = journal.load().last_seq
    points = Points(dies_at)
    points.install()
    append_batch(journal, last_seq, with_snapshot=True)
    points.reach("before the answer")
    connection.send(points.names)


def load_and_die(connection: Connection, path: str, dies_at: int) -> None:
    points = Points(dies_at)
    points.install()
    journal = open_journal(path, config=CONFIG)
    journal.load()
    points.reach("before the answer")
    connection.send(points.names)


def every_point(
    target: Callable[..., None], template: Path, work: Path, look: Callable[[Path], Loaded]
) -> tuple[list[str], list[Loaded]]:
    """Let a child die at each point in turn, each time on a new copy of the template, and load what it left.

    Return the names of all points, and the state after each death; the last child lives.
    """
    found: list[Loaded] = []
    while True:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        child = Child(target, str(work / "coordinator.db"), len(found) + 1)
        names = child.receive()
        assert child.join() == (-signal.SIGKILL if names is None else 0)
        found.append(look(work / "coordinator.db"))
        if names is not None:
            assert len(found) == len(names) + 1
            return names, found


def test_a_kill_at_any_point_of_an_append_leaves_all_or_none_of_the_batch(tmp_path: Path) -> None:
    template = tmp_path / "template"
    journal = open_journal(str(template / "coordinator.db"), config=CONFIG)
    last_seq = journal.load().last_seq
    for _ in range(9):
        last_seq = append_batch(journal, last_seq, with_snapshot=True)
    journal.close()
    new_seq = last_seq + batch_size(last_seq + 1)

    names, found = every_point(append_and_die, template, tmp_path / "work", load)

    expected = [
        "BEGIN",
        "INSERT INTO strata_events",
        "INSERT INTO strata_snapshots",
        "DELETE FROM strata_events",
        "COMMIT",
    ]
    assert {f"after {what}" for what in expected} <= set(names)
    # Absent up to the commit, present after it.
    num_absent = names.index("after COMMIT")
    assert [loaded.last_seq for loaded in found] == [last_seq] * num_absent + [new_seq] * (len(found) - num_absent)
    assert all(loaded.snapshot_seq == loaded.last_seq for loaded in found)


def test_a_kill_at_any_point_of_creating_a_state_leaves_a_new_state(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    names, found = every_point(load_and_die, template, tmp_path / "work", load)
    assert {"after CREATE TABLE strata_events", "before COMMIT", "after replace"} <= set(names)
    assert found == [Loaded(snapshot=None, snapshot_seq=0, records=[])] * len(found)


@pytest.mark.slow
def test_a_kill_at_any_point_of_a_repair_is_finished_by_the_next_start(tmp_path: Path) -> None:
    template = tmp_path / "template"
    path = template / "coordinator.db"
    journal = open_journal(str(path), config=CONFIG)
    last_seq = journal.load().last_seq
    for num_batches in range(1, 21):
        last_seq = append_batch(journal, last_seq, with_snapshot=num_batches == 10)
    journal.close()
    content = bytearray(path.read_bytes())
    page = content.index(b'"step":%d,' % (last_seq - 50)) // 4096 * 4096
    content[page : page + 4096] = b"\xa5" * 4096
    path.write_bytes(content)

    def look(work: Path) -> Loaded:
        journal = open_journal(str(work), config=CONFIG)
        loaded = journal.load()
        journal.close()
        assert work.with_name("coordinator.db.damaged-1").read_bytes() == bytes(content)
        assert not list(work.parent.glob("*.rebuilt*"))
        return loaded

    names, found = every_point(load_and_die, template, tmp_path / "work", look)

    assert {"after link", "after unlink", "after replace", "before COMMIT"} <= set(names)
    good_seq = found[0].last_seq
    assert last_seq - 100 < good_seq < last_seq - 50
    for loaded in found:
        assert loaded.last_seq == good_seq
        assert loaded.records == [record(seq) for seq in range(loaded.snapshot_seq + 1, good_seq + 1)]
    # Reported by every start until one has completed the repair.
    last_commit = len(names) - 1 - names[::-1].index("after COMMIT")
    assert all(loaded.damage is not None for loaded in found[:last_commit])


def append_until_refused(journal: Journal, last_seq: int) -> tuple[int, str]:
    while True:
        try:
            last_seq = append_batch(journal, last_seq, with_snapshot=False)
        except JournalWriteFailed as error:
            return last_seq, str(error)


def run_out_of_space(connection: Connection, path: str) -> None:
    journal = open_journal(path, config=CONFIG)
    last_seq = journal.load().last_seq
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    last_seq, refused = append_until_refused(journal, last_seq)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    connection.send((last_seq, refused, append_batch(journal, last_seq, with_snapshot=True)))
    journal.close()


def test_an_append_fails_at_the_file_size_limit_and_a_later_one_works(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    child = Child(run_out_of_space, str(path))
    last_seq, refused, new_seq = child.receive()
    assert child.join() == 0
    assert last_seq > 100
    assert refused.startswith(f"cannot write {path}: ")
    assert new_seq == last_seq + batch_size(last_seq + 1)
    assert load(path).last_seq == new_seq


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"cannot mount a tmpfs: {mounted.stderr}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_is_reported_and_appends_resume_with_free_space(small_disk: Path) -> None:
    path = small_disk / "coordinator.db"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    journal = open_journal(str(path), config=CONFIG)
    last_seq = journal.load().last_seq
    last_seq, refused = append_until_refused(journal, last_seq)
    assert f"cannot write {path}: disk full. Free some space" in refused
    assert last_seq > 100
    with pytest.raises(JournalWriteFailed, match="disk full"):
        append_batch(journal, last_seq, with_snapshot=False)
    loaded = journal.load()
    check(loaded)
    assert loaded.last_seq == last_seq
    ballast.unlink()
    assert append_batch(journal, last_seq, with_snapshot=True) == last_seq + batch_size(last_seq + 1)
    journal.close()
    assert load(path).last_seq == last_seq + batch_size(last_seq + 1)


def fill_the_disk(connection: Connection, path: str) -> None:
    journal = open_journal(path, config=CONFIG)
    connection.send(append_until_refused(journal, journal.load().last_seq)[0])
    signal.pause()


def test_a_full_disk_leaves_a_complete_state(small_disk: Path) -> None:
    """The coordinator dies while the disk is full; the next one starts when there is space."""
    path = small_disk / "coordinator.db"
    child = Child(fill_the_disk, str(path))
    last_seq = child.receive()
    child.kill()
    child.join()
    kept = small_disk.parent / "kept"
    shutil.copytree(small_disk, kept)
    assert load(kept / "coordinator.db").last_seq == last_seq
