"""The contract of every store. An implementation supplies a fixture `place`, the location of its objects."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import InvalidArgument, ObjectExists, ObjectMissing, StorageError, TransferCancelled
from strata.storage import Store, Watch

MIB = 1 << 20
PAGE = 4_096
SIZES = (0, 1, PAGE - 1, PAGE, PAGE + 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 40 * MIB)
SPANS = (
    (0, 40 * MIB),
    (0, 0),
    (0, 8 * MIB),
    (PAGE, 16 * MIB + 5),
    (1, 16 * MIB),
    (40 * MIB - 1, 1),
    (8 * MIB - 7, 14),
    (24 * MIB, 16 * MIB),
    (3 * MIB + 3, 37 * MIB - 3),
)
BIG = 48 * MIB
"""Enough pieces that the first can end before the last begins."""
NUM_RACERS = 16
ESCAPES = ("", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../b", "a/../../b", "a/./b", "a\0b", "a\\b", "a\nb")
REFUSED = (*ESCAPES, "a/.tmp-1", ".tmp-1/b", "\udc80", "x" * 256, "/".join(["x" * 250] * 5))


class Place(Protocol):
    def open(self) -> Store:
        """Return another handle on the same objects."""
        ...

    def clear(self) -> None:
        """Switch to another, empty location."""
        ...


def memory_of(num_bytes: int, *, shift: int = 0) -> memoryview:
    """Return zeros on a page boundary, or `shift` bytes after one."""
    return memoryview(mmap.mmap(-1, num_bytes + shift + 1))[shift : shift + num_bytes]


def pattern(num_bytes: int, *, seed: int = 0, shift: int = 0) -> memoryview:
    """Return bytes of which no two pages are equal."""
    memory = memory_of(num_bytes, shift=shift)
    memory[:] = np.random.default_rng(seed).bytes(num_bytes)
    return memory


def keys_of(store: Store, prefix: str = "") -> list[str]:
    return [listed.key for listed in store.walk(prefix)]


class StoreContract:
    @pytest.fixture
    def store(self, place: Place) -> Iterator[Store]:
        store = place.open()
        yield store
        store.close()

    def assert_children(self, store: Store, expected: list[str], prefix: str = "") -> None:
        assert store.children(prefix) == expected

    # -- small objects ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 16, b"\0" * 100_000], ids=len)
    def test_a_put_object_is_read_back(self, store: Store, data: bytes) -> None:
        store.put("a/b", data)
        assert store.get("a/b", max_bytes=1 << 20) == data
        assert store.size("a/b") == len(data)

    def test_another_handle_sees_the_object(self, place: Place, store: Store) -> None:
        other = place.open()
        store.put("a/b", b"1")
        assert other.get("a/b", max_bytes=1) == b"1"
        assert keys_of(other) == ["a/b"]
        store.delete(["a/b"])
        assert keys_of(other) == []
        other.close()

    def test_a_second_put_replaces_the_first(self, store: Store) -> None:
        store.put("a", b"first, and longer")
        store.put("a", b"second")
        assert store.get("a", max_bytes=100) == b"second"

    def test_an_object_larger_than_expected_is_not_read(self, store: Store) -> None:
        store.put("a", b"12345")
        assert store.get("a", max_bytes=5) == b"12345"
        with pytest.raises(StorageError, match="has 5 bytes, more than the limit of 4") as caught:
            store.get("a", max_bytes=4)
        assert not isinstance(caught.value, ObjectMissing)

    def test_a_missing_object_raises_object_missing(self, store: Store) -> None:
        store.put("there/is", b"")
        for key in ("nowhere", "there", "there/is/not", "there/isnt"):
            with pytest.raises(ObjectMissing, match=f"{key} (is a directory|does not exist)"):
                store.get(key, max_bytes=1)
            with pytest.raises(ObjectMissing):
                store.size(key)
            for num_bytes in (0, 1, 8 * MIB):
                with pytest.raises(ObjectMissing):
                    store.read_into(key, 0, memory_of(num_bytes))

    # -- only if absent --------------------------------------------------------------------------------------------

    def test_a_conditional_put_leaves_an_existing_object(self, store: Store) -> None:
        store.put("a/manifest", b"first", if_absent=True)
        with pytest.raises(ObjectExists, match="manifest already exists"):
            store.put("a/manifest", b"second", if_absent=True)
        with pytest.raises(ObjectExists):
            store.put("a/manifest", b"first", if_absent=True)
        assert store.get("a/manifest", max_bytes=10) == b"first"
        assert keys_of(store) == ["a/manifest"]

    def test_a_key_that_was_deleted_is_absent_again(self, store: Store) -> None:
        store.put("a", b"first", if_absent=True)
        store.delete(["a"])
        store.put("a", b"second", if_absent=True)
        assert store.get("a", max_bytes=10) == b"second"

    def test_of_16_concurrent_conditional_puts_exactly_1_succeeds(self, place: Place) -> None:
        stores = [place.open() for _ in range(NUM_RACERS)]
        start = threading.Barrier(NUM_RACERS)

        def race(number: int) -> int | None:
            start.wait()
            try:
                stores[number].put("new/a", b"%d" % number, if_absent=True)
            except ObjectExists:
                return None
            return number

        with ThreadPoolExecutor(NUM_RACERS) as pool:
            winners = [number for number in pool.map(race, range(NUM_RACERS)) if number is not None]
        assert len(winners) == 1
        assert stores[0].get("new/a", max_bytes=2) == b"%d" % winners[0]
        for store in stores:
            store.close()

    # -- large objects ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_a_large_object_of_any_size_is_read_back(self, store: Store, num_bytes: int, shift: int) -> None:
        data = pattern(num_bytes, seed=num_bytes, shift=shift)
        store.put_large("a/large", data)
        assert store.size("a/large") == num_bytes
        out = memory_of(num_bytes, shift=shift)
        store.read_into("a/large", 0, out)
        assert out == data
        assert [(listed.key, listed.size_bytes) for listed in store.walk()] == [("a/large", num_bytes)]

    def test_any_span_can_be_read_into_any_memory(self, store: Store) -> None:
        data = pattern(40 * MIB)
        store.put_large("a", data)
        for (offset, num_bytes), shift in itertools.product(SPANS, (0, 1)):
            memory = memory_of(num_bytes + 2, shift=shift)
            store.read_into("a", offset, memory[:num_bytes])
            assert memory[:num_bytes] == data[offset : offset + num_bytes], (offset, num_bytes, shift)
            assert bytes(memory[num_bytes:]) == b"\0\0"  # nothing is written after the end

    @pytest.mark.parametrize(
        ("offset", "num_bytes"), [(0, 20 * MIB + 1), (20 * MIB, 1), (99 * MIB, 1), (10 * MIB, 20 * MIB)]
    )
    def test_an_object_that_ends_too_early_is_not_missing(self, store: Store, offset: int, num_bytes: int) -> None:
        store.put_large("a", pattern(20 * MIB))
        with pytest.raises(StorageError, match=r"a ends (at|before) ") as caught:
            store.read_into("a", offset, memory_of(num_bytes))
        assert not isinstance(caught.value, ObjectMissing)

    def test_a_negative_offset_is_rejected(self, store: Store) -> None:
        store.put("a", b"123")
        with pytest.raises(InvalidArgument, match="is negative"):
            store.read_into("a", -1, memory_of(1))

    def test_a_large_object_can_be_got_and_a_small_one_read_into(self, store: Store) -> None:
        data = pattern(9 * MIB)
        store.put_large("large", data)
        assert store.get("large", max_bytes=9 * MIB) == data
        store.put("small", b"12345")
        out = memory_of(3)
        store.read_into("small", 1, out)
        assert bytes(out) == b"234"

    def test_memory_of_any_element_type_is_accepted(self, store: Store) -> None:
        values = np.arange(3 * MIB, dtype=np.float32)
        store.put_large("a", memoryview(values))
        out = np.zeros_like(values)
        store.read_into("a", 0, memoryview(out))
        assert np.array_equal(out, values)

    def test_several_transfers_may_run_at_once(self, store: Store) -> None:
        datas = [pattern(9 * MIB + number, seed=number) for number in range(6)]

        def there_and_back(number: int) -> bool:
            store.put_large(f"d{number}/x", datas[number])
            out = memory_of(datas[number].nbytes)
            store.read_into(f"d{number}/x", 0, out)
            return out == datas[number]

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(there_and_back, range(6)))
        self.assert_children(store, [f"d{number}" for number in range(6)])

    def test_progress_adds_up_to_the_size(self, store: Store) -> None:
        done: list[int] = []
        store.put_large("a", pattern(BIG + 3), watch=Watch(done.append))
        assert sum(done) == BIG + 3
        assert len(done) >= 2
        assert min(done) > 0

    # -- atomicity -------------------------------------------------------------------------------------------------

    def test_readers_see_the_old_object_or_the_new_one_never_a_mixture(self, place: Place, store: Store) -> None:
        num_bytes = 20 * MIB + 1
        versions = [np.full(num_bytes, number, np.uint8) for number in range(2)]
        store.put_large("a", memoryview(versions[0]))
        stop = threading.Event()

        def read() -> set[int]:
            reader, seen = place.open(), set()
            out = np.zeros(num_bytes, np.uint8)
            while not stop.is_set():
                try:
                    reader.read_into("a", 0, memoryview(out))
                except StorageError as error:
                    assert "replaced 3 times" in str(error)  # noqa: PT017 - it may say so, not give a mixture
                    continue
                assert out[0] == out[num_bytes // 2] == out[-1]
                assert (out == out[0]).all()
                assert reader.size("a") == num_bytes
                seen.add(int(out[0]))
            reader.close()
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            for number in range(6):
                store.put_large("a", memoryview(versions[number % 2]))
            stop.set()
            for reader in readers:
                assert reader.result() <= {0, 1}

    def test_no_object_is_listed_before_it_is_complete(self, place: Place, store: Store) -> None:
        other = place.open()
        seen = []

        def look(_: int) -> None:
            seen.append(keys_of(other))

        store.put_large("d/large", pattern(BIG), watch=Watch(look))
        assert seen[0] == []
        assert keys_of(other) == ["d/large"]
        other.close()

    def test_a_transfer_that_is_already_cancelled_does_not_begin(self, store: Store) -> None:
        for num_bytes in (1, 40 * MIB):
            watch = Watch()
            watch.cancel()
            with pytest.raises(TransferCancelled):
                store.put_large("d/a", pattern(num_bytes), watch=watch)
            assert keys_of(store) == []
            self.assert_children(store, [])

    def test_a_cancelled_transfer_leaves_nothing(self, store: Store) -> None:
        watch = Watch(lambda _: watch.cancel())
        with pytest.raises(TransferCancelled):
            store.put_large("d/e/a", pattern(BIG), watch=watch)
        assert keys_of(store) == []
        self.assert_children(store, [])
        store.put_large("d/e/a", pattern(9 * MIB))
        assert keys_of(store) == ["d/e/a"]

    def test_a_failed_transfer_leaves_the_old_object(self, store: Store) -> None:
        store.put("d/a", b"old")

        def fail(_: int) -> None:
            raise RuntimeError("the callback broke")

        with pytest.raises(RuntimeError, match="the callback broke"):
            store.put_large("d/a", pattern(BIG), watch=Watch(fail))
        assert store.get("d/a", max_bytes=3) == b"old"
        assert keys_of(store) == ["d/a"]

    # -- listing ---------------------------------------------------------------------------------------------------

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert keys_of(store) == []
        assert keys_of(store, "a/b") == []
        self.assert_children(store, [])
        self.assert_children(store, [], "a/b")

    def test_walk_lists_every_object_sorted_by_key(self, store: Store) -> None:
        keys = ["b", "a/b/c", "a-b/c", "a/b.txt", "a/a", "ab/c", "ä", "B", "a b/c"]
        for number, key in enumerate(keys):
            store.put(key, b"x" * number)
        listed = list(store.walk())
        assert [one.key for one in listed] == sorted(keys)
        assert [one.size_bytes for one in listed] == [keys.index(key) for key in sorted(keys)]
        assert all(abs(one.modified_at_s - time.time()) < 600 for one in listed)

    def test_a_prefix_is_a_directory_not_the_beginning_of_a_name(self, store: Store) -> None:
        for key in ("a/1", "a/b/2", "ab/3", "a.4"):
            store.put(key, b"")
        assert keys_of(store, "a") == ["a/1", "a/b/2"]
        assert keys_of(store, "a/b") == ["a/b/2"]
        assert keys_of(store, "a/1") == []
        self.assert_children(store, ["b"], "a")

    def test_children_are_the_directories_not_the_objects(self, store: Store) -> None:
        for key in ("top", "b/x", "a/x", "a/y", "a/c/d/e", "a-b/x", "a/ö/x"):
            store.put(key, b"")
        self.assert_children(store, ["a", "a-b", "b"])
        self.assert_children(store, ["c", "ö"], "a")
        self.assert_children(store, ["d"], "a/c")
        self.assert_children(store, [], "a/x")

    # -- deleting --------------------------------------------------------------------------------------------------

    def test_deleting_a_missing_object_is_ignored(self, store: Store) -> None:
        store.put("a/b", b"")
        store.put("a/c", b"")
        store.delete([])
        store.delete(["nowhere", "a/b", "a", "a/b/c", "a/b"])
        assert keys_of(store) == ["a/c"]
        store.delete(iter(["a/c"]))
        self.assert_children(store, [])

    def test_1200_objects_are_listed_and_deleted(self, store: Store) -> None:
        keys = [f"d{number % 3}/{number:04}" for number in range(1_200)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        assert keys_of(store) == sorted(keys)
        self.assert_children(store, ["d0", "d1", "d2"])
        store.delete(keys[:-1])
        assert keys_of(store) == keys[-1:]

    def test_a_writer_is_not_disturbed_by_deletes_beside_it(self, place: Place) -> None:
        """This holds even while a directory is created and removed with its only object."""

        def work(number: int) -> None:
            store = place.open()
            for _ in range(30):
                store.put(f"d/e/{number}", b"x")
                store.delete([f"d/e/{number}"])
            store.put(f"d/e/{number}", b"last")
            store.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert keys_of(place.open()) == [f"d/e/{number}" for number in range(4)]

    # -- keys ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", REFUSED, ids=lambda key: ascii(key[:20]))
    def test_keys_that_would_escape_or_are_ambiguous_are_rejected(self, store: Store, key: str) -> None:
        calls = [
            lambda: store.put(key, b""),
            lambda: store.put(key, b"", if_absent=True),
            lambda: store.put_large(key, memory_of(1)),
            lambda: store.get(key, max_bytes=1),
            lambda: store.read_into(key, 0, memory_of(1)),
            lambda: store.size(key),
            lambda: store.delete([key]),
            *([lambda: list(store.walk(key)), lambda: store.children(key)] if key else []),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument, match="is not a valid key"):
                call()
        assert keys_of(store) == []

    @pytest.mark.parametrize(
        "key",
        ["a b", "a+b", "a%2Fb", "a%b", "ä/☃", "a*b", "a?b=c&d", "a#b", "a:b", "~a", "...", "-", "x" * 255, "'\"<"],
    )
    def test_other_keys_mean_the_same_everywhere(self, store: Store, key: str) -> None:
        store.put(f"{key}/{key}", key.encode())
        assert store.get(f"{key}/{key}", max_bytes=1_000) == key.encode()
        assert keys_of(store) == keys_of(store, key) == [f"{key}/{key}"]
        self.assert_children(store, [key.split("/", maxsplit=1)[0]])
        store.delete([f"{key}/{key}"])
        assert keys_of(store) == []

    def test_a_store_may_be_closed_twice(self, store: Store) -> None:
        store.put_large("a", pattern(9 * MIB))
        store.close()
        store.close()

    @settings(
        max_examples=20,
        # The location is cleared below, and each implementation has its own executor.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["put", "new", "large", "delete"]), st.sampled_from(["a/x", "a/y", "b/c/x", "d"])
            ),
            max_size=15,
        )
    )
    def test_any_sequence_of_calls_behaves_like_a_dictionary(self, place: Place, steps: list[tuple[str, str]]) -> None:
        place.clear()
        store = place.open()
        expected: dict[str, bytes] = {}
        for number, (action, key) in enumerate(steps):
            data = b"%d" % number
            if action == "delete":
                store.delete([key])
                expected.pop(key, None)
            elif action == "new" and key in expected:
                with pytest.raises(ObjectExists):
                    store.put(key, data, if_absent=True)
            else:
                {"put": store.put, "new": store.put, "large": store.put_large}[action](key, memoryview(data))
                expected[key] = data
        assert {key: store.get(key, max_bytes=2) for key in keys_of(store)} == expected
        self.assert_children(store, sorted({key.split("/")[0] for key in expected if "/" in key}))
        store.close()
