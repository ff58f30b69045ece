"""Features are fitted on files through the decode threads, and encode the batches of a loader."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from strata.data import StructuredDataset
from strata.data.structured import StructuredDataset as Files
from strata.errors import DataFileInvalid, LimitExceeded, NoData, SchemaMismatch
from strata.trainer.features import DenseFeat, Features, SparseFeat, VarLenFeat, counts, fitters, portable

NUM_ROWS = 10_000
COLUMNS = [
    SparseFeat("carrier"),
    SparseFeat("user", min_count=2),
    SparseFeat("page", hash_buckets=1000),
    DenseFeat("distance"),
    DenseFeat("price", scale="log"),
    VarLenFeat("tags", max_length=3),
]


def make_rows(seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    tags = [list(random.choice(["red", "new", "old"], length)) for length in random.integers(0, 5, NUM_ROWS)]
    return pa.table(
        {
            "carrier": pa.array(
                random.choice(["AA", "UA", "Zürich", ""], NUM_ROWS), mask=random.random(NUM_ROWS) < 0.1
            ),
            "user": random.zipf(1.2, NUM_ROWS) % 5000 * 10**12,
            "page": pa.array(random.integers(0, 3000, NUM_ROWS)).cast(pa.string()),
            "distance": random.integers(0, 3000, NUM_ROWS),
            "price": pa.array(random.lognormal(2, 1, NUM_ROWS), mask=random.random(NUM_ROWS) < 0.2),
            "tags": pa.array(tags, pa.list_(pa.string())),
            "late": (random.random(NUM_ROWS) < 0.2).astype(np.float32),
            "unused": pa.array(random.integers(0, 2**62, NUM_ROWS)).cast(pa.string()),
        }
    )


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    return make_rows()


@pytest.fixture(scope="module")
def fitted(rows: pa.Table) -> Features:
    return Features.fit(rows, COLUMNS, label="late")


def write(rows: pa.Table, folder: Path, *, num_files: int = 3, row_group_size: int = 700, seed: int = 0) -> Path:
    """Write rows, in random order, to several files."""
    folder.mkdir()
    order = np.random.default_rng(seed).permutation(rows.num_rows)
    for number, part in enumerate(np.array_split(order, num_files)):
        pq.write_table(rows.take(pa.array(part)), folder / f"{number}.parquet", row_group_size=row_group_size)
    return folder


@pytest.mark.parametrize(("num_files", "row_group_size", "num_workers"), [(1, 10_000, 1), (3, 700, 2), (7, 97, 4)])
def test_files_row_groups_and_threads_do_not_change_the_features(
    rows: pa.Table, fitted: Features, tmp_path: Path, num_files: int, row_group_size: int, num_workers: int
) -> None:
    path = write(rows, tmp_path / "data", num_files=num_files, row_group_size=row_group_size, seed=num_files)

    features = Features.fit(path, COLUMNS, label="late", num_workers=num_workers)

    assert features.state() == fitted.state()


def test_a_loader_delivers_encoded_batches_as_matrices(rows: pa.Table, fitted: Features, tmp_path: Path) -> None:
    path = write(rows, tmp_path / "data")
    loader, dataset = StructuredDataset.create_dataloader(
        path, columns=fitted.columns_read, transform=fitted.encode, batch_size=1000, output_format="torch"
    )
    batches = list(loader)
    dataset.close()

    assert {name: (value.dtype, tuple(value.shape)) for name, value in batches[0].items()} == {
        "sparse": (torch.int64, (1000, 3)),
        "dense": (torch.float32, (1000, 2)),
        "tags": (torch.int64, (1000, 3)),
        "late": (torch.float32, (1000,)),
    }
    sparse = torch.cat([batch["sparse"] for batch in batches])
    assert [int(column.max()) < field.num_ids for column, field in zip(sparse.T, fitted.fields, strict=False)] == [
        True
    ] * 3
    carriers = torch.bincount(sparse[:, 0]).tolist()
    assert carriers[0] == rows["carrier"].null_count
    assert carriers[2:] == sorted(carriers[2:], reverse=True)
    dense = torch.cat([batch["dense"] for batch in batches])
    assert float(dense[:, 0].mean()) == pytest.approx(0, abs=1e-5)
    assert float(dense[:, 0].std(unbiased=False)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("num_rows", [1, 999, 4096, 4097])
def test_batches_of_any_size_are_encoded_alike(rows: pa.Table, fitted: Features, num_rows: int) -> None:
    whole = fitted.encode(rows.combine_chunks().to_batches()[0])
    starts = [0] if num_rows == 1 else range(0, NUM_ROWS, num_rows)

    for first in starts:
        part = fitted.encode(rows.slice(first, num_rows).combine_chunks().to_batches()[0])
        assert part.equals(whole.slice(first, num_rows))


def test_features_travel_to_decode_processes(rows: pa.Table, fitted: Features, tmp_path: Path) -> None:
    path = write(rows.slice(0, 2000), tmp_path / "data")

    def load(**options: Any) -> torch.Tensor:
        loader, dataset = StructuredDataset.create_dataloader(
            path, columns=fitted.columns_read, transform=fitted.encode, batch_size=500, num_workers=1, **options
        )
        found = torch.cat([batch["sparse"] for batch in loader])
        dataset.close()
        return found

    assert torch.equal(load(worker_type="process"), load(worker_type="thread"))


def test_only_the_needed_columns_are_read(rows: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(rows, tmp_path / "data")
    planned: list[tuple[str, ...]] = []
    create = Files.create_dataloader

    def watch(*arguments: Any, **options: Any) -> Any:
        loader, dataset = create(*arguments, **options)
        planned.append(dataset.plan.columns)
        return loader, dataset

    monkeypatch.setattr(Files, "create_dataloader", watch)
    Features.fit(path, [SparseFeat("carrier"), DenseFeat("price")], label="late", filters="distance > 100")

    assert planned == [("carrier", "price", "late")]


def test_filters_choose_the_rows_of_files_as_of_tables(rows: pa.Table, tmp_path: Path) -> None:
    path = write(rows, tmp_path / "data")
    where = "distance > 1500"

    from_files = Features.fit(path, COLUMNS, label="late", filters=where)

    assert from_files.state() == Features.fit(rows, COLUMNS, label="late", filters=where).state()
    assert from_files.num_rows == int((np.asarray(rows["distance"]) > 1500).sum())
    with pytest.raises(NoData):
        Features.fit(path, COLUMNS, filters="distance > 10000")


def test_files_of_other_formats_give_the_same_features(rows: pa.Table, tmp_path: Path) -> None:
    plain = rows.select(["user", "distance"])
    pyarrow.csv.write_csv(plain, tmp_path / "rows.csv")
    declared = [SparseFeat("user"), DenseFeat("distance")]

    assert Features.fit(tmp_path / "rows.csv", declared).state() == Features.fit(plain, declared).state()


def test_an_unknown_column_of_files_is_refused_with_a_similar_name(rows: pa.Table, tmp_path: Path) -> None:
    path = write(rows, tmp_path / "data")

    with pytest.raises(SchemaMismatch, match="did you mean 'carrier'"):
        Features.fit(path, [SparseFeat("carier")])


def test_an_error_in_a_decode_thread_arrives_with_its_cure(
    rows: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(rows, tmp_path / "data")
    monkeypatch.setattr(fitters, "MAX_VALUES", 100)

    with pytest.raises(LimitExceeded, match="hash_buckets="):
        Features.fit(path, [SparseFeat("user")])
    with pytest.raises(SchemaMismatch, match="declare it as DenseFeat"):
        Features.fit(path, [SparseFeat("price")])


def test_damaged_row_groups_can_be_skipped(rows: pa.Table, tmp_path: Path) -> None:
    path = write(rows, tmp_path / "data", num_files=1, row_group_size=1000)
    file = path / "0.parquet"
    chunk = pq.read_metadata(file).row_group(4).column(0)
    with file.open("r+b") as opened:
        opened.seek(chunk.dictionary_page_offset)
        opened.write(b"\xff" * chunk.total_compressed_size)

    with pytest.raises(DataFileInvalid):
        Features.fit(path, [SparseFeat("carrier")])
    features = Features.fit(path, [SparseFeat("carrier")], loader_options={"on_error": "skip"})
    assert features.num_rows == NUM_ROWS - 1000


def test_a_progress_bar_is_shown_on_standard_error(
    rows: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(rows, tmp_path / "data")
    Features.fit(path, [DenseFeat("distance")])
    assert capsys.readouterr() == ("", "")

    Features.fit(path, [DenseFeat("distance")], show_progress=True)

    shown = capsys.readouterr()
    assert shown.out == ""
    assert "fitting features" in shown.err


def test_memory_does_not_grow_with_the_rows(rows: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_MIN_PENDING", 1 << 14)
    path = write(pa.concat_tables([rows] * 20), tmp_path / "data", num_files=4, row_group_size=2000)
    declared = [SparseFeat("carrier"), SparseFeat("page"), DenseFeat("distance")]
    options: dict[str, Any] = {"num_workers": 1, "loader_options": {"cache": False}}
    Features.fit(path, declared, **options)  # imports
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        features = Features.fit(path, declared, **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert features.num_rows == 200_000
    assert peak < 1_000_000  # the distances alone would take 1.6 MB
    assert pa.total_allocated_bytes() - before < 2_000_000


def test_neither_fitting_nor_encoding_imports_pandas(rows: pa.Table, tmp_path: Path) -> None:
    """Importing it takes half a second, and pyarrow does so in innocent calls."""
    path = write(rows, tmp_path / "data")
    code = (
        "import sys\n"
        "from strata.data import StructuredDataset\n"
        "from strata.trainer.features import *\n"
        "columns = [SparseFeat('carrier'), SparseFeat('user', min_count=2), SparseFeat('page', hash_buckets=9),\n"
        "    DenseFeat('distance'), DenseFeat('price', scale='log'), VarLenFeat('tags')]\n"
        f"features = Features.fit({str(path)!r}, columns, label='late')\n"
        f"loader, _ = StructuredDataset.create_dataloader({str(path)!r}, columns=features.columns_read,\n"
        "    transform=features.encode, shuffle=True)\n"
        "print(sum(len(batch['late']) for batch in loader), 'pandas' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout == f"{NUM_ROWS} False\n"


def test_an_exported_model_encodes_without_pyarrow_numpy_or_strata(
    rows: pa.Table, fitted: Features, tmp_path: Path
) -> None:
    shutil.copy(portable.__file__, tmp_path / "encoder.py")
    fitted.save(tmp_path / "features.json")
    some = rows.slice(0, 200).select([column.name for column in COLUMNS])
    (tmp_path / "rows.json").write_text(json.dumps(some.to_pydict()))
    script = tmp_path / "predict.py"
    script.write_text(
        "import json, sys\n"
        "for name in ('pyarrow', 'pandas', 'strata', 'msgspec'): sys.modules[name] = None\n"
        "from encoder import PortableEncoder\n"
        "encoded = PortableEncoder.load('features.json')(json.load(open('rows.json')))\n"
        "print(json.dumps({name: tensor.tolist() for name, tensor in encoded.items()}))\n"
    )

    done = subprocess.run(
        [sys.executable, "-W", "ignore", script.name], cwd=tmp_path, check=True, capture_output=True, text=True
    )

    made = fitted.encode(some.combine_chunks().to_batches()[0])
    found = json.loads(done.stdout)
    assert found.keys() == set(made.schema.names)
    assert found["sparse"] == made.column("sparse").to_pylist()
    assert found["tags"] == made.column("tags").to_pylist()
    np.testing.assert_allclose(found["dense"], made.column("dense").to_pylist(), rtol=1e-6, atol=1e-6)
