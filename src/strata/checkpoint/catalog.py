"""What checkpoints there are in a store: their manifests, oldest first, and what is wrong with the others."""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

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
    id: str
    step: int
    epoch: int
    path: str
    """Where it lies, as a URL or a path."""
    size_bytes: int
    """Of its own files."""
    checkpoint_type: CheckpointType
    model_hash: str | None = None
    """Of its contents; known when it is durable."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The user's own."""
    parent: str = ""
    """The id of the checkpoint that it was compared with; empty if with none."""
    bases: tuple[str, ...] = ()
    """The ids of those whose files it needs: they stay as long as it does."""
    created_at_s: float = 0.0
    full_bytes: int = 0
    """Of the whole state; with an incremental checkpoint more than `size_bytes`."""
    num_ranks: int = 1
    data_cursor: str = ""
    """Where the data loader stood, as `save` was told."""
    why: str = ""
    """Why it is of this type, if another was asked for."""


def of_manifest(manifest: Manifest, url: str) -> CheckpointMetadata:
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
    )


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
QUARANTINE = "quarantine.json"
NO_CHECKPOINT = "restore-"
"""What ranks have to say to each other, see `choice.py`: not looked at."""
NUM_AT_ONCE = 8
ID = re.compile(r"step-\d{12,}-[0-9a-f]{16}")
"""As `arguments.new_id` and `groups.checkpoint_id` make them."""


def _locked(method: Callable[Concatenate[Catalog, P], T]) -> Callable[Concatenate[Catalog, P], T]:
    """Callers and the thread that tidies up use one catalog."""

    @functools.wraps(method)
    def with_lock(self: Catalog, /, *arguments: P.args, **more: P.kwargs) -> T:
        with self.lock:
            return method(self, *arguments, **more)

    return with_lock


def links_in(store: Store) -> dict[str, Path]:
    """Symbolic links that have the name of a checkpoint, and where they lead. Others (`latest`) are the user's own."""
    if not isinstance(store, LocalStore):
        return {}
    return {name: target for name, target in store.links().items() if ID.fullmatch(name)}


class Catalog:
    """A committed manifest never changes, so each is read once."""

    def __init__(self, store: Store) -> None:
        self.lock = renewed(threading.RLock())
        self._store = store
        self._known: dict[str, Manifest | None] = {}
        """None: quarantined."""
        self._noted: dict[str, CheckpointMetadata] = {}
        """Of those that this process has committed, and need not read to know them."""
        self.problems: dict[str, str] = {}
        """Id → why it is passed over."""

    @_locked
    def manifests(self) -> list[Manifest]:
        """Oldest first."""
        self._look_at_all_but(())
        return sorted(self._manifests(), key=lambda found: (found.step, found.created_at_s, found.id))

    def newest_but(self, passed_over: Container[str]) -> Manifest | None:
        return next((found for found in reversed(self.manifests()) if found.id not in passed_over), None)

    @_locked
    def summaries(self) -> list[CheckpointMetadata]:
        """Likewise, without reading what is known anyway."""
        self._look_at_all_but(self._noted)
        read = {found.id: of_manifest(found, self._store.url) for found in self._manifests()}
        noted = {id: one for id, one in self._noted.items() if id not in self._known}
        return sorted([*read.values(), *noted.values()], key=lambda one: (one.step, one.created_at_s, one.id))

    def _manifests(self) -> list[Manifest]:
        return [manifest for manifest in self._known.values() if manifest is not None]

    def _look_at_all_but(self, passed_over: Container[str]) -> None:
        names, links = self._store.children(), links_in(self._store)
        ids = [name for name in names if m.is_safe_name(name) and not name.startswith(NO_CHECKPOINT)]
        ids += links  # no store lists them
        there = set(ids)
        self._known = {id: known for id, known in self._known.items() if id in there}
        self._noted = {id: noted for id, noted in self._noted.items() if id in there}
        self.problems = {id: why for id, why in self.problems.items() if id in there}
        new = [id for id in ids if id not in self._known and id not in passed_over]
        if len(new) > 1:
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                list(pool.map(lambda one: self._look(one, links.get(one)), new))
        else:
            for id in new:
                self._look(id, links.get(id))

    def _pass_over(self, id: str, why: str) -> None:
        if self.problems.get(id) != why:
            log.warning("checkpoint %s is passed over: %s", id, why)
        self.problems[id] = why

    def _look(self, id: str, link: Path | None = None) -> None:
        """An id without a manifest is a save under way, or one that was given up: looked at again next time. But no
        save makes a link.
        """
        try:
            manifest = self.read(id)
        except ObjectMissing:
            if link is not None:
                self._pass_over(id, f"it is a symbolic link to {link}, where no checkpoint is; is that disk mounted?")
            return
        except (CheckpointInvalid, StorageError) as error:
            if isinstance(error, StorageError) and type(error) is not StorageError:
                raise  # the store's fault: the newest must not be passed over because of a moment's failure
            self._pass_over(id, str(error))
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
        key = f"{id}/{m.FILE_NAME}"
        manifest = m.decode(self._store.get(key, max_bytes=m.MAX_MANIFEST_BYTES), file=key)
        if manifest.id != id:
            raise CheckpointInvalid(f"{key} is of checkpoint {manifest.id}; was the directory renamed?")
        return manifest

    @_locked
    def find(self, *, step: int | None = None, id: str | None = None) -> Manifest:
        """The newest, the newest of a step, or the one of an id.

        Raises:
            NoCheckpoint: There is none such; the message says what there is.
        """
        if id is not None:
            return self._of_id(id, step)
        manifests = self.manifests()
        found = [x for x in manifests if step is None or x.step == step]
        if not found:
            raise NoCheckpoint(self._nothing(manifests, step))
        return found[-1]

    def _of_id(self, id: str, step: int | None) -> Manifest:
        try:
            manifest = self.read(id) if m.is_safe_name(id) else None
        except ObjectMissing:
            manifest = None
        if manifest is None:
            raise NoCheckpoint(f"there is no checkpoint {id[:200]!r} in {self._store.url}")
        if step not in (None, manifest.step):
            raise NoCheckpoint(f"checkpoint {id} is of step {manifest.step}, not {step}")
        return manifest

    def _nothing(self, manifests: Sequence[Manifest], step: int | None) -> str:
        where = self._store.url
        bad = f"; {len(self.problems)} cannot be read" if self.problems else ""
        if not manifests:
            return f"there is no checkpoint in {where}{bad}"
        steps = ", ".join(str(manifest.step) for manifest in manifests[-5:])
        return f"there is no checkpoint of step {step} in {where}; the newest are of steps {steps}{bad}"

    @_locked
    def quarantine(self, id: str, reason: str) -> None:
        """It stays, and is not offered any more; to others, only if the place can be written to."""
        try:
            self._store.put(f"{id}/{QUARANTINE}", json.dumps({"reason": reason}).encode())
        except StorageError as error:
            log.warning("checkpoint %s could not be put into quarantine: %s", id, error)
        self._known[id], self.problems[id] = None, f"in quarantine: {reason}"

    @_locked
    def note(self, metadata: CheckpointMetadata) -> None:
        """One that was just committed."""
        self._noted[metadata.id] = metadata

    @_locked
    def forget(self, id: str) -> None:
        self._known.pop(id, None)
        self._noted.pop(id, None)
        self.problems.pop(id, None)
