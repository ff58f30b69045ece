"""A store in the memory of this process, for tests and for state that need not outlive the process."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from strata.errors import ObjectExists, ObjectMissing, StorageError
from strata.lifecycle import renewed
from strata.storage.base import Listed, byte_view, check_key, check_offset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from strata.storage.base import Watch

PIECE_BYTES = 8 << 20


class MemoryStore:
    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._lock = renewed(threading.Lock())
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        check_key(key)
        with self._lock:
            if if_absent and key in self._objects:
                raise ObjectExists(f"{self.url}/{key} already exists")
            self._objects[key] = (bytes(data), time.time())

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        data = byte_view(data)
        copy = bytearray(data.nbytes)
        for start in range(0, data.nbytes, PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            if watch is not None:
                watch.check()
            copy[start : start + piece.nbytes] = piece
            if watch is not None:
                watch.advance(piece.nbytes)
        if watch is not None:
            watch.check()
        self.put(key, bytes(copy))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._data(key)
        if len(data) > max_bytes:
            raise StorageError(f"{self.url}/{key} has {len(data)} bytes, more than the limit of {max_bytes}")
        return data

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        data, out = self._data(key), byte_view(out)
        check_offset(offset)
        piece = data[offset : offset + out.nbytes]
        if len(piece) != out.nbytes:
            raise StorageError(f"{self.url}/{key} ends at byte {len(data)}, before byte {offset + out.nbytes}")
        out[:] = piece

    def size(self, key: str) -> int:
        return len(self._data(key))

    def walk(self, prefix: str = "") -> Iterator[Listed]:
        if prefix:
            check_key(prefix)
        with self._lock:
            found = [
                Listed(key, len(data), at_s)
                for key, (data, at_s) in self._objects.items()
                if not prefix or key.startswith(f"{prefix}/")
            ]
        yield from sorted(found, key=lambda listed: listed.key)

    def children(self, prefix: str = "") -> list[str]:
        start = f"{prefix}/" if prefix else ""
        rests = [listed.key.removeprefix(start) for listed in self.walk(prefix)]
        return sorted({rest.partition("/")[0] for rest in rests if "/" in rest})

    def delete(self, keys: Iterable[str]) -> None:
        checked = [check_key(key) for key in keys]
        with self._lock:
            for key in checked:
                self._objects.pop(key, None)

    def close(self) -> None:
        """Keep the objects for the next store with the same name."""

    def _data(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            if key not in self._objects:
                raise ObjectMissing(f"{self.url}/{key} does not exist")
            return self._objects[key][0]
