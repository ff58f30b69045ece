"""`FileStream`: a loader over a directory that grows, for training on data as it arrives.

A stream is a sequence of *passes*. A pass reads the files that are new and complete, once, in the exact order of any
other loader, divided over all ranks. Then the directory is listed again. Rank 0 lists it and all ranks read what it
found. The state contains the finished files and the position in the current pass, so training resumes at the next row.

A file must be complete when it appears: write it under a name that begins with `_` or `.`, then rename it. As a second
line of defence, a file counts as complete once two listings agree on its size and time, and is not empty.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from strata.clock import SystemClock
from strata.data.order.cursor import check_version
from strata.data.ranks import share
from strata.data.source.paths import SUFFIXES, discover, suffixes_of
from strata.errors import DataFileMissing, InvalidArgument, NoData, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from strata.clock import Clock
    from strata.identity import Identity

log = logging.getLogger(__name__)

VERSION = 1
POLL_S = 1.0
"""Shortest time between two listings."""
MAX_LISTING_SHARE = 0.1
"""Longest share of the time that listing a large directory may take."""
UNAVAILABLE_S = 600.0
"""Time for which a store may fail to list its files before the stream gives up."""
MAX_PASS_FILES = 1_000
"""Files of one pass, whose names are part of every checkpoint."""
_FEWEST_BYTES = 1 << 12
_SEPARATOR = "\0"


class Listed(NamedTuple):
    """A file in a listing. A file that is still written changes one of these."""

    size_bytes: int
    mtime_ns: int


def list_files(
    path: str, *, format: str | None = None, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Listed]:
    """Return the data files of a directory or prefix by name, without hidden ones. A missing directory has none."""
    suffixes = [each for name in SUFFIXES for each in suffixes_of(name)] if format is None else suffixes_of(format)
    try:
        found = discover(
            path,
            suffixes=suffixes,
            filesystem=filesystem,
            storage_options=storage_options,
            partitioning=None,
            on_error="skip",
        )
    except (NoData, DataFileMissing):
        return {}
    return {file.name: Listed(file.size_bytes, file.mtime_ns) for file in found.files}


def complete_files(
    listed: Mapping[str, Listed], before: Mapping[str, Listed], finished: Collection[str]
) -> tuple[str, ...]:
    """Return the files of the next pass, oldest first: those that are not finished, and that two listings agree on."""
    new = [
        name
        for name, each in listed.items()
        if each.size_bytes > 0 and before.get(name) == each and name not in finished
    ]
    return tuple(sorted(new, key=lambda name: (listed[name].mtime_ns, name))[:MAX_PASS_FILES])


class Look(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 has found between two passes, and what it wishes all ranks to do."""

    files: tuple[str, ...] = ()
    """Names of the files of the next pass; empty: there are none yet."""
    gone: tuple[str, ...] = ()
    """Finished files that were deleted, and need not be remembered."""
    wish: str = ""
    pause_s: float = POLL_S
    """Time until the next look."""


class FileStream:
    """A loader over the passes of a stream: `look` begins a pass, iteration reads it, `set_epoch` ends it."""

    has_global_state = True
    """`state_dict()` is the same on all ranks, and any number of ranks can load it."""

    def __init__(
        self,
        path: str,
        list_now: Callable[[], Mapping[str, Listed]],
        open_files: Callable[[list[str]], Any],
        ranks: Identity,
        *,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            list_now: Returns the files below `path`, by name.
            open_files: Returns a loader over these files for this rank. All ranks call it together.
        """
        self._path = path.rstrip("/")
        self._list_now = list_now
        self._open_files = open_files
        self._ranks = ranks
        self._clock = clock or SystemClock()
        self._number = 0
        """The current pass, or the next one while there are no files."""
        self._files: tuple[str, ...] = ()
        """Names of the files of the current pass."""
        self._finished: set[str] = set()
        """Names of the files of earlier passes."""
        self._loader: Any = None
        self._restored: Mapping[str, Any] | None = None
        """Position in the current pass, until its loader is open."""
        self._before: Mapping[str, Listed] = {}
        """The last listing; rank 0 only."""
        self._reachable_s = self._clock.monotonic_s()
        """Time of the last listing that succeeded."""

    @property
    def is_begun(self) -> bool:
        """Whether there is a current pass; if not, the stream waits for files."""
        return bool(self._files)

    def look(self, wish: Callable[[bool], str]) -> Look:
        """Begin the next pass if there are new files. All ranks call it together and receive the same answer.

        Args:
            wish: Called on rank 0 with whether a file is new or has changed. What it returns, if anything, comes before
                new files.
        """
        return self.begin(lambda: self.find(wish))

    def begin(self, find: Callable[[], Look]) -> Look:
        """Begin the pass that `find` returns on rank 0, unless one has begun. All ranks call it together and receive
        the same answer.
        """
        if not self._files:
            encoded = share(self._ranks, lambda: msgspec.json.encode(find()))
            found = msgspec.json.decode(encoded, type=Look)
            self._finished.difference_update(found.gone)
            if not found.files:
                return found
            self._files = found.files
        self.opened()
        return Look(files=self._files)

    def find(self, wish: Callable[[bool], str]) -> Look:
        """List the directory and return the files of the next pass, or the wish. Rank 0 calls it."""
        began_s = self._clock.monotonic_s()
        try:
            listed = self._list_now()
        except StorageUnavailable as error:
            if began_s - self._reachable_s > UNAVAILABLE_S:
                raise
            log.warning("cannot list %s, trying again: %s", self._path, error)
            return Look(wish=wish(False))
        before, self._before, self._reachable_s = self._before, listed, self._clock.monotonic_s()
        files = complete_files(listed, before, self._finished)
        is_active = bool(files) or any(before.get(name) != listed[name] for name in listed.keys() - self._finished)
        if wanted := wish(is_active):
            return Look(wish=wanted)
        return Look(
            files=files,
            gone=tuple(self._finished.difference(listed)) if listed else (),  # all at once: rather an outage
            pause_s=max(POLL_S, (self._reachable_s - began_s) / MAX_LISTING_SHARE),
        )

    def opened(self) -> Any:
        """Return the loader of the current pass."""
        assert self._files, "begin() begins a pass"
        if self._loader is None:
            self._loader = self._open_files([f"{self._path}/{name}" for name in self._files])
            if self._restored is None:
                self._loader.set_epoch(self._number)
            else:
                self._loader.load_state_dict(self._restored)
                self._restored = None
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        assert self._loader is not None, "look() begins a pass"
        return iter(self._loader)

    @property
    def dataset(self) -> Any:
        """The dataset of the current pass."""
        return self._loader.dataset

    @property
    def position(self) -> tuple[int, int]:
        """The pass, and the rows of it delivered so far on all ranks together."""
        return self._number, 0 if self._loader is None else self._loader.position[1]

    def set_epoch(self, epoch: int) -> None:
        """Continue with this pass: the current one, or the next, which makes the files of the current one finished."""
        if epoch == self._number:
            return
        if self._loader is not None:
            self._loader.dataset.close()
        self._finished.update(self._files)
        self._number, self._files, self._loader, self._restored = epoch, (), None, None

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "pass": self._number,
            "files": list(self._files),
            "position": self._restored if self._loader is None else self._loader.state_dict(),
            "finished": _packed(self._finished),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `look` resume with the rows that were not delivered, on any number of ranks.

        Raises:
            InvalidArgument: It is not the state of a stream.
            PlanChanged: A newer version of Strata wrote it.
        """
        check_version(state, newest=VERSION)
        try:
            number, files = int(state["pass"]), tuple(map(str, state["files"]))
            position, finished = state["position"], _unpacked(state["finished"])
        except KeyError as error:
            raise InvalidArgument(
                f"this is the state of a loader and not of a stream: it has no {error}; resume with the data that the "
                "earlier fit had, with or without stream=True",
                field="stream",
            ) from None
        self._number, self._files, self._finished = number, files, finished
        self._loader, self._restored = None, position


def _packed(names: Collection[str]) -> bytes:
    """Return names as bytes whose length rarely changes, so that an incremental save writes the names that are new."""
    data = _SEPARATOR.join(sorted(names)).encode()
    step = max(_FEWEST_BYTES, (1 << len(data).bit_length()) // 8)
    return data.ljust(-(-len(data) // step) * step, _SEPARATOR.encode())


def _unpacked(data: bytes) -> set[str]:
    return {name for name in bytes(data).decode().split(_SEPARATOR) if name}
