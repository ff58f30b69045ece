"""Where ranks are, and how they form a grid. Pure arithmetic.

A grid has rows of `group_size` consecutive ranks. With the default group size, a row is a node: ranks that share
memory, while the ranks of a column are on different nodes. The first rank of each row is its leader.

        columns →   0   1   2
    row 0 (node a)  0   1   2        row of rank 4:     3 4 5
    row 1 (node b)  3   4   5        column of rank 4:  1 4        leaders: 0 3
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many ranks there are, and how many of them share a node."""

    world_size: int
    ranks_per_node: int = 1
    """The same for all nodes. 1 if nodes differ in size: then every link counts as one between nodes."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise InvalidArgument(
                f"{self.world_size} ranks do not fill nodes of {self.ranks_per_node} ranks; pass a world size that is "
                "a multiple of ranks_per_node",
                field="ranks_per_node",
            )

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


def from_local_ranks(local_ranks: Sequence[int], local_world_sizes: Sequence[int]) -> Topology:
    """Return the topology of ranks that each know their local rank and the number of ranks of their node."""
    world_size, size = len(local_ranks), local_world_sizes[0]
    is_regular = (
        size >= 1
        and world_size % size == 0
        and all(each == size for each in local_world_sizes)
        and all(local == rank % size for rank, local in enumerate(local_ranks))
    )
    return Topology(world_size=world_size, ranks_per_node=size if is_regular else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks in rows of `group_size`, in rank order."""

    world_size: int
    group_size: int

    @property
    def num_rows(self) -> int:
        return self.world_size // self.group_size

    @property
    def is_flat(self) -> bool:
        """Whether there is only one row or only one column, which leaves nothing to split."""
        return self.group_size == 1 or self.num_rows == 1

    @property
    def leaders(self) -> list[int]:
        return list(range(0, self.world_size, self.group_size))

    def row(self, rank: int) -> list[int]:
        first = rank - rank % self.group_size
        return list(range(first, first + self.group_size))

    def column(self, rank: int) -> list[int]:
        return list(range(rank % self.group_size, self.world_size, self.group_size))


def make_grid(topology: Topology, group_size: int | None) -> Grid:
    """Return the grid for a group size; None: a row is a node, or else the grid is as square as possible.

    Raises:
        InvalidArgument: The world size is not a multiple of the group size.
    """
    world_size = topology.world_size
    if group_size is None:
        is_node_a_row = 1 < topology.ranks_per_node < world_size
        group_size = topology.ranks_per_node if is_node_a_row else _largest_divisor_up_to_root(world_size)
    if world_size % group_size:
        sizes = " or ".join(map(str, divisors(world_size)[1:-1]))
        cure = f"use {sizes}, or leave group_size out" if sizes else "use algorithm='ring'"
        raise InvalidArgument(
            f"group_size={group_size} does not divide the world size, {world_size}; {cure}, or change the number of "
            "workers",
            field="group_size",
        )
    return Grid(world_size=world_size, group_size=group_size)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _largest_divisor_up_to_root(number: int) -> int:
    return max(divisor for divisor in divisors(number) if divisor * divisor <= number)
