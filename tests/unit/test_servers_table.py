"""Tables of parameter servers: any sequence of pulls, pushes and evictions equals a dictionary of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from strata.errors import InvalidArgument, LimitExceeded
from strata.servers.table import native
from strata.servers.table.index import ABSENT, KeyIndex
from strata.servers.table.initial import Initial
from strata.servers.table.keys import NUM_BUCKETS, buckets, unique
from strata.servers.table.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad
from strata.servers.table.sketch import CountSketch
from strata.servers.table.table import NotFiniteGradient, Table, TableSpec
from strata.trainer.optimizer import ftrl

WIDTH = 3
KEYS = st.integers(0, 2**64 - 1)
UNIFORM = [
    [-0.46892163157463074, -0.8240464925765991],
    [-0.2002270370721817, -0.1077856793999672],
    [0.4114629626274109, 0.15236341953277588],
]
NORMAL = [
    [0.7382809519767761, 0.07120321691036224, 0.19542931020259857],
    [0.9097792506217957, -1.5477936267852783, 0.26841670274734497],
    [-1.3283534049987793, -0.3252529501914978, 0.6257678270339966],
]


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in native.KERNELS:
        monkeypatch.setattr(native, name, None)


def keys_of(*keys: int) -> np.ndarray[Any, Any]:
    return np.array(keys, np.uint64)


def bits(table: Table) -> list[bytes]:
    rows: Any = table.rows()
    return [array.tobytes() for array in rows]


# -- keys --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(0, 9), KEYS)))
def test_unique_groups_the_positions_of_every_key(batch: list[int]) -> None:
    found = unique(keys_of(*batch))

    assert found.keys.tolist() == sorted(set(batch))
    assert found.keys[found.inverse].tolist() == batch
    ends = [*found.starts, len(batch)][1:]
    for key, start, end in zip(found.keys, found.starts, ends, strict=True):
        assert found.positions[start:end].tolist() == [at for at, each in enumerate(batch) if each == key]


@pytest.mark.skipif(native.group is None, reason="numba is not installed")
@pytest.mark.parametrize("most", [1, 2, 300, 10**7, 2**40, 2**64 - 1])
@pytest.mark.parametrize("num", [4_095, 4_096, 5_001])
def test_large_batches_are_grouped_in_the_same_way_with_and_without_numba(
    monkeypatch: pytest.MonkeyPatch, most: int, num: int
) -> None:
    keys = np.random.default_rng(num).integers(0, most, num, np.uint64)
    ours = unique(keys)
    without_kernels(monkeypatch)
    assert [each.tolist() for each in ours] == [each.tolist() for each in unique(keys)]
    assert (ours.keys[ours.inverse] == keys).all()


def test_buckets_are_balanced_for_consecutive_and_for_strided_ids() -> None:
    for stride in (1, 4_096, 2**32):
        counts = np.bincount(buckets(np.arange(400_000, dtype=np.uint64) * np.uint64(stride)), minlength=NUM_BUCKETS)
        assert counts.min() > 50
        assert counts.max() < 160


# -- index -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["none", "remove", "swap", "add"])
def test_keys_that_are_their_own_slots_are_found_and_so_are_others_after_a_change(change: str) -> None:
    index = KeyIndex(10)
    index.add(np.arange(5, dtype=np.uint64))
    expected = {key: key for key in range(5)}
    if change == "remove":
        index.remove(np.array([2, 3], np.int32))
        index.add(keys_of(2**40))
        expected = {0: 0, 1: 1, 4: 4, 2**40: 2}
    elif change == "swap":
        index.swap(np.array([0], np.int32), np.array([4], np.int32))
        expected |= {0: 4, 4: 0}
    elif change == "add":
        index.add(keys_of(7, 5))
        expected |= {7: 5, 5: 6}
    wanted = [0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 2**32, 2**40, 2**64 - 1]
    assert index.find(keys_of(*wanted)).tolist() == [expected.get(key, ABSENT) for key in wanted]


class IndexMachine(RuleBasedStateMachine):
    """An index against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex(5_000)
        self.slots: dict[int, int] = {}

    @rule(keys=st.sets(st.one_of(st.integers(0, 50), KEYS), max_size=40), copies=st.integers(1, 40))
    def add(self, keys: set[int], copies: int) -> None:
        many = {key ^ (copy << 57) for key in keys for copy in range(copies)}
        fresh = sorted(many - self.slots.keys())[: 5_000 - len(self.slots)]
        for key, slot in zip(fresh, self.index.add(keys_of(*fresh)).tolist(), strict=True):
            assert slot not in self.slots.values()
            self.slots[key] = slot

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.slots:
            gone = data.draw(st.sets(st.sampled_from(sorted(self.slots)), max_size=60))
            self.index.remove(np.array([self.slots.pop(key) for key in gone], np.int32))

    @invariant()
    def finds_what_is_there(self) -> None:
        keys = [*self.slots, 2**63 + 12_345]
        expected = [*self.slots.values(), self.slots.get(2**63 + 12_345, ABSENT)]
        assert self.index.find(keys_of(*keys)).tolist() == expected
        assert len(self.index) == len(self.slots)
        assert self.index.slots().tolist() == sorted(self.slots.values())


@pytest.mark.usefixtures("kernels")
def test_an_index_finds_what_a_dictionary_finds() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))


def test_an_index_that_is_full_adds_nothing() -> None:
    index = KeyIndex(3)
    index.add(keys_of(1, 2))

    with pytest.raises(LimitExceeded, match="max_rows=3; raise it"):
        index.add(keys_of(3, 4))

    assert len(index) == 2
    assert index.find(keys_of(3, 4)).tolist() == [ABSENT, ABSENT]


@pytest.mark.parametrize("batch", [524_289, 60_000, 300_000])
def test_an_index_takes_at_most_25_bytes_per_row(batch: int) -> None:
    index = KeyIndex(2_000_000)
    for start in range(0, 1_200_000, batch):
        index.add(np.arange(start, start + batch, dtype=np.uint64))
        assert index.num_bytes <= 25.1 * len(index)


# -- initial values ----------------------------------------------------------------------------------------------------


@given(
    st.lists(KEYS, min_size=1, max_size=20, unique=True), st.integers(0, 2**63), st.sampled_from(["uniform", "normal"])
)
def test_initial_values_depend_on_seed_and_key_alone(keys: list[int], seed: int, kind: Any) -> None:
    initial = Initial(kind=kind, seed=seed)
    together = initial.values(keys_of(*keys), WIDTH)

    for key, row in zip(keys, together, strict=True):
        assert initial.values(keys_of(key), WIDTH).tolist() == [row.tolist()]
        assert initial.values(keys_of(key), WIDTH - 1)[0].tolist() == row[: WIDTH - 1].tolist()


def test_initial_values_have_the_distribution_that_was_asked_for() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    normal = Initial(kind="normal", scale=0.5).values(keys, 8)
    uniform = Initial(kind="uniform", scale=0.5).values(keys, 8)

    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 0.5) < 0.01
    assert abs(np.corrcoef(normal.T) - np.eye(8)).max() < 0.03
    assert -0.5 <= uniform.min() < -0.499
    assert 0.499 < uniform.max() <= 0.5
    assert abs(uniform.mean()) < 0.01
    assert not np.array_equal(normal, Initial(kind="normal", scale=0.5, seed=1).values(keys, 8))


@pytest.mark.parametrize("quantile", [-3, -2, -1, 0, 0.5, 1.5, 2.5, 3.5])
@pytest.mark.usefixtures("kernels")
def test_normal_values_have_the_quantiles_of_the_normal_distribution(quantile: float) -> None:
    values = Initial(kind="normal", scale=1.0, seed=9).values(np.arange(60_000, dtype=np.uint64), 33)
    expected = 0.5 * math.erfc(-quantile / math.sqrt(2))

    for column in (values, values[:, ::2], values[:, 1::2]):
        spread = math.sqrt(expected * (1 - expected) / column.size)
        assert abs((column <= quantile).mean() - expected) < 4 * spread


def test_the_polynomials_of_normal_values_are_close_to_the_functions_that_they_stand_for() -> None:
    angles = np.linspace(-math.pi / 2, math.pi / 2, 10_001)
    mantissas = np.linspace(math.sqrt(0.5), math.sqrt(2), 10_001)[:-1]

    assert abs(native.sine(angles) - np.sin(angles)).max() < 1e-10
    assert abs(native.cosine(angles) - np.cos(angles)).max() < 1e-10
    for power in (-33, -2, -1):
        expected = np.sqrt(-2 * (np.log(mantissas) + power * math.log(2)))
        assert abs(native.radius(mantissas, power, 1.0) - expected).max() < 1e-9


@pytest.mark.skipif(native.find is None, reason="numba is not installed")
@given(
    st.lists(KEYS, max_size=20),
    st.sampled_from(["uniform", "normal", "zeros"]),
    st.integers(0, 2**63),
    st.floats(0, 10),
    st.integers(1, 65),
)
def test_initial_values_have_the_same_bits_with_numba_and_numpy(
    keys: list[int], kind: Any, seed: int, scale: float, width: int
) -> None:
    initial = Initial(kind=kind, seed=seed, scale=scale)
    many = np.concatenate([keys_of(*keys), np.arange(seed % 1_000, seed % 1_000 + 100, dtype=np.uint64)])
    compiled = initial.values(many, width)

    with pytest.MonkeyPatch.context() as patched:
        without_kernels(patched)
        assert initial.values(many, width).tobytes() == compiled.tobytes()


@pytest.mark.usefixtures("kernels")
def test_initial_values_of_known_keys_never_change() -> None:
    """Checkpoints do not store the values of rows without a gradient."""
    keys = keys_of(0, 1, 2**64 - 1)

    assert Initial(kind="uniform", scale=1.0, seed=3).values(keys, 2).tolist() == UNIFORM
    assert Initial(kind="normal", scale=1.0, seed=3).values(keys, 3).tolist() == NORMAL


# -- optimizers --------------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (
        Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    ),
    "adam": (LazyAdam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    "ftrl": (FTRL(lr=0.1, l1=0.02, l2=0.01), lambda p: ftrl.FTRL(p, lr=0.1, l1=0.02, l2=0.01)),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_of_rows_makes_the_same_updates_as_torch_with_sparse_gradients(name: str) -> None:
    ours, make = PAIRS[name]
    generator = np.random.default_rng(0)
    table = Table(TableSpec(name="t", width=WIDTH, optimizer=ours, initial=Initial(scale=1.0)))
    keys = np.arange(10, dtype=np.uint64)
    embedding = torch.nn.Embedding(10, WIDTH, sparse=True)
    embedding.weight.data.copy_(torch.from_numpy(table.pull(keys)))
    theirs = make(embedding.parameters())

    for step in range(1, 8):
        ids = np.sort(generator.choice(10, size=4, replace=False)).astype(np.uint64)
        gradients = generator.normal(size=(4, WIDTH)).astype(np.float32)
        table.push(ids, gradients, step)
        theirs.zero_grad()
        (embedding(torch.from_numpy(ids.astype(np.int64))) * torch.from_numpy(gradients)).sum().backward()
        theirs.step()

    np.testing.assert_allclose(table.pull(keys), embedding.weight.detach().numpy(), rtol=2e-6, atol=2e-7)


@pytest.mark.usefixtures("kernels")
def test_row_wise_adagrad_keeps_one_sum_per_row() -> None:
    table = Table(
        TableSpec(name="t", width=2, optimizer=RowWiseAdagrad(lr=1.0, eps=0.0), initial=Initial(kind="zeros"))
    )

    table.push(keys_of(7), np.array([[3.0, 4.0]], np.float32), 1)

    assert table.rows().state.tolist() == [[12.5]]
    np.testing.assert_allclose(table.pull(keys_of(7))[0], -np.array([3, 4]) / np.sqrt(12.5), rtol=1e-6)


@pytest.mark.skipif(native.find is None, reason="numba is not installed")
@pytest.mark.parametrize("name", PAIRS)
def test_numba_and_numpy_compute_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[bytes]:
        table = Table(TableSpec(name="t", width=16, optimizer=PAIRS[name][0]))
        generator = np.random.default_rng(3)
        for step in range(1, 6):
            ids = np.sort(generator.choice(500, size=200, replace=False)).astype(np.uint64)
            table.push(ids, generator.normal(size=(200, 16)).astype(np.float32), step)
        return bits(table)

    compiled = train()
    without_kernels(monkeypatch)
    assert train() == compiled


@pytest.mark.parametrize("make", [SGD, Adagrad, RowWiseAdagrad, LazyAdam, FTRL])
@pytest.mark.parametrize("lr", [-1.0, float("nan"), "fast"])
def test_an_optimizer_refuses_a_learning_rate_that_is_none(make: Any, lr: Any) -> None:
    with pytest.raises(InvalidArgument, match="lr="):
        make(lr=lr)


# -- table -------------------------------------------------------------------------------------------------------------


class TableMachine(RuleBasedStateMachine):
    """A table with SGD against a dictionary of rows."""

    max_rows = 12
    spec = TableSpec(name="t", width=WIDTH, optimizer=SGD(lr=0.5), max_rows=max_rows, evict_after=3)

    def __init__(self) -> None:
        super().__init__()
        self.table = self.new_table()
        self.rows: dict[int, np.ndarray[Any, Any]] = {}
        self.versions: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.clock = 0

    def new_table(self) -> Table:
        return Table(self.spec)

    def initial(self, key: int) -> Any:
        return self.spec.initial.values(keys_of(key), WIDTH)[0]

    def forget(self, key: int) -> None:
        for each in (self.rows, self.versions, self.counts):
            del each[key]

    @rule(keys=st.sets(st.integers(0, 30), max_size=8), seed=st.integers(0, 99))
    def push(self, keys: set[int], seed: int) -> None:
        self.clock += 1
        ids = sorted(keys)
        gradients = np.random.default_rng(seed).normal(size=(len(ids), WIDTH)).astype(np.float32)
        num_over = len(self.rows) + len(keys - self.rows.keys()) - self.max_rows
        old = [key for key in self.rows.keys() - keys if self.versions[key] <= self.clock - 3]
        if num_over > len(old):
            with pytest.raises(LimitExceeded):
                self.table.push(keys_of(*ids), gradients, self.clock)
            return
        if num_over > 0:
            for key in sorted(old, key=lambda key: (self.versions[key], self.counts[key], key))[:num_over]:
                self.forget(key)
        assert self.table.push(keys_of(*ids), gradients, self.clock) == len(ids)
        for key, gradient in zip(ids, gradients, strict=True):
            self.rows[key] = self.rows.get(key, self.initial(key)) - np.float32(0.5) * gradient
            self.versions[key] = self.clock
            self.counts[key] = self.counts.get(key, 0) + 1

    @rule(keys=st.lists(st.integers(0, 30), max_size=8))
    def pull(self, keys: list[int]) -> None:
        rows = self.table.pull(keys_of(*keys))
        expected = [self.rows.get(key, self.initial(key)) for key in keys]
        assert rows.tolist() == [row.tolist() for row in expected]

    @rule(keys=st.sets(st.integers(0, 30), max_size=4))
    def remove(self, keys: set[int]) -> None:
        self.table.remove(keys_of(*keys))
        for key in keys & self.rows.keys():
            self.forget(key)

    @rule()
    def save_and_load(self) -> None:
        saved = self.table.rows()
        self.table = self.new_table()
        self.table.put(saved)

    @invariant()
    def holds_the_same_rows(self) -> None:
        keys = sorted(self.rows)
        saved = self.table.rows()
        assert saved.keys.tolist() == keys
        assert saved.weights.tolist() == [self.rows[key].tolist() for key in keys]
        assert saved.versions.tolist() == [self.versions[key] for key in keys]
        assert saved.counts.tolist() == [self.counts[key] for key in keys]
        assert len(self.table) == len(keys)
        since = self.clock - 2
        changed = [key for key in keys if self.versions[key] > max(since, -1)]
        assert self.table.rows(since=since).keys.tolist() == (changed if since >= 0 else keys)


@pytest.mark.usefixtures("kernels")
def test_a_table_holds_what_a_dictionary_holds() -> None:
    run_state_machine_as_test(TableMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))


def test_a_pull_creates_no_row() -> None:
    table = Table(TableSpec(name="t", width=WIDTH))
    table.pull(keys_of(1, 2, 3))
    assert len(table) == 0


def test_an_id_gets_a_row_when_enough_batches_contained_it() -> None:
    table = Table(TableSpec(name="t", width=WIDTH, admit_after=3))
    gradient = np.ones((1, WIDTH), np.float32)

    applied = [table.push(keys_of(5), gradient, clock) for clock in range(1, 5)]

    assert applied == [0, 0, 1, 1]
    assert table.rows().counts.tolist() == [2]


def test_a_gradient_that_is_not_finite_is_refused_with_its_id_and_changes_nothing() -> None:
    table = Table(TableSpec(name="users", width=WIDTH))
    gradients = np.ones((3, WIDTH), np.float32)
    table.push(keys_of(1, 2, 3), gradients, 1)
    before = bits(table)
    gradients[1, 2] = np.nan

    with pytest.raises(NotFiniteGradient, match="id 2 of table 'users' is not finite"):
        table.push(keys_of(1, 2, 3), gradients, 2)

    assert bits(table) == before


def test_gradients_whose_sum_overflows_are_finite() -> None:
    table = Table(TableSpec(name="t", width=WIDTH))
    largest = np.full((4, WIDTH), np.finfo(np.float32).max, np.float32)
    assert table.push(keys_of(1, 2, 3, 4), largest, 1) == 4


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("is_checked", [False, True])
def test_gradients_of_another_shape_are_refused(is_checked: bool) -> None:
    table = Table(TableSpec(name="t", width=WIDTH))
    with pytest.raises(InvalidArgument, match=r"\[2, 4\] do not fit 2 keys of table 't' with width 3"):
        table.push(keys_of(1, 2), np.ones((2, 4), np.float32), 1, is_checked=is_checked)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, WIDTH), (2, WIDTH - 1), (3, WIDTH)])
def test_a_pull_refuses_room_of_another_shape(shape: tuple[int, int]) -> None:
    table = Table(TableSpec(name="t", width=WIDTH))
    table.push(keys_of(1, 2), np.ones((2, WIDTH), np.float32), 1)
    with pytest.raises(InvalidArgument, match="do not fit 2 keys"):
        table.pull(keys_of(1, 2), np.empty(shape, np.float32))


def test_reserved_rows_take_no_memory_until_they_are_used() -> None:
    table = Table(TableSpec(name="t", width=64, max_rows=100_000_000, optimizer=RowWiseAdagrad()))
    table.push(np.arange(1_000, dtype=np.uint64), np.ones((1_000, 64), np.float32), 1)
    assert table.num_bytes < 1_000 * table.spec.row_bytes * 1.15


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(), LazyAdam()])
def test_a_million_rows_take_at_most_15_percent_more_than_weights_and_state(optimizer: Any) -> None:
    num, width = 1_000_000, 64
    table = Table(TableSpec(name="t", width=width, optimizer=optimizer, initial=Initial(kind="zeros"), max_rows=num))
    gradients = np.zeros((50_000, width), np.float32)
    for start in range(0, num, len(gradients)):
        table.push(np.arange(start, start + len(gradients), dtype=np.uint64), gradients, 1)

    assert table.num_bytes <= 1.15 * 4 * num * (width + optimizer.state_width(width))
    assert table.num_bytes <= num * table.spec.row_bytes


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64])
def test_a_pull_mixes_rows_and_initial_values_at_any_width(width: int) -> None:
    table = Table(TableSpec(name="t", width=width))
    keys = np.arange(100, dtype=np.uint64)
    table.push(keys[::2], np.ones((50, width), np.float32), 1)
    expected = table.spec.initial.values(keys, width)
    expected[::2] -= np.float32(0.01)

    room = np.full((100, width), np.nan, np.float32)
    assert table.pull(keys, room) is room
    assert room.tolist() == expected.tolist()
    assert table.pull(keys[:0]).shape == (0, width)


@given(st.lists(st.sets(KEYS, max_size=20), max_size=10))
def test_a_sketch_never_counts_too_little(batches: list[set[int]]) -> None:
    sketch = CountSketch(num_cells=64)
    for number, batch in enumerate(batches):
        counts = sketch.add(keys_of(*sorted(batch)))
        for key, count in zip(sorted(batch), counts.tolist(), strict=True):
            assert count >= sum(key in each for each in batches[: number + 1])
