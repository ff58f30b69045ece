"""Where the workers of a run are: its nodes, as the agent that leads it sees them.

A node is a place with room for workers: this machine, another one, an actor on a cluster. `Nodes` deals the ranks out,
hears of every exit, and knows for how many workers there is room. Nodes may come and go at any moment; with a node that
is lost its workers are, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from strata.errors import StrataError
from strata.launch.processes.base import WorkerExit
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from strata.launch.environment import WorkerSpec

log = logging.getLogger(__name__)
LOST = -signal.SIGKILL
"""The exit code of workers whose node is lost: whatever it was, it came from outside."""
KILLED = -signal.SIGKILL


class NodeLost(StrataError):
    """Nobody answers there any more."""


class Node(Protocol):
    """Calls belong to one event loop. One that is lost raises `NodeLost` from `next_exit`; orders to it do nothing."""

    @property
    def name(self) -> str:
        """No other node of the run has it."""
        ...

    @property
    def host(self) -> str:
        """The machine: workers of nodes on the same one count their local ranks together."""
        ...

    @property
    def address(self) -> str:
        """Where other nodes reach it, if rank 0 is here."""
        ...

    @property
    def slots(self) -> int:
        """How many workers it takes."""
        ...

    async def free_port(self) -> int:
        """For torch's store, which rank 0 opens in a moment. Somebody else may take it in between; then the attempt
        fails, and the next one has another.
        """
        ...

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        """Starts these workers. Each of them ends exactly once, also one that cannot be started."""
        ...

    async def next_exit(self) -> WorkerExit:
        """
        Raises:
            NodeLost: The node is gone, and its workers with it.
        """
        ...

    def kill(self, ranks: Iterable[int]) -> None:
        """From the first step of their launch on nobody is missed; who is not here is passed over."""
        ...

    def send_signal(self, rank: int, number: signal.Signals) -> None: ...

    async def dump_stacks(self, rank: int) -> None:
        """Writes where a worker stands to its log."""
        ...

    async def close(self) -> None:
        """Nobody of its workers is left."""
        ...


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """Nodes have come or gone."""

    room: int
    why: str


Event = WorkerExit | RoomChanged


class Seat(NamedTuple):
    """Where a rank goes."""

    node: int
    local_rank: int
    local_world_size: int
    host_rank: int
    """Which machine it is on, in the order of their first ranks."""


def lay_out(world_size: int, nodes: Sequence[tuple[str, int]]) -> list[Seat]:
    """Deals ranks out over nodes, each a host and its slots: neighbours together, and no node with more than its share
    as long as others have room. Fewer seats than asked for, where there is no more room.
    """
    shares = [0] * len(nodes)
    left = min(world_size, sum(slots for _, slots in nodes))
    while left:
        open_nodes = [index for index, (_, slots) in enumerate(nodes) if shares[index] < slots]
        for index in open_nodes[:left]:
            shares[index] += 1
            left -= 1
    hosts = {host: None for (host, _), share in zip(nodes, shares, strict=True) if share}
    host_ranks = {host: rank for rank, host in enumerate(hosts)}
    per_host: Counter[str] = Counter()
    for (host, _), share in zip(nodes, shares, strict=True):
        per_host[host] += share
    seats: list[Seat] = []
    taken: Counter[str] = Counter()
    for index, ((host, _), share) in enumerate(zip(nodes, shares, strict=True)):
        for _ in range(share):
            seats.append(Seat(index, taken[host], per_host[host], host_ranks[host]))
            taken[host] += 1
    return seats


class Nodes:
    """All of them. Room is what the nodes that are not draining have together; there is none before so many nodes as
    are `awaited` have come, or `open_up` was called.
    """

    def __init__(self, *nodes: Node, awaited: int = 0) -> None:
        self._awaited = awaited
        self._nodes: dict[str, Node] = {}
        self._draining: set[str] = set()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._at: dict[int, Node] = {}
        """Where each rank that has not ended is."""
        self._attempt = -1
        """The last that was launched."""
        self._killed: set[tuple[int, int]] = set()
        """Attempt and rank; perhaps before there was anybody to kill."""
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        for node in nodes:
            self._take_in(node)

    @property
    def room(self) -> int:
        return 0 if self._awaited > len(self._nodes) else sum(node.slots for node in self._open())

    @property
    def must_move(self) -> bool:
        """Workers are on a node that is leaving. They cannot stay, also if there is room for all of them elsewhere."""
        return any(node.name in self._draining for node in self._at.values())

    @property
    def names(self) -> list[str]:
        return list(self._nodes)

    async def next_event(self) -> Event:
        return await self._events.get()

    # -- who is there ----------------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        self._take_in(node)
        missing = self._awaited - len(self._nodes)
        if missing <= 0:
            self._awaited = 0  # who leaves later is not awaited again
        self._tell_room(f"node {node.name} has joined" + (f", {missing} more to come" if missing > 0 else ""))

    def open_up(self) -> None:
        """Those who are there must do."""
        if self._awaited:
            missing, self._awaited = self._awaited - len(self._nodes), 0
            self._tell_room(f"{counted(missing, 'node has', 'nodes have')} not come")

    def drain(self, name: str, why: str) -> None:
        """No further worker starts there."""
        if name in self._nodes and name not in self._draining:
            self._draining.add(name)
            self._tell_room(f"node {name} is leaving: {why}")

    def lose(self, name: str, why: str) -> None:
        """Its workers have ended, whether it could still say so or not."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self._draining.discard(name)
        listener = self._listeners.pop(name)
        if listener is not asyncio.current_task():
            listener.cancel()
        for rank in [rank for rank, at in self._at.items() if at is node]:
            self._ended(WorkerExit(rank, LOST, f"node {name} is lost: {why}"))
        self._tell_room(f"node {name} is lost: {why}")

    def _take_in(self, node: Node) -> None:
        assert node.name not in self._nodes, node.name
        self._nodes[node.name] = node
        self._listeners[node.name] = asyncio.create_task(self._listen(node), name=f"exits of {node.name}")

    def _open(self) -> list[Node]:
        return [node for name, node in self._nodes.items() if name not in self._draining]

    def _tell_room(self, why: str) -> None:
        self._events.put_nowait(RoomChanged(self.room, why))

    async def _listen(self, node: Node) -> None:
        try:
            while True:
                gone = await node.next_exit()
                if self._at.get(gone.rank) is node:
                    self._ended(gone)
        except NodeLost as error:
            self.lose(node.name, str(error))
        except Exception as error:  # nobody would hear of its workers any more, and the run would wait for ever
            log.exception("the exits of node %s cannot be heard", node.name)
            node.kill([rank for rank, at in self._at.items() if at is node])
            self.lose(node.name, f"{type(error).__name__}: {error}")

    def _ended(self, gone: WorkerExit) -> None:
        del self._at[gone.rank]
        self._events.put_nowait(gone)

    # -- workers ---------------------------------------------------------------------------------------------------

    async def launch(self, spec: WorkerSpec) -> None:
        """Starts all ranks of an attempt; `spec` says what they have in common. Returns when all of them run, or have
        ended.
        """
        self._attempt = spec.identity.attempt
        self._killed = {each for each in self._killed if each[0] >= spec.identity.attempt}
        nodes = self._open()
        hosts = list(dict.fromkeys(node.host for node in nodes))
        nodes.sort(key=lambda node: hosts.index(node.host))  # neighbours, whenever they have come
        seats = lay_out(spec.identity.world_size, [(node.host, node.slots) for node in nodes])
        for rank in range(len(seats), spec.identity.world_size):  # a node was lost a moment ago
            self._events.put_nowait(WorkerExit(rank, LOST, "no node has room for it"))
        if not seats:
            return
        first = nodes[seats[0].node]
        self._at |= {rank: nodes[seat.node] for rank, seat in enumerate(seats)}
        common = replace(
            spec.identity,
            master_addr=first.address,
            master_port=await first.free_port(),
            num_nodes=seats[-1].host_rank + 1,
        )
        identities = [
            replace(
                common,
                rank=rank,
                local_rank=seat.local_rank,
                local_world_size=seat.local_world_size,
                node_rank=seat.host_rank,
            )
            for rank, seat in enumerate(seats)
        ]
        workers = [replace(spec, identity=identity) for identity in identities]
        launches = [
            self._launch_at(node, [worker for worker in workers if seats[worker.identity.rank].node == index])
            for index, node in enumerate(nodes)
            if any(seat.node == index for seat in seats)
        ]
        await asyncio.gather(*launches)

    async def _launch_at(self, node: Node, workers: Sequence[WorkerSpec]) -> None:
        """Who was killed, or lost, up to this moment is not started. From here on the node has them, and hears it."""
        for worker in workers:
            if (worker.identity.attempt, worker.identity.rank) in self._killed and self._at.get(
                worker.identity.rank
            ) is node:
                self._ended(WorkerExit(worker.identity.rank, KILLED))
        await node.launch([worker for worker in workers if self._at.get(worker.identity.rank) is node])

    def kill(self, attempt: int, ranks: Iterable[int]) -> None:
        """Also before the attempt is launched: these ranks end without having begun."""
        ranks = list(ranks)
        self._killed.update((attempt, rank) for rank in ranks)
        if attempt == self._attempt:
            for node, theirs in self._by_node(ranks):
                node.kill(theirs)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self._at:
            self._at[rank].send_signal(rank, number)

    async def dump_stacks(self, ranks: Iterable[int]) -> None:
        """Of all of them at once: each takes seconds where a process is stuck."""
        dumps = [self._at[rank].dump_stacks(rank) for rank in ranks if rank in self._at]
        await asyncio.gather(*dumps, return_exceptions=True)

    async def close(self) -> None:
        for listener in self._listeners.values():
            listener.cancel()
        await asyncio.gather(*self._listeners.values(), return_exceptions=True)
        for node in self._nodes.values():
            with contextlib.suppress(NodeLost):
                await node.close()

    def _by_node(self, ranks: Iterable[int]) -> list[tuple[Node, list[int]]]:
        found: dict[str, tuple[Node, list[int]]] = {}
        for rank in ranks:
            if rank in self._at:
                node = self._at[rank]
                found.setdefault(node.name, (node, []))[1].append(rank)
        return list(found.values())
