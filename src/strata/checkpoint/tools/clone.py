"""Clone a checkpoint into a directory of its own, from which another job can start.

Files of a checkpoint never change, so a clone consists of hard links: it takes no space, and stays when the original is
removed. Where the file system has none, files are copied.
"""

from __future__ import annotations

import os
import shutil
import uuid
from typing import TYPE_CHECKING

from strata.checkpoint.catalog import Catalog, of_manifest
from strata.checkpoint.format import manifest as m
from strata.errors import NoCheckpoint
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from strata.checkpoint.catalog import CheckpointMetadata


def clone(checkpoint: Path, directory: Path) -> CheckpointMetadata:
    """Clone a checkpoint, with the checkpoints that it needs, as the only ones of a new directory; return the clone.

    Raises:
        NoCheckpoint: It was removed in the meantime.
        CheckpointInvalid: Its manifest cannot be trusted.
        OSError: The directory cannot be written.
    """
    catalog = Catalog(LocalStore(checkpoint.parent))
    draft = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    draft.mkdir(parents=True)
    try:
        found = catalog.find(id=checkpoint.name)
        left, done = [found.id], set[str]()
        while left:
            name = left.pop()
            if name not in done:
                done.add(name)
                left += catalog.find(id=name).bases
                _link_files(checkpoint.parent / name, draft / name)
        draft.rename(directory)
    except FileNotFoundError as error:
        raise NoCheckpoint(f"checkpoint {checkpoint} was removed while it was cloned") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return of_manifest(found, str(directory))


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint of a directory, or None."""
    found = Catalog(LocalStore(directory)).newest_except(()) if directory.is_dir() else None
    return None if found is None else directory / found.id


def _link_files(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir(), key=lambda each: each.name == m.FILE_NAME):  # the manifest last
        if path.is_file():
            try:
                os.link(path, target / path.name)
            except FileNotFoundError:
                raise
            except OSError:  # no hard links here, or not this many
                shutil.copyfile(path, target / path.name)
