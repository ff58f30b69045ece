"""Which checkpoint several ranks load: the same one, or none.

Each rank sees damage only in what it reads itself, and a listing may be older here than there. So rank 0 chooses, all
load, all say how that went, and only if it went well everywhere is it taken; else all try the one before. They meet in
the store, under a name of this start:

    restore-SESSION-1/0-choice.json        {"id": "step-…"}: rank 0's, empty if there is none
    restore-SESSION-1/0-00003-ok.json      rank 3 has loaded it; or -bad
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
    """One restore of all ranks. `number` counts them: all ranks must count the same."""

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
        self._place = f"restore-{xxh3_64_hexdigest(ranks.session.encode())}-{number}"
        self._clock = clock or SystemClock()
        self._wait = wait or threading.Event().wait

    def load(
        self,
        newest: Callable[[Sequence[str]], Manifest | None],
        find: Callable[[str], Manifest],
        use: Callable[[Manifest], T],
    ) -> T:
        """What `use` makes of the newest checkpoint that it finds nothing wrong with, on any rank.

        Args:
            newest: For rank 0: the newest but for some that a rank has refused.
            find: The manifest of an id that rank 0 has chosen.

        Raises:
            NoCheckpoint: There is none.
            CheckpointAborted: A rank did not come.
        """
        refused: list[str] = []
        while True:
            number = len(refused)
            manifest = newest(refused) if self._ranks.is_leader else None
            id = self._choose(number, manifest.id if manifest is not None else "")
            if not id:
                raise NoCheckpoint(f"there is no checkpoint in {self._store.url} that every rank can load")
            try:
                loaded = use(manifest or find(id))
            except (CheckpointInvalid, NoCheckpoint):
                self._say(number, is_well=False)
                self._hear(number)
            except BaseException:
                self._say(number, is_well=False)
                raise
            else:
                self._say(number, is_well=True)
                bad = self._hear(number)
                if not bad:
                    self._forget()
                    return loaded
                log.warning("checkpoint %s is damaged for %s; all ranks try the one before it", id, ", ".join(bad))
            refused.append(id)

    def _choose(self, number: int, id: str) -> str:
        key = f"{self._place}/{number}-choice.json"
        if self._ranks.is_leader:
            try:
                self._store.put(key, msgspec.json.encode({"id": id}), if_absent=True)
            except ObjectExists:
                raise InvalidArgument(
                    f"{key} is there already: the session's name was used before; every start needs its own",
                    field="session",
                ) from None
            return id

        def look() -> str | None:
            if key not in self._keys():
                return None
            said = msgspec.json.decode(self._store.get(key, max_bytes=_MAX_BYTES), type=dict[str, str])
            return said.get("id", "")

        return self._until(look, lambda: "rank 0 has chosen none")

    def _say(self, number: int, *, is_well: bool) -> None:
        self._store.put(f"{self._place}/{number}-{self._ranks.rank:05d}-{'ok' if is_well else 'bad'}.json", b"{}\n")

    def _hear(self, number: int) -> list[str]:
        """Those for whom it went badly, once all have said."""
        heard: dict[int, bool] = {}

        def look() -> bool | None:
            for key in self._keys():
                name = key.rpartition("/")[2].removesuffix(".json").split("-")
                if len(name) == 3 and name[0] == str(number):
                    heard[int(name[1])] = name[2] == "ok"
            return True if len(heard) == self._ranks.size else None

        def missing() -> str:
            absent = [str(rank) for rank in range(self._ranks.size) if rank not in heard]
            return f"rank {', '.join(absent[:8])} has not said whether it could load"

        self._until(look, missing)
        return [f"rank {rank}" for rank, is_well in sorted(heard.items()) if not is_well]

    def _keys(self) -> set[str]:
        return {listed.key for listed in self._store.walk(self._place)}

    def _until(self, look: Callable[[], T | None], what: Callable[[], str]) -> T:
        def late(waited_s: float) -> CheckpointAborted:
            return CheckpointAborted(
                f"the ranks could not agree on a checkpoint: {what()} within {waited_s:g} s; do all ranks restore, as "
                "often as each other?"
            )

        return commit.until(
            look, late, timeout_s=self._ranks.timeout_s, clock=self._clock, wait=self._wait, watch=Watch()
        )

    def _forget(self) -> None:
        """Our own words stay until everybody has heard them: rank 0 removes those of the time before."""
        if not self._ranks.is_leader:
            return
        before = self._place.rpartition("-")
        try:
            previous = f"{before[0]}-{int(before[2]) - 1}"
            self._store.delete([listed.key for listed in self._store.walk(previous)])
        except StorageError as error:
            log.warning("what ranks said when they last restored stays in %s: %s", self._store.url, error)
