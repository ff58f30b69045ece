"""Nodes that several jobs share: placement of a job in free slots, kills, and lost nodes."""

from __future__ import annotations

import asyncio
import dataclasses

from test_launch_nodes import WORKER_SPEC, FakeNode, events_of

from strata.launch.environment import WorkerSpec
from strata.launch.nodes.base import LOST, RoomChanged
from strata.launch.nodes.shared import SharedNodes
from strata.launch.protocol import WorkerExit


def a_job(attempt: int) -> WorkerSpec:
    return dataclasses.replace(WORKER_SPEC, identity=dataclasses.replace(WORKER_SPEC.identity, attempt=attempt))


def test_a_job_takes_one_node_if_it_fits_and_several_otherwise() -> None:
    async def scene() -> None:
        first, second = FakeNode("a", slots=3), FakeNode("b", slots=2)
        nodes = SharedNodes(first, second)
        for number, ranks in enumerate((range(2), range(2, 4)), start=1):
            placement = await nodes.place(ranks)
            assert placement is not None
            assert [each.rank for each in placement.identities] == [0, 1]
            assert [each.world_size for each in placement.identities] == [2, 2]
            assert {each.num_nodes for each in placement.identities} == {1}
            await nodes.start(placement, a_job(number))
        assert (sorted(first.running), sorted(second.running)) == ([2, 3], [0, 1]), "the fullest node that has room"
        assert await nodes.place(range(4, 6)) is None
        assert await events_of(nodes) == [
            WorkerExit(rank, LOST, "no node has a free slot for it", is_node_lost=True) for rank in (4, 5)
        ]
        second.end(0, 0)
        await events_of(nodes)
        placement = await nodes.place(range(6, 8))
        assert placement is not None
        assert [each.local_rank for each in placement.identities] == [0, 0]
        assert [each.node_rank for each in placement.identities] == [0, 1]
        assert {each.master_addr for each in placement.identities} == {"at-a"}

    asyncio.run(scene())


def test_a_kill_before_the_start_of_a_job_prevents_it_and_spares_the_next_one() -> None:
    async def scene() -> None:
        node = FakeNode("a", slots=2)
        nodes = SharedNodes(node)
        placement = await nodes.place(range(1))
        assert placement is not None
        nodes.kill(1, [0])
        await nodes.start(placement, a_job(1))
        assert node.running == {}
        assert await events_of(nodes) == [WorkerExit(0, LOST, is_killed=True)]
        placement = await nodes.place(range(1))
        assert placement is not None
        await nodes.start(placement, a_job(2))
        assert sorted(node.running) == [0]

    asyncio.run(scene())


def test_the_workers_of_a_lost_node_are_lost_with_it_and_others_run_on() -> None:
    async def scene() -> None:
        first, second = FakeNode("a"), FakeNode("b")
        nodes = SharedNodes(first, second)
        for number in range(2):
            placement = await nodes.place(range(number, number + 1))
            assert placement is not None
            await nodes.start(placement, a_job(number))
        second.die()
        why = "node b is lost: its power is off"
        assert await events_of(nodes) == [WorkerExit(1, LOST, why, is_node_lost=True), RoomChanged(1, why)]
        nodes.kill(0, [0, 1])
        assert first.orders == [("kill", 0)]

    asyncio.run(scene())
