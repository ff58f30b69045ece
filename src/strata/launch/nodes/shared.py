"""Nodes that many small jobs share, such as the trials of a study: each job takes free slots, and the others run on."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strata.identity import Identity
from strata.launch.nodes.base import Nodes, lay_out
from strata.launch.protocol import LOST, WorkerExit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.launch.environment import WorkerSpec
    from strata.launch.nodes.base import Node


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the workers of a job will run."""

    ranks: Sequence[int]
    """Ranks of its workers at the nodes, which no other running job has."""
    identities: tuple[Identity, ...]
    """Of its workers within the job."""
    nodes: tuple[Node, ...]
    """Of each worker."""
    num_slots: int
    """Slots on the machine of the first worker, which share its cores."""


class SharedNodes(Nodes):
    """`Nodes` for several jobs at a time. Ranks are numbers of running workers; an attempt is one start of a job."""

    def __init__(self, *nodes: Node, num_awaited: int = 0) -> None:
        super().__init__(*nodes, num_awaited=num_awaited)
        self._seats: dict[int, int] = {}
        """Slot of each rank that has not ended, among those of its node."""

    async def place(self, ranks: Sequence[int]) -> Placement | None:
        """Take free slots for a job: all on one node if possible. Return None if there are too few; its workers have
        then been reported as lost.
        """
        taken = Counter(node.name for node in self._at.values())
        free = [(node, node.slots - taken[node.name]) for node in self._open()]
        fitting = [each for each in free if each[1] >= len(ranks)]
        chosen = [min(fitting, key=lambda each: each[1])] if fitting else [each for each in free if each[1] > 0]
        hosts = list(dict.fromkeys(node.host for node, _ in chosen))
        chosen.sort(key=lambda each: hosts.index(each[0].host))
        seats = lay_out(len(ranks), [(node.host, slots) for node, slots in chosen])
        if len(seats) < len(ranks):
            for rank in ranks:
                self._events.put_nowait(WorkerExit(rank, LOST, "no node has a free slot for it", is_node_lost=True))
            return None
        nodes = tuple(chosen[seat.node][0] for seat in seats)
        for rank, node in zip(ranks, nodes, strict=True):
            self._take_seat(rank, node)
        common = Identity(
            world_size=len(ranks),
            num_nodes=max(seat.host_rank for seat in seats) + 1,
            master_addr=nodes[0].address,
            master_port=await nodes[0].free_port(),
        )
        identities = tuple(
            replace(
                common,
                rank=number,
                local_rank=seat.local_rank,
                local_world_size=seat.local_world_size,
                node_rank=seat.host_rank,
            )
            for number, seat in enumerate(seats)
        )
        num_slots = sum(node.slots for node in self._open() if node.host == nodes[0].host)
        return Placement(ranks, identities, nodes, max(num_slots, len(ranks)))

    def _take_seat(self, rank: int, node: Node) -> None:
        taken = {self._seats[each] for each, at in self._at.items() if at is node}
        self._seats[rank] = next(each for each in itertools.count() if each not in taken)
        self._at[rank] = node

    def seats(self, rank: int, ranks: Iterable[int]) -> tuple[tuple[int, ...], int]:
        """Return which slots of the node of this worker its job has, and how many the node has in all.

        `ranks`: those of all workers of the job.
        """
        node = self._at.get(rank)
        if node is None:
            return (), 0
        return tuple(self._seats[each] for each in ranks if self._at.get(each) is node), node.slots

    async def start(self, placement: Placement, spec: WorkerSpec) -> None:
        """Start the workers of a job, except those that were killed or lost meanwhile. `spec.identity` names the run
        and the attempt.
        """
        for node in dict.fromkeys(placement.nodes):
            workers = [
                replace(
                    spec,
                    identity=replace(
                        own,
                        run=spec.identity.run,
                        attempt=spec.identity.attempt,
                        rank=rank,
                        world_size=max(placement.ranks) + 1,
                        local_world_size=placement.num_slots,
                    ),
                )
                for rank, own, at in zip(placement.ranks, placement.identities, placement.nodes, strict=True)
                if at is node
            ]
            await self._launch_at(node, workers)

    def kill(self, attempt: int, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        self._killed.update((attempt, rank) for rank in ranks)
        for node, theirs in self._by_node(ranks):
            node.kill(theirs)

    def _ended(self, event: WorkerExit) -> None:
        self._killed = {each for each in self._killed if each[1] != event.rank}
        self._seats.pop(event.rank, None)
        super()._ended(event)
