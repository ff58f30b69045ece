"""The benchmark of structured data at a small size: its contenders measure, and refuse what is not exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from strata import bench
from strata.bench import data_files
from strata.bench.contenders.data_consumer import Consumer
from strata.bench.data_files import Checksum, checksum_of

ROWS = 20_000
ASKED_FOR = {
    *("rows_per_s", "over_decode_ceiling", "over_decode_ceiling_shuffled", "vs_torch_dataloader_utils"),
    *("vs_hf_datasets", "vs_litdata", "vs_torch_dataloader", "first_batch_s", "first_batch_8_files_s"),
    *("plan_10k_files_s", "plan_10k_files_cached_s", "resume_s", "peak_pss_mb", "projection_over_ceiling"),
    "growth_rows_per_s_ratio",
}
NEED_PEERS = {key for key in ASKED_FOR if key.startswith("vs_")}
NEED_GROWTH = {"growth_rows_per_s_ratio"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files are, made by whoever needs them first."""
    return tmp_path_factory.mktemp("bench-data")


def run(*command: str, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env={
            **os.environ,
            "STRATA_BENCH_DATA_DIR": str(place),
            "STRATA_CACHE_DIR": str(place / "cache"),
            "STRATA_BENCH_ROWS": str(ROWS),
        },
    )


def test_ours_is_measured_beside_the_ceiling_with_the_keys_that_programs_read(place: Path) -> None:
    chosen = [word for name in ("ceiling", "strata", "strata start") for word in ("--only", name)]
    sizes = ["--set", f"rows={ROWS}", "--set", "files=30", "--set", "batch_size=1000"]
    ended = run("strata.cli", "bench", "data", "--quick", "--json", *chosen, *sizes, place=place)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert ASKED_FOR - NEED_PEERS - NEED_GROWTH <= found.keys()
    assert all(value > 0 for key, value in found.items() if key != "pss_over_allowed")
    assert found["over_decode_ceiling"] == pytest.approx(found["rows_per_s"] / found["ceiling_rows_per_s"])
    assert found["peak_pss_mb"] > found["base_pss_mb"] * 0.5
    assert not list(place.glob(".*")), "what was half made is gone"


def test_the_benchmark_has_every_figure_that_was_asked_for() -> None:
    assert {figure.key for figure in bench.get("data").figures} >= ASKED_FOR


def test_a_row_that_came_twice_instead_of_another_fails_the_ceiling_and_would_fail_everybody(
    place: Path, tmp_path: Path
) -> None:
    """The number of rows is right, and so is everything but one id."""
    whole = data_files_in(place)
    (tmp_path / whole.name).mkdir()
    for path in whole.glob("*.parquet"):
        (tmp_path / whole.name / path.name).hardlink_to(path)
    first = min((tmp_path / whole.name).iterdir())
    rows = pq.read_table(first)
    ids = pc.if_else(pc.equal(rows["id"], 7), 6, rows["id"])
    first.unlink()
    pq.write_table(rows.set_column(0, "id", pc.cast(ids, pa.int64())), first)
    ended = run("strata.bench.contenders.data_ceiling", "--quick", place=tmp_path)
    assert ended.returncode != 0
    assert "rows were lost, repeated or changed" in ended.stderr
    assert not ended.stdout


def data_files_in(place: Path) -> Path:
    """The directory of the 41-column dataset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(data_files.DIRECTORY_VARIABLE, str(place))
        return data_files.table(ROWS).directory


def batch_of(ids: list[int]) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor(ids), "value": torch.zeros(len(ids))}


@pytest.mark.parametrize(
    ("batches", "is_exact"),
    [
        ([[3, 4], [5]], True),
        ([[5, 3], [4]], True),
        ([[3, 4]], False),
        ([[3, 4], [5, 5]], False),
        ([[4, 4], [4]], False),  # as many rows and the same sum
    ],
)
def test_only_each_row_once_is_exact(batches: list[list[int]], is_exact: bool) -> None:
    consumer = Consumer(2)
    for ids in batches:
        consumer.touch(batch_of(ids))
    if is_exact:
        consumer.verify(checksum_of(range(3, 6)))
    else:
        with pytest.raises(ValueError, match="lost, repeated or changed"):
            consumer.verify(checksum_of(range(3, 6)))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"value": torch.zeros(2)}, "shape"),
        ({"value": torch.zeros(6)[::2]}, "gaps"),
        ({"other": torch.zeros(3)}, "3 columns, not 2"),
    ],
)
def test_a_batch_that_a_training_could_not_use_is_refused(changed: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Consumer(2).touch(batch_of([1, 2, 3]) | changed)


def test_what_must_be_found_is_arithmetic() -> None:
    assert checksum_of(range(3, 6)) == Checksum(3, 12, 50)
    ids = range(10**7, 10**7 + 10**5)
    assert checksum_of(ids).id_squares == sum(i * i for i in ids) % 2**64


def test_a_dataset_is_made_once_and_only_whole_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data_files.DIRECTORY_VARIABLE, str(tmp_path))
    made = data_files.table(100)
    before = [path.stat().st_mtime_ns for path in made.paths]
    assert [path.stat().st_mtime_ns for path in data_files.table(100).paths] == before
    again = data_files.table_again(100, 11)
    ids = pa.concat_tables([pq.read_table(path) for path in again.paths])["id"].to_pylist()
    assert again.checksum == Checksum(len(ids), sum(ids), sum(i * i for i in ids))

    def breaks(place: Path) -> None:
        (place / "part").write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        data_files.kept("broken", breaks)
    assert {path.name for path in tmp_path.iterdir()} == {made.directory.name, again.directory.name}
