"""The cost model: how long each algorithm takes for a message, and which one is fastest. Pure arithmetic.

A link costs a latency for each message and the inverse of its bandwidth for each byte (the α-β model). There are three
kinds of links: between ranks of a node, between nodes when one rank of each node sends, and between nodes when all of
them send at the same time and share the node's network card and cores. Stages of an algorithm follow one another, and a
stage is as fast as its slowest link. `links.py` measures the three; `table.py` shows the fastest by number of nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from strata.errors import InvalidArgument
from strata.trainer.strategy.topology import Grid, divisors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.trainer.strategy.topology import Topology

Algorithm: TypeAlias = Literal["memory", "ring", "group", "2d"]

MIN_GAIN = 0.1
"""Share of the ring's time that another algorithm must save. The ring needs no further process groups and buffers, and
the model's error is about as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message costs."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise InvalidArgument(
                f"a link with a latency of {self.latency_s} s and {self.bytes_per_s} bytes/s is impossible; pass a "
                "latency of at least 0 and a bandwidth above 0"
            )

    def __str__(self) -> str:
        is_fast = self.bytes_per_s >= 1e8
        rate = f"{self.bytes_per_s / 1e9:.3g} GB/s" if is_fast else f"{self.bytes_per_s / 1e6:.3g} MB/s"
        return f"{self.latency_s * 1e6:.0f} µs and {rate}"

    def slower_of(self, other: Link) -> Link:
        return Link(
            latency_s=max(self.latency_s, other.latency_s), bytes_per_s=min(self.bytes_per_s, other.bytes_per_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The three kinds of links, each with what one sender gets of it."""

    intra: Link
    """Between ranks of a node."""
    inter: Link
    """Between nodes, while one rank of each node sends."""
    shared: Link
    """Between nodes, while all ranks of each node send."""

    @classmethod
    def uniform(cls, link: Link) -> Links:
        return cls(intra=link, inter=link, shared=link)

    def across(self, num_flows: int, ranks_per_node: int) -> Link:
        """Return the link between nodes while `num_flows` ranks of each node send."""
        if ranks_per_node == 1:
            return self.inter
        if num_flows == ranks_per_node:
            return self.shared
        share = (num_flows - 1) / (ranks_per_node - 1)
        node_bytes_per_s = max(self.shared.bytes_per_s * ranks_per_node, self.inter.bytes_per_s)
        return Link(
            latency_s=self.inter.latency_s + share * (self.shared.latency_s - self.inter.latency_s),
            bytes_per_s=min(self.inter.bytes_per_s, node_bytes_per_s / num_flows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm, and the ranks of a row for those that have rows."""

    algorithm: Algorithm
    group_size: int = 1

    def __str__(self) -> str:
        return self.algorithm if self.group_size == 1 else f"{self.algorithm} with rows of {self.group_size}"


RING = Choice(algorithm="ring")
MEMORY = Choice(algorithm="memory")
"""Needs no prediction: where all ranks share memory, nothing else is as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice and why it was made."""

    choice: Choice
    reason: str


def predict_s(choice: Choice, num_bytes: float, topology: Topology, links: Links) -> float:
    """Return the predicted seconds of one all-reduce of `num_bytes`."""
    ring = _ring_link(topology, links, num_flows=1)
    if choice.algorithm == "ring":
        return 2 * _steps_s(topology.world_size, num_bytes, ring)
    grid = Grid(world_size=topology.world_size, group_size=choice.group_size)
    num_flows = min(grid.group_size, topology.ranks_per_node)
    is_within = grid.group_size <= topology.ranks_per_node
    exchange = links.intra if is_within else _ring_link(topology, links, num_flows=num_flows)
    scatter_s = _steps_s(grid.group_size, num_bytes, exchange)
    gather_s = _steps_s(grid.group_size, num_bytes, links.intra if is_within else ring)
    if choice.algorithm == "group":
        leaders_s = 2 * _steps_s(grid.num_rows, num_bytes, _column_link(grid, topology, links, num_flows=1))
        return scatter_s + gather_s + leaders_s + _broadcast_s(grid.group_size, num_bytes, topology, links)
    column = _column_link(grid, topology, links, num_flows=num_flows)
    return scatter_s + 2 * _steps_s(grid.num_rows, num_bytes / grid.group_size, column) + gather_s


def candidates(topology: Topology) -> Iterator[Choice]:
    """Yield the ring and every grid whose rows divide a node or consist of whole nodes."""
    yield RING
    for size in divisors(topology.world_size)[1:-1]:
        if topology.ranks_per_node % size == 0 or size % topology.ranks_per_node == 0:
            yield Choice(algorithm="group", group_size=size)
            yield Choice(algorithm="2d", group_size=size)


def decide(num_bytes: float, topology: Topology, links: Links) -> Decision:
    """Return the choice with the shortest predicted time; the ring, if no other saves `MIN_GAIN` of its time."""
    times_s = {choice: predict_s(choice, num_bytes, topology, links) for choice in candidates(topology)}
    fastest = min(times_s, key=lambda choice: times_s[choice])
    chosen = fastest if times_s[fastest] < (1 - MIN_GAIN) * times_s[RING] else RING
    others = [choice for choice in _best_of_each(times_s) if choice != chosen]
    compared = ", ".join(f"{choice} {times_s[choice] * 1e3:.3g} ms" for choice in others) or "no other fits"
    return Decision(
        choice=chosen,
        reason=(
            f"predicted for {num_bytes / 1e6:.3g} MB on {topology.num_nodes} × {topology.ranks_per_node} ranks: "
            f"{chosen} {times_s[chosen] * 1e3:.3g} ms, {compared}; links: within a node {links.intra}; between nodes "
            f"{links.inter}; shared by all ranks of a node {links.shared}"
        ),
    )


def _best_of_each(times_s: dict[Choice, float]) -> list[Choice]:
    """Return the fastest choice of each algorithm."""
    best: dict[str, Choice] = {}
    for choice in sorted(times_s, key=lambda choice: times_s[choice]):
        best.setdefault(choice.algorithm, choice)
    return list(best.values())


def _steps_s(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Return the time of a reduce-scatter, an all-gather or a gather: n - 1 steps with an n-th of the bytes each."""
    return (num_ranks - 1) * (link.latency_s + num_bytes / num_ranks / link.bytes_per_s)


def _broadcast_s(num_ranks: int, num_bytes: float, topology: Topology, links: Links) -> float:
    """Return the time of a broadcast along a binomial tree, whose last rounds may reach other nodes."""
    num_local = min(num_ranks, topology.ranks_per_node)
    shared = links.across(num_local, topology.ranks_per_node)
    rounds = ((num_local, links.intra), (num_ranks // num_local, shared))
    return sum(math.ceil(math.log2(n)) * (link.latency_s + num_bytes / link.bytes_per_s) for n, link in rounds)


def _ring_link(topology: Topology, links: Links, *, num_flows: int) -> Link:
    """Return the pace of rings that pass through all nodes; every step waits for the slowest link."""
    if topology.num_nodes == 1:
        return links.intra
    across = links.across(num_flows, topology.ranks_per_node)
    return across if topology.ranks_per_node == 1 else across.slower_of(links.intra)


def _column_link(grid: Grid, topology: Topology, links: Links, *, num_flows: int) -> Link:
    """Return the pace of rings along columns, of which `num_flows` leave each node."""
    if grid.group_size < topology.ranks_per_node:  # several rows on a node: columns have links of both kinds
        return _ring_link(topology, links, num_flows=num_flows)
    return links.across(num_flows, topology.ranks_per_node)
