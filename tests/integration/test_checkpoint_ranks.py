"""Any number of ranks save and load with `CheckpointManager`, as threads and as torch processes."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from servers import DEADLINE_S, TorchRanks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as OnDimension
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from strata.checkpoint import CheckpointManager, CheckpointMetadata, Progress, Ranks, Save, Shard
from strata.checkpoint.format import manifest as m
from strata.checkpoint.load import reader
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import CheckpointAborted, CheckpointInvalid, InvalidArgument
from strata.launch.commit import CoordinatorCommit
from strata.storage.memory import MemoryStore

if TYPE_CHECKING:
    from nursery import Lifeline

ROWS, COLUMNS = 60, 32
TABLE = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)
LONG_S = 600.0
"""A timeout longer than any test."""
TORCH_DEADLINE_S = 100.0
_sessions = itertools.count()


def cut(num_rows: int, size: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of each rank, as even as possible."""
    ends = [num_rows * i // size for i in range(size + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def rows_of(table: Any, start: int, count: int) -> Shard:
    return Shard(table[start : start + count], shape=table.shape, start=(start, *(0 for _ in table.shape[1:])))


def model_of(step: int = 0) -> dict[str, Any]:
    """Tensors of 400, 800, … bytes."""
    return {f"layer{i}": np.full(100 * i, i + step, np.float32) for i in range(1, 8)}


def states(size: int, *, table: np.ndarray[Any, Any] = TABLE, step: int = 0) -> list[dict[str, Any]]:
    """Return, for each rank, a slice of a table, a replicated model and values of its own."""
    return [
        {
            "emb": rows_of(table, start, count),
            "model": model_of(step),
            "rng": torch.Generator().manual_seed(rank).get_state(),
            "rank": rank,
        }
        for rank, (start, count) in enumerate(cut(len(table), size))
    ]


class Crew:
    """One start of a job: a manager for each rank."""

    def __init__(self, place: Any, size: int, *, session: str = "", timeout_s: float = LONG_S, **options: Any) -> None:
        session = session or f"start {next(_sessions)}"
        where = {"store": place} if isinstance(place, MemoryStore) else {"storage_path": str(place)}
        self.managers = [
            CheckpointManager(
                **where,
                **{"saver": "thread", **options},
                ranks=Ranks(rank=rank, size=size, session=session, timeout_s=timeout_s),
            )
            for rank in range(size)
        ]

    def begin(self, states: Sequence[Any], *, step: int, **options: Any) -> list[Save]:
        return [
            manager.save(state, step=step, **{name: one[rank] for name, one in options.items()})
            for rank, (manager, state) in enumerate(zip(self.managers, states, strict=True))
        ]

    def save(self, states: Sequence[Any], *, step: int, **options: Any) -> CheckpointMetadata:
        """Save and wait on all ranks, until rank 0 has applied retention. `dirty_of` has an entry for each rank."""
        each = {"dirty": options.pop("dirty_of", [None] * len(states))}
        each |= {name: [value] * len(states) for name, value in options.items()}
        found = [save.wait(DEADLINE_S) for save in self.begin(states, step=step, **each)]
        assert all(one == found[0] for one in found)
        self.managers[0].wait()
        return found[0]

    def load(self, **options: Any) -> list[dict[str, Any]]:
        """Load on all ranks at once: without a step, they agree on a checkpoint."""
        with ThreadPoolExecutor(len(self.managers)) as pool:
            return list(pool.map(lambda manager: manager.load(**options), self.managers))


@contextlib.contextmanager
def crew(place: Any, size: int, **options: Any) -> Iterator[Crew]:
    made = Crew(place, size, **options)
    try:
        yield made
    finally:
        for manager in made.managers:
            with contextlib.suppress(CheckpointAborted):
                manager.close()


def manifest_in(place: Path, saved: CheckpointMetadata) -> m.Manifest:
    key = f"{saved.id}/manifest.json"
    return m.decode((place / key).read_bytes(), file=key)


def names_in(place: Path, id: str) -> list[str]:  # noqa: A002 - its name
    return sorted(path.name for path in (place / id).iterdir())


def assert_same(loaded: Mapping[str, Any], *, table: np.ndarray[Any, Any] = TABLE, step: int = 0, rank: int) -> None:
    assert loaded["emb"].dtype == table.dtype
    assert np.array_equal(loaded["emb"], table)
    expected = model_of(step)
    assert loaded["model"].keys() == expected.keys()
    assert all(np.array_equal(loaded["model"][name], expected[name]) for name in expected)
    assert torch.equal(loaded["rng"], torch.Generator().manual_seed(rank).get_state())
    assert loaded["rank"] == rank


# -- N save, M load --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_savers", "num_loaders"), [(1, 3), (3, 1), (2, 5), (4, 4)])
@pytest.mark.parametrize("replicated", [[], ["model.*"]], ids=["all_written", "shared_out"])
def test_another_number_of_ranks_loads_the_whole_state(
    tmp_path: Path, num_savers: int, num_loaders: int, replicated: list[str]
) -> None:
    with crew(tmp_path, num_savers) as savers:
        saved = savers.save(states(num_savers), step=3, epoch=2, metadata={"run": "a"}, replicated=replicated)
    assert (saved.step, saved.epoch, saved.num_ranks, saved.metadata) == (3, 2, num_savers, {"run": "a"})
    with crew(tmp_path, num_loaders) as loaders:
        for rank, loaded in enumerate(loaders.load()):
            assert_same(loaded, rank=rank if rank < num_savers else 0)
        assert all(manager.verify(id=saved.id) == saved for manager in loaders.managers)
    assert [path.parent.name for path in tmp_path.rglob("manifest.json")] == [saved.id]


def test_savers_in_processes_of_their_own_commit_together(tmp_path: Path) -> None:
    with crew(tmp_path, 3, saver="process") as savers:
        for step in (1, 2):
            saved = savers.save(states(3, step=step), step=step, replicated=["model.*"])
    assert len({saved.id for saved in savers.managers[0].list()}) == 2
    with crew(tmp_path, 2) as loaders:
        for rank, loaded in enumerate(loaders.load()):
            assert_same(loaded, step=2, rank=rank)
    assert names_in(tmp_path, saved.id) == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(3))]


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[tuple[int, int]]]:
    """A table, and the rows of each rank; some may have none."""
    num_rows, num_columns = draw(st.integers(0, 40)), draw(st.integers(0, 6))
    ends = sorted(draw(st.lists(st.integers(0, num_rows), max_size=4)))
    table = np.arange(num_rows * num_columns, dtype=np.int32).reshape(num_rows, num_columns)
    return table, [(a, b - a) for a, b in itertools.pairwise([0, *ends, num_rows])]


@given(tables(), st.integers(1, 5), st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_sharding_of_any_table_is_loaded_in_any_other(
    drawn: tuple[np.ndarray[Any, Any], list[tuple[int, int]]], num_loaders: int, data: st.DataObject
) -> None:
    table, owned = drawn
    store = MemoryStore()
    with crew(store, len(owned)) as savers:
        each = [{"emb": rows_of(table, start, count), "own": np.array([start])} for start, count in owned]
        savers.save(each, step=1)
    with crew(store, num_loaders) as loaders:
        for rank, (manager, (first, count)) in enumerate(
            zip(loaders.managers, cut(len(table), num_loaders), strict=True)
        ):
            whole = manager.load(step=1)
            assert np.array_equal(whole["emb"], table)
            assert whole["own"].tolist() == [owned[rank if rank < len(owned) else 0][0]]
            left = data.draw(st.integers(0, table.shape[1]))
            width = data.draw(st.integers(0, table.shape[1] - left))
            part = manager.load(step=1, slices={"emb": ((first, left), (count, width))})["emb"]
            assert np.array_equal(part, table[first : first + count, left : left + width])


def test_a_part_of_a_table_is_loaded_without_reading_the_others(tmp_path: Path) -> None:
    table = np.random.default_rng(2).normal(size=(4_000, 64)).astype(np.float32)
    with crew(tmp_path, 4) as savers:
        savers.save(states(4, table=table), step=1)
    progress: list[Progress] = []
    with crew(tmp_path, 2) as loaders:
        for manager, (start, count) in zip(loaders.managers, cut(4_000, 2), strict=True):
            progress.clear()
            box = ((start, 0), (count, 64))
            loaded = manager.load(step=1, only=["emb"], slices={"emb": box}, on_progress=progress.append)
            assert np.array_equal(loaded["emb"], table[start : start + count])
            assert progress[-1].done_bytes == progress[-1].total_bytes == table.nbytes // 2
        with pytest.raises(InvalidArgument, match="is not within tensor"):
            manager.load(step=1, slices={"emb": ((3_999, 0), (2, 64))})
        with pytest.raises(InvalidArgument, match="the load does not include this tensor"):
            manager.load(step=1, only=["emb"], slices={"model.layer1": ((0,), (1,))})


class Rows:
    """Holds some rows of a table, and asks for the same rows of a checkpoint."""

    def __init__(self, table: Any, start: int, count: int) -> None:
        self._shard = rows_of(np.zeros_like(table), start, count)
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [self._shard], "step": 0}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def test_a_target_with_a_shard_in_its_state_receives_that_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = np.random.default_rng(2).normal(size=(400, 64)).astype(np.float32)
    with crew(tmp_path, 2) as savers:
        savers.save([{"rows": {"nested": [rows_of(table, *part)], "step": 7}} for part in ((0, 400), (400, 0))], step=1)
    read: list[int] = []
    read_slices = reader.read_slices

    def watched(*args: Any, **arguments: Any) -> Any:
        found = read_slices(*args, **arguments)
        read.extend(map(len, found.values()))
        return found

    monkeypatch.setattr(reader, "read_slices", watched)
    with crew(tmp_path, 3) as loaders:
        for manager, (start, count) in zip(loaders.managers, [(0, 100), (100, 300), (400, 0)], strict=True):
            target = Rows(table, start, count)
            manager.restore({"rows": target}, step=1)

            assert np.array_equal(target.loaded["nested"][0], table[start : start + count])
            assert target.loaded["step"] == 7
    assert read == [100 * 256, 300 * 256, 0]


def test_a_rank_requests_its_own_tensors_by_its_own_names(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as savers:
        saved = savers.save([{"rng": np.arange(rank, rank + 4), "n": rank} for rank in (0, 1, 1)], step=1)
        assert [tensor.name for tensor in manifest_in(tmp_path, saved).tensors] == ["rng", "rng@1"]
        for manager, own in zip(savers.managers, (0, 1, 1), strict=True):
            assert manager.load(step=1, only=["rng"])["rng"].tolist() == list(range(own, own + 4))
            assert manager.load(step=1, slices={"rng": ((1,), (2,))})["rng"].tolist() == [own + 1, own + 2]
        assert savers.managers[2].load(step=1, only=["rng@1"])["rng"].tolist() == [1, 2, 3, 4]

        class Target:
            def load_state_dict(self, state: Any) -> None:
                self.state = state

        for strict in (True, False):
            target = Target()
            assert savers.managers[1].restore({"rng": target}, step=1, strict=strict).step == 1
            assert target.state.tolist() == [1, 2, 3, 4]


def test_only_restored_entries_are_read_even_if_they_share_a_tensor(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    with crew(tmp_path, 2) as savers:
        each = [
            {"model": {"weight": weight}, "ema": {"weight": weight}, "other": rows_of(TABLE, a, n)}
            for a, n in cut(ROWS, 2)
        ]
        saved = savers.save(each, step=7)
        rank_1 = tmp_path / saved.id / "rank-00001.safetensors"
        rank_1.rename(rank_1.with_suffix(".elsewhere"))
        for strict in (True, False):
            module = torch.nn.Linear(3, 4, bias=False)
            assert savers.managers[0].restore({"ema": module}, step=7, strict=strict).step == 7
            assert torch.equal(module.weight, weight)
        with pytest.raises(InvalidArgument, match=r"has no entry 'gone'$"):
            savers.managers[0].restore({"gone": module}, step=7, strict=False)
        with pytest.raises(InvalidArgument, match="has no entry 'gone'; pass strict=False to restore the others"):
            savers.managers[0].restore({"gone": module, "model": module}, step=7)


# -- replicated tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_replicated_tensors_are_written_once_and_evenly(tmp_path: Path, size: int) -> None:
    with crew(tmp_path, size) as savers:
        saved = savers.save(states(size), step=1, replicated=["model.*"])
    written: list[str] = []
    loads = []
    for rank in range(size):
        with safe_open(tmp_path / saved.id / f"rank-{rank:05d}.safetensors", framework="np") as file:
            own = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118 - it is no dict
            assert {"emb", "rng"} <= set(file.keys())
            loads.append(sum(file.get_tensor(name).nbytes for name in own))
            written += own
    assert sorted(written) == [f"model.layer{i}" for i in range(1, 8)]
    assert max(loads) - min(loads) <= 2 * 400, "the sizes differ by no more than the smallest tensors"


def test_a_single_pattern_is_accepted_and_a_tensor_that_not_all_ranks_have_is_rejected(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as savers:
        savers.save(states(2), step=1, replicated="model.*")
        for state in (uneven := states(2)):
            if state["rank"] == 1:
                del state["model"]["layer7"]
                del state["model"]["layer6"]
        saves = savers.begin(uneven, step=2, replicated=[["model.*"]] * 2)
        with pytest.raises(CheckpointInvalid, match="which no rank has written; a replicated tensor must exist on"):
            saves[0].wait(DEADLINE_S)
        with pytest.raises(CheckpointAborted, match="which no rank has written"):
            saves[1].wait(DEADLINE_S)
        assert [one.step for one in savers.managers[1].list()] == [1]


def test_model_only_saves_only_the_model(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as savers:
        saved = savers.save(states(2), step=1, checkpoint_type="MODEL_ONLY", replicated=["model.*"])
        assert saved.checkpoint_type.name == "MODEL_ONLY"
        for loaded in savers.load():
            assert loaded.keys() == {"model"}
            assert np.array_equal(loaded["model"]["layer7"], model_of()["layer7"])


def test_several_ranks_leave_no_statistics_and_no_parts_behind(tmp_path: Path) -> None:
    with crew(tmp_path, 2, statistics=True) as savers:
        saved = savers.save(states(2), step=1)
    assert names_in(tmp_path, saved.id) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


# -- deltas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["thread", "process"])
@pytest.mark.parametrize("is_reported", [True, False])
def test_each_rank_saves_its_changed_rows(tmp_path: Path, saver: str, is_reported: bool) -> None:
    table = np.random.default_rng(3).normal(size=(3_000, 64)).astype(np.float32)
    size, owned = 3, cut(3_000, 3)

    def state_of(step: int) -> list[dict[str, Any]]:
        return [{**state, "rng": np.full(8, 10 * step + rank)} for rank, state in enumerate(states(size, table=table))]

    with crew(tmp_path, size, saver=saver) as savers:
        first = savers.save(state_of(1), step=1)
        dirty = []
        for start, count in owned[:2]:  # nothing changes on the last rank
            rows = np.array([1, count // 2, count - 1])
            table[start + rows] += 1
            dirty.append({"emb": rows})
        options = {"dirty_of": [*dirty, {"emb": []}]} if is_reported else {}
        second = savers.save(state_of(2), step=2, checkpoint_type="INCREMENTAL", **options)
        assert (second.checkpoint_type.name, second.bases, second.why) == ("INCREMENTAL", (first.id,), "")
        assert second.size_bytes < first.size_bytes // 10
        third = savers.save(state_of(3), step=3, checkpoint_type="INCREMENTAL")
        assert third.bases == (first.id,)
        for saved in (second, third):
            savers.managers[1].verify(id=saved.id)
    with crew(tmp_path, 4) as loaders:
        for step in (2, 3):
            for rank, loaded in enumerate(loaders.load(step=step)):
                assert np.array_equal(loaded["emb"], table)
                assert loaded["rng"].tolist() == [10 * step + (rank if rank < size else 0)] * 8
        box = ((owned[1][0] - 1, 3), (3, 5))
        part = loaders.managers[3].load(step=3, slices={"emb": box})["emb"]
        assert np.array_equal(part, table[owned[1][0] - 1 : owned[1][0] + 2, 3:8])

        compacted = loaders.managers[2].compact(step=3)
        assert (compacted.checkpoint_type.name, compacted.num_ranks, compacted.bases) == ("FULL", size, ())
        for one in (second.id, first.id):
            loaders.managers[0].delete(id=one)
        loaders.managers[0].verify(id=compacted.id)
        for rank, loaded in enumerate(loaders.load()):
            assert np.array_equal(loaded["emb"], table)
            assert loaded["rng"].tolist() == [30 + (rank if rank < size else 0)] * 8
            assert loaded["rank"] == (rank if rank < size else 0)


def test_ranks_that_do_not_write_a_replicated_table_may_report_its_dirty_rows(tmp_path: Path) -> None:
    model = {"emb": np.zeros((2_000, 64), np.float32), "head": np.zeros((1_000, 64), np.float32)}
    with crew(tmp_path, 2) as savers:
        options: dict[str, Any] = {"replicated": ["model.*"]}
        savers.save([{"model": model}] * 2, step=1, **options)
        model["emb"][[5, 1_999]] = 5
        model["head"][3] = 3
        dirty = {"model.emb": [5, 1_999], "head": [3]}
        saved = savers.save(
            [{"model": model}] * 2, step=2, checkpoint_type="INCREMENTAL", dirty_of=[dirty] * 2, **options
        )
        assert saved.checkpoint_type.name == "INCREMENTAL"
        assert saved.size_bytes < 100_000
        for loaded in savers.load():
            assert all(np.array_equal(loaded["model"][name], model[name]) for name in model)


def test_ranks_without_rows_may_pass_empty_dirty_rows(tmp_path: Path) -> None:
    table = np.zeros((1_000, 64), np.float32)
    owned = [(0, 1_000), (1_000, 0)]
    with crew(tmp_path, 2) as savers:
        savers.save([{"emb": rows_of(table, *each)} for each in owned], step=1)
        table[7] = 7
        saved = savers.save(
            [{"emb": rows_of(table, *each)} for each in owned],
            step=2,
            checkpoint_type="INCREMENTAL",
            dirty_of=[{"emb": [7]}, {"emb": []}],
        )
        assert saved.checkpoint_type.name == "INCREMENTAL"
        assert all(np.array_equal(loaded["emb"], table) for loaded in savers.load())


def test_a_restarted_rank_saves_everything_and_the_others_their_deltas(tmp_path: Path) -> None:
    table = np.random.default_rng(3).normal(size=(2_000, 64)).astype(np.float32)
    with crew(tmp_path, 2) as savers:
        savers.save(states(2, table=table), step=1)
        table[1_000:] += 1
        savers.managers[1]._staging._places = ()  # as if it had not saved before
        saved = savers.save(states(2, table=table), step=2, checkpoint_type="INCREMENTAL")
        assert saved.checkpoint_type.name == "INCREMENTAL"
        for rank, loaded in enumerate(savers.load()):
            assert_same(loaded, table=table, rank=rank)


# -- retention -------------------------------------------------------------------------------------------------------


def test_only_rank_0_applies_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tidied: list[int] = []
    clean_up = CheckpointManager._clean_up

    def noted(manager: CheckpointManager, just_saved: str) -> None:
        tidied.append(manager._rank)
        clean_up(manager, just_saved)

    monkeypatch.setattr(CheckpointManager, "_clean_up", noted)
    with crew(tmp_path, 3, keep_count=2) as savers:
        for step in range(4):
            savers.save(states(3, step=step), step=step)
            for manager in savers.managers:
                manager.wait()
        assert tidied == [0] * 4
        for manager in savers.managers:
            assert [one.step for one in manager.list()] == [2, 3]
        for rank, loaded in enumerate(savers.load()):
            assert_same(loaded, step=3, rank=rank)
    assert len(list(tmp_path.glob("step-*"))) == 2


# -- sessions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["thread", "process"])
def test_two_jobs_that_save_the_same_step_at_once_both_commit(tmp_path: Path, saver: str) -> None:
    with crew(tmp_path, 2, saver=saver) as one, crew(tmp_path, 3, saver=saver) as other:
        for step in range(3):
            saves = one.begin(states(2, step=step), step=step) + other.begin(states(3, step=step + 50), step=step)
            found = [save.wait(DEADLINE_S) for save in saves]
            ids = [found[0].id] * 2 + [found[2].id] * 3
            assert [each.id for each in found] == ids
            assert found[0].id != found[2].id
            for job, number, id_ in ((one, 0, found[0].id), (other, 50, found[2].id)):
                for rank, loaded in enumerate(job.load(id=id_)):
                    assert_same(loaded, step=step + number, rank=rank)
        assert len(one.managers[1].list()) == 6


def test_a_step_can_be_saved_several_times(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as savers:
        ids = [savers.save(states(2, step=number), step=1).id for number in range(3)]
        assert len(set(ids)) == 3
        assert_same(savers.managers[1].load(id=ids[1]), step=1, rank=1)
        assert_same(savers.load()[1], step=2, rank=1)


@pytest.mark.parametrize("saver", ["thread", "process"])
def test_a_session_that_was_used_before_is_rejected_and_touches_nothing(tmp_path: Path, saver: str) -> None:
    with crew(tmp_path, 2, session="always the same", saver=saver) as savers:
        saved = savers.save(states(2), step=1)
    before = {path: path.read_bytes() for path in (tmp_path / saved.id).iterdir()}
    with crew(tmp_path, 2, session="always the same", saver=saver) as again:
        for save in again.begin(states(2, step=9), step=1):
            with pytest.raises(
                InvalidArgument, match="the session name was used before; use a new session for every start"
            ):
                save.wait(DEADLINE_S)
    with crew(tmp_path, 2, session="always the same", saver=saver) as again:
        for manager, state in zip(again.managers, states(2, step=9), strict=True):
            with pytest.raises(InvalidArgument, match=r"bad is a builtins\.object"):
                manager.save({**state, "bad": object()}, step=1)
        assert {path: path.read_bytes() for path in (tmp_path / saved.id).iterdir()} == before
        for rank, loaded in enumerate(again.load()):
            assert_same(loaded, rank=rank)


# -- a rank that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_rank_that_cannot_save_its_state_aborts_the_others_at_once(
    tmp_path: Path, bad_rank: int, comes_first: bool
) -> None:
    with crew(tmp_path, 3) as savers:
        before = savers.save(states(3), step=1)
        each = states(3)
        each[bad_rank]["bad"] = object()

        def fail() -> None:
            with pytest.raises(InvalidArgument, match=r"bad is a builtins\.object"):
                savers.managers[bad_rank].save(each[bad_rank], step=2)

        if comes_first:
            fail()
        began_s = time.monotonic()
        saves = [savers.managers[rank].save(each[rank], step=2) for rank in range(3) if rank != bad_rank]
        if not comes_first:
            fail()
        for save in saves:
            with pytest.raises(CheckpointAborted, match=f"rank {bad_rank} failed: InvalidArgument: bad is a builtins"):
                save.wait(DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S < LONG_S
        assert all(manager.latest() == before for manager in savers.managers)
        assert savers.save(states(3), step=2).step == 2, "all ranks count saves alike, so the next one works"


def test_cancelling_on_one_rank_ends_it_for_all(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as savers:
        saves = [savers.managers[rank].save(state, step=1) for rank, state in enumerate(states(3)[:2])]
        saves[1].cancel()
        with pytest.raises(CheckpointAborted, match="cancelled"):
            saves[1].wait(DEADLINE_S)
        with pytest.raises(CheckpointAborted, match=r"rank 1 failed: .*cancelled"):
            saves[0].wait(DEADLINE_S)
        with pytest.raises(CheckpointAborted, match="rank 1 failed"):
            savers.managers[2].save(states(3)[2], step=1).wait(DEADLINE_S)
        assert savers.save(states(3), step=1).step == 1


# -- with a coordinator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_the_coordinator_is_notified_of_saved_checkpoints(tmp_path: Path, size: int) -> None:
    with EmbeddedCoordinator() as coordinator, CoordinatorClient(coordinator.address) as client:
        workers = [client.register_worker(f"w{rank}") for rank in range(size)]
        for worker in workers:
            worker.wait_for_workers(size)
        managers = [
            CheckpointManager(
                str(tmp_path),
                saver="process",
                ranks=Ranks(rank=rank, size=size, session="one", timeout_s=LONG_S),
                commit=CoordinatorCommit(worker),
            )
            for rank, worker in enumerate(workers)
        ]
        with contextlib.ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager)
            for step in (1, 2):
                saves = [
                    one.save(state, step=step) for one, state in zip(managers, states(size, step=step), strict=True)
                ]
                saved = [save.wait(DEADLINE_S) for save in saves]
                record = client.latest_checkpoint()
                assert record is not None
                assert (record.checkpoint.checkpoint_id, record.num_ranks) == (saved[0].id, size)
                assert (record.checkpoint.step, record.size_bytes) == (step, saved[0].size_bytes)
                for rank, manager in enumerate(managers):
                    assert_same(manager.load(id=saved[0].id), step=step, rank=rank)


# -- torch's processes -----------------------------------------------------------------------------------------------

WIDTH = 256


class Net(torch.nn.Module):
    """Parameters of several shapes, one of which has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 7)
        self.last = torch.nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.relu(self.first(x))))


def optimizer_of(net: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    weights, biases = ([p for name, p in net.named_parameters() if name.endswith(what)] for what in ("weight", "bias"))
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": lr / 2}], lr=lr)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.full((4, WIDTH), 0.1 * step)).square().sum().backward()
        optimizer.step()
        net.seen[step] = step


def sharded(num_ranks: int) -> torch.nn.Module:
    net = Net()
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in (net.first, net.second, net.last, net):
        fully_shard(layer, mesh=mesh)
    return net


def whole(state: Any) -> Any:
    """Return whole tensors as lists of numbers."""
    if isinstance(state, torch.Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).tolist()
    if isinstance(state, Mapping):
        return {str(key): whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list | tuple) else state


def described(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": whole(net.state_dict()), "optimizer": whole(optimizer.state_dict())}


def save_a_model(place: Path, num_ranks: int) -> Any:
    net = sharded(num_ranks)
    optimizer = optimizer_of(net, lr=0.01)
    train(net, optimizer, [0, 1])
    with CheckpointManager(str(place), ranks=Ranks.from_torch(timeout_s=LONG_S)) as manager:
        manager.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, step=5).wait(DEADLINE_S)
    return described(net, optimizer)


def restore_a_model(place: Path, num_ranks: int) -> Any:
    """Restore into a fresh model, then into one that has its own moments, and continue training."""
    asked: list[int] = []
    read_slices = reader.read_slices

    def noted(store: Any, manifest: Any, wanted: Any, **options: Any) -> Any:
        found = read_slices(store, manifest, wanted, **options)
        asked.append(sum(len(data) for data in found.values()))
        return found

    reader.read_slices = noted
    found = []
    for num_steps in (0, 1):
        net = sharded(num_ranks)
        for parameter in net.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer = optimizer_of(net, lr=0.5)
        train(net, optimizer, range(num_steps))
        with CheckpointManager(str(place), ranks=Ranks.from_torch()) as manager:
            assert manager.restore({"model": net, "optimizer": optimizer}).step == 5
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        assert all(isinstance(value, DTensor) for value in moments)
        found.append(described(net, optimizer))
        train(net, optimizer, [2])
    assert found[0] == found[1]
    return {"restored": found[0], "trained": described(net, optimizer), "num_bytes": asked}


def restore_in_two_dimensions(place: Path, num_ranks: int) -> Any:
    """Restore with tensor parallelism and FSDP on top of it: a rank's part of a tensor is not contiguous."""
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    net = Net()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    parallelize_module(net, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for layer in (net.first, net.second, net.last, net):
        fully_shard(layer, mesh=mesh["data"])
    optimizer = optimizer_of(net, lr=0.5)
    with CheckpointManager(str(place), ranks=Ranks.from_torch(timeout_s=LONG_S)) as manager:
        manager.restore({"model": net, "optimizer": optimizer}, step=1)
        placements = {type(placement).__name__ for p in net.parameters() for placement in p.placements}
        manager.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, step=2).wait(DEADLINE_S)
    return sorted(placements)


def restore_placements(place: Path, num_ranks: int) -> Any:
    """Restore modules of hand-made DTensors."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    found = {}
    for placement in (OnDimension(0), OnDimension(1), Replicate()):
        module = torch.nn.Module()
        table = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [placement])
        module.table = torch.nn.Parameter(table)
        module.row = torch.nn.Parameter(distribute_tensor(torch.zeros(1, 5), mesh, [OnDimension(0)]))
        with CheckpointManager(str(place), ranks=Ranks.from_torch()) as manager:
            manager.restore({"tables": module})
            wrong = torch.nn.Module()
            wrong.table = torch.nn.Parameter(distribute_tensor(torch.zeros(ROWS - 1, COLUMNS), mesh, [placement]))
            with pytest.raises(InvalidArgument, match=r"tables.table has the shape \(60, 32\) .* shape \(59, 32\)"):
                manager.restore({"tables": wrong})
        found[str(placement)] = whole(module.state_dict())
    return found


RANKS: dict[str, Callable[[Path, int], Any]] = {
    call.__name__: call for call in (save_a_model, restore_a_model, restore_in_two_dimensions, restore_placements)
}


def rank_main(lifeline: Lifeline, *, what: str, place: str, rank: int, num_ranks: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meeting = f"file://{place}.{what}.{num_ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        lifeline.send(said=RANKS[what](Path(place), num_ranks))
    finally:
        dist.destroy_process_group()


def on_ranks(ranks: TorchRanks, what: str, place: Path, num_ranks: int) -> list[Any]:
    return ranks.run(rank_main, num_ranks, deadline_s=TORCH_DEADLINE_S, what=what, place=str(place))


def assert_close(found: Any, expected: Any) -> None:
    """Compare with a tolerance: sums over ranks are computed in another order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list | float):
        if is_numbers(expected):
            np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-6)
        else:
            for pair in zip(found, expected, strict=True):
                assert_close(*pair)
    else:
        assert found == expected


def is_numbers(value: Any) -> bool:
    return all(map(is_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


@pytest.mark.timeout(200)
def test_a_sharded_model_and_its_optimizer_resume_with_another_world_size(
    tmp_path: Path, torch_ranks: TorchRanks
) -> None:
    reference = Net()
    optimizer = optimizer_of(reference, lr=0.01)
    train(reference, optimizer, [0, 1])
    place = tmp_path / "checkpoints"

    saved = on_ranks(torch_ranks, "save_a_model", place, 2)
    assert saved[0] == saved[1]
    assert_close(saved[0], described(reference, optimizer))
    with CheckpointManager(str(place)) as manager:
        (checkpoint,) = manager.list()
        assert checkpoint.num_ranks == 2
        manager.verify()
        plain = Net()
        plain_optimizer = optimizer_of(plain, lr=0.5)
        manager.restore({"model": plain, "optimizer": plain_optimizer})
        assert described(plain, plain_optimizer) == saved[0], "restored into an unsharded model"
    train(reference, optimizer, [2])
    after = described(reference, optimizer)
    for num_ranks in (2, 1, 3):
        for found in on_ranks(torch_ranks, "restore_a_model", place, num_ranks):
            assert found["restored"] == saved[0]
            assert_close(found["trained"], after)
            share = checkpoint.size_bytes / num_ranks
            assert all(num_bytes < 1.1 * share for num_bytes in found["num_bytes"]), "each rank loads only its own part"


@pytest.mark.timeout(120)
def test_a_plain_model_is_restored_over_a_mesh_of_two_dimensions_and_saved_from_there(
    tmp_path: Path, torch_ranks: TorchRanks
) -> None:
    place = tmp_path / "checkpoints"
    net = Net()
    optimizer = optimizer_of(net, lr=0.01)
    train(net, optimizer, [0, 1])
    with CheckpointManager(str(place)) as manager:
        manager.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, step=1).wait()

        placements = on_ranks(torch_ranks, "restore_in_two_dimensions", place, 4)

        assert "_StridedShard" in placements[0]
        loaded = manager.load(step=2)
    assert {"model": whole(loaded["model"]), "optimizer": whole(loaded["optimizer"])} == described(net, optimizer)


@pytest.mark.timeout(120)
def test_tables_are_restored_with_any_placements_of_the_module(tmp_path: Path, torch_ranks: TorchRanks) -> None:
    place = tmp_path / "checkpoints"
    tables = {"table": torch.from_numpy(TABLE), "row": torch.arange(5.0).reshape(1, 5)}
    with crew(place, 3) as savers:
        shards = [{"tables": {"table": rows_of(tables["table"], *each), "row": tables["row"]}} for each in cut(ROWS, 3)]
        savers.save(shards, step=1)
    for found in on_ranks(torch_ranks, "restore_placements", place, 2):
        assert len(found) == 3
        assert all(one == whole(tables) for one in found.values())
