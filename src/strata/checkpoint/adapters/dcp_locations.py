"""Where an adapter finds its checkpoints."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument
from strata.storage import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Place:
    """Where checkpoints lie. A store that is named is opened for each use, so that the adapters can go to another
    process, as `async_save` with `AsyncCheckpointerType.PROCESS` sends them.
    """

    def __init__(self, place: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None) -> None:
        self._place = os.fspath(place) if isinstance(place, str | os.PathLike) else place
        self._options = storage_options

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        if not isinstance(self._place, str):
            yield self._place
            return
        store = open_store(self._place, self._options)
        try:
            yield store
        finally:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._place, str):
            raise InvalidArgument(
                f"a {type(self._place).__name__} cannot go to another process; give the adapter the store's path or URL"
            )
        return self.__dict__
