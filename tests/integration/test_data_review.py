"""Regressions: faults that were found once, each with a minimal reproduction."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from pyarrow import orc
from servers import until

from strata import StructuredDataset
from strata.data.runtime.decoder import ThreadDecoder
from strata.errors import DataError, InvalidArgument, LimitExceeded, SchemaMismatch, StrataError, TransformFailed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids")
    pq.write_table(pa.table({"id": range(1000), "x": [0.5] * 1000}), path / "0.parquet", row_group_size=50)
    return path


def load(path: Path, **more: Any) -> tuple[Any, Any]:
    chosen = {"output_format": "numpy", "batch_size": 50, "num_workers": 2, "cache": False, **more}
    return StructuredDataset.create_dataloader(path, **chosen)


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def test_the_order_does_not_depend_on_the_number_of_workers(folder: Path) -> None:
    orders = [
        ids(load(folder, shuffle=True, num_workers=workers, split_bytes="4KiB")[0]) for workers in (1, 2, 4, None)
    ]
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(1000))


def test_setting_the_next_epoch_inside_the_last_batch_loses_no_epoch(folder: Path) -> None:
    loader, dataset = load(folder)
    counts = []
    for epoch in range(3):
        counts.append(0)
        for number, batch in enumerate(loader):
            counts[-1] += len(batch["id"])
            if number == len(loader) - 1:
                dataset.set_epoch(epoch + 1)
    assert counts == [1000, 1000, 1000]


def test_a_replaced_iterator_does_not_move_the_position(folder: Path) -> None:
    loader, dataset = load(folder)
    first = iter(loader)
    list(islice(first, len(loader)))
    second = iter(loader)
    next(second)
    assert next(first, None) is None
    assert (dataset.epoch, dataset.position) == (1, 50)
    third = iter(loader)
    next(third)
    with pytest.raises(StrataError, match="closed while it was iterated over"):
        next(second)
    assert dataset.position == 50


def test_loaders_dropped_within_an_epoch_leave_neither_threads_nor_files(folder: Path) -> None:
    for _ in range(5):
        loader, dataset = load(folder, prefetch_bytes=1)
        next(iter(loader))
        del loader, dataset
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("strata-data")]
    assert not [link for link in _open_files() if link.endswith("0.parquet")]


def _open_files() -> Iterator[str]:
    for handle in Path("/proc/self/fd").iterdir():
        try:
            yield str(handle.readlink())
        except FileNotFoundError:
            continue


def _stops(_: Any) -> Any:
    raise StopIteration


def test_a_stop_iteration_in_user_code_does_not_end_the_epoch(folder: Path) -> None:
    with pytest.raises(TransformFailed, match="StopIteration"):
        list(load(folder, collate_fn=_stops)[0])
    with pytest.raises(DataError, match="StopIteration"):
        list(load(folder, split_strategy=lambda tasks, num_workers: _stops(tasks))[0])
    with pytest.raises(TransformFailed, match="StopIteration"):
        list(load(folder, transform=_stops)[0])


def test_a_transform_whose_columns_change_between_row_groups_is_refused(folder: Path) -> None:
    def odd(batch: pa.RecordBatch) -> Any:
        table = pa.table(batch)
        return table.append_column("late", table["id"]) if table["id"][0].as_py() >= 500 else table

    with pytest.raises(TransformFailed, match="'late'"):
        list(load(folder, transform=odd)[0])


def test_vocabularies_skip_damaged_row_groups(tmp_path: Path) -> None:
    table = pa.table({"id": range(300), "s": [f"value {i % 7}" for i in range(300)]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=100, use_dictionary=False, compression="none")
    chunk = pq.read_metadata(tmp_path / "0.parquet").row_group(1).column(1)
    with (tmp_path / "0.parquet").open("r+b") as file:
        file.seek(chunk.data_page_offset)
        file.write(b"\xff" * chunk.total_compressed_size)
    loader, dataset = load(tmp_path, strings="codes", on_error="skip", batch_size=10)
    assert sorted({*ids(loader)} - {*range(100, 200)}) == [*range(100), *range(200, 300)]
    assert dataset.get_metrics().skipped_rows == 100
    assert dataset.vocabulary("s").num_codes == 8


def test_a_failed_search_for_a_vocabulary_closes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"s": [f"value {i}" for i in range(300)]})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=200)
    closed = []

    def close(self: ThreadDecoder) -> None:
        closed.append(self)

    monkeypatch.setattr(ThreadDecoder, "close", close)
    with pytest.raises(LimitExceeded, match="more than max_vocabulary=100"):
        load(tmp_path, strings="codes", max_vocabulary=100, num_workers=1)
    assert len(closed) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_together_count_each_skipped_row_once(tmp_path: Path, num_ranks: int, shuffle: bool) -> None:
    for number in range(3):
        table = pa.table({"id": np.arange(1000) + 1000 * number})
        pq.write_table(table, tmp_path / f"{number}.parquet", use_dictionary=False, compression="none")
    with (tmp_path / "1.parquet").open("r+b") as file:
        file.seek(4)
        file.write(b"\0" * 56)
    found, skipped, padded = [], 0, 0
    for rank in range(num_ranks):
        more = {"shuffle": shuffle, "shuffle_buffer_size": 400, "rank": rank, "num_ranks": num_ranks}
        loader, dataset = load(tmp_path, on_error="skip", **more)
        found += ids(loader)
        metrics = dataset.get_metrics()
        skipped, padded = skipped + metrics.skipped_rows, padded + metrics.padded_rows
        assert metrics.skipped_units <= 1
    assert skipped == 1000
    assert len(found) - padded == len({*found}) == 2000


def test_files_left_out_of_the_plan_are_named_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        pq.write_table(pa.table({"id": [number]}), tmp_path / f"{number}.parquet")
    (tmp_path / "1.parquet").write_bytes(b"not Parquet")
    loader, dataset = load(tmp_path, on_error="skip", name="left-out")
    assert ids(loader) == [0, 2]
    metrics = dataset.get_metrics()
    assert (metrics.plan_skipped_files, metrics.plan_skipped_units, metrics.skipped_rows) == (1, 0, 0)
    assert "1 files left out of the plan" in metrics.log_line()
    assert "1.parquet" in next(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    exported = prometheus_client.generate_latest().decode()
    assert 'strata_data_plan_skipped_files{dataset="left-out"} 1.0' in exported


@pytest.fixture
def late_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In one file `label` appears only after the sample for guessing columns; in the other it is in the sample."""
    monkeypatch.setattr("strata.data.formats.text.SAMPLE_BYTES", 20)
    for name, first in (("a", 5), ("b", 0)):
        records = ({"id": i} | ({"label": i} if i >= first else {}) for i in range(10))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_key_that_appears_late_raises_and_is_not_dropped(late_keys: Path, on_error: str) -> None:
    with pytest.raises(SchemaMismatch, match=r"a\.jsonl.*'label'.*schema="):
        list(load(late_keys / "a.jsonl", on_error=on_error)[0])
    assert ids(load(late_keys / "a.jsonl", columns=["id"])[0]) == [*range(10)]


@pytest.mark.parametrize("of", ["a.jsonl", "*.jsonl"])
@pytest.mark.parametrize("columns", [None, ["label", "id"]])
def test_a_key_that_appears_late_is_delivered_once_its_type_is_known(
    late_keys: Path, of: str, columns: list[str] | None
) -> None:
    more = {"columns": columns, "schema": pa.schema([("label", pa.int64())]), "output_format": "arrow"}
    batches = load(late_keys / of, **more)[0]
    labels = [None] * 5 + [*range(5, 10)] + ([] if of == "a.jsonl" else [*range(10)])
    assert [label for batch in batches for label in batch["label"].to_pylist()] == labels
    filtered = load(late_keys / of, filters="label >= 4", **more)[0]
    wanted = [label for label in labels if label is not None and label >= 4]
    assert [label for batch in filtered for label in batch["label"].to_pylist()] == wanted
    with pytest.raises(SchemaMismatch, match=r"no file has a column 'lable'.*if it appears later.*pass its type"):
        load(late_keys / of, columns=["lable"])


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_healthy_rows_are_not_skipped_because_a_guess_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_type: str
) -> None:
    monkeypatch.setattr("strata.data.formats.text.SAMPLE_BYTES", 20)
    (tmp_path / "0.csv").write_text("id,v\n" + "".join(f"{i},{1 if i < 50 else 1.5}\n" for i in range(100)))
    with pytest.raises(SchemaMismatch, match=r"0\.csv.*column 'v'.*schema="):
        list(load(tmp_path, on_error="skip", worker_type=worker_type)[0])
    with pytest.raises(SchemaMismatch, match=r"0\.csv.*column 'v'.*schema="):
        load(tmp_path, on_error="skip", filters="v > 1")
    decided = load(tmp_path, on_error="skip", schema=pa.schema([("v", pa.float64())]), worker_type=worker_type)[0]
    assert ids(decided) == [*range(100)]


def test_the_number_of_open_remote_files_is_bounded(tmp_path: Path) -> None:
    for number in range(200):
        pq.write_table(pa.table({"id": [number]}), tmp_path / f"{number:03}.parquet")
    far = pafs.PyFileSystem(pafs.FSSpecHandler(DirFileSystem(str(tmp_path))))
    loader, dataset = load("/", filesystem=far, batch_size=10)  # type: ignore[arg-type]
    assert not dataset._recipe.source.is_local
    most = 0
    for _ in loader:
        most = max(most, sum(link.endswith(".parquet") for link in _open_files()))
    assert most <= 120


def test_passwords_in_urls_are_never_printed() -> None:
    with pytest.raises(StrataError) as raised:
        StructuredDataset.create_dataloader("ftp://user:SECRETPW@127.0.0.1:1/x?token=SECRETPW")
    assert "SECRETPW" not in str(raised.value)


def test_a_comparison_with_nan_loses_no_row_of_orc(tmp_path: Path) -> None:
    orc.write_table(pa.table({"id": [0, 1], "x": [1.5, None]}), tmp_path / "0.orc")
    loader, _ = load(tmp_path, filters=~(pc.field("x") <= pa.scalar(math.nan)), columns=["id"])
    assert ids(loader) == [0]


@pytest.mark.parametrize("write_page_index", [False, True])
def test_a_filter_applies_to_delivered_values_not_to_stored_ones(tmp_path: Path, write_page_index: bool) -> None:
    noons = pa.array([12 * 3600_000, 36 * 3600_000], pa.timestamp("ms"))
    table = pa.table({"id": [0, 1], "day": noons, "x": [0.1, 0.1]})
    pq.write_table(table, tmp_path / "0.parquet", write_page_index=write_page_index, data_page_size=1)
    schema = pa.schema([("day", pa.date32()), ("x", pa.float32())])
    for text, wanted in (("day <= date('1970-01-01')", [0]), ("day > date('1970-01-01')", [1]), ("x > 0.1", [0, 1])):
        assert ids(load(tmp_path, filters=text, schema=schema, columns=["id"])[0]) == wanted


def test_an_iterator_in_a_forked_child_raises_instead_of_hanging(folder: Path) -> None:
    script = f"""
import os
from strata import StructuredDataset
loader, _ = StructuredDataset.create_dataloader({str(folder)!r}, batch_size=10, num_workers=1, output_format="numpy")
batches = iter(loader)
next(batches)
child = os.fork()
if not child:
    try:
        for _ in batches: pass
    except Exception as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert "which forked this one" in done.stdout


def test_a_worker_process_in_an_endless_transform_dies_with_its_parent(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        f"""
import os, pathlib
from strata import StructuredDataset
def forever(batch):
    pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
    while True: pass
if __name__ == "__main__":
    loader, _ = StructuredDataset.create_dataloader(
        {str(folder)!r}, num_workers=1, worker_type="process", transform=forever, output_format="numpy"
    )
    next(iter(loader))
"""
    )
    with tempfile.TemporaryDirectory(prefix="endless-") as temporary:  # multiprocessing's are left in it
        parent = subprocess.Popen([sys.executable, tmp_path / "endless.py"], env={**os.environ, "TMPDIR": temporary})
        try:
            until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", "the transform runs")
        finally:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
        worker = int((tmp_path / "pid").read_text())
        until(lambda: not Path(f"/proc/{worker}").exists(), "the worker has ended")


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ({"path": []}, "pass a path or URL"),
        ({"path": 123}, "pass a path or URL"),
        ({"schema": {"id": "int32"}}, "pa.schema"),
        ({"shuffle": "yes"}, "True or False"),
        ({"batch_size": 2.5}, "whole number"),
        ({"columns": "id"}, r"\['id'\]"),
        ({"columns": ["id", "id"]}, "twice"),
    ],
)
def test_errors_about_arguments_name_the_cure(folder: Path, wrong: dict[str, Any], cure: str) -> None:
    with pytest.raises(InvalidArgument, match=cure):
        load(**{"path": folder, **wrong})


def test_numpy_integers_are_accepted(folder: Path) -> None:
    assert len(load(folder, batch_size=np.int64(100))[0]) == 10


def test_pandas_is_imported_only_if_needed(folder: Path) -> None:
    """pyarrow imports it to inspect Python numbers, which delays the first batch by a third of a second."""
    script = f"""
import sys
from strata import StructuredDataset
loader, _ = StructuredDataset.create_dataloader({str(folder)!r}, batch_size=64, shuffle=True, num_workers=1)
assert sum(len(batch["id"]) for batch in loader) == 1000
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "False"
