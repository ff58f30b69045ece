"""The port for nodes, and all nodes of a run as the agent that leads it sees them.

A node is a place that can run workers: this machine, another machine, an actor on a Ray cluster. `Nodes` distributes
the ranks over the nodes, collects every exit and knows how many workers can be placed. Nodes may join and leave at any
time; a lost node takes its workers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from strata.errors import StrataError
from strata.launch.protocol import LOST, WorkerExit
from strata.printing import counted

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Sequence

    from strata.launch.environment import WorkerSpec

log = logging.getLogger(__name__)


class NodeLost(StrataError):
    """The node does not answer any more."""


class Node(Protocol):
    """A place for workers. Calls belong to one event loop.

    A lost node raises `NodeLost` from `next_exit` and ignores orders.
    """

    @property
    def name(self) -> str:
        """A name that no other node of the run has."""
        ...

    @property
    def host(self) -> str:
        """The machine. Workers of several nodes on one machine count their local ranks together."""
        ...

    @property
    def address(self) -> str:
        """Address at which other nodes reach rank 0, if it runs here."""
        ...

    @property
    def slots(self) -> int:
        """Number of workers that the node can run."""
        ...

    async def free_port(self) -> int:
        """Return a port for torch's store, which rank 0 opens in a moment. If another process takes it in between, the
        attempt fails and the next one gets another port.
        """
        ...

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        """Start these workers. Each of them ends exactly once, even one that cannot be started."""
        ...

    async def next_exit(self) -> WorkerExit:
        """
        Raises:
            NodeLost: The node is gone, and its workers with it.
        """
        ...

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill workers, from the moment at which `launch` begins. Ignore ranks that are not here."""
        ...

    def send_signal(self, rank: int, number: signal.Signals) -> None: ...

    async def dump_stacks(self, rank: int) -> None:
        """Write the stacks of a worker to its log."""
        ...

    async def close(self) -> None:
        """Kill all workers and wait for their exits."""
        ...


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """Nodes have joined or left."""

    room: int
    """Number of workers that can be placed now."""
    why: str


Event = WorkerExit | RoomChanged


class Seat(NamedTuple):
    """The place of one rank."""

    node: int
    local_rank: int
    local_world_size: int
    host_rank: int
    """Number of the machine, in the order of the first ranks."""


def lay_out(world_size: int, nodes: Sequence[tuple[str, int]], *, num_servers: int = 0) -> list[Seat]:
    """Distribute ranks over nodes, each given as host and slots: consecutive ranks together, and as evenly as the
    slots allow. Return fewer seats than asked for if there are not enough slots.

    The last `num_servers` ranks are spread over the hosts: their memory and their network are what a run needs most.
    To a worker, only the other workers of its host count.
    """
    shares = [0] * len(nodes)
    left = min(world_size, sum(slots for _, slots in nodes))
    while left:
        open_nodes = [index for index, (_, slots) in enumerate(nodes) if shares[index] < slots]
        for index in open_nodes[:left]:
            shares[index] += 1
            left -= 1
    slots = [(index, host) for index, (host, _) in enumerate(nodes) for _ in range(shares[index])]
    slots = _spread_last(slots, num_servers)
    num_workers = len(slots) - num_servers
    host_ranks = {host: rank for rank, host in enumerate(dict.fromkeys(host for _, host in slots))}
    per_host = Counter(host for _, host in slots)
    workers_of = Counter(host for _, host in slots[:num_workers]) if num_servers else per_host
    seats: list[Seat] = []
    taken: Counter[str] = Counter()
    for rank, (index, host) in enumerate(slots):
        local_world_size = (workers_of if rank < num_workers else per_host)[host]
        seats.append(Seat(index, taken[host], local_world_size, host_ranks[host]))
        taken[host] += 1
    return seats


def _spread_last(slots: list[tuple[int, str]], num_servers: int) -> list[tuple[int, str]]:
    """Move slots for servers to the end: of each host in turn, those with the most slots first."""
    workers = list(slots)
    servers: list[tuple[int, str]] = []
    used: Counter[str] = Counter()
    while workers and len(servers) < num_servers:
        left = Counter(host for _, host in workers)
        host = min(left, key=lambda each: (used[each], -left[each]))
        used[host] += 1
        at = max(number for number, (_, own) in enumerate(workers) if own == host)
        servers.append(workers.pop(at))
    return workers + servers


class Nodes:
    """All nodes of a run.

    No worker can be placed before `num_awaited` nodes have joined or `stop_awaiting` was called. After that, the room
    is the sum of the slots of all nodes that are not draining.
    """

    def __init__(self, *nodes: Node, num_awaited: int = 0) -> None:
        self._num_awaited = num_awaited
        self._nodes: dict[str, Node] = {}
        self._draining: set[str] = set()
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._at: dict[int, Node] = {}
        """Node of each rank that has not ended."""
        self._attempt = -1
        """Attempt that was launched last."""
        self._placed: dict[int, tuple[Node, WorkerSpec]] = {}
        """Where each rank of this attempt was launched, and with what."""
        self._killed: set[tuple[int, int]] = set()
        """Attempt and rank of killed workers, some of them perhaps before they were launched."""
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        for node in nodes:
            self._add(node)

    @property
    def room(self) -> int:
        return 0 if self._num_awaited > len(self._nodes) else sum(node.slots for node in self._open())

    @property
    def must_move(self) -> bool:
        """Workers run on a node that is leaving. They must move, even if other nodes have room for all of them."""
        return any(node.name in self._draining for node in self._at.values())

    @property
    def names(self) -> list[str]:
        return list(self._nodes)

    async def next_event(self) -> Event:
        return await self._events.get()

    # -- nodes join and leave --------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        self._add(node)
        missing = self._num_awaited - len(self._nodes)
        if missing <= 0:
            self._num_awaited = 0  # a node that leaves later is not awaited again
        self._report_room(f"node {node.name} has joined" + (f", {missing} more to come" if missing > 0 else ""))

    def stop_awaiting(self) -> None:
        """Start with the nodes that have joined by now."""
        if self._num_awaited:
            missing, self._num_awaited = self._num_awaited - len(self._nodes), 0
            self._report_room(f"{counted(missing, 'node has', 'nodes have')} not joined")

    def drain(self, name: str, why: str) -> None:
        """Start no further worker on this node."""
        if name in self._nodes and name not in self._draining:
            self._draining.add(name)
            self._report_room(f"node {name} is leaving: {why}")

    def lose(self, name: str, why: str) -> None:
        """Remove a node. Its workers have ended, whether it reported that or not."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self._draining.discard(name)
        listener = self._listeners.pop(name)
        if listener is not asyncio.current_task():
            listener.cancel()
        for rank in [rank for rank, at in self._at.items() if at is node]:
            self._ended(WorkerExit(rank, LOST, f"node {name} is lost: {why}", is_node_lost=True))
        self._report_room(f"node {name} is lost: {why}")

    def _add(self, node: Node) -> None:
        assert node.name not in self._nodes, node.name
        self._nodes[node.name] = node
        self._listeners[node.name] = asyncio.create_task(self._listen(node), name=f"exits of {node.name}")

    def _open(self) -> list[Node]:
        return [node for name, node in self._nodes.items() if name not in self._draining]

    def _report_room(self, why: str) -> None:
        self._events.put_nowait(RoomChanged(self.room, why))

    async def _listen(self, node: Node) -> None:
        try:
            while True:
                event = await node.next_exit()
                if self._at.get(event.rank) is node:
                    self._ended(event)
        except NodeLost as error:
            self.lose(node.name, str(error))
        except Exception as error:  # without this, the run would wait for the node's workers for ever
            log.exception("cannot receive the exits of node %s", node.name)
            node.kill([rank for rank, at in self._at.items() if at is node])
            self.lose(node.name, f"{type(error).__name__}: {error}")

    def _ended(self, event: WorkerExit) -> None:
        del self._at[event.rank]
        self._events.put_nowait(event)

    # -- workers ---------------------------------------------------------------------------------------------------

    async def launch(self, spec: WorkerSpec, *, num_servers: int = 0) -> None:
        """Start all ranks of an attempt, which have `spec` in common; return when all of them run or have ended.

        `num_servers`: how many of the last ranks to spread over the machines.
        """
        attempt, world_size = spec.identity.attempt, spec.identity.world_size
        self._attempt = attempt
        self._killed = {each for each in self._killed if each[0] >= attempt}
        nodes = self._open()
        hosts = list(dict.fromkeys(node.host for node in nodes))
        nodes.sort(key=lambda node: hosts.index(node.host))  # nodes of one machine together, whenever they joined
        seats = lay_out(world_size, [(node.host, node.slots) for node in nodes], num_servers=num_servers)
        for rank in range(len(seats), world_size):  # a node was lost a moment ago
            self._events.put_nowait(WorkerExit(rank, LOST, "no node has a free slot for it", is_node_lost=True))
        if not seats:
            return
        first = nodes[seats[0].node]
        self._at |= {rank: nodes[seat.node] for rank, seat in enumerate(seats)}
        common = replace(
            spec.identity,
            master_addr=first.address,
            master_port=await first.free_port(),
            num_nodes=max(seat.host_rank for seat in seats) + 1,
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
        self._placed = {rank: (nodes[seat.node], workers[rank]) for rank, seat in enumerate(seats)}
        launches = [
            self._launch_at(node, [worker for worker in workers if seats[worker.identity.rank].node == index])
            for index, node in enumerate(nodes)
            if any(seat.node == index for seat in seats)
        ]
        await asyncio.gather(*launches)

    async def restart(self, attempt: int, rank: int, incarnation: int) -> None:
        """Start one rank of the current attempt again, at its place. It has ended; the others keep running."""
        if attempt != self._attempt:
            return
        node, spec = self._placed[rank]
        if self._nodes.get(node.name) is not node:
            self._events.put_nowait(WorkerExit(rank, LOST, f"node {node.name} is lost", is_node_lost=True))
            return
        self._at[rank] = node
        await self._launch_at(node, [replace(spec, identity=replace(spec.identity, incarnation=incarnation))])

    async def add_servers(self, attempt: int, ranks: Sequence[int], *, num_before: int, layout: int) -> None:
        """Start more parameter servers in the current attempt, beside the last one. The others keep running.

        Args:
            num_before: The number of servers so far.
            layout: How often the number has changed in this attempt, with this change.
        """
        if attempt != self._attempt:
            return
        node, last = self._placed[ranks[0] - 1]
        if self._nodes.get(node.name) is not node:
            for rank in ranks:
                self._events.put_nowait(WorkerExit(rank, LOST, f"node {node.name} is lost", is_node_lost=True))
            return
        added = [
            replace(
                last,
                identity=replace(
                    last.identity,
                    rank=rank,
                    world_size=ranks[-1] + 1,
                    local_rank=last.identity.local_rank + number,
                    incarnation=0,
                ),
                num_servers=num_before + len(ranks),
                layout=layout,
                servers_before=num_before,
            )
            for number, rank in enumerate(ranks, start=1)
        ]
        for worker in added:
            self._placed[worker.identity.rank] = (node, worker)
            self._at[worker.identity.rank] = node
        await self._launch_at(node, added)

    def resized(self, world_size: int, num_servers: int, layout: int) -> None:
        """The number of servers has changed: a rank that is restarted alone is started with the new one."""
        self._placed = {
            rank: (
                node,
                replace(
                    spec,
                    identity=replace(spec.identity, world_size=world_size),
                    num_servers=num_servers,
                    layout=layout,
                    servers_before=0,
                ),
            )
            for rank, (node, spec) in self._placed.items()
            if rank < world_size
        }

    async def _launch_at(self, node: Node, workers: Sequence[WorkerSpec]) -> None:
        """Start the workers that were neither killed nor lost until now. From here on the node handles kills."""
        for identity in [worker.identity for worker in workers]:
            if (identity.attempt, identity.rank) in self._killed and self._at.get(identity.rank) is node:
                self._ended(WorkerExit(identity.rank, LOST, is_killed=True))
        await node.launch([worker for worker in workers if self._at.get(worker.identity.rank) is node])

    def kill(self, attempt: int, ranks: Iterable[int]) -> None:
        """Kill workers. Before their attempt is launched, this prevents their start."""
        ranks = list(ranks)
        self._killed.update((attempt, rank) for rank in ranks)
        if attempt == self._attempt:
            for node, theirs in self._by_node(ranks):
                node.kill(theirs)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self._at:
            self._at[rank].send_signal(rank, number)

    async def dump_stacks(self, ranks: Iterable[int]) -> None:
        """Dump the stacks of all these workers at once: a stuck process takes seconds."""
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
