"""The layout of ranks over nodes, and nodes that join and leave."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.identity import Identity
from strata.launch.environment import WorkerSpec
from strata.launch.nodes.base import LOST, Event, NodeLost, Nodes, RoomChanged, lay_out
from strata.launch.protocol import WorkerExit

WORKER_SPEC = WorkerSpec(
    identity=Identity(run="job", attempt=0, rank=0, world_size=0, local_rank=0, local_world_size=0, master_port=0),
    coordinator="unix:/c",
    checkpoints="/k",
)
HOSTS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=5)
"""Slots of the nodes of each host."""


def listed(hosts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    return [(f"host-{number}", slots) for number, nodes in enumerate(hosts) for slots in nodes]


# -- placement of ranks ------------------------------------------------------------------------------------------------


@given(HOSTS, st.integers(0, 30))
def test_every_rank_has_one_seat_and_no_node_exceeds_its_slots(hosts: list[list[int]], world_size: int) -> None:
    nodes = listed(hosts)
    seats = lay_out(world_size, nodes)
    assert len(seats) == min(world_size, sum(slots for _, slots in nodes))
    taken = Counter(seat.node for seat in seats)
    assert all(taken[index] <= slots for index, (_, slots) in enumerate(nodes))
    fuller = {taken[index] for index, (_, slots) in enumerate(nodes) if taken[index] < slots}
    # A node with free slots is at most one worker behind any other.
    assert all(taken[index] <= min(fuller, default=99) + 1 for index in taken)


@given(HOSTS, st.integers(0, 30))
def test_local_ranks_count_the_workers_of_a_host_and_ranks_are_neighbours(
    hosts: list[list[int]], world_size: int
) -> None:
    nodes = listed(hosts)
    seats = lay_out(world_size, nodes)
    assert [seat.node for seat in seats] == sorted(seat.node for seat in seats)
    assert [seat.host_rank for seat in seats] == sorted(seat.host_rank for seat in seats)
    for host in {nodes[seat.node][0] for seat in seats}:
        here = [seat for seat in seats if nodes[seat.node][0] == host]
        assert [seat.local_rank for seat in here] == list(range(len(here)))
        assert {seat.local_world_size for seat in here} == {len(here)}
    assert {seat.host_rank for seat in seats} == set(range(len({nodes[seat.node][0] for seat in seats})))


@given(HOSTS, st.integers(1, 30), st.integers(1, 5))
def test_servers_are_the_last_ranks_and_spread_over_the_hosts(
    hosts: list[list[int]], world_size: int, num_servers: int
) -> None:
    nodes = listed(hosts)
    seats = lay_out(world_size, nodes, num_servers=num_servers)
    plain = lay_out(world_size, nodes)
    assert Counter(seat.node for seat in seats) == Counter(seat.node for seat in plain)
    if len(seats) < world_size or num_servers >= world_size:
        return  # such an attempt does not train
    workers, servers = seats[:-num_servers], seats[-num_servers:]
    assert [seat.node for seat in workers] == sorted(seat.node for seat in workers)
    held, here = Counter(seat.host_rank for seat in servers), Counter(seat.host_rank for seat in workers)
    for host, num_workers in here.items():
        assert held[host] >= max(held.values()) - 1, "a host with workers left could have taken another server"
        own = [seat for seat in workers if seat.host_rank == host]
        assert [(seat.local_rank, seat.local_world_size) for seat in own] == [
            (n, num_workers) for n in range(num_workers)
        ]


# -- nodes that come and go --------------------------------------------------------------------------------------------


class FakeNode:
    def __init__(self, name: str, *, slots: int = 1, host: str = "") -> None:
        self.name = name
        self.host = host or name
        self.address = f"at-{name}"
        self.slots = slots
        self.running: dict[int, WorkerSpec] = {}
        self.orders: list[object] = []
        self.exits: asyncio.Queue[WorkerExit | Exception] = asyncio.Queue()
        self.on_launch: Callable[[], Awaitable[None]] | None = None
        self.on_port: Callable[[], None] = lambda: None

    async def free_port(self) -> int:
        self.on_port()
        return 4321

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        self.running |= {worker_spec.identity.rank: worker_spec for worker_spec in workers}
        if self.on_launch is not None:
            await self.on_launch()

    async def next_exit(self) -> WorkerExit:
        found = await self.exits.get()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.running:
                self.orders.append(("kill", rank))
                self.end(rank, -signal.SIGKILL)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self.orders.append((number, rank))

    async def dump_stacks(self, rank: int) -> None:
        self.orders.append(("stacks", rank))

    async def close(self) -> None:
        self.orders.append("close")

    def end(self, rank: int, code: int) -> None:
        self.exits.put_nowait(WorkerExit(rank, code))

    def die(self) -> None:
        self.exits.put_nowait(NodeLost("its power is off"))


def launched(world_size: int, attempt: int = 0) -> WorkerSpec:
    return dataclasses.replace(
        WORKER_SPEC, identity=dataclasses.replace(WORKER_SPEC.identity, world_size=world_size, attempt=attempt)
    )


async def events_of(nodes: Nodes) -> list[Event]:
    """Return all events, once every task has run."""
    for _ in range(20):
        await asyncio.sleep(0)
    found: list[Event] = []
    while not nodes._events.empty():
        found.append(await nodes.next_event())
    return found


def test_workers_get_their_identity_and_the_address_of_rank_0() -> None:
    async def scene() -> None:
        first, second = FakeNode("a", slots=2), FakeNode("b", slots=2)
        nodes = Nodes(first, second)
        assert nodes.room == 4
        await nodes.launch(launched(3))
        assert sorted(first.running) == [0, 1]
        assert sorted(second.running) == [2]
        last = second.running[2].identity
        assert (last.master_addr, last.master_port) == ("at-a", 4321)
        assert (last.local_rank, last.local_world_size, last.node_rank, last.num_nodes) == (0, 1, 1, 2)
        nodes.send_signal(2, signal.SIGTERM)
        await nodes.dump_stacks([0, 2, 7])
        nodes.kill(0, [1, 2, 9])
        assert first.orders == [("stacks", 0), ("kill", 1)]
        assert second.orders == [(signal.SIGTERM, 2), ("stacks", 2), ("kill", 2)]
        await nodes.close()
        assert first.orders[-1] == second.orders[-1] == "close"

    asyncio.run(scene())


def test_a_lost_node_ends_each_of_its_own_ranks_once() -> None:
    async def scene() -> None:
        first, second = FakeNode("a", slots=2), FakeNode("b", slots=2)
        nodes = Nodes(first, second)
        await nodes.launch(launched(4))
        second.end(3, 1)  # a moment before
        second.die()
        *exits, room = await events_of(nodes)
        assert [(each.rank, each.code) for each in exits if isinstance(each, WorkerExit)] == [
            (3, 1),
            (2, LOST),
        ]
        assert room == RoomChanged(2, "node b is lost: its power is off")
        nodes.lose("b", "again")
        nodes.kill(0, [2, 3])
        assert await events_of(nodes) == []
        assert second.orders == []
        first.end(0, 0)
        assert await events_of(nodes) == [WorkerExit(0, 0)]
        await nodes.close()

    asyncio.run(scene())


def test_a_node_whose_exits_cannot_be_received_is_lost_and_its_workers_are_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        nodes = Nodes(first, second)
        await nodes.launch(launched(2))
        second.exits.put_nowait(OSError("stale file handle"))
        gone, room = await events_of(nodes)
        assert gone == WorkerExit(1, LOST, "node b is lost: OSError: stale file handle", is_node_lost=True)
        assert room == RoomChanged(1, "node b is lost: OSError: stale file handle")
        assert second.orders == [("kill", 1)]
        await nodes.close()

    asyncio.run(scene())
    assert "Traceback" in caplog.text


def test_a_node_that_drains_keeps_its_workers_and_gets_no_new_ones() -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        nodes = Nodes(first, second)
        await nodes.launch(launched(2))
        nodes.drain("b", "Ctrl-C")
        nodes.drain("b", "Ctrl-C")
        assert await events_of(nodes) == [RoomChanged(1, "node b is leaving: Ctrl-C")]
        first.end(0, 0)
        second.end(1, 0)
        assert len(await events_of(nodes)) == 2
        await nodes.launch(launched(1, attempt=1))
        assert first.running[0].identity.attempt == 1
        assert second.running[1].identity.attempt == 0
        nodes.join(FakeNode("c"))
        assert await events_of(nodes) == [RoomChanged(2, "node c has joined")]
        await nodes.close()

    asyncio.run(scene())


def test_workers_must_move_as_long_as_some_are_on_a_node_that_is_leaving() -> None:
    async def scene() -> None:
        first, second, third = FakeNode("a"), FakeNode("b"), FakeNode("c")
        nodes = Nodes(first, second, third)
        await nodes.launch(launched(2))
        nodes.drain("c", "it runs no worker")
        assert not nodes.must_move
        nodes.drain("b", "Ctrl-C")
        assert nodes.must_move
        second.end(1, 0)
        await events_of(nodes)
        assert not nodes.must_move
        await nodes.close()

    asyncio.run(scene())


def test_a_node_that_is_lost_during_the_layout_gets_no_ranks_and_they_end() -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        nodes = Nodes(first, second)
        first.on_port = lambda: nodes.lose("b", "just now")
        await nodes.launch(launched(2))
        assert sorted(first.running) == [0]
        assert second.running == {}
        exits = [each for each in await events_of(nodes) if isinstance(each, WorkerExit)]
        assert [(each.rank, each.code) for each in exits] == [(1, LOST)]
        await nodes.close()

    asyncio.run(scene())


def test_a_node_that_is_lost_during_its_launch_ends_its_ranks_once() -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        nodes = Nodes(first, second)

        async def die() -> None:
            second.die()
            await asyncio.sleep(0)

        second.on_launch = die
        await nodes.launch(launched(2))
        exits = [each for each in await events_of(nodes) if isinstance(each, WorkerExit)]
        assert [(each.rank, each.code) for each in exits] == [(1, LOST)]
        await nodes.close()

    asyncio.run(scene())


def test_ranks_without_a_slot_end_at_once() -> None:
    async def scene() -> None:
        only = FakeNode("a")
        nodes = Nodes(only)
        await nodes.launch(launched(3))
        assert sorted(only.running) == [0]
        assert await events_of(nodes) == [
            WorkerExit(rank, LOST, "no node has a free slot for it", is_node_lost=True) for rank in (1, 2)
        ]
        await nodes.close()

    asyncio.run(scene())


def test_no_worker_is_placed_before_all_awaited_nodes_have_joined() -> None:
    async def scene() -> None:
        nodes = Nodes(FakeNode("a"), num_awaited=3)
        assert nodes.room == 0
        nodes.join(FakeNode("b"))
        nodes.stop_awaiting()
        found = await events_of(nodes)
        assert [each.room for each in found if isinstance(each, RoomChanged)] == [0, 2]
        await nodes.close()

    asyncio.run(scene())


def test_a_worker_killed_before_its_launch_is_not_started_and_ends_once() -> None:
    async def scene() -> None:
        first, second = FakeNode("a", slots=2), FakeNode("b")
        nodes = Nodes(first, second)
        nodes.kill(4, [1])  # no worker of attempt 4 runs yet
        first.on_port = lambda: nodes.kill(4, [2])
        await nodes.launch(launched(3, attempt=4))
        assert (sorted(first.running), second.running) == ([0], {})
        assert await events_of(nodes) == [WorkerExit(rank, -signal.SIGKILL, is_killed=True) for rank in (1, 2)]
        await nodes.close()

    asyncio.run(scene())


def test_a_rank_restarts_alone_at_its_place_unless_the_node_is_lost() -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        nodes = Nodes(first, second)
        await nodes.launch(launched(2))
        before = second.running.pop(1)
        second.end(1, -signal.SIGKILL)
        assert await events_of(nodes) == [WorkerExit(1, -signal.SIGKILL)]
        await nodes.restart(0, 1, 1)
        assert second.running[1].identity == dataclasses.replace(before.identity, incarnation=1)
        nodes.kill(0, [1])
        assert second.orders == [("kill", 1)]
        await events_of(nodes)
        nodes.lose("b", "its power is off")
        await events_of(nodes)
        await nodes.restart(0, 1, 2)
        await nodes.restart(7, 0, 1)  # of another attempt
        assert await events_of(nodes) == [WorkerExit(1, LOST, "node b is lost", is_node_lost=True)]
        await nodes.close()

    asyncio.run(scene())


def test_a_late_kill_does_not_hit_the_next_attempt() -> None:
    async def scene() -> None:
        node = FakeNode("a")
        nodes = Nodes(node)
        await nodes.launch(launched(1))
        node.end(0, 1)
        assert await events_of(nodes) == [WorkerExit(0, 1)]
        nodes.kill(0, [0])
        await nodes.launch(launched(1, attempt=1))
        nodes.kill(0, [0])
        assert node.running[0].identity.attempt == 1
        assert node.orders == []
        await nodes.close()

    asyncio.run(scene())


def test_nodes_of_one_host_are_neighbours_whenever_they_came() -> None:
    async def scene() -> None:
        fakes = [FakeNode("a", host="x"), FakeNode("b", host="y"), FakeNode("c", host="x")]
        nodes = Nodes(*fakes)
        await nodes.launch(launched(3))
        made = sorted(
            (worker_spec for node in fakes for worker_spec in node.running.values()),
            key=lambda worker_spec: worker_spec.identity.rank,
        )
        await nodes.close()
        assert {worker_spec.identity.num_nodes for worker_spec in made} == {2}
        assert [worker_spec.identity.node_rank for worker_spec in made] == [0, 0, 1]

    asyncio.run(scene())
