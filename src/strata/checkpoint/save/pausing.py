"""Python's collector, kept from looking through many thousand new objects of which none is garbage."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING

from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = renewed(threading.Lock())
_num_pausing = 0


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """A state with 20,000 tensors is taken apart in half the time. What the program itself has set stays."""
    global _num_pausing  # noqa: PLW0603 - the collector is the process's
    if not gc.isenabled() and not _num_pausing:
        yield
        return
    with _lock:
        _num_pausing += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _num_pausing -= 1
            if not _num_pausing:
                gc.enable()


def _begin_anew() -> None:
    """In a forked child: the threads that were pausing it do not exist there."""
    global _num_pausing  # noqa: PLW0603
    if _num_pausing:
        _num_pausing = 0
        gc.enable()


os.register_at_fork(after_in_child=_begin_anew)
