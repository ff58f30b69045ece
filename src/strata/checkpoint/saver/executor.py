"""A snapshot in memory becomes a checkpoint: files, part, commit. The same in a thread and in a process of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from strata.checkpoint.catalog import CheckpointMetadata, of_manifest
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.manifest import CheckpointType
from strata.checkpoint.format.merge import Head  # noqa: TC001 - msgspec looks it up
from strata.checkpoint.format.part import RankPart  # noqa: TC001 - likewise
from strata.checkpoint.group import commit
from strata.checkpoint.group.commit import BaseIsGone
from strata.checkpoint.group.ranks import Ranks
from strata.checkpoint.save import writer
from strata.checkpoint.save.delta_files import Delta
from strata.checkpoint.save.staging import PrivateMemory, paused_collector
from strata.errors import ObjectMissing, StrataError

if TYPE_CHECKING:
    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.save.delta import Bits
    from strata.checkpoint.save.job import Job
    from strata.storage import Store, Watch

log = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job has ended well."""

    head: Head
    """Of the manifest: as it was asked for, with what has become of it."""
    metadata: CheckpointMetadata | None = None
    """Of the checkpoint, if it is committed."""
    part: RankPart | None = None
    """What this rank has written, if somebody else commits it."""


@dataclass(slots=True)
class _Snapshot:
    """A checkpoint of which the memory has a later state."""

    part: RankPart
    changed: dict[str, Bits] = field(default_factory=dict)
    """Units that have differed from it at any time since."""

    def note(self, job: Job) -> None:
        for tensor in job.tensors:
            if tensor.name in (job.changed or {}):
                bits = job.changed_units(tensor)
                before = self.changed.get(tensor.name)
                self.changed[tensor.name] = bits if before is None else before | bits

    @property
    def depth(self) -> int:
        """How many checkpoints it refers to."""
        return len(_bases_of(self.part))


class Executor:
    """Remembers what it has written, as far as the memory still tells what has changed since."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch = PrivateMemory()
        self._base: _Snapshot | None = None
        """The last full one."""
        self._last: _Snapshot | None = None
        self._written: RankPart | None = None
        """The newest: whether it was committed is looked up when the next one comes."""
        self._has_written = False

    def run(self, job: Job, memory: memoryview, watch: Watch, *, is_second_try: bool = False) -> Outcome:
        """Writes what the job says, and commits it if the job says so.

        Raises:
            CheckpointError, StorageError: It was not committed; what was written is removed, or will be.
        """
        ranks, id = job.ranks or Ranks(), job.head.id
        if is_second_try and is_committed(self._store, id):
            return Outcome(head=job.head, metadata=of_manifest(self._manifest_of(id), self._store.url))
        try:
            self._prepare(job, ranks)
            with commit.telling(self._store, ranks, id), paused_collector():
                part, why = self._write(job, memory, watch)
            head = self._head(job, part, why)
            if not job.commits:
                self._written, self._has_written = part, True
                return Outcome(head=head, part=part)
            try:
                manifest = commit.finish(self._store, ranks, part, head, watch=watch)
            except BaseIsGone as error:
                if ranks.size > 1:
                    raise
                part = self._write_all(job, memory, watch)
                head = self._head(job, part, str(error))
                manifest = commit.finish(self._store, ranks, part, head, watch=watch)
            self._written, self._has_written = part, True
        except BaseException:
            give_up(self._store, ranks, id)
            raise
        return Outcome(head=head, metadata=of_manifest(manifest, self._store.url))

    def _prepare(self, job: Job, ranks: Ranks) -> None:
        """If it fails, nobody knows any more what has changed since when."""
        try:
            if ranks.size > 1:
                commit.claim(self._store, ranks, job.head.id)
            with commit.telling(self._store, ranks, job.head.id):
                self._settle(job)
        except BaseException:
            self._base = self._last = self._written = None
            raise

    def _head(self, job: Job, part: RankPart, why: str) -> Head:
        return msgspec.structs.replace(job.head, why=why or job.head.why, parent=max(_bases_of(part), default=""))

    def _manifest_of(self, id: str) -> Manifest:
        key = f"{id}/{m.FILE_NAME}"
        return m.decode(self._store.get(key, max_bytes=m.MAX_MANIFEST_BYTES), file=key)

    # -- what is known of earlier ones -----------------------------------------------------------------------------

    def _settle(self, job: Job) -> None:
        """Takes in how the last one ended, and what has changed since."""
        written, self._written = self._written, None
        if written is not None and is_committed(self._store, written.checkpoint):
            snapshot = _Snapshot(written)
            self._last = snapshot
            if not any("/" in file.path for file in written.files):
                self._base = snapshot
        if job.changed is None:  # the memory has been overwritten, nobody knows with what
            self._base = self._last = None
            return
        for known in {id(s): s for s in (self._base, self._last) if s is not None}.values():
            known.note(job)

    def _parent(self, job: Job) -> tuple[_Snapshot | None, str]:
        """What a delta is taken from, or why there is nothing."""
        if job.changed is None:
            return None, job.head.why
        parent = self._last if self._last is not None and self._last.depth < job.options.depth else self._base
        if parent is None:
            if not self._has_written:
                return None, "who wrote the checkpoint before has ended, so nobody knows what to refer to"
            return None, "the checkpoint before is not there: it was not committed, or it was removed"
        needed = {parent.part.checkpoint, *_bases_of(parent.part)}
        gone = [id for id in sorted(needed) if not is_committed(self._store, id)]
        if gone:
            return None, f"its base {gone[0]} is not there any more"
        return parent, ""

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, job: Job, memory: memoryview, watch: Watch) -> tuple[RankPart, str]:
        """What was written, and why it is not what was asked for."""
        why = ""
        if job.head.type is CheckpointType.INCREMENTAL:
            parent, why = self._parent(job)
            if parent is not None:
                delta = Delta(self._store, job, memory, parent.part, parent.changed, self._scratch, watch)
                if delta.pays:
                    return delta.write(), ""
                why = f"{delta.share:.0%} of it differ from {parent.part.checkpoint}, so all of it was saved"
        return self._write_all(job, memory, watch), why

    def _write_all(self, job: Job, memory: memoryview, watch: Watch) -> RankPart:
        if job.options.compression:
            return writer.write_compressed(self._store, job, memory, self._scratch, watch)
        return writer.write_whole(self._store, job, memory, watch)


def is_committed(store: Store, id: str) -> bool:
    try:
        store.size(f"{id}/{m.FILE_NAME}")
    except ObjectMissing:
        return False
    return True


def give_up(store: Store, ranks: Ranks, id: str) -> None:
    """Removes what a failed save has written, as far as nobody else may still commit it."""
    if ranks.size > 1:
        commit.discard(store, ranks, id)
        return
    try:
        store.delete([f"{id}/{m.FILE_NAME}"])  # first: if it is there after all, nobody may find it without its files
        store.delete([listed.key for listed in store.walk(id)])
    except StrataError as error:
        log.warning("the leftovers of %s stay for now: %s", id, error)


def _bases_of(part: RankPart) -> set[str]:
    return {file.path.split("/")[0] for file in part.files if "/" in file.path}
