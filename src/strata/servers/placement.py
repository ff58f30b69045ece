"""Which server owns a key: keys fall into buckets, and the ring of the coordinator assigns buckets to servers.

The placement depends on the number of servers alone, so workers, servers and restarted processes agree on it without a
message. It is the one that results from starting with one server and adding the others one by one. Each addition moves
buckets to the new server only, and as few as the balance allows; hence removing the last servers moves only theirs.
"""

from __future__ import annotations

from functools import lru_cache
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

    @staticmethod
    def of(num_servers: int) -> Placement:
        """Return the placement on as many servers, whatever their number was before."""
        return _of(num_servers)

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

    def moved_to(self, other: Placement, server: int) -> NDArray[np.int32]:
        """Return the servers that own buckets of `server` in another placement, and of which it gets rows then."""
        is_moved = (other.owners == server) & (self.owners != server)
        return np.unique(self.owners[is_moved])


def server_names(number: int) -> list[str]:
    """Return the names by which the ring knows the servers."""
    return [f"server-{each}" for each in range(number)]


@lru_cache(maxsize=8)
def _of(num_servers: int) -> Placement:
    found = Placement.first(server_names(1))
    for number in range(2, num_servers + 1):
        found = found.changed(server_names(number))
    found.owners.flags.writeable = False
    return found


def _assign(servers: Sequence[str], current: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    return ring.assign(_POINTS, workers=servers, capacities=[1.0] * len(servers), current=current)
