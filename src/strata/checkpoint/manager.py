"""`CheckpointManager`: save in the background, load verified checkpoints, delete old ones.

`save` flattens the state, copies it into staging memory and submits a job to the saver. A background thread waits for
the result, commits with the coordinator if there is one, and applies retention.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from strata import tracing
from strata.checkpoint import arguments, policy, retention
from strata.checkpoint.catalog import Catalog, CheckpointMetadata, links_in, of_manifest
from strata.checkpoint.format import layout, shards, tree
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.manifest import CheckpointType
from strata.checkpoint.format.merge import Head
from strata.checkpoint.group import commit
from strata.checkpoint.group.choice import Choice
from strata.checkpoint.group.ranks import Ranks, checkpoint_id, new_id
from strata.checkpoint.handle import Save
from strata.checkpoint.load import integrity
from strata.checkpoint.load import state as loading
from strata.checkpoint.policy import Decision, Pacer
from strata.checkpoint.save import dirty_rows
from strata.checkpoint.save import job as jobs
from strata.checkpoint.save.job import Job, JobTensor, Options
from strata.checkpoint.save.staging import Staging, paused_collector
from strata.checkpoint.saver import executor
from strata.checkpoint.tools import compact as compaction
from strata.checkpoint.tools import inspect
from strata.checkpoint.tools.progress import watching
from strata.checkpoint.trace import trace_of
from strata.clock import SystemClock
from strata.errors import (
    CheckpointAborted,
    CheckpointBusy,
    CheckpointInvalid,
    ConfigError,
    InvalidArgument,
    NoCheckpoint,
    StrataError,
)
from strata.lifecycle import Home, at_exit, finalize, renewed
from strata.storage import Store, Watch, open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self

    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.group.commit import Commit
    from strata.checkpoint.load.state import Slices
    from strata.checkpoint.policy import Strategy
    from strata.checkpoint.retention import Policy
    from strata.checkpoint.save.dirty_rows import RowTracker
    from strata.checkpoint.saver.client import Saver
    from strata.checkpoint.saver.executor import Outcome
    from strata.checkpoint.tools.progress import Progress
    from strata.clock import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_DELETED = 100
"""How often a load starts again because the checkpoint that it was reading was deleted."""
STALL_S = 900.0
"""A saver that has written no byte for this long hangs on a disk or network that does not respond."""
EXIT_WARNING_AFTER_S = 5.0
"""A process that waits longer than this for its last save before it exits logs why."""
WhenBusy = Literal["wait", "skip", "raise"]
OnProgress = Callable[["Progress"], None]


class CheckpointManager:
    """Saves and loads the checkpoints of one directory or URL.

    `save` copies the state and returns; a separate process writes it and finishes even if this one is killed. Methods
    may be called from several threads; one save is in progress at a time.
    """

    def __init__(
        self,
        storage_path: str | os.PathLike[str] | None = None,
        *,
        keep_count: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        policies: Sequence[Policy] = (),
        strategy: Strategy | None = None,
        when_busy: WhenBusy = "wait",
        compression: Literal["zstd"] | None = None,
        incremental_depth: int = 1,
        rebase_at: float = 0.5,
        xor: bool = False,
        statistics: bool = True,
        saver: Literal["process", "thread"] | None = None,
        ranks: Ranks | None = None,
        commit: Commit | None = None,
        progress: bool | None = None,
        bucket: str | None = None,
        storage_type: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open a directory or URL (`s3://bucket/prefix`), or `bucket` with `storage_type`.

        Args:
            strategy: When `should_save` and `maybe_save` save.
            when_busy: What `save` does while the last save is still being written: wait for it, skip this one (the
                handle reports it), or raise `CheckpointBusy`.
            compression: Compress compressible tensors with zstd.
            incremental_depth: The maximum length of a chain of deltas; 1: each refers to the last full checkpoint.
            rebase_at: A delta that would hold more than this share of the state becomes a full checkpoint.
            xor: Store half-precision tensors that changed throughout as their compressed difference from the base.
            saver: Write in a process or a thread; by default in a process, where possible.
            ranks: The rank of this process, if several ranks save together; see `Ranks`.
            commit: A coordinator that knows when all ranks have written.
            progress: Show a progress bar for long waits on a terminal: True, False, or None for unless `on_progress`
                is given.

        Raises:
            ConfigError: The location or a policy is invalid.
        """
        arguments.check_choices(
            when_busy=when_busy, compression=compression, saver=saver, depth=incremental_depth, rebase_at=rebase_at
        )
        if ranks is not None and ranks.size > 1 and when_busy == "skip":
            raise ConfigError("when_busy='skip' would let ranks diverge; use when_busy='wait'", field="when_busy")
        url = None if store is not None else arguments.location(storage_path, bucket, storage_type)
        self._store = store or open_store(url or "", storage_options)
        self._policies = arguments.all_policies(keep_count, keep_every, keep_best, policies)
        self._when_busy = when_busy
        self._options = Options(
            compression=compression or "", depth=incremental_depth, rebase_at=rebase_at, xor=xor, statistics=statistics
        )
        self._ranks = ranks
        self._commit = commit
        self._progress = progress
        self._clock = clock or SystemClock()
        self._pacer = Pacer(arguments.checked_strategy(strategy), self._clock)
        self._catalog = Catalog(self._store)
        self._saver = arguments.choose_saver(saver, self._store, url, storage_options)
        self._staging = Staging(self._saver.memory)
        self._dirty = dirty_rows.DirtyRows()
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="strata-checkpoint")
        self._saving = renewed(threading.Lock())
        """Held from the start of the copy until the staging memory is free again."""
        self._copying_in: int | None = None
        """The thread that is copying now."""
        self._saves_of_step: Counter[int] = Counter()
        """The number of requested saves per step, which becomes part of their ids with several ranks."""
        self._num_loads = 0
        """The number of loads on which the ranks had to agree."""
        self._last: Save | None = None
        self._failed: Save | None = None
        """A failed save that has not been reported yet."""
        self._closed = False
        self._home = Home()
        withdraw = at_exit(functools.partial(_wait_at_exit, weakref.ref(self)))
        # The saver must end if the manager is not closed. At exit it ends with the process.
        finalize(self, _let_go, self._saver, withdraw, runs_at_exit=False)

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        *,
        step: int,
        epoch: int = 0,
        checkpoint_type: CheckpointType | str = CheckpointType.FULL,
        metadata: Mapping[str, Any] | None = None,
        data_cursor: str = "",
        dirty: Mapping[str, Any] | RowTracker | None = None,
        replicated: Iterable[str] = (),
        replicas: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Save:
        """Copy `state` and return a handle; `handle.wait()` waits until the checkpoint is durable.

        Args:
            dirty: For an incremental save: the rows of some tensors that changed since the last `save`. These tensors
                are not compared; all others are.
            replicated: With several ranks: patterns of tensors that are equal on all ranks, so that one rank writes
                each.
            replicas: The number of ranks, from rank 0 on, that hold the replicated tensors; by default all.

        Raises:
            InvalidArgument: A value of the state cannot be stored; nothing was written.
            CheckpointBusy: Another save is in progress, and `when_busy="raise"`.
        """
        start_s = time.monotonic()
        self._require_open()
        id = self._next_id(arguments.count(step, "step"))
        with self._reporting_failure(id):
            kind = arguments.kind_of(checkpoint_type)
            head = Head(
                id=id,
                step=arguments.count(step, "step"),
                epoch=arguments.count(epoch, "epoch"),
                type=kind,
                created_at_s=self._clock.wall_s(),
                metadata=arguments.checked_metadata(metadata),
                data_cursor=arguments.text(data_cursor, "data_cursor"),
                called_s=start_s,
            )
            with paused_collector():
                flat = tree.flatten(arguments.part_of_kind(state, kind))
                leaves = self._own_leaves(flat, replicated, replicas)
                plan = layout.plan(leaves, {"strata": str(m.VERSION), "id": id, "rank": str(self._rank)})
            rows = dirty_rows.resolve_dirty(dirty, flat.leaves, by=self)
            self._dirty.add(_held_here(rows, flat), flat.leaves)  # all leaves, including those that another rank writes
            save = Save(
                self._metadata_of(head, plan.size_bytes),
                num_bytes=plan.size_bytes,
                on_progress=on_progress,
                show=self._progress,
            )
            if self._take_turn(save):
                try:
                    self._copying_in = threading.get_ident()
                    future = self._hand_over(save, head, flat.structure, plan, leaves)
                    save.staged, save.stall_s = True, time.monotonic() - start_s
                    self._last = save
                    self._pacer.began(step, stall_s=save.stall_s)
                    self._finisher.submit(self._finish, save, future)
                except BaseException:
                    self._staging.forget()  # the saver does not know this snapshot
                    self._saving.release()
                    raise
                finally:
                    self._copying_in = None
        return save

    def _hand_over(
        self, save: Save, head: Head, structure: Any, plan: layout.Layout, leaves: Sequence[tree.Leaf]
    ) -> Future[Outcome]:
        """Copy the state and submit it to the saver."""
        self._saver.claim()
        with paused_collector():
            changed, why = self._stage(head.type, plan, leaves)
            job = Job(
                head=msgspec.structs.replace(head, why=why, staged_s=time.monotonic()),
                ranks=self._ranks,
                commits=self._commit is None or self._is_alone,
                header=plan.header,
                size_bytes=plan.size_bytes,
                tensors=tuple(_job_tensors(plan, leaves)),
                structure=structure,
                changed=changed,
                options=self._options,
            )
            return self._saver.submit(job, save.watch)

    def _own_leaves(self, flat: tree.Flat, replicated: Iterable[str], replicas: int | None) -> list[tree.Leaf]:
        """Return the leaves that this rank writes."""
        if self._ranks is None or not replicated:
            return flat.leaves
        mine = shards.replicated_share(flat.leaves, replicated, self._ranks.rank, replicas or self._ranks.size)
        return [leaf for leaf in flat.leaves if leaf.name in mine]

    def _stage(
        self, kind: CheckpointType, plan: layout.Layout, leaves: Sequence[tree.Leaf]
    ) -> tuple[jobs.PackedChanges | None, str]:
        """Copy the leaves; return what changed since the previous snapshot, or None and why it was not compared."""
        dirty = self._dirty.take()
        self._staging.reserve(plan.size_bytes + jobs.max_job_bytes(plan))
        if kind is CheckpointType.INCREMENTAL and self._staging.has_snapshot_like(plan):
            return jobs.PackedChanges.of(self._staging.update(plan, leaves, dirty)), ""
        had_snapshot = self._staging.has_snapshot
        self._staging.fill(plan, leaves)
        if kind is not CheckpointType.INCREMENTAL:
            return None, ""
        if had_snapshot:
            return None, "the last save had other tensors, so there was nothing to compare with"
        return None, "it is the first save since the start, so there was nothing to compare with"

    def maybe_save(self, state: Any, *, step: int, **save_arguments: Any) -> Save | None:
        """Save if the strategy decides to. `state` may be a function that returns the state; it is called only then."""
        if not self.should_save(step):
            return None
        return self.save(state() if callable(state) else state, step=step, **save_arguments)

    def should_save(self, step: int) -> Decision:
        """Return whether the strategy saves after `step`, and why. True in an `if` when it does."""
        return self._pacer.should_save(arguments.count(step, "step"))

    def resumed(self, step: int) -> None:
        """Note that training continues after `step`, which was not saved: the strategy counts from it."""
        self._pacer.restored(arguments.count(step, "step"))

    def prepare(self, state: Any) -> None:
        """Allocate the memory for a save of this state, so that the first save stalls no longer than later ones."""
        self._require_open()
        plan = layout.plan(tree.flatten(state).leaves, {})
        with self._saving:
            self._saver.claim()
            self._staging.reserve(plan.size_bytes + layout.ALIGNMENT + jobs.max_job_bytes(plan))
            self._saver.prepare()

    def wait(self) -> None:
        """Wait until no save is in progress.

        Raises:
            CheckpointError, StorageError: A save failed whose handle was not waited for.
        """
        self._home.require("this CheckpointManager")
        if not self._closed:
            self._finisher.submit(lambda: None).result()  # the pool has one thread, whose waits have deadlines
        failed, self._failed = self._failed, None
        if failed is not None and failed.error is not None and not failed.was_reported:
            raise failed.error

    def regroup(self, size: int) -> None:
        """Save with another number of ranks from now on; the rank of this process stays. Call it between the same two
        saves on all ranks, while none is in progress.

        Raises:
            ConfigError: This rank would not be among them, or it saves alone.
        """
        if self._ranks is None or self._ranks.size == 1:
            raise ConfigError(f"size={size}: a process that saves alone has no group to change", field="size")
        if size <= self._ranks.rank:
            raise ConfigError(
                f"size={size} leaves out this rank, {self._ranks.rank}; close the manager of a rank that leaves",
                field="size",
            )
        self._ranks = msgspec.structs.replace(self._ranks, size=size)

    @property
    def _is_alone(self) -> bool:
        return self._ranks is None or self._ranks.size == 1

    @property
    def _rank(self) -> int:
        return self._ranks.rank if self._ranks is not None else 0

    def _next_id(self, step: int) -> str:
        """Return the id of the next save, before anything can fail: all ranks must count alike."""
        if self._ranks is None:
            return new_id(step)
        self._saves_of_step[step] += 1
        return checkpoint_id(self._ranks, self._saves_of_step[step], step)

    def _reporting_failure(self, id: str) -> AbstractContextManager[None]:
        """Report a failure to the other ranks, so that they do not wait for this one."""
        return (
            commit.reporting_early_failure(self._store, self._ranks, id) if self._ranks is not None else nullcontext()
        )

    def _metadata_of(self, head: Head, num_bytes: int) -> CheckpointMetadata:
        """Return what is known before anything is written."""
        return CheckpointMetadata(
            id=head.id,
            step=head.step,
            epoch=head.epoch,
            path=f"{self._store.url.rstrip('/')}/{head.id}",
            size_bytes=num_bytes,
            checkpoint_type=head.type,
            metadata=head.metadata,
            created_at_s=head.created_at_s,
            full_bytes=num_bytes,
            num_ranks=self._ranks.size if self._ranks is not None else 1,
        )

    def _take_turn(self, save: Save) -> bool:
        """Wait for the staging memory; return False if the save is skipped."""
        if self._copying_in == threading.get_ident():
            raise CheckpointBusy(
                "save() was called inside save() of the same thread, perhaps by a signal handler; set a flag in the "
                "handler and save after the step"
            )
        if self._saving.acquire(blocking=self._when_busy == "wait"):
            if self._closed:
                self._saving.release()
                self._require_open()
            return True
        current = self._last.id if self._last is not None else "another"
        if self._when_busy == "raise":
            raise CheckpointBusy(f"checkpoint {current} is still being written; wait for it, or use when_busy='skip'")
        save.skipped(f"{current} is still being written")
        return False

    def _finish(self, save: Save, future: Future[Outcome]) -> None:
        """Complete a save in the background: wait, commit, apply retention."""
        staged_s = time.perf_counter()
        try:
            try:
                metadata = self._outcome(save, future)
            finally:
                self._saving.release()
                self._pacer.ended(save.step, write_s=time.perf_counter() - staged_s)
            self._catalog.note(metadata)
            save.succeeded(metadata)
        except BaseException as error:  # noqa: BLE001 - a thread boundary: the handle carries it
            self._failed = save
            level = logging.INFO if save.watch.is_cancelled else logging.ERROR
            log.log(level, "saving checkpoint %s failed: %s", save.path, error)
            save.failed(error)
            if not save.watch.is_cancelled:
                self._trace(save.metadata, str(error) or type(error).__name__)
            return
        self._trace(metadata)
        if self._rank == 0:
            self._clean_up(metadata.id)

    def _trace(self, found: CheckpointMetadata, error: str = "") -> None:
        if self._rank == 0:
            tracing.export(trace_of(found, ended_s=self._clock.wall_s(), error=error))

    def _outcome(self, save: Save, future: Future[Outcome]) -> CheckpointMetadata:
        try:
            outcome = self._result(save, future)
        except CheckpointAborted as error:
            if not executor.is_committed(self._store, save.id):
                commit.report_lost_saver(self._store, self._ranks or Ranks(), save.id, error)
                raise
            return of_manifest(self._catalog.read(save.id), self._store.url)  # the saver died after the commit
        if outcome.metadata is None:
            return self._commit_together(outcome, save.watch)
        if self._commit is not None:
            commit.notify(self._commit, outcome.metadata)
        return outcome.metadata

    def _result(self, save: Save, future: Future[Outcome]) -> Outcome:
        """Wait while the saver makes progress, or may be waiting for other ranks."""
        timeout_s = STALL_S
        if self._ranks is not None:  # for their parts, and then for rank 0 to commit
            timeout_s += 3 * self._ranks.timeout_s
        num_done = -1
        while not future.done():
            if save.num_written() == num_done:
                self._saver.interrupt(f"checkpoint {save.id}: the saver has written nothing for {timeout_s:g} s")
            num_done = save.num_written()
            wait_for([future], timeout_s)
        return future.result()

    def _commit_together(self, outcome: Outcome, watch: Watch) -> CheckpointMetadata:
        """Commit with the coordinator, which knows at once when a rank dies."""
        assert outcome.part is not None
        ranks = self._ranks or Ranks()
        try:
            manifest = commit.finish(
                self._store, ranks, outcome.part, outcome.head, commit=self._commit, clock=self._clock, watch=watch
            )
        except BaseException:
            executor.clean_up(self._store, ranks, outcome.head.id)
            raise
        return of_manifest(manifest, self._store.url)

    # -- listing ---------------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The directory or URL."""
        return self._store.url

    def list(self) -> Sequence[CheckpointMetadata]:
        """Return all committed checkpoints, oldest first."""
        return self._catalog.summaries()

    def get(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """Return the checkpoint with this step or id, or the newest one.

        Raises:
            NoCheckpoint: No such checkpoint exists.
        """
        return of_manifest(self._find(step, id), self._store.url)

    def _find(self, step: int | None, id: str | None) -> Manifest:
        step, id = arguments.which(step, id)
        return self._catalog.find(step=step, id=id)

    def latest(self) -> CheckpointMetadata | None:
        """Return the newest checkpoint, or None."""
        found = self._catalog.summaries()
        return found[-1] if found else None

    @property
    def schedule(self) -> str:
        """A description of when `maybe_save` saves and which checkpoints are kept."""
        return f"{policy.in_words(self._pacer.strategy)}; {retention.in_words(self._policies)}"

    @property
    def problems(self) -> dict[str, str]:
        """The checkpoints that the last listing ignored: id → why."""
        return dict(self._catalog.problems)

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(
        self,
        *,
        step: int | None = None,
        id: str | None = None,
        only: Iterable[str] | None = None,
        slices: Slices | None = None,
        map_location: Any = None,
        mmap: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Return the state as it was saved.

        Without `step` or `id`, load the newest checkpoint that can be trusted: a corrupt one is put into quarantine,
        and the one before it is tried. With several ranks, all must call it then, and load the same checkpoint.

        Args:
            only: Patterns of tensor names (`["model.*"]`); nothing else is read.
            slices: Parts of some tensors: name → (start, shape). Only what they cover is read.
            mmap: Map files of a local directory instead of reading them: pages are read when they are touched, and are
                not verified. Tensors that cannot be mapped are read.

        Raises:
            NoCheckpoint: No such checkpoint exists.
            CheckpointInvalid: The requested checkpoint cannot be trusted; the message names the file and the tensor.
        """

        device = loading.device_of(map_location)

        def use(manifest: Manifest) -> Any:
            structure = loading.structure_for(manifest, self._rank, only)
            with self._watching(manifest, structure, slices, on_progress) as watch:
                return loading.load(
                    self._store,
                    manifest,
                    structure,
                    slices=slices,
                    map_location=device,
                    mmap=mmap,
                    headers=loading.own_files(manifest, self._rank) if only is None and not slices else (),
                    watch=watch,
                )

        return self._trusted(step, id, use)

    def _watching(
        self, manifest: Manifest, structure: Any, slices: Slices | None, on_progress: OnProgress | None = None
    ) -> AbstractContextManager[Watch]:
        num_bytes = loading.num_bytes_of(manifest, structure, slices)
        return watching(f"loading {manifest.id}", num_bytes, on_progress=on_progress, show=self._progress)

    def _trusted(self, step: int | None, id: str | None, use: Callable[[Manifest], T]) -> T:
        """Return the result of `use` for the requested checkpoint, or for the newest one that can be trusted."""
        if step is not None or id is not None:
            return use(self._find(step, id))
        rejected: dict[str, str] = {}

        def use_or_reject(manifest: Manifest) -> T:
            try:
                return use(manifest)
            except CheckpointInvalid as error:
                if not executor.is_committed(self._store, manifest.id) and len(rejected) < MAX_DELETED:
                    self._catalog.forget(manifest.id)  # retention deleted it, so there is a newer one
                else:
                    log.warning("checkpoint %s cannot be trusted, trying the one before it: %s", manifest.id, error)
                    self._catalog.quarantine(manifest.id, str(error))
                rejected[manifest.id] = str(error)
                raise

        if self._ranks is not None and self._ranks.size > 1:
            self._num_loads += 1
            choice = Choice(self._store, self._ranks, self._num_loads)
            return choice.load(
                lambda others: self._catalog.newest_except({*rejected, *others}),
                lambda chosen: self._catalog.find(id=chosen),
                use_or_reject,
            )
        while (manifest := self._catalog.newest_except(rejected)) is not None:
            with suppress(CheckpointInvalid):
                return use_or_reject(manifest)
        reasons = "; ".join([f"{id}: {why}" for id, why in {**self._catalog.problems, **rejected}.items()][:5])
        raise NoCheckpoint(f"{self._store.url} has no checkpoint" + (f" ({reasons})" if reasons else ""))

    def restore(
        self,
        into: Mapping[str, Any],
        *,
        step: int | None = None,
        id: str | None = None,
        strict: bool = True,
        saved_by: Callable[[CheckpointMetadata], Sequence[int]] | None = None,
    ) -> CheckpointMetadata:
        """Load the entries of a saved dict into modules, optimizers and other objects with `load_state_dict`.

        Return the metadata of the checkpoint, such as its step and epoch. With several ranks, all must call it.

        Args:
            saved_by: Returns the ranks whose states to load, by default this one's. If several have an entry, its
                target receives one after the other.

        Raises:
            NoCheckpoint: No such checkpoint exists.
            InvalidArgument: `strict` is set, and the checkpoint lacks an entry.
        """
        arguments.check_targets(into)
        targets = loading.SplitTargets(into)

        def load(manifest: Manifest, rank: int) -> Any:
            structure = loading.parts_for(manifest, rank, into)
            slices = loading.slices_held(manifest, structure, targets.within(manifest))
            with self._watching(manifest, structure, slices) as watch:
                return loading.load(self._store, manifest, structure, slices=slices, watch=watch)

        def use(manifest: Manifest) -> tuple[Manifest, list[Any]]:
            ranks = [self._rank] if saved_by is None else saved_by(of_manifest(manifest, self._store.url))
            return manifest, [load(manifest, rank) for rank in ranks]

        manifest, states = self._trusted(step, id, use)
        missing = [key for key in into if not any(key in state for state in states)]
        if missing and (strict or len(missing) == len(into)):
            cure = "; pass strict=False to restore the others" if len(missing) < len(into) else ""
            raise InvalidArgument(
                f"checkpoint {manifest.id} has no entry {', '.join(map(repr, missing))}{cure}", field="into"
            )
        places = targets.within(manifest)
        for key, target in into.items():
            for state in states:
                if key in state:
                    loading.load_into(target, state[key], path=key, strict=strict, places=places)
        self._staging.forget()  # rows reported from now on are not all that differs from the last save
        self._pacer.restored(manifest.step)
        return of_manifest(manifest, self._store.url)

    # -- verifying and deleting ------------------------------------------------------------------------------------

    def verify(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """Read every byte of a checkpoint and compare it with its hash.

        Raises:
            CheckpointInvalid: The checkpoint cannot be trusted; the message names the file and the tensor.
        """
        manifest = self._find(step, id)
        with watching(f"verifying {manifest.id}", manifest.size_bytes, show=self._progress) as watch:
            integrity.verify(self._store, manifest, watch=watch)
        return of_manifest(manifest, self._store.url)

    def delete(self, *, step: int | None = None, id: str | None = None) -> None:
        """Delete a checkpoint.

        Raises:
            NoCheckpoint: No such checkpoint exists.
            InvalidArgument: Another checkpoint needs it, it is a symbolic link, or neither step nor id is given.
        """
        if step is None and id is None:
            raise InvalidArgument("delete() needs a checkpoint; pass step= or id=", field="step")
        step, id = arguments.which(step, id)
        files = inspect.removable(self._store, self._catalog, step=step, id=id)
        inspect.remove(self._store, self._catalog, files)

    def compact(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """Replace an incremental checkpoint by a full one, so that it no longer needs its bases.

        A full checkpoint is left as it is.

        Raises:
            NoCheckpoint: No such checkpoint exists.
            CheckpointInvalid: It cannot be trusted; it is left as it is.
            InvalidArgument: Other checkpoints need it; compact these first.
        """
        manifest = self._find(step, id)
        if not manifest.bases:
            return of_manifest(manifest, self._store.url)
        inspect.removable(self._store, self._catalog, id=manifest.id)
        with watching(f"compacting {manifest.id}", manifest.size_bytes, show=self._progress) as watch:
            whole = of_manifest(compaction.compact(self._store, manifest, watch=watch), self._store.url)
        self._catalog.note(whole)
        inspect.remove(self._store, self._catalog, inspect.removable(self._store, self._catalog, id=manifest.id))
        return whole

    def _clean_up(self, just_saved: str) -> None:
        """Apply retention and delete leftovers of dead writers, after a commit and never before."""
        try:
            self._remove_old(just_saved)
            now_s = inspect.files_of(
                self._store, just_saved
            ).modified_at_s  # by the store's clock, like all other times
            for files in inspect.leftovers(self._store):
                if files.is_abandoned(now_s=now_s) and inspect.collect(self._store, files):
                    log.info("deleted the leftovers of %s, which had not changed for an hour", files.id)
            inspect.sweep(self._store)
        except (StrataError, OSError) as error:
            log.warning("could not delete old checkpoints; the next save tries again: %s", error)
        except Exception:  # in a policy of the user
            log.exception("could not delete old checkpoints; the next save tries again")

    def _remove_old(self, just_saved: str) -> None:
        """Delete one checkpoint at a time, after a new listing: another manager may have saved one that needs it."""
        while True:
            checkpoints = self.list()
            if all(one.id != just_saved for one in checkpoints):
                return  # deleted or replaced meanwhile
            links = links_in(self._store)  # not ours to remove
            wanted = retention.removals(checkpoints, self._policies, just_saved=just_saved)
            removals = [one for one in wanted if one.id not in links]
            if not removals:
                return
            log.info("deleting checkpoint %s: %s", removals[0].id, removals[0].reason)
            inspect.remove(self._store, self._catalog, inspect.files_of(self._store, removals[0].id))

    # -- closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save in progress and end the saver. Loading remains possible.

        Raises:
            CheckpointError, StorageError: A save failed whose handle was not waited for.
        """
        if self._closed or not self._home.is_here:
            return
        with self._saving:
            self._closed = True
        self._finisher.shutdown()
        try:
            self.wait()
        finally:
            self._saver.close()
            self._staging.close()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StrataError:
            if error is None:  # otherwise `error` matters more
                raise

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the CheckpointManager is closed; create a new one")
        self._home.require("this CheckpointManager")


def _wait_at_exit(reference: weakref.ref[CheckpointManager]) -> None:
    """Wait for the staged snapshot before the process exits, if the manager was not closed."""
    manager = reference()
    if manager is None:
        return
    last = manager._last
    if last is not None and not last.until_ended(EXIT_WARNING_AFTER_S):
        log.warning(
            "waiting for checkpoint %s (%.0f%% written) before this process exits; press Ctrl-C to exit now",
            last.path,
            last.progress * 100,
        )
    try:
        manager.wait()
    except StrataError as error:
        log.error("saving a checkpoint failed: %s", error)  # noqa: TRY400 - a traceback would not help


def _let_go(saver: Saver, withdraw: Callable[[], None]) -> None:
    withdraw()
    saver.let_go()


def _held_here(dirty: Mapping[str, Any] | None, flat: tree.Flat) -> Mapping[str, Any] | None:
    """Drop empty entries of tensors that only other ranks hold."""
    empty = [name for name, rows in (dirty or {}).items() if hasattr(rows, "__len__") and len(rows) == 0]
    if dirty is None or not empty:
        return dirty
    held = {leaf.tensor for leaf in flat.leaves}
    elsewhere = [name for name in tree.names_in(flat.structure) if name not in held]
    dropped = {name for name in empty if any(other == name or other.endswith(f".{name}") for other in elsewhere)}
    return {name: rows for name, rows in dirty.items() if name not in dropped}


def _job_tensors(plan: layout.Layout, leaves: Sequence[tree.Leaf]) -> Iterator[JobTensor]:
    by_name = {leaf.name: leaf for leaf in leaves}
    for place in plan.places:
        leaf = by_name[place.name]
        sharded = leaf.global_shape is not None
        yield JobTensor(
            place.name,
            place.dtype.name,
            place.shape,
            place.offset,
            place.num_bytes,
            leaf.tensor,
            leaf.global_shape if leaf.global_shape is not None else place.shape,
            leaf.start if leaf.start is not None else (0,) * len(place.shape),
            sharded,
        )
