"""Snapshots of tables: what is saved, whole or by changed slots, is what the table holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from test_servers_table import WIDTH, TableMachine, bits, keys_of

from strata.errors import InvalidArgument, LimitExceeded
from strata.servers.placement import Placement
from strata.servers.table.optimizers import SGD, LazyAdam, RowWiseAdagrad
from strata.servers.table.sketch import CountSketch
from strata.servers.table.snapshot import Part, Snapshot, padded
from strata.servers.table.table import Table, TableSpec


def copy_of(snapshot: Snapshot) -> Snapshot:
    parts = {name: Part(*(array.copy() for array in part)) for name, part in snapshot.parts.items()}
    return Snapshot(parts=parts, num_updates=snapshot.num_updates, seen=snapshot.seen)


class Saver:
    """Saves as an incremental checkpoint does: all slots of a table first, and then those that changed."""

    def __init__(self) -> None:
        self.saved: Snapshot | None = None
        self.mark = 0
        self.num_written = 0
        self._table: Table | None = None

    def save(self, table: Table) -> Snapshot:
        """Return what is saved, after a comparison with the table."""
        if table is not self._table:
            self.saved, self.mark, self._table = None, 0, table
        self._save(table)
        assert self.saved is not None
        for old, new in zip(self.saved, table.snapshot(), strict=True):
            assert [array.tobytes() for array in old] == [array.tobytes() for array in new]
        return self.saved

    def _save(self, table: Table) -> None:
        dirty = table.dirty_slots(self.mark)
        snapshot = table.snapshot()
        assert dirty.keys() == snapshot.parts.keys()
        self.mark = snapshot.mark
        if self.saved is None or shapes(self.saved) != shapes(snapshot):
            self.saved = copy_of(snapshot)
            return
        for name, slots in dirty.items():
            assert (np.diff(slots) > 0).all()
            self.num_written += len(slots)
            for old, new in zip(self.saved.parts[name], snapshot.parts[name], strict=True):
                old[slots] = new[slots]
        self.saved = Snapshot(parts=self.saved.parts, num_updates=snapshot.num_updates, seen=snapshot.seen)


def shapes(snapshot: Snapshot) -> dict[str, list[Any]]:
    return {name: [array.shape for array in part] for name, part in snapshot.parts.items()}


class SnapshotMachine(TableMachine):
    """A table that is saved by changed slots and loaded, against a dictionary of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.saver = Saver()
        """Saves now and then, so that changes add up."""
        self.saver_of_every_step = Saver()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.rows:
            keys = data.draw(st.sets(st.sampled_from(sorted(self.rows)), max_size=4))
            self.table.evict(self.table._index.find(keys_of(*keys)))
            for key in keys:
                self.forget(key)

    @rule()
    def save_incrementally(self) -> None:
        self.saver.save(self.table)

    @rule(continues=st.booleans())
    def load_the_increments(self, continues: bool) -> None:
        restored = self.new_table()
        restored.load(Snapshot.of(self.saver.save(self.table).tree()))
        assert bits(restored) == bits(self.table)
        assert restored.num_updates == self.table.num_updates
        if continues:
            self.table = restored

    @rule(servers=st.integers(1, 3), continues=st.booleans())
    def load_on_other_servers_and_back(self, servers: int, continues: bool) -> None:
        placement = Placement.first([f"s{number}" for number in range(servers)])
        saved = copy_of(self.table.snapshot())
        others = [self.new_table() for _ in range(servers)]
        for number, other in enumerate(others):
            other.load(saved, lambda keys, number=number: placement.owners_of(keys) == number)
        assert sum(map(len, others)) == len(self.table)
        restored = self.new_table()
        for other in others:
            restored.load(copy_of(other.snapshot()))
        assert bits(restored) == bits(self.table)
        if continues:
            self.table = restored

    @invariant()
    def what_was_saved_holds_the_rows(self) -> None:
        saved = self.saver_of_every_step.save(self.table)
        keys = [key for part in saved for key in part.keys[part.used == 1].tolist()]
        assert sorted(keys) == sorted(self.rows)


@pytest.mark.usefixtures("kernels")
def test_a_table_saved_by_changed_slots_holds_what_a_dictionary_holds() -> None:
    run_state_machine_as_test(
        SnapshotMachine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None)
    )


@given(st.integers(0, 2**31))
def test_the_length_of_a_snapshot_is_at_most_an_eighth_more_than_its_slots(num_slots: int) -> None:
    length = padded(num_slots)
    assert num_slots <= length <= max(1_024, num_slots * 9 / 8)
    assert padded(length) == length


def test_the_length_of_a_snapshot_changes_8_times_while_a_table_doubles() -> None:
    assert len({padded(num) for num in range(4_097, 8_193)}) == 8


def test_a_snapshot_of_a_growing_table_keeps_its_shape_and_its_slots() -> None:
    table = Table(TableSpec(name="t", width=WIDTH, optimizer=RowWiseAdagrad()))
    saver = Saver()
    seen = set()
    for step in range(1, 101):
        keys = np.arange(step * 20, step * 20 + 40, dtype=np.uint64)
        table.push(keys, np.full((40, WIDTH), step, np.float32), step)
        saved = saver.save(table)
        seen.add(str(shapes(saved)))
        restored = Table(table.spec)
        restored.load(saved)
        assert bits(restored) == bits(table)

    assert len(table) == 2_020
    assert len(seen) == 1 + 8  # up to 1,024 rows, and then 8 until 2,048
    assert saver.num_written == (100 - len(seen)) * 40


def test_a_snapshot_is_a_view_of_the_table() -> None:
    table = Table(TableSpec(name="t", width=WIDTH, optimizer=SGD(lr=1.0)))
    table.push(keys_of(5), np.ones((1, WIDTH), np.float32), 1)
    (part,) = table.snapshot()

    table.push(keys_of(5), np.ones((1, WIDTH), np.float32), 2)

    assert part.weights[0].tolist() == table.pull(keys_of(5))[0].tolist()
    assert len(part.keys) == 1_024
    assert part.used.sum() == 1


def test_a_push_of_a_worker_that_is_behind_is_dirty() -> None:
    table = Table(TableSpec(name="t", width=WIDTH))
    gradient = np.ones((1, WIDTH), np.float32)
    table.push(keys_of(5), gradient, 100)
    table.push(keys_of(6), gradient, 100)
    mark = table.snapshot().mark

    table.push(keys_of(6), gradient, 7)

    assert {name: slots.tolist() for name, slots in table.dirty_slots(mark).items()} == {"memory": [1]}


def test_counts_of_ids_that_are_not_admitted_yet_are_part_of_a_snapshot() -> None:
    spec = TableSpec(name="t", width=WIDTH, admit_after=3)
    gradient = np.ones((1, WIDTH), np.float32)
    table, restored = Table(spec), Table(spec)
    table.push(keys_of(5), gradient, 1)
    table.push(keys_of(5), gradient, 2)

    restored.load(Snapshot.of(table.snapshot().tree()))

    assert restored.push(keys_of(5), gradient, 3) == 1
    assert restored.num_updates == 3


def test_sketches_of_two_servers_merge_without_counting_too_little() -> None:
    merged, first, second = (CountSketch(num_cells=64) for _ in range(3))
    for _ in range(3):
        first.add(keys_of(1, 2, 3))
    second.add(keys_of(4, 5))
    merged.merge(first.cells)
    merged.merge(second.cells)

    assert (merged.add(keys_of(1, 2, 3, 4, 5)) >= [4, 4, 4, 2, 2]).all()
    with pytest.raises(InvalidArgument, match=r"\[4, 8\] does not fit one of shape \[4, 64\]"):
        merged.merge(CountSketch(num_cells=8).cells)


def test_a_table_without_optimizer_state_saves_no_empty_arrays() -> None:
    table = Table(TableSpec(name="t", width=WIDTH, optimizer=SGD()))
    table.push(keys_of(1), np.ones((1, WIDTH), np.float32), 1)
    tree = table.snapshot().tree()

    assert set(tree["parts"]["memory"]) == {"keys", "weights", "versions", "counts", "used"}
    assert Snapshot.of(tree).parts["memory"].state.shape == (1_024, 0)


def test_a_snapshot_that_does_not_fit_is_refused_and_nothing_is_loaded() -> None:
    table = Table(TableSpec(name="big", width=WIDTH))
    table.push(np.arange(10, dtype=np.uint64), np.ones((10, WIDTH), np.float32), 1)
    saved = table.snapshot()
    small = Table(TableSpec(name="small", width=WIDTH, max_rows=9))
    adam = Table(TableSpec(name="adam", width=WIDTH, optimizer=LazyAdam()))

    with pytest.raises(LimitExceeded, match="'small' would have 10 rows, more than max_rows=9"):
        small.load(saved)
    with pytest.raises(InvalidArgument, match="3 weights and 0 numbers of state, but table 'adam' has 3 and 6"):
        adam.load(saved)

    assert len(small) == len(adam) == 0
    small.load(saved, lambda keys: keys > 0)
    assert len(small) == 9


def test_what_is_not_a_snapshot_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="it has no 'parts'"):
        Snapshot.of({})
    with pytest.raises(InvalidArgument, match="it has no 'weights'"):
        Snapshot.of({"parts": {"memory": {"keys": keys_of(1)}}, "num_updates": 0})
    tree = Table(TableSpec(name="t", width=WIDTH)).snapshot().tree()
    tree["parts"]["memory"]["keys"] = keys_of(1)
    with pytest.raises(InvalidArgument, match="differ in length"):
        Snapshot.of(tree)
