"""`LookAhead`: a loader whose next batches can be seen before they are delivered.

Parameter servers need the ids of the next batches. Its position counts delivered batches only, so a checkpoint does not
contain rows that were seen and not trained. It is for loaders of ours, whose position is small and whose reading does
not change the random generators of the training process.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_END = object()


class _State(NamedTuple):
    position: tuple[int, int]
    saved: dict[str, Any]


class LookAhead:
    """Wraps a loader. Everything but its state and its iterator is that of the loader."""

    has_global_state = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._delivered: _State | None = None
        """The loader's state after the last delivered batch; None: its current one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Batches:
        batches = iter(self._loader)
        self._delivered = self._state()
        return Batches(self, batches)

    @property
    def position(self) -> tuple[int, int]:
        found: tuple[int, int] = self._loader.position if self._delivered is None else self._delivered.position
        return found

    def set_epoch(self, epoch: int) -> None:
        self._delivered = None
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._loader.state_dict() if self._delivered is None else self._delivered.saved
        return found

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> None:
        self._delivered = None
        self._loader.load_state_dict(state, **options)

    def _state(self) -> _State:
        return _State(self._loader.position, self._loader.state_dict())


class Batches:
    """The iterator of one pass."""

    def __init__(self, loader: LookAhead, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        self._seen: deque[tuple[Any, _State]] = deque()
        """Batches that were taken and not delivered, and the loader's state after each. The last one may be the end, or
        an error, which is raised in its place."""
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._take(1)
        if not self._seen:
            raise StopIteration
        batch, self._loader._delivered = self._seen.popleft()
        if batch is _END:
            self._loader._delivered = None  # nothing is left, and the loader may move on by itself
            raise StopIteration
        if isinstance(batch, Exception):
            raise batch
        return batch

    def upcoming(self, number: int) -> list[Any]:
        """Return the next batches, which remain to be delivered; fewer at the end of the pass."""
        self._take(number)
        return [
            batch for batch, _ in islice(self._seen, number) if batch is not _END and not isinstance(batch, Exception)
        ]

    def _take(self, number: int) -> None:
        while len(self._seen) < number and not self._is_over:
            try:
                batch = next(self._batches, _END)
            except Exception as error:  # noqa: BLE001 - raised when its batch is due
                batch = error
            self._is_over = batch is _END or isinstance(batch, Exception)
            self._seen.append((batch, self._loader._state()))
