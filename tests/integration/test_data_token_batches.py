"""Batches by tokens and bytes from real files: exact on any number of ranks, within the limit, padded or packed."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from iceberg_tables import Warehouse
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from strata import IcebergDataset, StructuredDataset
from strata.data import PackedRows, PaddedRows, RaggedRows, padding_waste
from strata.data.plan.lengths import count_lengths
from strata.data.runtime import sampling
from strata.errors import DataError, InvalidArgument, NoData, PlanChanged, SchemaMismatch

NUM_ROWS = 600
LIMIT = 200
LENGTHS = np.clip(np.random.default_rng(7).lognormal(3, 1, NUM_ROWS), 1, LIMIT).astype(int)
IDS = list(range(NUM_ROWS))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


def tokens_of(number: int) -> list[int]:
    return [number * 1000 + place for place in range(LENGTHS[number])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three Parquet files of token lists, texts and lengths."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for number, ids in enumerate(np.array_split(np.arange(NUM_ROWS), 3)):
        table = pa.table(
            {
                "id": ids,
                "input_ids": pa.array([tokens_of(each) for each in ids], pa.list_(pa.int32())),
                "text": pa.array(["ü" * int(LENGTHS[each] // 2) for each in ids]),  # two bytes each
                "num_tokens": pa.array(LENGTHS[ids], pa.int16()),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=50)
    return folder


def load(path: Any, *, kind: Any = StructuredDataset, **options: Any) -> tuple[Any, Any]:
    chosen = {"num_workers": 2, "output_format": "numpy", "shuffle": True, "shuffle_buffer_size": 120, **options}
    loader, dataset = kind.create_dataloader(path, **chosen)
    return loader, dataset


def read(path: Any, num_ranks: int, *, state: Any = None, num_batches: int | None = None, **options: Any) -> Any:
    """Return the batches of each rank and the state after them, which is the same on all ranks."""
    found, states = [], []
    for rank in range(num_ranks):
        loader, dataset = load(path, rank=rank, num_ranks=num_ranks, **options)
        if state is not None:
            dataset.load_state_dict(state)
        left = dataset.num_batches_left
        found.append(list(itertools.islice(loader, num_batches)))
        assert num_batches is not None or len(found[-1]) == left
        states.append(json.loads(json.dumps(dataset.state_dict())))
        dataset.close()
    assert all(each == states[0] for each in states)
    assert len({len(batches) for batches in found}) == 1, "equal steps"
    return found, states[0]


def ids_of(by_rank: list[list[dict[str, Any]]]) -> list[int]:
    return [number for batches in by_rank for batch in batches for number in batch["id"].tolist()]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_tokens": LIMIT, "shuffle": False},
        {"batch_tokens": LIMIT, "sequences": "padded"},
        {"batch_tokens": LIMIT, "sequences": "padded", "length_buckets": True},
        {"batch_tokens": LIMIT, "length_column": "num_tokens", "columns": ["id", "num_tokens"], "lanes": 6},
        {"batch_bytes": LIMIT, "columns": ["id", "text"]},
        {"batch_bytes": 4 * LIMIT, "length_column": "input_ids", "filters": "num_tokens < 50", "sequences": "packed"},
    ],
    ids=" ".join,
)
def test_rows_are_delivered_once_within_the_limit_across_resumes_on_other_numbers_of_ranks(
    path: Path, options: dict[str, Any]
) -> None:
    state, ids = None, []
    for num_ranks, num_batches in [(2, 4), (3, 3), (1, None)]:
        by_rank, state = read(path, num_ranks, state=state, num_batches=num_batches, **options)
        ids += ids_of(by_rank)
        for batch in itertools.chain(*by_rank):
            lengths = LENGTHS[batch["id"]] // 2 * 2 if "text" in batch else LENGTHS[batch["id"]]
            padded = options.get("sequences") == "padded"
            assert (len(lengths) * lengths.max() if padded else lengths.sum()) <= LIMIT
    passing = [number for number in IDS if "filters" not in options or LENGTHS[number] < 50]
    assert sorted(ids) == passing
    if not options.get("shuffle", True):
        single, _ = read(path, 1, **options)
        assert ids_of(single) == IDS


def test_a_killed_reader_is_resumed_on_more_ranks_without_losing_or_repeating_a_row(path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("data_children.py")), "read_tokens", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [json.loads(child.stdout.readline()) for _ in range(7)]
        child.kill()
    before = [number for line in lines for number in line["ids"]]
    options = {"batch_tokens": LIMIT, "sequences": "padded", "length_buckets": True, "shuffle_buffer_size": 60}
    after, _ = read(path, 3, state=lines[-1]["state"], **options)
    repeated = len(before) + len(ids_of(after)) - NUM_ROWS
    assert set(before + ids_of(after)) == set(IDS)
    assert not set(before) & set(ids_of(after))
    assert 0 <= repeated < 3, "only the last step may repeat rows, if too few are left for every rank"


def test_lists_are_delivered_ragged_padded_or_packed(path: Path) -> None:
    for sequences, kind in [("ragged", RaggedRows), ("padded", PaddedRows), ("packed", PackedRows)]:
        ((batches,), _) = read(path, 1, batch_tokens=LIMIT, sequences=sequences, output_format="torch")
        for batch in batches:
            rows, given = batch["input_ids"], [tokens_of(number) for number in batch["id"].tolist()]
            assert isinstance(rows, kind)
            assert rows.values.dtype == torch.int32
            if isinstance(rows, PaddedRows):
                assert rows.lengths.tolist() == [len(each) for each in given]
                longest = max(map(len, given))
                assert rows.values.tolist() == [each + [0] * (longest - len(each)) for each in given]
                continue
            assert rows.values.tolist() == list(itertools.chain(*given))
            starts = [0, *itertools.accumulate(map(len, given))]
            if isinstance(rows, PackedRows):
                assert rows.cu_seqlens.tolist() == starts
                assert rows.cu_seqlens.dtype == torch.int32
                assert rows.positions.tolist() == [place for each in given for place in range(len(each))]
                assert rows.max_seqlen == max(map(len, given))
            else:
                assert rows.offsets.tolist() == starts[:-1]


def test_length_buckets_need_less_padding(path: Path) -> None:
    waste = {}
    for buckets in (False, True):
        ((batches,), _) = read(
            path, 1, batch_tokens=1000, sequences="padded", length_buckets=buckets, shuffle_buffer_size=1000
        )
        rows = [batch["input_ids"].lengths for batch in batches]
        waste[buckets] = padding_waste(np.concatenate(rows), [len(each) for each in rows])
    assert waste[True] < 0.15 < 0.4 < waste[False]


def test_long_rows_are_refused_left_out_or_cut(path: Path) -> None:
    limit = 100
    long = [number for number in IDS if LENGTHS[number] > limit]
    first, within = divmod(long[0], 50)
    message = (
        f"{len(long)} of 600 rows are longer than batch_tokens=100; the longest has {LENGTHS.max()} tokens, and the "
        rf"first is row {within} of 0.parquet, row group {first} "
    )
    with pytest.raises(InvalidArgument, match=message):
        load(path, batch_tokens=limit)
    loader, dataset = load(path, batch_tokens=limit, long_rows="skip")
    assert sorted(ids_of([list(loader)])) == [number for number in IDS if number not in long]
    assert dataset.get_metrics().dropped_rows == len(long)
    loader, _ = load(path, batch_tokens=limit, long_rows="truncate")
    found = list(loader)
    assert sorted(ids_of([found])) == IDS
    for batch in found:
        assert len(batch["input_ids"].values) <= limit
        kept = [tokens_of(number)[:limit] for number in batch["id"].tolist()]
        assert batch["input_ids"].values.tolist() == list(itertools.chain(*kept))
    with pytest.raises(NoData, match="all 600 rows are longer than batch_bytes=1"):
        load(path, batch_bytes=1, length_column="input_ids", long_rows="skip")


def test_labels_are_cut_with_the_input_ids_and_other_lists_are_not(tmp_path: Path) -> None:
    lists = [[1, 2, 3], None, [4, 5, 6, 7], [8]]
    table = pa.table(
        {
            "input_ids": pa.array(lists, pa.large_list(pa.int64())),
            "labels": pa.array(lists, pa.list_(pa.int16())),
            "other": pa.array([[1] * 9] * 4, pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    options = {"batch_tokens": 3, "length_column": "input_ids", "long_rows": "truncate", "shuffle": False}
    made = pa.Table.from_batches(list(load(tmp_path / "a.parquet", output_format="arrow", **options)[0]))
    assert made.schema.field("input_ids").type == pa.large_list(pa.int64())
    assert made["input_ids"].to_pylist() == [[1, 2, 3], None, [4, 5, 6], [8]]
    assert made["labels"].to_pylist() == [[1, 2, 3], None, [4, 5, 6], [8]]
    assert made["other"].to_pylist() == [[1.0] * 9] * 4


def test_lists_that_differ_in_length_in_any_row_are_not_cut_in_the_others(tmp_path: Path) -> None:
    """Otherwise, which rows are cut would depend on how the file is divided into row groups."""
    ids = [[1] * 9, [1] * 9, None, [2] * 9]
    columns = {"input_ids": ids, "labels": [[1] * 9, [1] * 9, [], [2] * 9], "tags": [*ids[:3], [2] * 8]}
    table = pa.table({name: pa.array(lists, pa.list_(pa.int64())) for name, lists in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)

    def added(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column("targets", batch["input_ids"])

    options = {"batch_tokens": 4, "length_column": "input_ids", "long_rows": "truncate", "shuffle": False}
    for transform in (None, added):
        loader, _ = load(tmp_path / "a.parquet", output_format="arrow", transform=transform, **options)
        made = pa.Table.from_batches(list(loader))
        found = {name: [len(row or ()) for row in made[name].to_pylist()] for name in made.column_names}
        expected = {"input_ids": [4, 4, 0, 4], "labels": [4, 4, 0, 4], "tags": [9, 9, 0, 8], "targets": [4, 4, 0, 4]}
        assert found == {name: expected[name] for name in found}


def test_lengths_are_read_once_and_again_after_a_file_has_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(table: pa.Table, columns: Any, unit: str, place: str) -> Any:
        calls[place] += 1
        return count_lengths(table, columns, unit, place)

    monkeypatch.setattr(sampling, "count_lengths", counted)
    load(path, batch_tokens=LIMIT)
    assert calls.total() == 12, "one call for each row group"
    load(path, batch_tokens=2 * LIMIT, length_buckets=True)
    assert calls.total() == 12
    load(path, batch_tokens=LIMIT, cache=False)
    assert calls.total() == 24
    pq.write_table(pq.read_table(path / "2.parquet").slice(1), path / "2.parquet")
    load(path, batch_tokens=LIMIT)
    assert calls.total() == 24 + 9


def test_a_state_in_the_middle_of_an_epoch_needs_the_same_cuts(path: Path) -> None:
    _, state = read(path, 1, num_batches=3, batch_tokens=LIMIT)
    _, dataset = load(path, batch_tokens=2 * LIMIT, length_buckets=True)
    with pytest.raises(InvalidArgument, match="limit was 200 and is 400, length_buckets was False and is True"):
        dataset.load_state_dict(state)
    _, plain = load(path, batch_size=8)
    with pytest.raises(InvalidArgument, match=r"cut differently: unit was '\w+' and is '\w+'\. Restore"):
        plain.load_state_dict(state)
    with pytest.raises(InvalidArgument, match="not where a batch of this epoch ends"):
        load(path, batch_tokens=LIMIT)[1].load_state_dict({**state, "position": state["position"] + 1})
    _, state_of_rows = read(path, 1, num_batches=3, batch_size=8)
    with pytest.raises(InvalidArgument, match=r"cut differently: unit was '\w+' and is '\w+'\. Restore"):
        dataset.load_state_dict(state_of_rows)


def test_the_limit_may_change_between_epochs(path: Path) -> None:
    _, state = read(path, 2, batch_tokens=LIMIT)
    loader, dataset = load(path, batch_tokens=2 * LIMIT)
    dataset.load_state_dict(state)
    assert list(loader) == []
    assert dataset.position == NUM_ROWS
    assert sorted(ids_of([list(loader)])) == IDS
    assert dataset.epoch == 1


def test_a_changed_dataset_is_resumed_at_the_last_batch_before_the_position(path: Path) -> None:
    _, state = read(path, 1, num_batches=5, batch_tokens=LIMIT)
    pq.write_table(pq.read_table(path / "2.parquet").slice(1), path / "2.parquet")
    loader, dataset = load(path, batch_tokens=LIMIT)
    with pytest.raises(PlanChanged):
        dataset.load_state_dict(state)
    dataset.load_state_dict(state, on_change="accept")
    assert 0 <= state["position"] - dataset.position < 60
    position = dataset.position
    assert len(ids_of([list(loader)])) == NUM_ROWS - 1 - position


def test_samples_of_tar_shards_form_batches_by_bytes(tmp_path: Path) -> None:
    parts = {f"{number:03}.{kind}": b"x" * (number * 7) for number in range(30) for kind in ("a", "b")}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    batches = list(load(tmp_path / "a.tar", batch_bytes=500, decode=False)[0])
    for batch in batches:
        assert sum(len(value) for values in batch.values() for value in values) <= 500
    assert sorted(key for batch in batches for key in batch["__key__"]) == [f"{number:03}" for number in range(30)]


def test_an_iceberg_table_forms_batches_by_tokens_without_its_deleted_rows(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path)
    table = warehouse.create("texts", Schema(NestedField(1, "id", LongType()), NestedField(2, "n", LongType())))
    rows = pa.table({"id": IDS, "n": pa.array(LENGTHS, pa.int64())})
    first = warehouse.add_parquet(table, rows, ids={"id": 1, "n": 2}, row_group_size=100)
    warehouse.delete_positions(table, {first: [0, 17, 599]})
    options = {"kind": IcebergDataset, "batch_tokens": LIMIT, "length_column": "n"}
    by_rank, _ = read(table, 2, **options)
    assert set(ids_of(by_rank)) == set(IDS) - {0, 17, 599}
    assert all(batch["n"].sum() <= LIMIT for batches in by_rank for batch in batches)
    warehouse.close()


def test_unreadable_row_groups_are_left_out_of_their_batches(path: Path) -> None:
    damaged = path / "1.parquet"
    data = bytearray(damaged.read_bytes())
    column = pq.read_metadata(damaged).row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    damaged.write_bytes(data)
    with pytest.raises(DataError):
        list(load(path, batch_tokens=LIMIT, columns=["id", "input_ids"])[0])
    by_rank, _ = read(path, 2, batch_tokens=LIMIT, on_error="skip", columns=["id", "input_ids"])
    assert set(IDS) - set(ids_of(by_rank)) == set(range(250, 300))


def test_rows_that_cannot_be_decoded_are_left_out_of_packed_and_padded_batches(tmp_path: Path) -> None:
    bad = [0, 3, 4, 11]
    images = [b"bad" if number in bad else bytes([number]) for number in range(12)]
    lists = pa.array([[number] * (number % 4) for number in range(12)], pa.list_(pa.int64()))
    pq.write_table(pa.table({"image": images, "tokens": lists}), tmp_path / "a.parquet")

    def decode(data: bytes) -> Any:
        if data == b"bad":
            raise ValueError("it is no image")
        return np.array(data[0])

    options: dict[str, Any] = {"batch_tokens": 12, "decode": {"image": decode}, "on_error": "skip", "shuffle": False}
    for sequences in ("packed", "padded"):
        given = []
        for batch in load(tmp_path / "a.parquet", sequences=sequences, **options)[0]:
            rows, numbers = batch["tokens"], batch["image"].tolist()
            given += numbers
            expected = [[number] * (number % 4) for number in numbers]
            if isinstance(rows, PackedRows):
                assert rows.values.tolist() == list(itertools.chain(*expected))
                assert rows.cu_seqlens.tolist() == [0, *itertools.accumulate(map(len, expected))]
                assert rows.positions.tolist() == [place for each in expected for place in range(len(each))]
                assert rows.max_seqlen == max(map(len, expected))
            else:
                assert rows.lengths.tolist() == [len(each) for each in expected]
        assert given == [number for number in range(12) if number not in bad]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8, "batch_tokens": 9}, "batch_size= and batch_tokens= are both given"),
        ({"batch_tokens": 8, "batch_bytes": 9}, "batch_tokens= and batch_bytes= are both given"),
        ({"length_buckets": True}, "length_buckets= needs batch_tokens= or batch_bytes="),
        ({"length_column": "id"}, "length_column= needs batch_tokens="),
        ({"long_rows": "skip"}, "long_rows= needs batch_tokens="),
        ({"batch_tokens": 0}, "batch_tokens=0 must be a whole number from 1"),
        ({"batch_tokens": 1.5}, "batch_tokens=1.5 must be a whole number from 1"),
        ({"batch_tokens": True}, "batch_tokens=True must be a whole number from 1"),
        ({"batch_tokens": 9, "long_rows": "cut"}, "long_rows='cut' is unknown; use one of raise, skip, truncate"),
        ({"batch_tokens": 9, "length_buckets": True, "shuffle": False}, "pass shuffle=True as well"),
        ({"batch_tokens": 9, "length_column": "no"}, "length_column='no' is not delivered; use one of id, input_ids"),
        ({"batch_tokens": 9, "length_column": ["id"]}, "length_column=.'id'. is not delivered; use one of id, input"),
        ({"batch_tokens": 9, "length_column": "text"}, "length_column='text' is string, which has no number of tokens"),
        ({"batch_tokens": 9, "columns": ["id"]}, "there is no list column; pass length_column="),
        ({"batch_bytes": 900, "long_rows": "truncate"}, "long_rows='truncate' cuts lists of tokens"),
        ({"sequences": "flat"}, "sequences='flat' is unknown; use one of ragged, padded, packed"),
        ({"sequences": "padded", "output_format": "arrow"}, "sequences='padded' needs tensors or arrays"),
        ({"sequences": "packed", "columns": ["id"]}, "applies to lists of numbers, and no delivered column has them"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_cure(path: Path, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(path, **options)


def test_a_negative_or_missing_length_names_its_row_group(tmp_path: Path) -> None:
    for value, shown in [(-1, "-1"), (None, "null")]:
        pq.write_table(pa.table({"n": pa.array([1, value], pa.int32())}), tmp_path / "a.parquet")
        with pytest.raises(SchemaMismatch, match=f"a.parquet, row group 0 .*length_column='n' has the value {shown}"):
            load(tmp_path / "a.parquet", batch_tokens=5, length_column="n", nulls="fill")
