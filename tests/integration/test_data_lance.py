"""`LanceDataset`: datasets that `pylance` wrote, with deletes, added columns, blobs and every file format it reads."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from s3 import S3Server, s3

from strata import LanceDataset, StructuredDataset
from strata.data.shared.cache import NodeCache, directory_for
from strata.data.source.filesystem import open_source
from strata.errors import (
    ConfigError,
    DataFileInvalid,
    DataFileMissing,
    ForkedProcess,
    InvalidArgument,
    NoData,
    PlanChanged,
    SchemaMismatch,
)

__all__ = ["s3"]  # a fixture


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


def rows(first: int, last: int, **more: Any) -> pa.Table:
    numbers = range(first, last)
    columns = {"id": pa.array(numbers, pa.int64()), "score": [number / 2 for number in numbers]}
    return pa.table(columns | {name: [value] * len(numbers) for name, value in more.items()})


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """Four versions: 100 rows in three fragments, a delete, an added column, and 30 more rows."""
    uri = str(tmp_path / "the images.lance")
    lance.write_dataset(rows(0, 100), uri, max_rows_per_file=40)
    lance.dataset(uri).delete("id % 10 = 3 or (id >= 50 and id < 60)")
    lance.dataset(uri).add_columns({"double": "id * 2"})
    lance.write_dataset(rows(100, 130), uri, mode="append")
    return uri


LEFT = [n for n in range(100) if n % 10 != 3 and not 50 <= n < 60]


def load(uri: str, **more: Any) -> Any:
    # Row ranges of a few rows, so that a small fragment has several.
    given = {"batch_size": 8, "num_workers": 2, "columns": ["id"], "split_bytes": 64}
    loader, _ = LanceDataset.create_dataloader(uri, **(given | more))
    return loader


def ids(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch["id"].tolist()]


def arrow(uri: str, **more: Any) -> list[dict[str, Any]]:
    loader = load(uri, columns=None, output_format="arrow", **more)
    return sorted((row for batch in loader for row in batch.to_pylist()), key=lambda row: row["id"])


def data_files(uri: str) -> list[Path]:
    """Return the first file of each fragment."""
    return [Path(uri) / "data" / found.metadata.files[0].path for found in lance.dataset(uri).get_fragments()]


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_the_latest_version_is_delivered_once_without_deleted_rows(dataset: str, worker_type: str) -> None:
    found = arrow(dataset, shuffle=True, worker_type=worker_type)
    assert [row["id"] for row in found] == [*LEFT, *range(100, 130)]
    assert found[4] == {"id": 5, "score": 2.5, "double": 10}
    assert found[-1] == {"id": 129, "score": 64.5, "double": None}


def test_without_shuffle_rows_have_the_order_of_the_dataset(tmp_path: Path) -> None:
    uri = str(tmp_path / "many.lance")
    lance.write_dataset(rows(0, 60), uri, max_rows_per_file=5)
    lance.dataset(uri).delete("id in (7, 11)")
    assert [each.fragment_id for each in lance.dataset(uri).get_fragments()] == list(range(12))
    assert ids(load(uri)) == [n for n in range(60) if n not in (7, 11)]


def test_a_fragment_is_cut_into_row_ranges(dataset: str) -> None:
    plan = load(dataset, version=1).dataset.plan
    assert (plan.num_rows, len(plan.files)) == (100, 3)
    assert plan.num_splits > 6
    assert len(load(dataset, version=1, split_bytes="16MiB").dataset.plan.unit_rows) == 3


def test_an_old_version_has_its_own_rows_and_columns(dataset: str) -> None:
    lance.dataset(dataset).tags.create("before-the-delete", 1)
    for selected in ({"version": 1}, {"tag": "before-the-delete"}):
        found = arrow(dataset, **selected)
        assert [row["id"] for row in found] == list(range(100))
        assert set(found[0]) == {"id", "score"}
    assert sorted(ids(load(dataset, version=2))) == LEFT
    with pytest.raises(SchemaMismatch, match="double"):
        load(dataset, version=2, columns=["double"])


def test_renamed_cast_and_dropped_columns_are_those_of_the_version(dataset: str) -> None:
    lance.dataset(dataset).alter_columns({"path": "id", "name": "number", "data_type": pa.int32()})
    lance.dataset(dataset).drop_columns(["double"])
    loader = load(dataset, columns=None, output_format="arrow")
    found = [row for batch in loader for row in batch.to_pylist()]
    assert loader.dataset.plan.schema.field("number").type == pa.int32()
    assert found[:2] == [{"number": 0, "score": 0.0}, {"number": 1, "score": 0.5}]
    assert len(found) == len(LEFT) + 30


@pytest.mark.parametrize("storage_version", ["legacy", "2.0", "2.1", "2.2"])
def test_every_file_format_is_read(tmp_path: Path, storage_version: str) -> None:
    uri = str(tmp_path / "old.lance")
    lance.write_dataset(rows(0, 100), uri, max_rows_per_file=40, data_storage_version=storage_version)
    lance.dataset(uri).delete("id > 30 and id < 45")
    assert ids(load(uri)) == [n for n in range(100) if not 30 < n < 45]
    resumed = load(uri, shuffle=True, num_ranks=2, rank=1)
    assert 0 < len(ids(resumed)) < 86


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("id < 5", [0, 1, 2, 4]),
        ("double == 8 or id > 127", [4, 128, 129]),
        ("double is None", list(range(100, 130))),
        ("score >= 2 and id not in (4, 5)", [n for n in [*LEFT, *range(100, 130)] if n > 5]),
    ],
)
def test_filters_keep_the_rows_that_they_keep_of_files(dataset: str, filters: str, expected: list[int]) -> None:
    copy = Path(dataset).with_name("copy.parquet")
    pq.write_table(lance.dataset(dataset).to_table(), copy)
    loader, _ = StructuredDataset.create_dataloader(str(copy), filters=filters, columns=["id"])
    assert ids(loader) == expected
    found = load(dataset, filters=filters)
    assert ids(found) == expected
    assert found.dataset.plan.num_rows == len(expected)


def test_values_of_all_types_are_those_of_parquet(tmp_path: Path) -> None:
    written = pa.table(
        {
            "id": pa.array(range(20), pa.int64()),
            "large": pa.array([None, *map(str, range(19))], pa.large_string()),
            "code": pa.array(["a", "b"] * 10).dictionary_encode(),
            "vector": pa.array([[n, n + 0.5] for n in range(20)], pa.list_(pa.float32(), 2)),
            "list": pa.array([[n] * (n % 3) for n in range(20)], pa.list_(pa.int32())),
            "point": [{"x": n, "tags": ["t"] * (n % 2)} for n in range(20)],
            "bytes": pa.array([b"%d" % n for n in range(20)]),
            "when": pa.array(range(20), pa.timestamp("us", "UTC")),
            "price": pa.array(range(20), pa.int64()).cast(pa.decimal128(22, 2)),
        }
    )
    uri, copy = str(tmp_path / "types.lance"), str(tmp_path / "types.parquet")
    lance.write_dataset(written, uri, max_rows_per_file=7)
    pq.write_table(written, copy)
    options: dict[str, Any] = {"batch_size": 20, "output_format": "arrow", "num_workers": 2}
    loader, found = LanceDataset.create_dataloader(uri, split_bytes=64, **options)
    other, expected = StructuredDataset.create_dataloader(copy, **options)
    assert [batch.to_pylist() for batch in loader] == [batch.to_pylist() for batch in other]
    assert found.plan.schema.types == expected.plan.schema.types
    tensors, _ = LanceDataset.create_dataloader(uri, columns=["vector"], batch_size=20, output_format="torch")
    assert next(iter(tensors))["vector"].tolist() == [[n, n + 0.5] for n in range(20)]


@pytest.mark.parametrize("storage_version", ["2.1", "2.2"])
def test_blobs_are_delivered_as_bytes_and_count_for_the_size_of_row_ranges(
    tmp_path: Path, storage_version: str
) -> None:
    blobs = [bytes([n]) * 100_000 if n % 7 else None for n in range(30)]
    uri = str(tmp_path / "blobs.lance")
    numbers = pa.array(range(30), pa.int64())
    if storage_version == "2.1":
        kind = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
        written = pa.table([numbers, pa.array(blobs, pa.large_binary())], pa.schema([("id", pa.int64()), kind]))
    else:
        schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("image")])
        written = pa.table([numbers, lance.blob_array(blobs)], schema)
    lance.write_dataset(written, uri, data_storage_version=storage_version)
    loader = load(uri, columns=["id", "image"], output_format="arrow", split_bytes="500kB")
    found = {row["id"]: row["image"] for batch in loader for row in batch.to_pylist()}
    assert found == dict(enumerate(blobs))
    plan = loader.dataset.plan
    assert 4 <= len(plan.unit_rows) <= 8
    assert 2_400_000 < plan.unit_bytes.sum() < 3_000_000
    assert load(uri).dataset.plan.unit_bytes.sum() < 1000


# -- exactness -----------------------------------------------------------------------------------------------------


def test_three_ranks_resume_in_the_middle_of_a_shuffled_epoch_as_two(dataset: str) -> None:
    seen: list[int] = []
    for rank in range(3):
        loader = load(dataset, shuffle=True, shuffle_seed=5, rank=rank, num_ranks=3, batch_size=4)
        seen += next(iter(loader))["id"].tolist()
        state = loader.state_dict()
        loader.dataset.close()
    for rank in range(2):
        rest = load(dataset, shuffle=True, shuffle_seed=5, rank=rank, num_ranks=2, batch_size=6)
        rest.load_state_dict(state)
        seen += ids(rest)
    assert sorted(seen) == [*LEFT, *range(100, 130)]


def test_a_state_belongs_to_one_version_of_one_dataset(dataset: str) -> None:
    loader = load(dataset, version=2)
    seen = next(iter(loader))["id"].tolist()
    state = loader.state_dict()
    loader.dataset.close()
    same_rows = str(Path(dataset).with_name("other.lance"))
    lance.write_dataset(rows(0, 100), same_rows, max_rows_per_file=40)
    lance.dataset(same_rows).delete("id % 10 = 3 or (id >= 50 and id < 60)")
    for other in (load(dataset), load(dataset, version=1), load(same_rows, version=2)):
        with pytest.raises(PlanChanged, match="another dataset"):
            other.load_state_dict(state)
    moved = str(Path(dataset).with_name("moved.lance"))
    shutil.move(dataset, moved)
    rest = load(moved, version=2)
    rest.load_state_dict(state)
    assert sorted(seen + ids(rest)) == LEFT


def test_the_survey_of_another_version_is_not_used_again(dataset: str) -> None:
    for _ in range(2):
        assert sorted(ids(load(dataset, version=1, cache=True))) == list(range(100))
        assert sorted(ids(load(dataset, version=2, cache=True))) == LEFT


def test_the_node_cache_tells_versions_with_other_deleted_rows_apart(dataset: str) -> None:
    limit = (900 << 20) + os.getpid()
    member = NodeCache(directory_for(limit), max_bytes=limit, linger_s=0.1)
    assert member.join()

    def read(version: int) -> tuple[list[int], Any]:
        loader = load(dataset, version=version, shared_bytes=limit)
        found = sorted(ids(loader))
        total = loader.dataset.get_metrics().total
        loader.dataset.close()
        return found, total

    assert read(1)[0] == list(range(100))
    again, taken = read(1)
    assert again == list(range(100))
    assert (taken.units, taken.unshared_units) == (0, 0)
    assert read(2)[0] == LEFT
    member.leave()


def test_the_bytes_that_are_read_are_counted(dataset: str) -> None:
    loader = load(dataset)
    ids(loader)
    assert loader.dataset.get_metrics().total.bytes_read > 0


# -- processes -----------------------------------------------------------------------------------------------------


def _report_fork(uri: str, loader: Any, answers: Any) -> None:
    for read in (lambda: ids(loader), lambda: load(uri)):
        try:
            read()
        except Exception as error:  # noqa: BLE001
            answers.put((type(error).__name__, str(error)))
        else:
            answers.put(("", ""))


def test_a_forked_process_is_refused_with_the_cure(dataset: str) -> None:
    loader = load(dataset)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_report_fork, args=(dataset, loader, answers))
    child.start()
    found = [answers.get(timeout=60) for _ in range(2)]
    child.join(60)
    assert [kind for kind, _ in found] == [ForkedProcess.__name__] * 2
    assert "multiprocessing.get_context('spawn')" in found[1][1]
    assert len(ids(loader)) == len(LEFT) + 30


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selected", "problem"),
    [
        ({"version": 5}, "has no version 5; the latest is 4"),
        ({"version": 0}, "version=0 is not a version"),
        ({"version": True}, "version=True is not a version"),
        ({"version": 1, "tag": "x"}, "pass one of them"),
        ({"tag": "final"}, "has no tag 'final'; its tags are: none"),
        ({"tag": ""}, "tag='' is not a name"),
    ],
)
def test_a_version_or_tag_that_does_not_exist_is_refused(dataset: str, selected: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        load(dataset, **selected)


def test_a_version_that_was_cleaned_up_is_named(dataset: str) -> None:
    lance.dataset(dataset).cleanup_old_versions(retain_versions=1)
    with pytest.raises(InvalidArgument, match="no longer has version 1, which may have been cleaned up"):
        load(dataset, version=1)
    assert len(ids(load(dataset))) == len(LEFT) + 30


def test_other_directories_are_no_datasets(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidArgument, match="is not a Lance dataset: it has no _versions"):
            load(str(path))


def test_branches_and_clones_are_refused(dataset: str) -> None:
    branch = lance.dataset(dataset).create_branch("tried")
    lance.write_dataset(rows(130, 135), branch.uri, mode="append")
    lance.dataset(dataset).tags.create("tag", ("tried", lance.dataset(branch.uri).version))
    with pytest.raises(InvalidArgument, match=r"the tag 'tag' of .* is a version of the branch tried"):
        load(dataset, tag="tag")
    with pytest.raises(DataFileInvalid, match=r"fragment 0 has the file .* which is not below the dataset.*deep_clone"):
        load(branch.uri)


def test_a_missing_file_is_named_or_its_fragment_skipped(dataset: str) -> None:
    gone = data_files(dataset)[1]
    gone.unlink()
    with pytest.raises(DataFileMissing, match=rf"fragment 1 \(id 1\): its file data/{gone.name} does not exist"):
        load(dataset, version=1)
    loader = load(dataset, version=1, on_error="skip")
    assert ids(loader) == [*range(40), *range(80, 100)]
    assert loader.dataset.plan.pruning.num_files_skipped == 1


def test_a_file_that_disappears_while_training_is_named(dataset: str) -> None:
    for columns in (["id"], ["score"]):
        loader = load(dataset, version=1, columns=columns)
        kept = data_files(dataset)[2]
        moved = kept.rename(kept.with_suffix(".away"))
        with pytest.raises((DataFileMissing, DataFileInvalid), match=r"fragment 2"):
            list(loader)
        loader.dataset.close()
        moved.rename(kept)


@pytest.mark.parametrize("storage_version", ["legacy", "2.0", "2.1", "2.2"])
def test_damage_is_an_error_that_names_the_fragment(tmp_path: Path, storage_version: str) -> None:
    uri = str(tmp_path / "damaged.lance")
    lance.write_dataset(rows(0, 200, text="some text"), uri, data_storage_version=storage_version)
    (file,) = data_files(uri)
    whole = file.read_bytes()
    # Changed bytes elsewhere are not tested here: over some of them, pylance ends the process.
    for data in (whole[:-1], whole[: len(whole) // 2], b"", b"\xff" * len(whole)):
        file.write_bytes(data)
        with pytest.raises(DataFileInvalid, match=r"fragment 0 \(id 0\).* is damaged"):
            list(load(uri, columns=None, output_format="arrow", cache=False))


def test_filters_without_rows_and_unknown_columns_are_explained(dataset: str) -> None:
    with pytest.raises(NoData, match="id > 900"):
        load(dataset, filters="id > 900")
    assert ids(load(dataset, filters="id > 900", on_empty="empty")) == []
    with pytest.raises(SchemaMismatch, match="did you mean 'score'"):
        load(dataset, filters="scores > 1")
    with pytest.raises(SchemaMismatch, match="no file has a column 'ids'"):
        load(dataset, columns=["ids"])


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "empty.lance")
    lance.write_dataset(rows(0, 0), uri)
    with pytest.raises(NoData, match="version 1, has no rows; write rows to it first"):
        load(uri)


def test_without_pylance_the_extra_is_named(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    for name in [name for name in sys.modules if name.startswith("strata.data.lance.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"need the package pylance.*strata-runtime\[lance\]"):
        load(dataset)


# -- object stores -------------------------------------------------------------------------------------------------


def upload(directory: Path, filesystem: pafs.FileSystem, root: str) -> Iterable[str]:
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        name = path.relative_to(directory).as_posix()
        with filesystem.open_output_stream(f"{root}/{name}") as out:
            out.write(path.read_bytes())
        yield name


def test_a_dataset_on_s3_is_read_with_one_set_of_options(s3: S3Server, dataset: str) -> None:
    url, options = s3.new_url(), s3.options()
    source, root = open_source(url, storage_options=options)
    names = list(upload(Path(dataset), source.filesystem, root))
    assert sorted(ids(load(url, storage_options=options, shuffle=True))) == [*LEFT, *range(100, 130)]
    assert ids(load(url, storage_options=options, version=1, filters="id >= 95")) == list(range(95, 100))
    (deleted,) = [name for name in names if name.startswith("_deletions/0-1-")]
    source.filesystem.delete_file(f"{root}/{deleted}")
    with pytest.raises(DataFileMissing, match=f"{deleted} does not exist"):
        ids(load(url, storage_options=options, cache=False, version=2))


def test_a_dataset_forms_batches_by_tokens_without_its_deleted_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "texts.lance")
    tokens = [[number] * (1 + number % 7) for number in range(100)]
    lance.write_dataset(pa.table({"id": range(100), "tokens": pa.array(tokens, pa.list_(pa.int64()))}), uri)
    lance.dataset(uri).delete("id >= 10 and id < 20")

    by_rank = [
        list(load(uri, rank=rank, num_ranks=2, batch_size=None, batch_tokens=20, columns=None, sequences="packed"))
        for rank in range(2)
    ]

    assert len(by_rank[0]) == len(by_rank[1])
    batches = [batch for batches in by_rank for batch in batches]
    assert sorted(number for batch in batches for number in batch["id"].tolist()) == [*range(10), *range(20, 100)]
    assert all(len(batch["tokens"].values) <= 20 for batch in batches)
