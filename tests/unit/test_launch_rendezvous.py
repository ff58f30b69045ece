"""Agents that exchange messages through a coordinator that may be down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from strata.errors import ConfigError, CoordinatorUnavailable, PermissionRefused
from strata.launch.nodes import rendezvous
from strata.launch.nodes.rendezvous import AgentGroup, Member, Outbox
from strata.launch.protocol import RunOver

OVER = RunOver("done", "2 workers are done")


class FakeCoordinator:
    """Client and worker of one member: the members of the job, and the sent messages."""

    job_id = "job.nodes"
    lease_s = 5.0
    lost = None

    def __init__(self, *members: str) -> None:
        self.members = list(members)
        self.sent: list[tuple[str, object]] = []
        self.num_calls = 0
        self.errors: list[Exception] = []
        """Errors of the next calls that send."""
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


async def join_group(coordinator: FakeCoordinator) -> AgentGroup:
    made = AgentGroup(coordinator, coordinator, Member(coordinator.members[0], 1))  # type: ignore[arg-type]
    await made.refresh()
    return made


def test_the_end_of_a_run_is_sent_until_the_coordinator_accepts_it_and_to_late_members() -> None:
    async def scene() -> None:
        coordinator = FakeCoordinator("a@1", "b@2")
        here = await join_group(coordinator)
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
        assert coordinator.sent == [("b@2", "RunOver"), ("c@3", "RunOver")]

    asyncio.run(scene())


def test_the_wait_for_a_member_that_does_not_leave_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LEAVE_S", 0.01)

    async def scene() -> None:
        here = await join_group(FakeCoordinator("a@1", "b@2"))
        assert await here.dismiss(OVER) == []

    asyncio.run(scene())


def test_a_member_that_could_not_be_reached_for_a_lease_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DISMISS_S", 0.01)

    async def scene() -> None:
        coordinator = FakeCoordinator("a@1", "b@2")
        coordinator.lease_s = 0.02
        coordinator.errors = [CoordinatorUnavailable("it is away")] * 1_000_000
        here = await join_group(coordinator)
        began_s = asyncio.get_running_loop().time()
        assert [member.name for member in await here.dismiss(OVER)] == ["b"]
        assert asyncio.get_running_loop().time() - began_s > coordinator.lease_s

    asyncio.run(scene())


# -- addresses of nodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"]),  # several agents on one machine
        ("10.0.0.1", ["10.0.0.2", "node-3"]),
        ("::1", ["127.0.0.1"]),
        ("127.0.0.1", []),
    ],
)
def test_nodes_are_all_on_one_machine_or_all_where_others_reach_them(mine: str, others: list[str]) -> None:
    coordinator = FakeCoordinator(f"a@{mine}", *(f"b-{number}@{each}" for number, each in enumerate(others)))
    rendezvous.check_reachable(asyncio.run(join_group(coordinator)))


@pytest.mark.parametrize(("mine", "other"), [("127.0.0.1", "10.0.0.2"), ("10.0.0.2", "127.0.0.1"), ("::1", "node-2")])
def test_a_loopback_node_beside_a_remote_one_is_refused_with_the_cure(mine: str, other: str) -> None:
    here = asyncio.run(join_group(FakeCoordinator(f"a@{mine}", f"b@{other}")))
    with pytest.raises(ConfigError, match=rf"this node has address {mine} and node b has {other}.* not localhost, or"):
        rendezvous.check_reachable(here)


def test_a_coordinator_with_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(
        ConfigError, match=r"cannot resolve the coordinator's host 'trainer-l' \(Name or service not known\)"
    ):
        rendezvous.own_address("trainer-l:50051")


def test_the_way_to_a_coordinator_on_this_machine_is_the_loopback() -> None:
    assert rendezvous.own_address("127.0.0.1:50051") == "127.0.0.1"
    assert rendezvous.own_address("unix:/tmp/c.sock") == "127.0.0.1"


# -- permissions -------------------------------------------------------------------------------------------------------


def test_a_member_without_permission_raises_the_cure_and_stops_retrying() -> None:
    async def scene() -> None:
        coordinator = FakeCoordinator("a@1", "b@2")
        coordinator.errors = [PermissionRefused("SendCommand needs the role admin, this token has worker")] * 2
        here = await join_group(coordinator)
        outbox = Outbox(here)
        outbox.send("b@2", OVER)
        for _ in range(20):
            await asyncio.sleep(0)
        assert coordinator.num_calls == 1
        with pytest.raises(PermissionRefused, match=r"this token has worker.* needs a token with the role admin"):
            await here.receive()
        assert [member.name for member in await here.dismiss(OVER)] == ["b"]
        await outbox.close()

    asyncio.run(scene())


def test_a_message_that_the_coordinator_missed_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.001)

    async def scene() -> None:
        coordinator = FakeCoordinator("a@1", "b@2")
        coordinator.errors = [CoordinatorUnavailable("it is away")] * 2
        outbox = Outbox(await join_group(coordinator))
        outbox.send("b@2", OVER)
        await asyncio.sleep(0.1)
        assert (coordinator.num_calls, coordinator.sent) == (3, [("b@2", "RunOver")])
        await outbox.close()

    asyncio.run(scene())
