"""The asyncio manager has the same calls, and a cancelled `await` only ends the wait."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from strata.checkpoint import CheckpointManager
from strata.checkpoint.aio import NUM_THREADS, AsyncCheckpointManager, AsyncSave
from strata.checkpoint.handle import Save
from strata.checkpoint.policy import EverySteps
from strata.errors import CheckpointAborted, InvalidArgument, NoCheckpoint, StorageFull
from strata.storage import Watch
from strata.storage.memory import MemoryStore

STATE = {"model": {"w": np.arange(1_000, dtype=np.float32)}, "lr": 0.1}


class GatedStore(MemoryStore):
    """A store whose large writes wait until the gate is open."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__("gated")
        self.gate = threading.Event()
        self._fails = fails

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        assert self.gate.wait(30)
        if watch is not None:
            watch.check()
        if self._fails:
            raise StorageFull("no room")
        super().put_large(key, data, watch=watch)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work, debug=True)


# -- the two managers do not drift apart ---------------------------------------------------------------------------


def public(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def test_every_method_has_an_async_variant_with_the_same_parameters() -> None:
    ours, theirs = public(AsyncCheckpointManager), public(CheckpointManager)

    assert ours.keys() == theirs.keys()
    for name, method in theirs.items():
        if isinstance(method, property):
            assert isinstance(ours[name], property), name
        else:
            parameters = inspect.signature(ours[name]).parameters
            assert list(parameters.values()) == list(inspect.signature(method).parameters.values()), name
            assert inspect.iscoroutinefunction(ours[name]) == (name != "should_save"), name
    assert inspect.signature(AsyncCheckpointManager) == inspect.signature(CheckpointManager)


def test_the_async_handle_has_the_properties_of_the_synchronous_one() -> None:
    properties = {name for name, value in public(Save).items() if isinstance(value, property)}

    assert properties | {"staged", "stall_s", "wait", "cancel"} <= public(AsyncSave).keys()


# -- typical use ---------------------------------------------------------------------------------------------------


def test_a_state_is_saved_listed_loaded_verified_and_deleted() -> None:
    async def work() -> None:
        async with AsyncCheckpointManager("memory://aio-round", keep_count=2) as manager:
            assert await manager.latest() is None
            with pytest.raises(NoCheckpoint):
                await manager.load()
            for step in range(4):
                save = await manager.save(STATE, step=step, epoch=1, metadata={"loss": 0.5})
                assert save.staged
                saved = await save
            assert (saved.step, saved.metadata) == (3, {"loss": 0.5})
            assert (save.durable, save.done, save.progress, save.error) == (True, True, 1.0, None)
            assert (save.id, save.path, save.model_hash) == (saved.id, saved.path, saved.model_hash)
            await manager.wait()
            assert [one.step for one in await manager.list()] == [2, 3]
            assert await manager.get(step=3) == await manager.latest() == saved
            loaded = await manager.load(only=["model.*"])
            assert np.array_equal(loaded["model"]["w"], STATE["model"]["w"])  # type: ignore[index]
            assert (await manager.verify(id=saved.id)).id == saved.id
            await manager.delete(step=2)
            assert [one.step for one in await manager.list()] == [3]
            assert manager.problems == {}

    run(work())


def test_a_strategy_decides_whether_a_save_is_made() -> None:
    async def work() -> None:
        async with AsyncCheckpointManager(store=MemoryStore("aio-strategy"), strategy=EverySteps(10)) as manager:
            made = []
            for step in range(1, 31):
                assert manager.should_save(step).save == (step % 10 == 0)
                save = await manager.maybe_save(lambda: STATE, step=step)
                if save is not None:
                    made.append((await save).step)
            assert made == [10, 20, 30]

    run(work())


def test_restore_loads_into_what_has_load_state_dict() -> None:
    class Model:
        state: Any = None

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    async def work() -> None:
        model = Model()
        async with AsyncCheckpointManager(store=MemoryStore("aio-restore")) as manager:
            await (await manager.save(STATE, step=9))
            assert (await manager.restore({"model": model})).step == 9
        assert model.state["w"].shape == (1_000,)

    run(work())


def test_the_loop_continues_while_a_save_is_written_and_many_tasks_may_wait_for_it() -> None:
    async def work() -> None:
        store = GatedStore()
        async with AsyncCheckpointManager(store=store) as manager:
            save = await manager.save(STATE, step=1)
            waiting = [asyncio.create_task(save.wait()) for _ in range(NUM_THREADS * 3)]
            await asyncio.sleep(0)
            assert await manager.latest() is None, "a thread is free, although many tasks wait"
            with pytest.raises(TimeoutError, match="is not durable after 0 s"):
                await save.wait(timeout_s=0)
            store.gate.set()
            assert len({one.id for one in await asyncio.gather(*waiting)}) == 1

    run(work())


def test_the_call_sees_the_context_variables_of_the_caller() -> None:
    seen: list[str] = []
    request = contextvars.ContextVar("request", default="none")

    class ListeningStore(MemoryStore):
        def children(self, prefix: str = "") -> list[str]:
            seen.append(request.get())
            return super().children(prefix)

    async def work() -> None:
        request.set("r-17")
        async with AsyncCheckpointManager(store=ListeningStore("aio-context")) as manager:
            await manager.latest()

    run(work())
    assert seen == ["r-17"]


# -- cancelling ----------------------------------------------------------------------------------------------------


def test_a_cancelled_await_leaves_the_save_alone_and_closing_waits_for_it() -> None:
    store = GatedStore()

    async def work() -> None:
        manager = AsyncCheckpointManager(store=store)
        save = await manager.save(STATE, step=1)
        waiting = asyncio.create_task(save.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        closing = asyncio.create_task(manager.close())
        await asyncio.sleep(0)
        assert not closing.done()
        store.gate.set()
        await closing
        assert save.durable

    run(work())
    with CheckpointManager(store=store) as manager:
        assert manager.verify().step == 1


def test_a_save_whose_await_was_cancelled_while_it_was_staged_becomes_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    store = GatedStore()

    async def work() -> None:
        manager = AsyncCheckpointManager(store=store)
        await manager.save(STATE, step=1)
        begun, real = threading.Event(), manager._manager.save

        def save(*args: Any, **kwargs: Any) -> Save:
            begun.set()
            return real(*args, **kwargs)

        monkeypatch.setattr(manager._manager, "save", save)
        second = asyncio.create_task(manager.save(STATE, step=2))  # waits for the first save
        await asyncio.to_thread(begun.wait)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        closing = asyncio.create_task(manager.close())
        store.gate.set()
        await closing

    run(work())
    with CheckpointManager(store=store) as manager:
        assert [one.step for one in manager.list()] == [1, 2]


def test_a_cancelled_close_continues_and_can_be_awaited_again() -> None:
    store = GatedStore()

    async def work() -> None:
        manager = AsyncCheckpointManager(store=store)
        await manager.save(STATE, step=1)
        closing = asyncio.create_task(manager.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        store.gate.set()
        await manager.close()
        with pytest.raises(InvalidArgument, match="is closed"):
            await manager.latest()

    run(work())
    with CheckpointManager(store=store) as manager:
        assert [one.step for one in manager.list()] == [1]


def test_a_cancelled_save_leaves_nothing_and_closing_raises_no_error() -> None:
    store = GatedStore()

    async def work() -> None:
        async with AsyncCheckpointManager(store=store) as manager:
            save = await manager.save(STATE, step=1)
            waiting = asyncio.create_task(save.wait())
            await asyncio.sleep(0)
            save.cancel()
            store.gate.set()
            with pytest.raises(CheckpointAborted):
                await waiting

    logging.disable(logging.ERROR)
    try:
        run(work())
    finally:
        logging.disable(logging.NOTSET)
    assert list(store.walk()) == []


# -- failing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["no task waits", "the waiting task is cancelled", "wait() of the manager"])
def test_an_unreported_failure_is_raised_by_close(way: str) -> None:
    store = GatedStore(fails=True)

    async def work() -> None:
        manager = AsyncCheckpointManager(store=store)
        save = await manager.save(STATE, step=1)
        if way == "the waiting task is cancelled":
            waiting = asyncio.create_task(save.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        store.gate.set()
        if way == "wait() of the manager":
            with pytest.raises(StorageFull, match="no room"):
                await manager.wait()
            await manager.close()
        else:
            with pytest.raises(StorageFull, match="no room"):
                await manager.close()

    run(work())


def test_a_reported_failure_is_raised_once() -> None:
    store = GatedStore(fails=True)
    store.gate.set()

    async def work() -> None:
        async with AsyncCheckpointManager(store=store) as manager:
            save = await manager.save(STATE, step=1)
            with pytest.raises(StorageFull):
                await save
            assert isinstance(save.error, StorageFull)
            await manager.wait()

    run(work())


def test_the_error_of_the_block_takes_precedence_over_that_of_a_save() -> None:
    store = GatedStore(fails=True)
    store.gate.set()

    async def work() -> None:
        async with AsyncCheckpointManager(store=store) as manager:
            await manager.save(STATE, step=1)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        run(work())
