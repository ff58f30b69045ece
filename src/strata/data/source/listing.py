"""Looks for files: in a directory to the bottom, by a pattern, or one by one.

A pattern stands for what it matches, files and directories; `*`, `?` and `[…]` match within one name, `**` any number
of directories. What exists under the very name that was written is taken for that, whatever characters the name has.

Passed over, unless a file is named: names that begin with `_` or `.` and whatever is below directories of such names
(`_key=value` is a partition, though), and markers that other programs leave. A pattern that begins a name with `_` or
`.` matches such names.

A local directory that links lead to more than once is searched once, so links that form a circle come to an end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import errno
import fnmatch
import heapq
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow.fs as pafs

from strata.data.source.source import reaching
from strata.errors import DataFileMissing, InvalidArgument, LimitExceeded, NoData, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from strata.data.source.source import Source

MAX_FILES = 2_000_000
MAX_NEAR = 10_000
GONE = -1
"""The size of what a link leads to that is not there."""
NUM_QUESTIONS = 16
"""About files that are named one by one, at a time."""
_MARKERS = ("_$folder$", ".crc", "._COPYING_")
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Place:
    """One part of what a user wrote."""

    written: str
    path: str
    """As its file system knows it."""
    is_directory: bool
    """It was written with a slash at its end."""


@dataclass(slots=True, eq=False)
class Seen:
    """A file that a search met."""

    path: str
    name: str
    """Below the search's base."""
    size_bytes: int
    """Or `GONE`."""
    mtime_ns: int
    """0 if the file system does not tell."""
    is_named: bool = False
    """By the user, or by a pattern that says something about names: it is taken whatever its suffix."""


@dataclass(slots=True)
class Search:
    written: str
    base: str
    """The directory below which it was looked."""
    seen: list[Seen] = field(default_factory=list)
    num_hidden: int = 0
    """Files and directories that were passed over; what a hidden directory holds is not counted."""
    is_directory: bool = False
    """What was written names a directory: not a file, and not a pattern."""


def search_all(source: Source, places: Sequence[Place]) -> list[Search]:
    """
    Raises:
        NoData: Nothing is at one of the places.
        LimitExceeded: There are too many files.
        StorageDenied, StorageUnavailable, StorageError: It cannot be looked at.
    """
    if len(places) == 1 or source.is_local:
        found = [_search(source, place) for place in places]
    else:
        with concurrent.futures.ThreadPoolExecutor(NUM_QUESTIONS, "strata-data-search") as pool:
            found = list(pool.map(lambda place: _search(source, place), places))
    _check_number(sum(len(search.seen) for search in found))
    return found


def relative(path: str, base: str) -> str:
    """Below `base`; some file systems begin their paths with a slash and some do not."""
    path, base = path.lstrip("/"), base.strip("/")
    assert not base or path.startswith(f"{base}/"), (path, base)
    return path[len(base) + 1 :] if base else path


def common_directory(bases: Sequence[str]) -> str:
    """The lowest directory that holds all of these."""
    parts = [base.strip("/").split("/") for base in set(bases)]
    lowest, highest = min(parts), max(parts)
    same = next((i for i, part in enumerate(lowest) if highest[i : i + 1] != [part]), len(lowest))
    return "/".join(lowest[:same])


def is_hidden(name: str, *, is_directory: bool) -> bool:
    if is_directory:
        return name[:1] == "." or (name[:1] == "_" and "=" not in name)
    return name[:1] in ("_", ".") or name.endswith(_MARKERS)


class Pattern:
    """Matches names below a directory, part by part. What it knows of directories it keeps, as most files share one."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts
        self._matches = [None if part == "**" else re.compile(fnmatch.translate(part)).match for part in parts]
        self._says_name = parts[-1] not in ("*", "**")
        self._end = len(parts)
        self._known = {"": (self._closed({0}), False)}

    def matches(self, name: str) -> bool | None:
        """None: no. Otherwise whether the pattern says something about the file's own name."""
        directory, _, own = name.rpartition("/")
        states, is_inside = self._reached(directory)
        if self._end in self._step(states, own, is_directory=False):
            return self._says_name
        return False if is_inside and not is_hidden(own, is_directory=False) else None

    def may_enter(self, directory: str) -> bool:
        """Whether something below it could match."""
        states, is_inside = self._reached(directory)
        return is_inside or bool(states)

    def _reached(self, directory: str) -> tuple[set[int], bool]:
        """How many parts may have been matched on the way there, and whether it is in a directory that all match."""
        known = self._known.get(directory)
        if known is None:
            above, _, own = directory.rpartition("/")
            states, is_inside = self._reached(above)
            states = self._step(states, own, is_directory=True)
            is_inside = self._end in states or (is_inside and not is_hidden(own, is_directory=True))
            known = self._known[directory] = states, is_inside
        return known

    def _step(self, states: set[int], part: str, *, is_directory: bool) -> set[int]:
        hidden = is_hidden(part, is_directory=is_directory)
        found = set()
        for state in states:
            if state == self._end:
                continue
            match = self._matches[state]
            if match is None:
                if not hidden:
                    found.add(state)
            elif match(part) and (not hidden or self._asks_for(state, part)):
                found.add(state + 1)
        return self._closed(found)

    def _closed(self, states: set[int]) -> set[int]:
        """With where `**` leads when it stands for nothing."""
        for state in sorted(states):
            while state < self._end and self._matches[state] is None:
                state += 1
                states.add(state)
        return states

    def _asks_for(self, state: int, hidden: str) -> bool:
        pattern = self._parts[state]
        return pattern[0] == hidden[0] if hidden[0] in "_." else pattern != "*"


def _search(source: Source, place: Place) -> Search:
    info = _local_info(place) if _is_disk(source) else source.info(place.path, place.written)
    if info.type == pafs.FileType.File and not (place.is_directory and not source.is_local):
        base, _, name = place.path.rpartition("/")
        return Search(place.written, base, [_seen(info, name, is_named=True)])
    if info.type == pafs.FileType.NotFound and _WILD.search(place.path):
        return _search_pattern(source, place)
    if info.type == pafs.FileType.NotFound:
        raise _nothing_there(source, place, place.path)
    if info.type == pafs.FileType.Unknown:
        raise InvalidArgument(f"{place.written} is neither a file nor a directory; give one of these", field="path")
    return _search_directory(source, place)


def _search_directory(source: Source, place: Place) -> Search:
    search = Search(place.written, place.path, is_directory=True)

    def may_enter(directory: str) -> bool:
        """The directories above it may be."""
        hidden = is_hidden(directory.rpartition("/")[2], is_directory=True)
        search.num_hidden += hidden
        return not hidden

    for listed, num_others in _list(source, place, search.base, may_enter):
        plain = [one for one in listed if not is_hidden(one.name.rpartition("/")[2], is_directory=False)]
        search.num_hidden += num_others + len(listed) - len(plain)
        search.seen += plain
        _check_number(len(search.seen))
    return search


def _search_pattern(source: Source, place: Place) -> Search:
    wild = _WILD.search(place.path)
    assert wild is not None
    base = place.path[: wild.start()].rpartition("/")[0]
    pattern = Pattern([part for part in place.path[len(base) :].split("/") if part])
    search = Search(place.written, base)
    for listed, _ in _list(source, place, search.base, pattern.may_enter):
        for one in listed:
            says_name = pattern.matches(one.name)
            if says_name is not None:
                one.is_named = says_name
                search.seen.append(one)
        _check_number(len(search.seen))
    return search


def _list(
    source: Source, place: Place, base: str, may_enter: Callable[[str], bool]
) -> Iterator[tuple[list[Seen], int]]:
    """The files in directories that may be entered, some at a time; and how many are markers, or no files at all."""
    if _is_disk(source):
        yield from _walk(base or "/", may_enter)
        return
    try:
        with reaching(place.written):
            infos = source.filesystem.get_file_info(pafs.FileSelector(base, recursive=True))
    except DataFileMissing as error:
        raise _nothing_there(source, place, base) from error
    files = {relative(i.path, base): i for i in infos if i.type == pafs.FileType.File and not _is_same(i.path, base)}
    directories = _directories(files)
    entered = {"": True}
    for directory in sorted(directories):
        entered[directory] = entered[directory.rpartition("/")[0]] and may_enter(directory)
    within = {name: info for name, info in files.items() if entered[name.rpartition("/")[0]]}
    markers = {name for name, info in within.items() if name in directories and not info.size}
    yield [_seen(info, name) for name, info in within.items() if name not in markers], len(markers)


def _is_same(path: str, base: str) -> bool:
    return path.strip("/") == base.strip("/")


def _directories(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        directory = name.rpartition("/")[0]
        while directory and directory not in found:
            found.add(directory)
            directory = directory.rpartition("/")[0]
    return found


def _walk(base: str, may_enter: Callable[[str], bool]) -> Iterator[tuple[list[Seen], int]]:
    """A local directory. Links are followed last and in order: what is reached in two ways keeps the straight name."""
    straight, links = [""], list[str]()
    visited: set[tuple[int, int]] = set()
    while straight or links:
        name = straight.pop() if straight else heapq.heappop(links)
        path = f"{base.rstrip('/')}/{name}" if name else base
        with reaching(path):
            about = os.stat(path)  # noqa: PTH116 - a path object for each would take twice the time
            if (about.st_dev, about.st_ino) in visited:
                continue
            visited.add((about.st_dev, about.st_ino))
            found = _look(path, f"{name}/" if name else "", may_enter, straight, links)
        yield found


def _look(
    path: str, prefix: str, may_enter: Callable[[str], bool], straight: list[str], links: list[str]
) -> tuple[list[Seen], int]:
    """The files of one directory, and how many are none; its directories go to those that are looked at later."""
    files: list[Seen] = []
    num_others = 0
    top = f"{path.rstrip('/')}/"
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                files.append(Seen(top + name, prefix + name, about.st_size, about.st_mtime_ns))
            elif (target := _behind(entry)) is None:
                files.append(Seen(top + name, prefix + name, GONE, 0))
            elif stat.S_ISREG(target.st_mode):
                files.append(Seen(top + name, prefix + name, target.st_size, target.st_mtime_ns))
            elif not stat.S_ISDIR(target.st_mode):
                num_others += 1
            elif may_enter(prefix + name):
                if entry.is_symlink():
                    heapq.heappush(links, prefix + name)
                else:
                    straight.append(prefix + name)
    return files, num_others


def _behind(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What a link leads to; None if that is not there, or a circle."""
    try:
        return entry.stat()
    except OSError:
        if entry.is_symlink():
            return None
        raise


def _local_info(place: Place) -> pafs.FileInfo:
    try:
        with reaching(place.written):
            about = os.stat(place.path)  # noqa: PTH116
    except DataFileMissing:
        return pafs.FileInfo("", pafs.FileType.NotFound)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
            return pafs.FileInfo("", pafs.FileType.NotFound)
        raise
    if stat.S_ISDIR(about.st_mode):
        return pafs.FileInfo(place.path, pafs.FileType.Directory)
    if stat.S_ISREG(about.st_mode):
        kind = pafs.FileType.File
        return pafs.FileInfo(place.path, kind, size=about.st_size, mtime_ns=about.st_mtime_ns)
    return pafs.FileInfo(place.path, pafs.FileType.Unknown)


def _seen(info: pafs.FileInfo, name: str, *, is_named: bool = False) -> Seen:
    if info.size is None:
        raise StorageError(f"{info.path} has no size that its file system tells; copy it to another store")
    return Seen(info.path, name, info.size, info.mtime_ns or 0, is_named)


def _is_disk(source: Source) -> bool:
    return isinstance(source.filesystem, pafs.LocalFileSystem)


def _check_number(number: int) -> None:
    if number > MAX_FILES:
        raise LimitExceeded(f"path holds more than {MAX_FILES:,} files; read it in parts", field="path")


def _nothing_there(source: Source, place: Place, path: str) -> NoData:
    cure = "check the path"
    if not source.is_local:
        cure += ", that the bucket exists, and that the credentials may list it"
    elif _is_disk(source):
        parent, _, name = path.rpartition("/")
        with contextlib.suppress(OSError):
            near = difflib.get_close_matches(name, os.listdir(parent or "/")[:MAX_NEAR], 1)  # noqa: PTH208
            cure = f"did you mean {parent}/{near[0]}?" if near else cure
    return NoData(f"there is nothing at {place.written}; {cure}", field="path")
