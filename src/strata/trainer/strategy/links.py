"""Measures latency and bandwidth of the links of a running process group, in about a second at most.

A link is measured by what it is for: all-reduces of a small and a large tensor, over rows (within nodes), over columns
(all ranks of a node send to other nodes) and over the leaders alone. Every time that counts is the slowest rank's, and
all ranks know it, so they take the same decisions and end with the same figures.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from strata.trainer.strategy.cost import Link, Links
from strata.trainer.strategy.reduce import make_groups, world
from strata.trainer.strategy.topology import Grid

if TYPE_CHECKING:
    from strata.trainer.strategy.topology import Topology

REPEATS = 7
"""Of each size, if time allows; the median counts."""
SMALL_BYTES = 1_024
LARGE_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
LONG_ENOUGH_S = 0.02
"""A larger tensor is not tried when one took this long."""
BUDGET_S = 0.25
"""For one kind of link. Once it is used up, what was measured so far must do."""


def measure(topology: Topology, rank: int, device: torch.device) -> Links:
    """Measure the links between all ranks. Collective."""
    if topology.num_nodes == 1 or topology.ranks_per_node == 1:
        return Links.uniform(_Ruler(world(), device).fit())
    grid = Grid(world_size=topology.world_size, group_size=topology.ranks_per_node)
    groups = make_groups(grid, rank)
    is_leader = rank in grid.leaders
    return Links(
        intra=_Ruler(groups.row, device).fit(),
        inter=_Ruler(groups.column, device, takes_part=is_leader).fit(),
        shared=_Ruler(groups.column, device).fit(),
    )


class _Ruler:
    """Measures the links of one kind of group, of which all ranks have one of the same size."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, takes_part: bool = True) -> None:
        self._group = group
        self._device = device
        self._takes_part = takes_part
        self._created_s = time.perf_counter()
        self._used_s = 0.0

    def fit(self) -> Link:
        """Return the link that explains the times of a small and a large all-reduce."""
        small_s = self._median_s(SMALL_BYTES)
        large_bytes, large_s = 0, 0.0
        for large_bytes in LARGE_BYTES:
            large_s = self._median_s(large_bytes)
            if large_s > LONG_ENOUGH_S or self._used_s > BUDGET_S:
                break
        return fit_link(dist.get_world_size(self._group), small_s, large_bytes, large_s)

    def _median_s(self, num_bytes: int) -> float:
        """Return the slowest rank's median."""
        tensor = torch.zeros(num_bytes // 4, device=self._device)
        first_s = self._slowest_s(self._sample_s(tensor))  # touches new memory, so it only shows how many fit
        num_samples = min(max(int((BUDGET_S - self._used_s) / (2 * first_s)), 1), REPEATS)
        return self._slowest_s(statistics.median(self._sample_s(tensor) for _ in range(num_samples)))

    def _sample_s(self, tensor: torch.Tensor) -> float:
        if not self._takes_part:
            return 0.0
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)  # the ranks start together
        self._synchronize()
        start_s = time.perf_counter()
        dist.all_reduce(tensor, group=self._group)
        self._synchronize()
        return time.perf_counter() - start_s

    def _slowest_s(self, seconds: float) -> float:
        """Return the largest of all ranks, and agree on the time used so far."""
        used_s = time.perf_counter() - self._created_s
        slowest = torch.tensor([seconds, used_s], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        slowest_s, self._used_s = slowest.tolist()
        return float(slowest_s)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def fit_link(num_ranks: int, small_s: float, large_bytes: int, large_s: float) -> Link:
    """Return latency and bandwidth that explain the times of two ring all-reduces."""
    num_steps = 2 * (num_ranks - 1)
    bytes_s = large_s - small_s if large_s > small_s else large_s  # noise may turn them around
    return Link(latency_s=small_s / num_steps, bytes_per_s=num_steps / num_ranks * large_bytes / bytes_s)
