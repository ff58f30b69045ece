"""Loaders over the user's own datasets in a context: `ctx.dataloader(dataset)`, `ctx.sampler`, and `ctx.attach` of
other loaders. A run that is interrupted in the middle of an epoch ends with the weights of an undisturbed one.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import strata
from strata.checkpoint import CheckpointManager
from strata.errors import ConfigError, InvalidArgument, PlanChanged
from strata.identity import Identity
from strata.launch.environment import NEEDED_WORLD_SIZE, WorkerSpec
from strata.train import Context
from strata.train.membership import NoMembership

NUM_ROWS = 60
BATCH = 4
EPOCH_STEPS = NUM_ROWS // BATCH
EPOCHS = 3
SAVED_EVERY = 4
Make = Callable[[Context], Any]
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "STRATA_RUN", "STRATA_CHECKPOINT_EVERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    # Workers of an abandoned loader live as long as it does. They are forks, which keep descriptors of the tests open.
    gc.collect()
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


class Rows(Dataset[Any]):
    """Numbered rows, with noise drawn when a row is read."""

    def __init__(self, num_rows: int = NUM_ROWS, *, noise: bool = True) -> None:
        self.num_rows = num_rows
        self.noise = noise

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        features = torch.tensor([row / NUM_ROWS, 1.0, (row % 7) / 7])
        if self.noise:
            features = features + torch.rand(3) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return row, features


class Stream(IterableDataset[Any]):
    """An iterable dataset with a state."""

    def __init__(self) -> None:
        self.next_row = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next_row < NUM_ROWS:
            self.next_row += 1
            yield Rows(noise=False)[self.next_row - 1]
        self.next_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_row = state["next_row"]


def train(directory: str, make: Make, *, until: int = 10**9, restores_first: bool = False) -> tuple[list[int], bytes]:
    """Train a net with dropout; return the rows that its weights have seen, and the weights."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    seen = Seen()
    parts = {"net": net, "optimizer": optimizer, "seen": seen}
    with strata.init(checkpoints=directory, every=SAVED_EVERY, saver="thread") as ctx:
        if restores_first:
            step = ctx.restore(parts).step
            loader = make(ctx)
        else:
            loader = make(ctx)
            step = ctx.restore(parts).step
        for _ in ctx.epochs(EPOCHS):
            for ids, features in loader:
                loss = (net(features) - features.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.ids += ids.tolist()
                step += 1
                ctx.report(step=step)
                ctx.maybe_checkpoint(parts)
                if step == until:
                    return seen.ids, b""
    return seen.ids, b"".join(tensor.detach().numpy().tobytes() for tensor in net.parameters())


class Seen:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ids": np.array(self.ids, np.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ids = state["ids"].tolist()


def map_loader(num_workers: int) -> Make:
    return lambda ctx: ctx.dataloader(Rows(), batch_size=BATCH, shuffle=True, num_workers=num_workers)


def own_loader(num_workers: int) -> Make:
    def make(ctx: Context) -> Any:
        dataset = Rows()
        loader = DataLoader(dataset, batch_size=BATCH, sampler=ctx.sampler(dataset), num_workers=num_workers)
        assert ctx.attach(loader) is loader
        return loader

    return make


def stateful(num_workers: int, **options: Any) -> Make:
    """The noise of loader workers cannot be restored, since they run ahead; that of the process is restored."""

    def make(ctx: Context) -> Any:
        dataset = Rows(noise=num_workers == 0)
        return ctx.attach(
            StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=num_workers, **options)
        )

    return make


def with_torch_sampler(num_workers: int) -> Make:
    def make(ctx: Context) -> Any:
        dataset = Rows(noise=False)
        loader = StatefulDataLoader(dataset, batch_size=BATCH, sampler=RandomSampler(dataset), num_workers=num_workers)
        return ctx.attach(loader)

    return make


def iterable(num_workers: int) -> Make:
    return lambda ctx: ctx.attach(StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=num_workers))


LOADERS = {
    "map": map_loader,
    "own": own_loader,
    "stateful": stateful,
    "sampler": with_torch_sampler,
    "iterable": iterable,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_an_interrupted_run_ends_with_the_weights_of_an_undisturbed_one(kind: str, num_workers: int) -> None:
    """Interrupt the run in the first epoch, in the second, and at the last batch of an epoch."""
    make = LOADERS[kind](num_workers if kind != "iterable" else min(num_workers, 1))
    seen, weights = train("undisturbed", make)
    per_epoch = [sorted(seen[start : start + NUM_ROWS]) for start in range(0, len(seen), NUM_ROWS)]
    assert per_epoch == [list(range(NUM_ROWS))] * EPOCHS
    for until in (SAVED_EVERY + 2, EPOCH_STEPS + 7, 2 * EPOCH_STEPS + 2):
        train("resumed", make, until=until)
    assert train("resumed", make) == (seen, weights)


@pytest.mark.parametrize("kind", ["map", "stateful"])
def test_a_loader_that_is_made_after_the_restore_is_exact_too(kind: str) -> None:
    make = LOADERS[kind](0)
    expected = train("undisturbed", make)
    train("resumed", make, until=EPOCH_STEPS + 7)
    assert train("resumed", make, restores_first=True) == expected


def test_a_closed_context_holds_no_loader_so_its_workers_end_with_the_last_reference() -> None:
    with strata.init(checkpoints="ckpt", saver="thread") as ctx:
        loader = ctx.attach(StatefulDataLoader(Rows(), batch_size=BATCH, num_workers=2))
        next(iter(loader))
    freed = weakref.ref(loader)
    gc.disable()  # reference counts alone
    try:
        del loader
        assert freed() is None
    finally:
        gc.enable()
    assert not multiprocessing.active_children()


def test_persistent_workers_and_a_generator_of_the_users_are_exact_too() -> None:
    def make(ctx: Context) -> Any:
        generator = torch.Generator()
        generator.manual_seed(9)
        return stateful(2, persistent_workers=True, generator=generator)(ctx)

    expected = train("undisturbed", make)
    train("resumed", make, until=EPOCH_STEPS + 7)
    assert train("resumed", make) == expected


# -- another number of workers -----------------------------------------------------------------------------------------


def context_of(world_size: int, rank: int = 0, *, session: str = "one") -> Context:
    """Return the context of one of several ranks, as under torchrun, without a coordinator."""
    worker_spec = WorkerSpec(
        identity=Identity(
            run="job",
            attempt=0,
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_port=0,
        ),
        coordinator="",
        checkpoints="ckpt",
    )
    ranks = strata.checkpoint.Ranks(rank=rank, size=world_size, session=session, timeout_s=20)
    manager = CheckpointManager("ckpt", ranks=ranks, saver="thread")
    return Context(worker_spec.identity, NoMembership(), manager)


def saved_by_two(make: Make) -> list[list[int]]:
    """Train three batches on each of two ranks; return the rows that each gets next."""
    contexts = [context_of(2, rank) for rank in range(2)]
    iterators = [iter(make(context)) for context in contexts]
    for iterator in iterators:
        for _ in range(3):
            next(iterator)
    saves = [context.checkpoint({"seen": Seen()}, step=3) for context in contexts]
    metadata = [save.wait() for save in saves]
    assert metadata[0].num_ranks == 2
    following = [next(iterator)[0].tolist() for iterator in iterators]
    for context in contexts:
        context.close()
    return following


def test_each_rank_gets_its_own_state_back_and_another_number_of_ranks_is_refused() -> None:
    def make(ctx: Context) -> Any:
        class Part(Stream):
            def __init__(self) -> None:
                self.next_row = ctx.rank * 30

        return ctx.attach(StatefulDataLoader(Part(), batch_size=BATCH), name="stream")

    following = saved_by_two(make)
    assert following == [[12, 13, 14, 15], [42, 43, 44, 45]]
    contexts = [context_of(2, rank, session="two") for rank in range(2)]
    loaders = [make(context) for context in contexts]
    with ThreadPoolExecutor() as ranks:
        list(ranks.map(lambda context: context.restore({"seen": Seen()}), contexts))
    assert [next(iter(loader))[0].tolist() for loader in loaders] == following
    for context in contexts:
        context.close()
    for is_before in (True, False):
        context = context_of(1)
        if is_before:
            make(context)
        with pytest.raises(
            ConfigError, match=r"2 workers saved the checkpoint, and the state of loader 'stream'.*Resume with 2"
        ):
            context.restore({"seen": Seen()})
        progress = context.restore({"seen": Seen()}, loaders=False)
        assert (progress.step, progress.epoch) == (3, 0)
        context.close()


def test_a_map_style_dataset_resumes_with_another_world_size() -> None:
    following = saved_by_two(own_loader(0))
    context = context_of(1)
    loader = own_loader(0)(context)
    context.restore({"seen": Seen()})
    rest = [ids.tolist() for ids, _ in loader]
    assert rest[0] + rest[1] == following[0] + following[1]
    assert sum(map(len, rest)) == NUM_ROWS - 2 * 3 * BATCH
    context.close()


def test_a_loader_declares_whether_its_state_is_per_rank() -> None:
    with strata.init(checkpoints="ckpt", saver="thread") as context:
        context.dataloader(Rows(), batch_size=BATCH)
        context.attach(Seen(), name="same on all", per_rank=False)
        assert NEEDED_WORLD_SIZE not in context.checkpoint({"seen": Seen()}, step=1).wait().metadata
        context.attach(Seen(), name="each rank's own")
        saved = context.checkpoint({"seen": Seen()}, step=2, metadata={"mine": 1}).wait()
        assert saved.metadata == {"mine": 1, NEEDED_WORLD_SIZE: "1"}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[Context]:
    with strata.init(checkpoints="ckpt", saver="thread") as made:
        yield made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [1]}, r"sampler= is not supported.*ctx\.attach"),
        ({"batch_sampler": [[1]]}, r"batch_sampler= is not supported.*ctx\.sampler"),
        ({"generator": torch.Generator()}, r"generator= is not supported.*shuffle_seed"),
        ({"batch_size": None}, r"batch_size=None.*batch_size=1 and collate_fn"),
        ({"batch_size": 2, "in_order": False}, r"in_order=False"),
        ({"format": "csv"}, r"format='csv' applies to files, not to a Rows"),
        ({"tail": "pad", "drop_last": True}, r"drop_last=True and tail='pad'"),
    ],
)
def test_options_that_contradict_an_exact_order_are_refused(
    context: Context, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        context.dataloader(Rows(), **options)


def test_an_iterable_dataset_is_refused_with_the_cure(context: Context) -> None:
    with pytest.raises(InvalidArgument, match=r"a Stream has no random access to rows.*StatefulDataLoader"):
        context.dataloader(Stream())
    with pytest.raises(InvalidArgument, match=r"a Stream has no random access"):
        context.sampler(Stream())


def test_a_sampler_without_an_attached_loader_is_refused(context: Context) -> None:
    dataset = Rows()
    sampler = context.sampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    with pytest.raises(strata.errors.StrataError, match=r"not attached.*ctx\.attach\(loader\)"):
        next(iter(loader))
    with pytest.raises(InvalidArgument, match=r"a DataLoader has no state_dict.*ctx\.sampler"):
        context.attach(DataLoader(dataset, batch_size=BATCH))
    with pytest.raises(InvalidArgument, match=r"generator= is not supported"):
        context.attach(DataLoader(dataset, batch_size=BATCH, sampler=sampler, generator=torch.Generator()))
    with pytest.raises(InvalidArgument, match=r"belongs to another dataset"):
        context.attach(DataLoader(Rows(), batch_size=BATCH, sampler=sampler))
    with pytest.raises(InvalidArgument, match=r"a StatefulDataLoader keeps its own position"):
        context.attach(StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler))
    with pytest.raises(InvalidArgument, match=r"a custom batch sampler, a Pairs"):
        context.attach(DataLoader(dataset, batch_sampler=Pairs(sampler, 2, drop_last=False)))
    context.attach(loader)
    with pytest.raises(InvalidArgument, match=r"already belongs to another loader"):
        context.attach(DataLoader(dataset, batch_size=BATCH, sampler=sampler))
    assert len(list(loader)) == len(loader) == EPOCH_STEPS


class Pairs(torch.utils.data.BatchSampler):
    pass


def test_the_rows_that_a_loader_is_resumed_with_must_be_as_many(context: Context) -> None:
    loader = context.dataloader(Rows(), batch_size=BATCH)
    next(iter(loader))
    context.checkpoint({"seen": Seen()}, step=1).wait()
    context.close()
    with strata.init(checkpoints="ckpt", saver="thread") as again:
        again.dataloader(Rows(NUM_ROWS + 1), batch_size=BATCH)
        with pytest.raises(PlanChanged, match=r"a dataset of 60 rows, but this one has 61"):
            again.restore({"seen": Seen()})


def test_a_sampler_gets_the_epoch_where_the_loader_has_no_set_epoch(context: Context) -> None:
    dataset = Rows()
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)
    context.attach(StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler))
    assert [(epoch, sampler.epoch) for epoch in context.epochs(3)] == [(0, 0), (1, 1), (2, 2)]


def test_a_list_of_samples_is_a_dataset_and_a_list_of_paths_is_files(context: Context, tmp_path: Path) -> None:
    loader = context.dataloader([(number, number) for number in range(6)], batch_size=3)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(strata.errors.DataError):
        context.dataloader([str(tmp_path / "missing.parquet")])
