"""What a person wants to know of a place with checkpoints, and to put right in it.

Nothing here needs the data of a checkpoint, but lifting one out of quarantine, which reads all of it. Only what has the
name of a checkpoint, and holds nothing but files of ours, is ever taken for a leftover: who names a wrong directory
loses nothing.
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
"""A directory without a manifest that nobody wrote into for so long was given up."""
_RESTORE = re.compile(r"restore-[0-9a-f]{16}-\d+")
"""What ranks said to each other when they restored."""
_OURS = re.compile(
    r"rank-\d{5}(-\d+)?\.safetensors|(part|claim|failed)-\d{5}\.json|(quarantine|statistics|aborted)\.json"
    r"|\d+-(choice|\d{5}-(ok|bad))\.json"
)


@dataclass(frozen=True, slots=True)
class Files:
    """What lies in the directory of an id."""

    id: str
    keys: tuple[str, ...]
    size_bytes: int
    modified_at_s: float
    """When the last of them was written."""

    def is_given_up(self, *, now_s: float) -> bool:
        return now_s - self.modified_at_s > LEFTOVER_AFTER_S


def files_of(store: Store, id: str) -> Files:
    listed = list(store.walk(id))
    return Files(
        id,
        tuple(one.key for one in listed),
        sum(one.size_bytes for one in listed),
        max((one.modified_at_s for one in listed), default=0.0),
    )


def choose(catalog: Catalog, name: str) -> Manifest:
    """By a step, or by an id, as a person writes it.

    Raises:
        NoCheckpoint: There is none such.
    """
    return catalog.find(step=int(name)) if name.isdecimal() else catalog.find(id=name)


def files_holding(manifest: Manifest, tensor: TensorEntry) -> list[str]:
    """The names of the files that a tensor lies in, each once; those of its patches after its own."""
    numbers = [part.file for part in tensor.slices]
    numbers += [patch.file for part in tensor.slices for patch in part.patches]
    return list(dict.fromkeys(manifest.files[number].path for number in numbers))


# -- quarantine ----------------------------------------------------------------------------------------------------


def in_quarantine(store: Store, catalog: Catalog) -> dict[str, str]:
    """Id → why, as of the catalog's last look."""
    return {id: why for id, why in catalog.problems.items() if _is_there(store, f"{id}/{QUARANTINE}")}


def lift(store: Store, catalog: Catalog, id: str, *, watch: Watch | None = None) -> Manifest:
    """Takes a checkpoint out of quarantine, if every byte of it is what was written.

    Raises:
        NoCheckpoint: There is none such.
        InvalidArgument: It is not in quarantine.
        CheckpointInvalid: It is there for a reason.
    """
    manifest = catalog.find(id=id)
    key = f"{manifest.id}/{QUARANTINE}"
    if not _is_there(store, key):
        raise InvalidArgument(f"checkpoint {id} is not in quarantine", field="id")
    integrity.verify(store, manifest, watch=watch or Watch())
    store.delete([key])
    catalog.forget(manifest.id)
    return manifest


# -- removing ------------------------------------------------------------------------------------------------------


def removable(store: Store, catalog: Catalog, *, step: int | None = None, id: str | None = None) -> Files:
    """The files of a checkpoint that may go; also of one that cannot be read, by its id.

    Raises:
        NoCheckpoint: There is none such.
        InvalidArgument: Another checkpoint refers to it, or it is a symbolic link.
    """
    if id is None:
        id = catalog.find(step=step).id
    if id in (links := links_in(store)):
        raise InvalidArgument(
            f"checkpoint {id} is a symbolic link to {links[id]}; nothing is removed through a link: remove the link, "
            "and what it leads to if nobody needs it",
            field="id",
        )
    if not m.is_safe_name(id) or not _is_there(store, f"{id}/{m.FILE_NAME}"):
        raise NoCheckpoint(f"there is no checkpoint {id!r} in {store.url}")
    needed_by = _needed_by(catalog, id)
    if needed_by:
        raise InvalidArgument(f"checkpoint {id} is the base of {', '.join(needed_by)}; remove these first", field="id")
    return files_of(store, id)


def _needed_by(catalog: Catalog, id: str) -> list[str]:
    """Those in quarantine count: they may be lifted out of it."""
    found = {manifest.id: manifest for manifest in catalog.manifests()}
    for passed_over in catalog.problems:
        try:
            found[passed_over] = catalog.read(passed_over)
        except (CheckpointInvalid, ObjectMissing):
            continue
    return sorted(manifest.id for manifest in found.values() if id in manifest.bases)


def remove(store: Store, catalog: Catalog, files: Files) -> None:
    """The manifest goes first: from then on the checkpoint does not exist, whatever happens to the rest."""
    store.delete([f"{files.id}/{m.FILE_NAME}"])
    store.delete(files.keys)
    catalog.forget(files.id)


# -- leftovers -----------------------------------------------------------------------------------------------------


def leftovers(store: Store) -> list[Files]:
    """Directories of saves that were never committed: given up, or still under way. Also of restores."""
    found = []
    for id in store.children():
        is_save = ID.fullmatch(id) is not None
        if not is_save and _RESTORE.fullmatch(id) is None:
            continue
        if is_save and _is_there(store, f"{id}/{m.FILE_NAME}"):
            continue
        files = files_of(store, id)
        if files.keys and all(_OURS.fullmatch(key.removeprefix(f"{id}/")) for key in files.keys):
            found.append(files)
    return sorted([*found, *_unfinished(store)], key=lambda files: files.id)


def _unfinished(store: Store) -> Iterator[Files]:
    """Directories with nothing but what a killed process was writing: no store lists them."""
    if not isinstance(store, LocalStore) or not store.root.is_dir():
        return
    for directory in store.root.iterdir():
        if ID.fullmatch(directory.name) is None or directory.is_symlink() or not directory.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # somebody else has removed it meanwhile
            paths = list(directory.iterdir())
            if all(path.name.startswith(TEMPORARY) for path in paths):
                sizes = [path.stat() for path in paths]
                # To delete what is not there clears its directory of what dead writers left, and of nothing else.
                keys = (f"{directory.name}/{m.FILE_NAME}",)
                modified_at_s = max((one.st_mtime for one in sizes), default=directory.stat().st_mtime)
                yield Files(directory.name, keys, sum(one.st_size for one in sizes), modified_at_s)


def collect(store: Store, files: Files) -> bool:
    """Removes a leftover, unless it has become a checkpoint meanwhile. Its writer may live: see
    `groups._require_files`, which looks for what we put first and remove last.
    """
    mark = f"{files.id}/{ABORTED}"
    with contextlib.suppress(ObjectExists):
        store.put(mark, b'{"rank": -1, "reason": "nobody wrote for an hour"}\n', if_absent=True)
    if _is_there(store, f"{files.id}/{m.FILE_NAME}"):
        store.delete([mark])
        return False
    store.delete([key for key in files.keys if key != mark])
    store.delete([mark])
    return True


def sweep(store: Store) -> None:
    """What killed writers were writing, beside what others have committed. Only in directories of checkpoints."""
    if isinstance(store, LocalStore):
        for id in store.children():
            if ID.fullmatch(id) is not None:
                store.sweep(prefix=id)


def _is_there(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except ObjectMissing:
        return False
    return True
