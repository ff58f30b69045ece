"""Which server owns a key: keys fall into buckets, and the ring of the coordinator assigns buckets to servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.coordinator.state import ring
from strata.servers.table.keys import NUM_BUCKETS, buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strata.servers.table.keys import Keys

_POINTS = ring.shard_keys("buckets", NUM_BUCKETS, 0)


class Placement:
    """An assignment of all buckets to servers. Balanced within 5 %."""

    def __init__(self, servers: Sequence[str], owners: NDArray[np.int32]) -> None:
        self.servers = tuple(servers)
        self.owners = owners
        """The index in `servers`, by bucket."""

    @classmethod
    def first(cls, servers: Sequence[str]) -> Placement:
        return cls(servers, _assign(servers))

    def changed(self, servers: Sequence[str]) -> Placement:
        """Return the placement on other servers, for which as few buckets as possible move."""
        index = {name: number for number, name in enumerate(servers)}
        kept = np.array([index.get(name, -1) for name in self.servers], np.int32)
        return Placement(servers, _assign(servers, kept[self.owners]))

    def owners_of(self, keys: Keys) -> NDArray[np.int32]:
        """Return the index of the server that owns each key."""
        return self.owners[buckets(keys)]


def _assign(servers: Sequence[str], current: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    return ring.assign(_POINTS, workers=servers, capacities=[1.0] * len(servers), current=current)
