"""Embeddings whose tables are elsewhere train like those of torch, and what cannot move is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strata.errors import InvalidArgument
from strata.servers.table.keys import unique
from strata.servers.table.optimizers import SGD
from strata.servers.table.table import Saved, Table, TableSpec
from strata.trainer.strategy import tables
from strata.trainer.strategy.lookup import BagLookup, Found, Lookup, StepRows

LR = 0.1


class LocalTables:
    """A source of rows in this process."""

    def __init__(self, found: list[tables.FoundTable]) -> None:
        self.tables = {}
        for each in found:
            num = each.num_rows
            table = Table(
                TableSpec(
                    name=each.name, width=each.width, optimizer=SGD(lr=LR), max_rows=num, is_frozen=each.is_frozen
                )
            )
            table.put(
                Saved(
                    np.arange(num, dtype=np.uint64),
                    each.weight.detach().numpy().copy(),
                    np.empty((num, 0), np.float32),
                    np.zeros(num, np.uint32),
                    np.zeros(num, np.uint32),
                )
            )
            self.tables[each.name] = table
        self.num_pulled = 0

    def pull(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        self.num_pulled += sum(map(len, wanted.values()))
        return {name: self.tables[name].pull(keys) for name, keys in wanted.items()}

    def ask(self, wanted: Mapping[str, Any], steps_ahead: int = 0) -> Any:
        raise AssertionError(f"no batch was announced: {wanted}, {steps_ahead} steps ahead")


def moved(module: nn.Module, **arguments: Any) -> tuple[nn.Module, StepRows, LocalTables]:
    found = tables.find(module, min_bytes=0, **arguments)
    source = LocalTables(found)
    rows = StepRows(source, frozen={each.name for each in found if each.is_frozen})
    return tables.replace(module, found, rows), rows, source


def compare(module: nn.Module, batches: list[tuple[Any, ...]], call: Callable[..., Tensor] | None = None) -> None:
    """Train the module and a copy with its tables moved; they must stay equal."""
    torch.manual_seed(0)
    theirs, ours = module, copy.deepcopy(module)
    ours, rows, source = moved(ours)
    optimizers = [torch.optim.SGD(theirs.parameters(), lr=LR)]
    dense = list(ours.parameters())
    if dense:
        optimizers.append(torch.optim.SGD(dense, lr=LR))
    for step, batch in enumerate(batches, start=1):
        outputs = []
        for each in (theirs, ours):
            output = each(*batch) if call is None else call(each, *batch)
            outputs.append(output.detach())
            (output.sin().sum() / 7).backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-7)
        for name, push in rows.take_gradients().items():
            source.tables[name].push(push.keys, push.gradients, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(theirs.named_parameters(remove_duplicate=False))
    for name, table in source.tables.items():
        expected = weights[name].detach()
        found = torch.from_numpy(table.pull(np.arange(len(expected), dtype=np.uint64)))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def ids_of(*shape: int, seed: int = 0, high: int = 20) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("padding", [None, 0, 3])
@pytest.mark.parametrize("shape", [(6,), (4, 5), (2, 3, 4), (0,), (3, 0)])
def test_a_lookup_trains_like_an_embedding(padding: int | None, shape: tuple[int, ...]) -> None:
    compare(nn.Embedding(20, 4, padding_idx=padding), [(ids_of(*shape, seed=seed),) for seed in range(4)])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_lookup_trains_like_an_embedding_bag(mode: Any, padding: int | None) -> None:
    bag = nn.EmbeddingBag(20, 4, mode=mode, padding_idx=padding)
    compare(bag, [(ids_of(3, 5, seed=seed),) for seed in range(4)])
    offsets = torch.tensor([0, 2, 2, 7])
    compare(nn.EmbeddingBag(20, 4, mode=mode, padding_idx=padding), [(ids_of(9), offsets)] * 3)
    with_last = nn.EmbeddingBag(20, 4, mode=mode, include_last_offset=True)
    compare(with_last, [(ids_of(9), torch.tensor([0, 2, 2, 9]))] * 3)


def test_a_bag_lookup_takes_weights_of_samples() -> None:
    weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    compare(nn.EmbeddingBag(20, 4, mode="sum"), [(ids_of(3, 5, seed=seed), None, weights) for seed in range(4)])


def test_two_backward_passes_through_one_graph_add_up_in_the_room_for_gradients() -> None:
    ids = ids_of(6, 5)
    groups = unique(ids.reshape(-1).numpy().view(np.uint64))
    rows = torch.rand(len(groups.keys), 4, requires_grad=True)
    room = np.empty((len(groups.keys), 4), np.float32)
    found = Found(rows, torch.from_numpy(groups.inverse).reshape(ids.shape), groups, room).gathered()

    found.sum().backward(retain_graph=True)
    assert rows.grad is not None
    assert rows.grad.data_ptr() == room.ctypes.data, "it is pushed from there"
    (2 * found).sum().backward()
    counts = torch.from_numpy(np.bincount(groups.inverse)).unsqueeze(1).expand(-1, 4)
    assert rows.grad.equal(3.0 * counts)


class Tied(nn.Module):
    """Two embeddings with the same weights, one of them used twice, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(20, 4)
        self.second = nn.Embedding(20, 4)
        self.second.weight = self.first.weight
        self.other = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(a) + self.second(b) + self.first(b) * self.other(a))
        return out


def test_tied_embeddings_share_one_table_and_add_their_gradients() -> None:
    compare(Tied(), [(ids_of(6, seed=seed), ids_of(6, seed=seed + 50)) for seed in range(4)])
    found = tables.find(Tied(), min_bytes=0)
    assert [(table.name, table.places) for table in found] == [
        ("first.weight", ("first", "second")),
        ("other.weight", ("other",)),
    ]


class WithFeatures(nn.Module):
    """Frozen rows beside trained ones, as an embedding and in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Embedding.from_pretrained(torch.rand(20, 4), padding_idx=3)
        self.bags = nn.EmbeddingBag.from_pretrained(torch.rand(20, 4))
        self.vectors = nn.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.features(ids) * self.vectors(ids) + self.bags(ids.unsqueeze(1))


def test_frozen_tables_give_their_rows_and_get_no_gradients() -> None:
    compare(WithFeatures(), [(ids_of(6, seed=seed),) for seed in range(4)])

    module, rows, _ = moved(WithFeatures())
    module(ids_of(6)).sum().backward()
    assert rows.take_gradients().keys() == {"vectors.weight"}
    assert not module.features(ids_of(6)).requires_grad


@pytest.mark.parametrize("arguments", [{}, {"is_weighted": True}, {"mean": True}], ids=str)
def test_a_collection_of_torchrec_trains_like_before(arguments: dict[str, Any]) -> None:
    from tests.integration.torchrec_models import Bags, visits  # imports torchrec, which is slow

    batches = [tuple(visits(20, seed=seed)[name] for name in ("user", "item", "seen")) for seed in range(3)]
    compare(Bags(**arguments), batches)
    names = [f"bags.embedding_bags.{name}.weight" for name in ("user", "item")]
    assert [each.name for each in tables.find(Bags(), "bags")] == names


def test_only_the_dense_part_keeps_parameters() -> None:
    module, _, _ = moved(Tied())
    assert [name for name, _ in module.named_parameters()] == ["head.weight", "head.bias"]
    assert isinstance(module.first, Lookup)
    assert "table='first.weight' on parameter servers" in repr(module)


def test_each_row_is_pulled_once_and_an_evaluation_leaves_no_gradient() -> None:
    module, rows, source = moved(nn.Embedding(20, 4))
    with torch.no_grad():
        module(torch.tensor([3, 3, 3, 5]))
    assert source.num_pulled == 2
    assert rows.take_gradients() == {}


def test_tables_are_chosen_by_size_or_by_name() -> None:
    module = nn.ModuleDict({"small": nn.Embedding(10, 4), "large": nn.EmbeddingBag(100_000, 4)})
    assert [table.name for table in tables.find(module)] == ["large.weight"]
    assert [table.name for table in tables.find(module, ["sm*"])] == ["small.weight"]
    assert [table.name for table in tables.find(module, ["large.weight"])] == ["large.weight"]
    with pytest.raises(InvalidArgument, match="tables= names 'huge'; the embeddings of the module are: small, large"):
        tables.find(module, ["huge"])


class OwnEmbedding(nn.Embedding):
    pass


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(10, 4, max_norm=1.0), "max_norm changes rows in a forward pass"),
        (nn.EmbeddingBag(10, 4, max_norm=1.0), "max_norm changes rows in a forward pass"),
        (nn.Embedding(10, 4, scale_grad_by_freq=True), "scale_grad_by_freq needs the counts"),
        (nn.Embedding(10, 4, dtype=torch.float64), "its weights are torch.float64"),
        (OwnEmbedding(10, 4), "it is a OwnEmbedding, whose own forward would be lost"),
        (TiedHead(), "its weights are tied to head.weight, which uses all rows at once"),
    ],
)
def test_what_cannot_move_is_refused_with_the_reason(module: nn.Module, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        tables.find(module, min_bytes=0)


@pytest.mark.parametrize("make", [lambda: nn.Embedding(20, 4), lambda: nn.EmbeddingBag(20, 4)])
@pytest.mark.parametrize("bad", [-1, 20, 10**12])
def test_an_id_outside_the_table_is_named(make: Any, bad: int) -> None:
    module, _, _ = moved(make())
    with pytest.raises(InvalidArgument, match=rf"id {bad} is outside the table weight, which has 20 rows"):
        module(torch.tensor([[1, bad]]))
    assert isinstance(module, Lookup | BagLookup)
