"""The adapter for torch.distributed.checkpoint, with real processes."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import pickletools
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from servers import TorchRanks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from strata.checkpoint import CheckpointManager
from strata.checkpoint.adapters import dcp_names
from strata.checkpoint.adapters.dcp_writer import WrittenItem, merged
from strata.checkpoint.adapters.torch_dcp import StrataStorageReader, StrataStorageWriter
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format import tree
from strata.clock import ManualClock
from strata.errors import CheckpointInvalid, InvalidArgument
from strata.storage.memory import MemoryStore

if TYPE_CHECKING:
    from nursery import Lifeline

TIMEOUT_S = 100
SCRIPT = Path(__file__)
STRATA_CHECKPOINTS = [str(Path(sys.executable).with_name("strata")), "checkpoints"]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """DCP warns whenever there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="torch.distributed is unavailable")
        yield


def save(state: dict[str, Any], place: Any, **options: Any) -> StrataStorageWriter:
    writer = StrataStorageWriter(place, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return writer


def load(state: dict[str, Any], place: Any, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=StrataStorageReader(place, **options), no_dist=True)
    return state


def loaded(place: Path, **options: Any) -> Any:
    with CheckpointManager(str(place)) as manager:
        manager.verify(**options)
        return manager.load(**options)


def the_manifest(place: Path) -> m.Manifest:
    (path,) = place.glob("*/manifest.json")
    return m.decode(path.read_bytes(), file=str(path))


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(other, dict):
        return isinstance(one, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def trained(lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


# -- one process ----------------------------------------------------------------------------------------------------


def test_a_model_and_its_optimizer_come_back_through_dcp(tmp_path: Path) -> None:
    model, optimizer = trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save({"model": of_model, "optimizer": of_optimizer}, tmp_path, step=5)
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    again = torch.optim.AdamW(fresh.parameters(), lr=9.0)
    fresh_model, fresh_optimizer = get_state_dict(fresh, again)

    state = load({"model": fresh_model, "optimizer": fresh_optimizer}, tmp_path)
    set_state_dict(fresh, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    assert all(same(fresh.state_dict()[name], value) for name, value in model.state_dict().items())
    assert again.param_groups[0]["lr"] == 0.1
    assert same(again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_outcome_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "betas": (0.9, 0.999)}],
        "mixed": [torch.zeros(2), "text", None],
        "plain": {"n": 1 << 70, "nan_free": 1.5, "on": True, "raw": b"\0\1", "array": np.arange(3), "z": 1 + 2j},
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }

    writer = save(state, tmp_path, step=5, epoch=2, metadata={"run": "a"}, clock=ManualClock(wall_s=1_000.0))

    assert same(loaded(tmp_path), state)
    with CheckpointManager(str(tmp_path)) as manager:
        assert manager.latest() == writer.saved
    assert writer.saved is not None
    assert (writer.saved.step, writer.saved.epoch, writer.saved.metadata) == (5, 2, {"run": "a"})
    assert writer.saved.created_at_s == 1_000.0


def test_nothing_on_the_disk_is_a_pickle(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "objects": {"a": (1, "x"), "b": [0.5, None]}}, tmp_path)

    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert sorted(path.name for path in files) == ["manifest.json", "rank-00000.safetensors"]
    json.loads(next(path for path in files if path.suffix == ".json").read_bytes())
    for path in files:
        assert b"PK\3\4" not in path.read_bytes()  # torch.save writes a zip of them
        with pytest.raises((ValueError, UnicodeDecodeError)):
            list(pickletools.genops(path.read_bytes()))


def test_objects_and_tensors_come_back_into_a_state_of_the_same_names(tmp_path: Path) -> None:
    state = {
        "n": {"x": [1, 2], "y": (1, 2.5), "deep": [[{"t": torch.ones(2)}, 5]], "array": np.arange(4, dtype=np.int16)},
        "e": torch.zeros(0, 3),
        "s": torch.tensor(3.5),
    }
    save(state, tmp_path)

    found = load(
        {
            "n": {"x": 0, "y": 0, "deep": [[{"t": torch.zeros(2)}, 0]], "array": 0},
            "e": torch.ones(0, 3),
            "s": torch.tensor(0.0),
        },
        tmp_path,
    )

    assert same(found, state)


def test_a_checkpoint_of_the_manager_can_be_read_through_dcp(tmp_path: Path) -> None:
    model, optimizer = trained()
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, step=4).wait()
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).state_dict()

    found = load({"model": fresh, "step": 0}, tmp_path)

    assert same(dict(found["model"]), dict(model.state_dict()))
    assert found["step"] == 4


def test_the_whole_state_can_be_loaded_without_a_target(tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(2), "n": [1, 2]}, "b": [torch.zeros(1), "x"]}
    save(state, tmp_path)

    found = dcp.state_dict_loader._load_state_dict_from_keys(storage_reader=StrataStorageReader(tmp_path))
    by_keys = dcp.state_dict_loader._load_state_dict_from_keys("a", storage_reader=StrataStorageReader(tmp_path))

    assert same(found, state)
    assert same(by_keys, {"a": state["a"]})


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    tied = torch.arange(1_000.0)
    save({"embedding": tied, "head": tied, "other": tied.clone()}, tmp_path)

    found = loaded(tmp_path)
    through_dcp = load({name: torch.zeros(1_000) for name in ("embedding", "head", "other")}, tmp_path)

    assert [entry.name for entry in the_manifest(tmp_path).tensors] == ["embedding", "other"]
    assert found["head"] is found["embedding"]
    assert all(same(value, tied) for value in through_dcp.values())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex128]
)
def test_dtypes_and_strides_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(12).reshape(3, 4).to(dtype).t()
    save({"w": value}, tmp_path)

    found = load({"w": torch.zeros(4, 3).to(dtype)}, tmp_path)["w"]

    assert found.contiguous().view(torch.uint8).tolist() == value.contiguous().view(torch.uint8).tolist()


def test_dcp_accepts_steps_and_ids(tmp_path: Path) -> None:
    writer = StrataStorageWriter(tmp_path)
    ids = []
    for step in (1, 2):
        metadata = dcp.save({"w": torch.full((2,), step)}, checkpoint_id=str(step), storage_writer=writer, no_dist=True)
        ids.append(metadata.storage_meta.checkpoint_id)
    reader = StrataStorageReader(tmp_path)

    def read(checkpoint_id: str) -> list[int]:
        state = {"w": torch.zeros(2, dtype=torch.int64)}
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True)
        return state["w"].tolist()  # type: ignore[no-any-return]

    assert (read("1"), read(ids[1])) == ([1, 1], [2, 2])
    assert load({"w": torch.zeros(2, dtype=torch.int64)}, tmp_path, step=1)["w"].tolist() == [1, 1]
    assert load({"w": torch.zeros(2, dtype=torch.int64)}, tmp_path, id=ids[0])["w"].tolist() == [1, 1]
    assert load({"w": torch.zeros(2, dtype=torch.int64)}, tmp_path)["w"].tolist() == [2, 2]


def test_an_unflattened_state_is_restored_whole(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "n": 1}, "t": torch.zeros(3)}
    writer = StrataStorageWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)

    found = {"model": 0, "t": torch.ones(3)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # True would load a copy
    dcp.load(found, storage_reader=StrataStorageReader(tmp_path), planner=planner, no_dist=True)

    assert same(found, state)
    assert same(loaded(tmp_path), state)


class WithoutTheFirst(DefaultSavePlanner):
    """Drops the first entry of a list, so that the remaining indices no longer form a list."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        plan.items[:] = [item for item in plan.items if item.index.fqn != "list.0"]
        return plan


def test_a_list_with_a_hole_keeps_its_names_and_places(tmp_path: Path) -> None:
    writer = StrataStorageWriter(tmp_path)
    state = {"list": [torch.zeros(1), torch.ones(1)]}
    dcp.save(state, storage_writer=writer, planner=WithoutTheFirst(), no_dist=True)

    found = {"list": [torch.zeros(1), torch.zeros(1)]}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=StrataStorageReader(tmp_path), planner=planner, no_dist=True)

    assert same(loaded(tmp_path), {"list.1": torch.ones(1)})
    assert same(found, {"list": [torch.zeros(1), torch.ones(1)]})
    assert StrataStorageReader(tmp_path).read_metadata().planner_data == {"list.1": ("list", 1)}


def test_an_incremental_checkpoint_is_read_with_its_patches(tmp_path: Path) -> None:
    table = torch.arange(64_000.0).reshape(1_000, 64)
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"table": table, "n": 1}, step=1).wait()
        table[[3, 700]] = -1.0
        delta = manager.save({"table": table, "n": 2}, step=2, checkpoint_type="INCREMENTAL").wait()
        assert delta.checkpoint_type is m.CheckpointType.INCREMENTAL

    found = load({"table": torch.zeros(1_000, 64), "n": 0}, tmp_path)

    assert same(found, {"table": table, "n": 2})


def test_only_requested_tensors_are_read(tmp_path: Path) -> None:
    save({"a": torch.ones(5), "b": torch.ones(5)}, tmp_path)
    (path,) = tmp_path.glob("*/rank-00000.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of b
    path.write_bytes(data)

    assert load({"a": torch.zeros(5)}, tmp_path)["a"].tolist() == [1] * 5
    with refused("CheckpointCorrupt"):
        load({"b": torch.zeros(5)}, tmp_path)


def test_the_command_line_shows_and_verifies_what_dcp_saved(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2, 3)}, "lr": 0.1}, tmp_path, step=12)

    def run_json(*arguments: str) -> Any:
        ran = subprocess.run(
            [*STRATA_CHECKPOINTS, *arguments, "--json"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        return json.loads(ran.stdout)

    assert "12" in json.dumps(run_json("ls", str(tmp_path)))
    assert "model.w" in json.dumps(run_json("show", str(tmp_path)))
    assert run_json("verify", str(tmp_path))


def test_an_adapter_with_a_path_can_be_pickled_and_one_with_a_store_cannot(tmp_path: Path) -> None:
    there = pickle.loads(pickle.dumps(StrataStorageWriter(tmp_path, step=3)))
    dcp.save({"w": torch.ones(1)}, storage_writer=there, no_dist=True)

    assert loaded(tmp_path, step=3)["w"].tolist() == [1]
    with pytest.raises(InvalidArgument, match="a MemoryStore cannot be sent to another process"):
        pickle.dumps(StrataStorageWriter(MemoryStore("here")))


def test_a_store_can_be_passed() -> None:
    store = MemoryStore("here")
    save({"w": torch.ones(2)}, store)

    assert load({"w": torch.zeros(2)}, store)["w"].tolist() == [1, 1]


# -- what is refused ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Require an error that DCP wraps."""
    with pytest.raises(CheckpointException) as raised:
        yield
    for part in parts:
        assert part in str(raised.value)


def test_an_object_that_cannot_be_stored_is_rejected_by_name(tmp_path: Path) -> None:
    with refused("InvalidArgument", "opt.schedule is a builtins.function"):
        save({"w": torch.ones(2), "opt": {"schedule": lambda step: step}}, tmp_path)

    assert list(tmp_path.rglob("*.safetensors")) == list(tmp_path.rglob("manifest.json")) == []


def test_a_planner_that_only_provides_pickles_is_rejected(tmp_path: Path) -> None:
    class Opaque(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

        def resolve_data(self, write_item: Any) -> Any:
            return io.BytesIO(b"?") if write_item.index.fqn == "n" else self.state_dict[write_item.index.fqn]

    with refused("Opaque provides 'n' only as a pickle"):
        dcp.save({"n": 1}, storage_writer=StrataStorageWriter(tmp_path), planner=Opaque(), no_dist=True)


def test_a_reused_plan_does_not_touch_the_previous_checkpoint(tmp_path: Path) -> None:
    writer = StrataStorageWriter(tmp_path)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = "test_a_plan_that_is_repeated"
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner, no_dist=True)

    with refused("already exists: the planner reused", "enable_plan_caching=False"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=writer, planner=planner, no_dist=True)

    assert loaded(tmp_path)["w"].tolist() == [1, 1]


def test_saving_without_collectives_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="use_collectives=False is not supported"):
        dcp.save(
            {"w": torch.ones(2)}, storage_writer=StrataStorageWriter(tmp_path), no_dist=True, use_collectives=False
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "step=-1 is invalid"),
        ({"epoch": 1.5}, r"epoch=1\.5 is invalid"),
        ({"metadata": {"a": object()}}, "metadata is not valid JSON"),
        ({"metadata": {"a": "x" * (1 << 20)}}, "put large values into the state"),
        ({"metadata": {"torch_dcp": 1}}, "is reserved for the adapter"),
    ],
)
def test_arguments_that_cannot_be_stored_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        StrataStorageWriter(tmp_path, **options)


def test_a_checkpoint_id_that_is_a_path_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"checkpoint_id='runs/step_1' is not a step; pass checkpoint_id='5000'"):
        dcp.save({}, checkpoint_id="runs/step_1", storage_writer=StrataStorageWriter(tmp_path), no_dist=True)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save({"w": torch.ones(100), "v": torch.zeros(3)}, tmp_path)
    (path,) = tmp_path.glob("*/rank-00000.safetensors")
    data = bytearray(path.read_bytes())
    data[4_100] ^= 1
    path.write_bytes(data)

    with refused("CheckpointCorrupt", "'w for w at (0,)' in rank-00000.safetensors"):
        load({"w": torch.zeros(100), "v": torch.ones(3)}, tmp_path)


def test_ranks_that_found_different_checkpoints_do_not_mix_them(tmp_path: Path) -> None:
    plans = []
    for step in (1, 2):  # the second checkpoint is committed after the first rank has listed them
        save({"w": torch.ones(1)}, tmp_path, step=step)
        reader = StrataStorageReader(tmp_path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))

    with pytest.raises(CheckpointInvalid, match="the ranks would load different checkpoints"):
        reader.prepare_global_plan(plans)


def test_tensors_of_one_name_on_two_ranks_are_not_mistaken_for_one() -> None:
    def written(rank: int, fqn: str) -> tuple[str, WrittenItem]:
        file = m.DataFile(
            path=f"rank-{rank:05d}.safetensors", rank=rank, size_bytes=12, header_bytes=8, header_hash="0" * 32
        )
        part = m.Slice(file=0, offset=8, start=(0,), shape=(1,), hashes=("0" * 32,))
        entry = m.TensorEntry(name="a.0", dtype="F32", shape=(1,), slices=(part,))
        if fqn == "a.0":
            return fqn, WrittenItem(id="x", file=file, entry=entry)
        return fqn, WrittenItem(id="x", file=file, node={"list": [{"tensor": "a.0", "as": "numpy"}]}, tensors=(entry,))

    with pytest.raises(InvalidArgument, match=r"'a\.0' and 'a' both have a tensor 'a\.0'; rename one of them"):
        merged([written(0, "a"), written(1, "a.0")])


def test_an_empty_store_raises_no_checkpoint(tmp_path: Path) -> None:
    with refused("has no checkpoint"):
        load({"w": torch.zeros(1)}, tmp_path)


def test_two_entries_with_one_dotted_name_are_rejected(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, step=0).wait()

    with refused("two entries named 'a.b'"):
        load({"a": {"b": torch.zeros(1)}}, tmp_path)


def test_a_state_that_is_not_a_dict_is_rejected(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save([torch.ones(1)], step=0).wait()

    with refused("is not a dict, which DCP requires"):
        load({"w": torch.zeros(1)}, tmp_path)


# -- names ----------------------------------------------------------------------------------------------------------

STATES = st.dictionaries(
    st.text("ab", min_size=1, max_size=3),
    st.recursive(
        st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just("tensor").map(lambda _: torch.zeros(1))),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(st.one_of(st.text("ab", min_size=1, max_size=2), st.integers(0, 3)), inner, max_size=3),
            st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@given(STATES)
def test_a_structure_has_the_items_of_dcps_planner(state: dict[str, Any]) -> None:
    _, expected = dcp.default_planner.flatten_state_dict(state)

    found = dcp_names.items(tree.flatten(state).structure)

    assert {name: item.path for name, item in found.items()} == expected


@given(STATES)
def test_items_nest_into_a_structure_of_the_same_items(state: dict[str, Any]) -> None:
    cut = dcp_names.items(tree.flatten(state).structure)
    nodes = {name: item.node for name, item in cut.items()}

    nested = dcp_names.nest(nodes, {name: item.path for name, item in cut.items()})

    if nested is not None:  # a list that held an empty dict has a hole without it
        assert dcp_names.items(nested) == cut
    else:
        assert any(isinstance(key, int) for item in cut.values() for key in item.path)


# -- several processes ----------------------------------------------------------------------------------------------

TABLE = torch.arange(35.0).reshape(7, 5)
"""Seven rows, so that the ranks hold different numbers of rows."""


def sharded_model(world_size: int, lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def sharded_state(world_size: int, *, zero: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    table = torch.zeros_like(TABLE) if zero else TABLE
    return {
        "rows": distribute_tensor(table, mesh, [Shard(0)]),
        "columns": distribute_tensor(table, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(table, mesh, [Replicate()]),
        "one_row": distribute_tensor(table[:1].clone(), mesh, [Shard(0)]),
        "plain": table.clone(),
        "n": 0 if zero else 41,
    }


def rank_main(lifeline: Lifeline, *, what: str, place: str, rank: int, num_ranks: int) -> None:
    """Save or load; report what this rank found."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{place}.{what}.meeting", rank=rank, world_size=num_ranks)
    try:
        lifeline.send(said=RANKS[what](place, rank, num_ranks))
    finally:
        dist.destroy_process_group()


def save_all(place: str, _rank: int, world_size: int) -> Any:
    """Save a state of tables as step 3 and a slightly trained model as step 4."""
    metadata = dcp.save(sharded_state(world_size, zero=False), storage_writer=StrataStorageWriter(place, step=3))
    model, optimizer = sharded_model(world_size, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, storage_writer=StrataStorageWriter(place, step=4))
    return {"id": metadata.storage_meta.checkpoint_id, "parameters": parameters_of(model)}


def load_all(place: str, _rank: int, world_size: int) -> Any:
    state = sharded_state(world_size, zero=True)
    dcp.load(state, storage_reader=StrataStorageReader(place, step=3))
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    model, optimizer = sharded_model(world_size, lr=0.5)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    trained_on = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(trained_on, storage_reader=StrataStorageReader(place))
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=trained_on["optimizer"])
    return {
        "tables": {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in whole.items()},
        "parameters": parameters_of(model),
        "lr": optimizer.param_groups[0]["lr"],
        "steps": [moments["step"].item() for moments in optimizer.state.values()],
    }


def parameters_of(model: torch.nn.Module) -> list[Any]:
    return [parameter.full_tensor().tolist() for parameter in model.parameters()]


def save_in_a_process(place: str, _rank: int, world_size: int) -> Any:
    state = sharded_state(world_size, zero=False)
    writer = StrataStorageWriter(place, step=3)
    future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    return getattr(future, "upload_completion", future).result().storage_meta.checkpoint_id


def save_what_one_rank_cannot(place: str, rank: int, world_size: int) -> Any:
    state = {**sharded_state(world_size, zero=False), **({"bad": object()} if rank == 1 else {})}
    try:
        dcp.save(state, storage_writer=StrataStorageWriter(place, step=4))
    except CheckpointException as error:
        return str(error)
    return "it was saved"


RANKS = {call.__name__: call for call in (save_all, load_all, save_in_a_process, save_what_one_rank_cannot)}


def on_ranks(ranks: TorchRanks, what: str, place: Path, num_ranks: int) -> list[Any]:
    return ranks.run(rank_main, num_ranks, deadline_s=TIMEOUT_S, what=what, place=str(place))


EXPECTED = {name: TABLE.tolist() for name in ("rows", "columns", "everywhere", "plain")} | {
    "one_row": TABLE[:1].tolist(),
    "n": 41,
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_savers", "num_loaders"), [(2, 1), (1, 2)])
def test_shards_are_loaded_by_another_number_of_ranks_that_train_on(
    tmp_path: Path, torch_ranks: TorchRanks, num_savers: int, num_loaders: int
) -> None:
    place = tmp_path / "checkpoints"

    saved = on_ranks(torch_ranks, "save_all", place, num_savers)
    found = on_ranks(torch_ranks, "load_all", place, num_loaders)

    parameters = saved[0]["parameters"]
    expected = {"tables": EXPECTED, "parameters": parameters, "lr": 0.1, "steps": [1.0] * len(parameters)}
    assert found == [expected] * num_loaders
    assert saved == saved[:1] * num_savers
    with CheckpointManager(str(place)) as manager:
        tables, _ = manager.list()
        assert (tables.id, tables.num_ranks) == (saved[0]["id"], num_savers)
        manager.verify(step=4)
    manifest = m.decode((place / tables.id / "manifest.json").read_bytes(), file="manifest.json")
    slices = {entry.name: len(entry.slices) for entry in manifest.tensors}
    assert slices == {"rows": num_savers, "columns": num_savers, "everywhere": 1, "one_row": 1, "plain": 1}
    state = loaded(place, step=3)
    assert {name: torch.as_tensor(state[name]).tolist() for name in EXPECTED} == EXPECTED
    assert loaded(place, step=4)["model"]["0.weight"].tolist() == parameters[0]


@pytest.mark.timeout(240)
def test_an_asynchronous_save_in_a_process_is_committed(tmp_path: Path, torch_ranks: TorchRanks) -> None:
    place = tmp_path / "checkpoints"

    (saved_id,) = on_ranks(torch_ranks, "save_in_a_process", place, 1)

    assert loaded(place, id=saved_id)["rows"].tolist() == TABLE.tolist()


def test_an_asynchronous_save_in_a_thread_is_committed(tmp_path: Path) -> None:
    writer = StrataStorageWriter(tmp_path, step=2)
    state = {"w": torch.ones(3)}
    future = dcp.async_save(state, storage_writer=writer, no_dist=True)
    getattr(future, "staging_completion", future).result()
    state["w"].zero_()
    getattr(future, "upload_completion", future).result()

    assert writer.saved is not None
    assert loaded(tmp_path, id=writer.saved.id)["w"].tolist() == [1, 1, 1]


@pytest.mark.timeout(240)
def test_a_rank_that_cannot_store_its_part_leaves_the_previous_checkpoint_as_the_latest(
    tmp_path: Path, torch_ranks: TorchRanks
) -> None:
    place = tmp_path / "checkpoints"
    before = save({"w": torch.ones(1)}, place, step=3).saved

    messages = on_ranks(torch_ranks, "save_what_one_rank_cannot", place, 2)

    assert all("bad is a builtins.object" in message for message in messages)
    with CheckpointManager(str(place)) as manager:
        assert manager.list() == [before]
