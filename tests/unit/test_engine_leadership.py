"""A leader whose lease has expired does not answer; a failed journal is retried even without calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from strata.clock import Clock, ManualClock
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.journal import Entry, MemoryJournal
from strata.coordinator.journal.leadership import MemoryLeadership
from strata.coordinator.serve.engine import PROBE_EVERY_S, Engine
from strata.coordinator.state.core import Core
from strata.errors import JournalFenced, JournalWriteFailed, NotLeader

CONFIG = CoordinatorConfig(lease=LeaseConfig(tick_s=0.001))


class FailingJournal(MemoryJournal):
    error: Exception | None = None

    def append(self, entries: Sequence[Entry], *, snapshot: bytes | None = None) -> int:
        if self.error is not None:
            raise self.error
        return super().append(entries, snapshot=snapshot)


def register(core: Core, clock: Clock) -> Any:
    with core.job_or_new("j") as job:
        return job.register_worker(
            "w", instance_id="i", capacity=0, hostname="", takeover=False, nonce=1, now_s=clock.monotonic_s()
        )


async def asked(call: Any, decide: Any) -> Any:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call(decide, answered.set_result)
    return await asyncio.wait_for(answered, 5)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (it is no event of ours)
            await asyncio.sleep(0.001)


def test_an_expired_lease_stops_answers_until_it_is_renewed() -> None:
    async def story() -> None:
        clock = ManualClock()
        engine = Engine(MemoryJournal(), CONFIG, clock)
        leadership = engine.leadership = MemoryLeadership()
        leadership.valid_until_s = clock.monotonic_s() + 5.0
        engine.start()
        assert (await asked(engine.call, register)).world_size == 1
        clock.advance(5.0)
        for call in (engine.call, engine.call_volatile):
            assert isinstance(await asked(call, lambda core, _: len(core.jobs)), NotLeader)
        assert isinstance(engine.refusal, NotLeader)
        leadership.valid_until_s = clock.monotonic_s() + 5.0
        assert await asked(engine.call, lambda core, _: len(core.jobs)) == 1
        assert engine.refusal is None
        await engine.stop()

    asyncio.run(story())


def test_an_answer_is_withheld_if_the_lease_expires_during_its_commit() -> None:
    async def story() -> None:
        clock = ManualClock()
        engine = Engine(MemoryJournal(), CONFIG, clock)
        leadership = engine.leadership = MemoryLeadership()
        leadership.valid_until_s = clock.monotonic_s() + 5.0
        engine.start()
        notices: list[Any] = []
        engine.listeners.append(notices.extend)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        engine.call(register, answered.set_result)
        clock.advance(6.0)
        assert isinstance(await asyncio.wait_for(answered, 5), NotLeader)
        assert notices == []
        assert len(engine.journal.read()) > 0, "it is durable; the next leader reports it"
        await engine.stop()

    asyncio.run(story())


def test_a_fenced_leader_is_notified() -> None:
    async def story() -> None:
        journal = FailingJournal()
        engine = Engine(journal, CONFIG, ManualClock())
        errors: list[JournalFenced] = []
        engine.on_fenced = errors.append
        engine.start()
        journal.error = JournalFenced("another leads")
        assert isinstance(await asked(engine.call, register), JournalFenced)
        assert errors == [journal.error]
        await engine.stop()

    asyncio.run(story())


@pytest.mark.parametrize("num_failures", [1, 3])
def test_a_failed_journal_is_retried_without_calls(num_failures: int) -> None:
    async def story() -> None:
        clock = ManualClock()
        journal = FailingJournal()
        engine = Engine(journal, CONFIG, clock)
        engine.start()
        journal.error = JournalWriteFailed("disk full")
        assert isinstance(await asked(engine.call, register), JournalWriteFailed)
        for number in range(2, num_failures + 2):
            assert engine.refusal is not None
            clock.advance(PROBE_EVERY_S)
            await until(lambda number=number: engine.metrics.num_commits_failed == number)
        journal.error = None
        clock.advance(PROBE_EVERY_S)
        await until(lambda: engine.refusal is None)
        await engine.stop()

    asyncio.run(story())


def test_a_call_after_the_threads_have_stopped_is_answered() -> None:
    """This happens at process exit; a caller that waits for the disk would wait forever."""

    async def story() -> None:
        engine = Engine(MemoryJournal(), CONFIG, ManualClock())
        engine.start()
        engine._writer.shutdown()
        assert isinstance(await asked(engine.call, register), JournalWriteFailed)
        await asyncio.wait_for(engine.stop(), 5)

    asyncio.run(story())
