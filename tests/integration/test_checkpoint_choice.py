"""Several ranks load the same checkpoint, or none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata
from strata.checkpoint import Ranks, Shard
from strata.errors import CheckpointAborted, InvalidArgument, NoCheckpoint

SIZE, ROWS = 3, 4_000
TIMEOUT_S = 30.0


def manager_of(rank: int, place: Path, session: str, timeout_s: float = TIMEOUT_S) -> strata.CheckpointManager:
    ranks = Ranks(rank=rank, size=SIZE, session=session, timeout_s=timeout_s)
    return strata.CheckpointManager(place, ranks=ranks, saver="thread", statistics=False)


def on_all(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, range(SIZE)))


def save_two(place: Path) -> None:
    def save(rank: int) -> None:
        with manager_of(rank, place, "first start") as manager:
            for step in (1, 2):
                rows = np.full((ROWS, 8), step * 10 + rank, np.float32)
                table = Shard(rows, shape=(SIZE * ROWS, 8), start=(rank * ROWS, 0))
                manager.save({"emb": table, "step": step}, step=step).wait()

    on_all(save)


def load_own(manager: strata.CheckpointManager, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = manager.load(slices={"emb": ((rank * ROWS, 0), (ROWS, 8))})
    return loaded


def damage(place: Path, step: int, rank: int) -> None:
    [directory] = place.glob(f"step-{step:012d}-*")
    path = directory / f"rank-{rank:05d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def test_corruption_on_one_rank_sends_all_ranks_to_the_checkpoint_before(tmp_path: Path) -> None:
    save_two(tmp_path)
    damage(tmp_path, step=2, rank=1)

    def load(rank: int) -> int:
        with manager_of(rank, tmp_path, "second start") as manager:
            loaded = load_own(manager, rank)
            assert loaded["emb"][0, 0] == loaded["step"] * 10 + rank
            step: int = loaded["step"]
            return step

    assert on_all(load) == [1, 1, 1]


def test_without_corruption_all_ranks_load_the_newest_each_time(tmp_path: Path) -> None:
    save_two(tmp_path)

    def load(rank: int) -> list[int]:
        with manager_of(rank, tmp_path, "second start") as manager:
            return [load_own(manager, rank)["step"] for _ in range(3)]

    assert on_all(load) == [[2, 2, 2]] * SIZE
    with strata.CheckpointManager(tmp_path) as alone:
        assert [c.step for c in alone.list()] == [1, 2], "the votes of the ranks are not listed as checkpoints"


def test_without_a_checkpoint_all_ranks_raise_no_checkpoint(tmp_path: Path) -> None:
    def load(rank: int) -> None:
        with manager_of(rank, tmp_path, "first start") as manager, pytest.raises(NoCheckpoint):
            manager.load()

    on_all(load)


def test_with_only_corrupt_checkpoints_all_ranks_raise_no_checkpoint(tmp_path: Path) -> None:
    save_two(tmp_path)
    damage(tmp_path, step=2, rank=1)
    damage(tmp_path, step=1, rank=2)

    def load(rank: int) -> None:
        with manager_of(rank, tmp_path, "second start") as manager, pytest.raises(NoCheckpoint):
            load_own(manager, rank)

    on_all(load)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    save_two(tmp_path)

    def load(rank: int) -> None:
        if rank == 2:
            return
        aborts = pytest.raises(CheckpointAborted, match="rank 2 reported no result")
        with manager_of(rank, tmp_path, "second start", timeout_s=0.5) as manager, aborts:
            load_own(manager, rank)

    on_all(load)


def test_a_session_that_was_used_before_is_rejected(tmp_path: Path) -> None:
    save_two(tmp_path)
    on_all(lambda rank: load_own(manager_of(rank, tmp_path, "second start"), rank))
    with manager_of(0, tmp_path, "second start") as manager, pytest.raises(InvalidArgument, match="used before"):
        load_own(manager, 0)


def test_a_named_checkpoint_needs_no_agreement(tmp_path: Path) -> None:
    save_two(tmp_path)
    with manager_of(1, tmp_path, "second start") as manager:
        assert manager.load(step=1)["step"] == 1
