"""A store with planned faults: a call is refused, hangs, fails halfway, or succeeds but loses its response.

It wraps a real store, so the calls that it lets through take effect. It records every call, so that a test can first
record the calls of a save and then make each of them fail in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from strata.errors import StorageError
from strata.storage import Store, Watch
from strata.storage.base import Listed

When = Literal["before", "half", "after"]
"""Before the call; halfway through it; after it, with a lost response."""
MOST_S = 30.0
"""Deadline for a hang: a test that does not end one has a bug."""
CHANGES = ("put", "put_large", "delete")
"""The calls that modify the store."""


@dataclass(frozen=True, slots=True)
class Call:
    number: int
    """Counted from 0 over all kinds."""
    kind: str
    key: str
    """For `delete` the first key; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Fault:
    act: Callable[[Call], None]
    """Raises, waits or kills."""
    when: When = "before"


def fails(error: type[StorageError], when: When = "before") -> Fault:
    def fail(call: Call) -> None:
        raise error(f"{call.key or 'the store'}: {call.kind} fails, as the test wants it; try again")

    return Fault(fail, when)


def hangs(until: threading.Event, reached: threading.Event | None = None, when: When = "before") -> Fault:
    """A fault that blocks; `reached` is set when a call hangs."""

    def hang(call: Call) -> None:
        if reached is not None:
            reached.set()
        assert until.wait(MOST_S), f"the test did not end the hang of {call}"

    return Fault(hang, when)


class FaultyStore:
    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.inner = inner
        self.seen: list[Call] = []
        self._planned: list[tuple[Callable[[Call], bool], Fault]] = []
        self._lock = threading.Lock()

    # -- for the test ----------------------------------------------------------------------------------------------

    def plan(self, fault: Fault, *kinds: str, number: int | None = None, key: str = "", num: int | None = 1) -> None:
        """Plan a fault for the next `num` calls (None: all) of these kinds whose key contains `key`."""
        left = num

        def fits(call: Call) -> bool:
            nonlocal left
            fitting = (not kinds or call.kind in kinds) and (number is None or call.number >= number)
            if not fitting or key not in call.key or left == 0:
                return False
            left = None if left is None else left - 1
            return True

        with self._lock:
            self._planned.append((fits, fault))

    def heal(self) -> None:
        with self._lock:
            self._planned.clear()

    # -- the port --------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with self._met("put", key):
            self.inner.put(key, data, if_absent=if_absent)

    def put_large(self, key: str, data: memoryview, *, watch: Watch | None = None) -> None:
        with self._met("put_large", key) as met:
            self.inner.put_large(key, data, watch=met.in_the_middle(watch))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._met("get", key):
            return self.inner.get(key, max_bytes=max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        with self._met("read_into", key):
            self.inner.read_into(key, offset, out)

    def size(self, key: str) -> int:
        with self._met("size", key):
            return self.inner.size(key)

    def walk(self, prefix: str = "") -> Iterator[Listed]:
        with self._met("walk", prefix):
            yield from list(self.inner.walk(prefix))

    def children(self, prefix: str = "") -> list[str]:
        with self._met("children", prefix):
            return self.inner.children(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        with self._met("delete", keys[0] if keys else "") as met:
            if met.fault is not None and met.fault.when == "half":
                self.inner.delete(keys[: len(keys) // 2])
                met.fault.act(met.call)
            self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()

    # -- within ----------------------------------------------------------------------------------------------------

    def _met(self, kind: str, key: str) -> _Met:
        with self._lock:
            call = Call(len(self.seen), kind, key)
            self.seen.append(call)
            return _Met(call, next((fault for fits, fault in self._planned if fits(call)), None))


@dataclass(slots=True)
class _Met:
    """One call and its planned fault."""

    call: Call
    fault: Fault | None

    def __enter__(self) -> Self:
        self._act("before")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._act("after")

    def _act(self, when: When) -> None:
        if self.fault is not None and self.fault.when == when:
            self.fault.act(self.call)

    def in_the_middle(self, watch: Watch | None) -> Watch | None:
        """Trigger the fault after the first piece of a transfer."""
        fault = self.fault
        if fault is None or fault.when != "half":
            return watch

        def advance(num_bytes: int) -> None:
            if watch is not None:
                watch.advance(num_bytes)
            fault.act(self.call)

        return Watch(advance)
