"""Scripts that use one of our objects and then fork; `test_forks.py` checks the parent and the child.

    python fork_children.py NAME

The child first runs `in_child` and exits like any script. It must neither wait for a thread that only its parent has,
nor stop anything that belongs to its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from exit_children import DEADLINE_S, end_by_deadline

import strata
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import ForkedProcess
from strata.scratch import Scratch

STATE = {"weights": np.ones(8)}
NUM_ROWS = 500
Case = tuple[Callable[[], object], Callable[[], object]]
"""The actions of the child, and of the parent afterwards."""


def refused(*calls: Callable[[], object]) -> None:
    for number, call in enumerate(calls):
        try:
            call()
        except ForkedProcess:
            continue
        raise AssertionError(f"call {number} is not refused in a forked child")


# -- objects in use at the fork ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def manager(**arguments: Any) -> Iterator[Case]:
    with strata.CheckpointManager("ck", **arguments) as found:
        first = found.save(STATE, step=1)
        first.wait()
        under_way = found.save(STATE, step=2)

        def in_child() -> None:
            refused(lambda: found.save(STATE, step=3), found.wait)
            assert first.wait().step == 1
            assert found.load(step=1)["weights"].sum() == 8
            with strata.CheckpointManager("own", **arguments) as own:
                own.save(STATE, step=1).wait()
            found.close()

        def after() -> None:
            under_way.wait()
            found.save(STATE, step=found.list()[-1].step + 1).wait()

        yield in_child, after


def thread_manager() -> contextlib.AbstractContextManager[Case]:
    return manager(saver="thread")


@contextlib.contextmanager
def async_manager() -> Iterator[Case]:
    async def save(found: strata.AsyncCheckpointManager, step: int) -> None:
        await (await found.save(STATE, step=step))

    found = strata.AsyncCheckpointManager("ck")
    asyncio.run(save(found, 1))
    yield lambda: refused(lambda: asyncio.run(save(found, 2))), lambda: asyncio.run(save(found, 3))
    asyncio.run(found.close())


@contextlib.contextmanager
def registry() -> Iterator[Case]:
    with strata.DatasetRegistry() as found:
        found.register_worker("w")
        found.register_dataset("d", total_samples=10, shard_size=5)

        def in_child() -> None:
            refused(lambda: found.get_assigned_shards("w"), strata.DatasetRegistry)
            found.close()

        yield in_child, lambda: found.get_assigned_shards("w")[1]


@contextlib.contextmanager
def client() -> Iterator[Case]:
    with EmbeddedCoordinator() as coordinator, strata.CoordinatorClient(coordinator.address) as found:
        worker = found.register_worker("w")

        def in_child() -> None:
            refused(found.list_jobs, worker.heartbeat, lambda: strata.CoordinatorClient(coordinator.address))
            found.close()
            coordinator.stop()

        def after() -> None:
            worker.heartbeat()
            assert found.num_connections == 1

        yield in_child, after


@contextlib.contextmanager
def async_client() -> Iterator[Case]:
    with EmbeddedCoordinator() as coordinator:
        runner = asyncio.Runner()  # not in a `with` block: a child that unwinds it would use its parent's event loop
        found = strata.AsyncCoordinatorClient(coordinator.address)
        runner.run(found.connect())
        worker = runner.run(found.register_worker("w"))

        def in_child() -> None:
            refused(
                lambda: asyncio.run(found.list_jobs()),
                lambda: asyncio.run(worker.heartbeat()),
                lambda: asyncio.run(strata.AsyncCoordinatorClient(coordinator.address).connect()),
            )
            asyncio.run(found.close())

        yield in_child, lambda: runner.run(worker.heartbeat())
        runner.run(found.close())
        runner.close()


@contextlib.contextmanager
def orchestrator() -> Iterator[Case]:
    with strata.TrainingOrchestrator() as found:
        found.register_worker("w")
        found.save(STATE, step=1).wait()

        def in_child() -> None:
            refused(found.heartbeat, lambda: found.save(STATE, step=2))
            found.close()

        yield in_child, found.heartbeat


@contextlib.contextmanager
def context() -> Iterator[Case]:
    with strata.init(checkpoints="ck", every=1) as ctx:
        ctx.maybe_checkpoint(STATE)

        def in_child() -> None:
            refused(lambda: ctx.maybe_checkpoint(STATE), lambda: ctx.checkpoint(STATE))
            ctx.close()
            own = strata.init(checkpoints="own", every=1)  # never closed
            own.maybe_checkpoint(STATE)

        def after() -> None:
            save = ctx.maybe_checkpoint(STATE)
            assert save is not None
            save.wait()

        yield in_child, after


@contextlib.contextmanager
def loader(**arguments: Any) -> Iterator[Case]:
    pq.write_table(pa.table({"id": np.arange(NUM_ROWS)}), "rows.parquet", row_group_size=10)
    found, dataset = strata.StructuredDataset.create_dataloader(
        "rows.parquet", batch_size=10, output_format="numpy", **arguments
    )
    batches = iter(found)
    seen = next(batches)["id"].tolist()

    def in_child() -> None:
        refused(lambda: next(batches))
        if arguments:  # Python's forkserver belongs to the parent
            refused(lambda: list(found))
        else:
            dataset.set_epoch(0)
            assert [row for batch in found for row in batch["id"].tolist()] == list(range(NUM_ROWS))
        dataset.get_metrics()
        dataset.close()

    def after() -> None:
        seen.extend(next(batches)["id"].tolist())
        assert all(each.is_alive() for each in multiprocessing.active_children())

    yield in_child, after
    seen += [row for batch in batches for row in batch["id"].tolist()]
    assert sorted(seen) == list(range(NUM_ROWS))


def process_loader() -> contextlib.AbstractContextManager[Case]:
    return loader(worker_type="process", num_workers=1, transform=unchanged)


def unchanged(rows: Any) -> Any:
    return rows


@contextlib.contextmanager
def map_loader() -> Iterator[Case]:
    with strata.init() as ctx:
        found = ctx.dataloader(range(NUM_ROWS), batch_size=10)
        batches = iter(found)
        seen = next(batches).tolist()

        def in_child() -> None:
            assert list(batches)
            ctx.close()

        yield in_child, lambda: seen.extend(next(batches).tolist())
        seen += [row for batch in batches for row in batch.tolist()]
        assert sorted(seen) == list(range(NUM_ROWS))


@contextlib.contextmanager
def trainer() -> Iterator[Case]:
    import torch

    x = torch.ones(64, 2)
    found = strata.Trainer(module=torch.nn.Linear(2, 1), loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD)

    def fit() -> None:
        found.fit((x, x[:, :1]), epochs=1, batch_size=16)

    fit()
    yield fit, fit


@contextlib.contextmanager
def scratch() -> Iterator[Case]:
    """A directory, and the lock that keeps others from removing it."""
    with Scratch("strata-forked-", Path.cwd()) as found:

        def after() -> None:
            with Scratch("strata-forked-", Path.cwd()):
                assert found.path.is_dir()

        yield found.remove, after


@contextlib.contextmanager
def dataloader_after_a_save() -> Iterator[Case]:
    """torch's DataLoader forks its workers, and terminates each one that has not exited by itself after 5 s."""
    from torch.utils.data import DataLoader

    with strata.init(checkpoints="ck", every=1) as ctx:
        ctx.checkpoint(STATE, step=1).wait()

        def epoch() -> None:
            batches: Any = iter(DataLoader(range(8), num_workers=2, multiprocessing_context="fork"))  # type: ignore[arg-type]
            workers = batches._workers
            assert len(list(batches)) == 8
            assert [worker.exitcode for worker in workers] == [0, 0]

        epoch()
        yield lambda: None, epoch


# -- ways to fork ------------------------------------------------------------------------------------------------------


def by_multiprocessing(in_child: Callable[[], object]) -> int:
    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def by_fork(in_child: Callable[[], object]) -> int:
    """Fork and exit with `sys.exit`, which unwinds every enclosing context manager."""
    pid = os.fork()
    if pid == 0:
        in_child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    if "loader" in sys.argv[1]:
        import torch  # noqa: F401 - before the clock runs
    end_by_deadline(2 * DEADLINE_S)
    with globals()[sys.argv[1]]() as (in_child, after):
        for fork in (by_multiprocessing, by_fork):
            code = fork(lambda: (end_by_deadline(), in_child()))
            assert code == 0, f"{fork.__name__}: exit code {code}"
            after()
    print("well")


if __name__ == "__main__":
    main()
