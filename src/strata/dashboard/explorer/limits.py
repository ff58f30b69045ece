"""The limits of reads on demand: bytes, time and concurrency.

Every request that reads data gets a `Budget`. The code that reads charges it before each piece and checks it between
pieces, so that a request ends soon after its deadline or after its browser has gone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from strata.errors import ConfigError, ReadTooLarge, TransferCancelled
from strata.storage import Watch

if TYPE_CHECKING:
    from strata.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerConfig:
    """Limits of the explorer."""

    max_read_bytes: int = 4 << 30
    """Bytes that one request may read, in both checkpoints together if it compares two."""
    request_timeout_s: float = 20.0
    """Seconds that one request may take, including the time that it waits for a thread."""
    scan_s: float = 2.0
    """Seconds after which a request that scans many tensors returns what it has found. The next one continues."""
    num_readers: int = 2
    """Threads that read and compute."""
    max_waiting: int = 32
    """Requests that may wait for a thread."""
    max_open: int = 8
    """Checkpoints whose tensors and results are kept in memory."""
    max_places: int = 100
    max_values: int = 10_000
    """Elements in one sample of values."""
    max_singular_side: int = 1_024
    """The shorter side of a matrix whose singular values are computed. A computation cannot be stopped, so both limits
    keep it to about 2 s."""
    max_singular_elements: int = 1 << 22
    max_tasks: int = 2
    """Verifications that run at the same time."""
    max_exports: int = 2
    """Downloads that run at the same time."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value <= 0:
                raise ConfigError(f"{one.name}={value} is not positive; raise it to 1 or more", field=one.name)
        if self.scan_s > self.request_timeout_s:
            raise ConfigError(
                f"scan_s={self.scan_s} is longer than request_timeout_s={self.request_timeout_s}; lower scan_s",
                field="scan_s",
            )


class Budget:
    """What is left of the bytes and the time of one request. May be cancelled from another thread."""

    def __init__(self, config: ExplorerConfig, clock: Clock) -> None:
        self.config = config
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._lock = threading.Lock()
        self._charged = 0
        self.read_bytes = 0
        """Bytes that were read from the store."""
        self.watch = Watch(self._count)

    def charge(self, num_bytes: int, what: str) -> None:
        """Take bytes from the budget before they are read.

        Raises:
            ReadTooLarge: Too few are left.
        """
        self.check()
        limit = self.config.max_read_bytes
        if self._charged + num_bytes > limit:
            raise ReadTooLarge(
                f"{what} needs {self._charged + num_bytes:,} bytes, more than max_read_bytes={limit:,}; "
                "look at a smaller tensor or a slice of it, or raise --max-read-bytes"
            )
        self._charged += num_bytes

    def can_charge(self, num_bytes: int) -> bool:
        return self._charged + num_bytes <= self.config.max_read_bytes

    def check(self) -> None:
        """Raise if the request has no time left or was cancelled.

        Raises:
            ReadTooLarge: The deadline has passed.
            TransferCancelled: `cancel` was called.
        """
        if self.watch.is_cancelled:
            raise TransferCancelled("the request was cancelled")
        if self.elapsed_s > self.config.request_timeout_s:
            raise ReadTooLarge(
                f"the request took longer than request_timeout_s={self.config.request_timeout_s:g}; "
                "look at a smaller tensor, or raise --timeout"
            )

    def is_scan_over(self) -> bool:
        """Return whether a scan should return what it has found."""
        return self.elapsed_s > self.config.scan_s

    @property
    def elapsed_s(self) -> float:
        return self._clock.monotonic_s() - self._began_s

    def cancel(self) -> None:
        self.watch.cancel()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.read_bytes += num_bytes
