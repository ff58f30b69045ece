"""Directories of Hugging Face's `save_to_disk`: streams of Arrow data, beside JSON that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from strata import StructuredDataset
from strata.data.stream import list_files
from strata.errors import DataFileInvalid, DataFileMissing, InvalidArgument


def save(directory: Path, first: int, num_rows: int, *, num_files: int = 3, **state: Any) -> Path:
    """Write a directory as `Dataset.save_to_disk` of datasets 4 does."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05}-of-{num_files:05}.arrow" for number in range(num_files)]
    features = {"id": {"dtype": "int64", "_type": "Value"}, "image": {"_type": "Image"}}
    schema = pa.schema(
        {"id": pa.int64(), "image": pa.struct({"bytes": pa.binary(), "path": pa.string()})},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    for number, name in enumerate(names):
        rows = range(first + number * num_rows // num_files, first + (number + 1) * num_rows // num_files)
        table = pa.table({"id": rows, "image": [{"bytes": b"%d" % row, "path": None} for row in rows]}, schema)
        with pa.ipc.new_stream(directory / name, schema) as stream:
            stream.write_table(table, max_chunksize=7)
    made = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1f2e", "_split": "train", **state}
    (directory / "state.json").write_text(json.dumps(made))
    (directory / "dataset_info.json").write_text(json.dumps({"features": features, "splits": {}}))
    return directory


def load(path: Any, **more: Any) -> Any:
    loader, _ = StructuredDataset.create_dataloader(path, batch_size=8, columns=["id"], cache=False, **more)
    return loader


def ids(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch["id"].tolist()]


@pytest.mark.parametrize("requested", [None, "huggingface"])
def test_a_saved_dataset_is_read_in_the_order_of_its_files(tmp_path: Path, requested: str | None) -> None:
    directory = save(tmp_path / "split=train" / "saved", 0, 100)
    loader = load(str(directory), format=requested)
    assert ids(loader) == list(range(100))
    everything, _ = StructuredDataset.create_dataloader(str(directory), requested, output_format="arrow", cache=False)
    batch = next(iter(everything))
    assert batch.schema.names == ["id", "image"]
    assert batch["image"][3].as_py() == {"bytes": b"3", "path": None}


def test_results_of_transforms_that_lie_beside_the_data_are_not_read(tmp_path: Path) -> None:
    directory = save(tmp_path / "saved", 0, 30)
    other = save(tmp_path / "other", 1_000, 30, num_files=1)
    (other / "data-00000-of-00001.arrow").rename(directory / "cache-3fa9.arrow")
    assert ids(load(directory)) == list(range(30))


def test_several_saved_datasets_are_read_as_one(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a", 0, 30), save(tmp_path / "b", 30, 20)]
    assert ids(load(paths, format="huggingface")) == list(range(50))


def test_two_ranks_resume_in_the_middle_of_a_shuffled_epoch_of_three(tmp_path: Path) -> None:
    directory = save(tmp_path / "saved", 0, 100)
    seen: list[int] = []
    for rank in range(3):
        loader = load(directory, shuffle=True, rank=rank, num_ranks=3)
        batches = iter(loader)
        seen += [number for _ in range(2) for number in next(batches)["id"].tolist()]
        state = loader.state_dict()
        loader.dataset.close()
    for rank in range(2):
        rest = load(directory, shuffle=True, rank=rank, num_ranks=2)
        rest.load_state_dict(state)
        seen += ids(rest)
    assert sorted(seen) == list(range(100))


def test_a_directory_with_several_splits_is_refused_and_each_split_opens(tmp_path: Path) -> None:
    save(tmp_path / "both" / "train", 0, 30)
    save(tmp_path / "both" / "test", 30, 10)
    (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(InvalidArgument, match=r"the splits train, test; .* such as .*both/train"):
        load(tmp_path / "both")
    assert ids(load(tmp_path / "both" / "test")) == list(range(30, 40))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"_data_files": [{"filename": "../other/data-00000-of-00001.arrow"}]}, "is not a file of this directory"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "is not a file of this directory"),
        ({"_data_files": []}, "does not list the files"),
        ({"_data_files": [{"name": "x"}]}, "does not list the files"),
        ({"_data_files": "data-00000-of-00003.arrow"}, "does not list the files"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "has an indices mapping"),
    ],
)
def test_a_state_that_does_not_fit_its_directory_is_refused(
    tmp_path: Path, state: dict[str, Any], problem: str
) -> None:
    save(tmp_path / "other", 1_000, 30, num_files=1)
    with pytest.raises(DataFileInvalid, match=problem):
        load(save(tmp_path / "saved", 0, 30, **state))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_damaged_state_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    directory = save(tmp_path / "saved", 0, 30)
    (directory / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataFileInvalid, match=r"saved/state\.json is damaged"):
        load(directory)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    directory = save(tmp_path / "saved", 0, 30)
    (directory / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataFileMissing, match=r"has no file data-00001-of-00003\.arrow, which its state\.json names"):
        load(directory)


def test_another_directory_is_refused_if_the_format_is_requested(tmp_path: Path) -> None:
    directory = save(tmp_path / "saved", 0, 30)
    (directory / "state.json").unlink()
    with pytest.raises(InvalidArgument, match=r"it lacks state\.json or dataset_info\.json; pass format='arrow'"):
        load(directory, format="huggingface")
    assert ids(load(directory, format="arrow")) == list(range(30))


def test_a_stream_of_saved_datasets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="format='huggingface' is not a format of files; use one of parquet, orc"):
        list_files(str(tmp_path), format="huggingface")
