"""Which algorithm wins on 2 to 1,000 nodes, as the table of docs/all-reduce.md.

python -m strata.trainer.strategy.table
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.trainer.strategy.cost import RING, Link, Links, decide, predict_s
from strata.trainer.strategy.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000)
MESSAGES = {"64 KB": 64_000, "1 MB": 1_000_000, "25 MB": 25_000_000}
"""A small model's gradients, a middle-sized one's, and a full bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A network to predict for; its figures are assumptions that the table states."""

    name: str
    ranks_per_node: int
    links: Links


_ETHERNET = Link(latency_s=50e-6, bytes_per_s=1.2e9)
"""One TCP connection on 25 Gbit/s Ethernet, limited by the core that serves it."""
_MEMORY = Link(latency_s=15e-6, bytes_per_s=4e9)
"""Two processes of a node over the loopback interface."""

CLUSTERS = (
    Cluster(name="one rank per node", ranks_per_node=1, links=Links.uniform(_ETHERNET)),
    Cluster(
        name="eight ranks per node",
        ranks_per_node=8,
        links=Links(intra=_MEMORY, inter=_ETHERNET, shared=Link(latency_s=60e-6, bytes_per_s=3.1e9 / 8)),
    ),
    Cluster(
        name="eight ranks on few cores",
        ranks_per_node=8,
        links=Links(intra=_MEMORY, inter=_ETHERNET, shared=Link(latency_s=400e-6, bytes_per_s=0.8e9 / 8)),
    ),
)


def lines(clusters: Sequence[Cluster] = CLUSTERS, nodes: Sequence[int] = NODES) -> Iterator[str]:
    """Yield the Markdown tables, one for each cluster."""
    for cluster in clusters:
        yield f"**{cluster.name.capitalize()}**: {_assumptions(cluster)}."
        yield ""
        yield f"| Nodes | {' | '.join(MESSAGES)} |"
        yield "|---|" + "---|" * len(MESSAGES)
        for num_nodes in nodes:
            cells = [_cell(cluster, num_nodes, num_bytes) for num_bytes in MESSAGES.values()]
            yield f"| {num_nodes:,} | {' | '.join(cells)} |"
        yield ""


def _assumptions(cluster: Cluster) -> str:
    links, size = cluster.links, cluster.ranks_per_node
    if size == 1:
        return f"{links.inter} between nodes"
    return (
        f"{links.intra} within a node; between nodes {links.inter} for one connection per node, {links.shared} for "
        f"each of {size}"
    )


def _cell(cluster: Cluster, num_nodes: int, num_bytes: int) -> str:
    topology = Topology(world_size=num_nodes * cluster.ranks_per_node, ranks_per_node=cluster.ranks_per_node)
    choice = decide(num_bytes, topology, cluster.links).choice
    ring_ms, chosen_ms = (predict_s(each, num_bytes, topology, cluster.links) * 1e3 for each in (RING, choice))
    if choice == RING:
        return f"ring, {ring_ms:.3g} ms"
    return f"{choice.algorithm} ({choice.group_size}), {chosen_ms:.3g} ms; ring {ring_ms:.3g}"


if __name__ == "__main__":
    print("\n".join(lines()))
