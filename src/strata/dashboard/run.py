"""What the page of a run can read and order beyond its coordinator: logs and stacks of workers, a stop, another size.

Orders take the path of `strata stop` and `strata scale`: the control socket of the run's agent, which decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from strata.errors import ConfigError, InvalidArgument
from strata.launch import control
from strata.launch.record.directory import UNDER_WAY, state_now
from strata.launch.record.log import last_lines

if TYPE_CHECKING:
    from strata.launch.record.directory import RunDirectory

MAX_LINES = 2_000
MAX_LOG_BYTES = 512 << 10
"""Bytes at the end of a log that are read for one answer."""


class Log(NamedTuple):
    rank: int
    attempt: int
    attempts: tuple[int, ...]
    """Attempts of which this rank has a log, oldest first."""
    lines: list[str]


class RunControl(Protocol):
    """A run as its page sees it. All methods may block on files or a socket."""

    @property
    def name(self) -> str: ...

    @property
    def takes_orders(self) -> bool:
        """Whether the routes of orders exist."""
        ...

    def live_page(self) -> str | None:
        """Return where the run has its page if this is another one; empty if it has none, None if this is it."""
        ...

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest number of workers, without parameter servers."""
        ...

    @property
    def num_workers(self) -> int | None:
        """The current number of workers; None before the run has started."""
        ...

    def log(self, rank: int, attempt: int | None, num_lines: int) -> Log:
        """Return the end of a log, of the newest attempt by default.

        Raises:
            InvalidArgument: There is no such log.
        """
        ...

    def stop(self, *, is_now: bool) -> None: ...

    def scale(self, workers: int) -> None: ...

    def dump_stacks(self, rank: int) -> None:
        """Write the stacks of a worker's threads to its log; it continues."""
        ...


class DirectoryRun:
    """Implements `RunControl` for the run of a directory."""

    def __init__(self, directory: RunDirectory, *, is_over: bool = False) -> None:
        """`is_over`: this is the page of what the run has left behind, which takes no orders."""
        self._directory = directory
        self._is_over = is_over

    @property
    def takes_orders(self) -> bool:
        return not self._is_over

    def live_page(self) -> str | None:
        status = self._directory.status
        if not self._is_over or status is None or state_now(status) not in UNDER_WAY:
            return None
        return status.page

    @property
    def name(self) -> str:
        return self._directory.name

    @property
    def range(self) -> tuple[int, int]:
        spec, status = self._directory.spec, self._directory.status
        # A script under `strata run` decides on its servers when it runs.
        num_servers = max(spec.num_servers, 0 if status is None else status.num_servers)
        workers = spec.workers.plus(-num_servers)
        return max(workers.at_least, 1), workers.at_most

    @property
    def num_workers(self) -> int | None:
        status = self._directory.status
        return status.world_size - status.num_servers if status is not None and status.world_size else None

    def log(self, rank: int, attempt: int | None, num_lines: int) -> Log:
        found = {each.attempt: each.path for each in self._directory.logs() if each.rank == rank}
        if not found:
            raise InvalidArgument(f"rank={rank} has no log on this machine; choose another rank", field="rank")
        chosen = max(found) if attempt is None else attempt
        if chosen not in found:
            known = ", ".join(map(str, sorted(found)))
            raise InvalidArgument(f"rank {rank} has no log of attempt={chosen}; choose one of {known}", field="attempt")
        lines = last_lines(found[chosen], num_lines, max_bytes=MAX_LOG_BYTES)
        return Log(rank, chosen, tuple(sorted(found)), lines)

    def stop(self, *, is_now: bool) -> None:
        control.ask(self._control(), control.Stop(is_now=is_now))

    def scale(self, workers: int) -> None:
        control.ask(self._control(), control.Scale(workers))

    def dump_stacks(self, rank: int) -> None:
        control.ask(self._control(), control.Stacks(rank))

    def _control(self) -> str:
        status = self._directory.status
        if status is None or not status.control:
            raise ConfigError(f"run {self.name} has not started yet; try again in a moment")
        return status.control
