"""Strata: time to the first batch with few and many files, time to plan, and time to resume.

Everything is imported before, and nothing else has run, so the first figure includes what is created on first use. The
cache of file metadata is cold except where stated. Batches are compared with the expected ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import strata.data.torch  # noqa: F401 (otherwise imported on first use)
from strata.bench.contenders.data_consumer import batch_size, num_rows, num_small_files
from strata.bench.contenders.data_strata import loader_of
from strata.bench.data_files import ID, many, table
from strata.data.plan.cache import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.bench.data_files import Files

ROWS_EACH = 1_000
"""Rows in each of the 1,000 files."""
FEW_ROWS_EACH = 64
"""Rows in each of the 10,000 files, which are planned but not read."""
SHARES = (0.1, 0.5, 0.9)
"""Shares of an epoch after which a state is saved."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A state, and the ids of the batch that follows it."""

    state: dict[str, Any]
    ids: torch.Tensor


def thousand() -> Files:
    return many(max(num_small_files() // 10, 1), rows_each=ROWS_EACH)


def ten_thousand() -> Files:
    return many(num_small_files(), rows_each=FEW_ROWS_EACH)


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """Use an empty cache of file metadata inside the block."""
    before = os.environ.get(DIRECTORY_VARIABLE)
    with tempfile.TemporaryDirectory() as directory:
        os.environ[DIRECTORY_VARIABLE] = directory
        try:
            yield
        finally:
            os.environ.pop(DIRECTORY_VARIABLE)
            if before is not None:
                os.environ[DIRECTORY_VARIABLE] = before


def first_batch_s(files: Files, expected: torch.Tensor | None, state: Any = None, **arguments: Any) -> float:
    """Return the time from the call of the constructor to the first batch.

    Raises:
        ValueError: It is not the expected batch.
    """
    start = time.perf_counter()
    loader, dataset = loader_of(files, **arguments)
    try:
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)  # kept, because releasing it waits for its threads
        batch = next(batches)
        taken_s = time.perf_counter() - start
        if expected is not None and not torch.equal(batch[ID], expected):
            raise ValueError(f"the first batch starts with ids {batch[ID][:5].tolist()}, not {expected[:5].tolist()}")
        return taken_s
    finally:
        dataset.close()


def planning_s(files: Files) -> float:
    start = time.perf_counter()
    _, dataset = loader_of(files)
    taken_s = time.perf_counter() - start
    dataset.close()
    if dataset.plan.num_rows != files.num_rows:
        raise ValueError(f"the plan has {dataset.plan.num_rows} rows, not {files.num_rows}")
    return taken_s


def saved_states(files: Files, **arguments: Any) -> list[Saved]:
    """Read an epoch to its end and return a state at each share of it."""
    loader, dataset = loader_of(files, **arguments)
    places = {max(1, int(share * len(loader))) for share in SHARES}
    found, state = [], None
    try:
        for number, batch in enumerate(loader):
            if state is not None:
                found.append(Saved(state, batch[ID].clone()))
            state = loader.state_dict() if number + 1 in places else None
    finally:
        dataset.close()
    if len(found) != len(places) or not found:
        raise ValueError(f"{len(loader)} batches are too few to stop at {SHARES} of them; use more rows")
    return found


def resuming_s(files: Files, **arguments: Any) -> float:
    """Return the longest time to resume over the positions; the cache is cold, so each resume plans again."""
    taken_s = []
    for saved in saved_states(files, **arguments):
        with nothing_remembered():
            taken_s.append(first_batch_s(files, saved.ids, saved.state, **arguments))
    return max(taken_s)


def in_order(num_rows: int, rows_each: int) -> torch.Tensor:
    """Return the ids of the first rows, if each file counts from 0 to `rows_each`."""
    return torch.arange(min(batch_size(), num_rows)) % rows_each


def main() -> None:
    files, small, tiny = table(num_rows()), thousand(), ten_thousand()
    with nothing_remembered():
        figures = {"first_batch_8_files_s": first_batch_s(files, in_order(files.num_rows, files.num_rows))}
        figures["first_batch_s"] = first_batch_s(small, in_order(small.num_rows, ROWS_EACH))
        figures["plan_10k_files_s"] = planning_s(tiny)
        figures["plan_10k_files_cached_s"] = planning_s(tiny)
        figures["resume_s"] = max(resuming_s(files), resuming_s(files, shuffle=True))
    with nothing_remembered():
        figures["first_batch_8_files_shuffled_s"] = first_batch_s(files, None, shuffle=True)
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
