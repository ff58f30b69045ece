"""Incremental checkpoints write what changed, refer to their bases, and load as the whole state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strata
from strata.checkpoint import CheckpointMetadata, RowTracker
from strata.checkpoint.format.manifest import CheckpointType
from strata.checkpoint.save import writer
from strata.errors import ConfigError, InvalidArgument, NoCheckpoint, StorageUnavailable
from strata.storage.base import Watch
from strata.storage.local import LocalStore

ROWS, WIDTH = 20_000, 32


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def manager_at(place: str, **more: Any) -> strata.CheckpointManager:
    return strata.CheckpointManager(place, **{"saver": "thread", "statistics": False, **more})


@pytest.fixture
def manager(place: str) -> Iterator[strata.CheckpointManager]:
    with manager_at(place) as manager:
        yield manager


def table(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random((ROWS, WIDTH), np.float32)


def delta(manager: strata.CheckpointManager, state: Any, step: int, **more: Any) -> CheckpointMetadata:
    return manager.save(state, step=step, checkpoint_type="INCREMENTAL", **more).wait()


def test_only_the_rows_that_changed_are_written_and_all_of_it_is_loaded(manager: strata.CheckpointManager) -> None:
    state = {"emb": table(), "bias": np.zeros(300_000), "epoch": 1}
    base = manager.save(state, step=1).wait()
    rows = np.random.default_rng(1).choice(ROWS, ROWS // 100, replace=False)
    state["emb"][rows] += 1
    state["epoch"] = 2
    saved = delta(manager, state, 2)
    assert saved.checkpoint_type is CheckpointType.INCREMENTAL
    assert (saved.parent, saved.bases, saved.why) == (base.id, (base.id,), "")
    assert saved.size_bytes < 0.05 * saved.full_bytes
    loaded = manager.load()
    assert np.array_equal(loaded["emb"], state["emb"])
    assert np.array_equal(loaded["bias"], state["bias"])
    assert loaded["epoch"] == 2
    assert manager.load(step=1)["emb"].tobytes() == table().tobytes(), "the base is unchanged"
    manager.verify(step=2)


def test_any_safetensors_reader_finds_the_rows_and_their_indices(manager: strata.CheckpointManager) -> None:
    state = {"emb": table()}
    manager.save(state, step=1).wait()
    state["emb"][[3, 700]] = 7
    saved = delta(manager, state, 2)
    stored = safetensors.numpy.load_file(Path(saved.path) / "rank-00000.safetensors")
    assert stored["emb"].shape == (2, WIDTH)
    assert stored["emb#rows"].tolist() == [3, 700]


def test_every_delta_refers_to_the_base_by_default(manager: strata.CheckpointManager) -> None:
    state = {"emb": table()}
    base = manager.save(state, step=0).wait()
    for step in range(1, 6):
        state["emb"][step * 10] = step
        saved = delta(manager, state, step)
        assert saved.bases == (base.id,)
        assert np.array_equal(manager.load()["emb"], state["emb"])
    manager.delete(step=3)
    assert np.array_equal(manager.load()["emb"], state["emb"]), "no delta needs another"


def test_with_more_depth_deltas_form_a_chain_of_limited_length(place: str) -> None:
    with manager_at(place, incremental_depth=3) as manager:
        state = {"emb": table()}
        ids = [manager.save(state, step=0).wait().id]
        bases = []
        for step in range(1, 6):
            state["emb"][step * 100 : step * 100 + 100] = step
            saved = delta(manager, state, step)
            ids.append(saved.id)
            bases.append(saved.bases)
            assert np.array_equal(manager.load()["emb"], state["emb"])
        assert [len(each) for each in bases] == [1, 2, 3, 1, 2]
        assert set(bases[2]) == set(ids[:3])
        sizes = [manager.get(id=each).size_bytes for each in ids]
        assert sizes[2] < 1.5 * sizes[1], "the second delta has its own rows only"
        assert sizes[4] > 2.5 * sizes[1], "the fourth delta starts a new chain with the rows of all"
        with pytest.raises(InvalidArgument, match="is the base of"):
            manager.delete(id=ids[1])


def test_a_delta_that_is_too_large_becomes_a_full_checkpoint_with_a_reason(manager: strata.CheckpointManager) -> None:
    state = {"emb": table()}
    manager.save(state, step=1).wait()
    state["emb"] += 1
    saved = delta(manager, state, 2)
    assert saved.checkpoint_type is CheckpointType.FULL
    assert "100% of the state changed" in saved.why
    state["emb"][5] = 5
    again = delta(manager, state, 3)
    assert again.parent == saved.id, "the full checkpoint is the new base"
    assert np.array_equal(manager.load()["emb"], state["emb"])


def test_deltas_that_outgrow_rebase_at_start_with_a_new_base(place: str) -> None:
    with manager_at(place, rebase_at=0.1) as manager:
        state = {"emb": table()}
        manager.save(state, step=0).wait()
        types = []
        for step in range(1, 8):
            state["emb"][step * 600 : step * 600 + 600] = step  # 3 % each
            types.append(delta(manager, state, step).checkpoint_type.name)
            assert np.array_equal(manager.load()["emb"], state["emb"])
        assert types == ["INCREMENTAL"] * 3 + ["FULL"] + ["INCREMENTAL"] * 3


def test_without_a_snapshot_to_compare_with_a_save_is_full(manager: strata.CheckpointManager) -> None:
    assert "first save since the start" in delta(manager, {"emb": table()}, 1).why
    assert "had other tensors" in delta(manager, {"emb": table(), "new": np.ones(3)}, 2).why
    manager.save({"model": {"w": np.ones(9)}, "optimizer": 1}, step=3, checkpoint_type="MODEL_ONLY").wait()
    assert "had other tensors" in delta(manager, {"emb": table()}, 4).why


def test_a_deleted_base_is_not_referred_to(place: str, manager: strata.CheckpointManager) -> None:
    state = {"emb": table()}
    for between in (0, 1):
        base = manager.save(state, step=1).wait()
        for step in range(between):
            state["emb"][step] = step
            delta(manager, state, 2)
        with manager_at(place) as another:
            for found in reversed(another.list()):
                another.delete(id=found.id)
        state["emb"][1] = 1
        saved = delta(manager, state, 3)
        assert saved.checkpoint_type is CheckpointType.FULL
        assert ("was not committed or was deleted", f"base {base.id} no longer exists")[between] in saved.why
    assert np.array_equal(manager.load()["emb"], state["emb"])


def test_retention_keeps_a_base_as_long_as_a_delta_needs_it(place: str) -> None:
    with manager_at(place, keep_count=1) as manager:
        state = {"emb": table()}
        base = manager.save(state, step=0).wait()
        for step in (1, 2):
            state["emb"][step] = step
            delta(manager, state, step)
            manager.wait()
        assert [c.step for c in manager.list()] == [0, 2]
        manager.save(state, step=3).wait()
        manager.wait()
        assert [c.step for c in manager.list()] == [3]
        assert not Path(base.path).exists()


def test_an_unchanged_state_writes_almost_nothing(manager: strata.CheckpointManager) -> None:
    state = {"emb": table()}
    manager.save(state, step=1).wait()
    saved = delta(manager, state, 2)
    assert saved.size_bytes <= 4_096
    assert np.array_equal(manager.load()["emb"], state["emb"])


# -- dirty rows ----------------------------------------------------------------------------------------------------


def test_dirty_rows_are_trusted_and_the_rest_of_the_table_is_not_compared(manager: strata.CheckpointManager) -> None:
    state = {"model": {"emb.weight": table()}, "head": np.zeros(100_000)}
    manager.save(state, step=1).wait()
    state["model"]["emb.weight"][[5, 9, 17]] = 1
    state["head"][:10] = 1  # not reported, so it is found by comparison
    delta(manager, state, 2, dirty={"emb.weight": [5, 17]})
    loaded = manager.load()
    expected = table()
    expected[[5, 17]] = 1
    assert np.array_equal(loaded["model"]["emb.weight"], expected), "row 9 was not reported as dirty"
    assert np.array_equal(loaded["head"], state["head"])


def test_small_rows_that_are_dirty_are_written_singly_and_not_in_blocks(manager: strata.CheckpointManager) -> None:
    state = {"keys": np.arange(100_000), "used": np.zeros(100_000, np.uint8), "pairs": np.zeros((100_000, 2))}
    manager.save(state, step=1).wait()
    rows = np.arange(0, 100_000, 100)  # in every block
    state["keys"][rows] += 1
    state["used"][rows] = 1
    state["pairs"][rows] += 1
    saved = delta(manager, state, 2, dirty=dict.fromkeys(state, rows))
    stored = safetensors.numpy.load_file(Path(saved.path) / "rank-00000.safetensors")
    assert {name: len(stored[name]) for name in state} == dict.fromkeys(state, len(rows))
    assert all(stored[f"{name}#rows"].tolist() == rows.tolist() for name in state)
    state["keys"][7] = -1  # found by comparing, in blocks: what changed since the base is then in blocks, too
    delta(manager, state, 3)
    loaded = manager.load()
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in state.items())
    manager.verify(step=3)


def test_small_rows_of_which_most_in_a_block_are_dirty_are_written_as_blocks(
    manager: strata.CheckpointManager,
) -> None:
    state = {"keys": np.arange(100_000)}
    manager.save(state, step=1).wait()
    state["keys"][:1_000] += 1
    saved = delta(manager, state, 2, dirty={"keys": np.arange(1_000)})
    stored = safetensors.numpy.load_file(Path(saved.path) / "rank-00000.safetensors")
    assert stored["keys#blocks"].nbytes == 2 * 4_096
    assert np.array_equal(manager.load()["keys"], state["keys"])


@pytest.mark.parametrize(
    "rows", [torch.tensor([4, 4, 2]), np.array([2, 4]), {2, 4}, np.isin(np.arange(ROWS), [2, 4])], ids=repr
)
def test_dirty_rows_may_have_any_form(manager: strata.CheckpointManager, rows: Any) -> None:
    state = {"emb": table()}
    manager.save(state, step=1).wait()
    state["emb"][[2, 4]] = 0
    delta(manager, state, 2, dirty={"emb": rows})
    assert np.array_equal(manager.load()["emb"], state["emb"])


def test_rows_of_a_save_that_was_skipped_are_not_forgotten(place: str) -> None:
    with manager_at(place, when_busy="skip") as manager:
        state = {"emb": table()}
        manager.save(state, step=1).wait()
        with manager._saving:  # as if a save were in progress
            state["emb"][10] = 1
            assert manager.save(state, step=2, checkpoint_type="INCREMENTAL", dirty={"emb": [10]}).error is not None
        state["emb"][20] = 2
        delta(manager, state, 3, dirty={"emb": [20]})
        assert np.array_equal(manager.load()["emb"], state["emb"])
        with manager._saving:  # as above
            state["emb"][30] = 3
            manager.save(state, step=4, checkpoint_type="INCREMENTAL")  # skipped
        state["emb"][40] = 4
        delta(manager, state, 5, dirty={"emb": [40]})
        assert np.array_equal(manager.load()["emb"], state["emb"])


@pytest.mark.parametrize(
    ("dirty", "problem"),
    [
        ({"nothing": [1]}, "matches none of the state's tensors"),
        ({"w": [1]}, "matches "),
        ({"a.w": [ROWS]}, f"has row {ROWS}, but the tensor has {ROWS} rows"),
        ({"a.w": [-1]}, "has row -1"),
        ({"a.w": [0.5]}, "use integers"),
    ],
)
def test_invalid_dirty_rows_are_rejected(manager: strata.CheckpointManager, dirty: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        manager.save({"a": {"w": table()}, "b": {"w": table()}}, step=1, dirty=dirty)


def test_a_tracker_knows_the_rows_from_sparse_gradients(manager: strata.CheckpointManager) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 16, sparse=True), torch.nn.Flatten(0), torch.nn.Linear(64, 1))
    sparse = torch.optim.SparseAdam([model[0].weight], lr=0.1)
    dense = torch.optim.Adam(model[2].parameters(), lr=0.1)
    tracker = RowTracker(model, sparse)

    def train(rows: list[int]) -> None:
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        model(torch.tensor(rows)).sum().backward()
        for optimizer in (sparse, dense):
            optimizer.step()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "sparse": sparse.state_dict(), "dense": dense.state_dict()}

    train([1, 2, 3, 4])
    manager.save(state(), step=1, dirty=tracker).wait()
    train([7, 8, 9, 10])
    train([7, 100, 200, 300])
    saved = delta(manager, state(), 2, dirty=tracker)
    assert saved.checkpoint_type is CheckpointType.INCREMENTAL
    loaded = manager.load()
    assert torch.equal(loaded["model"]["0.weight"], model[0].weight)
    kept = sparse.state[model[0].weight]
    assert torch.equal(loaded["sparse"]["state"][0]["exp_avg"], kept["exp_avg"])
    assert torch.equal(loaded["dense"]["state"][0]["exp_avg"], dense.state[model[2].weight]["exp_avg"])
    stored = safetensors.numpy.load_file(Path(saved.path) / "rank-00000.safetensors")
    rows = [1, 2, 3, 4, 7, 8, 9, 10, 100, 200, 300]  # the first four had a gradient when the base was saved
    assert stored["model.0.weight#rows"].tolist() == rows
    assert stored["sparse.state.0.exp_avg#rows"].tolist() == rows
    tracker.close()


def followed() -> tuple[torch.nn.Embedding, torch.optim.Optimizer, RowTracker]:
    torch.manual_seed(0)
    model = torch.nn.Embedding(ROWS, 16, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, RowTracker(model, optimizer)


def train(model: torch.nn.Embedding, optimizer: torch.optim.Optimizer, row: int) -> None:
    optimizer.zero_grad()
    model(torch.tensor([row])).sum().backward()
    optimizer.step()


def test_a_save_between_backward_and_step_does_not_lose_the_rows(manager: strata.CheckpointManager) -> None:
    model, optimizer, tracker = followed()
    state = {"model": model.state_dict()}
    manager.save(state, step=1, dirty=tracker).wait()
    model(torch.tensor([5])).sum().backward()
    delta(manager, state, 2, dirty=tracker)
    optimizer.step()
    delta(manager, state, 3, dirty=tracker)
    assert torch.equal(manager.load()["model"]["weight"], model.weight)


def test_rows_that_changed_without_a_gradient_are_found(manager: strata.CheckpointManager) -> None:
    model, optimizer, tracker = followed()
    state = {"model": model.state_dict()}
    manager.save(state, step=1, dirty=tracker).wait()
    train(model, optimizer, 3)
    delta(manager, state, 2, dirty=tracker)
    changed = model.weight.detach().clone()
    changed[9] = 9
    model.load_state_dict({"weight": changed})
    delta(manager, state, 3, dirty=tracker)
    assert torch.equal(manager.load()["model"]["weight"], model.weight)
    train(model, optimizer, 4)
    manager.restore({"model": model}, step=1)
    delta(manager, state, 5, dirty=tracker)
    assert torch.equal(manager.load()["model"]["weight"], model.weight)


@pytest.mark.parametrize(
    ("model", "make", "problem"),
    [
        (torch.nn.Embedding(9, 4), torch.optim.SGD, "not created with sparse=True"),
        (torch.nn.Embedding(9, 4, sparse=True, max_norm=1), torch.optim.SGD, "max_norm"),
        (
            torch.nn.Embedding(9, 4, sparse=True),
            lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
            "SGD changes rows",
        ),
        (torch.nn.Linear(9, 4), torch.optim.SGD, "it has no nn.Embedding"),
    ],
)
def test_a_table_that_changes_rows_without_a_gradient_is_not_tracked(
    model: torch.nn.Module, make: Any, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        RowTracker(model, make(model.parameters(), lr=0.1))


def test_a_tracker_serves_one_manager(place: str, manager: strata.CheckpointManager) -> None:
    model, _, tracker = followed()
    manager.save({"model": model.state_dict()}, step=1, dirty=tracker).wait()
    with manager_at(place) as another, pytest.raises(InvalidArgument, match="serves another CheckpointManager"):
        another.save({"model": model.state_dict()}, step=1, dirty=tracker)


# -- faults between saves ------------------------------------------------------------------------------------------


class UnreliableStore(LocalStore):
    fails = False

    def size(self, key: str) -> int:
        if self.fails:
            self.fails = False
            raise StorageUnavailable("for a moment")
        return super().size(key)


def test_after_a_save_that_failed_midway_nothing_is_missing(tmp_path: Path) -> None:
    store = UnreliableStore(tmp_path)
    with strata.CheckpointManager(store=store, statistics=False) as manager:
        state: dict[str, Any] = {"w": np.zeros((1_000, 64), np.float32)}
        manager.save(state, step=0).wait()
        for step in range(1, 6):
            state["w"][step] = step
            store.fails = step == 2
            save = manager.save(state, step=step, checkpoint_type="INCREMENTAL")
            if step == 2:
                with pytest.raises(StorageUnavailable):
                    save.wait()
                continue
            save.wait()
            assert np.array_equal(manager.load()["w"], state["w"])


def test_a_snapshot_that_was_not_submitted_is_no_base_for_a_delta(
    manager: strata.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": np.zeros((1_000, 64), np.float32)}
    manager.save(state, step=1).wait()
    state["w"][5] = 5
    with monkeypatch.context() as broken:
        broken.setattr(manager._saver, "submit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manager.save(state, step=2, checkpoint_type="INCREMENTAL")
    state["w"][9] = 9
    delta(manager, state, 3)
    assert np.array_equal(manager.load()["w"], state["w"])


def test_a_base_that_is_deleted_while_a_delta_is_written_makes_it_a_full_one(tmp_path: Path) -> None:
    class Meddled(LocalStore):
        goes = ""

        def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
            super().put_large(key, data, watch=watch)
            if self.goes:
                self.delete([f"{self.goes}/manifest.json", f"{self.goes}/rank-00000.safetensors"])

    store = Meddled(tmp_path)
    with strata.CheckpointManager(store=store, statistics=False) as manager:
        state = {"w": np.zeros((1_000, 64), np.float32)}
        store.goes = manager.save(state, step=1).wait().id
        state["w"][5] = 5
        saved = delta(manager, state, 2)
        assert saved.checkpoint_type is CheckpointType.FULL
        assert "was deleted while it was written" in saved.why
        assert np.array_equal(manager.load()["w"], state["w"])


def test_a_checkpoint_that_others_refer_to_is_not_compacted(place: str) -> None:
    with manager_at(place, incremental_depth=2) as manager:
        state = {"emb": table()}
        manager.save(state, step=0).wait()
        for step in (1, 2):
            state["emb"][step] = step
            delta(manager, state, step)
        with pytest.raises(InvalidArgument, match="is the base of"):
            manager.compact(step=1)
        assert len(manager.list()) == 3
        manager.compact(step=2)
        manager.compact(step=1)
        manager.delete(step=0)
        assert np.array_equal(manager.load()["emb"], state["emb"])


def test_tensors_of_one_row_and_strided_tensors_are_compared_in_pieces(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PACK_BYTES", 1 << 16)
    monkeypatch.setattr("strata.checkpoint.save.delta._TASK_BYTES", 1 << 15)
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 9, (1, 1, 300_000), np.int32)
    strided = rng.integers(0, 9, (700, 900), np.int64)
    with manager_at(place, compression="zstd") as manager:
        state = {"wide": wide, "strided": strided.T, "odd": strided[::3, ::2]}
        manager.save(state, step=0).wait()
        for step in range(1, 4):
            wide[0, 0, step * 1_000 : step * 1_000 + 9] += 1
            strided[step * 3, :20] += 1
            delta(manager, state, step)
            loaded = manager.load()
            assert all(np.array_equal(loaded[name], state[name]) for name in state)
        manager.compact(step=3)
        loaded = manager.load()
        assert all(np.array_equal(loaded[name], state[name]) for name in state)


# -- encodings -----------------------------------------------------------------------------------------------------


def test_half_precision_tensors_with_small_changes_are_stored_as_differences(place: str) -> None:
    with manager_at(place, xor=True) as manager:
        rng = np.random.default_rng(3)
        weights = rng.standard_normal((1_000, 1_024), np.float32)
        manager.save({"w": weights.astype(ml_dtypes.bfloat16)}, step=1).wait()
        later = (weights * (1 + 1e-3 * rng.standard_normal(weights.shape))).astype(ml_dtypes.bfloat16)
        saved = delta(manager, {"w": later}, 2)
        assert saved.checkpoint_type is CheckpointType.INCREMENTAL
        assert saved.size_bytes < 0.8 * saved.full_bytes
        assert manager.load()["w"].tobytes() == later.tobytes()
        manager.verify(step=2)
    with manager_at(place) as fresh:
        assert fresh.load()["w"].tobytes() == later.tobytes()


def test_only_compressible_tensors_are_compressed(place: str) -> None:
    with manager_at(place, compression="zstd") as manager:
        state = {
            "zeros": np.zeros((3_000, 1_000), np.float32),
            "noise": np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8),
            "ids": np.arange(500_000, dtype=np.int64),
            "none": np.empty((0, 4)),
            "number": np.float64(3.5),
        }
        saved = manager.save(state, step=1).wait()
        assert saved.size_bytes < 4 << 20
        loaded = manager.load()
        for name, value in state.items():
            assert np.array_equal(loaded[name], value), name
        manager.verify(step=1)
        state["ids"][100] = -1
        assert delta(manager, state, 2).size_bytes < 1 << 16
        assert np.array_equal(manager.load()["ids"], state["ids"])


def test_compressed_and_uncompressed_checkpoints_have_the_same_hash(tmp_path: Path) -> None:
    state = {"zeros": np.zeros((300, 1_000), np.float32)}
    with manager_at(str(tmp_path / "a"), compression="zstd") as one, manager_at(str(tmp_path / "b")) as other:
        assert one.save(state, step=1).wait().model_hash == other.save(state, step=1).wait().model_hash


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"compression": "gzip"}, "compression='gzip' is invalid"),
        ({"incremental_depth": 0}, "incremental_depth=0 is invalid; use 1 to"),
        ({"rebase_at": 0.0}, "use a share above 0"),
        ({"saver": "cloud"}, "saver='cloud' is invalid"),
    ],
)
def test_unknown_options_are_rejected(place: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        strata.CheckpointManager(place, **arguments)


# -- compaction ----------------------------------------------------------------------------------------------------


def test_a_compacted_checkpoint_no_longer_needs_its_base(manager: strata.CheckpointManager) -> None:
    state = {"emb": table(), "one": np.float32(1), "none": np.empty(0), "epoch": 3}
    base = manager.save(state, step=1, metadata={"run": "a"}).wait()
    state["emb"][7] = 7
    saved = delta(manager, state, 2, metadata={"run": "b"})
    whole = manager.compact(step=2)
    assert (whole.step, whole.metadata, whole.bases) == (2, {"run": "b"}, ())
    assert whole.checkpoint_type is CheckpointType.FULL
    assert f"compacted from {saved.id}" in whole.why
    manager.delete(id=base.id)
    with pytest.raises(NoCheckpoint):
        manager.get(id=saved.id)
    loaded = manager.load()
    assert np.array_equal(loaded["emb"], state["emb"])
    assert (loaded["one"], loaded["epoch"], loaded["none"].size) == (1, 3, 0)
    manager.verify(step=2)
    assert manager.compact(step=2) == whole, "there is nothing to do"


# -- any state, any change -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), depth=st.integers(1, 3), compression=st.sampled_from([None, "zstd"]), xor=st.booleans())
def test_any_changes_saved_as_a_delta_load_as_the_whole_state(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, depth: int, compression: Any, xor: bool
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    shapes = data.draw(
        st.lists(
            st.sampled_from([(), (0, 3), (7,), (100, 3), (3_000, 16), (50_001,), (2, 40_000), (513, 33)]),
            min_size=1,
            max_size=4,
        )
    )
    types = [np.float32, np.int64, np.uint8, ml_dtypes.bfloat16]
    state: dict[str, Any] = {
        f"t{i}": rng.integers(0, 100, shape).astype(data.draw(st.sampled_from(types))) for i, shape in enumerate(shapes)
    }
    where = str(tmp_path_factory.mktemp("any"))
    with manager_at(where, incremental_depth=depth, compression=compression, xor=xor) as manager:
        manager.save(state, step=0).wait()
        for step in range(1, data.draw(st.integers(2, 5))):
            dirty: dict[str, Any] = {}
            for name in data.draw(st.lists(st.sampled_from(sorted(state)), max_size=3, unique=True)):
                flat = state[name].reshape(-1) if state[name].ndim else state[name].reshape(1)
                if flat.size:
                    count = data.draw(st.integers(1, max(flat.size // 3, 1)))
                    changed = rng.integers(0, flat.size, count)
                    flat[changed] += 1
                    if state[name].ndim and data.draw(st.booleans()):
                        dirty[name] = changed // (flat.size // len(state[name]))
            delta(manager, state, step, dirty=dirty)
            loaded = manager.load(step=step)
            for name, value in state.items():
                assert loaded[name].tobytes() == value.tobytes(), (step, name)
            manager.verify(step=step)
