"""Choose the checkpoint that all ranks load, so that they load the same one.

Each rank detects corruption only in what it reads itself, and listings may differ between ranks. So rank 0 chooses a
checkpoint, all ranks load it and report the result, and it is used only if all succeeded; otherwise all try the one
before it. The ranks communicate through the store, under a name of this start:

    restore-SESSION-1/0-choice.json        {"id": "step-…"}: the choice of rank 0; empty if there is no checkpoint
    restore-SESSION-1/0-00003-ok.json      rank 3 has loaded it; -bad: it could not
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, TypeVar

import msgspec
from xxhash import xxh3_64_hexdigest

from strata.checkpoint.group import commit
from strata.clock import SystemClock
from strata.errors import (
    CheckpointAborted,
    CheckpointInvalid,
    InvalidArgument,
    NoCheckpoint,
    ObjectExists,
    StorageError,
)
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.group.ranks import Ranks
    from strata.clock import Clock
    from strata.storage import Store

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_BYTES = 1 << 16


class Choice:
    """One restore of all ranks. `number` counts restores and must be the same on all ranks."""

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        number: int,
        *,
        clock: Clock | None = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._prefix = f"restore-{xxh3_64_hexdigest(ranks.session.encode())}-{number}"
        self._clock = clock or SystemClock()
        self._wait = wait or threading.Event().wait

    def load(
        self,
        newest: Callable[[Sequence[str]], Manifest | None],
        find: Callable[[str], Manifest],
        use: Callable[[Manifest], T],
    ) -> T:
        """Return the result of `use` for the newest checkpoint that every rank can load.

        Args:
            newest: Returns, on rank 0, the newest checkpoint except those that a rank rejected.
            find: Returns the manifest of the id that rank 0 chose.

        Raises:
            NoCheckpoint: No checkpoint can be loaded by every rank.
            CheckpointAborted: A rank did not report in time.
        """
        rejected: list[str] = []
        while True:
            number = len(rejected)
            manifest = newest(rejected) if self._ranks.is_leader else None
            id = self._choose(number, manifest.id if manifest is not None else "")
            if not id:
                raise NoCheckpoint(f"{self._store.url} has no checkpoint that every rank can load")
            try:
                loaded = use(manifest or find(id))
            except (CheckpointInvalid, NoCheckpoint):
                self._report(number, is_ok=False)
                self._await_reports(number)
            except BaseException:
                self._report(number, is_ok=False)
                raise
            else:
                self._report(number, is_ok=True)
                bad = self._await_reports(number)
                if not bad:
                    self._delete_previous()
                    return loaded
                log.warning("checkpoint %s failed on %s; all ranks try the one before it", id, ", ".join(bad))
            rejected.append(id)

    def _choose(self, number: int, id: str) -> str:
        key = f"{self._prefix}/{number}-choice.json"
        if self._ranks.is_leader:
            try:
                self._store.put(key, msgspec.json.encode({"id": id}), if_absent=True)
            except ObjectExists:
                raise InvalidArgument(
                    f"{key} already exists: the session name was used before; use a new session for every start",
                    field="session",
                ) from None
            return id

        def look() -> str | None:
            if key not in self._keys():
                return None
            choice = msgspec.json.decode(self._store.get(key, max_bytes=_MAX_BYTES), type=dict[str, str])
            return choice.get("id", "")

        return self._until(look, lambda: "rank 0 chose no checkpoint")

    def _report(self, number: int, *, is_ok: bool) -> None:
        self._store.put(f"{self._prefix}/{number}-{self._ranks.rank:05d}-{'ok' if is_ok else 'bad'}.json", b"{}\n")

    def _await_reports(self, number: int) -> list[str]:
        """Wait for the reports of all ranks; return the ranks that failed."""
        reports: dict[int, bool] = {}

        def look() -> bool | None:
            for key in self._keys():
                name = key.rpartition("/")[2].removesuffix(".json").split("-")
                if len(name) == 3 and name[0] == str(number):
                    reports[int(name[1])] = name[2] == "ok"
            return True if len(reports) == self._ranks.size else None

        def missing() -> str:
            absent = [str(rank) for rank in range(self._ranks.size) if rank not in reports]
            return f"rank {', '.join(absent[:8])} reported no result"

        self._until(look, missing)
        return [f"rank {rank}" for rank, is_ok in sorted(reports.items()) if not is_ok]

    def _keys(self) -> set[str]:
        return {listed.key for listed in self._store.walk(self._prefix)}

    def _until(self, look: Callable[[], T | None], what: Callable[[], str]) -> T:
        def late(waited_s: float) -> CheckpointAborted:
            return CheckpointAborted(
                f"the ranks could not agree on a checkpoint: {what()} within {waited_s:g} s; every rank must call "
                "load() or restore() the same number of times"
            )

        return commit.until(
            look, late, timeout_s=self._ranks.timeout_s, clock=self._clock, wait=self._wait, watch=Watch()
        )

    def _delete_previous(self) -> None:
        """Delete, as rank 0, the objects of the previous restore; those of this one may still be read."""
        if not self._ranks.is_leader:
            return
        before = self._prefix.rpartition("-")
        try:
            previous = f"{before[0]}-{int(before[2]) - 1}"
            self._store.delete([listed.key for listed in self._store.walk(previous)])
        except StorageError as error:
            log.warning("could not delete the objects of the previous restore in %s: %s", self._store.url, error)
