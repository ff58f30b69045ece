"""An id program returns the ids that the lookups of a module will see, without running the module."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fields import PlainField, dense, random_batch, sparse, varlen
from torch import Tensor, nn
from torch.nn import functional

from strata.errors import InvalidArgument
from strata.trainer.batches import Batch, Splitter
from strata.trainer.models import DLRM, FM, FNN, LR, PNN, DCNv2, DeepFM, InBatchSoftmax, TwoTower, WideDeep
from strata.trainer.strategy import id_program, tables
from strata.trainer.strategy.id_program import IdProgram, NotTraceable
from strata.trainer.strategy.lookup import Found as FoundRows
from strata.trainer.strategy.lookup import StepRows

Found = list[tuple[str, Tensor]]


class SeenIds(StepRows):
    """Returns rows of zeros and keeps the ids of all lookups."""

    def __init__(self) -> None:
        self.seen: Found = []
        self.widths: dict[str, int] = {}

    def rows_of(self, table: str, ids: Tensor) -> FoundRows:
        self.seen.append((table, ids.clone()))
        rows = torch.zeros(1, self.widths[table], requires_grad=True)
        return FoundRows(rows, torch.zeros_like(ids, dtype=torch.int64), None)


def moved(module: nn.Module) -> tuple[nn.Module, SeenIds]:
    rows = SeenIds()
    found = tables.find(module, min_bytes=0)
    rows.widths = {each.name: each.width for each in found}
    return tables.replace(module, found, rows), rows


def check(module: nn.Module, *batches: Any, program: IdProgram | None = None, rows: SeenIds | None = None) -> IdProgram:
    """Compare the ids of a program with those of the forward pass. A batch is a tuple, or a dictionary of keywords."""
    if rows is None:
        module, rows = moved(module)
    program = program or IdProgram.of(module)
    for batch in batches:
        call = Batch(
            batch if isinstance(batch, tuple) else (), batch if isinstance(batch, dict) else {}, None, None, 0, 0
        )
        found = program.of_batch(call)
        rows.seen = []
        call.call(module)
        assert_same(found, rows.seen)
    return program


def assert_same(found: Found, expected: Found) -> None:
    assert [table for table, _ in found] == [table for table, _ in expected]
    for (table, ids), (_, seen) in zip(found, expected, strict=True):
        assert ids.dtype == seen.dtype, table
        assert ids.tolist() == seen.tolist(), table
        assert not ids.requires_grad


def refusal(module: nn.Module, *args: Any) -> str:
    module, _ = moved(module)
    with pytest.raises(NotTraceable) as caught:
        IdProgram.of(module)(*args)
    return caught.value.message


def ids(*shape: int, seed: int = 0, high: int = 20) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Base(nn.Module):
    """Two embeddings, a buffer and dense layers with state and randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 4)
        self.item = nn.EmbeddingBag(50, 4)
        self.register_buffer("offsets", torch.tensor([0, 10, 20]))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


# -- the shapes of a forward pass --------------------------------------------------------------------------------------


class Columns(Base):
    def forward(self, user: Tensor, item: Tensor, *, price: Tensor | None = None) -> Tensor:
        rows = self.user(user) + self.item(input=item)
        return self.head(rows if price is None else rows * price.unsqueeze(1))


def test_columns_are_passed_by_position_or_by_name() -> None:
    user, item = ids(4), ids(4, 3, seed=1)
    check(Columns(), (user, item), {"user": user, "item": item, "price": torch.ones(4)}, {"item": item, "user": user})


class Mappings(Base):
    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        assert "user" in batch, "no user"
        rows = self.user(batch["user"] % 50)
        if batch.get("item") is not None:
            rows = rows + self.item(batch["item"])
        for name, column in batch["history"].items():
            rows = rows + (self.user(column) if name.startswith("u") else self.item(column[:, None]))
        return self.head(rows)


def test_a_batch_may_be_a_nested_mapping() -> None:
    history = {"u1": ids(4, seed=5), "other": ids(4, seed=6)}
    first = {"user": ids(4, high=10**9), "item": ids(4, 2), "history": history}
    second = {"user": ids(4), "item": None, "history": {}}
    check(Mappings(), (first,), (second,), (first,))


def test_a_column_of_strings_does_not_matter() -> None:
    batches = [{"user": ids(4), "history": {}, "names": [f"name {at}"] * 4} for at in range(3)]
    program = check(Mappings(), *((batch,) for batch in batches))
    assert sum(map(len, program._paths.values())) == 1


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(30, 4) for name in ("a", "b")})
        self.more = nn.ModuleList(nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.LazyLinear(2)) for _ in range(2))

    def forward(self, pair: Pair, *columns: Tensor, **named: Tensor) -> Any:
        found = [table(named[name]) for name, table in self.tables.items()]
        found += [each(pair.right[at]) for at, each in enumerate(self.more)]
        found += [self.tables["a"](column) for column in columns]
        found += [self.tables["b"](column) for column in pair.left.unbind(1)]
        return found


def test_loops_over_modules_and_over_columns_are_followed() -> None:
    pair = Pair(ids(4, 3), [ids(4, 2), ids(4, 5)])
    module, rows = moved(Loops())
    program = IdProgram.of(module)
    for columns in ((), (ids(4), ids(4, seed=2))):
        found = program(pair, *columns, a=ids(4), b=ids(4))
        module(pair, *columns, a=ids(4), b=ids(4))
        assert_same(found, rows.seen)
        rows.seen = []


class Fields(Base):
    def __init__(self, training_only: bool = False) -> None:
        super().__init__()
        self.training_only = training_only

    def forward(self, matrix: Tensor) -> Tensor:
        b, n = matrix.shape
        shifted = (matrix + self.offsets).view(b, n)
        rows = self.user(shifted).sum(1)
        if self.training:
            rows = rows + self.item(torch.cat([shifted, shifted.flip(1)], dim=1))
        return self.head(rows)


def test_there_is_a_program_for_training_and_one_for_evaluation() -> None:
    module, rows = moved(Fields())
    program = IdProgram.of(module)
    for training, num_lookups in ((True, 2), (False, 1), (True, 2)):
        module.train(training)
        check(module, (ids(4, 3),), program=program, rows=rows)
        assert len(program(ids(4, 3))) == num_lookups


def test_buffers_are_read_in_every_call() -> None:
    module, rows = moved(Fields())
    program = check(module, (ids(4, 3),), rows=rows)
    module.offsets = torch.tensor([7, 8, 9])
    check(module, (ids(4, 3),), program=program, rows=rows)
    module.to("meta")
    assert program(ids(4, 3).to("meta"))[0][1].is_meta


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(20, 4)
        self.second = nn.Embedding(20, 4)
        self.second.weight = self.first.weight

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.first(a) * self.second(b) + self.first(b)
        return out


def test_tied_embeddings_and_a_lookup_that_is_called_twice_appear_in_the_order_of_calls() -> None:
    module, _ = moved(Tied())
    found = IdProgram.of(module)(torch.tensor([1]), torch.tensor([2]))
    assert [(table, each.tolist()) for table, each in found] == [
        ("first.weight", [1]),
        ("first.weight", [2]),
        ("first.weight", [2]),
    ]
    check(Tied(), (ids(4), ids(4, seed=1)))


def test_a_lookup_or_a_sequence_may_be_the_whole_module() -> None:
    check(nn.Embedding(20, 4), (ids(4),))
    check(nn.EmbeddingBag(20, 4), (ids(9), torch.tensor([0, 2, 2, 7])))
    check(nn.Sequential(nn.Flatten(), nn.Embedding(20, 4), nn.Flatten(), nn.Linear(16, 1)), (ids(3, 2, 2),))


def test_a_module_without_lookups_has_no_ids() -> None:
    assert IdProgram.of(nn.Linear(2, 1))(torch.ones(3, 2)) == []


class Wrapper(nn.Module):
    """As `torch.compile` wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_wrappers_of_torch_are_seen_through() -> None:
    module, rows = moved(Columns())
    assert_same(IdProgram.of(Wrapper(module))(ids(4), ids(4, 2)), IdProgram.of(module)(ids(4), ids(4, 2)))
    assert rows.seen == []


def test_the_ids_of_a_batch_of_the_trainer() -> None:
    module, rows = moved(Columns())
    splitter = Splitter(
        module,
        label="y",
        inputs=None,
        weight=None,
        parts={},
        binding=None,
        device=torch.device("cpu"),
        needs_target=True,
    )
    batch = splitter({"user": ids(4), "item": ids(4, 2), "price": torch.ones(4), "y": torch.ones(4)})
    found = IdProgram.of(module).of_batch(batch)
    batch.call(module)
    assert_same(found, rows.seen)


# -- control flow ------------------------------------------------------------------------------------------------------


class Conditions(Base):
    def forward(self, x: Tensor, top: int = 2) -> Tensor:
        if x.ndim == 1:
            x = x.unsqueeze(1)
        if x.dtype not in (torch.int64, torch.int16):
            x = x.long()
        if (x < 0).any():
            x = x.clamp(min=0)
        rows = sum(self.user(x[:, at]) for at in range(x.shape[1]))
        if len(x) > 3:
            rows = rows + self.item(x[:, :top])
        return rows


def test_conditions_on_inputs_give_a_path_each() -> None:
    batches = [(ids(4),), (ids(4, 3),), (ids(4, 3).int(),), (ids(4, 3) - 5,), (ids(2, 3), 1), (ids(4, 3, seed=3),)]
    program = check(Conditions(), *batches, *batches)
    assert sum(map(len, program._paths.values())) == 5


class Sizes(Base):
    def forward(self, x: Tensor) -> Tensor:
        b, n = x.size()
        with torch.no_grad():
            x = x + torch.zeros(b, n, dtype=x.dtype) + torch.arange(n) + torch.full((b, 1), 2)
        x = x.view(b, n)[: max(b, 1)].expand(b, n)
        noise = torch.rand(b, 4)
        return self.user(x).sum(1) + noise + self.item(x.new_zeros(b, n))


def test_sizes_are_not_decisions() -> None:
    program = check(Sizes(), *((ids(num_rows, length),) for num_rows, length in ((4, 3), (2, 3), (0, 3), (5, 7))))
    assert [path._decisions for paths in program._paths.values() for path in paths] == [(False,), (True,)]


def test_a_path_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    explore = IdProgram._explore
    monkeypatch.setattr(IdProgram, "_explore", lambda self, leaves: traced.append(1) or explore(self, leaves))
    module, rows = moved(Conditions())
    module.train()
    batches = [(ids(4, 3, seed=seed),) for seed in range(5)]
    check(module, *batches, rows=rows)
    num_traced = len(traced)
    check(module, *batches, rows=rows, program=IdProgram.of(module))
    assert len(traced) == 2 * num_traced


class Everywhere(Base):
    def forward(self, x: Tensor) -> Any:
        return self.user(x[: int(x.max())])


def test_values_that_differ_in_every_batch_are_refused() -> None:
    module, _ = moved(Everywhere())
    program = IdProgram.of(module)
    for at in range(id_program.MAX_PATHS):
        assert len(program(torch.tensor([0, at]))[0][1]) == min(at, 2)
    with pytest.raises(NotTraceable, match="forward has taken 64 different ways"):
        program(torch.tensor([0, 1000]))
    assert len(program(torch.tensor([0, 1]))) == 1  # what is known stays known


class DenseConditions(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.user(x)
        if not rows.shape[1] == 4:
            raise AssertionError  # pytest would inspect the values of an `assert`
        if torch.isnan(rows).any():
            raise ValueError("NaN")
        if rows.abs().max() > 3:
            rows = rows / 3
        return self.head(rows + self.item(x[:, None]))


def test_conditions_on_dense_values_do_no_harm_where_lookups_do_not_depend_on_them() -> None:
    check(DenseConditions(), (ids(4),))


class DenseChoice(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.user(x)
        return rows + self.item(x[:, None]) if rows.sum() > 0 else rows


def test_a_lookup_that_dense_values_decide_is_refused() -> None:
    reason = "forward decides by the rows of table 'user.weight' which lookups it makes"
    assert refusal(DenseChoice(), ids(4)) == reason


# -- what ids cannot depend on -----------------------------------------------------------------------------------------


class Steps(Base):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step
        self.scale = nn.Parameter(torch.ones(1))
        self.counts = torch.zeros(3)
        self.log: list[Any] = []
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.user(self.step(self, x))
        return found


def count_in_buffer(self: Any, x: Tensor) -> Tensor:
    self.offsets = self.offsets + 1
    return x + self.offsets[0]


def change_later(self: Any, x: Tensor) -> Tensor:
    x = x + self.offsets[0]
    self.offsets += 1
    return x


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "rows": (lambda self, x: self.item(x[:, None]).argmax(1), "the rows of table 'item.weight'"),
    "parameter": (lambda self, x: (x * self.scale).long(), "the parameter scale"),
    "layer": (lambda self, x: self.head(x).long(), r"the output of head.3 \(Linear\)"),
    "torch.rand": (lambda self, x: x + torch.randint(0, 3, (4,)), "random numbers"),
    "rand_like": (lambda self, x: x + torch.rand_like(x.float()).long(), "random numbers"),
    "bernoulli_": (lambda self, x: x * torch.empty(4).bernoulli_(0.5).long(), "random numbers"),
    "dropout": (lambda self, x: functional.dropout(x.float()).long(), "random numbers"),
    "permutation": (lambda self, x: x[torch.randperm(4)], "random numbers"),
    "Python": (lambda self, x: x + random.randrange(3), "draws random numbers from the generator of Python"),
    "numpy": (lambda self, x: x + int(np.random.randint(3)), "draws random numbers from the generator of numpy"),
    "in place": (lambda self, x: x.clamp_(max=3), "a tensor that forward changes in place"),
    "+=": (lambda self, x: x.__iadd__(1), "a tensor that forward changes in place"),
    "buffer": (lambda self, x: self.offsets.add_(1)[x % 3], "a tensor that forward changes in place"),
    "a changed buffer": (count_in_buffer, "ids depend on the buffer offsets, which forward changes"),
    "a buffer that changes later": (change_later, "ids depend on the buffer offsets, which forward changes"),
    "list of ids": (lambda self, x: [1, 2], "are a list, not a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ids_that_are_not_known_before_the_forward_pass_are_refused_with_the_reason(name: str) -> None:
    step, reason = REFUSED[name]
    x = torch.tensor([1, 2, 3, 9])
    with pytest.raises(NotTraceable, match=reason):
        IdProgram.of(moved(Steps(step))[0])(x)
    assert x.tolist() == [1, 2, 3, 9]


def own(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 5] = 0
    x += 1
    x.clamp_(max=4)
    return x


def later(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    self.item(x[:, None])
    x.add_(1)
    return x


def spoiled(self: Any, x: Tensor) -> Tensor:
    self.offsets.add_(1)
    self.offsets += 1
    self.counts += 1
    out = torch.zeros(4, 4)
    out[torch.arange(4)] = self.item(x[:, None])
    self.log.append(out)
    self.last = out
    return x


def reader(self: Any, x: Tensor) -> Tensor:
    return (x.to(self.scale.device) + len(self.scale) + self.head[0].weight.shape[0]) % self.user.num_embeddings


ACCEPTED: dict[str, Callable[..., Any]] = {
    "own tensors change in place": own,
    "ids change after a lookup": later,
    "other tensors change": spoiled,
    "shapes of parameters": reader,
    "arange": lambda self, x: x + torch.arange(len(x)),
    "a constant": lambda self, x: x + torch.tensor([1, 2, 3, 4]).to(x.device),
    "a plain tensor": lambda self, x: x + self.counts.long()[0],
    "a set": lambda self, x: x + 1 if int(x[0]) in {1, 2} else x + 2,
    "a dictionary by item": lambda self, x: x + {1: 5}[x[0].item()],
    "unpacking": lambda self, x: torch.stack([*x.unbind()]),
    "noise": lambda self, x: (self.item(x[:, None]) + torch.rand(4, 4), x)[1],
    "where": lambda self, x: torch.where(x > 2, x, torch.zeros_like(x)),
    "hashing": lambda self, x: torch.remainder((x * 2654435761) ^ (x >> 3), 50),
    "autocast": lambda self, x: functional.pad(x, (1, 1)).unique(),
    "out": lambda self, x: torch.add(x, 1, out=torch.empty_like(x)),
    "a bool": lambda self, x: x if x.is_floating_point() else x + 1,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_arithmetic_on_inputs_and_buffers_is_followed(name: str) -> None:
    module, rows = moved(Steps(ACCEPTED[name]))
    module.eval()
    check(module, (torch.tensor([1, 2, 3, 9]),), (torch.tensor([1, 5, 3, 9]),), rows=rows)


@pytest.mark.parametrize("name", ["own tensors change in place", "ids change after a lookup", "arange", "hashing"])
def test_a_batch_may_be_empty(name: str) -> None:
    module, rows = moved(Steps(ACCEPTED[name]))
    check(module, (ids(0),), (ids(4),), (ids(0),), rows=rows)


def test_forward_that_counts_its_calls_is_refused() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.num_calls

    module, _ = moved(Steps(count))
    program = IdProgram.of(module)
    for _ in range(2):  # the reason is kept, so the second call does not trace again
        with pytest.raises(NotTraceable, match="forward changes the attribute 'num_calls', on which ids may depend"):
            program(ids(4))
    assert module.num_calls == 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Steps(lambda self, x: x.no_such_method())

    def forward(self, x: Tensor) -> Any:
        return self.tower(x)


class ManyConditions(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.user(x)
        for at in range(8):
            rows = rows + 1 if rows[at].sum() > 0 else rows
        return rows


def test_too_many_conditions_on_dense_values_are_refused() -> None:
    reason = "forward decides by the rows of table 'user.weight' in more than 16 ways"
    assert refusal(ManyConditions(), ids(8)) == reason


def test_a_failure_names_the_submodule() -> None:
    assert refusal(Broken(), ids(4)).startswith("forward of submodule 'tower' cannot be traced: AttributeError: ")


def test_an_error_of_ours_is_raised_as_it_is() -> None:
    def refuse(self: Any, x: Tensor) -> Tensor:
        raise InvalidArgument("bad batch")

    with pytest.raises(InvalidArgument, match="bad batch"):
        IdProgram.of(moved(Steps(refuse))[0])(ids(4))


# -- no side effects ---------------------------------------------------------------------------------------------------


def snapshot(module: nn.Module) -> list[Any]:
    state = {name: each.clone() for name, each in module.state_dict(keep_vars=False).items()}
    attributes = [(name, {k: id(v) for k, v in each.__dict__.items()}) for name, each in module.named_modules()]
    generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return [{name: each.tolist() for name, each in state.items()}, attributes, generators]


@pytest.mark.parametrize("step", [spoiled, own, ACCEPTED["noise"], REFUSED["buffer"][0], REFUSED["numpy"][0]])
def test_neither_the_module_nor_random_numbers_change(step: Callable[..., Any]) -> None:
    class Model(Steps):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x))

    module, rows = moved(Model(step))
    program = IdProgram.of(module)
    x = ids(4)
    before = [snapshot(module), x.tolist(), list(module.log)]
    for _ in range(3):
        with contextlib.suppress(NotTraceable):
            program(x)
    assert [snapshot(module), x.tolist(), list(module.log)] == before
    assert rows.seen == []


def test_other_threads_may_run_modules_during_a_trace() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    failures: list[BaseException] = []
    is_done = threading.Event()

    def work() -> None:
        try:
            while not is_done.is_set():
                assert isinstance(layer(torch.ones(2, 3)), Tensor)
        except (AssertionError, RuntimeError, TypeError) as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            check(Fields(), (ids(4, 3),))
    finally:
        is_done.set()
        thread.join()
    assert failures == []


# -- the reference models ----------------------------------------------------------------------------------------------

FIELDS = [*(sparse(f"s{at}", 90 + at) for at in range(6)), dense("x", 3), varlen("tags", 40, 4), dense("y")]
SMALL: dict[str, Any] = {"embedding_dim": 8, "hidden": (16, 8), "batch_norm": True, "dropout": 0.2}


def two_tower(fields: list[PlainField], **options: Any) -> TwoTower:
    names = [each.name for each in fields]
    return TwoTower(fields, user=names[::2], item=names[1::2], **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LR": lambda: LR(FIELDS),
    "FM": lambda: FM(FIELDS, embedding_dim=8),
    "FNN": lambda: FNN(FIELDS, **SMALL),
    "PNN": lambda: PNN(FIELDS, product="both", **SMALL),
    "DeepFM": lambda: DeepFM(FIELDS, **SMALL),
    "WideDeep": lambda: WideDeep(FIELDS, **SMALL),
    "WideDeep of some fields": lambda: WideDeep(FIELDS, wide=["s1", "x"], deep=["s4", "s2", "tags"], **SMALL),
    "WideDeep with crosses": lambda: WideDeep(
        FIELDS, crosses=[("s0", "s1"), ("s1", "s2", "s5")], cross_buckets=10_000, **SMALL
    ),
    "DCNv2 parallel": lambda: DCNv2(FIELDS, **SMALL),
    "DCNv2 stacked": lambda: DCNv2(FIELDS, structure="stacked", low_rank=5, experts=3, **SMALL),
    "DCNv2 with own dimensions": lambda: DCNv2(FIELDS, **(SMALL | {"embedding_dim": None})),
    "DLRM": lambda: DLRM(FIELDS, bottom=(16,), **SMALL),
    "TwoTower": lambda: two_tower(FIELDS, output_dim=8, **SMALL),
    "InBatchSoftmax": lambda: InBatchSoftmax(
        two_tower(FIELDS, output_dim=8, **SMALL), item="s1", counts=torch.ones(91)
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_reference_models_are_traceable(name: str, training: bool) -> None:
    module = MODELS[name]().train(training)
    module, rows = moved(module)
    batches = [(random_batch(FIELDS, num_rows, seed=num_rows),) for num_rows in (8, 8, 5, 2)]
    program = check(module, *batches, rows=rows)
    assert len(rows.seen) == len(rows.widths) > 0
    assert sum(map(len, program._paths.values())) == 1


def test_a_batch_that_a_reference_model_refuses_is_refused_alike() -> None:
    module = MODELS["DeepFM"]()
    module, _ = moved(module)
    program = IdProgram.of(module)
    batch = random_batch(FIELDS, 4)
    for wrong in (batch | {"sparse": batch["sparse"][:, :3]}, {name: batch[name] for name in batch if name != "tags"}):
        with pytest.raises(InvalidArgument, match=r"batch\['sparse'\] has shape|the batch has no 'tags'"):
            program(wrong)
    assert len(program(batch)) == 2


# -- any module --------------------------------------------------------------------------------------------------------

NUM_IDS = 64
Step = Callable[["Random", Tensor], Tensor]
STEPS: dict[str, Step] = {
    "offset": lambda self, x: x + self.offset,
    "modulo": lambda self, x: x % 17,
    "hash": lambda self, x: ((x * 0x9E3779B1) ^ (x >> 2)).abs(),
    "reverse": lambda self, x: x.flip(0),
    "branch": lambda self, x: x + 1 if x.max() > 9 else x,
    "mask": lambda self, x: x.masked_fill(x % 2 == 0, 3),
    "in place": lambda self, x: (x * 1).add_(2),
    "shape": lambda self, x: x + len(x) + x.shape[0],
}


class Random(nn.Module):
    """Lookups of columns and of fields of a matrix, each after some steps."""

    def __init__(self, plan: list[tuple[str, str, tuple[str, ...]]]) -> None:
        super().__init__()
        self.plan = plan
        self.tables = nn.ModuleDict({name: nn.Embedding(NUM_IDS, 2) for name in "abc"})
        self.register_buffer("offset", torch.tensor(5))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, batch: dict[str, Tensor], extra: Tensor | None = None) -> Tensor:
        total = self.norm(torch.rand(len(batch["matrix"]), 2))
        for table, source, steps in self.plan:
            x = batch["matrix"][:, int(source)] if source.isdigit() else batch[source]
            if extra is not None:
                x = x + extra
            for step in steps:
                x = STEPS[step](self, x)
            total = total + self.tables[table](x % NUM_IDS)
        return total


def batches(seed: int, num_rows: int) -> Iterator[tuple[Any, ...]]:
    columns = {"matrix": ids(num_rows, 3, seed=seed), "one": ids(num_rows, seed=seed + 1), "two": ids(num_rows)}
    yield (columns,)
    yield columns, ids(num_rows, seed=seed + 2)


PLANS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["0", "1", "2", "one", "two"]),
        st.lists(st.sampled_from(sorted(STEPS)), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(plan=PLANS, seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=3), num_rows=st.integers(2, 6))
def test_the_ids_of_any_module_are_those_that_its_lookups_see(plan: Any, seeds: list[int], num_rows: int) -> None:
    module, rows = moved(Random(plan))
    program = IdProgram.of(module)
    for seed in seeds:
        check(module, *batches(seed, num_rows), program=program, rows=rows)
