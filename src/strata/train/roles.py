"""Which ranks of a run train and which serve parameters. Pure.

The last ranks of a run may be parameter servers. They are members like all others, and write their part of every
checkpoint, but they take no part in collectives and read no data. To the training code, the world consists of the
workers alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint import CheckpointMetadata
    from strata.identity import Identity

SAVED_SERVERS = "strata/servers"
"""Key in a checkpoint's metadata: how many of its last ranks were servers."""
SAVED_PLACEMENT = "strata/placement"
"""Key in a checkpoint's metadata: which rule assigned rows to servers. Under another one, equal numbers of servers do
not mean that a server owns what the server of the same number has saved."""
PLACEMENT = 2
"""The current rule: `Placement.of`."""


class Companion(Protocol):
    """What workers notify of their collective calls, so that the servers make them too."""

    def saving(self, step: int) -> None:
        """All workers save after this step."""
        ...

    def ending(self, step: int) -> None:
        """All workers have reached the end of their training."""
        ...

    def resizing(self, step: int, num_servers: int, layout: int) -> None:
        """Rows move to another number of servers, after this step of all workers; return when they have.

        Args:
            layout: How often the number has changed in this attempt, with this change.
        """
        ...

    def resized(self) -> None:
        """The roles of the context have changed: use the servers that there are now."""
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The workers and servers of a run, as seen by one rank."""

    rank: int
    num_workers: int
    num_servers: int

    @classmethod
    def of(cls, identity: Identity, num_servers: int) -> Roles:
        """
        Raises:
            ConfigError: No rank would be left to train.
        """
        num_workers = identity.world_size - num_servers
        if num_workers < 1:
            raise ConfigError(
                f"{identity.world_size} processes cannot hold {num_servers} parameter servers and a worker; start at "
                f"least {num_servers + 1}, or lower servers=",
                field="servers",
            )
        return cls(identity.rank, num_workers, num_servers)

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_workers

    @property
    def server(self) -> int:
        """The number of this server, from 0."""
        return self.rank - self.num_workers

    @property
    def server_ranks(self) -> range:
        return range(self.num_workers, self.num_workers + self.num_servers)

    def next_server(self, distance: int) -> int:
        """Return the rank of a server that is as many places after this one, on the ring of servers."""
        return self.num_workers + (self.server + distance) % self.num_servers

    def among_workers(self, identity: Identity) -> Identity:
        """Return the identity of a worker in the world of the workers."""
        first = identity.rank - identity.local_rank
        local_workers = min(self.num_workers - first, identity.local_world_size)
        return replace(identity, world_size=self.num_workers, local_world_size=max(local_workers, 1))

    def saved_by(self, checkpoint: CheckpointMetadata) -> Sequence[int]:
        """Return the ranks of a checkpoint whose states this rank loads.

        A worker that the checkpoint does not have takes the state of rank 0. A server takes its own if there were as
        many servers, and else those of all servers, of which it keeps its rows.

        Raises:
            ConfigError: The checkpoint has no servers, and this rank is one.
        """
        num_saved = int(checkpoint.metadata.get(SAVED_SERVERS, 0))
        num_workers = checkpoint.num_ranks - num_saved
        if not self.is_server:
            return [self.rank if self.rank < num_workers else 0]
        if not num_saved:
            raise ConfigError(
                f"checkpoint {checkpoint.id} was saved without parameter servers; resume with the strategy that saved "
                "it, or start a new fit with another directory in checkpoints=",
                field="strategy",
            )
        if num_saved == self.num_servers and checkpoint.metadata.get(SAVED_PLACEMENT) == PLACEMENT:
            return [num_workers + self.server]
        return range(num_workers, checkpoint.num_ranks)
