"""A manager whose store, disk or clock fails: the previous checkpoint stays the latest, and the next save works.

The store fails in this process, so a thread of this process saves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_children import SAVERS, is_same, open_manager, state_of
from faulty_store import Call, Fault, FaultyStore, When, fails, hangs
from s3 import WEED, S3Server, s3
from s3_proxy import HANG, LOST_ANSWER, THROTTLED, FaultyProxy
from s3_proxy import Fault as S3Fault
from servers import DEADLINE_S, until

from strata.checkpoint import CheckpointManager
from strata.clock import ManualClock
from strata.errors import (
    CheckpointAborted,
    CheckpointBusy,
    CheckpointError,
    NoCheckpoint,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from strata.storage.local import LocalStore

__all__ = ["s3"]  # a fixture

MIB = 1 << 20
A_YEAR_S = 365 * 86_400.0
TWO_HOURS_S = 7_200.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    with contextlib.closing(FaultyStore(LocalStore(tmp_path / "store"))) as store:
        yield store


def directories(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def age(place: Path) -> None:
    then_s = time.time() - TWO_HOURS_S
    for path in sorted(place.rglob("*"), reverse=True):
        os.utime(path, (then_s, then_s))


def save(manager: CheckpointManager, step: int) -> str:
    """Save a step; return its id once it is durable and retention has run."""
    saved = manager.save(state_of(step), step=step).wait(DEADLINE_S)
    manager.wait()
    return saved.id


def check(manager: CheckpointManager, *steps: int) -> None:
    """Check that exactly these steps are listed and intact, and that the last one is loaded by default."""
    listed = manager.list()
    assert [one.step for one in listed] == [*steps]
    for one in listed:
        manager.verify(id=one.id)
        assert is_same(manager.load(id=one.id), state_of(one.step))
    assert is_same(manager.load(), state_of(steps[-1]))
    assert manager.problems == {}


# -- a fault in every call of a save -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Return the calls of a second save, numbered from 0: it writes, commits, and deletes the first checkpoint."""
    store = FaultyStore(LocalStore(tmp_path_factory.mktemp("whole")))
    with open_manager(store=store, keep_count=1) as manager:
        save(manager, 1)
        num_before = len(store.seen)
        save(manager, 2)
        found = [Call(call.number - num_before, call.kind, call.key) for call in store.seen[num_before:]]
    assert {"put_large", "put", "children", "walk", "delete"} <= {call.kind for call in found}
    return found


def position_of_commit(calls: list[Call]) -> int:
    return next(call.number for call in calls if call.kind == "put" and call.key.endswith("manifest.json"))


@pytest.mark.parametrize(
    ("error", "when"),
    [
        (StorageUnavailable, "before"),
        (StorageFull, "before"),
        (StorageDenied, "before"),
        (StorageUnavailable, "half"),
        (StorageUnavailable, "after"),
    ],
)
def test_a_save_raises_the_failure_of_any_call_and_the_next_save_works(
    tmp_path: Path, calls: list[Call], error: type[StorageError], when: When
) -> None:
    commit = position_of_commit(calls)
    at_first = {thread.ident for thread in threading.enumerate()}
    for call in calls:
        if when == "half" and call.kind not in ("put_large", "delete"):
            continue
        place = tmp_path / str(call.number)
        store = FaultyStore(LocalStore(place))
        with open_manager(store=store, keep_count=1, when_busy="raise") as manager:
            first = save(manager, 1)
            store.plan(fails(error, when), number=len(store.seen) + call.number)
            second = manager.save(state_of(2), step=2)
            if call.number < commit or (call.number == commit and when != "after"):
                with pytest.raises(error, match=f"{call.kind} fails, as the test wants it"):
                    second.wait(DEADLINE_S)
                assert not second.durable
                manager.wait()
                check(manager, 1)
                assert manager.list()[0].id == first
                assert directories(place) == [first], "the failed save left files"
            else:  # the save is committed, even if the response was lost or retention fails
                second.wait(DEADLINE_S)
                manager.wait()
                assert is_same(manager.load(), state_of(2))
            save(manager, 3)  # would be refused if the staging memory were still in use
            check(manager, 3)
            age(place)
            last = save(manager, 4)
            check(manager, 4)
        with open_manager(str(place)) as manager:
            age(place)
            another = save(manager, 5)
        assert directories(place) == sorted([last, another]), call
    alive = [thread.name for thread in threading.enumerate() if thread.ident not in at_first]
    assert alive == []


@pytest.mark.parametrize("error", [StorageUnavailable, StorageFull])
def test_a_store_that_fails_from_any_call_on_loses_nothing(
    tmp_path: Path, calls: list[Call], error: type[StorageError]
) -> None:
    """The failed save cannot delete its own files at once, either."""
    commit = position_of_commit(calls)
    for call in calls:
        place = tmp_path / str(call.number)
        store = FaultyStore(LocalStore(place))
        with open_manager(store=store, keep_count=1, when_busy="raise") as manager:
            save(manager, 1)
            store.plan(fails(error), number=len(store.seen) + call.number, num=None)
            second = manager.save(state_of(2), step=2)
            if call.number <= commit:
                with pytest.raises(error):
                    second.wait(DEADLINE_S)
            else:
                second.wait(DEADLINE_S)
            manager.wait()
            with pytest.raises(error):
                manager.list()  # does not return an empty list
            with pytest.raises(error):
                manager.load()  # does not raise NoCheckpoint
            store.heal()
            assert is_same(manager.load(), state_of(1 if call.number <= commit else 2))
            assert manager.problems == {}
            save(manager, 3)
            check(manager, 3)
        age(place)
        with open_manager(str(place), keep_count=1) as manager:
            save(manager, 4)
            check(manager, 4)
        assert len(directories(place)) == 1


def test_a_commit_whose_response_was_lost_is_whole(store: FaultyStore) -> None:
    """The writer cannot know whether it has committed, so the save raises; the listing shows the checkpoint."""
    with open_manager(store=store) as manager:
        save(manager, 1)
        store.plan(fails(StorageUnavailable, "after"), "put", key="manifest.json")
        store.plan(fails(StorageUnavailable), "walk", "delete", "get", num=None)
        with pytest.raises(StorageUnavailable):
            manager.save(state_of(2), step=2).wait(DEADLINE_S)
        store.heal()
        check(manager, 1, 2)
        save(manager, 3)
        check(manager, 1, 2, 3)


def test_a_failed_save_that_was_not_waited_for_is_raised_once_by_the_manager(store: FaultyStore) -> None:
    with open_manager(store=store) as manager:
        store.plan(fails(StorageFull), "put_large")
        manager.save(state_of(1), step=1)
        with pytest.raises(StorageFull):
            manager.wait()
        manager.wait()
        save(manager, 2)
        check(manager, 2)


# -- a store that hangs ------------------------------------------------------------------------------------------------


def test_while_a_save_hangs_earlier_checkpoints_can_be_used(store: FaultyStore) -> None:
    release, reached = threading.Event(), threading.Event()
    with open_manager(store=store, when_busy="raise") as manager:
        save(manager, 1)
        store.plan(hangs(release, reached), "put_large")
        second = manager.save(state_of(2), step=2)
        assert reached.wait(DEADLINE_S)
        with pytest.raises(TimeoutError, match=r"not durable after 0\.001 s"):
            second.wait(0.001)
        with pytest.raises(CheckpointBusy, match=second.id):
            manager.save(state_of(3), step=3)
        check(manager, 1)
        release.set()
        second.wait(DEADLINE_S)
        manager.wait()
        save(manager, 3)
        check(manager, 1, 2, 3)


@pytest.mark.parametrize(("kind", "when"), [("put_large", "before"), ("put_large", "half"), ("put_large", "after")])
def test_a_save_that_hangs_and_is_cancelled_leaves_nothing(
    store: FaultyStore, tmp_path: Path, kind: str, when: When
) -> None:
    release, reached = threading.Event(), threading.Event()
    with open_manager(store=store, when_busy="raise") as manager:
        first = save(manager, 1)
        store.plan(hangs(release, reached, when), kind)
        second = manager.save(state_of(2), step=2)
        assert reached.wait(DEADLINE_S)
        second.cancel()
        release.set()
        with pytest.raises(CheckpointAborted):
            second.wait(DEADLINE_S)
        manager.wait()
        check(manager, 1)
        assert directories(tmp_path / "store") == [first]
        save(manager, 3)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StorageUnavailable, StorageDenied])
def test_a_store_that_fails_during_a_load_puts_nothing_into_quarantine(
    store: FaultyStore, tmp_path: Path, error: type[StorageError]
) -> None:
    """A transient failure must neither hide the newest checkpoint nor mark it as damaged."""
    with open_manager(store=store) as manager:
        save(manager, 1)
        save(manager, 2)
    num_calls = 0
    with open_manager(store=store) as manager:
        num_before = len(store.seen)
        manager.load()
        num_calls = len(store.seen) - num_before
    for number in range(num_calls):
        with open_manager(store=store) as manager:  # without cached metadata
            store.plan(fails(error), number=len(store.seen) + number)
            with pytest.raises(error):
                manager.load()
            check(manager, 1, 2)
    assert not list(tmp_path.rglob("quarantine.json"))


def test_a_load_whose_checkpoint_is_replaced_returns_the_newer_one(store: FaultyStore, tmp_path: Path) -> None:
    with open_manager(str(tmp_path / "store"), keep_count=1) as writer, open_manager(store=store) as reader:
        save(writer, 1)
        store.plan(Fault(lambda _: _run(writer, 2)), "size", key="rank-")
        assert is_same(reader.load(), state_of(2))
        check(reader, 2)
    assert len(directories(tmp_path / "store")) == 1


def _run(writer: CheckpointManager, step: int) -> None:
    save(writer, step)


def test_leftovers_that_are_deleted_meanwhile_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (tmp_path / f"step-00000000000{step}-0123456789abcdef" for step in (1, 2))
    for left in (first, second):
        left.mkdir()
        (left / ".tmp-0").write_bytes(b"half")
    age(tmp_path)
    iterdir = Path.iterdir

    def look(path: Path) -> Iterator[Path]:
        found = list(iterdir(path))
        if path == first:
            shutil.rmtree(first)  # as if by a concurrent manager
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", look)
    with open_manager(str(tmp_path)) as manager:
        save(manager, 3)
        check(manager, 3)
    assert not second.exists()


# -- a full disk -------------------------------------------------------------------------------------------------------

ON_A_FULL_DISK = """
import os, shutil, sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from checkpoint_children import MIB, is_same, open_manager, state_of
from strata.errors import StorageFull

place = sys.argv[1]

def free():
    status = os.statvfs(os.path.dirname(place))
    return status.f_bavail * status.f_frsize

with open_manager(place, saver=sys.argv[3], keep_count=1, when_busy="raise") as manager:
    manager.save(state_of(1, num_bytes=9 * MIB), step=1).wait()
    manager.wait()
    free_bytes = free()
    for step in (2, 3, 4):
        try:
            manager.save(state_of(step, num_bytes=9 * MIB), step=step).wait()
        except StorageFull as error:
            assert "free some space" in str(error), error
        else:
            raise AssertionError("there was room")
        manager.wait()
        assert free() == free_bytes, (free(), free_bytes)
        assert [one.step for one in manager.list()] == [1]
        manager.verify(step=1)
        assert is_same(manager.load(), state_of(1, num_bytes=9 * MIB))
    manager.save(state_of(5, num_bytes=MIB), step=5).wait()
    manager.wait()
    assert [one.step for one in manager.list()] == [5]
    manager.save(state_of(6, num_bytes=9 * MIB), step=6).wait()
    assert is_same(manager.load(), state_of(6, num_bytes=9 * MIB))
print("passed")
"""

MOUNTS = {
    "tmpfs": 'mount -t tmpfs -o size=16m tmpfs "$1/disk"',
    "ext4": 'truncate -s 17M "$1/image" && mkfs.ext4 -q -O ^has_journal -m 0 "$1/image" '
    '&& mount -o loop "$1/image" "$1/disk"',
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", MOUNTS)
def test_on_a_full_disk_the_previous_checkpoint_stays_and_the_space_is_freed(
    tmp_path: Path, kind: str, saver: str
) -> None:
    """The file system is real, in a private mount namespace; writes to ext4 bypass the page cache."""
    (tmp_path / "disk").mkdir()
    script = f'{MOUNTS[kind]} && exec "$2" -c "$3" "$1/disk/store" "$4" "$5"'
    namespace = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    arguments = [str(tmp_path), sys.executable, textwrap.dedent(ON_A_FULL_DISK), str(Path(__file__).parent), saver]
    done = subprocess.run(
        [*namespace, "/bin/sh", "-c", script, "sh", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if "Traceback" not in done.stderr and ("unshare" in done.stderr or "mount" in done.stderr or "mkfs" in done.stderr):
        may_fail = os.environ.get("CI") == "true" and kind == "tmpfs"  # loop devices are not available everywhere
        (pytest.fail if may_fail else pytest.skip)(f"cannot mount a private file system: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "passed\n"


# -- clocks ------------------------------------------------------------------------------------------------------------


def clock_off_by(seconds: float) -> ManualClock:
    return ManualClock(wall_s=time.time() + seconds)


@pytest.mark.parametrize("off_s", [-A_YEAR_S, A_YEAR_S], ids=["a year behind", "a year ahead"])
def test_steps_decide_the_order_whatever_the_clocks_of_the_writers(tmp_path: Path, off_s: float) -> None:
    with (
        open_manager(str(tmp_path), keep_count=3) as one,
        open_manager(str(tmp_path), keep_count=3, clock=clock_off_by(off_s)) as other,
    ):
        for step in range(1, 7):
            save(one if step % 2 else other, step)
            check(one, *range(max(1, step - 2), step + 1))
            check(other, *range(max(1, step - 2), step + 1))
    assert len(directories(tmp_path)) == 3


def test_a_clock_that_is_set_back_between_two_saves_changes_nothing(tmp_path: Path) -> None:
    clock = clock_off_by(0.0)
    with open_manager(str(tmp_path), keep_count=2, clock=clock) as manager:
        save(manager, 1)
        clock.advance(-A_YEAR_S)
        save(manager, 2)
        clock.advance(2 * A_YEAR_S)
        save(manager, 3)
        check(manager, 2, 3)


def test_a_new_checkpoint_is_kept_although_an_older_one_of_its_step_claims_to_be_newer(
    tmp_path: Path,
) -> None:
    with open_manager(str(tmp_path), keep_count=1) as one:
        save(one, 5)
    with open_manager(str(tmp_path), keep_count=1, clock=clock_off_by(-A_YEAR_S)) as again:
        saved = save(again, 5)
        assert saved in [one.id for one in again.list()]


def test_a_new_checkpoint_is_kept_although_a_later_step_exists(tmp_path: Path) -> None:
    with open_manager(str(tmp_path), keep_count=1) as manager:
        save(manager, 10)
        saved = save(manager, 6)  # training went back to an earlier step
        assert saved in [one.id for one in manager.list()]


def test_a_save_whose_checkpoint_is_deleted_by_retention_at_once_has_not_failed(
    store: FaultyStore,
) -> None:
    release, reached = threading.Event(), threading.Event()
    with open_manager(store=store, keep_count=1) as slow, open_manager(store.url, keep_count=1) as fast:
        store.plan(hangs(release, reached, when="after"), "put", key="manifest.json")
        handle = slow.save(state_of(5), step=5)
        assert reached.wait(DEADLINE_S)
        newest = save(fast, 9)
        assert directories(Path(store.url)) == [newest]
        release.set()
        assert handle.wait(DEADLINE_S).step == 5
        slow.wait()
        check(slow, 9)
        save(slow, 10)
        check(fast, 10)


@contextlib.contextmanager
def a_save_under_way(store: FaultyStore) -> Iterator[threading.Event]:
    """Hold a save between its data and its manifest; at the end of the block, finish and check it."""
    release, reached = threading.Event(), threading.Event()
    with open_manager(store=store) as writer:
        store.plan(hangs(release, reached), "put", key="manifest.json")
        handle = writer.save(state_of(5), step=5)
        assert reached.wait(DEADLINE_S)
        try:
            yield reached
        finally:
            release.set()
        with contextlib.suppress(StorageError, CheckpointError):
            handle.wait(DEADLINE_S)
        for one in writer.list():
            writer.verify(id=one.id)
        if handle.durable:
            assert is_same(writer.load(id=handle.id), state_of(5))


def test_a_save_in_progress_is_not_collected(store: FaultyStore) -> None:
    """Otherwise the tests below would prove nothing."""
    with a_save_under_way(store), open_manager(store.url) as other:
        save(other, 4)
        assert len(directories(Path(store.url))) == 2


def test_a_clock_that_is_a_year_behind_collects_no_save_in_progress(store: FaultyStore) -> None:
    with a_save_under_way(store), open_manager(store.url, clock=clock_off_by(-A_YEAR_S)) as other:
        save(other, 4)
        assert len(directories(Path(store.url))) == 2


def test_a_clock_that_is_a_year_ahead_collects_no_save_in_progress(store: FaultyStore) -> None:
    with a_save_under_way(store), open_manager(store.url, clock=clock_off_by(A_YEAR_S)) as other:
        save(other, 4)
        assert len(directories(Path(store.url))) == 2


def test_a_save_that_takes_longer_than_an_hour_never_commits_deleted_files(store: FaultyStore) -> None:
    with a_save_under_way(store), open_manager(store.url) as other:
        age(Path(store.url))
        save(other, 4)


@pytest.mark.parametrize("off_s", [-A_YEAR_S, A_YEAR_S], ids=["a year behind", "a year ahead"])
def test_leftovers_are_collected_and_committed_checkpoints_are_not(tmp_path: Path, off_s: float) -> None:
    left = tmp_path / "step-000000000001-0123456789abcdef"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    with open_manager(str(tmp_path)) as manager:
        save(manager, 2)
    age(tmp_path)
    with open_manager(str(tmp_path), clock=clock_off_by(off_s)) as manager:
        save(manager, 3)
        check(manager, 2, 3)
    with open_manager(str(tmp_path)) as manager:
        save(manager, 4)
        check(manager, 2, 3, 4)
    assert not left.exists()


# -- S3 ----------------------------------------------------------------------------------------------------------------

NUM_BYTES = 12 * MIB
"""Three parts of a multipart upload."""


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def place(s3: S3Server) -> str:
    url: str = s3.new_url()
    return url


def through(proxy: FaultyProxy, s3: S3Server, place: str, **more: Any) -> CheckpointManager:
    options = s3.options(endpoint=proxy.endpoint, piece_bytes=5 * MIB, concurrency=4, max_retries=3)
    return open_manager(place, storage_options=options | more, keep_count=2)


def save_on_s3(manager: CheckpointManager, step: int) -> None:
    manager.save(state_of(step, num_bytes=NUM_BYTES), step=step).wait(DEADLINE_S)
    manager.wait()


def check_on_s3(s3: S3Server, place: str, *steps: int) -> None:
    """Check with a new manager that bypasses the proxy."""
    with open_manager(place, storage_options=s3.options()) as manager:
        assert [one.step for one in manager.list()] == [*steps]
        for step in steps:
            manager.verify(step=step)
            assert is_same(manager.load(step=step), state_of(step, num_bytes=NUM_BYTES))


@pytest.mark.parametrize(
    ("fault", "kinds", "num"),
    [
        (THROTTLED, (), 3),
        (S3Fault(sent_bytes=1_000), ("put part",), 2),
        (S3Fault(status=500, arrives=True), ("complete upload",), 1),
        (LOST_ANSWER, ("put",), 1),
        (S3Fault(received_bytes=100_000), ("get",), 1),
        (HANG, ("put part", "put"), 1),
    ],
    ids=["throttled", "half a part", "completed too late", "commit's answer lost", "half an answer", "hangs"],
)
def test_a_save_and_a_load_survive_transient_faults_of_s3(
    s3: S3Server, proxy: FaultyProxy, place: str, fault: S3Fault, kinds: tuple[str, ...], num: int
) -> None:
    before = s3.unfinished_uploads()
    with through(proxy, s3, place, timeout_s=3.0) as manager:
        save_on_s3(manager, 1)
        proxy.plan(fault, *kinds, num=num)
        save_on_s3(manager, 2)
        proxy.plan(fault, *kinds, num=num)
        assert is_same(manager.load(), state_of(2, num_bytes=NUM_BYTES))
        proxy.heal()
        assert manager.problems == {}
    check_on_s3(s3, place, 1, 2)
    until(lambda: s3.unfinished_uploads() == before, "no upload is left unfinished")


@pytest.mark.parametrize("kind", ["create upload", "put part", "complete upload", "put"])
def test_a_save_that_fails_for_good_on_s3_leaves_no_upload_and_the_previous_one_is_loaded(
    s3: S3Server, proxy: FaultyProxy, place: str, kind: str
) -> None:
    before = s3.unfinished_uploads()
    with through(proxy, s3, place) as manager:
        save_on_s3(manager, 1)
        proxy.plan(THROTTLED, kind, num=None)
        with pytest.raises(StorageUnavailable, match=r"SlowDown.*raise max_retries"):
            save_on_s3(manager, 2)
        assert is_same(manager.load(), state_of(1, num_bytes=NUM_BYTES))
        proxy.heal()
        check_on_s3(s3, place, 1)
        until(lambda: s3.unfinished_uploads() == before, "no upload is left unfinished")
        save_on_s3(manager, 3)
    check_on_s3(s3, place, 1, 3)


def test_a_load_from_a_server_that_stays_busy_does_not_quarantine_the_checkpoint(
    s3: S3Server, proxy: FaultyProxy, place: str
) -> None:
    with through(proxy, s3, place) as manager:
        save_on_s3(manager, 1)
        save_on_s3(manager, 2)
        proxy.plan(THROTTLED, "get", num=None)
        with pytest.raises(StorageUnavailable, match="SlowDown"):
            manager.load()
        proxy.heal()
        assert is_same(manager.load(), state_of(2, num_bytes=NUM_BYTES))
    check_on_s3(s3, place, 1, 2)


def test_an_empty_store_and_an_unavailable_one_raise_different_errors(
    s3: S3Server, proxy: FaultyProxy, place: str
) -> None:
    """Otherwise a job would start from scratch because its store was busy for a moment."""
    with through(proxy, s3, place) as manager:
        with pytest.raises(NoCheckpoint):
            manager.load()
        proxy.plan(THROTTLED, num=None)
        with pytest.raises(StorageUnavailable):
            manager.load()


@pytest.mark.slow
def test_a_save_survives_a_restart_of_the_server(weed: S3Server) -> None:
    """The restart takes about 20 s, because the server waits for its own leader election."""
    options = weed.options(piece_bytes=5 * MIB, concurrency=2)
    with open_manager(weed.new_url(), storage_options=options) as manager:
        save_on_s3(manager, 1)
        weed.kill()
        saving = manager.save(state_of(2, num_bytes=NUM_BYTES), step=2)
        assert not saving.done
        weed.start()
        saving.wait(DEADLINE_S)
    check_on_s3(weed, manager._store.url, 1, 2)


@pytest.fixture
def weed(requires_service: Callable[..., Path]) -> Iterator[S3Server]:
    """Start a server that the test may kill."""
    server = S3Server(requires_service(WEED, "run make setup"))
    try:
        server.start()
        yield server
    finally:
        server.close()
