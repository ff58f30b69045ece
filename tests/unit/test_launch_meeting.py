"""Agents that speak to each other through a coordinator that is not always there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from strata.errors import CoordinatorUnavailable
from strata.launch import meeting
from strata.launch.meeting import Meeting, Member, Over

OVER = Over("done", "2 workers are done")


class FakeCoordinator:
    """The client and the worker of one member: who is in the job, and what was sent to whom."""

    job_id = "job.nodes"
    lease_s = 5.0
    lost = None

    def __init__(self, *members: str) -> None:
        self.members = list(members)
        self.sent: list[tuple[str, object]] = []
        self.num_calls = 0
        self.errors: list[Exception] = []
        """Of the next calls that send."""
        self.on_look: Callable[[], None] = lambda: None

    async def list_workers(self, *, job_id: str) -> Any:
        self.on_look()
        found = [
            SimpleNamespace(worker_id=each, capacity=1.0, incarnation=age) for age, each in enumerate(self.members)
        ]
        return SimpleNamespace(workers=found)

    async def send_command(self, name: str, *, job_id: str, worker_ids: list[str], args: dict[str, str]) -> None:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        for each in worker_ids:
            self.sent.append((each, msgspec.json.decode(args["text"])["type"]))

    async def wait_changed(self, timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return False

    def take_commands(self) -> list[Any]:
        return []


async def joined(coordinator: FakeCoordinator) -> Meeting:
    made = Meeting(coordinator, coordinator, Member(coordinator.members[0], 1))  # type: ignore[arg-type]
    await made.look()
    return made


def test_the_end_of_a_run_is_said_until_the_coordinator_takes_it_and_to_those_who_join_meanwhile() -> None:
    async def scene() -> None:
        coordinator = FakeCoordinator("a@1", "b@2")
        here = await joined(coordinator)
        coordinator.errors = [CoordinatorUnavailable("it is away")] * 3
        looks = iter(range(100))

        def happen() -> None:
            match next(looks):
                case 5:
                    coordinator.members.append("c@3")
                case 8:
                    coordinator.members[1:] = []

        coordinator.on_look = happen
        assert await here.dismiss(OVER) == []
        assert coordinator.sent == [("b@2", "Over"), ("c@3", "Over")]

    asyncio.run(scene())


def test_who_was_told_and_does_not_leave_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LEFT_S", 0.01)

    async def scene() -> None:
        here = await joined(FakeCoordinator("a@1", "b@2"))
        assert await here.dismiss(OVER) == []

    asyncio.run(scene())


def test_who_could_not_be_told_in_more_than_a_lease_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "TELL_S", 0.01)

    async def scene() -> None:
        coordinator = FakeCoordinator("a@1", "b@2")
        coordinator.lease_s = 0.02
        coordinator.errors = [CoordinatorUnavailable("it is away")] * 1_000_000
        here = await joined(coordinator)
        began_s = asyncio.get_running_loop().time()
        assert [member.name for member in await here.dismiss(OVER)] == ["b"]
        assert asyncio.get_running_loop().time() - began_s > coordinator.lease_s

    asyncio.run(scene())
