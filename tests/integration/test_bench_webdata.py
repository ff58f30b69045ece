"""The parts of `strata bench webdata` that decide what its figures mean."""

from __future__ import annotations

import io
import json
import logging
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.bench import tar_files
from strata.bench.contenders import (
    webdata_limits,
    webdata_litdata,
    webdata_shared,
    webdata_spdl,
    webdata_start,
    webdata_strata,
    webdata_webdataset,
)
from strata.bench.contenders.webdata_consumer import SIZES, Consumer, pass_s, samples_per_s_once
from strata.bench.frame import Sample, quotients
from strata.bench.webdata import BENCHMARK

PROMISED = {
    *("tar_10kb_over_spdl", "tar_100kb_over_spdl", "tar_10kb_over_webdataset", "tar_100kb_over_webdataset"),
    *("tar_100kb_over_raw", "decode_over_decoder", "resume_s", "index_over_read"),
    *("shared_bytes_ratio", "shared_speedup"),
}
"""Names that others read from `--json`."""
BATCH_SIZE = 3


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Turn the log of this process on again: contenders, which usually have their own, turn off what peers log."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small sizes: 5 samples of 10 kB in each of the 16 shards."""
    sizes = {"MB": 1, "IMAGES": 32, "SHARDS": 20, "BATCH_SIZE": BATCH_SIZE, "DATA_DIR": tmp_path / "data"}
    for name, value in sizes.items():
        monkeypatch.setenv(f"STRATA_BENCH_{name}", str(value))
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["contender"])


@pytest.fixture
def shards(small: None) -> tar_files.Shards:
    return tar_files.random_bytes(1_000_000, SIZES["10kb"])


def batches_of(shards: tar_files.Shards) -> list[dict[str, Any]]:
    return list(webdata_limits.tarfile_batches(shards))


def test_the_benchmark_has_the_figures_that_others_read() -> None:
    assert {figure.key for figure in BENCHMARK.figures} >= PROMISED


def test_spdl_and_webdataset_are_compared_with_shuffled_reads_and_raw_reads_with_reads_in_order() -> None:
    measured = {
        "plain_100kb_mb_per_s": 1_500.0,
        "shuffled_100kb_mb_per_s": 1_000.0,
        "raw_100kb_mb_per_s": 3_000.0,
        "spdl_100kb_mb_per_s": 2_000.0,
        "webdataset_100kb_mb_per_s": 100.0,
        "decoded_images_per_s": 90.0,
        "decoder_images_per_s": 100.0,
    }
    (found,) = quotients(BENCHMARK.figures, [Sample("all", 0, measured)])
    wanted = {"tar_100kb_over_spdl": 0.5, "tar_100kb_over_webdataset": 10.0, "tar_100kb_over_raw": 0.5}
    assert found.figures.items() >= (wanted | {"decode_over_decoder": 0.9}).items()


def test_shards_are_written_once_and_their_checksum_is_that_of_their_members(shards: tar_files.Shards) -> None:
    labels, num_bytes = [], 0
    for path in shards.paths:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".cls"):
                    file = tar.extractfile(member)
                    assert file is not None
                    labels.append(int(file.read()))
                else:
                    num_bytes += member.size
    assert labels == list(range(96))
    assert (shards.num_samples, shards.num_payload_bytes) == (96, num_bytes)
    before = [path.stat().st_mtime_ns for path in shards.paths]
    few = tar_files.random_bytes(1_000_000, SIZES["10kb"], num_shards=4)
    assert [path.stat().st_mtime_ns for path in few.paths] == before[:4]
    assert (few.num_samples, few.num_payload_bytes) == (24, 240_000)


@pytest.mark.usefixtures("small")
def test_the_size_of_images_and_of_text_is_known_without_reading_the_shards() -> None:
    for made in (tar_files.images(160), tar_files.text(1_000_000)):
        with_sizes = Consumer(made)
        for batch in batches_of_any(made):
            with_sizes.touch(batch)
        with_sizes.verify()


def batches_of_any(shards: tar_files.Shards) -> list[dict[str, Any]]:
    found = []
    for path in shards.paths:
        with tarfile.open(path) as tar:
            data = [(member.name, tar.extractfile(member)) for member in tar]
            members = [(name, file.read()) for name, file in data if file is not None]
            found += list(webdata_spdl.grouped(members, (shards.part, "cls"), BATCH_SIZE))
    return found


def lose_one(batch: dict[str, Any]) -> None:
    batch["bin"].pop()
    batch["cls"].pop()


def repeat_one(batch: dict[str, Any]) -> None:
    batch["cls"][0] = batch["cls"][1]


def lose_a_label(batch: dict[str, Any]) -> None:
    batch["cls"].pop()


def cut_a_payload(batch: dict[str, Any]) -> None:
    batch["bin"][0] = batch["bin"][0][:-1]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_one, "lost or repeated"),
        (repeat_one, "lost or repeated"),
        (lose_a_label, "3 payloads and 2 labels"),
        (cut_a_payload, "the payloads have 959,999 bytes, not 960,000"),
    ],
)
def test_a_pass_that_is_not_exact_fails(shards: tar_files.Shards, harm: Any, message: str) -> None:
    batches = batches_of(shards)
    assert pass_s(lambda: batches, shards) > 0
    harm(batches[2])
    for measure in (pass_s, samples_per_s_once):
        with pytest.raises(ValueError, match=message):
            measure(lambda: batches, shards)


def test_an_image_of_another_size_fails(shards: tar_files.Shards) -> None:
    consumer = Consumer(shards, is_decoded=True)
    good = np.zeros((256, 256, 3), np.uint8)
    assert consumer.touch({"bin": [good, good.transpose(2, 0, 1)], "cls": [0, 1]}) == 2
    with pytest.raises(ValueError, match="shape"):
        consumer.touch({"bin": [good[:1]], "cls": [2]})


def test_the_header_walk_finds_every_member(shards: tar_files.Shards) -> None:
    assert webdata_limits.walk_headers(shards) == 2 * shards.num_samples


def test_members_are_grouped_by_key_and_batches_end_with_the_shard() -> None:
    members = [(f"{number}.{part}", number) for number in range(5) for part in ("bin", "cls")]
    found = [batch["cls"] for batch in webdata_spdl.grouped(members, ("bin", "cls"), 2)]
    assert found == [[0, 1], [2, 3], [4]]


def test_states_are_taken_every_ten_batches() -> None:
    taken = []
    after_batch = webdata_strata.saves_of(SimpleNamespace(state_dict=lambda: taken.append(True)))
    for _ in range(25):
        after_batch()
    assert len(taken) == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("contender", [webdata_limits, webdata_strata, webdata_start])
def test_a_contender_reports_figures_of_the_benchmark(
    contender: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("strata.bench.contenders.webdata_consumer.REPETITIONS", 1)
    monkeypatch.setattr(webdata_limits, "REPETITIONS", 1)
    monkeypatch.setattr(webdata_start, "NUM_JUMPS", 2)
    monkeypatch.setitem(SIZES, "100kb", 12_000)  # or there would be a single sample in a shard
    contender.main()
    found = json.loads(capsys.readouterr().out)["figures"]
    assert found.keys() <= {figure.key for figure in BENCHMARK.figures}
    assert all(value > 0 for value in found.values())


def test_a_resume_at_the_wrong_sample_fails(shards: tar_files.Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    create = webdata_start.loader_of

    def of_other_seed(shards: Any, **arguments: Any) -> Any:
        loader, dataset = create(shards, **arguments)
        monkeypatch.setattr(loader, "load_state_dict", lambda state: None)  # begins at the first sample
        return loader, dataset

    monkeypatch.setattr(webdata_start, "loader_of", of_other_seed)
    with pytest.raises(ValueError, match="the batch after the resume has the labels"):
        webdata_start.resuming_s(shards)


@pytest.mark.usefixtures("small")
def test_a_rank_reports_when_it_ended_and_what_it_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    webdata_shared.read_as_rank(0)
    ready, answer = capsys.readouterr().out.splitlines()
    size_bytes = sum(path.stat().st_size for path in webdata_shared.text().paths)
    assert ready == "ready"
    assert json.loads(answer)[1] == size_bytes


@pytest.mark.parametrize(
    ("contender", "module", "package"),
    [
        (webdata_spdl, "spdl.io", "spdl"),
        (webdata_webdataset, "webdataset", "webdataset"),
        (webdata_litdata, "litdata", "litdata"),
    ],
)
def test_a_peer_that_is_not_installed_is_named(
    contender: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    contender.main()
    assert json.loads(capsys.readouterr().out) == {"not_installed": package}
