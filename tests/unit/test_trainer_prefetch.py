"""Rows of the next batches are asked for as soon as their ids can be computed, and a wrong guess changes no result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fields import dense, random_batch, sparse, varlen
from torch import Tensor, nn

from strata.data.map_style import map_loader
from strata.identity import Identity
from strata.trainer.graph import Graph, NeighborDataset
from strata.trainer.lookahead import LookAhead
from strata.trainer.models import DLRM, DeepFM, TwoTower, WideDeep
from strata.trainer.strategy import tables
from strata.trainer.strategy.base import Upcoming
from strata.trainer.strategy.dense_table import WIDTH, DenseTable
from strata.trainer.strategy.lookup import StepRows
from strata.trainer.strategy.prefetch import leaves_of
from strata.trainer.strategy.recipes import MAX_MISSES, NUM_BATCHES, Learner, matches
from strata.trainer.strategy.replicas import Alone
from strata.trainer.strategy.served import Served

NUM_IDS = 40


def numbers(*shape: int, seed: int, high: int = NUM_IDS) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# -- recipes -----------------------------------------------------------------------------------------------------------


def batch_of(seed: int, num_rows: int = 5) -> dict[str, Any]:
    return {
        "user": numbers(num_rows, seed=seed),
        "pair": (numbers(num_rows, 3, seed=seed + 1_000), numbers(num_rows, seed=seed + 2_000).to(torch.int32)),
        "price": torch.rand(num_rows),
    }


IDS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "a column": lambda batch: batch["user"],
    "a column of 32 bits, shifted": lambda batch: batch["pair"][1] + 7,
    "a matrix": lambda batch: batch["pair"][0],
    "a matrix with an offset per column": lambda batch: batch["pair"][0] + torch.tensor([0, 40, 80]),
    "a flat matrix with offsets": lambda batch: (batch["pair"][0] + torch.tensor([0, 40, 80])).reshape(-1),
    "a column of a matrix": lambda batch: batch["pair"][0][:, 1],
    "some columns in another order": lambda batch: batch["pair"][0][:, [2, 0]] + torch.tensor([1, 2]),
    "columns side by side": lambda batch: torch.cat([batch["user"][:, None], batch["pair"][0] + 40], 1),
    "columns one after the other": lambda batch: torch.cat([batch["user"], batch["pair"][1]]),
}


def learned(ids_of: Callable[[dict[str, Any]], Tensor], sizes: list[int]) -> Learner:
    learner = Learner()
    for seed, size in enumerate(sizes):
        batch = batch_of(seed, size)
        learner.observe(leaves_of(batch), ids_of(batch).reshape(-1).numpy().astype(np.int64))
    return learner


@pytest.mark.parametrize("name", sorted(IDS))
def test_a_recipe_for_columns_of_the_batch_is_learned_from_two_batches(name: str) -> None:
    recipe = learned(IDS[name], [5, 6]).recipe

    assert recipe is not None
    for num_rows in (1, 2, 9):
        batch = batch_of(50, num_rows)
        found = recipe.ids(leaves_of(batch))
        assert found is not None
        assert found.tolist() == IDS[name](batch).reshape(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 50)), min_size=1, max_size=6),
    st.integers(3, 8),
    st.booleans(),
)
def test_any_choice_of_columns_and_offsets_is_found(
    chosen: list[tuple[int, int]], num_rows: int, is_by_column: bool
) -> None:
    def ids_of(batch: dict[str, Any]) -> Tensor:
        every = torch.cat([batch["user"][:, None], batch["pair"][0], batch["pair"][1][:, None]], 1)
        found = torch.stack([every[:, column] + offset for column, offset in chosen], 1)
        return found.T if is_by_column else found

    recipe = learned(ids_of, [num_rows, num_rows + 1, num_rows]).recipe
    assert recipe is not None
    batch = batch_of(99, num_rows)
    found = recipe.ids(leaves_of(batch))
    assert found is not None
    assert found.tolist() == ids_of(batch).reshape(-1).tolist()


def test_padding_that_looks_like_another_column_in_one_batch_is_told_apart_by_the_next() -> None:
    learner = Learner()
    for user, padding in ((3, 0), (9, 1)):
        leaves = leaves_of({"user": torch.full((4,), user), "padding": torch.full((4,), padding)})
        learner.observe(leaves, np.full(4, padding + 10))

    assert learner.recipe is not None
    found = learner.recipe.ids(leaves_of({"user": torch.tensor([1, 2]), "padding": torch.tensor([5, 6])}))
    assert found is not None
    assert found.tolist() == [15, 16]


@pytest.mark.parametrize(
    "ids_of",
    [
        lambda batch: batch["user"] * 2,
        lambda batch: batch["user"].unique(),
        lambda batch: (batch["price"] * 10).long(),
        lambda batch: torch.arange(len(batch["user"])),
    ],
)
def test_other_ids_have_no_recipe_and_are_not_looked_for_again(ids_of: Any) -> None:
    learner = learned(ids_of, [5, 6])

    assert learner.recipe is None
    assert learner.is_done


def test_a_batch_without_the_columns_of_a_recipe_has_no_ids() -> None:
    recipe = learned(IDS["some columns in another order"], [5, 6]).recipe
    assert recipe is not None
    whole = leaves_of(batch_of(7))
    assert recipe.ids({}) is None
    assert recipe.ids({name: leaf[:, :1] if leaf.ndim == 2 else leaf for name, leaf in whole.items()}) is None


def test_batches_of_a_single_row_and_empty_ones_teach_nothing_wrong() -> None:
    assert list(matches({"user": np.array([3])}, np.array([4]))) == [(0, False)]
    learner = Learner()
    learner.observe({}, np.empty(0, np.int64))
    assert not learner.is_done


def test_a_recipe_that_keeps_missing_is_dropped() -> None:
    learner = learned(IDS["a column"], [5, 6])
    for _ in range(MAX_MISSES - 1):
        learner.guessed(is_right=False)
    learner.guessed(is_right=True)
    assert learner.recipe is not None
    for _ in range(MAX_MISSES):
        learner.guessed(is_right=False)
    assert learner.recipe is None


# -- prefetch ----------------------------------------------------------------------------------------------------------


class FakeServers:
    """Rows that never change, and a list of what was asked for."""

    def __init__(self, found: list[tables.FoundTable]) -> None:
        self._weights = {each.name: each.weight.detach().numpy().copy() for each in found}
        self.pulled: list[dict[str, list[int]]] = []
        self.asked: list[tuple[int, dict[str, list[int]]]] = []

    def pull(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        self.pulled.append({name: keys.tolist() for name, keys in wanted.items()})
        return self._rows(wanted)

    def ask(self, wanted: Mapping[str, Any], steps_ahead: int = 0) -> Any:
        self.asked.append((steps_ahead, {name: keys.tolist() for name, keys in wanted.items()}))
        return Answer(self._rows(wanted))

    def _rows(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        assert all((keys[1:] > keys[:-1]).all() for keys in wanted.values())
        return {name: self._weights[name][keys.astype(np.int64)] for name, keys in wanted.items()}


class Answer:
    def __init__(self, rows: dict[str, Any]) -> None:
        self._rows: dict[str, Any] | None = rows

    def rows(self) -> dict[str, Any]:
        assert self._rows is not None, "rows may be taken once"
        rows, self._rows = self._rows, None
        return rows


class Two(nn.Module):
    """Three lookups in two tables, one of them tied; `twist` changes the ids in a way that no recipe knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(NUM_IDS, 4)
        self.item = nn.Embedding(NUM_IDS, 4)
        self.same = nn.Embedding(NUM_IDS, 4)
        self.same.weight = self.item.weight
        self.twist = False

    def forward(self, user: Tensor, item: Tensor, other: Tensor) -> Tensor:
        if self.twist:
            item = (item * 3 + 1) % NUM_IDS
        return self.user(user) * self.item(item) + self.same(other)


def batch_of_two(seed: int, num_rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(numbers(num_rows, seed=10 * seed + column) for column in range(3))


def run(module: Two, num_batches: int, num_ahead: int, twisted: Any = (), most: int | None = None) -> FakeServers:
    """Train on batches with a window; outputs and gradients must be those of the plain module.

    Args:
        most: Batches for which rows that change are prefetched.
    """
    plain, found = copy.deepcopy(module), tables.find(module, min_bytes=0)
    servers = FakeServers(found)
    rows = StepRows(servers, frozen={each.name for each in found if each.is_frozen}, num_ahead=most)
    tables.replace(module, found, rows)
    batches = [batch_of_two(seed) for seed in range(num_batches)]
    for number, batch in enumerate(batches):
        module.twist = plain.twist = number in twisted
        window = batches[number : number + 1 + num_ahead]
        rows.prepare([Upcoming(each, ahead) for ahead, each in enumerate(window)])
        output, expected = module(*batch), plain(*batch)
        assert torch.equal(output, expected)
        output.sin().sum().backward()
        plain.zero_grad()
        expected.sin().sum().backward()
        for name, push in rows.take_gradients().items():
            weight = dict(plain.named_parameters())[name]
            torch.testing.assert_close(torch.from_numpy(push.gradients), weight.grad[push.keys.astype(np.int64)])
    return servers


def keys_of(*columns: Tensor) -> list[int]:
    return sorted({int(each) for column in columns for each in column})


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_each_batch_is_pulled_once_with_all_tables_for_the_step_that_uses_it(num_ahead: int) -> None:
    servers = run(Two(), 8, num_ahead)

    assert len(servers.pulled) == 3 * NUM_BATCHES, "the lookups of the first batches pull for themselves"
    batches = [batch_of_two(seed) for seed in range(8)]
    wanted = [{"user.weight": keys_of(u), "item.weight": keys_of(i, o)} for u, i, o in batches]
    assert [keys for _, keys in servers.asked] == wanted[NUM_BATCHES:]
    assert [ahead for ahead, _ in servers.asked] == [*range(num_ahead), *[num_ahead] * (6 - num_ahead)]


def test_rows_of_frozen_tables_are_asked_for_early_without_staleness() -> None:
    module = Two()
    module.user.requires_grad_(False)
    servers = run(module, 6, num_ahead=2, most=0)

    users, items = ([keys_of(*batch_of_two(seed)[chosen]) for seed in range(6)] for chosen in (slice(1), slice(1, 3)))
    assert [(ahead, keys["user.weight"]) for ahead, keys in servers.asked if "user.weight" in keys] == [
        (0, each) for each in users[NUM_BATCHES:]
    ]
    assert [(ahead, keys["item.weight"]) for ahead, keys in servers.asked if "item.weight" in keys] == [
        (0, each) for each in items[NUM_BATCHES:]
    ]
    assert [sorted(keys) for _, keys in servers.asked[:4]] == [
        ["item.weight", "user.weight"],
        ["user.weight"],
        ["user.weight"],
        ["item.weight"],
    ], "the users of two later batches, and the items of a batch when it is its turn"


def test_rows_that_were_not_guessed_are_pulled_at_the_lookup_and_those_that_were_are_not() -> None:
    servers = run(Two(), 6, 1, twisted={4})

    (_, item, other), twisted = batch_of_two(4), servers.pulled[3 * NUM_BATCHES :]
    missing = {int(each) * 3 % NUM_IDS + 1 for each in item} - set(keys_of(item, other))
    assert twisted == [{"item.weight": sorted({each % NUM_IDS for each in missing} - set(keys_of(item, other)))}]


def test_a_module_that_changes_its_ids_for_good_stops_prefetching_the_wrong_ones() -> None:
    servers = run(Two(), 14, 1, twisted=range(4, 14))

    last = servers.asked[-1][1]
    user, _, other = batch_of_two(13)
    assert last == {"user.weight": keys_of(user), "item.weight": keys_of(other)}


class Shifting(nn.Module):
    """Changes its inputs in place, which are the tensors of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_IDS + 1, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids.add_(1))
        return out


def test_a_batch_that_changes_under_our_hands_gets_the_right_rows() -> None:
    module = Shifting()
    weight = module.table.weight.detach().clone()
    found = tables.find(module, min_bytes=0)
    rows = StepRows(FakeServers(found))
    tables.replace(module, found, rows)
    batches = [numbers(5, seed=seed) for seed in range(10)]
    for number, batch in enumerate(batches):
        expected = weight[batch + 1]
        rows.prepare([Upcoming(each, 0) for each in batches[number : number + 3]])
        assert torch.equal(module(batch), expected)
        rows.take_gradients()


def test_evaluations_between_batches_pull_for_themselves() -> None:
    module = Two()
    found = tables.find(module, min_bytes=0)
    servers = FakeServers(found)
    rows = StepRows(servers)
    tables.replace(module, found, rows)
    for seed in range(4):
        rows.prepare([Upcoming(batch_of_two(seed), 0)])
        with torch.no_grad():
            module(*batch_of_two(77))
        module(*batch_of_two(seed)).sum().backward()
        rows.take_gradients()
        before = len(servers.pulled)
        module(*batch_of_two(seed))  # its rows may have changed since
        assert len(servers.pulled) == before + 3
        rows.take_gradients()


FIELDS = [sparse("a", 20), sparse("b", 30), dense("x", 2), varlen("tags", 15, 4), sparse("c", 25)]


@pytest.mark.parametrize(
    "module",
    [
        DeepFM(FIELDS, embedding_dim=4, hidden=(8,)),
        WideDeep(FIELDS, embedding_dim=4, hidden=(8,)),
        DLRM(FIELDS, embedding_dim=4),
        TwoTower(FIELDS, user=["a", "tags"], item=["b", "c", "x"], embedding_dim=4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_all_lookups_of_the_reference_models_are_prefetched(module: nn.Module) -> None:
    found = tables.find(module, min_bytes=0)
    servers = FakeServers(found)
    rows = StepRows(servers)
    tables.replace(module, found, rows)
    for seed in range(NUM_BATCHES + 2):
        if seed == NUM_BATCHES:
            servers.pulled.clear()
        batch = random_batch(FIELDS, 16, seed=seed)
        rows.prepare([Upcoming({**batch, "clicked": torch.rand(16)}, 0)])
        module(batch)
        rows.take_gradients()

    assert servers.pulled == []
    assert len(servers.asked) == 2
    assert servers.asked[-1][1].keys() == {table.name for table in found}


class Nodes(nn.Module):
    """Learned vectors of all nodes, and the mean over the sampled ones."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(num_nodes, 4)

    def forward(self, nodes: Tensor, edge_index: Tensor, num_seeds: int) -> Tensor:
        vectors = self.vectors(nodes)
        gathered = torch.zeros_like(vectors).index_add(0, edge_index[1], vectors[edge_index[0]])
        return (vectors + gathered)[:num_seeds]


def test_nodes_that_a_sampler_found_are_prefetched() -> None:
    random = np.random.default_rng(0)
    graph = Graph.from_edges(*random.integers(0, 200, (2, 900)), 200, undirected=True)
    dataset = NeighborDataset(graph, np.arange(200), labels=np.arange(200) % 3, fanouts=(4, 3))
    loader = LookAhead(
        map_loader(dataset, ranks=Identity(), batch_size=16, shuffle=True, collate_fn=dataset.collate_fn)
    )
    module = Nodes(200)
    found = tables.find(module, min_bytes=0)
    servers = FakeServers(found)
    rows = StepRows(servers)
    tables.replace(module, found, rows)
    batches = iter(loader)
    num_nodes = []
    for batch in batches:
        rows.prepare([Upcoming(each, ahead) for ahead, each in enumerate([batch, *batches.upcoming(2)])])
        module(batch["nodes"], batch["edge_index"], batch["num_seeds"])
        rows.take_gradients()
        num_nodes.append(len(set(batch["nodes"].tolist())))

    assert len(servers.pulled) == NUM_BATCHES
    assert [len(keys["vectors.weight"]) for _, keys in servers.asked] == num_nodes[NUM_BATCHES:]


# -- looking ahead -----------------------------------------------------------------------------------------------------


def loader_of(num_rows: int = 25, *, wraps: bool = True, failing: int = -1) -> Any:
    def collated(rows: list[int]) -> list[int]:
        if failing in rows:
            raise ValueError("a damaged row")
        return rows

    loader = map_loader(list(range(num_rows)), ranks=Identity(), batch_size=4, shuffle=True, collate_fn=collated)
    return LookAhead(loader) if wraps else loader


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=9), st.integers(0, 2), st.integers(0, 26))
def test_the_position_counts_delivered_batches_only(looks: list[int], epoch: int, num_rows: int) -> None:
    plain, ours = loader_of(num_rows, wraps=False), loader_of(num_rows)
    for each in (plain, ours):
        each.set_epoch(epoch)
    theirs, batches = iter(plain), iter(ours)
    assert (ours.position, ours.state_dict()) == (plain.position, plain.state_dict())
    for number in looks:
        following = batches.upcoming(number)
        assert len(following) <= number
        expected, found = next(theirs, None), next(batches, None)
        assert found == expected
        assert found is None or not following or following[0] == found
        assert (ours.position, ours.state_dict()) == (plain.position, plain.state_dict())

    resumed, again = loader_of(num_rows), loader_of(num_rows, wraps=False)
    resumed.load_state_dict(ours.state_dict())
    again.load_state_dict(plain.state_dict())
    assert list(resumed) == list(again)


def test_every_epoch_is_delivered_whole_and_its_end_is_saved() -> None:
    plain, ours = loader_of(wraps=False), loader_of()
    for epoch in range(3):
        for each in (plain, ours):
            each.set_epoch(epoch)
        delivered = []
        batches = iter(ours)
        for batch in batches:
            batches.upcoming(3)
            delivered.append(batch)
        assert delivered == list(plain)
        assert ours.state_dict() == plain.state_dict()
        assert next(batches, None) is None
    assert len(ours) == len(plain)


def test_an_error_of_the_loader_is_raised_in_its_place() -> None:
    order = [row for batch in loader_of() for row in batch]
    batches = iter(loader_of(failing=order[9]))

    assert len(batches.upcoming(5)) == 2
    assert [next(batches), next(batches)] == [order[:4], order[4:8]]
    with pytest.raises(ValueError, match="a damaged row"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


# -- dense parameters --------------------------------------------------------------------------------------------------


class FakeLink:
    """A server whose dense parameters are the number of the last push."""

    def __init__(self) -> None:
        self.clock = 0
        self.asked: list[int] = []

    def pull(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask(wanted).rows()

    def ask(self, wanted: Mapping[str, Any], steps_ahead: int = 0) -> Answer:
        self.asked.append(self.clock + steps_ahead)
        return Answer({name: np.full((len(keys), WIDTH), self.clock, np.float32) for name, keys in wanted.items()})

    def push(self, gradients: Mapping[str, Any], rates: Mapping[str, float]) -> None:
        assert gradients.keys() == {"dense.0"}
        assert rates == {}
        self.clock += 1

    def wait(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_dense_parameters_are_asked_for_as_many_steps_early_as_the_staleness_allows(num_ahead: int) -> None:
    module, link = nn.Linear(3, 2), FakeLink()
    dense = DenseTable("dense.0", list(module.parameters()))
    bound = Served(
        module,
        [],
        [dense],
        link,
        is_synchronous=False,
        num_ahead=0,
        dense_ahead=num_ahead,
        rates=dict,
        bind=Alone,
    )
    bound.begin()
    used = []
    for _ in range(5):
        used.append(module.bias[0].item())
        bound.push()

    assert used == [max(step - num_ahead, 0) for step in range(5)]
    assert link.asked == list(range(6 + num_ahead)), "one pull for each step, with the clock of the step"
    bound.finish()
    assert module.bias[0].item() == 5, "an evaluation uses all pushes"
