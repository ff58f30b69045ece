"""Work in several threads, of which none goes on when one has failed."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future


def finish_all(futures: Sequence[Future[Any]]) -> None:
    """Returns when all are done. Raises what the first raised, or an interrupt; then, too, none of them is running."""
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
