"""Shared row groups: a decoder asks here first, and decodes only what no process of the machine has decoded yet."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from strata.clock import SystemClock
from strata.data.shared.cache import Claim, NodeCache
from strata.data.shared.eviction import wait_limit_s
from strata.data.shared.keys import RowGroupKeys, Unshareable
from strata.data.shared.tables import read_table, stream_bytes, write_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.data.formats.base import Format
    from strata.data.plan.plan import Plan
    from strata.data.source.source import Source

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often an entry is looked for: once more after an unreadable one was deleted."""
DAMAGED = (pa.ArrowException, OSError, ValueError)
"""What reading an entry raises that is not the stream which was written."""


@dataclass(frozen=True, slots=True, eq=False)
class Obtained:
    """The rows of a row group, and where they are from."""

    table: pa.Table
    is_decoded: bool
    """Whether this call decoded them."""
    is_shared: bool
    """Whether they are in the cache."""


class SharedRowGroups:
    """The row groups of one plan in the node cache. Safe for use by several threads."""

    def __init__(
        self,
        cache: NodeCache,
        source: Source,
        plan: Plan,
        formats: Mapping[str, Format],
        columns: Sequence[str],
        *,
        now_s: Callable[[], float] = SystemClock.monotonic_s,
    ) -> None:
        self.cache = cache
        self._plan = plan
        self._now_s = now_s
        self._longest_decode_s = 0.0
        self._is_warned = False
        self._keys: RowGroupKeys | None = None
        try:
            self._keys = RowGroupKeys(source, plan, formats, columns)
        except Unshareable as error:
            self._warn(error)

    def has(self, number: int) -> bool:
        """Return whether a row group is decoded, or another process decodes it."""
        key = self._key_of(number)
        return key is not None and self.cache.has(key)

    def obtain(self, number: int, decode: Callable[[], pa.Table], is_over: Callable[[], bool]) -> Obtained:
        """Return the rows of a row group: shared ones, or those that `decode` returns, which are shared from now on.

        Raises:
            CancelledError: The pass is over.
            Whatever `decode` raises.
        """
        key = self._key_of(number)
        for _ in range(ATTEMPTS):
            if key is None:
                break
            found = self.cache.claim(key, wait_limit_s(self._longest_decode_s), is_over)
            if is_over():
                if isinstance(found, Claim):
                    self.cache.abandon(found)
                raise CancelledError
            if found is None:
                break
            if isinstance(found, Claim):
                return self._make(found, decode)
            table = self._read(found, int(self._plan.unit_rows[number]))
            if table is not None:
                return Obtained(table, is_decoded=False, is_shared=True)
            self.cache.discard(key)
        return Obtained(decode(), is_decoded=True, is_shared=False)

    def _make(self, claim: Claim, decode: Callable[[], pa.Table]) -> Obtained:
        began_s = self._now_s()
        try:
            table = decode()
        except BaseException:
            self.cache.abandon(claim)
            raise
        try:
            num_bytes = stream_bytes(table)
        except pa.ArrowException as error:
            log.debug("a row group is not shared, because its types cannot be written: %s", error)
            self.cache.abandon(claim)
            return Obtained(table, is_decoded=True, is_shared=False)
        self._longest_decode_s = max(self._longest_decode_s, self._now_s() - began_s)
        contents = self.cache.publish(claim, num_bytes, lambda fd: write_table(fd, table))
        shared = None if contents is None else self._read(contents, table.num_rows)
        if shared is None or not shared.schema.equals(table.schema, check_metadata=True):
            return Obtained(table, is_decoded=True, is_shared=False)
        return Obtained(shared, is_decoded=True, is_shared=True)  # frees the private copy

    def _read(self, contents: pa.Buffer, num_rows: int) -> pa.Table | None:
        try:
            table = read_table(contents)
        except DAMAGED as error:
            log.warning("an entry of the node cache is unreadable, decoding the row group again: %s", error)
            return None
        return table if table.num_rows == num_rows else None

    def _key_of(self, number: int) -> str | None:
        if self._keys is None:
            return None
        try:
            return self._keys.key_of(number)
        except Unshareable as error:
            self._warn(error)
            return None

    def _warn(self, error: Unshareable) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning("some row groups are not shared between processes: %s", error)
