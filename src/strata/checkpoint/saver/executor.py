"""Run one job: write the files and the part of a staged snapshot, and commit it.

The same code runs in the saver thread and in the saver process. It decides between a full and an incremental
checkpoint, because it knows which earlier checkpoints were committed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from strata.checkpoint.catalog import CheckpointMetadata, of_manifest
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.manifest import CheckpointType
from strata.checkpoint.format.merge import Head  # noqa: TC001 - msgspec resolves it at run time
from strata.checkpoint.format.part import RankPart  # noqa: TC001 - msgspec resolves it at run time
from strata.checkpoint.group import commit
from strata.checkpoint.group.commit import BaseIsGone
from strata.checkpoint.group.ranks import Ranks
from strata.checkpoint.save import writer
from strata.checkpoint.save.delta_files import Delta
from strata.checkpoint.save.staging import PrivateMemory, paused_collector
from strata.errors import ObjectMissing, StrataError

if TYPE_CHECKING:
    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.save.delta import Changes
    from strata.checkpoint.save.job import Job
    from strata.storage import Store, Watch

log = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a successful job."""

    head: Head
    """As requested, with the actual type and its reason."""
    metadata: CheckpointMetadata | None = None
    """Of the checkpoint, if it is committed."""
    part: RankPart | None = None
    """What this rank wrote, if the manager commits it."""


@dataclass(slots=True)
class _Snapshot:
    """An earlier checkpoint that a delta may refer to."""

    part: RankPart
    changed: dict[str, Changes] = field(default_factory=dict)
    """Units that changed at any time since."""

    def note(self, job: Job) -> None:
        """Add the changes of a job."""
        for tensor in job.tensors:
            new, before = job.changed_units(tensor), self.changed.get(tensor.name)
            if new is not None:
                self.changed[tensor.name] = new if before is None else before.joined(new, tensor.num_bytes)

    @property
    def depth(self) -> int:
        """The number of checkpoints it refers to."""
        return len(_bases_of(self.part))


class Executor:
    """Runs jobs, and remembers the checkpoints that the next delta may refer to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch = PrivateMemory()
        self._base: _Snapshot | None = None
        """The last full checkpoint."""
        self._last: _Snapshot | None = None
        self._written: RankPart | None = None
        """The newest part; the next job looks up whether it was committed."""
        self._has_written = False

    def run(self, job: Job, memory: memoryview, watch: Watch, *, is_retry: bool = False) -> Outcome:
        """Write a snapshot, and commit it if the job asks for it.

        Raises:
            CheckpointError, StorageError: Nothing was committed; the files are removed now or by a later save.
        """
        ranks, id = job.ranks or Ranks(), job.head.id
        if is_retry and is_committed(self._store, id):
            return Outcome(head=job.head, metadata=of_manifest(self._manifest_of(id), self._store.url))
        try:
            self._prepare(job, ranks)
            with commit.reporting_failure(self._store, ranks, id), paused_collector():
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
                with commit.translating_cancel(id):
                    part = self._write_all(job, memory, watch)
                head = self._head(job, part, str(error))
                manifest = commit.finish(self._store, ranks, part, head, watch=watch)
            self._written, self._has_written = part, True
        except BaseException:
            clean_up(self._store, ranks, id)
            raise
        return Outcome(head=head, metadata=of_manifest(manifest, self._store.url))

    def _prepare(self, job: Job, ranks: Ranks) -> None:
        """Claim the id and take in the changes. After a failure it is unknown what changed since when."""
        try:
            if ranks.size > 1:
                commit.claim(self._store, ranks, job.head.id)
            with commit.reporting_failure(self._store, ranks, job.head.id):
                self._settle(job)
        except BaseException:
            self._base = self._last = self._written = None
            raise

    def _head(self, job: Job, part: RankPart, why: str) -> Head:
        return msgspec.structs.replace(job.head, why=why or job.head.why, parent=max(_bases_of(part), default=""))

    def _manifest_of(self, id: str) -> Manifest:
        key = f"{id}/{m.FILE_NAME}"
        return m.decode(self._store.get(key, max_bytes=m.MAX_MANIFEST_BYTES), file=key)

    # -- earlier checkpoints ---------------------------------------------------------------------------------------

    def _settle(self, job: Job) -> None:
        """Look up whether the last checkpoint was committed, and add the changes of this job."""
        written, self._written = self._written, None
        if written is not None and is_committed(self._store, written.checkpoint):
            snapshot = _Snapshot(written)
            self._last = snapshot
            if not any("/" in file.path for file in written.files):
                self._base = snapshot
        if job.changed is None:  # the snapshot was not compared, so the changes are unknown
            self._base = self._last = None
            return
        for known in {id(s): s for s in (self._base, self._last) if s is not None}.values():
            known.note(job)

    def _parent(self, job: Job) -> tuple[_Snapshot | None, str]:
        """Return the checkpoint that a delta refers to, or why there is none."""
        if job.changed is None:
            return None, job.head.why
        parent = self._last if self._last is not None and self._last.depth < job.options.depth else self._base
        if parent is None:
            if not self._has_written:
                return None, "the saver was restarted, so the changes since the previous checkpoint are unknown"
            return None, "the previous checkpoint was not committed or was deleted"
        needed = {parent.part.checkpoint, *_bases_of(parent.part)}
        gone = [id for id in sorted(needed) if not is_committed(self._store, id)]
        if gone:
            return None, f"its base {gone[0]} no longer exists"
        return parent, ""

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, job: Job, memory: memoryview, watch: Watch) -> tuple[RankPart, str]:
        """Write the files; return the part, and why it is not of the requested type."""
        why = ""
        if job.head.type is CheckpointType.INCREMENTAL:
            parent, why = self._parent(job)
            if parent is not None:
                delta = Delta(self._store, job, memory, parent.part, parent.changed, self._scratch, watch)
                if delta.is_worthwhile:
                    return delta.write(), ""
                why = f"{delta.share:.0%} of the state changed since {parent.part.checkpoint}, so it was saved in full"
        return self._write_all(job, memory, watch), why

    def _write_all(self, job: Job, memory: memoryview, watch: Watch) -> RankPart:
        if job.options.compression:
            return writer.write_compressed(self._store, job, memory, self._scratch, watch)
        return writer.write_whole(self._store, job, memory, watch)


def is_committed(store: Store, id: str) -> bool:
    """Return whether a checkpoint exists."""
    try:
        store.size(f"{id}/{m.FILE_NAME}")
    except ObjectMissing:
        return False
    return True


def clean_up(store: Store, ranks: Ranks, id: str) -> None:
    """Delete the files of a failed save, unless another rank may still commit it."""
    if ranks.size > 1:
        commit.discard(store, ranks, id)
        return
    try:
        store.delete([f"{id}/{m.FILE_NAME}"])  # first: a reader must not find it without its files
        store.delete([listed.key for listed in store.walk(id)])
    except StrataError as error:
        log.warning("could not delete the leftovers of %s; a later save will: %s", id, error)


def _bases_of(part: RankPart) -> set[str]:
    return {file.path.split("/")[0] for file in part.files if "/" in file.path}
