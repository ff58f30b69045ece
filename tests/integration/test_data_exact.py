"""Every row is delivered exactly once: real Parquet files, all ranks in this process, in step."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import data_children
import fsspec.implementations.local
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import until

from strata import StructuredDataset
from strata.errors import InvalidArgument, NoData, PlanChanged

MODULUS = 7
FILE_ROWS = {
    "one row": ([1], 1),
    "tiny": ([5, 0, 1, 12], 4),
    "unequal": ([230, 1, 17, 90, 64, 2], 25),
    "many": ([20] * 12, 6),
}
"""Rows of each file, and rows of a row group."""
FILTERS: dict[str | None, Callable[[int], bool]] = {
    None: lambda number: True,
    "part < 3": lambda number: number % MODULUS < 3,
    "id >= 9": lambda n: n >= 9,
}


def write_files(folder: Path, file_rows: list[int], group_rows: int, *, width: int = 1) -> int:
    """Write files of numbered rows and return the number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, rows in enumerate(file_rows):
        ids = np.arange(first, first + rows)
        columns = {"id": ids, "part": ids % MODULUS, "file": np.full(rows, number)}
        columns |= {f"x{column}": ids * 0.5 + column for column in range(width)}
        pq.write_table(pa.table(columns), folder / f"{number:03}.parquet", row_group_size=group_rows)
        first += rows
    return first


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("exact")
    for name, (file_rows, group_rows) in FILE_ROWS.items():
        write_files(root / name, file_rows, group_rows)
    before = os.environ.get("STRATA_CACHE_DIR")
    os.environ["STRATA_CACHE_DIR"] = str(root / "cache")  # surveys of these files, for the many loaders to come
    try:
        yield root
    finally:
        os.environ.pop("STRATA_CACHE_DIR")
        if before is not None:
            os.environ["STRATA_CACHE_DIR"] = before


@dataclass(frozen=True)
class World:
    num_ranks: int = 1
    num_workers: int = 1
    batch_size: int = 8
    steps: int | None = None
    """The number of batches after which it crashes; None reads to the end."""


class Loaders:
    """The batches of all ranks of a world, in step."""

    def __init__(self, path: Path, world: World, **arguments: Any) -> None:
        made = [
            StructuredDataset.create_dataloader(
                path,
                rank=rank,
                num_ranks=world.num_ranks,
                num_workers=world.num_workers,
                batch_size=world.batch_size,
                **{"output_format": "numpy", "columns": ["id", "file"], **arguments},
            )
            for rank in range(world.num_ranks)
        ]
        self.loaders = [loader for loader, _ in made]
        self.datasets = [dataset for _, dataset in made]

    def run(self, steps: int | None = None) -> list[list[list[int]]]:
        """Return the ids of each rank, step by step; check that all ranks get equally many batches, none empty."""
        given: list[list[list[int]]] = []
        iterators: list[Any] = [iter(loader) for loader in self.loaders]
        while steps is None or len(given) < steps:
            batches: list[Any] = [next(iterator, None) for iterator in iterators]
            if None in batches:
                assert batches == [None] * len(batches), "the same number of batches on every rank"
                break
            given.append([batch["id"].tolist() for batch in batches])
            assert all(given[-1]), "no rank has an empty batch"
            self.state()
        for iterator in iterators:
            iterator.close()
        return given

    def state(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it; it is the same on every rank."""
        states = [json.dumps(loader.state_dict(), sort_keys=True) for loader in self.loaders]
        assert len(set(states)) == 1
        found: dict[str, Any] = json.loads(states[0])
        return found

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def counted(self, name: str) -> int:
        return sum(getattr(dataset.get_metrics(), name) for dataset in self.datasets)


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [number for ranks in steps for ids in ranks for number in ids]


worlds = st.builds(
    World,
    num_ranks=st.integers(1, 5),
    num_workers=st.integers(0, 3),
    batch_size=st.integers(1, 30),
    steps=st.integers(0, 8),
)


@given(
    chain=st.lists(worlds, min_size=1, max_size=4),
    files=st.sampled_from(sorted(FILE_ROWS)),
    filters=st.sampled_from([*FILTERS]),
    shuffle=st.booleans(),
    buffer_rows=st.sampled_from([1, 7, 64, 100_000]),
    lanes=st.sampled_from([None, None, 1, 3, 8, 600]),
    tail=st.sampled_from(["uneven", "uneven", "pad", "drop"]),
    seed=st.integers(0, 3),
    prefetch_bytes=st.sampled_from([1, "1MiB"]),
    split_rows=st.sampled_from([None, 10]),
)
@settings(max_examples=30)
def test_every_row_is_delivered_exactly_once_through_any_chain_of_worlds_and_crashes(
    root: Path,
    chain: list[World],
    files: str,
    filters: str | None,
    shuffle: bool,
    buffer_rows: int,
    lanes: int | None,
    tail: str,
    seed: int,
    prefetch_bytes: int | str,
    split_rows: int | None,
) -> None:
    arguments = {
        "filters": filters,
        "shuffle": shuffle,
        "shuffle_buffer_size": buffer_rows,
        "lanes": lanes,
        "tail": tail,
        "shuffle_seed": seed,
        "prefetch_bytes": prefetch_bytes,
        "split_rows": split_rows,
    }
    expected = {number for number in range(sum(FILE_ROWS[files][0])) if FILTERS[filters](number)}
    if not expected:
        with pytest.raises(NoData):
            Loaders(root / files, chain[0], **arguments)
        return
    seen: list[int] = []
    padded = dropped = 0
    state = None
    for world in [*chain[:-1], replace(chain[-1], steps=None)]:
        loaders = Loaders(root / files, world, **arguments)
        if state is not None:
            loaders.load(state)
        delivered = flat(loaders.run(world.steps))
        seen += delivered
        padded += loaders.counted("padded_rows")
        dropped += loaders.counted("dropped_rows")
        state = loaders.state()
        assert loaders.counted("rows") == len(delivered)
    assert state is not None
    assert state["position"] == len(expected)
    times = Counter(seen)
    assert set(times) <= expected
    assert len(seen) - padded == len(times), "duplicates are counted as padding"
    assert len(times) + dropped == len(expected), "missing rows are counted as dropped"
    assert dropped == 0 or tail == "drop"


@given(
    world=worlds,
    shuffle=st.booleans(),
    buffer_rows=st.sampled_from([10, 100_000]),
    tail=st.sampled_from(["uneven", "pad", "drop"]),
    other_workers=st.integers(0, 3),
)
@settings(max_examples=10)
def test_a_resume_in_the_same_world_gives_the_same_batches_to_the_bit(
    root: Path, world: World, shuffle: bool, buffer_rows: int, tail: str, other_workers: int
) -> None:
    arguments = {"shuffle": shuffle, "shuffle_buffer_size": buffer_rows, "tail": tail, "filters": "part != 2"}
    whole = Loaders(root / "unequal", world, **arguments).run()
    first = Loaders(root / "unequal", world, **arguments)
    begun = first.run(world.steps)
    second = Loaders(root / "unequal", replace(world, num_workers=other_workers), **arguments)
    second.load(first.state())
    assert begun + second.run() == whole


@given(world=worlds, tail=st.sampled_from(["uneven", "pad", "drop"]))
@settings(max_examples=10)
def test_len_is_the_number_of_batches_on_every_rank(root: Path, world: World, tail: str) -> None:
    loaders = Loaders(root / "unequal", world, tail=tail)
    lengths = {len(loader) for loader in loaders.loaders}
    assert lengths == {len(loaders.run())}


def test_rows_that_were_decoded_ahead_do_not_count(root: Path) -> None:
    loaders = Loaders(root / "unequal", World(num_workers=2), prefetch_bytes="64MiB")
    dataset = loaders.datasets[0]
    batches = iter(loaders.loaders[0])
    next(batches)
    # One batch of eight rows was taken, and its whole file of 230 rows is read.
    until(lambda: dataset.get_metrics().total.rows >= 200, "rows are decoded ahead")
    assert dataset.position == dataset.state_dict()["position"] == 8
    dataset.close()
    assert dataset.state_dict()["position"] == 8


def test_one_unshuffled_rank_sees_rows_in_the_order_of_the_files(root: Path) -> None:
    assert flat(Loaders(root / "unequal", World(num_workers=3)).run()) == list(range(404))


def order_of(root: Path, world: World, *, epoch: int = 0, **arguments: Any) -> list[int]:
    loaders = Loaders(root / "many", world, shuffle=True, **arguments)
    for loader in loaders.loaders:
        loader.set_epoch(epoch)
    return flat(loaders.run())


def test_every_epoch_and_seed_has_its_own_reproducible_order(root: Path) -> None:
    orders = {
        (seed, epoch): order_of(root, World(), epoch=epoch, shuffle_seed=seed)
        for seed, epoch in itertools.product((0, 1), (0, 1, 2))
    }
    assert len({tuple(order) for order in orders.values()}) == 6
    assert all(sorted(order) == list(range(240)) for order in orders.values())
    again = World(num_workers=3)
    assert all(order_of(root, again, epoch=e, shuffle_seed=s) == order for (s, e), order in orders.items())


def global_batches(root: Path, world: World, num_steps: int, **arguments: Any) -> set[int]:
    steps = Loaders(root / "unequal", world, shuffle=True, shuffle_buffer_size=40, **arguments).run(num_steps)
    return set(flat(steps))


def test_with_lanes_given_the_order_is_the_same_for_any_number_of_ranks(root: Path) -> None:
    # 60 rows are the first steps of each of these worlds.
    found = [
        global_batches(root, World(num_ranks=ranks, batch_size=60 // ranks), 1, lanes=4) for ranks in (1, 2, 3, 4, 5)
    ]
    assert all(ids == found[0] for ids in found)
    assert len(found[0]) == 60


def test_with_lanes_given_the_order_is_the_same_for_any_batch_size(root: Path) -> None:
    sizes = [World(batch_size=size) for size in (4, 12, 20, 60)] + [World(num_ranks=3, batch_size=20)]
    found = [global_batches(root, world, 60 // (world.batch_size * world.num_ranks), lanes=4) for world in sizes]
    assert all(ids == found[0] for ids in found)


# Epochs


def test_a_loop_after_a_complete_one_reads_the_next_epoch_and_after_a_break_the_same(root: Path) -> None:
    loader, dataset = StructuredDataset.create_dataloader(
        root / "many", batch_size=50, shuffle=True, output_format="numpy", num_workers=1, columns=["id"]
    )
    first = [batch["id"].tolist() for batch in loader]
    assert (dataset.epoch, dataset.position) == (0, 240)
    second = [batch["id"].tolist() for batch in loader]
    assert (dataset.epoch, dataset.position) == (1, 240)
    assert first != second
    broken = next(iter(loader))["id"].tolist()
    assert (dataset.epoch, dataset.position) == (2, 50)
    again = [batch["id"].tolist() for batch in loader]
    assert (again[0], len(again)) == (broken, 5)
    assert dataset.epoch == 2
    loader.set_epoch(0)
    assert (dataset.epoch, dataset.position) == (0, 0)
    assert [batch["id"].tolist() for batch in loader] == first
    dataset.close()


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_and_drops_it_for_another(root: Path) -> None:
    saved = Loaders(root / "many", World(batch_size=50), shuffle=True)
    whole = saved.run()
    saved.datasets[0].set_epoch(0)
    saved.run(2)
    state = saved.state()

    same = Loaders(root / "many", World(batch_size=50), shuffle=True)
    same.load(state)
    same.loaders[0].set_epoch(0)
    assert same.run() == whole[2:]

    other = Loaders(root / "many", World(batch_size=50), shuffle=True)
    other.load(state)
    other.loaders[0].set_epoch(1)
    assert sorted(flat(other.run())) == list(range(240))
    assert other.datasets[0].epoch == 1
    with pytest.raises(InvalidArgument, match="epoch=-1 must be 0 or more"):
        other.loaders[0].set_epoch(-1)


def test_the_state_at_the_end_of_an_epoch_has_nothing_left_and_the_loop_after_is_the_next_epoch(root: Path) -> None:
    ended = Loaders(root / "many", World(batch_size=50))
    ended.run()
    state = ended.state()
    assert (state["epoch"], state["position"], state["num_rows"]) == (0, 240, 240)
    resumed = Loaders(root / "many", World(num_ranks=3, batch_size=7))
    resumed.load(state)
    assert resumed.run() == []
    assert sorted(flat(resumed.run())) == list(range(240))
    assert resumed.state()["epoch"] == 1


def test_a_state_of_a_shuffled_loader_resumes_shuffled_in_any_loader(root: Path) -> None:
    world = World(batch_size=50)
    whole = Loaders(root / "many", world, shuffle=True, shuffle_seed=5).run()
    begun = Loaders(root / "many", world, shuffle=True, shuffle_seed=5)
    begun.run(1)
    other = Loaders(root / "many", world, shuffle=False, shuffle_seed=6)
    other.load(begun.state())
    assert other.run() == whole[1:]


def test_a_loop_after_close_at_the_end_of_an_epoch_reads_the_next_epoch(root: Path) -> None:
    loaders = Loaders(root / "many", World())
    loaders.run()
    loaders.datasets[0].close()
    assert sorted(flat(loaders.run())) == list(range(240))
    assert loaders.datasets[0].epoch == 1


def test_an_epoch_is_complete_when_its_last_batch_is_delivered(root: Path) -> None:
    loader, dataset = StructuredDataset.create_dataloader(
        root / "many", batch_size=50, tail="drop", output_format="numpy", num_workers=1, columns=["id"]
    )
    for epoch in range(2):
        batches = iter(loader)
        assert len([next(batches) for _ in range(len(loader))]) == 4
        assert dataset.epoch == epoch
        assert dataset.get_metrics().dropped_rows == 40 * (epoch + 1)


def test_a_state_with_the_largest_seed_is_loaded_again(root: Path) -> None:
    loaders = Loaders(root / "many", World(), shuffle=True, shuffle_seed=(1 << 63) - 1)
    loaders.run(1)
    loaders.load(loaders.state())
    assert len(flat(loaders.run())) == 232


def test_a_state_with_the_right_fingerprint_and_wrong_numbers_is_refused(root: Path) -> None:
    loaders = Loaders(root / "many", World())
    hostile = {**loaders.state(), "num_rows": 10**6, "position": 10**5}
    with pytest.raises(InvalidArgument, match="rows"):
        loaders.load(hostile)


def test_a_state_with_an_invalid_summary_is_refused(root: Path) -> None:
    loaders = Loaders(root / "many", World())
    hostile = {**loaders.state(), "fingerprint": "other"}
    hostile["plan"]["files"][0][2] = float("inf")
    with pytest.raises(PlanChanged):
        loaders.load(hostile)


# A changed dataset


def changed(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path / "data"
    write_files(folder, [30, 10, 20], 8)
    loaders = Loaders(folder, World(), cache=False)
    loaders.run(2)
    return folder, loaders.state()


def add(folder: Path) -> None:
    pq.write_table(pa.table({"id": [99], "part": [1], "file": [3], "x0": [0.5]}), folder / "extra.parquet")


def remove(folder: Path) -> None:
    (folder / "001.parquet").unlink()


def rewrite(folder: Path) -> None:
    table = pq.read_table(folder / "002.parquet", partitioning=None)
    pq.write_table(table.set_column(0, "id", pa.array(range(900, 920))), folder / "002.parquet", row_group_size=8)


@pytest.mark.parametrize(
    ("change", "filters", "message"),
    [
        (add, None, "extra.parquet was added"),
        (remove, None, "001.parquet was removed"),
        (rewrite, None, "002.parquet was rewritten"),
        (lambda folder: None, "part < 3", r"the filter was none and is now .*part.*<.*3"),
    ],
)
def test_a_changed_dataset_is_refused_with_the_difference_or_accepted_on_request(
    tmp_path: Path, change: Any, filters: str | None, message: str
) -> None:
    folder, state = changed(tmp_path)
    change(folder)
    loaders = Loaders(folder, World(), filters=filters, cache=False)
    with pytest.raises(PlanChanged, match=message) as refused:
        loaders.load(state)
    assert "the state at row 16 of epoch 0" in str(refused.value)
    assert "on_change='accept'" in str(refused.value)
    num_rows = len(flat(loaders.run()))  # the refused state has changed nothing
    dataset = loaders.datasets[0]
    dataset.load_state_dict(state, on_change="accept")
    assert dataset.position == 16
    assert len(flat(loaders.run())) == num_rows - 16


def test_a_moved_dataset_is_the_same(tmp_path: Path) -> None:
    folder, state = changed(tmp_path)
    moved = folder.rename(tmp_path / "elsewhere")
    loaders = Loaders(moved, World(num_ranks=2), cache=False)
    loaders.load(state)
    assert sorted(flat(loaders.run())) == list(range(16, 60))


# Which rank reads what


class CountingFileSystem(fsspec.implementations.local.LocalFileSystem):  # type: ignore[misc]
    """Records which bytes of which file were read."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, int, int]] = []

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _CountingFile(Path(path).open(mode), Path(path).name, self.read)


class _CountingFile:
    def __init__(self, opened: Any, name: str, read: list[tuple[str, int, int]]) -> None:
        self._opened, self._name, self._read = opened, name, read

    def read(self, num_bytes: int = -1) -> bytes:
        offset = self._opened.tell()
        found: bytes = self._opened.read(num_bytes)
        self._read.append((self._name, offset, offset + len(found)))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)


def covered(ranges: list[tuple[str, int, int]], sizes: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return how often each byte was read, by file."""
    times = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
    for name, first, last in ranges:
        times[name][first:last] += 1
    return times


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_group_is_read_by_one_rank_or_by_two_at_a_border(tmp_path: Path, shuffle: bool) -> None:
    file_rows = [6000, 300, 4000, 2500, 7000]
    write_files(tmp_path / "data", file_rows, 500, width=4)
    metadata = {path.name: pq.read_metadata(path) for path in sorted((tmp_path / "data").iterdir())}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "data").iterdir()}
    counting = [CountingFileSystem() for _ in range(3)]
    ranges, bytes_read, num_lanes = [], [], 0
    for rank, filesystem in enumerate(counting):
        loader, dataset = StructuredDataset.create_dataloader(
            str(tmp_path / "data"),
            filesystem=filesystem,
            batch_size=60,
            rank=rank,
            num_ranks=3,
            num_workers=2,
            shuffle=shuffle,
            shuffle_buffer_size=3000,
            output_format="numpy",
            cache=False,
        )
        num_lanes = dataset.state_dict()["lanes"]
        filesystem.read.clear()  # drops the reads of planning
        assert len(list(loader)) == len(loader)
        # A footer is read with what happens to lie before it, up to the end of the file; rows never are.
        ranges.append([(name, first, last) for name, first, last in filesystem.read if last < sizes[name]])
        bytes_read.append(dataset.get_metrics().total.bytes_read)
    num_readers = []
    for name, file in metadata.items():
        times = [covered(one, sizes)[name] for one in ranges]
        for group in range(file.num_row_groups):
            columns = [file.row_group(group).column(number) for number in range(file.num_columns)]
            first = min(column.dictionary_page_offset or column.data_page_offset for column in columns)
            last = first + sum(column.total_compressed_size for column in columns)
            readers = [rank for rank in range(3) if times[rank][first:last].all()]
            assert readers, f"no rank read row group {group} of {name}"
            # A lane's rows are read front to back: a row group is read again only where two lanes meet in it.
            assert max(times[rank][first:last].max() for rank in readers) <= 2
            num_readers.append(len(readers))
    assert max(num_readers) <= 2
    assert num_readers.count(2) <= num_lanes - 1
    # By the loader's own count: one pass over the data, and once more what lies at the borders of lanes.
    data_bytes = sum(
        file.row_group(group).column(column).total_compressed_size
        for file in metadata.values()
        for group in range(file.num_row_groups)
        for column in range(file.num_columns)
    )
    largest = data_bytes / len(num_readers) * 2
    assert data_bytes <= sum(bytes_read) <= data_bytes + (num_lanes - 1) * largest
    assert max(bytes_read) < 0.45 * sum(bytes_read)


def test_a_resume_reads_only_the_remaining_rows_and_at_most_one_shuffle_buffer(root: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "data", [20_000] * 4, 1000)
    arguments = {"shuffle": True, "shuffle_buffer_size": 4000, "lanes": 4}
    whole = Loaders(tmp_path / "data", World(batch_size=100), **arguments)
    whole.run()
    stopped = Loaders(tmp_path / "data", World(batch_size=100), **arguments)
    stopped.run(720)  # of 800
    resumed = Loaders(tmp_path / "data", World(batch_size=100), **arguments)
    resumed.load(stopped.state())
    assert len(flat(resumed.run())) == 8000
    rows_read = resumed.datasets[0].get_metrics().total.rows
    # The rest, the window in which it begins, and the row groups that stick out of them, in each lane.
    assert 8000 <= rows_read <= 8000 + 4000 + 4 * 2 * 1000


# Shuffle


NUM_FILES = 40


@pytest.fixture(scope="module")
def many_files(root: Path) -> Path:
    write_files(root / "forty", [1000] * NUM_FILES, 200)
    return root / "forty"


def files_of_batches(path: Path, **arguments: Any) -> tuple[list[np.ndarray[Any, Any]], int]:
    loader, dataset = StructuredDataset.create_dataloader(
        path, batch_size=256, num_workers=2, output_format="numpy", columns=["file"], shuffle=True, **arguments
    )
    batches = [batch["file"] for batch in loader]
    return batches, dataset.state_dict()["lanes"]


def share_of_pairs(batches: list[np.ndarray[Any, Any]]) -> float:
    """Return how often two rows of a batch are from one file."""
    return float(np.mean([((np.bincount(batch) / len(batch)) ** 2).sum() for batch in batches[:-1]]))


def share_of_neighbours(batches: list[np.ndarray[Any, Any]]) -> float:
    rows = np.concatenate(batches)
    return float((rows[1:] == rows[:-1]).mean())


def test_a_batch_mixes_files_like_a_random_draw_if_the_shuffle_buffer_holds_them(
    many_files: Path,
) -> None:
    batches, _ = files_of_batches(many_files, shuffle_buffer_size=100_000)
    # Of 256 rows drawn at random, two are of one file once in 40, and a row's own place once in 256.
    assert share_of_pairs(batches) < 1.3 * (1 / NUM_FILES + 1 / 256)
    assert min(len(set(batch.tolist())) for batch in batches[:-1]) > 0.9 * NUM_FILES


def test_with_a_small_shuffle_buffer_a_batch_mixes_as_many_places_as_lanes(many_files: Path) -> None:
    batches, num_lanes = files_of_batches(many_files, shuffle_buffer_size=2000)
    assert num_lanes == 8
    assert share_of_pairs(batches) < 1.1 / num_lanes
    assert min(len(set(batch.tolist())) for batch in batches[:-1]) >= num_lanes - 1


@pytest.mark.parametrize("buffer_rows", [2000, 100_000])
def test_shuffled_neighbours_share_a_file_no_more_often_than_any_two_rows_of_a_batch(
    many_files: Path, buffer_rows: int
) -> None:
    batches, _ = files_of_batches(many_files, shuffle_buffer_size=buffer_rows)
    assert share_of_neighbours(batches) < 1.3 * share_of_pairs(batches)


def test_without_shuffle_neighbours_share_a_file(many_files: Path) -> None:
    loader, _ = StructuredDataset.create_dataloader(many_files, batch_size=256, num_workers=1, output_format="numpy")
    # 39 borders between 40,000 rows: the measure of an order that was not shuffled.
    assert share_of_neighbours([batch["file"] for batch in loader]) == 1 - (NUM_FILES - 1) / (40_000 - 1)


def peak_bytes(path: Path, **arguments: Any) -> int:
    """Return the peak memory of a loader in an epoch with a slow caller."""
    loader, dataset = StructuredDataset.create_dataloader(
        path, batch_size=250, num_workers=2, output_format="numpy", **arguments
    )
    for number, _ in enumerate(loader):
        if number % 4 == 0:
            time.sleep(0.001)
    metrics = dataset.get_metrics()
    assert metrics.buffered_bytes == 0
    return metrics.peak_buffered_bytes


@pytest.mark.parametrize("window_rows", [0, 2000, 10_000])
@pytest.mark.parametrize("prefetch_bytes", [None, 1])
@pytest.mark.parametrize("split_bytes", [20_000, 200_000])
def test_memory_stays_below_a_shuffle_buffer_and_two_splits_per_worker(
    many_files: Path, window_rows: int, prefetch_bytes: int | None, split_bytes: int
) -> None:
    row_bytes, group_rows = 8 * 4, 200
    shuffled = {"shuffle": True, "shuffle_buffer_size": window_rows} if window_rows else {}
    peak = peak_bytes(many_files, split_bytes=split_bytes, prefetch_bytes=prefetch_bytes, **shuffled)
    allowed = window_rows * row_bytes + 2 * split_bytes * 2
    assert group_rows * row_bytes <= peak <= allowed + group_rows * row_bytes


@pytest.fixture(scope="module")
def wide_files(root: Path) -> Path:
    """Rows of 4 KiB whose width cannot be estimated: neither their type reveals it nor, since they compress well, the
    number of bytes read.
    """
    (root / "wide").mkdir()
    offsets = np.arange(0, 500 * 1024 + 1, 1024, dtype=np.int32)
    values = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(500 * 1024, np.float32)))
    for number in range(4):
        with pq.ParquetWriter(root / "wide" / f"{number}.parquet", pa.schema([("values", values.type)])) as writer:
            for _ in range(5):
                writer.write_table(pa.table({"values": values}), row_group_size=100)
    return root / "wide"


@pytest.mark.parametrize("window_rows", [0, 1000])
def test_memory_stays_bounded_if_rows_are_wider_than_estimated(wide_files: Path, window_rows: int) -> None:
    row_bytes, group_rows, split_bytes = 4 * 1024 + 4, 100, 2 << 20
    shuffled = {"shuffle": True, "shuffle_buffer_size": window_rows} if window_rows else {}
    peak = peak_bytes(wide_files, split_bytes=split_bytes, **shuffled)
    # Decoded before the width is known: the first row groups of all lanes and workers.
    first = 10 * group_rows * row_bytes
    assert peak <= window_rows * row_bytes + 2 * split_bytes * 2 + first < 10_000 * row_bytes / 2


@pytest.fixture(scope="module")
def categories(root: Path) -> Path:
    """Strings of 100 characters, of which files hold 50 distinct ones and a code per row, like a pandas Categorical."""
    (root / "categories").mkdir()
    values = pa.array([f"{number:02}" * 50 for number in range(50)])
    for number in range(10):
        codes = pa.array(np.random.default_rng(number).integers(50, size=100_000).astype(np.int8))
        table = pa.table({"word": pa.DictionaryArray.from_arrays(codes, values)})
        pq.write_table(table, root / "categories" / f"{number}.parquet")
    return root / "categories"


@pytest.mark.parametrize("output_format", ["numpy", "arrow"])
def test_memory_stays_bounded_for_dictionary_encoded_strings(categories: Path, output_format: str) -> None:
    """Measures the process as well: allocators keep freed memory, and Python objects are larger."""
    row_bytes, group_rows, window_rows = 108, 100_000, 20_000
    split_bytes = 2 * group_rows * row_bytes
    command = [sys.executable, data_children.__file__, "hold", str(categories), output_format, str(split_bytes)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    lanes, peak_bytes, process_bytes = json.loads(output)
    promised = window_rows * row_bytes + 2 * split_bytes
    assert lanes == (2 if output_format == "numpy" else 8)  # in Arrow's form it stays a dictionary
    assert peak_bytes <= promised
    assert process_bytes <= 2 * promised < 10 * group_rows * row_bytes
