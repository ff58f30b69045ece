"""The loader as users see it: the contents of batches, and what remains when a loop ends in any way."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_children
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from strata import StructuredDataset
from strata.data.runtime.iterator import CLOSED
from strata.data.shared.cache import NAME as NODE_CACHE
from strata.errors import (
    DataFileChanged,
    DataFileInvalid,
    DataFileMissing,
    DataWorkerDied,
    InvalidArgument,
    NoData,
    NullsFound,
    SchemaMismatch,
    StrataError,
    TransformFailed,
)

CHILDREN = Path(data_children.__file__)
NUM_ROWS = 2000
DEADLINE_S = 20


def write_ids(path: Path, first: int, num_rows: int, *, group_rows: int = 100, **options: Any) -> None:
    ids = np.arange(first, first + num_rows)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": ids, "x": ids * 0.5}), path, row_group_size=group_rows, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 ids in 20 row groups of 4 files."""
    folder = tmp_path_factory.mktemp("ids")
    for number in range(4):
        write_ids(folder / f"{number}.parquet", number * 500, 500)
    return folder


def open_loader(path: Any, **arguments: Any) -> tuple[Any, Any]:
    return StructuredDataset.create_dataloader(
        path, **{"batch_size": 100, "num_workers": 2, "cache": False} | arguments
    )


# Leftovers


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("strata-data-")]


_others: set[int] = set()


@pytest.fixture(autouse=True)
def _processes_of_others() -> None:
    """Remember the processes of servers that all tests share."""
    _others.clear()
    _others.update(child.pid for child in psutil.Process().children(recursive=True))


def our_processes() -> list[psutil.Process]:
    """Return the worker processes, without the two of multiprocessing, which serve the whole program."""
    of_python = {
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        multiprocessing.resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.pid not in of_python | _others]


def our_shared_memory() -> set[str]:
    """Return this program's shared memory, and any with our names but that of node caches, which other tests use."""
    held = {mapped.path for mapped in psutil.Process().memory_maps() if mapped.path.startswith("/dev/shm/")}
    marks = ("strata", f"torch_{os.getpid()}_")
    names = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(marks)}
    return held | {name for name in names if not name.startswith(NODE_CACHE)}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = our_shared_memory()
    yield
    gc.collect()
    assert our_shared_memory() <= before


def small_steps(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    """Return a loader that is far from complete after its first batch."""
    return open_loader(folder, shuffle=True, shuffle_buffer_size=100, lanes=1, prefetch_bytes=1, **arguments)


def test_a_complete_loop_leaves_no_thread(folder: Path) -> None:
    loader, _ = small_steps(folder)
    assert sum(len(batch["id"]) for batch in loader) == NUM_ROWS
    assert our_threads() == []


def test_leaving_a_loop_early_ends_its_threads_at_once(folder: Path) -> None:
    loader, dataset = small_steps(folder)
    try:
        for _ in loader:
            break
        assert our_threads() == []
    finally:
        dataset.close()


def test_an_exception_in_the_loop_ends_its_threads_at_once(folder: Path) -> None:
    loader, dataset = small_steps(folder)

    def loop() -> None:
        for _ in loader:
            raise ArithmeticError("the loss is nan")

    try:
        with contextlib.suppress(ArithmeticError):
            loop()
        assert our_threads() == []
    finally:
        dataset.close()


def test_a_loader_dropped_within_a_loop_ends_its_threads(folder: Path) -> None:
    before = set(threading.enumerate())

    def begin() -> None:
        loader, _ = small_steps(folder)
        next(iter(loader))

    begin()
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread not in before]
    if left:  # for the tests after this one
        left[0]._target.__self__.close()  # type: ignore[attr-defined]
    assert left == []


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_close_ends_threads_and_processes_and_the_dataset_can_be_used_again(folder: Path, worker_type: str) -> None:
    loader, dataset = small_steps(folder, worker_type=worker_type)
    batches = iter(loader)
    next(batches)
    dataset.close()
    assert our_threads() == []
    assert our_processes() == []
    with pytest.raises(StrataError, match="closed while it was iterated over"):
        next(batches)
    loader.set_epoch(0)
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(NUM_ROWS))
    dataset.close()
    assert our_processes() == []


def test_a_loop_after_close_restarts_the_epoch_like_one_after_break(folder: Path) -> None:
    loader, dataset = small_steps(folder)
    next(iter(loader))
    dataset.close()
    assert sum(len(batch["id"]) for batch in loader) == NUM_ROWS


def test_a_second_loop_ends_the_first_and_restarts_the_epoch(folder: Path) -> None:
    loader, dataset = small_steps(folder)
    first = iter(loader)
    next(first)
    old = {thread for thread in threading.enumerate() if thread.name.startswith("strata-data-")}
    second = iter(loader)
    assert not any(thread.is_alive() for thread in old)
    with pytest.raises(StrataError, match="start a new loop"):
        next(first)
    assert sum(len(batch["id"]) for batch in second) == NUM_ROWS
    assert dataset.get_metrics().rows == NUM_ROWS + 100


def test_close_by_another_thread_wakes_the_loop_that_waits(folder: Path) -> None:
    is_decoding, may_end = threading.Event(), threading.Event()

    def wait(batch: pa.RecordBatch) -> pa.RecordBatch:
        is_decoding.set()
        may_end.wait(DEADLINE_S)
        return batch

    loader, dataset = open_loader(folder, transform=wait, num_workers=1)
    raised: list[BaseException] = []

    def loop() -> None:
        try:
            next(iter(loader))
        except StrataError as error:
            raised.append(error)

    looping = threading.Thread(target=loop, daemon=True)
    looping.start()
    assert is_decoding.wait(DEADLINE_S)
    closing = threading.Thread(target=dataset.close, daemon=True)
    closing.start()
    looping.join(DEADLINE_S)
    assert [str(error) for error in raised] == [CLOSED], "while the transform still waits"
    may_end.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


def test_a_strategy_that_reverses_the_order_does_not_block(folder: Path) -> None:
    def backwards(tasks: Any, num_workers: int) -> list[list[int]]:
        return [[task.number for task in reversed(tasks)], *[[] for _ in range(num_workers - 1)]]

    loader, dataset = small_steps(folder, split_strategy=backwards)
    found: list[int] = []
    looping = threading.Thread(target=lambda: found.extend(len(b["id"]) for b in loader), daemon=True)
    looping.start()
    looping.join(DEADLINE_S)
    try:
        assert sum(found) == NUM_ROWS
    finally:
        dataset.close()


@pytest.mark.parametrize(
    ("worker_type", "transform", "how"),
    [
        ("thread", "poisoned", signal.SIGINT),
        ("process", "endless", signal.SIGINT),
        ("process", "doubled", signal.SIGKILL),
    ],
)
def test_ctrl_c_and_a_sudden_death_end_all_processes_in_seconds(
    tmp_path: Path, worker_type: str, transform: str, how: signal.Signals
) -> None:
    # No id is poisoned here, and `endless` returns for the first row group only.
    write_ids(tmp_path / "data" / "0.parquet", 0, 700)
    with (
        tempfile.TemporaryDirectory(prefix="loop-") as temporary,  # a killed process leaves files in it
        subprocess.Popen(
            [sys.executable, CHILDREN, "loop_for_ever", tmp_path / "data", worker_type, transform],
            env={**os.environ, "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            if transform == "endless":
                # It may hang before the first batch: interrupt it while it waits for its workers.
                workers = _wait_for_workers(child.pid)
            else:
                report = json.loads(child.stdout.readline())
                workers = [psutil.Process(pid) for pid in report["children"]]
            child.send_signal(how)
            _, errors = child.communicate(timeout=DEADLINE_S)
        finally:
            child.kill()
    if how == signal.SIGINT:
        assert child.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
        assert errors.rstrip().endswith("KeyboardInterrupt")
    assert bool(workers) == (worker_type == "process")
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def _wait_for_workers(pid: int) -> list[psutil.Process]:
    """Return the process tree of a program: two worker processes, and the two of multiprocessing."""
    end_s = time.monotonic() + DEADLINE_S
    while len(found := psutil.Process(pid).children(recursive=True)) < 4:
        assert time.monotonic() < end_s, found
        time.sleep(0.05)
    return found


# Types


def test_the_loader_is_a_torch_dataloader_over_an_iterable_dataset_with_a_length(folder: Path) -> None:
    loader, dataset = open_loader(folder, batch_size=300)
    assert isinstance(loader, DataLoader)
    assert isinstance(dataset, IterableDataset)
    assert isinstance(dataset, StructuredDataset)
    assert loader.dataset is dataset
    assert len(loader) == len(dataset) == 7
    assert [len(batch["id"]) for batch in loader] == [300] * 6 + [200]
    assert "4" in str(dataset.plan)
    assert dataset.get_metrics().rows == NUM_ROWS
    dataset.reset_metrics()
    assert dataset.get_metrics().rows == 0


@pytest.mark.filterwarnings("ignore:.*number of processes that is likely too many.*:UserWarning")
# torch forks, and JAX warns about forks if another test has imported it into this process.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function _at_fork.*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:os.fork.*:RuntimeWarning")
def test_a_torch_dataloader_with_processes_over_our_dataset_is_refused(folder: Path) -> None:
    _, dataset = open_loader(folder)
    alone = DataLoader(dataset, batch_size=None)
    assert sum(len(batch["id"]) for batch in alone) == NUM_ROWS
    wrong = DataLoader(dataset, batch_size=None, num_workers=1)
    with pytest.raises(InvalidArgument, match="Use the loader that create_dataloader returned"):
        next(iter(wrong))


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("typed") / "typed.parquet"
    table = pa.table(
        {
            "number": pa.array([1, 2, 3, 4], pa.int32()),
            "word": pa.array(["one", "two", None, "two"]),
            "values": pa.array([[1, 2], [], [3], [4, 5, 6]], pa.list_(pa.int64())),
            "maybe": pa.array([1, None, 3, 4], pa.int64()),
        }
    )
    pq.write_table(table, path, row_group_size=2)
    return path


def one_batch(path: Path, **arguments: Any) -> Any:
    loader, _ = open_loader(path, **arguments)
    (batch,) = loader
    return batch


def test_a_torch_batch_has_tensors_of_values_codes_lists_and_masks(typed: Path) -> None:
    batch = one_batch(typed, strings="codes", nulls={"maybe": "mask"})
    assert batch["number"].dtype == torch.int32
    assert batch["number"].tolist() == [1, 2, 3, 4]
    assert batch["number"].is_contiguous()
    codes = batch["word"].tolist()
    assert codes[2] == 0
    assert codes[1] == codes[3] != codes[0]
    assert batch["values"].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["values"].offsets.tolist() == [0, 2, 2, 3]
    bag = torch.nn.EmbeddingBag(7, 3, mode="sum")
    assert bag(batch["values"].values, batch["values"].offsets).shape == (4, 3)
    assert batch["maybe"].tolist() == [1, 0, 3, 4]
    assert batch["maybe_mask"].tolist() == [True, False, True, True]


def test_strings_are_python_objects_or_padded_bytes_and_nulls_are_filled(typed: Path) -> None:
    python = one_batch(typed, columns=["word"])
    assert list(python["word"]) == ["one", "two", None, "two"]
    padded = one_batch(typed, columns=["word"], strings="bytes", nulls="fill", string_width=2)
    assert padded["word"].values.tolist() == [[111, 110], [116, 119], [0, 0], [116, 119]]
    assert padded["word"].lengths.tolist() == [3, 3, 0, 3]
    assert one_batch(typed, columns=["maybe"], nulls={"maybe": -1})["maybe"].tolist() == [1, -1, 3, 4]
    with pytest.raises(NullsFound, match="maybe"):
        open_loader(typed, columns=["maybe"])


def test_batches_are_numpy_arrow_pandas_or_lists(typed: Path) -> None:
    columns = ["number", "word"]
    numbers = one_batch(typed, output_format="numpy", columns=columns)
    assert isinstance(numbers["number"], np.ndarray)
    assert numbers["number"].tolist() == [1, 2, 3, 4]
    arrow = one_batch(typed, output_format="arrow", columns=columns)
    assert isinstance(arrow, pa.RecordBatch)
    expected = {"number": [1, 2, 3, 4], "word": ["one", "two", None, "two"]}
    assert arrow.to_pydict() == expected
    frame = one_batch(typed, output_format="pandas", columns=columns)
    assert isinstance(frame, pd.DataFrame)
    assert frame["number"].tolist() == [1, 2, 3, 4]
    assert frame["word"].isna().tolist() == [False, False, True, False]
    assert one_batch(typed, output_format="dict", columns=columns) == expected


def test_without_torch_a_plain_loader_delivers_numpy_and_arrow(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, CHILDREN, "without_torch", folder],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["loader"] == "PlainLoader"
    assert (found["len"], found["type"], found["arrow_type"]) == (20, "ndarray", "RecordBatch")
    assert found["ids"] == list(range(NUM_ROWS))
    assert found["epoch"] == 3
    assert found["torch"] is False
    assert "torch" in found["refusal"]


# The user's functions


def test_collate_fn_gets_each_batch_and_transform_the_decoded_rows(folder: Path) -> None:
    decoded = []

    def transform(batch: pa.RecordBatch) -> dict[str, Any]:
        decoded.append(batch.num_rows)
        return {"id": batch["id"], "both": np.stack([batch["id"], batch["x"]], axis=1)[:, 1]}

    loader, _ = open_loader(folder, transform=transform, collate_fn=lambda batch: (batch["id"], batch["both"]))
    found = list(loader)
    assert decoded == [100] * 20
    ids, halves = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert ids.tolist() == list(range(NUM_ROWS))
    assert torch.equal(halves, ids * 0.5)


def test_an_error_in_collate_fn_is_raised_and_its_batch_is_not_counted(folder: Path) -> None:
    def collate(batch: Any) -> Any:
        if 250 in batch["id"]:
            raise ArithmeticError("250")
        return batch

    loader, dataset = small_steps(folder, collate_fn=collate)
    with pytest.raises(ArithmeticError, match="250"):
        list(loader)
    assert our_threads() == []
    assert dataset.position == dataset.get_metrics().rows
    assert dataset.position % 100 == 0


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_an_error_in_a_transform_names_the_row_group(folder: Path, worker_type: str) -> None:
    loader, dataset = open_loader(folder, transform=data_children.poisoned, worker_type=worker_type)
    with pytest.raises(TransformFailed, match=r"ValueError for 1\.parquet.*id 777 is poisoned"):
        list(loader)
    assert our_threads() == []
    dataset.close()
    assert our_processes() == []


def test_processes_deliver_the_same_batches_as_threads(folder: Path) -> None:
    def run(worker_type: str, num_workers: int) -> tuple[list[list[int]], set[int], int]:
        loader, dataset = open_loader(
            folder,
            transform=data_children.doubled,
            worker_type=worker_type,
            num_workers=num_workers,
            shuffle=True,
            shuffle_buffer_size=500,
            lanes=4,  # a file each: no row group is at a border, where it may be read twice
        )
        batches = list(loader)
        assert all(torch.equal(batch["twice"], 2 * batch["id"]) for batch in batches)
        processes = {number for batch in batches for number in batch["process"].tolist()}
        bytes_read = dataset.get_metrics().total.bytes_read
        again = [batch["id"].tolist() for batch in loader]
        assert again != [batch["id"].tolist() for batch in batches]
        dataset.close()
        return [batch["id"].tolist() for batch in batches] + again, processes, bytes_read

    threads, one_process, _ = run("thread", 2)
    processes, several, _ = run("process", 2)
    assert processes == threads
    assert one_process == {os.getpid()}
    assert os.getpid() not in several
    assert len(several) == 2
    # With one worker: with two, chance decides which one opens a file and reads its footer.
    assert run("process", 1)[2] == run("thread", 1)[2] > 0
    assert our_processes() == []


def test_the_death_of_a_worker_process_is_reported(folder: Path) -> None:
    loader, dataset = open_loader(folder, transform=data_children.fatal, worker_type="process")
    with pytest.raises(DataWorkerDied, match="was killed by SIGKILL while decoding; if memory ran out"):
        list(loader)
    assert our_threads() == []
    dataset.close()
    assert our_processes() == []


def test_after_the_death_of_a_worker_process_the_next_loop_starts_a_new_one(folder: Path, tmp_path: Path) -> None:
    fatal = data_children.FatalOnce(tmp_path / "died")
    loader, dataset = open_loader(folder, transform=fatal, worker_type="process", num_workers=1)
    with pytest.raises(DataWorkerDied):
        list(loader)
    assert sum(len(batch["id"]) for batch in loader) == NUM_ROWS
    (process,) = our_processes()
    process.kill()
    process.wait(DEADLINE_S)
    assert sum(len(batch["id"]) for batch in loader) == NUM_ROWS  # one that died between two loops is replaced
    dataset.close()
    assert our_processes() == []


def test_a_transform_that_other_processes_cannot_find_is_refused_with_the_cure(folder: Path) -> None:
    loader, dataset = open_loader(folder, transform=lambda batch: batch, worker_type="process")
    with pytest.raises(InvalidArgument, match="Define the transform at the top level of a module") as refused:
        next(iter(loader))
    assert refused.value.field == "transform"
    assert our_threads() == []
    dataset.close()
    assert our_processes() == []


# Bad files


def damage(path: Path, group: int) -> None:
    """Damage the pages of one row group but not the footer."""
    column = pq.read_metadata(path).row_group(group).column(0)
    data = bytearray(path.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    data[first : first + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_row_group_is_named_or_skipped_and_counted_and_ranks_stay_in_step(
    tmp_path: Path, shuffle: bool
) -> None:
    for number in range(3):
        write_ids(tmp_path / f"{number}.parquet", number * 500, 500)
    damage(tmp_path / "1.parquet", 2)
    options = {"batch_size": 64, "shuffle": shuffle, "shuffle_buffer_size": 600}
    loader, _ = open_loader(tmp_path, **options)
    with pytest.raises(DataFileInvalid, match=r"1\.parquet: row group 2, which begins with row 200, is damaged"):
        list(loader)
    ids, num_batches, units, skipped, repeated = [], set(), 0, 0, 0
    for rank in range(2):
        loader, dataset = open_loader(tmp_path, on_error="skip", rank=rank, num_ranks=2, **options)
        batches = list(loader)
        assert all(len(batch["id"]) for batch in batches)
        num_batches.add(len(batches))
        ids += [number for batch in batches for number in batch["id"].tolist()]
        metrics = dataset.get_metrics()
        repeated += metrics.padded_rows
        units += metrics.skipped_units
        skipped += metrics.skipped_rows
        assert metrics.total.errors >= metrics.skipped_units
    assert num_batches == {12}
    assert units in (1, 2)  # by each rank that reads it
    assert skipped == 100
    assert len(ids) - repeated == 1400
    assert set(ids) == set(range(1500)) - set(range(700, 800))


def test_a_damaged_row_group_that_is_larger_than_a_block_is_skipped_too(tmp_path: Path) -> None:
    write_ids(tmp_path / "0.parquet", 0, 300_000, group_rows=100_000)
    damage(tmp_path / "0.parquet", 1)
    loader, dataset = open_loader(tmp_path, batch_size=1000, on_error="skip")
    assert len(list(loader)) == 300
    assert dataset.get_metrics().skipped_rows == 100_000


def large_files(folder: Path) -> None:
    """Blocks cover one or two files, so that the last file is unread when the first batch is delivered."""
    for number in range(11):
        write_ids(folder / f"{number:02}.parquet", number * 70_000, 70_000, group_rows=70_000)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_error_about_a_file_deleted_during_an_epoch_names_it(
    tmp_path: Path, on_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.data.dataset.MAX_BLOCK_ROWS", 1 << 16)
    large_files(tmp_path)
    loader, dataset = open_loader(
        tmp_path, batch_size=110_000, num_workers=1, prefetch_bytes=1, on_error=on_error, columns=["id"]
    )
    batches = iter(loader)
    next(batches)
    (tmp_path / "10.parquet").unlink()
    if on_error == "raise":
        with pytest.raises(DataFileMissing, match=r"10\.parquet"):
            list(batches)
        assert dataset.position <= 10 * 70_000
    else:
        assert [len(batch["id"]) for batch in batches][-2:] == [110_000, 40_000]
        assert dataset.get_metrics().skipped_rows == 70_000
    assert our_threads() == []


def test_a_file_rewritten_during_an_epoch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.data.dataset.MAX_BLOCK_ROWS", 1 << 16)
    large_files(tmp_path)
    loader, _ = open_loader(tmp_path, batch_size=70_000, num_workers=1, prefetch_bytes=1, columns=["id"])
    batches = iter(loader)
    next(batches)
    write_ids(tmp_path / "10.parquet", 1_000_000, 70_000, group_rows=70_000)
    with pytest.raises(DataFileChanged, match=r"10\.parquet"):
        list(batches)
    assert our_threads() == []


def test_a_dangling_link_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_ids(tmp_path / "0.parquet", 0, 500)
    (tmp_path / "1.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataFileMissing, match=r"1\.parquet is a broken link"):
        open_loader(tmp_path)
    loader, dataset = open_loader(tmp_path, on_error="skip")
    assert sum(len(batch["id"]) for batch in loader) == 500
    assert dataset.plan.pruning.num_files_skipped == dataset.get_metrics().plan_skipped_files == 1
    assert dataset.plan.pruning.skipped[0][0] == "1.parquet"
    assert "left out of the plan because it is unreadable: 1.parquet" in caplog.text
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(DataFileMissing):
        open_loader(tmp_path, on_error="skip")


# No rows


@pytest.mark.parametrize("filters", ["id < 0", "day == 9", "day == 1 and x > 1e9"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_filter_that_no_row_passes_returns_an_empty_loader_on_request(
    tmp_path: Path, filters: str, shuffle: bool
) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        write_ids(tmp_path / f"day={day}" / "0.parquet", 0, 500)
    with pytest.raises(NoData, match=r"no row passes the filter.*on_empty='empty'"):
        open_loader(tmp_path, filters=filters, shuffle=shuffle)
    states = []
    for rank in range(2):
        loader, dataset = open_loader(
            tmp_path, filters=filters, shuffle=shuffle, on_empty="empty", rank=rank, num_ranks=2
        )
        assert (len(loader), dataset.plan.num_rows, dataset.epoch) == (0, 0, 0)
        assert [policy.name for policy in dataset.policies] == ["id", "x", "day"]
        assert list(loader) == list(loader) == []
        states.append(json.loads(json.dumps(loader.state_dict())))
        loader.load_state_dict(states[0])
        assert list(loader) == []
        dataset.set_epoch(3)
        assert list(loader) == []
        assert dataset.epoch == 3
    assert states[0] == states[1]
    full, _ = open_loader(tmp_path, filters="id < 10", on_empty="empty")
    assert len(full) == 1


def test_files_without_rows_return_an_empty_loader_on_request_but_a_missing_path_does_not(
    tmp_path: Path,
) -> None:
    write_ids(tmp_path / "0.parquet", 0, 0)
    with pytest.raises(NoData, match="there are no rows"):
        open_loader(tmp_path)
    loader, _ = open_loader(tmp_path, on_empty="empty", strings="codes")
    assert list(loader) == []
    with pytest.raises(NoData, match="does not exist"):
        open_loader(tmp_path / "elsewhere", on_empty="empty")
    with pytest.raises(InvalidArgument, match=r"on_empty='nothing' is unknown; use one of raise, empty"):
        open_loader(tmp_path, on_empty="nothing")


def test_none_is_the_default_shuffle_buffer_size(folder: Path) -> None:
    by_default, _ = open_loader(folder, shuffle=True)
    by_none, dataset = open_loader(folder, shuffle=True, shuffle_buffer_size=None)
    assert dataset.config.order.shuffle_buffer_size == 100_000
    assert by_none.state_dict() == by_default.state_dict()


# Hive partitions above the root


def test_hive_keys_in_the_path_of_a_file_are_columns_as_in_pyarrow(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for day in (1, 2):
            path = tmp_path / f"split={split}" / f"day={day}" / "0.parquet"
            path.parent.mkdir(parents=True)
            write_ids(path, 0, 10)
    train = tmp_path / "split=train"

    def columns(path: Any, **options: Any) -> dict[str, Any]:
        loader, _ = open_loader(path, **options)
        (batch,) = loader
        return {name: batch[name][0] for name in batch if name not in ("id", "x")}

    def of_pyarrow(path: Any) -> set[str]:
        return set(pads.dataset(path, format="parquet", partitioning="hive").schema.names) - {"id", "x"}

    one, two = (str(train / f"day={day}" / "0.parquet") for day in (1, 2))
    for path in (one, [one], [one, two], str(train), str(train / "day=1")):
        assert columns(path).keys() == of_pyarrow(path), path
    assert columns(one) == {"split": "train", "day": 1}
    assert columns(f"{train}/day=1/*.parquet") == {"split": "train", "day": 1}
    assert columns([one, str(tmp_path / "split=test" / "day=1" / "0.parquet")]) == {"split": "test", "day": 1}
    assert columns(one, partitioning=None) == {}
    assert columns(one, filters="split == 'train'") == {"split": "train", "day": 1}


# Malformed text


@pytest.mark.parametrize("num_before", [1, 200_000])
@pytest.mark.parametrize("schema", [None, pa.schema([("a", pa.string())])])
def test_an_error_about_json_of_mixed_types_does_not_suggest_a_schema(
    tmp_path: Path, num_before: int, schema: pa.Schema | None
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * num_before + '{"a": "x"}\n')
    with pytest.raises(
        (DataFileInvalid, SchemaMismatch), match="write them in one type, for example all as strings"
    ) as refused:
        list(open_loader(tmp_path, schema=schema)[0])
    assert "schema=pa.schema" not in str(refused.value)


@pytest.mark.parametrize("num_before", [0, 300_000])
@pytest.mark.parametrize(
    ("line", "cure"),
    [
        (b"3,\xff\xfe\n", r"not UTF-8: save the file as UTF-8, or read the column as bytes with schema="),
        (b"3\n", r"Expected 2 columns, got 1.*every record must have as many fields as the first one"),
    ],
)
def test_an_error_about_a_csv_file_names_a_cure_that_helps(
    tmp_path: Path, num_before: int, line: bytes, cure: str
) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,x\n" + b"2,y\n" * num_before + line)
    text, binary = (pa.schema([("b", kind)]) for kind in (pa.string(), pa.binary()))
    with pytest.raises(DataFileInvalid, match=cure):
        list(open_loader(tmp_path, schema=text)[0])
    if b"\xff" in line:
        loader, _ = open_loader(tmp_path, schema=binary)
        assert sum(len(batch["a"]) for batch in loader) == num_before + 2


@pytest.mark.parametrize("rewrite", ["in place", "replaced", "broken"])
def test_a_csv_file_rewritten_during_an_epoch_has_changed(tmp_path: Path, rewrite: str) -> None:
    """The rewritten file has the same size and number of records, so only its contents differ."""
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "".join(f"{number:06},x\n" for number in range(20_000)))
    loader, _ = open_loader(path, num_workers=1, split_bytes=2_000, prefetch_bytes=1)
    batches = iter(loader)
    next(batches)
    changed = path.read_text().replace(",x\n", ",y\n" if rewrite != "broken" else "xx\n")
    if rewrite == "replaced":
        (tmp_path / "new").write_text(changed)
        (tmp_path / "new").rename(path)
    else:
        path.write_text(changed)
    with pytest.raises(DataFileChanged, match=r"a\.csv .*rewritten since it was planned; create the dataset again"):
        list(batches)


def test_a_csv_file_touched_during_an_epoch_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "".join(f"{number:06}\n" for number in range(20_000)))
    loader, _ = open_loader(path, num_workers=1, split_bytes=2_000, prefetch_bytes=1)
    batches = iter(loader)
    num_rows = len(next(batches)["a"])
    os.utime(path, ns=(1, 1))
    assert num_rows + sum(len(batch["a"]) for batch in batches) == 20_000


# Several threads


@pytest.mark.parametrize("is_prepared", [False, True])
def test_threads_may_share_an_iterator(folder: Path, is_prepared: bool) -> None:
    loader, dataset = open_loader(folder, batch_size=7, shuffle=True)
    loader._is_prepared = is_prepared  # as with an accelerator: batches then go through a generator
    batches = iter(loader)
    found: list[list[int]] = [[] for _ in range(4)]

    def take(mine: list[int]) -> None:
        for batch in batches:
            mine += batch["id"].tolist()

    threads = [threading.Thread(target=take, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(number for mine in found for number in mine) == list(range(NUM_ROWS))
    assert dataset.position == NUM_ROWS
    assert our_threads() == []
