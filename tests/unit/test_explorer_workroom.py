"""Requests wait for a bounded number of threads, and stop when their time is over or their browser has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from strata.clock import ManualClock, SystemClock
from strata.dashboard.explorer.limits import Budget, ExplorerConfig
from strata.dashboard.explorer.workroom import GRACE_S, Workroom
from strata.errors import ReadTooLarge, TooManyReads, TransferCancelled

WAIT_S = 30.0


async def stays() -> bool:
    return False


async def goes() -> bool:
    return True


def test_a_request_returns_what_its_work_returns_and_raises_what_it_raises() -> None:
    room = Workroom(ExplorerConfig(), SystemClock(), name="test")

    def fail(_budget: Budget) -> None:
        raise ReadTooLarge("too large")

    assert asyncio.run(room.run(lambda _budget: 7, stays)) == 7
    with pytest.raises(ReadTooLarge, match="too large"):
        asyncio.run(room.run(fail, stays))
    room.close()


def blocking(begun: threading.Event, release: threading.Event) -> Callable[[Budget], None]:
    def work(_budget: Budget) -> None:
        begun.set()
        assert release.wait(WAIT_S)

    return work


def test_a_request_beyond_the_queue_is_refused_at_once() -> None:
    begun, release = threading.Event(), threading.Event()
    room = Workroom(ExplorerConfig(num_readers=1, max_waiting=1), SystemClock(), name="test")

    async def play() -> None:
        both = [asyncio.create_task(room.run(blocking(begun, release), stays)) for _ in range(2)]
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        with pytest.raises(TooManyReads, match="max_waiting=1"):
            await room.run(blocking(begun, release), stays)
        release.set()
        await asyncio.gather(*both)
        assert await room.run(lambda _budget: "room again", stays) == "room again"

    asyncio.run(play())
    room.close()


def test_work_whose_browser_has_gone_is_cancelled() -> None:
    stopped = threading.Event()
    room = Workroom(ExplorerConfig(), SystemClock(), name="test")

    def read_on(budget: Budget) -> None:
        pause = threading.Event()
        while True:
            try:
                budget.check()
            except TransferCancelled:
                stopped.set()
                raise
            pause.wait(0.01)

    with pytest.raises(TransferCancelled):
        asyncio.run(room.run(read_on, goes))

    assert stopped.wait(WAIT_S)
    room.close()


def test_work_that_never_looks_at_its_deadline_is_abandoned() -> None:
    begun, release = threading.Event(), threading.Event()
    clock = ManualClock()
    room = Workroom(ExplorerConfig(request_timeout_s=5.0), clock, name="test")

    async def play() -> None:
        task = asyncio.create_task(room.run(blocking(begun, release), stays))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        clock.advance(5.0 + GRACE_S + 1.0)
        with pytest.raises(ReadTooLarge, match="request_timeout_s=5"):
            await task

    try:
        asyncio.run(play())
    finally:
        release.set()
        room.close()
