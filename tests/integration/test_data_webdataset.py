"""Tar shards through the loader: the samples of the webdataset package, exact resume, missing parts, indexes."""

from __future__ import annotations

import gzip
import io
import json
import logging
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
import zstandard
from PIL import Image
from typer.testing import CliRunner
from webdataset import tariterators

from strata.cli.app import app
from strata.data import StructuredDataset
from strata.data.indexer import index_shards
from strata.data.packer import pack
from strata.data.source.braces import expand
from strata.errors import DataFileInvalid, InvalidArgument, NoData, NullsFound, PlanChanged

NUM_SAMPLES = 60


def image_bytes(value: int, size: tuple[int, int] = (5, 7), kind: str = "png") -> bytes:
    made = io.BytesIO()
    Image.new("RGB", size, (value % 256, 1, 2)).save(made, kind)
    return made.getvalue()


def array_bytes(values: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, values)
    return made.getvalue()


def write_shard(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = made.getvalue()
    if path.name.endswith("gz"):
        data = gzip.compress(data)
    elif path.name.endswith(".zst"):
        data = zstandard.compress(data)
    path.write_bytes(data)
    return path


def sample_parts(number: int) -> list[tuple[str, bytes]]:
    parts = {
        "jpg": bytes([number % 256]) * (500 + 37 * number % 900),
        "cls": str(number).encode(),
        "json": json.dumps({"number": number}).encode(),
    }
    return [(f"dir/{number:05}.{kind}", data) for kind, data in parts.items()]


def write_shards(folder: Path, num_shards: int = 3, suffix: str = ".tar", **options: Any) -> str:
    per_shard = NUM_SAMPLES // num_shards
    for shard in range(num_shards):
        numbers = range(shard * per_shard, (shard + 1) * per_shard)
        members = [part for number in numbers for part in sample_parts(number)]
        write_shard(folder / f"shard-{shard:06}{suffix}", members, **options)
    return str(folder / f"shard-{{000000..{num_shards - 1:06}}}{suffix}")


def load(path: Any, **choices: Any) -> tuple[Any, Any]:
    defaults = {"batch_size": 4, "num_workers": 2, "cache": False, "decode": {"jpg": False}}
    return StructuredDataset.create_dataloader(path, **(defaults | choices))


def numbers_of(batches: Iterator[Any]) -> list[int]:
    return [number for batch in batches for number in batch["cls"].tolist()]


def package_samples(path: str) -> Iterator[dict[str, Any]]:
    """Yield the samples that the webdataset package finds in a shard."""
    with Path(path).open("rb") as stream:
        files = tariterators.tar_file_expander([{"url": path, "stream": stream}])
        for sample in tariterators.group_by_keys(files):
            yield {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "pax"])
def test_samples_are_those_of_the_webdataset_package(tmp_path: Path, suffix: str, kind: int) -> None:
    pattern = write_shards(tmp_path, suffix=suffix, format=kind)
    loader, _ = load(pattern, decode=False)
    found = [dict(zip(batch, parts, strict=True)) for batch in loader for parts in zip(*batch.values(), strict=True)]
    if suffix == ".tar.zst":  # which the package unpacks with a program
        pattern = write_shards(tmp_path, format=kind)
    assert len(found) == NUM_SAMPLES
    assert found == [sample for path in expand(pattern) for sample in package_samples(path)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_inside_one_large_tar_resumes_exactly_on_another_number_of_ranks(tmp_path: Path, shuffle: bool) -> None:
    path = write_shards(tmp_path, num_shards=1)
    choices = {"shuffle": shuffle, "split_bytes": 8_000, "shuffle_buffer_size": 16}

    def ranks(num_ranks: int) -> list[tuple[Any, Any]]:
        return [load(path, rank=rank, num_ranks=num_ranks, **choices) for rank in range(num_ranks)]

    first = ranks(3)
    assert first[0][1].plan.num_splits > 5, "the tar is split"
    before: list[int] = []
    for loader, _ in first:
        batches = iter(loader)
        before += [number for _ in range(2) for number in next(batches)["cls"].tolist()]
    state = first[0][1].state_dict()
    assert state == first[2][1].state_dict()
    after: list[int] = []
    for loader, dataset in ranks(2):
        dataset.load_state_dict(state)
        after += numbers_of(loader)
    assert sorted(before + after) == list(range(NUM_SAMPLES))
    assert not set(before) & set(after)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_killed_reader_is_resumed_on_more_ranks_without_losing_or_repeating_a_sample(
    tmp_path: Path, suffix: str
) -> None:
    members = [(f"{n:03}.{kind}", str(n).encode()) for n in range(50) for kind in ("cls", "txt")]
    path = write_shard(tmp_path / f"a{suffix}", members)
    command = [sys.executable, str(Path(__file__).with_name("data_children.py")), "read_samples", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [json.loads(child.stdout.readline()) for _ in range(5)]
        child.kill()
    before = [key for line in lines for key in line["keys"]]
    after = []
    for rank in range(3):
        loader, dataset = load(
            path, decode=None, shuffle=True, shuffle_buffer_size=12, output_format="numpy", rank=rank, num_ranks=3
        )
        dataset.load_state_dict(lines[-1]["state"])
        after += [key for batch in loader for key in batch["__key__"].tolist()]
    assert sorted(before + after) == [f"{n:03}" for n in range(50)]


def test_a_resumed_compressed_shard_delivers_the_rest(tmp_path: Path) -> None:
    path = write_shards(tmp_path, num_shards=1, suffix=".tar.gz")
    loader, dataset = load(path)
    batches = iter(loader)
    before = [number for _ in range(3) for number in next(batches)["cls"].tolist()]
    again, resumed = load(path)
    resumed.load_state_dict(dataset.state_dict())
    assert before + numbers_of(again) == list(range(NUM_SAMPLES))


def test_a_shard_with_another_sample_belongs_to_another_dataset(tmp_path: Path) -> None:
    path = write_shards(tmp_path)
    state = load(path)[1].state_dict()
    write_shard(tmp_path / "shard-000001.tar", sample_parts(99))
    with pytest.raises(PlanChanged, match="shard-000001"):
        load(path)[1].load_state_dict(state)


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_parts_are_decoded_by_their_extension(tmp_path: Path) -> None:
    parts = {
        "png": image_bytes(9), "seg.jpg": image_bytes(0, kind="jpeg"), "txt": "grün".encode(), "cls": b"3",
        "json": b'{"a": [1]}', "npy": array_bytes(np.arange(6, dtype=np.float32).reshape(2, 3)), "pkl": b"\x80\x04N.",
    }  # fmt: skip
    saved, zipped = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(2)}, saved)
    np.savez(zipped, a=np.arange(3))
    parts |= {"pt": saved.getvalue(), "npz": zipped.getvalue()}
    members = [(f"{row}.{kind}", data) for row in range(2) for kind, data in parts.items()]
    path = write_shard(tmp_path / "a.tar", members)
    batch = next(iter(load(path, decode=None)[0]))
    assert (batch["png"].shape, batch["png"].dtype) == ((2, 3, 7, 5), torch.uint8)
    assert batch["png"][0, :, 0, 0].tolist() == [9, 1, 2]
    assert batch["png"].is_contiguous()
    assert batch["seg.jpg"].shape == (2, 3, 7, 5)
    assert (batch["txt"], batch["cls"].tolist(), batch["json"][0]) == (["grün", "grün"], [3, 3], {"a": [1]})
    assert batch["npy"].tolist() == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2
    assert batch["pt"][0]["w"].tolist() == [1.0, 1.0]
    assert batch["npz"][1]["a"].tolist() == [0, 1, 2]
    assert batch["pkl"] == [b"\x80\x04N."] * 2, "pickle runs only if it is asked for"
    asked = next(iter(load(path, decode={"pkl": "pickle", "cls": float, "npy": "bytes"}, output_format="numpy")[0]))
    assert (asked["pkl"], asked["cls"].tolist(), asked["npy"][0]) == ([None, None], [3.0, 3.0], parts["npy"])
    assert asked["png"].shape == (2, 7, 5, 3)


def test_values_of_different_shapes_stay_a_list_and_collate_fn_sees_them(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", [(f"{n}.npy", array_bytes(np.ones(n + 1, np.float32))) for n in range(4)])
    batch = next(iter(load(path, decode=None)[0]))
    assert [values.tolist() for values in batch["npy"]] == [[1.0] * (n + 1) for n in range(4)]
    for output_format in ("numpy", "dict"):
        owned = next(iter(load(path, decode=None, output_format=output_format)[0]))["npy"]
        assert all(values.flags.writeable for values in owned), "a batch may be modified"
    padded, _ = load(
        path, decode=None, collate_fn=lambda batch: torch.nn.utils.rnn.pad_sequence(batch["npy"], batch_first=True)
    )
    assert next(iter(padded)).shape == (4, 4)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("npy", array_bytes(np.ones(9))[:-1]),
        ("npy", array_bytes(np.array([{}], object))),
        ("npy", array_bytes(np.ones(1)).replace(b"(1,)", b"(9" + b"0" * 2 + b",)")),
        ("jpg", b"\xff\xd8\xff"),
        ("json", b"{"),
        ("cls", b"1" * 5_000),
        ("pt", b"\x80\x04N."),
    ],
)
def test_a_part_that_cannot_be_decoded_names_its_sample(tmp_path: Path, kind: str, data: bytes) -> None:
    path = write_shard(tmp_path / "a.tar", [("a/7." + kind, data), ("a/8.cls", b"1")])
    with pytest.raises(DataFileInvalid, match=rf"part '{kind}' of sample 'a/7' .*cannot be decoded"):
        list(load(path, decode=None, missing="none")[0])


def test_samples_that_cannot_be_decoded_are_skipped_and_counted(tmp_path: Path) -> None:
    members = [(f"{n}.cls", b"x" if n % 5 == 0 else str(n).encode()) for n in range(20)]
    loader, dataset = load(write_shard(tmp_path / "a.tar", members), decode=None, on_error="skip")
    assert numbers_of(loader) == [n for n in range(20) if n % 5]
    assert (dataset.get_metrics().rows, dataset.get_metrics().skipped_rows) == (16, 4)


def test_decoding_ahead_does_not_move_the_position(tmp_path: Path) -> None:
    path = write_shards(tmp_path)
    loader, dataset = load(path)
    batches = iter(loader)
    for number in range(1, 8):
        assert next(batches)["cls"].tolist() == list(range(4 * number - 4, 4 * number))
        assert dataset.position == 4 * number
    dataset.close()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"decode": {"png": False}}, "the columns are"),
        ({"decode": {"jpg": "gif2"}}, "is unknown"),
        ({"decode": "jpg"}, "must be False, or a mapping"),
        ({"decode": {"jpg": "image"}, "output_format": "arrow"}, "delivers bytes unchanged"),
        ({"missing": "skip"}, "needs columns="),
        ({"missing": "maybe"}, "is unknown"),
    ],
)
def test_wrong_choices_are_refused(tmp_path: Path, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(write_shards(tmp_path), **choices)


def test_binary_columns_of_other_files_use_the_same_decoders(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [0, 1], "image": [image_bytes(0), image_bytes(1)]}), tmp_path / "a.parquet")
    batch = next(iter(load(str(tmp_path), decode={"image": "png"})[0]))
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 1]
    with pytest.raises(InvalidArgument, match="applies to samples of tar shards"):
        load(str(tmp_path), decode=None, missing="none")


# -- missing parts -----------------------------------------------------------------------------------------------------


def test_missing_parts_raise_or_are_skipped_or_are_none(tmp_path: Path) -> None:
    members = [part for n in range(30) for part in sample_parts(n) if not (part[0].endswith("json") and n % 3 == 0)]
    path = write_shard(tmp_path / "a.tar", members)
    with pytest.raises(NullsFound, match="10 of 30 samples have no 'json'"):
        load(path)
    loader, dataset = load(path, missing="none")
    parts = [value for batch in loader for value in batch["json"]]
    assert [n for n, value in enumerate(parts) if value is None] == list(range(0, 30, 3))
    assert dataset.get_metrics().missing_parts == 10
    loader, dataset = load(path, missing="skip", columns=["cls", "json"], decode=None, split_bytes=4_000)
    assert numbers_of(loader) == [n for n in range(30) if n % 3]
    assert dataset.get_metrics().plan_incomplete_rows == 10
    loader, dataset = load(path, columns=["__key__", "cls"], decode=None)
    assert numbers_of(loader) == list(range(30))


# -- indexes and bad shards --------------------------------------------------------------------------------------------


def test_an_index_gives_the_same_plan_and_a_stale_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_shards(tmp_path)
    walked = load(path)[1].plan
    done = CliRunner().invoke(app, ["data", "index", str(tmp_path), "--json"])
    assert json.loads(done.output)["num_written"] == 3, done.output
    assert CliRunner().invoke(app, ["data", "index", str(tmp_path), "--check"]).exit_code == 0
    indexed = load(path)[1].plan
    assert indexed.fingerprint == walked.fingerprint
    caplog.clear()
    members = [part for n in reversed(range(20)) for part in sample_parts(n)]
    write_shard(tmp_path / "shard-000000.tar", members)
    with caplog.at_level(logging.WARNING):
        loader, _ = load(path)
    assert "ignoring the index shard-000000.tar.strata-index" in caplog.text
    assert numbers_of(loader)[:20] == list(reversed(range(20)))
    assert CliRunner().invoke(app, ["data", "index", str(tmp_path), "--check"]).exit_code == 1
    assert index_shards(str(tmp_path)).num_written == 1


def test_a_damaged_row_group_is_skipped_and_counted(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", [part for n in range(20) for part in sample_parts(n)])
    index_shards(str(path))
    data = bytearray(path.read_bytes())
    position = data.index(b"dir/00010.jpg")
    data[position + 130] ^= 1
    path.write_bytes(data)
    loader, dataset = load(path, split_bytes=4_000, on_error="skip")
    found = numbers_of(loader)
    metrics = dataset.get_metrics()
    assert 10 not in found
    assert (len(found) + metrics.skipped_rows, metrics.skipped_units) == (20, 1)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_is_refused_without_unpacking_it_whole(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.data.formats.webdataset.format.MAX_UNPACKED_BYTES", 4 << 20)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 16 << 20
        tar.addfile(info, io.BytesIO(bytes(16 << 20)))
    path = tmp_path / f"a.tar{suffix}"
    path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}[suffix](made.getvalue()))
    with pytest.raises(DataFileInvalid, match=rf"a.tar{suffix}, unpacked byte 0: a member of 16,777,216 bytes"):
        load(path)
    zeros = bytes(16 << 20)
    path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}[suffix](made.getvalue()[:512] + zeros))
    with pytest.raises(DataFileInvalid, match="unpacked"):
        load(path)


def test_a_shard_cut_off_at_a_member_is_refused_although_tarfile_reads_it(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", [part for n in range(3) for part in sample_parts(n)])
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    path.write_bytes(path.read_bytes()[: last.offset])
    with pytest.raises(DataFileInvalid, match=rf"a.tar, byte {last.offset:,}: the end marker is missing"):
        load(path)


# -- packing -----------------------------------------------------------------------------------------------------------


def plant_files(folder: Path, num_samples: int = 12) -> Path:
    for number in range(num_samples):
        place = folder / ("train" if number % 2 else "val-1.0")
        place.mkdir(parents=True, exist_ok=True)
        for name, data in sample_parts(number):
            (place / Path(name).name).write_bytes(data)
    (folder / ".hidden.jpg").write_bytes(b"x")
    (folder / "README").write_text("no extension")
    return folder


def test_a_packed_directory_is_read_back_and_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    files = plant_files(tmp_path / "files")
    shards = pack(files, tmp_path / "one", max_bytes=8_000)
    assert [shard.name for shard in shards] == [f"shard-{number:06}.tar" for number in range(len(shards))]
    assert len(shards) > 2
    assert all(shard.num_bytes <= 8_000 for shard in shards)
    loader, _ = load(str(tmp_path / "one"), decode=None, columns=["__key__", "cls"])
    found = {
        key: number for batch in loader for key, number in zip(batch["__key__"], batch["cls"].tolist(), strict=True)
    }
    assert found == {f"{'train' if n % 2 else 'val-1.0'}/{n:05}": n for n in range(12)}
    assert index_shards(str(tmp_path / "one"), writes=False).num_written == 0
    assert pack(files, tmp_path / "two", max_bytes=8_000) == shards
    data = (tmp_path / "one" / shards[0].name).read_bytes()
    assert data == (tmp_path / "two" / shards[0].name).read_bytes()
    assert xxhash.xxh3_128_hexdigest(data) == shards[0].xxh3_128


def test_a_pack_that_was_stopped_goes_on_and_other_files_are_refused(tmp_path: Path) -> None:
    files, target = plant_files(tmp_path / "files"), tmp_path / "shards"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        pack(files, target, max_samples=3, on_progress=stop)
    with (target / "_pack.jsonl").open("ab") as journal:
        journal.write(b'{"name": "shard-0000')  # killed while it wrote a line
    first = (target / "shard-000000.tar").stat().st_mtime_ns
    result = CliRunner().invoke(app, ["data", "pack", str(files), str(target), "--max-samples", "3"])
    assert result.exit_code == 0
    assert "4 shards with 12 samples in " in result.output
    assert (target / "shard-000000.tar").stat().st_mtime_ns == first, "it is not written again"
    assert len(load(str(target))[0]) == 3
    with pytest.raises(InvalidArgument, match="choose an empty directory"):
        pack(files, target, max_samples=4)
    with pytest.raises(NoData, match="no files with a key"):
        pack(target / "nothing", tmp_path / "other")
