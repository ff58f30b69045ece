"""The catalog lists the checkpoints of a store, oldest first, and the reasons why others are ignored.

`CheckpointMetadata` is what a user sees of a checkpoint. A committed manifest never changes, so each is read once.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from msgspec import UnsetType

from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.manifest import CheckpointType  # noqa: TC001 - msgspec looks it up
from strata.errors import CheckpointInvalid, NoCheckpoint, ObjectMissing, StorageError
from strata.lifecycle import renewed
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from pathlib import Path

    from strata.checkpoint.format.manifest import Manifest
    from strata.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """What is known of a checkpoint without reading its data."""

    id: str
    step: int
    epoch: int
    path: str
    """Its location, as a URL or a path."""
    size_bytes: int
    """The size of its own files."""
    checkpoint_type: CheckpointType
    model_hash: str | None = None
    """A hash of its contents; None until it is durable."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the caller passed to `save`."""
    parent: str = ""
    """The id of the checkpoint that a delta was computed against; empty if there is none."""
    bases: tuple[str, ...] = ()
    """The ids of the checkpoints whose files it needs. Retention keeps them as long as it."""
    created_at_s: float = 0.0
    full_bytes: int = 0
    """The size of the whole state; more than `size_bytes` for an incremental checkpoint."""
    num_ranks: int = 1
    data_cursor: str = ""
    """The position of the data loader that the caller passed to `save`."""
    why: str = ""
    """Why the type is not the requested one; empty if it is."""
    stall_s: float | None = None
    """How long the save blocked the caller on rank 0; None, like the next two, if it was not measured."""
    write_s: float | None = None
    """How long rank 0 wrote its files after that."""
    duration_s: float | None = None
    """From the call of the save on rank 0 until every rank had written its files."""


def of_manifest(manifest: Manifest, url: str) -> CheckpointMetadata:
    """Return the metadata of a committed checkpoint."""
    return CheckpointMetadata(
        id=manifest.id,
        step=manifest.step,
        epoch=manifest.epoch,
        path=f"{url.rstrip('/')}/{manifest.id}",
        size_bytes=manifest.written_bytes,
        checkpoint_type=manifest.type,
        model_hash=manifest.model_hash,
        metadata=dict(manifest.metadata),
        parent=manifest.parent,
        bases=manifest.bases,
        created_at_s=manifest.created_at_s,
        full_bytes=manifest.full_bytes,
        num_ranks=manifest.num_ranks,
        data_cursor=manifest.data_cursor,
        why=manifest.why,
        stall_s=_seconds(manifest.stall_s),
        write_s=_seconds(manifest.write_s),
        duration_s=_seconds(manifest.duration_s),
    )


def _seconds(measured: float | UnsetType) -> float | None:
    return None if isinstance(measured, UnsetType) else measured


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
QUARANTINE = "quarantine.json"
RESTORE_PREFIX = "restore-"
"""The prefix of directories that ranks use to agree on a restore, see `group/choice.py`."""
NUM_AT_ONCE = 8
ID = re.compile(r"step-\d{12,}-[0-9a-f]{16}")
"""The ids that `group/ranks.py` creates."""


def _locked(method: Callable[Concatenate[Catalog, P], T]) -> Callable[Concatenate[Catalog, P], T]:
    """Hold the catalog's lock: callers and the background thread share one catalog."""

    @functools.wraps(method)
    def with_lock(self: Catalog, /, *arguments: P.args, **more: P.kwargs) -> T:
        with self.lock:
            return method(self, *arguments, **more)

    return with_lock


def links_in(store: Store) -> dict[str, Path]:
    """Return the symbolic links named like checkpoints, with their targets. Others, such as `latest`, are ignored."""
    if not isinstance(store, LocalStore):
        return {}
    return {name: target for name, target in store.links().items() if ID.fullmatch(name)}


class Catalog:
    """The checkpoints of one store."""

    def __init__(self, store: Store) -> None:
        self.lock = renewed(threading.RLock())
        self._store = store
        self._known: dict[str, Manifest | None] = {}
        """None: in quarantine."""
        self._noted: dict[str, CheckpointMetadata] = {}
        """Checkpoints that this process committed, whose manifests need not be read."""
        self.problems: dict[str, str] = {}
        """Id → why the checkpoint is ignored."""

    @_locked
    def manifests(self) -> list[Manifest]:
        """Return the manifests of all checkpoints, oldest first."""
        self._refresh_except(())
        return sorted(self._manifests(), key=lambda found: (found.step, found.created_at_s, found.id))

    def newest_except(self, excluded: Container[str]) -> Manifest | None:
        """Return the newest checkpoint that is not excluded."""
        return next((found for found in reversed(self.manifests()) if found.id not in excluded), None)

    @_locked
    def summaries(self) -> list[CheckpointMetadata]:
        """Return the metadata of all checkpoints, oldest first, reading only unknown manifests."""
        self._refresh_except(self._noted)
        read = {found.id: of_manifest(found, self._store.url) for found in self._manifests()}
        noted = {id: one for id, one in self._noted.items() if id not in self._known}
        return sorted([*read.values(), *noted.values()], key=lambda one: (one.step, one.created_at_s, one.id))

    def _manifests(self) -> list[Manifest]:
        return [manifest for manifest in self._known.values() if manifest is not None]

    def _refresh_except(self, excluded: Container[str]) -> None:
        """List the store and read the manifests of new ids that are not excluded."""
        names, links = self._store.children(), links_in(self._store)
        ids = [name for name in names if m.is_safe_name(name) and not name.startswith(RESTORE_PREFIX)]
        ids += links  # stores do not list links
        present = set(ids)
        self._known = {id: known for id, known in self._known.items() if id in present}
        self._noted = {id: noted for id, noted in self._noted.items() if id in present}
        self.problems = {id: why for id, why in self.problems.items() if id in present}
        new = [id for id in ids if id not in self._known and id not in excluded]
        if len(new) > 1:
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                list(pool.map(lambda one: self._read_new(one, links.get(one)), new))
        else:
            for id in new:
                self._read_new(id, links.get(id))

    def _ignore(self, id: str, why: str) -> None:
        if self.problems.get(id) != why:
            log.warning("ignoring checkpoint %s: %s", id, why)
        self.problems[id] = why

    def _read_new(self, id: str, link: Path | None = None) -> None:
        """Read the manifest of a new id.

        An id without a manifest is a save in progress or an aborted one, and is read again next time. A link without a
        manifest is a problem: no save creates links.
        """
        try:
            manifest = self.read(id)
        except ObjectMissing:
            if link is not None:
                self._ignore(
                    id, f"it is a symbolic link to {link}, which has no checkpoint; check that the disk is mounted"
                )
            return
        except (CheckpointInvalid, StorageError) as error:
            if isinstance(error, StorageError) and type(error) is not StorageError:
                raise  # the store failed: do not ignore the newest checkpoint for a transient error
            self._ignore(id, str(error))
            return
        try:
            reason = json.loads(self._store.get(f"{id}/{QUARANTINE}", max_bytes=1 << 20))["reason"]
        except ObjectMissing:
            self._known[id] = manifest
            self.problems.pop(id, None)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._known[id], self.problems[id] = None, "in quarantine"
        except StorageError as error:
            if type(error) is not StorageError:
                raise
            self._known[id], self.problems[id] = None, f"in quarantine: {error}"
        else:
            self._known[id], self.problems[id] = None, f"in quarantine: {reason}"

    def read(self, id: str) -> Manifest:
        """Read and check the manifest of a checkpoint."""
        key = f"{id}/{m.FILE_NAME}"
        manifest = m.decode(self._store.get(key, max_bytes=m.MAX_MANIFEST_BYTES), file=key)
        if manifest.id != id:
            raise CheckpointInvalid(f"{key} belongs to checkpoint {manifest.id}; rename its directory to that id")
        return manifest

    @_locked
    def find(self, *, step: int | None = None, id: str | None = None) -> Manifest:
        """Return the newest checkpoint, the newest of a step, or the one with an id.

        Raises:
            NoCheckpoint: No such checkpoint exists; the message lists the newest steps.
        """
        if id is not None:
            return self._of_id(id, step)
        manifests = self.manifests()
        found = [x for x in manifests if step is None or x.step == step]
        if not found:
            raise NoCheckpoint(self._none_found(manifests, step))
        return found[-1]

    def _of_id(self, id: str, step: int | None) -> Manifest:
        try:
            manifest = self.read(id) if m.is_safe_name(id) else None
        except ObjectMissing:
            manifest = None
        if manifest is None:
            raise NoCheckpoint(f"{self._store.url} has no checkpoint {id[:200]!r}")
        if step not in (None, manifest.step):
            raise NoCheckpoint(f"checkpoint {id} has step {manifest.step}, not {step}")
        return manifest

    def _none_found(self, manifests: Sequence[Manifest], step: int | None) -> str:
        where = self._store.url
        bad = f"; {len(self.problems)} cannot be read" if self.problems else ""
        if not manifests:
            return f"{where} has no checkpoint{bad}"
        steps = ", ".join(str(manifest.step) for manifest in manifests[-5:])
        return f"{where} has no checkpoint of step {step}; the newest steps are {steps}{bad}"

    @_locked
    def quarantine(self, id: str, reason: str) -> None:
        """Ignore a checkpoint from now on, without deleting it; other processes too, if the store is writable."""
        try:
            self._store.put(f"{id}/{QUARANTINE}", json.dumps({"reason": reason}).encode())
        except StorageError as error:
            log.warning("could not put checkpoint %s into quarantine: %s", id, error)
        self._known[id], self.problems[id] = None, f"in quarantine: {reason}"

    @_locked
    def note(self, metadata: CheckpointMetadata) -> None:
        """Add a checkpoint that was just committed."""
        self._noted[metadata.id] = metadata

    @_locked
    def forget(self, id: str) -> None:
        """Drop what is known of a checkpoint, such as a deleted one."""
        self._known.pop(id, None)
        self._noted.pop(id, None)
        self.problems.pop(id, None)
