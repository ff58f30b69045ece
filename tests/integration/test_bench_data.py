"""The data benchmark at a small size: its contenders measure and refuse results that are not exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from strata import bench
from strata.bench import data_files
from strata.bench.contenders import data_ceiling, data_strata, data_strata_growth, data_strata_start
from strata.bench.contenders.data_consumer import Consumer
from strata.bench.data_files import Checksum, checksum_of
from strata.bench.frame import Sample, quotients
from strata.data.plan.cache import DIRECTORY_VARIABLE

ROWS = 20_000
ASKED_FOR = {
    *("rows_per_s", "over_decode_ceiling", "over_decode_ceiling_shuffled", "vs_torch_dataloader_utils"),
    *("vs_hf_datasets", "vs_litdata", "vs_torch_dataloader", "first_batch_s", "first_batch_8_files_s"),
    *("plan_10k_files_s", "plan_10k_files_cached_s", "resume_s", "peak_pss_mb", "projection_over_ceiling"),
    *("growth_rows_per_s_ratio", "vs_best_peer"),
}
"""Keys of the figures that programs read."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the generated files; the first test that needs a dataset generates it."""
    return tmp_path_factory.mktemp("bench-data")


@pytest.fixture
def small(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small sizes for contenders that run in this process."""
    sizes = {"STRATA_BENCH_ROWS": ROWS, "STRATA_BENCH_FILES": 30, "STRATA_BENCH_BATCH_SIZE": 1_000}
    for name, value in {**sizes, "STRATA_BENCH_DATA_DIR": place, "STRATA_CACHE_DIR": place / "cache"}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_strata_is_compared_with_the_decoder_limit(place: Path) -> None:
    command = ["bench", "data", "--quick", "--json", "--only", "ceiling", "--only", "strata", "--set", f"rows={ROWS}"]
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", *command], capture_output=True, text=True, timeout=55, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])["figures"]
    ratios = {"over_decode_ceiling", "over_decode_ceiling_shuffled", "projection_over_ceiling"}
    assert found.keys() >= {*ratios, "rows_per_s", "peak_pss_mb"}
    assert all(value > 0 for key, value in found.items() if key != "pss_over_allowed")
    assert found["over_decode_ceiling"] == pytest.approx(found["rows_per_s"] / found["ceiling_rows_per_s"])
    assert not list(place.glob(".*")), "no incomplete dataset is left"


@pytest.mark.usefixtures("small")
def test_first_batches_plans_and_resumes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    data_strata_start.main()
    found = json.loads(capsys.readouterr().out)["figures"]
    assert found.keys() == {
        *("first_batch_s", "first_batch_8_files_s", "first_batch_8_files_shuffled_s"),
        *("plan_10k_files_s", "plan_10k_files_cached_s", "resume_s"),
    }
    assert all(value > 0 for value in found.values())


@pytest.mark.usefixtures("small")
def test_growth_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_strata_growth, "LARGE_FILES", 17)
    monkeypatch.setattr(data_strata_growth, "SMALL_PASSES", 2)
    data_strata_growth.main()
    found = json.loads(capsys.readouterr().out)["figures"]
    ratio = found["growth_large_rows_per_s"] / found["growth_small_rows_per_s"]
    assert found["growth_rows_per_s_ratio"] == pytest.approx(ratio)
    assert found["growth_large_peak_pss_mb"] > 1


def test_the_benchmark_has_every_required_figure() -> None:
    assert {figure.key for figure in bench.get("data").figures} >= ASKED_FOR


def test_peers_count_in_their_best_configuration_and_the_best_peer_is_chosen() -> None:
    measured = {"rows_per_s": 600.0, "tdu_rows_per_s": 100.0, "hf_rows_per_s": 50.0, "litdata_rows_per_s": 10.0}
    torch_rows = {"torch_inline_rows_per_s": 300.0, "torch_2_workers_rows_per_s": 200.0, "torch_rows_per_s": 300.0}
    (found,) = quotients(bench.get("data").figures, [Sample("all", 0, measured | torch_rows)])
    compared = {key: value for key, value in found.figures.items() if key.startswith("vs_")}
    assert compared == {
        "vs_torch_dataloader_utils": 6.0,
        "vs_hf_datasets": 12.0,
        "vs_litdata": 60.0,
        "vs_torch_dataloader": 2.0,
        "vs_torch_dataloader_2_workers": 3.0,
        "vs_torch_dataloader_inline": 2.0,
        "vs_best_peer": 2.0,
    }


@pytest.mark.usefixtures("small")
def test_a_resume_is_measured_with_a_cold_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = []

    def measured(*_: object, **__: object) -> float:
        remembered.append(list(Path(os.environ[DIRECTORY_VARIABLE]).rglob("*")))
        return 1.0

    monkeypatch.setattr(data_strata_start, "first_batch_s", measured)
    assert data_strata_start.resuming_s(data_files.table(ROWS)) == 1.0
    assert remembered == [[]] * len(data_strata_start.SHARES)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("contender", [data_ceiling, data_strata])
def test_a_repeated_row_fails_a_contender(
    contender: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of rows is right; only one id is wrong."""
    whole = data_files.table(ROWS)
    monkeypatch.setenv(data_files.DIRECTORY_VARIABLE, str(tmp_path))
    for number, path in enumerate(whole.paths):
        copy = tmp_path / whole.directory.name / path.name
        copy.parent.mkdir(exist_ok=True)
        rows = pq.read_table(path)
        if number == 0:
            rows = rows.set_column(0, "id", pc.if_else(pc.equal(rows["id"], 7), pa.scalar(6), rows["id"]))
        pq.write_table(rows, copy)
    num_threads = threading.active_count()
    with pytest.raises(ValueError, match="rows were lost, repeated or changed"):
        contender.main()
    assert not capsys.readouterr().out
    assert threading.active_count() == num_threads


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
def test_the_checksum_accepts_only_every_row_once(batches: list[list[int]], is_exact: bool) -> None:
    consumer = Consumer(2)
    for ids in batches:
        consumer.touch(batch_of(ids))
    if is_exact:
        consumer.verify(checksum_of(range(3, 6)))
    else:
        with pytest.raises(ValueError, match="lost, repeated or changed"):
            consumer.verify(checksum_of(range(3, 6)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": torch.zeros(2)}, "shape"),
        ({"value": torch.zeros(6)[::2]}, "gaps"),
        ({"other": torch.zeros(3)}, "3 columns, not 2"),
    ],
)
def test_a_batch_that_training_could_not_use_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Consumer(2).touch(batch_of([1, 2, 3]) | changed)


def test_the_expected_checksum_is_computed_without_the_files() -> None:
    assert checksum_of(range(3, 6)) == Checksum(3, 12, 50)
    ids = range(10**7, 10**7 + 10**5)
    assert checksum_of(ids).id_squares == sum(i * i for i in ids) % 2**64


def test_a_dataset_is_generated_once_and_never_left_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
