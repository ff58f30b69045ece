"""A real `DataLoader` over a map-style dataset: delivered rows count, not prefetched ones."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from strata.data import map_style
from strata.data.map_style import map_loader
from strata.errors import PlanChanged, StrataError
from strata.identity import Identity

NUM_ROWS = 103


class Rows(Dataset[Any]):
    """Rows with random numbers of all kinds. If there is a path, fetched rows are logged to it."""

    def __init__(self, num_rows: int = NUM_ROWS, fetched: Path | None = None) -> None:
        self.num_rows = num_rows
        self.fetched = fetched

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> tuple[int, float, float, float]:
        if self.fetched is not None:
            with self.fetched.open("a") as file:
                file.write(f"{row}\n")
        return row, random.random(), float(np.random.rand()), torch.rand(()).item()


class Together(Rows):
    """Returns many rows in one call."""

    def __getitems__(self, rows: list[int]) -> list[tuple[int, str]]:
        assert type(rows) is list
        return [(row, "together") for row in rows]


def loader_of(dataset: Any = None, *, rank: int = 0, num_ranks: int = 1, **options: Any) -> Any:
    options = {"batch_size": 10, "shuffle": True, "collate_fn": list, **options}
    return map_loader(
        Rows() if dataset is None else dataset, ranks=Identity(rank=rank, world_size=num_ranks), **options
    )


def ids_of(batches: Any) -> list[int]:
    return [row[0] for batch in batches for row in batch]


def test_prefetched_rows_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "fetched"
    loader = loader_of(Rows(fetched=path), num_workers=2, prefetch_factor=3)
    batches = iter(loader)
    seen = ids_of([next(batches), next(batches)])
    deadline_s = time.monotonic() + 30
    while len(path.read_text().split()) < 60:  # they are ahead by three batches each
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    state = loader.state_dict()
    assert state["position"] == loader.rows_delivered == 20
    resumed = loader_of()
    resumed.load_state_dict(state)
    assert sorted(seen + ids_of(resumed)) == list(range(NUM_ROWS))


def test_random_numbers_of_a_batch_depend_only_on_its_position() -> None:
    """They depend neither on the number of workers nor on interruptions, and the process's own are unaffected."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    plain = list(loader_of())
    drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert drawn == (random.random(), float(np.random.rand()), torch.rand(()).item())
    assert len({numbers for batch in plain for row in batch for numbers in row[1:]}) == 3 * NUM_ROWS
    persistent = loader_of(num_workers=2, persistent_workers=True)
    assert list(persistent) == plain
    second = list(persistent)
    assert sorted(ids_of(second)) == list(range(NUM_ROWS))
    assert ids_of(second) != ids_of(plain)
    persistent.load_state_dict({**persistent.state_dict(), "epoch": 0, "position": 40})
    assert list(persistent) == plain[4:]
    persistent.set_epoch(1)
    assert list(persistent) == second


@pytest.mark.parametrize("has_private_names", [True, False])
@pytest.mark.parametrize("num_drawn", [1, 2])
def test_numpy_keeps_the_second_of_two_normal_values_while_a_batch_is_read(
    num_drawn: int, has_private_names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy draws them in pairs. It keeps the second one outside of its generator until the next call."""
    if not has_private_names:
        monkeypatch.setattr(map_style, "_numpy_legacy", None)

    class Noisy(Rows):
        def __getitem__(self, row: int) -> Any:
            return row, float(np.random.standard_normal())

    np.random.seed(1)
    expected = np.random.standard_normal(8).tolist()
    np.random.seed(1)
    drawn = np.random.standard_normal(num_drawn).tolist()
    batches = list(loader_of(Noisy(), batch_size=3))
    drawn += np.random.standard_normal(8 - num_drawn).tolist()
    assert drawn == expected
    assert list(loader_of(Noisy(), batch_size=3)) == batches  # a batch does not get a value of the process


def test_random_numbers_of_collate_fn_are_seeded_too() -> None:
    def mixed(rows: list[Any]) -> float:
        return torch.rand(()).item()

    plain = list(loader_of(collate_fn=mixed))
    loader = loader_of(collate_fn=mixed, num_workers=1)
    loader.load_state_dict({**loader.state_dict(), "position": 50})
    assert list(loader) == plain[5:]


def test_every_rank_gets_the_same_number_of_batches_and_every_row_is_delivered_once() -> None:
    batches = [list(loader_of(rank=rank, num_ranks=3)) for rank in range(3)]
    assert [len(each) for each in batches] == [4, 4, 4]
    assert sorted(ids_of(batch for each in batches for batch in each)) == list(range(NUM_ROWS))


def test_the_last_rows_are_dropped_or_repeated() -> None:
    dropping = loader_of(drop_last=True)
    assert [len(batch) for batch in dropping] == [10] * 10
    assert dropping.is_last
    assert dropping.state_dict()["position"] == NUM_ROWS
    assert [len(batch) for batch in loader_of(tail="pad")] == [10] * 11


def test_the_loader_is_a_torch_dataloader() -> None:
    dataset = TensorDataset(torch.arange(20))
    loader = loader_of(dataset, collate_fn=None, batch_size=8)
    assert isinstance(loader, DataLoader)
    assert (loader.dataset, loader.batch_size, loader.num_workers) == (dataset, 8, 0)
    assert isinstance(loader.sampler, torch.utils.data.DistributedSampler)
    (first, *_) = loader
    assert isinstance(first[0], torch.Tensor)
    assert len(loader) == len(iter(loader)) == 3
    assert [(loader.is_last, loader.num_batches_left) for _ in loader] == [(False, 2), (False, 1), (True, 0)]


def test_rows_are_read_with_getitems_if_the_dataset_has_it() -> None:
    assert {text for batch in loader_of(Together()) for _, text in batch} == {"together"}


def note_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.num_rows = 1_000 + worker  # type: ignore[attr-defined]


class Noted(Rows):
    def __getitem__(self, row: int) -> Any:
        return row, self.num_rows


@pytest.mark.parametrize("start", [None, pytest.param("spawn", marks=pytest.mark.timeout(60))])
def test_a_worker_finds_the_users_dataset_in_worker_info(start: str | None) -> None:
    loader = loader_of(
        Noted(40), num_workers=2, worker_init_fn=note_dataset, multiprocessing_context=start, shuffle=False
    )
    assert [batch[0] for batch in loader] == [(0, 1_000), (10, 1_001), (20, 1_000), (30, 1_001)]


def test_a_dataset_that_fails_is_read_again_from_the_same_batch() -> None:
    class Failing(Rows):
        is_failing = True

        def __getitem__(self, row: int) -> Any:
            if self.is_failing and row == 25:
                raise ValueError("row 25 is bad")
            return super().__getitem__(row)

    dataset = Failing()
    loader = loader_of(dataset, shuffle=False)
    batches = iter(loader)
    seen = ids_of([next(batches), next(batches)])
    with pytest.raises(ValueError, match="row 25 is bad"):
        next(batches)
    state = loader.state_dict()
    assert state["position"] == 20
    dataset.is_failing = False
    resumed = loader_of(dataset, shuffle=False)
    resumed.load_state_dict(state)
    assert seen + ids_of(resumed) == list(range(NUM_ROWS))


def test_a_second_loop_closes_the_first() -> None:
    loader = loader_of()
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(StrataError, match="closed while it was iterated over"):
        next(first)
    assert len(list(second)) == 11


def test_a_dataset_that_grows_under_a_loader_is_detected() -> None:
    dataset = Rows()
    loader = loader_of(dataset)
    dataset.num_rows += 1
    with pytest.raises(PlanChanged, match="had 103 rows when the loader was made, and has 104 now"):
        iter(loader)


def test_an_empty_dataset_has_no_batches() -> None:
    loader = loader_of(Rows(0))
    assert (list(loader), len(loader), loader.is_last) == ([], 0, True)
