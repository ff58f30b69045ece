"""Bytes per link: what each rank sends to each other rank in one all-reduce. Pure arithmetic.

Each algorithm is a list of stages, and each stage a list of messages between two ranks, as gloo sends them: rings send
to the next rank, reduce-scatters exchange chunks directly, and broadcasts follow a binomial tree. Summing the messages
by the places of sender and receiver gives the bytes on the links within nodes and between nodes. Headers of TCP and IP
are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.trainer.strategy.topology import Grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.trainer.strategy.cost import Choice
    from strata.trainer.strategy.topology import Topology


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to another during a stage."""

    source: int
    target: int
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes that a rank or a node sends in one all-reduce."""

    intra_bytes: float = 0.0
    """To ranks of the same node."""
    inter_bytes: float = 0.0
    """To other nodes."""

    def __add__(self, other: Sent) -> Sent:
        return Sent(intra_bytes=self.intra_bytes + other.intra_bytes, inter_bytes=self.inter_bytes + other.inter_bytes)


def sent_by_rank(choice: Choice, num_bytes: float, topology: Topology) -> list[Sent]:
    """Return what each rank sends in one all-reduce of `num_bytes`."""
    totals: dict[int, Sent] = defaultdict(Sent)
    for message in messages(choice, num_bytes, topology):
        is_local = topology.node_of(message.source) == topology.node_of(message.target)
        totals[message.source] += (
            Sent(intra_bytes=message.num_bytes) if is_local else Sent(inter_bytes=message.num_bytes)
        )
    return [totals[rank] for rank in range(topology.world_size)]


def sent_by_node(choice: Choice, num_bytes: float, topology: Topology) -> list[Sent]:
    """Return what the ranks of each node send together in one all-reduce of `num_bytes`."""
    nodes = [Sent()] * topology.num_nodes
    for rank, sent in enumerate(sent_by_rank(choice, num_bytes, topology)):
        nodes[topology.node_of(rank)] += sent
    return nodes


def messages(choice: Choice, num_bytes: float, topology: Topology) -> Iterator[Message]:
    """Yield the messages of one all-reduce, merged by stage, source and target."""
    world_size = topology.world_size
    if choice.algorithm == "ring":
        yield from _around(range(world_size), num_bytes, num_rounds=2)
        return
    grid = Grid(world_size=world_size, group_size=choice.group_size)
    rows = [grid.row(leader) for leader in grid.leaders]
    if choice.algorithm == "group":
        for row in rows:
            yield from _exchange(row, num_bytes)
            yield from (Message(rank, row[0], num_bytes / len(row)) for rank in row[1:])
            yield from _tree(row, num_bytes)
        yield from _around(grid.leaders, num_bytes, num_rounds=2)
        return
    for row in rows:
        yield from _exchange(row, num_bytes)
        yield from _around(row, num_bytes, num_rounds=1)
    for first in rows[0]:
        yield from _around(grid.column(first), num_bytes / grid.group_size, num_rounds=2)


def _around(ring: Sequence[int], num_bytes: float, *, num_rounds: int) -> Iterator[Message]:
    """Yield the messages of a ring: a reduce-scatter and an all-gather are one round each."""
    size = len(ring)
    share_bytes = num_rounds * (size - 1) / size * num_bytes
    if size > 1:
        yield from (Message(rank, ring[(place + 1) % size], share_bytes) for place, rank in enumerate(ring))


def _exchange(ranks: Sequence[int], num_bytes: float) -> Iterator[Message]:
    """Yield the messages of a reduce-scatter in which every rank sends each other rank its chunk."""
    share_bytes = num_bytes / len(ranks)
    yield from (Message(one, other, share_bytes) for one in ranks for other in ranks if one != other)


def _tree(ranks: Sequence[int], num_bytes: float) -> Iterator[Message]:
    """Yield the messages of a broadcast from the first rank: in each round, those that have the bytes double."""
    num_ready = 1
    while num_ready < len(ranks):
        for place in range(min(num_ready, len(ranks) - num_ready)):
            yield Message(ranks[place], ranks[place + num_ready], num_bytes)
        num_ready *= 2
