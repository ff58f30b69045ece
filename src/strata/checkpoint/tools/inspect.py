"""Inspect and maintain a store of checkpoints: quarantine, deletion, leftovers of dead writers.

Only lifting a checkpoint out of quarantine reads its data. A directory counts as a leftover only if it is named like a
checkpoint and holds nothing but files of ours, so that a wrong path loses nothing.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.checkpoint.catalog import ID, QUARANTINE, links_in
from strata.checkpoint.format import manifest as m
from strata.checkpoint.group.commit import ABORTED
from strata.checkpoint.load import integrity
from strata.errors import CheckpointInvalid, InvalidArgument, NoCheckpoint, ObjectExists, ObjectMissing
from strata.storage import Watch
from strata.storage.base import TEMPORARY
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.checkpoint.catalog import Catalog
    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.storage import Store

LEFTOVER_AFTER_S = 3_600.0
"""A directory without a manifest that has not changed for this long is abandoned."""
_RESTORE = re.compile(r"restore-[0-9a-f]{16}-\d+")
"""Directories that ranks use to agree on a restore."""
_OURS = re.compile(
    r"rank-\d{5}(-\d+)?\.safetensors|(part|claim|failed)-\d{5}\.json|(quarantine|statistics|aborted)\.json"
    r"|\d+-(choice|\d{5}-(ok|bad))\.json"
)


@dataclass(frozen=True, slots=True)
class Files:
    """The files in the directory of an id."""

    id: str
    keys: tuple[str, ...]
    size_bytes: int
    modified_at_s: float
    """When the newest of them was written."""

    def is_abandoned(self, *, now_s: float) -> bool:
        """Return whether no file changed for `LEFTOVER_AFTER_S`."""
        return now_s - self.modified_at_s > LEFTOVER_AFTER_S


def files_of(store: Store, id: str) -> Files:
    """List the files of an id."""
    listed = list(store.walk(id))
    return Files(
        id,
        tuple(one.key for one in listed),
        sum(one.size_bytes for one in listed),
        max((one.modified_at_s for one in listed), default=0.0),
    )


def choose(catalog: Catalog, name: str) -> Manifest:
    """Find a checkpoint by a step or an id, as a user types it.

    Raises:
        NoCheckpoint: No such checkpoint exists.
    """
    return catalog.find(step=int(name)) if name.isdecimal() else catalog.find(id=name)


def files_holding(manifest: Manifest, tensor: TensorEntry) -> list[str]:
    """Return the paths of the files that hold a tensor, followed by those of its patches, each once."""
    numbers = [part.file for part in tensor.slices]
    numbers += [patch.file for part in tensor.slices for patch in part.patches]
    return list(dict.fromkeys(manifest.files[number].path for number in numbers))


# -- quarantine ----------------------------------------------------------------------------------------------------


def in_quarantine(store: Store, catalog: Catalog) -> dict[str, str]:
    """Return the ids in quarantine with their reasons, as of the last listing of the catalog."""
    return {id: why for id, why in catalog.problems.items() if _exists(store, f"{id}/{QUARANTINE}")}


def lift(store: Store, catalog: Catalog, id: str, *, watch: Watch | None = None) -> Manifest:
    """Verify a checkpoint and take it out of quarantine.

    Raises:
        NoCheckpoint: No such checkpoint exists.
        InvalidArgument: It is not in quarantine.
        CheckpointInvalid: It cannot be trusted.
    """
    manifest = catalog.find(id=id)
    key = f"{manifest.id}/{QUARANTINE}"
    if not _exists(store, key):
        raise InvalidArgument(f"checkpoint {id} is not in quarantine", field="id")
    integrity.verify(store, manifest, watch=watch or Watch())
    store.delete([key])
    catalog.forget(manifest.id)
    return manifest


# -- deletion ------------------------------------------------------------------------------------------------------


def removable(store: Store, catalog: Catalog, *, step: int | None = None, id: str | None = None) -> Files:
    """Return the files of a checkpoint that may be deleted. An unreadable checkpoint can be named by its id.

    Raises:
        NoCheckpoint: No such checkpoint exists.
        InvalidArgument: Another checkpoint needs it, or it is a symbolic link.
    """
    if id is None:
        id = catalog.find(step=step).id
    if id in (links := links_in(store)):
        raise InvalidArgument(
            f"checkpoint {id} is a symbolic link to {links[id]}; nothing is deleted through a link: delete the link "
            "itself, and its target if it is no longer needed",
            field="id",
        )
    if not m.is_safe_name(id) or not _exists(store, f"{id}/{m.FILE_NAME}"):
        raise NoCheckpoint(f"{store.url} has no checkpoint {id!r}")
    needed_by = _needed_by(catalog, id)
    if needed_by:
        raise InvalidArgument(f"checkpoint {id} is the base of {', '.join(needed_by)}; delete these first", field="id")
    return files_of(store, id)


def _needed_by(catalog: Catalog, id: str) -> list[str]:
    """Return the checkpoints that need this one, including those in quarantine, which may be lifted."""
    found = {manifest.id: manifest for manifest in catalog.manifests()}
    for ignored in catalog.problems:
        try:
            found[ignored] = catalog.read(ignored)
        except (CheckpointInvalid, ObjectMissing):
            continue
    return sorted(manifest.id for manifest in found.values() if id in manifest.bases)


def remove(store: Store, catalog: Catalog, files: Files) -> None:
    """Delete a checkpoint, its manifest first: from then on it does not exist, whatever happens to its files."""
    store.delete([f"{files.id}/{m.FILE_NAME}"])
    store.delete(files.keys)
    catalog.forget(files.id)


# -- leftovers -----------------------------------------------------------------------------------------------------


def leftovers(store: Store) -> list[Files]:
    """Return the directories of saves that were not committed, aborted or in progress, and of old restores."""
    found = []
    for id in store.children():
        is_save = ID.fullmatch(id) is not None
        if not is_save and _RESTORE.fullmatch(id) is None:
            continue
        if is_save and _exists(store, f"{id}/{m.FILE_NAME}"):
            continue
        files = files_of(store, id)
        if files.keys and all(_OURS.fullmatch(key.removeprefix(f"{id}/")) for key in files.keys):
            found.append(files)
    return sorted([*found, *_unfinished(store)], key=lambda files: files.id)


def _unfinished(store: Store) -> Iterator[Files]:
    """Yield directories that hold only temporary files of killed writers, which the store does not list."""
    if not isinstance(store, LocalStore) or not store.root.is_dir():
        return
    for directory in store.root.iterdir():
        if ID.fullmatch(directory.name) is None or directory.is_symlink() or not directory.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            paths = list(directory.iterdir())
            if all(path.name.startswith(TEMPORARY) for path in paths):
                sizes = [path.stat() for path in paths]
                # Deleting a missing key removes temporary files of dead writers from its directory, and nothing else.
                keys = (f"{directory.name}/{m.FILE_NAME}",)
                modified_at_s = max((one.st_mtime for one in sizes), default=directory.stat().st_mtime)
                yield Files(directory.name, keys, sum(one.st_size for one in sizes), modified_at_s)


def collect(store: Store, files: Files) -> bool:
    """Delete a leftover, unless it has been committed meanwhile; return whether it was deleted.

    Its writer may be alive: `group/commit._require_files` looks for the mark that is put first and deleted last here.
    """
    mark = f"{files.id}/{ABORTED}"
    with contextlib.suppress(ObjectExists):
        store.put(mark, b'{"rank": -1, "reason": "not modified for an hour"}\n', if_absent=True)
    if _exists(store, f"{files.id}/{m.FILE_NAME}"):
        store.delete([mark])
        return False
    store.delete([key for key in files.keys if key != mark])
    store.delete([mark])
    return True


def sweep(store: Store) -> None:
    """Remove temporary files of killed writers from the directories of checkpoints."""
    if isinstance(store, LocalStore):
        for id in store.children():
            if ID.fullmatch(id) is not None:
                store.sweep(prefix=id)


def _exists(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except ObjectMissing:
        return False
    return True
