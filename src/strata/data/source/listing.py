"""List files: recursively in a directory, by a pattern, or one by one.

A pattern matches files and directories; `*`, `?` and `[…]` match within one name, `**` any number of directories. A
path that exists literally is never treated as a pattern.

Hidden entries are skipped unless they are requested: names that begin with `_` or `.`, everything below directories
with such names (except partitions, `_key=value`), and marker files of other programs. A pattern whose part begins with
`_` or `.` matches hidden names.

A local directory that several links lead to is searched once, so a cycle of links terminates.
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

from strata.data.source.source import translate_errors
from strata.errors import DataFileMissing, InvalidArgument, LimitExceeded, NoData, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from strata.data.source.source import Source

MAX_FILES = 2_000_000
MAX_SUGGESTIONS_FROM = 10_000
"""Directory entries that are compared to suggest another name."""
BROKEN_LINK = -1
"""The size of a file behind a broken link."""
NUM_REQUESTS = 16
"""Concurrent requests for paths that are listed one by one."""
_MARKERS = ("_$folder$", ".crc", "._COPYING_")
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class RequestedPath:
    """One path or pattern that the user requested."""

    written: str
    """The text of the user, without secrets."""
    path: str
    """The path in its file system."""
    is_directory: bool
    """Whether the text ends with a slash."""


@dataclass(slots=True, eq=False)
class ListedFile:
    """A file that a search found."""

    path: str
    name: str
    """The path below the search's base."""
    size_bytes: int
    """The size, or `BROKEN_LINK`."""
    mtime_ns: int
    """0 if the file system does not report it."""
    is_named: bool = False
    """Whether the user, or a pattern for file names, named it: then it is selected whatever its suffix."""


@dataclass(slots=True)
class Search:
    written: str
    base: str
    """The directory that was searched."""
    listed: list[ListedFile] = field(default_factory=list)
    num_hidden: int = 0
    """Hidden files and directories that were skipped; the contents of a hidden directory are not counted."""
    is_directory: bool = False
    """Whether the user requested a directory, as opposed to a file or a pattern."""


def search_all(source: Source, requested: Sequence[RequestedPath]) -> list[Search]:
    """List the files of all requested paths.

    Raises:
        NoData: A path does not exist.
        LimitExceeded: There are too many files.
        StorageDenied, StorageUnavailable, StorageError: A path cannot be listed.
    """
    if len(requested) == 1 or source.is_local:
        found = [_search(source, each) for each in requested]
    else:
        with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS, "strata-data-search") as pool:
            found = list(pool.map(lambda each: _search(source, each), requested))
    _check_number(sum(len(search.listed) for search in found))
    return found


def relative(path: str, base: str) -> str:
    """Return the path below `base`; some file systems begin paths with a slash and some do not."""
    path, base = path.lstrip("/"), base.strip("/")
    assert not base or path.startswith(f"{base}/"), (path, base)
    return path[len(base) + 1 :] if base else path


def common_directory(bases: Sequence[str]) -> str:
    """Return the lowest directory that contains all of these."""
    parts = [base.strip("/").split("/") for base in set(bases)]
    lowest, highest = min(parts), max(parts)
    same = next((i for i, part in enumerate(lowest) if highest[i : i + 1] != [part]), len(lowest))
    return "/".join(lowest[:same])


def is_hidden(name: str, *, is_directory: bool) -> bool:
    if is_directory:
        return name[:1] == "." or (name[:1] == "_" and "=" not in name)
    return name[:1] in ("_", ".") or name.endswith(_MARKERS)


class Pattern:
    """Matches names below a directory, part by part, and caches the state of each directory."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts
        self._matches = [None if part == "**" else re.compile(fnmatch.translate(part)).match for part in parts]
        self._restricts_name = parts[-1] not in ("*", "**")
        self._end = len(parts)
        self._known = {"": (self._closed({0}), False)}

    def matches(self, name: str) -> bool | None:
        """Return None if the file does not match, else whether the pattern restricts the file's own name."""
        directory, _, own = name.rpartition("/")
        states, is_inside = self._reached(directory)
        if self._end in self._step(states, own, is_directory=False):
            return self._restricts_name
        return False if is_inside and not is_hidden(own, is_directory=False) else None

    def may_enter(self, directory: str) -> bool:
        """Return whether anything below the directory could match."""
        states, is_inside = self._reached(directory)
        return is_inside or bool(states)

    def _reached(self, directory: str) -> tuple[set[int], bool]:
        """Return the numbers of parts that the directory's path may match, and whether a match contains it."""
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
            elif match(part) and (not hidden or self._requests_hidden(state, part)):
                found.add(state + 1)
        return self._closed(found)

    def _closed(self, states: set[int]) -> set[int]:
        """Add the states that follow a `**` which matches no directory."""
        for state in sorted(states):
            while state < self._end and self._matches[state] is None:
                state += 1
                states.add(state)
        return states

    def _requests_hidden(self, state: int, hidden: str) -> bool:
        pattern = self._parts[state]
        return pattern[0] == hidden[0] if hidden[0] in "_." else pattern != "*"


def _search(source: Source, requested: RequestedPath) -> Search:
    info = _local_info(requested) if _is_disk(source) else source.info(requested.path, requested.written)
    if info.type == pafs.FileType.File and not (requested.is_directory and not source.is_local):
        base, _, name = requested.path.rpartition("/")
        return Search(requested.written, base, [_listed_file(info, name, is_named=True)])
    if info.type == pafs.FileType.NotFound and _WILD.search(requested.path):
        return _search_pattern(source, requested)
    if info.type == pafs.FileType.NotFound:
        raise _not_found(source, requested, requested.path)
    if info.type == pafs.FileType.Unknown:
        raise InvalidArgument(f"{requested.written} is neither a file nor a directory; pass one of these", field="path")
    return _search_directory(source, requested)


def _search_directory(source: Source, requested: RequestedPath) -> Search:
    search = Search(requested.written, requested.path, is_directory=True)

    def may_enter(directory: str) -> bool:
        """Return whether the directory is visible; its parents are."""
        hidden = is_hidden(directory.rpartition("/")[2], is_directory=True)
        search.num_hidden += hidden
        return not hidden

    for listed, num_others in _list(source, requested, search.base, may_enter):
        visible = [one for one in listed if not is_hidden(one.name.rpartition("/")[2], is_directory=False)]
        search.num_hidden += num_others + len(listed) - len(visible)
        search.listed += visible
        _check_number(len(search.listed))
    return search


def _search_pattern(source: Source, requested: RequestedPath) -> Search:
    wild = _WILD.search(requested.path)
    assert wild is not None
    base = requested.path[: wild.start()].rpartition("/")[0]
    pattern = Pattern([part for part in requested.path[len(base) :].split("/") if part])
    search = Search(requested.written, base)
    for listed, _ in _list(source, requested, search.base, pattern.may_enter):
        for one in listed:
            restricts_name = pattern.matches(one.name)
            if restricts_name is not None:
                one.is_named = restricts_name
                search.listed.append(one)
        _check_number(len(search.listed))
    return search


def _list(
    source: Source, requested: RequestedPath, base: str, may_enter: Callable[[str], bool]
) -> Iterator[tuple[list[ListedFile], int]]:
    """Yield the files of visible directories, in batches, with the number of markers and other non-files."""
    if _is_disk(source):
        yield from _walk(base or "/", may_enter)
        return
    try:
        with translate_errors(requested.written):
            infos = source.filesystem.get_file_info(pafs.FileSelector(base, recursive=True))
    except DataFileMissing as error:
        raise _not_found(source, requested, base) from error
    files = {relative(i.path, base): i for i in infos if i.type == pafs.FileType.File and not _is_same(i.path, base)}
    directories = _directories(files)
    entered = {"": True}
    for directory in sorted(directories):
        entered[directory] = entered[directory.rpartition("/")[0]] and may_enter(directory)
    within = {name: info for name, info in files.items() if entered[name.rpartition("/")[0]]}
    markers = {name for name, info in within.items() if name in directories and not info.size}
    yield [_listed_file(info, name) for name, info in within.items() if name not in markers], len(markers)


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


def _walk(base: str, may_enter: Callable[[str], bool]) -> Iterator[tuple[list[ListedFile], int]]:
    """Walk a local directory. Links are followed last, in order, so a file reached in two ways keeps its own path."""
    directories, links = [""], list[str]()
    visited: set[tuple[int, int]] = set()
    while directories or links:
        name = directories.pop() if directories else heapq.heappop(links)
        path = f"{base.rstrip('/')}/{name}" if name else base
        with translate_errors(path):
            about = os.stat(path)  # noqa: PTH116 - a Path object for each would double the time
            if (about.st_dev, about.st_ino) in visited:
                continue
            visited.add((about.st_dev, about.st_ino))
            found = _list_directory(path, f"{name}/" if name else "", may_enter, directories, links)
        yield found


def _list_directory(
    path: str, prefix: str, may_enter: Callable[[str], bool], directories: list[str], links: list[str]
) -> tuple[list[ListedFile], int]:
    """Return the files of one directory and the number of non-files; append subdirectories to the two lists."""
    files: list[ListedFile] = []
    num_others = 0
    top = f"{path.rstrip('/')}/"
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                files.append(ListedFile(top + name, prefix + name, about.st_size, about.st_mtime_ns))
            elif (target := _target(entry)) is None:
                files.append(ListedFile(top + name, prefix + name, BROKEN_LINK, 0))
            elif stat.S_ISREG(target.st_mode):
                files.append(ListedFile(top + name, prefix + name, target.st_size, target.st_mtime_ns))
            elif not stat.S_ISDIR(target.st_mode):
                num_others += 1
            elif may_enter(prefix + name):
                if entry.is_symlink():
                    heapq.heappush(links, prefix + name)
                else:
                    directories.append(prefix + name)
    return files, num_others


def _target(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a link's target; None if the link is broken or part of a cycle."""
    try:
        return entry.stat()
    except OSError:
        if entry.is_symlink():
            return None
        raise


def _local_info(requested: RequestedPath) -> pafs.FileInfo:
    try:
        with translate_errors(requested.written):
            about = os.stat(requested.path)  # noqa: PTH116
    except DataFileMissing:
        return pafs.FileInfo("", pafs.FileType.NotFound)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
            return pafs.FileInfo("", pafs.FileType.NotFound)
        raise
    if stat.S_ISDIR(about.st_mode):
        return pafs.FileInfo(requested.path, pafs.FileType.Directory)
    if stat.S_ISREG(about.st_mode):
        kind = pafs.FileType.File
        return pafs.FileInfo(requested.path, kind, size=about.st_size, mtime_ns=about.st_mtime_ns)
    return pafs.FileInfo(requested.path, pafs.FileType.Unknown)


def _listed_file(info: pafs.FileInfo, name: str, *, is_named: bool = False) -> ListedFile:
    if info.size is None:
        raise StorageError(f"the file system does not report the size of {info.path}; copy it to another store")
    return ListedFile(info.path, name, info.size, info.mtime_ns or 0, is_named)


def _is_disk(source: Source) -> bool:
    return isinstance(source.filesystem, pafs.LocalFileSystem)


def _check_number(number: int) -> None:
    if number > MAX_FILES:
        raise LimitExceeded(f"path contains more than {MAX_FILES:,} files; read it in parts", field="path")


def _not_found(source: Source, requested: RequestedPath, path: str) -> NoData:
    cure = "check the path"
    if not source.is_local:
        cure += ", that the bucket exists, and that the credentials allow listing it"
    elif _is_disk(source):
        parent, _, name = path.rpartition("/")
        with contextlib.suppress(OSError):
            entries = os.listdir(parent or "/")[:MAX_SUGGESTIONS_FROM]  # noqa: PTH208
            near = difflib.get_close_matches(name, entries, 1)
            cure = f"did you mean {parent}/{near[0]}?" if near else cure
    return NoData(f"{requested.written} does not exist; {cure}", field="path")
