"""States that an earlier version of Strata saved resume at the same rows, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.data import StructuredDataset, mix

STATES: dict[str, Any] = json.loads((Path(__file__).parent / "data_states.json").read_text(encoding="utf-8"))
"""What `state_dict()` returned after five batches of epoch 1 on two ranks, and the next three batches of each rank."""
OPTIONS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True, "shuffle_seed": 11, "shuffle_buffer_size": 24},
    "plain": {},
    "filtered": {"filters": "y < 5", "shuffle": True, "shuffle_seed": 3, "shuffle_buffer_size": 32},
    "lanes": {"shuffle": True, "lanes": 4, "shuffle_seed": 5, "shuffle_buffer_size": 40},
    "tokens": {
        "batch_size": None,
        "batch_tokens": 20,
        "length_column": "y",
        "length_buckets": True,
        "columns": ["x", "y"],
        "shuffle": True,
        "shuffle_seed": 7,
        "shuffle_buffer_size": 48,
    },
    "mix": {"shuffle": True, "shuffle_seed": 9, "shuffle_buffer_size": 16},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """CSV files, whose version is a hash of their bytes: the same on every machine."""
    for number in range(3):
        rows = (f"{x},{x % 7}\n" for x in range(number * 40, number * 40 + 40))
        (tmp_path / f"{number}.csv").write_text("x,y\n" + "".join(rows), encoding="utf-8")
    return tmp_path


def loader_of(folder: Path, rank: int, num_ranks: int, options: dict[str, Any]) -> Any:
    defaults = {"batch_size": 4, "columns": ["x"], "output_format": "numpy", "split_bytes": 160, "num_workers": 2}

    def create(path: Any) -> Any:
        chosen = {**defaults, "cache": False, "rank": rank, "num_ranks": num_ranks, **options}
        return StructuredDataset.create_dataloader(path, **chosen)[0]

    if options is not OPTIONS["mix"]:
        return create(folder)
    sources = {"one": create(folder / "0.csv"), "two": create([folder / "1.csv", folder / "2.csv"])}
    return mix(sources, {"one": 1, "two": 2}, batch_size=4)


def take(loader: Any, num_batches: int) -> list[list[int]]:
    batches = iter(loader)
    taken = [next(batches)["x"].tolist() for _ in range(num_batches)]
    batches.close()
    return taken


@pytest.mark.parametrize("name", sorted(STATES))
def test_a_saved_state_resumes_at_the_same_rows(folder: Path, name: str) -> None:
    saved = STATES[name]
    for rank in range(2):
        loader = loader_of(folder, rank, 2, OPTIONS[name])
        loader.load_state_dict(saved["state"])
        assert take(loader, 3) == saved["two_ranks"][rank]
    alone = loader_of(folder, 0, 1, OPTIONS[name])
    alone.load_state_dict(saved["state"])
    assert take(alone, 3) == saved["one_rank"]


@pytest.mark.parametrize("name", sorted(STATES))
def test_the_state_after_the_same_batches_is_unchanged(folder: Path, name: str) -> None:
    loader = loader_of(folder, 0, 2, OPTIONS[name])
    loader.set_epoch(1)
    take(loader, 5)
    assert loader.state_dict() == STATES[name]["state"]
