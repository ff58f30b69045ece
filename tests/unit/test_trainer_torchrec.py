"""What torchrec shards: settings, places of tables, and what is refused by name."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from strata.errors import ConfigError, InvalidArgument
from strata.servers.table.optimizers import FTRL, RowWiseAdagrad
from strata.trainer.strategy import AllReduce, Hybrid, ParameterServer, TorchRec, num_servers, torch_rec_of
from strata.trainer.strategy.embedding_collections import find
from strata.trainer.strategy.torch_rec import ROW_WISE, TABLE_WISE, check_plan, default_places
from strata.trainer.strategy.torch_rec_shards import ShardedTable


def models() -> Any:
    """Import torchrec when a test needs it; collecting tests does not."""
    return importlib.import_module("tests.integration.torchrec_models")


# -- settings ------------------------------------------------------------------------------------------------------


def test_settings_survive_a_pickle_and_need_no_servers() -> None:
    strategy = Hybrid(sparse=TorchRec(tables="user", optimizer=RowWiseAdagrad(lr=0.1)))

    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert num_servers(strategy) == 0
    assert torch_rec_of(strategy) == strategy.sparse
    assert torch_rec_of(Hybrid()) is torch_rec_of(AllReduce()) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"plan": {"bags": 1}}, "not a ShardingPlan"),
        ({"plan": SimpleNamespace(plan={}), "tables": "user"}, "leave tables= out"),
        ({"min_bytes": -1}, "min_bytes=-1"),
        ({"fused": 1}, "fused=1 must be True or False"),
        ({"optimizer": FTRL()}, "no fused version"),
        ({"optimizer": RowWiseAdagrad(), "fused": False}, "leave one"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        TorchRec(**settings)


def test_the_dense_part_of_sharded_tables_is_an_all_reduce() -> None:
    with pytest.raises(InvalidArgument, match=r"use dense=AllReduce\(\)"):
        Hybrid(dense=ParameterServer(), sparse=TorchRec())


def test_without_torchrec_the_error_names_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="pip install --no-deps torchrec"):
        TorchRec()


def test_describing_a_job_does_not_import_torchrec() -> None:
    names = "('torchrec', 'fbgemm_gpu')"
    code = (
        "import sys; from strata.train import Hybrid, TorchRec; Hybrid(sparse=TorchRec()); "
        f"assert not any(name.startswith({names}) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


# -- places --------------------------------------------------------------------------------------------------------


@given(
    sizes=st.dictionaries(st.text("abc", min_size=1), st.integers(1, 10**9), min_size=1, max_size=30),
    world_size=st.integers(1, 9),
)
def test_no_worker_holds_twice_its_share(sizes: dict[str, int], world_size: int) -> None:
    found = default_places(sizes, world_size)

    share = sum(sizes.values()) / world_size
    loads = [0.0] * world_size
    for name, place in found.items():
        if place.kind == ROW_WISE:
            assert sizes[name] > share
            loads = [load + sizes[name] / world_size for load in loads]
        else:
            assert place.kind == TABLE_WISE
            loads[place.rank] += sizes[name]
    assert found.keys() == sizes.keys()
    assert max(loads) <= 2 * share


def sharding(kind: str = "row_wise", kernel: str = "fused", ranks: tuple[int, ...] = (0, 1)) -> Any:
    shards = [SimpleNamespace(placement=SimpleNamespace(rank=lambda rank=rank: rank)) for rank in ranks]
    return SimpleNamespace(
        sharding_type=kind, compute_kernel=kernel, sharding_spec=SimpleNamespace(shards=shards), ranks=ranks
    )


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (sharding("data_parallel"), "data_parallel sharding is not supported"),
        (sharding(kernel="fused_uvm"), "kernel fused_uvm is not supported"),
        (sharding("column_wise"), "one sum per row"),
        (sharding(ranks=(0, 0)), "give each worker one"),
        (sharding(ranks=(0, 2)), "rank 2, and the run has 2 workers"),
        (None, "no entry for the table user"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_table(entry: Any, reason: str) -> None:
    plan = SimpleNamespace(plan={"bags": {} if entry is None else {"user": entry}})

    with pytest.raises(InvalidArgument, match=reason):
        check_plan(plan, {"bags": ["user"]}, 2, is_rowwise=True)


def test_a_plan_that_fits_is_accepted() -> None:
    plan = SimpleNamespace(plan={"bags": {"user": sharding(), "item": sharding("table_wise", "dense", (1,))}})

    check_plan(plan, {"bags": ["user", "item"]}, 2, is_rowwise=True)


# -- what is sharded -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, user: nn.Module | None = None) -> None:
        super().__init__()
        self.user = user or nn.Embedding(100, 8)
        self.item = nn.EmbeddingBag(10, 8, mode="sum")
        self.top = nn.Linear(8, 1)


def test_collections_and_embeddings_are_found_by_size_and_by_name() -> None:
    assert [each.place for each in find(Net(), None, min_bytes=1_000)] == ["user"]
    assert [each.place for each in find(Net(), ["*er", "item.weight"], min_bytes=0)] == ["user", "item"]
    (bags,) = find(models().Bags(), None, min_bytes=4_000)
    with pytest.raises(InvalidArgument, match=r"torchrec cannot shard bags\.user: its bags are means"):
        find(models().Bags(mean=True), None, min_bytes=0)

    assert (bags.place, list(bags.tables)) == ("bags", ["user", "item"])
    assert bags.parameter_name("user") == "bags.embedding_bags.user.weight"


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        (nn.Embedding(9, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(9, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(9, 4, mode="max"), "mode='max'"),
        (nn.EmbeddingBag(9, 4, mode="mean"), "its bags are means"),
        (nn.Embedding(9, 4).requires_grad_(False), "frozen"),
        (nn.Embedding(9, 4, dtype=torch.float64), "float64"),
        (nn.Embedding.from_pretrained(torch.ones(9, 4), freeze=False, padding_idx=1), "row 1, its padding_idx"),
        (type("Own", (nn.Embedding,), {})(9, 4), "whose own forward would be lost"),
    ],
)
def test_what_torchrec_cannot_shard_is_refused_by_name(user: nn.Module, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"torchrec cannot shard user.*{reason}"):
        find(Net(user), ["user"], min_bytes=0)


def test_tied_tables_and_unknown_names_are_refused() -> None:
    tied = Net()
    tied.item.weight = tied.user.weight
    with pytest.raises(InvalidArgument, match=r"tied to item.weight; use ParameterServer\(\)"):
        find(tied, ["user"], min_bytes=0)
    with pytest.raises(InvalidArgument, match="'usr'; the embeddings of the module are: user, item"):
        find(Net(), ["usr"], min_bytes=0)
    with pytest.raises(InvalidArgument, match="lower min_bytes="):
        find(Net(), None, min_bytes=1 << 30)
    with pytest.raises(InvalidArgument, match="is itself an embedding"):
        find(nn.Embedding(4, 4), None, min_bytes=0)


# -- shards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [(0, 0), (3, 0), (0, 4)])
def test_a_shard_takes_its_part_of_a_whole_table(start: tuple[int, int]) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    local = torch.zeros(3, 8) if not start[1] else torch.zeros(6, 4)
    expected = whole[start[0] : start[0] + len(local), start[1] : start[1] + local.shape[1]]
    table = ShardedTable("user", (6, 8), start, local)

    table.fill(whole)

    assert torch.equal(local, expected)
    assert torch.equal(table.own(whole), expected)
    assert torch.equal(table.own(expected), expected)
    with pytest.raises(InvalidArgument, match=r"\(7, 8\) in the checkpoint and \(6, 8\) in the module"):
        table.own(torch.zeros(7, 8))


def test_the_first_values_of_a_table_without_values_do_not_depend_on_its_shards() -> None:
    parts = [ShardedTable("user", (6, 8), (start, 0), torch.zeros(3, 8)) for start in (0, 3)]
    whole = ShardedTable("user", (6, 8), (0, 0), torch.zeros(6, 8))
    for each in (*parts, whole):
        each.fill(torch.empty(6, 8, device="meta"))

    assert torch.equal(torch.cat([each.local for each in parts]), whole.local)
    assert whole.local.std() > 0
