"""Tables larger than memory: rows in a file have the same values, and rows in use are in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from test_servers_snapshot import SnapshotMachine
from test_servers_table import WIDTH, bits, keys_of, without_kernels

from strata.errors import InvalidArgument, LimitExceeded
from strata.servers.cold_file import ColdFiles
from strata.servers.table.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad
from strata.servers.table.table import Table, TableSpec


class ColdMachine(SnapshotMachine):
    """Everything that a table promises holds with most of its rows in a file."""

    spec = TableSpec(
        name="t", width=WIDTH, optimizer=SGD(lr=0.5), max_rows=SnapshotMachine.max_rows, memory_rows=4, evict_after=3
    )

    def new_table(self) -> Table:
        return Table(self.spec, bytearray)


@pytest.mark.usefixtures("kernels")
def test_a_table_with_rows_in_a_file_holds_what_a_dictionary_holds() -> None:
    run_state_machine_as_test(ColdMachine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


PUSHED_AND_REMOVED = st.tuples(st.sets(st.integers(0, 40), max_size=15), st.sets(st.integers(0, 40), max_size=4))


@pytest.mark.parametrize("optimizer", [SGD(), Adagrad(), RowWiseAdagrad(), LazyAdam(), FTRL(l1=0.01)])
@pytest.mark.parametrize("with_kernels", [False, True])
@settings(max_examples=30, deadline=None)
@given(st.lists(PUSHED_AND_REMOVED, min_size=1, max_size=12), st.integers(1, 30), st.sampled_from([1, 2]))
def test_rows_in_a_file_have_the_same_bits_as_rows_in_memory(
    optimizer: Any, with_kernels: bool, batches: list[tuple[set[int], set[int]]], memory_rows: int, admit_after: int
) -> None:
    def train(memory_rows: int | None) -> list[Any]:
        spec = TableSpec(
            name="t",
            width=17,
            optimizer=optimizer,
            max_rows=30,
            memory_rows=memory_rows,
            evict_after=2,
            admit_after=admit_after,
        )
        table, seen = Table(spec, bytearray), []
        for step, (pushed, removed) in enumerate(batches, start=1):
            keys = keys_of(*sorted(pushed))
            seen.append(table.pull(keys).tobytes())
            gradients = np.random.default_rng(step).normal(size=(len(keys), 17)).astype(np.float32)
            try:
                seen.append(table.push(keys, gradients, step))
            except LimitExceeded:
                seen.append(None)
            table.remove(keys_of(*sorted(removed)))
            seen.append(bits(table))
        return seen

    with pytest.MonkeyPatch.context() as patched:
        if not with_kernels:
            without_kernels(patched)
        assert train(memory_rows) == train(None)


@pytest.mark.usefixtures("kernels")
def test_rows_in_use_move_to_memory_and_are_hit_there() -> None:
    table = Table(TableSpec(name="t", width=WIDTH, max_rows=1_000, memory_rows=100), bytearray)
    for step in range(1, 11):  # a new hundred in each step
        keys = np.arange(step * 100 - 100, step * 100, dtype=np.uint64)
        table.push(keys, np.ones((100, WIDTH), np.float32), step)
    table.pull(np.arange(1_000, dtype=np.uint64))
    assert (table.num_hits, table.num_misses) == (100, 900)

    in_use = np.arange(0, 1_000, 20, dtype=np.uint64)
    for step in range(11, 21):
        table.pull(in_use)
        table.push(in_use, np.ones((50, WIDTH), np.float32), step)

    # Of the 50 rows in use, 5 were in memory at first, and all of them from then on.
    assert (table.num_hits - 100, table.num_misses - 900) == (5 + 9 * 50, 45)


@pytest.mark.parametrize("pushes_per_tick", [2, 1_000])
@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.integers(0, 119), min_size=1, max_size=64), max_size=5), st.integers(0, 2**32))
def test_no_row_in_the_file_has_a_later_gradient_than_one_in_memory(
    pushes_per_tick: int, batches: list[set[int]], seed: int
) -> None:
    """In large batches, and in small ones, for which the rows that leave memory were noted some pushes ago."""
    table = Table(TableSpec(name="t", width=WIDTH, max_rows=120, memory_rows=64), bytearray)
    generator = np.random.default_rng(seed)
    first = [range(start, start + 10) for start in range(0, 120, 10)]
    small = [generator.choice(120, generator.integers(1, 4), replace=False) for _ in range(60)]
    for number, batch in enumerate([*first, *batches, *small]):
        keys = keys_of(*sorted(map(int, batch)))
        table.push(keys, np.ones((len(keys), WIDTH), np.float32), 1 + number // pushes_per_tick)

        parts = table.snapshot().parts
        if "file" in parts:
            in_memory, in_file = (parts[name].versions[parts[name].used == 1] for name in ("memory", "file"))
            assert len(in_memory) == 64
            assert in_memory.min() >= in_file.max()
        num_misses = table.num_misses
        table.pull(keys)
        assert table.num_misses == num_misses


def test_a_pull_moves_no_row_and_absent_rows_are_no_misses() -> None:
    table = Table(TableSpec(name="t", width=WIDTH, max_rows=10, memory_rows=2), bytearray)
    table.push(np.arange(4, dtype=np.uint64), np.ones((4, WIDTH), np.float32), 1)
    mark = table.snapshot().mark

    for _ in range(2):
        table.pull(keys_of(0, 1, 2, 3, 77))

    assert (table.num_hits, table.num_misses) == (4, 4)
    assert not any(map(len, table.dirty_slots(mark).values()))


def test_a_table_counts_its_rows_in_memory_apart_from_its_file(tmp_path: Path) -> None:
    spec = TableSpec(name="t", width=64, optimizer=RowWiseAdagrad(), max_rows=10_000, memory_rows=1_000)
    table = Table(spec, ColdFiles(tmp_path))
    keys = np.arange(10_000, dtype=np.uint64)
    table.push(keys, np.ones((10_000, 64), np.float32), 1)

    assert spec.file_bytes == 9_000 * 65 * 4
    assert table.num_bytes <= spec.max_bytes < 1_000 * 65 * 4 + 10_000 * 40


def test_the_file_of_a_table_has_no_name_and_its_rows_are_read_from_it(tmp_path: Path) -> None:
    directory = tmp_path / "cold"
    spec = TableSpec(name="t", width=WIDTH, optimizer=Adagrad(), max_rows=5_000, memory_rows=10)
    table, expected = Table(spec, ColdFiles(directory)), Table(TableSpec(name="t", width=WIDTH, optimizer=Adagrad()))
    for step in range(1, 4):
        keys = np.arange(step * 1_000, step * 1_000 + 2_000, dtype=np.uint64)
        for each in (table, expected):
            each.push(keys, np.full((2_000, WIDTH), step, np.float32), step)

    assert list(directory.iterdir()) == []
    assert bits(table) == bits(expected)
    restored = Table(spec, ColdFiles(directory))
    restored.load(table.snapshot())
    assert bits(restored) == bits(table)


def test_a_file_that_does_not_fit_is_refused_with_its_size(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match=r"a file of 4611686018427387904 bytes .* lower max_rows"):
        ColdFiles(tmp_path)(1 << 62)


def test_rows_that_are_not_in_memory_need_a_directory() -> None:
    spec = TableSpec(name="t", width=WIDTH, max_rows=100, memory_rows=90)
    with pytest.raises(InvalidArgument, match="memory_rows=90 of table 't' needs a file of 120 bytes"):
        Table(spec)
    with pytest.raises(InvalidArgument, match="memory_rows=0 is less than 1"):
        TableSpec(name="t", width=WIDTH, memory_rows=0)
    Table(TableSpec(name="t", width=WIDTH, max_rows=100, memory_rows=100))
