"""A stream reads every complete file once, whatever arrives when, and wherever it is interrupted."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.clock import ManualClock
from strata.data import stream
from strata.data.stream import FileStream, Listed, complete_files
from strata.errors import InvalidArgument, StorageUnavailable
from strata.identity import Identity

BATCH = 3


class Rows:
    """A loader over files with rows (name, number), in order."""

    def __init__(self, paths: list[str], sizes: Mapping[str, int]) -> None:
        names = [path.removeprefix("dir/") for path in paths]
        self._rows = [(name, number) for name in names for number in range(sizes[name])]
        self._at = 0
        self.dataset = self
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        while self._at < len(self._rows):
            batch = self._rows[self._at : self._at + BATCH]
            self._at += len(batch)
            yield batch

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self._at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at = state["at"]

    def close(self) -> None:
        pass


class Directory:
    """Files whose number of rows is their size."""

    def __init__(self) -> None:
        self.files: dict[str, Listed] = {}
        self.num_opened = 0
        self._time = 0

    def write(self, name: str, size: int) -> None:
        self._time += 1
        self.files[name] = Listed(size, self._time)

    def open(self, paths: list[str]) -> Rows:
        self.num_opened += 1
        return Rows(paths, {name: each.size_bytes for name, each in self.files.items()})

    def stream(self, clock: ManualClock | None = None) -> FileStream:
        return FileStream("dir/", lambda: dict(self.files), self.open, Identity(), clock=clock or ManualClock())


def no_wish(is_active: bool) -> str:
    return ""


def read_pass(of: FileStream) -> list[tuple[str, int]]:
    """Look twice, so that new files count as complete; read the pass, if one begins."""
    for _ in range(2):
        if of.look(no_wish).files:
            rows = [row for batch in of for row in batch]
            of.set_epoch(of.position[0] + 1)
            return rows
    return []


def test_each_pass_reads_the_files_that_are_new_oldest_first() -> None:
    directory = Directory()
    directory.write("z", 2)
    directory.write("a", 1)
    found = directory.stream()
    assert read_pass(found) == [("z", 0), ("z", 1), ("a", 0)]
    assert read_pass(found) == []
    directory.write("b", 1)
    assert read_pass(found) == [("b", 0)]
    assert found.position == (2, 0)


def test_a_file_that_grows_or_is_empty_is_left_for_later() -> None:
    before = {"grows": Listed(5, 1), "touched": Listed(5, 1), "empty": Listed(0, 1), "done": Listed(5, 1)}
    now = {**before, "grows": Listed(6, 1), "touched": Listed(5, 2), "new": Listed(5, 1)}
    assert complete_files(now, before, ()) == ("done",)
    assert complete_files(now, now, {"done"}) == ("grows", "new", "touched")


def test_a_pass_has_a_limited_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_PASS_FILES", 2)
    directory = Directory()
    for name in "abc":
        directory.write(name, 1)
    found = directory.stream()
    assert [len(read_pass(found)) for _ in range(3)] == [2, 1, 0]


def test_a_wish_comes_before_new_files_and_knows_of_them() -> None:
    directory = Directory()
    found = directory.stream()
    assert found.look(lambda is_active: f"active: {is_active}").wish == "active: False"
    directory.write("a", 1)
    directory.write("empty", 0)
    assert found.look(lambda is_active: f"active: {is_active}").wish == "active: True"
    assert found.look(no_wish).files == ("a",)


def test_finished_files_are_remembered_until_they_are_deleted() -> None:
    directory = Directory()
    for name in "ab":
        directory.write(name, 1)
    found = directory.stream()
    read_pass(found)
    full = found.state_dict()["finished"]
    assert stream._unpacked(full) == {"a", "b"}
    files, directory.files = directory.files, {}
    found.look(no_wish)
    assert found.state_dict()["finished"] == full, "an empty listing is rather an outage"
    directory.files = {"b": files["b"]}
    found.look(no_wish)
    assert stream._unpacked(found.state_dict()["finished"]) == {"b"}


def test_names_are_saved_in_a_length_that_rarely_changes() -> None:
    lengths = {len(stream._packed([f"part-{n:09}" for n in range(number)])) for number in range(1, 2_000)}
    assert len(lengths) <= 16


def test_listing_a_large_directory_takes_a_tenth_of_the_time() -> None:
    clock, directory = ManualClock(), Directory()

    def slow() -> Mapping[str, Listed]:
        clock.advance(7.0)
        return {}

    found = FileStream("dir", slow, directory.open, Identity(), clock=clock)
    assert found.look(no_wish).pause_s == pytest.approx(70.0)


def test_a_store_that_cannot_be_listed_is_tried_again_for_ten_minutes() -> None:
    clock, directory = ManualClock(), Directory()

    def fail() -> Mapping[str, Listed]:
        raise StorageUnavailable("no answer")

    found = FileStream("dir", fail, directory.open, Identity(), clock=clock)
    assert found.look(no_wish).files == ()
    clock.advance(stream.UNAVAILABLE_S + 1)
    with pytest.raises(StorageUnavailable):
        found.look(no_wish)


def test_the_state_of_another_loader_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not of a stream"):
        Directory().stream().load_state_dict({"version": 1, "position": 3})


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 9), st.integers(0, 7)),
            st.sampled_from([("train",), ("save",), ("crash",)]),
        ),
        max_size=40,
    )
)
def test_every_row_is_read_exactly_once_wherever_a_run_is_interrupted(events: list[tuple[Any, ...]]) -> None:
    directory, written = Directory(), dict[str, int]()
    found, trained = directory.stream(), list[tuple[str, int]]()
    saved: tuple[dict[str, Any], list[tuple[str, int]]] = (found.state_dict(), [])
    batches: Iterator[Any] | None = None

    def train() -> bool:
        """Take one batch; return whether there was one or may be more."""
        nonlocal batches
        if batches is None:
            if not found.look(no_wish).files:
                return False
            batches = iter(found)
        batch = next(batches, None)
        if batch is None:
            found.set_epoch(found.position[0] + 1)
            batches = None
        else:
            trained.extend(batch)
        return True

    for event in events:
        if event[0] == "write" and f"f{event[1]}" not in written:
            written[f"f{event[1]}"] = event[2]
            directory.write(f"f{event[1]}", event[2])
        elif event[0] == "train":
            train()
        elif event[0] == "save":
            saved = copy.deepcopy((found.state_dict(), trained))
        elif event[0] == "crash":
            found, batches = directory.stream(), None
            state, trained = copy.deepcopy(saved)
            found.load_state_dict(state)
    idle = 0
    while idle < 2:
        idle = 0 if train() else idle + 1
    assert sorted(trained) == sorted((name, number) for name, size in written.items() for number in range(size))
