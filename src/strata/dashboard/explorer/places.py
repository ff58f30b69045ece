"""Places where checkpoints are: a directory or bucket, one checkpoint, one safetensors file, or a run.

A place is opened from a location that the user of the command line, or the coordinator, gives. Requests name a place by
its id, and a checkpoint by its name in the listing of that place.
"""

from __future__ import annotations

import hashlib
import re
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from strata.checkpoint.catalog import ID, Catalog
from strata.checkpoint.format import manifest as m
from strata.dashboard.explorer.contents import PlainFile, SavedCheckpoint
from strata.errors import ConfigError, NoCheckpoint
from strata.launch.environment import storage_options_in
from strata.launch.record.directory import open_directory, open_run, root
from strata.storage import open_store
from strata.storage.base import TEMPORARY
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from strata.checkpoint.format.manifest import Manifest
    from strata.launch.record.directory import RunDirectory
    from strata.storage import Store

SUFFIX = ".safetensors"
MAX_FILES = 1_000
"""Plain files that are listed in a directory."""
_NOT_PLAIN = re.compile(r"[^a-z0-9]+")

Kind = Literal["checkpoints", "checkpoint", "file"]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a place holds."""

    manifests: tuple[Manifest, ...]
    """Oldest first."""
    files: tuple[str, ...]
    """Names of plain safetensors files."""
    problems: Mapping[str, str]
    """Id → why the checkpoint is ignored."""


class Place:
    """An opened place. Every method may be called from several threads."""

    def __init__(self, store: Store, *, location: str, label: str, kind: Kind, only: str = "") -> None:
        digest = hashlib.blake2b(location.encode(), digest_size=4).hexdigest()
        self.id = f"{_NOT_PLAIN.sub('-', label.lower())[:60].strip('-')}-{digest}".lstrip("-")
        """The same whenever the location is opened, so that links stay valid."""
        self.location, self.label, self.kind = location, label, kind
        self.store = store
        self._only = only
        self._catalog = Catalog(store)
        self._headers: dict[str, PlainFile] = {}

    def listing(self) -> Listing:
        """List the place anew.

        Raises:
            StorageError: The store failed.
        """
        if self.kind == "file":
            return Listing((), (self._only,), {})
        if self.kind == "checkpoint":
            return Listing((self._catalog.read(self._only),), (), {})
        with self._catalog.lock:
            return Listing(tuple(self._catalog.manifests()), tuple(self._files()), dict(self._catalog.problems))

    def open(self, name: str) -> SavedCheckpoint | PlainFile:
        """Open a checkpoint or a plain file of the listing.

        Raises:
            NoCheckpoint: The place has no such checkpoint.
            CheckpointInvalid: It is damaged.
        """
        if name in self._plain_files():
            return self.open_file(name)
        if self.kind == "file" or (self.kind == "checkpoint" and name not in (self._only, *self._bases())):
            raise NoCheckpoint(f"{self.location} has no checkpoint {name[:200]!r}", field="id")
        return SavedCheckpoint(self.store, self._catalog.find(id=name))

    def open_file(self, name: str) -> PlainFile:
        """Open a plain file of the listing; its header is read again only if the file has changed.

        Raises:
            CheckpointInvalid: It is damaged.
        """
        known = self._headers.get(name)
        if known is None or not known.is_current():
            known = self._headers[name] = PlainFile(self.store, name)
        return known

    def _plain_files(self) -> Iterable[str]:
        return (self._only,) if self.kind == "file" else self._files() if self.kind == "checkpoints" else ()

    def _bases(self) -> tuple[str, ...]:
        return self._catalog.read(self._only).bases

    def _files(self) -> list[str]:
        """List the plain files of a local directory. Links are not listed, as everywhere in a store."""
        if not isinstance(self.store, LocalStore) or not self.store.root.is_dir():
            return []
        found = []
        for path in self.store.root.iterdir():
            is_plain = path.name.endswith(SUFFIX) and not path.name.startswith(TEMPORARY)
            if is_plain and stat.S_ISREG(path.lstat().st_mode):
                found.append(path.name)
                if len(found) == MAX_FILES:
                    break
        return sorted(found)


def open_place(location: str, storage_options: Mapping[str, str] | None = None) -> Place:
    """Open a directory, a URL, one checkpoint, a safetensors file, or the directory or the name of a run.

    Studies are opened by `studies.source.open_study`.

    Raises:
        ConfigError: Nothing is there, or the scheme is unknown.
    """
    options = dict(storage_options or {})
    if "://" in location and not location.startswith("file://"):
        return _open_url(location.rstrip("/"), options)
    path = Path(unquote(urlsplit(location).path) if location.startswith("file://") else location).expanduser()
    if path.is_file():
        if path.suffix != SUFFIX:
            raise ConfigError(
                f"{location} is a file, but not a {SUFFIX} file; give one, or a directory", field="location"
            )
        path = path.absolute()
        return Place(LocalStore(path.parent), location=str(path), label=path.name, kind="file", only=path.name)
    if path.is_dir():
        return _open_directory(path.absolute(), options)
    if path.name == location:
        run = _open_named(location)
        options = storage_options_in(run.spec.variables) | options
        return _labelled(open_place(run.locate_checkpoints(), options), run.name)
    raise ConfigError(
        f"{location} does not exist; give a directory, a URL, a {SUFFIX} file, or the name of a run or study",
        field="location",
    )


def _open_named(name: str) -> RunDirectory:
    """
    Raises:
        ConfigError: There is no such run; the message names the other place where it was looked for.
    """
    try:
        return open_run(name)
    except ConfigError as error:  # it names similar runs
        raise ConfigError(
            f"{Path(name).absolute()} does not exist; among the runs and studies of {root()}: {error.message}; give a "
            f"directory, a URL, a {SUFFIX} file, or the name of a run or study",
            field="location",
        ) from None


def open_checkpoints(location: str, *, label: str, storage_options: Mapping[str, str]) -> Place:
    """Open a directory or URL where checkpoints are saved. A directory need not exist yet.

    Raises:
        ConfigError: The scheme is unknown, or an option is invalid.
    """
    store = open_store(location, dict(storage_options)) if "://" in location else LocalStore(Path(location))
    return Place(store, location=location, label=label, kind="checkpoints")


def _open_directory(path: Path, options: Mapping[str, str]) -> Place:
    if options:
        raise ConfigError("storage options configure object stores; leave them out for a path", field="storage_options")
    if (path / m.FILE_NAME).is_file():
        store = LocalStore(path.parent)
        return Place(store, location=str(path), label=path.name, kind="checkpoint", only=path.name)
    run = open_directory(path)
    if run is not None:
        url = run.locate_checkpoints()
        found = storage_options_in(run.spec.variables) if "://" in url else None
        return _labelled(open_place(url, found), path.name)
    return Place(LocalStore(path), location=str(path), label=path.name or str(path), kind="checkpoints")


def _open_url(url: str, options: Mapping[str, str]) -> Place:
    parent, _, name = url.rpartition("/")
    if name.endswith(SUFFIX):
        return Place(open_store(parent, options), location=url, label=name, kind="file", only=name)
    if ID.fullmatch(name):
        return Place(open_store(parent, options), location=url, label=name, kind="checkpoint", only=name)
    return Place(open_store(url, options), location=url, label=name or url, kind="checkpoints")


def _labelled(place: Place, label: str) -> Place:
    place.label = label
    return place


class Places:
    """The places that requests may name. Places may be added while requests are served."""

    def __init__(self, places: Iterable[Place] = (), *, max_places: int = 100) -> None:
        self._max_places = max_places
        self._lock = threading.Lock()
        self._found: dict[str, Place] = {}
        for place in places:
            self.add(place)

    def add(self, place: Place) -> None:
        """Add a place; one with the same location replaces the earlier one.

        Raises:
            ConfigError: There are too many places.
        """
        with self._lock:
            if place.id not in self._found and len(self._found) >= self._max_places:
                raise ConfigError(f"more than max_places={self._max_places} places; raise it", field="max_places")
            self._found[place.id] = place

    def all(self) -> list[Place]:
        with self._lock:
            return list(self._found.values())

    def get(self, id: str) -> Place:
        """Return a place by its id.

        Raises:
            NoCheckpoint: No place has this id.
        """
        with self._lock:
            found = self._found.get(id)
        if found is None:
            raise NoCheckpoint(f"no place has the id {id[:200]!r}; /api/explorer/places lists them", field="place")
        return found

    def close(self) -> None:
        for place in self.all():
            place.store.close()
