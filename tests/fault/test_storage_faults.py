"""Stores under faults: acknowledged objects exist, others are not listed, and the error names the cause."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3 import ADMIN, BUCKET, READER, S3Server, s3
from s3_proxy import HANG, LOST_ANSWER, THROTTLED, Fault, FaultyProxy
from servers import DEADLINE_S, free_port, until

from strata.errors import (
    BucketMissing,
    ObjectExists,
    ObjectMissing,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageUnavailable,
    TransferCancelled,
)
from strata.storage import Store, Watch, files, open_store
from strata.storage.local import LocalStore

__all__ = ["s3"]  # a fixture

MIB = 1 << 20
BIG = 48 * MIB
QUICK = {"piece_bytes": 5 * MIB, "concurrency": 4, "max_retries": 3}
SECRETS = [keys["secret_access_key"] for keys in (ADMIN, READER)]


def pattern(num_bytes: int) -> memoryview:
    """Return page-aligned memory, which O_DIRECT accepts."""
    memory = np.zeros(num_bytes + 4_096, np.uint8)
    start = -memory.ctypes.data % 4_096
    found = memory[start : start + num_bytes]
    found[:] = np.frombuffer(np.random.default_rng(1).bytes(num_bytes), np.uint8)
    return memoryview(found)


def read(store: Store, key: str) -> bytes:
    out = np.zeros(store.size(key), np.uint8)
    store.read_into(key, 0, memoryview(out))
    return out.tobytes()


def keys_of(store: Store) -> list[str]:
    return [listed.key for listed in store.walk()]


# -- S3: what passes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def sound(s3: S3Server) -> Iterator[Store]:
    """Return a store that bypasses the proxy."""
    with contextlib.closing(open_store(s3.new_url(), s3.options(**QUICK))) as store:
        yield store


@pytest.fixture
def faulty(sound: Store, s3: S3Server, proxy: FaultyProxy) -> Iterator[Store]:
    """Return a store with the same objects, through the proxy."""
    options = s3.options(endpoint=proxy.endpoint, **QUICK)
    with contextlib.closing(open_store(sound.url, options)) as store:
        yield store


EVERY_CALL: dict[str, Callable[[Store, memoryview], object]] = {
    "put": lambda store, _: store.put("new", b"1"),
    "put if absent": lambda store, _: store.put("new", b"1", if_absent=True),
    "put_large": lambda store, data: store.put_large("new", data),
    "get": lambda store, _: store.get("small", max_bytes=9),
    "read_into": lambda store, _: read(store, "large"),
    "size": lambda store, _: store.size("small"),
    "walk": lambda store, _: keys_of(store),
    "children": lambda store, _: store.children(),
    "delete": lambda store, _: store.delete(["small", "nowhere"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", EVERY_CALL)
@pytest.mark.parametrize("status", [503, 500, 429])
def test_every_call_survives_a_server_that_is_busy_for_a_while(
    sound: Store, faulty: Store, proxy: FaultyProxy, call: str, status: int
) -> None:
    data = pattern(12 * MIB)
    sound.put("small", b"1")
    sound.put_large("large", data)
    proxy.plan(Fault(status=status), num=2)
    EVERY_CALL[call](faulty, data)
    assert len(proxy.seen) >= 3
    if "put" in call:
        assert read(sound, "new") == (data if call == "put_large" else b"1")
    assert ("small" in keys_of(sound)) == (call != "delete")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["create upload", "put part", "complete upload"])
@pytest.mark.parametrize(
    "fault",
    [THROTTLED, Fault(sent_bytes=0), Fault(sent_bytes=1_000), Fault(status=500, arrives=True), LOST_ANSWER],
    ids=["throttled", "refused", "cut", "failed too late", "answer lost"],
)
def test_an_upload_survives_a_fault_at_each_of_its_steps(
    sound: Store, faulty: Store, proxy: FaultyProxy, kind: str, fault: Fault
) -> None:
    data = pattern(22 * MIB + 1)
    proxy.plan(fault, kind)
    faulty.put_large("d/large", data)
    assert proxy.seen.count(kind) > (5 if kind == "put part" else 1)
    assert read(sound, "d/large") == data
    assert keys_of(sound) == ["d/large"]


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000])
def test_an_interrupted_download_is_retried(sound: Store, faulty: Store, proxy: FaultyProxy, num_bytes: int) -> None:
    data = pattern(12 * MIB)
    sound.put_large("large", data)
    proxy.plan(Fault(received_bytes=num_bytes), "get", num=2)
    assert read(faulty, "large") == data
    proxy.plan(Fault(received_bytes=num_bytes), "get", num=2)
    assert faulty.get("large", max_bytes=12 * MIB) == data


@pytest.mark.slow
@pytest.mark.parametrize("call", ["put", "put if absent", "put_large", "get", "size", "walk", "delete"])
def test_a_request_that_hangs_times_out_and_is_retried(
    s3: S3Server, sound: Store, proxy: FaultyProxy, call: str
) -> None:
    options = s3.options(endpoint=proxy.endpoint, **QUICK, timeout_s=3.0)
    with contextlib.closing(open_store(sound.url, options)) as store:
        sound.put("small", b"1")
        proxy.plan(HANG)
        EVERY_CALL[call](store, pattern(6 * MIB))
    assert len(proxy.seen) >= 2
    assert ("new" in keys_of(sound)) == ("put" in call)


# -- S3: only if absent, when answers are lost -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [LOST_ANSWER, Fault(status=500, arrives=True), Fault(status=503, arrives=True)], ids=str
)
def test_a_conditional_put_that_succeeded_is_recognised_although_the_response_was_lost(
    sound: Store, faulty: Store, proxy: FaultyProxy, fault: Fault
) -> None:
    proxy.plan(fault, "put")
    faulty.put("manifest", b"mine", if_absent=True)
    assert sound.get("manifest", max_bytes=9) == b"mine"
    assert proxy.seen.count("put") == 2
    with pytest.raises(ObjectExists):
        sound.put("manifest", b"mine", if_absent=True)


def test_a_conditional_put_that_succeeded_is_recognised_although_no_response_ever_came(
    sound: Store, faulty: Store, proxy: FaultyProxy
) -> None:
    proxy.plan(Fault(status=500, arrives=True), "put", num=None)
    faulty.put("manifest", b"mine", if_absent=True)
    assert proxy.seen.count("put") == 4
    assert sound.get("manifest", max_bytes=9) == b"mine"


def test_a_conditional_put_that_failed_is_recognised_although_the_response_was_lost(
    sound: Store, faulty: Store, proxy: FaultyProxy
) -> None:
    sound.put("manifest", b"the same bytes", if_absent=True)
    for fault in (LOST_ANSWER, Fault(status=500, arrives=True)):
        proxy.plan(fault, "put")
        with pytest.raises(ObjectExists):
            faulty.put("manifest", b"the same bytes", if_absent=True)


def test_exactly_1_of_8_conditional_puts_succeeds_while_responses_are_lost(
    sound: Store, faulty: Store, proxy: FaultyProxy
) -> None:
    proxy.plan(LOST_ANSWER, "put", num=4)

    def race(number: int) -> bool:
        try:
            faulty.put("manifest", b"%d" % number, if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert sound.get("manifest", max_bytes=1) == b"%d" % won.index(True)


# -- S3: what does not pass --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_server_that_stays_busy_is_unavailable_after_4_tries(
    sound: Store, faulty: Store, proxy: FaultyProxy, call: str
) -> None:
    sound.put("small", b"1")
    sound.put_large("large", pattern(6 * MIB))
    proxy.plan(THROTTLED, num=None)
    with pytest.raises(StorageUnavailable, match=rf"{BUCKET}/place-.*(SlowDown|503).*raise max_retries") as caught:
        EVERY_CALL[call](faulty, pattern(6 * MIB))
    assert proxy.seen.count(proxy.seen[0]) == 4
    assert "new" not in keys_of(sound)
    _assert_no_secret(caught.value)


@pytest.mark.parametrize("kind", ["put part", "complete upload"])
def test_an_upload_that_fails_for_good_is_aborted(
    s3: S3Server, sound: Store, faulty: Store, proxy: FaultyProxy, kind: str
) -> None:
    before = s3.unfinished_uploads()
    proxy.plan(THROTTLED, kind, num=None)
    with pytest.raises(StorageUnavailable, match="SlowDown"):
        faulty.put_large("d/large", pattern(BIG))
    assert "abort upload" in proxy.seen  # not always the last: other parts may be on their way
    assert keys_of(sound) == []
    until(lambda: s3.unfinished_uploads() == before, "nothing is left of the upload")


def test_the_last_piece_of_an_upload_may_fail_too(
    s3: S3Server, sound: Store, faulty: Store, proxy: FaultyProxy
) -> None:
    """object_store once forgot to abort in this case (apache/arrow-rs-object-store#818)."""
    before = s3.unfinished_uploads()
    proxy.plan(Fault(status=507), "put part", num=None)
    with pytest.raises(StorageFull, match="InsufficientStorage"):
        faulty.put_large("d/large", pattern(6 * MIB))
    assert keys_of(sound) == []
    assert "abort upload" in proxy.seen
    until(lambda: s3.unfinished_uploads() == before, "nothing is left of the upload")


def test_a_cancelled_upload_is_aborted(s3: S3Server, sound: Store, faulty: Store, proxy: FaultyProxy) -> None:
    before = s3.unfinished_uploads()
    watch = Watch(lambda _: watch.cancel())
    with pytest.raises(TransferCancelled):
        faulty.put_large("d/large", pattern(BIG), watch=watch)
    assert "abort upload" in proxy.seen
    assert "complete upload" not in proxy.seen
    assert keys_of(sound) == []
    until(lambda: s3.unfinished_uploads() == before, "nothing is left of the upload")


def test_an_upload_to_a_server_that_hangs_can_be_cancelled(s3: S3Server, sound: Store, proxy: FaultyProxy) -> None:
    """Even if the abort fails, the caller gets TransferCancelled."""
    options = s3.options(endpoint=proxy.endpoint, **{**QUICK, "max_retries": 0}, timeout_s=2.0)
    watch = Watch()
    proxy.plan(HANG, "put part", "abort upload", num=None)
    with contextlib.closing(open_store(sound.url, options)) as store, ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(store.put_large, "d/large", pattern(BIG), watch=watch)
        until(lambda: "put part" in proxy.seen, "the upload is under way")
        watch.cancel()
        with pytest.raises(TransferCancelled):
            uploading.result(timeout=DEADLINE_S)
    assert keys_of(sound) == []


@pytest.mark.parametrize(
    "error", [ValueError("mine"), FileNotFoundError(errno.ENOENT, "mine"), KeyboardInterrupt("mine")]
)
def test_an_error_of_on_progress_is_raised(sound: Store, error: BaseException) -> None:
    def fail(_: int) -> None:
        raise error

    with pytest.raises(type(error), match="mine") as caught:
        sound.put_large("d/large", pattern(BIG), watch=Watch(fail))
    assert caught.value is error
    assert keys_of(sound) == []


def test_on_progress_may_use_the_store(sound: Store) -> None:
    sizes = []
    sound.put("small", b"123")
    sound.put_large("large", pattern(BIG), watch=Watch(lambda _: sizes.append(sound.size("small"))))
    assert set(sizes) == {3}


def test_a_server_that_hangs_is_unavailable_in_bounded_time(s3: S3Server, sound: Store, proxy: FaultyProxy) -> None:
    options = s3.options(endpoint=proxy.endpoint, timeout_s=0.5, max_retries=2)
    proxy.plan(HANG, num=None)
    with contextlib.closing(open_store(sound.url, options)) as store:
        for call in ("put", "put if absent", "get", "walk", "delete"):
            begin_s = time.monotonic()
            with pytest.raises(StorageUnavailable, match="timeout_s"):
                EVERY_CALL[call](store, pattern(1))
            assert time.monotonic() - begin_s < 20


def test_an_endpoint_without_a_server_is_unavailable(s3: S3Server) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = open_store(s3.new_url(), s3.options(endpoint=endpoint, max_retries=1))
    with pytest.raises(StorageUnavailable, match=rf"{endpoint}.*check the endpoint") as caught:
        store.put("a", b"")
    _assert_no_secret(caught.value)
    store.close()


@pytest.mark.parametrize(
    "keys", [READER, {**ADMIN, "secret_access_key": "a-wrong-secret"}, {**READER, "access_key_id": "nobody"}], ids=str
)
def test_a_denied_write_names_the_source_of_the_credentials(s3: S3Server, keys: dict[str, str]) -> None:
    store = open_store(s3.new_url(), s3.options(**keys, **QUICK))
    for write in (store.put, store.put_large):
        with pytest.raises(StorageDenied, match=r"the credentials come from storage_options: check that") as caught:
            write("a", memoryview(b"1"))
        _assert_no_secret(caught.value)
        assert keys["secret_access_key"] not in str(caught.value)
    with pytest.raises(StorageDenied):
        store.put_large("a", pattern(6 * MIB))
    store.close()


@pytest.mark.parametrize(
    ("bucket", "keys", "calls"),
    [
        ("no-such-bucket", READER, ("get", "walk", "children")),  # here, a writer creates the bucket
        ("Not_A..Name", ADMIN, ("get", "walk", "children", "put", "put if absent", "put_large")),
    ],
)
def test_a_missing_or_misnamed_bucket_is_reported_after_one_attempt(
    s3: S3Server, proxy: FaultyProxy, bucket: str, keys: dict[str, str], calls: tuple[str, ...]
) -> None:
    with contextlib.closing(open_store(f"s3://{bucket}/x", s3.options(endpoint=proxy.endpoint, **keys))) as store:
        for call in calls:
            proxy.seen.clear()
            with pytest.raises(BucketMissing, match=rf"the bucket '{bucket}' does not exist on S3 .*; create it"):
                EVERY_CALL[call](store, pattern(6 * MIB))
            assert len(set(proxy.seen)) == len(proxy.seen)  # nothing was tried twice


def test_retries_continue_until_retry_timeout_s(s3: S3Server, sound: Store, proxy: FaultyProxy) -> None:
    """The number of retries does not limit them: it would be spent in a second or two, and a restart takes longer."""
    sound.put("small", b"1")
    with contextlib.closing(open_store(sound.url, s3.options(endpoint=proxy.endpoint))) as store:
        proxy.plan(THROTTLED, num=11)
        store.put("new", b"2", if_absent=True)
        assert proxy.seen.count("put") == 12
    assert sound.get("new", max_bytes=1) == b"2"
    with contextlib.closing(open_store(sound.url, s3.options(endpoint=proxy.endpoint, retry_timeout_s=0.5))) as store:
        proxy.plan(THROTTLED, num=None)
        with pytest.raises(StorageUnavailable, match=r"tried for up to 0.5 s: .*raise retry_timeout_s") as caught:
            store.put("late", b"3")
        assert "max_retries in" not in str(caught.value)


def test_missing_credentials_are_reported_in_bounded_time(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {name: value for name, value in s3.options(max_retries=1).items() if name not in ADMIN}
    # Nothing answers there; a machine in a cloud would.
    options |= {"metadata_endpoint": f"http://127.0.0.1:{free_port()}", "connect_timeout_s": 0.5}
    store = open_store(s3.new_url(), options)
    with pytest.raises(StorageDenied, match=r"no credentials.*the identity of this machine"):
        store.put("a", b"")
    store.close()


def _assert_no_secret(error: BaseException) -> None:
    link: BaseException | None = error
    while link is not None:
        assert not any(secret in str(link) for secret in SECRETS)
        assert "Signature=" not in str(link)
        link = link.__cause__


# -- processes that are killed -----------------------------------------------------------------------------------------

WRITER = """
import json, sys
from strata.storage import Watch, open_store

url, options = sys.argv[1], json.loads(sys.argv[2])
store = open_store(url, options)
store.put("kept/small", b"acknowledged")
store.put_large("kept/large", memoryview(b"x" * 5_000_000))

def under_way(_):
    print("writing", flush=True)
    sys.stdin.readline()

import mmap
store.put_large("d/e/large", memoryview(mmap.mmap(-1, 256 << 20)), watch=Watch(under_way))
"""


def _kill_in_the_middle(url: str, options: dict[str, Any] | None) -> None:
    import json

    command = [sys.executable, "-c", textwrap.dedent(WRITER), url, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=DEADLINE_S) == -signal.SIGKILL


def test_a_writer_that_was_killed_leaves_nothing_that_is_listed_on_a_disk(tmp_path: Path) -> None:
    _kill_in_the_middle(str(tmp_path), None)
    store = LocalStore(tmp_path)
    assert keys_of(store) == ["kept/large", "kept/small"]
    assert store.get("kept/small", max_bytes=20) == b"acknowledged"
    assert read(store, "kept/large") == b"x" * 5_000_000
    assert store.children() == ["kept"]
    assert store.children("d") == []
    left = list(tmp_path.glob("d/e/.tmp-*"))
    assert len(left) == 1
    assert store.sweep() == 0  # its writer may be alive
    assert left[0].exists()
    assert store.sweep(older_than_s=0.0) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert keys_of(store) == ["kept/large", "kept/small"]


def test_a_writer_that_was_killed_leaves_nothing_that_is_listed_on_s3(s3: S3Server) -> None:
    url = s3.new_url()
    _kill_in_the_middle(url, s3.options(**QUICK))
    with contextlib.closing(open_store(url, s3.options(**QUICK))) as store:
        assert keys_of(store) == ["kept/large", "kept/small"]
        assert store.get("kept/small", max_bytes=20) == b"acknowledged"
        assert read(store, "kept/large") == b"x" * 5_000_000
        with pytest.raises(ObjectMissing):
            store.size("d/e/large")
        store.put_large("d/e/large", pattern(6 * MIB))
        assert read(store, "d/e/large") == pattern(6 * MIB)


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LocalStore]:
    with contextlib.closing(LocalStore(tmp_path / "store")) as store:
        yield store


def failing(name: str, number: int, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> list[object]:
    """Let `os.NAME` fail from its call number `after` on; yield the arguments of the failed calls."""
    real, failed, num_calls = getattr(os, name), [], 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= after:
            return real(*args, **kwargs)
        failed.append(args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)
    return failed


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EIO, StorageUnavailable)],
    ids=["no space", "no quota", "broken"],
)
@pytest.mark.parametrize("name", ["pwrite", "fsync"])
def test_a_failing_disk_leaves_the_old_object(
    disk: LocalStore, monkeypatch: pytest.MonkeyPatch, name: str, number: int, error: type[StorageError]
) -> None:
    disk.put("d/a", b"old")
    for write in (disk.put, disk.put_large):
        for key in ("d/a", "new/directory/a"):
            with monkeypatch.context() as patch:
                failed = failing(name, number, patch)
                if name == "fsync" and key != "d/a":
                    disk.root.joinpath("new/directory").mkdir(parents=True)  # so that the first is the file's
                with pytest.raises(error, match=rf"{key}: .*; (free|check)"):
                    write(key, pattern(9 * MIB))
            if name == "fsync":
                assert len(failed) == 1  # a second fsync would report success
            assert keys_of(disk) == ["d/a"]
            assert disk.get("d/a", max_bytes=9) == b"old"
            assert [path.name for path in disk.root.iterdir()] == ["d"]
            assert list(disk.root.rglob(".tmp-*")) == []


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_no_thread_uses_the_descriptor_after_a_failed_transfer(
    disk: LocalStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Otherwise a slow thread would write into another file that reuses its descriptor."""
    real, begun, release = getattr(os, name), threading.Barrier(2), threading.Event()
    num_using = 0

    def use(fd: int, *args: Any) -> Any:
        nonlocal num_using
        if args[-1] == 0:
            begun.wait()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if args[-1] == 8 * MIB:
            num_using += 1
            begun.wait()
            release.wait()
            os.fstat(fd)  # still ours
            num_using -= 1
        return real(fd, *args)

    data = pattern(64 * MIB)
    disk.put_large("d/large", data)
    monkeypatch.setattr(os, name, use)
    transfer = disk.put_large if name == "pwrite" else lambda key, out: disk.read_into(key, 0, out)
    with ThreadPoolExecutor(1) as pool:
        transferring = pool.submit(transfer, "d/large", data)
        until(lambda: num_using == 1, "one thread is in the middle")
        with pytest.raises(TimeoutError):
            transferring.result(timeout=0.3)
        release.set()
        with pytest.raises(StorageUnavailable, match="Input/output error"):
            transferring.result(timeout=DEADLINE_S)
    assert num_using == 0


def test_a_full_file_system_raises_storage_full_and_can_be_used_again(tmp_path: Path) -> None:
    """The file system is real, has 16 MiB and lives in a private mount namespace."""
    program = """
    import sys
    from strata.errors import StorageFull
    from strata.storage.local import LocalStore
    store = LocalStore(sys.argv[1])
    store.put("d/old", b"old")
    for num_bytes in (20 << 20, 100 << 20):
        try:
            store.put_large("d/new", memoryview(bytes(num_bytes)))
        except StorageFull as error:
            assert "free some space" in str(error), error
        else:
            raise AssertionError("there was room")
        assert [listed.key for listed in store.walk()] == ["d/old"]
        assert [path.name for path in store.root.rglob("*")] == ["d", "old"]
    store.put_large("d/new", memoryview(bytes(8 << 20)))
    print(store.size("d/new"), store.direct)
    """
    script = f'mount -t tmpfs -o size=16m tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}/store"'
    namespace = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    command = [*namespace, "/bin/sh", "-c", script, sys.executable, textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no mount of one's own: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(8 << 20)


def test_a_file_size_limit_raises_storage_full(tmp_path: Path) -> None:
    """The limit is reached in the middle of a write with O_DIRECT, on the disk itself."""
    program = """
    import mmap, resource, sys
    from strata.errors import StorageFull
    from strata.storage.local import LocalStore
    store = LocalStore(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, ((20 << 20) + 100, resource.RLIM_INFINITY))
    for shift in (0, 1):
        try:
            store.put_large("d/new", memoryview(mmap.mmap(-1, 64 << 20))[shift:])
        except StorageFull as error:
            assert "ulimit" in str(error), error
        else:
            raise AssertionError("there was no limit")
        assert list(store.root.rglob("*")) == []
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lacking", ["nothing", "O_DIRECT", "O_DIRECT when opening", "O_DIRECT when writing", "preadv"])
def test_missing_features_of_a_file_system_are_replaced(
    disk: LocalStore, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "O_DIRECT":
        monkeypatch.setattr(files, "_O_DIRECT", 0)
    elif lacking == "preadv":
        monkeypatch.delattr(os, "preadv")
    elif lacking == "O_DIRECT when opening":
        _refuse_direct(monkeypatch, "open", lambda args: bool(args[1] & os.O_DIRECT))
    elif lacking == "O_DIRECT when writing":
        _refuse_direct(monkeypatch, "pwrite", lambda args: files.is_direct(args[0]))
        _refuse_direct(monkeypatch, "preadv", lambda args: files.is_direct(args[0]))
    data = pattern(20 * MIB + 77)
    disk.put_large("d/large", data)
    assert read(disk, "d/large") == data
    out = pattern(16 * MIB)
    disk.read_into("d/large", 4 * MIB, out)
    assert out == data[4 * MIB : 20 * MIB]
    assert disk.direct is (lacking in ("nothing", "preadv"))


def _refuse_direct(monkeypatch: pytest.MonkeyPatch, name: str, is_direct: Callable[[tuple[Any, ...]], bool]) -> None:
    real = getattr(os, name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_direct(args):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, refuse)


def test_without_hard_links_exactly_one_conditional_put_succeeds(
    disk: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = failing("link", errno.EPERM, monkeypatch)

    def race(number: int) -> bool:
        try:
            disk.put("d/manifest", b"%d" % number, if_absent=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert len(failed) == 8
    assert won.count(True) == 1
    assert disk.get("d/manifest", max_bytes=1) == b"%d" % won.index(True)
    assert [path.name for path in (disk.root / "d").iterdir()] == ["manifest"]


def test_a_link_whose_response_was_lost_has_succeeded(disk: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats the request and finds that the name exists."""
    real = os.link

    def link(*args: Any) -> None:
        real(*args)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    disk.put("d/manifest", b"mine", if_absent=True)
    assert disk.get("d/manifest", max_bytes=9) == b"mine"
    assert [path.name for path in (disk.root / "d").iterdir()] == ["manifest"]


def test_a_file_system_without_directory_sync_works(disk: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").resolve().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    disk.put("d/e/a", b"1", if_absent=True)
    disk.put_large("d/e/b", pattern(9 * MIB))
    assert keys_of(disk) == ["d/e/a", "d/e/b"]


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(disk: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("d/a", b"1")
    failing("scandir", errno.EIO, monkeypatch)
    for look in (lambda: keys_of(disk), disk.children, disk.sweep):
        with pytest.raises(StorageUnavailable, match="Input/output error"):
            look()


def test_the_temporary_file_of_a_live_writer_is_not_removed(disk: LocalStore) -> None:
    disk.put("d/other", b"1")

    def meanwhile(_: int) -> None:
        disk.delete(["d/other"])
        disk.sweep()

    disk.put_large("d/large", pattern(20 * MIB), watch=Watch(meanwhile))
    assert keys_of(disk) == ["d/large"]


def test_temporary_files_of_a_dead_writer_are_removed_with_the_last_object_beside_them(disk: LocalStore) -> None:
    disk.put("d/a", b"1")
    left = disk.root / "d" / ".tmp-left"
    left.write_bytes(b"half")
    disk.delete(["d/a"])
    assert left.exists()
    disk.put("d/a", b"1")
    os.utime(left, (time.time() - 7_200,) * 2)
    disk.delete(["d/a"])
    assert list(disk.root.iterdir()) == []


def test_a_name_cannot_be_an_object_and_a_directory_on_a_disk(disk: LocalStore) -> None:
    disk.put("a", b"1")
    disk.put("d/a", b"1")
    for key in ("a/b", "a/b/c", "d"):
        for write in (disk.put, disk.put_large):
            with pytest.raises(StorageError, match="choose another key") as caught:
                write(key, memoryview(b"2"))
            assert not isinstance(caught.value, ObjectMissing | ObjectExists)
    assert keys_of(disk) == ["a", "d/a"]


def test_a_read_only_directory_raises_storage_denied(disk: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EACCES, errno.EROFS):
        with monkeypatch.context() as patch:
            failing("open", number, patch)
            with pytest.raises(StorageDenied, match="check its owner and permissions"):
                disk.put("a", b"1")


def test_the_proxy_is_transparent(sound: Store, faulty: Store, proxy: FaultyProxy) -> None:
    """Otherwise the tests above prove little."""
    faulty.put_large("large", pattern(12 * MIB))
    assert read(faulty, "large") == read(sound, "large") == pattern(12 * MIB)
    assert proxy.seen.count("put part") == 3
