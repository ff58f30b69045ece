"""`Alone`: a process declares whether it may be restarted without the others.

A run whose ranks share a collective restarts as a whole. Ranks of an asynchronous run mostly work alone; but from time
to time they do something together, such as a checkpoint or a validation, and one that is lost then cannot be replaced.
So the declaration changes while a process runs, and it must be right at the moment of its death, even by `kill -9`: it
is one byte of a file, in shared memory, that the agent reads when the process has ended.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from strata.launch.environment import ALONE, MAY_RESTART_ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOGETHER = b"0"


class Alone:
    """The declaration of this process. Until `begin`, it cannot be restarted alone. Thread-safe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._path = variables.get(ALONE, "")
        self._byte: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._reasons: set[str] = set()

    @property
    def is_possible(self) -> bool:
        """Whether an agent reads the declaration."""
        return bool(self._path)

    @property
    def is_begun(self) -> bool:
        return self._byte is not None

    @property
    def is_now(self) -> bool:
        """Whether this process may be restarted alone now."""
        with self._lock:
            return self.is_begun and not self._reasons

    def begin(self) -> None:
        """From now on, this process may be restarted alone, except while there is a reason against it."""
        if self._byte is None and self._path:
            path = Path(self._path)
            path.write_bytes(_TOGETHER)
            with path.open("r+b") as file:
                self._byte = mmap.mmap(file.fileno(), len(_TOGETHER))
            self._declare()

    def hold(self, reason: str) -> None:
        """The ranks do something together: if this process dies, all restart."""
        with self._lock:
            self._reasons.add(reason)
            self._declare()

    def release(self, reason: str) -> None:
        with self._lock:
            self._reasons.discard(reason)
            self._declare()

    def _declare(self) -> None:
        if self._byte is not None:
            self._byte[:] = _TOGETHER if self._reasons else MAY_RESTART_ALONE
