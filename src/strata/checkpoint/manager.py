"""`CheckpointManager`: saving in the background, loading what can be trusted, keeping what is wanted."""

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
from strata.checkpoint.saver import executor as executing
from strata.checkpoint.tools import compact as compacting
from strata.checkpoint.tools import inspect
from strata.checkpoint.tools.progress import watching
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
MAX_GONE = 100
"""So many times a load begins anew because what it was reading has been removed."""
STALL_S = 900.0
"""A saver that has written no byte for this long hangs: on a disk or a network that does not answer."""
TELL_AFTER_S = 5.0
"""A process that is kept from ending for longer says why."""
WhenBusy = Literal["wait", "skip", "raise"]
OnProgress = Callable[["Progress"], None]


class CheckpointManager:
    """Saves and loads checkpoints in one place.

    `save` copies the state and returns; the rest happens in a process of its own, which finishes its work even if this
    one is killed. Calls may come from several threads; one save is under way at a time.
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
        """`storage_path` is a directory or a URL (`s3://bucket/prefix`); or `bucket` with `storage_type` names it.

        Args:
            strategy: When `should_save` and `maybe_save` find that it is time.
            when_busy: What `save` does while the last one is still being written: wait for it, skip this one (the
                handle says so), or raise `CheckpointBusy`.
            compression: Stores tensors that shrink by it as zstd frames.
            incremental_depth: How many deltas may lie upon each other; 1: each is taken from the last full checkpoint.
            rebase_at: A delta that would hold more than this share of the state is saved in full.
            xor: Half-precision tensors that have changed all over go into a delta as their compressed difference.
            saver: Who writes; by default a process, where there can be one.
            ranks: Which of how many this is, if several save together; see `Ranks`.
            commit: Who knows when all ranks have written, if a coordinator does.
            progress: A bar for long waits: always on a terminal, never, or (None) unless somebody listens.

        Raises:
            ConfigError: The place or a policy makes no sense.
        """
        arguments.check_choices(
            when_busy=when_busy, compression=compression, saver=saver, depth=incremental_depth, rebase_at=rebase_at
        )
        if ranks is not None and ranks.size > 1 and when_busy == "skip":
            raise ConfigError("several ranks save together, so none may skip; use when_busy='wait'", field="when_busy")
        place = None if store is not None else arguments.place(storage_path, bucket, storage_type)
        self._store = store or open_store(place or "", storage_options)
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
        self._saver = arguments.choose_saver(saver, self._store, place, storage_options)
        self._staging = Staging(self._saver.memory)
        self._dirty = dirty_rows.DirtyRows()
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="strata-checkpoint")
        self._saving = renewed(threading.Lock())
        """Held from the beginning of the copy until the staging memory is free again."""
        self._copying_in: int | None = None
        """The thread that copies at this moment."""
        self._saves_of_step: Counter[int] = Counter()
        """How many have been asked for: with several ranks, this makes their names."""
        self._num_loads = 0
        """Likewise, of loads that have to agree."""
        self._last: Save | None = None
        self._failed: Save | None = None
        """A save that failed and that nobody has heard of yet."""
        self._closed = False
        self._home = Home()
        withdraw = at_exit(functools.partial(_wait_at_exit, weakref.ref(self)))
        # A saver must not stay for who forgot to close. At exit it ends with the process.
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
        on_progress: OnProgress | None = None,
    ) -> Save:
        """Copies `state` and returns; `.wait()` on what is returned waits until it is durable.

        Args:
            dirty: For an incremental save: the rows of some tensors that have changed since the last `save`. They are
                believed; all other tensors are compared.
            replicated: With several ranks: patterns of tensors that are the same everywhere, so that each is written
                by one rank only.

        Raises:
            InvalidArgument: Something in the state cannot be stored; nothing was written.
            CheckpointBusy: Another save is under way, and `when_busy="raise"`.
        """
        start_s = time.perf_counter()
        self._require_open()
        id = self._next_id(arguments.count(step, "step"))
        with self._telling(id):
            kind = arguments.kind_of(checkpoint_type)
            head = Head(
                id=id,
                step=arguments.count(step, "step"),
                epoch=arguments.count(epoch, "epoch"),
                type=kind,
                created_at_s=self._clock.wall_s(),
                metadata=arguments.checked_metadata(metadata),
                data_cursor=arguments.text(data_cursor, "data_cursor"),
            )
            with paused_collector():
                flat = tree.flatten(arguments.part_of_kind(state, kind))
                leaves = self._own_leaves(flat, replicated)
                plan = layout.plan(leaves, {"strata": str(m.VERSION), "id": id, "rank": str(self._rank)})
            told = dirty_rows.resolve_dirty(dirty, flat.leaves, by=self)
            self._dirty.add(_held_here(told, flat), flat.leaves)  # all leaves: also those that another rank writes
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
                    save.staged, save.stall_s = True, time.perf_counter() - start_s
                    self._last = save
                    self._pacer.began(step, stall_s=save.stall_s)
                    self._finisher.submit(self._finish, save, future)
                except BaseException:
                    self._staging.forget()  # what was copied nobody has been told of
                    self._saving.release()
                    raise
                finally:
                    self._copying_in = None
        return save

    def _hand_over(
        self, save: Save, head: Head, structure: Any, plan: layout.Layout, leaves: Sequence[tree.Leaf]
    ) -> Future[Outcome]:
        """Copies the state; from then on it is the saver's."""
        self._saver.claim()
        with paused_collector():
            changed, why = self._stage(head.type, plan, leaves)
            job = Job(
                head=jobs.with_reason(head, why),
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

    def _own_leaves(self, flat: tree.Flat, replicated: Iterable[str]) -> list[tree.Leaf]:
        """What this rank writes of the state."""
        if self._ranks is None or not replicated:
            return flat.leaves
        mine = shards.replicated_share(flat.leaves, replicated, self._ranks.rank, self._ranks.size)
        return [leaf for leaf in flat.leaves if leaf.name in mine]

    def _stage(
        self, kind: CheckpointType, plan: layout.Layout, leaves: Sequence[tree.Leaf]
    ) -> tuple[dict[str, bytes] | None, str]:
        """What has changed since the snapshot before, if it was compared; or why it was not."""
        told = self._dirty.take()
        self._staging.reserve(plan.size_bytes + jobs.max_job_bytes(plan))
        if kind is CheckpointType.INCREMENTAL and self._staging.has_snapshot_like(plan):
            return jobs.packed_bits(self._staging.update(plan, leaves, told)), ""
        had_snapshot = self._staging.has_snapshot
        self._staging.fill(plan, leaves)
        if kind is not CheckpointType.INCREMENTAL:
            return None, ""
        if had_snapshot:
            return None, "the last save was of other tensors, so there was nothing to compare with"
        return None, "it is the first save since the start, so there was nothing to compare with"

    def maybe_save(self, state: Any, *, step: int, **save_arguments: Any) -> Save | None:
        """Saves if the strategy finds that it is time. `state` may be a function that makes it: called only then."""
        if not self.should_save(step):
            return None
        return self.save(state() if callable(state) else state, step=step, **save_arguments)

    def should_save(self, step: int) -> Decision:
        """Whether it is time, and why. True in an `if` when it is."""
        return self._pacer.should_save(arguments.count(step, "step"))

    def prepare(self, state: Any) -> None:
        """Makes the memory ready that a save of such a state needs: the first one then stalls no longer than others."""
        self._require_open()
        plan = layout.plan(tree.flatten(state).leaves, {})
        with self._saving:
            self._saver.claim()
            self._staging.reserve(plan.size_bytes + layout.ALIGNMENT + jobs.max_job_bytes(plan))
            self._saver.prepare()

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError, StorageError: Why one has failed that nobody waited for.
        """
        self._home.require("this CheckpointManager")
        if not self._closed:
            self._finisher.submit(lambda: None).result()  # it has one thread, whose waits have deadlines
        failed, self._failed = self._failed, None
        if failed is not None and failed.error is not None and not failed.was_heard:
            raise failed.error

    @property
    def _is_alone(self) -> bool:
        return self._ranks is None or self._ranks.size == 1

    @property
    def _rank(self) -> int:
        return self._ranks.rank if self._ranks is not None else 0

    def _next_id(self, step: int) -> str:
        """Before anything can fail: all ranks must count the same."""
        if self._ranks is None:
            return new_id(step)
        self._saves_of_step[step] += 1
        return checkpoint_id(self._ranks, self._saves_of_step[step], step)

    def _telling(self, id: str) -> AbstractContextManager[None]:
        """Whatever fails is told to the other ranks, so that they need not wait for this one."""
        return commit.beginning(self._store, self._ranks, id) if self._ranks is not None else nullcontext()

    def _metadata_of(self, head: Head, num_bytes: int) -> CheckpointMetadata:
        """As far as it is known before anything is written."""
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
        if self._copying_in == threading.get_ident():
            raise CheckpointBusy(
                "save() was called while this very thread is in save(), by a signal's handler perhaps; let the handler "
                "set a flag, and save after the step"
            )
        if self._saving.acquire(blocking=self._when_busy == "wait"):
            if self._closed:
                self._saving.release()
                self._require_open()
            return True
        under_way = self._last.id if self._last is not None else "another"
        if self._when_busy == "raise":
            raise CheckpointBusy(f"checkpoint {under_way} is still being written; wait for it, or use when_busy='skip'")
        save.skipped(f"{under_way} is still being written")
        return False

    def _finish(self, save: Save, future: Future[Outcome]) -> None:
        staged_s = time.perf_counter()
        try:
            try:
                metadata = self._outcome(save, future)
            finally:
                self._saving.release()
                self._pacer.ended(save.step, write_s=time.perf_counter() - staged_s)
            self._catalog.note(metadata)
            save.succeeded(metadata)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: whoever waits hears it
            self._failed = save
            level = logging.INFO if save.watch.is_cancelled else logging.ERROR
            log.log(level, "checkpoint %s was not saved: %s", save.path, error)
            save.failed(error)
            return
        if self._rank == 0:
            self._tidy(metadata.id)

    def _outcome(self, save: Save, future: Future[Outcome]) -> CheckpointMetadata:
        try:
            outcome = self._result(save, future)
        except CheckpointAborted as error:
            if not executing.is_committed(self._store, save.id):
                commit.lost_saver(self._store, self._ranks or Ranks(), save.id, error)
                raise
            return of_manifest(self._catalog.read(save.id), self._store.url)  # the saver died when all was done
        if outcome.metadata is None:
            return self._commit_together(outcome, save.watch)
        if self._commit is not None:
            commit.tell(self._commit, outcome.metadata)
        return outcome.metadata

    def _result(self, save: Save, future: Future[Outcome]) -> Outcome:
        """Waits for as long as the saver writes, or may be waiting for the other ranks."""
        patience_s = STALL_S
        if self._ranks is not None:  # for their parts, and then for rank 0 to commit
            patience_s += 3 * self._ranks.timeout_s
        num_done = -1
        while not future.done():
            if save.num_written() == num_done:
                self._saver.give_up(f"checkpoint {save.id}: the saver has written nothing for {patience_s:g} s")
            num_done = save.num_written()
            wait_for([future], patience_s)
        return future.result()

    def _commit_together(self, outcome: Outcome, watch: Watch) -> CheckpointMetadata:
        """With a coordinator: it knows at once when a rank is not going to come."""
        assert outcome.part is not None
        ranks = self._ranks or Ranks()
        try:
            manifest = commit.finish(
                self._store, ranks, outcome.part, outcome.head, commit=self._commit, clock=self._clock, watch=watch
            )
        except BaseException:
            executing.give_up(self._store, ranks, outcome.head.id)
            raise
        return of_manifest(manifest, self._store.url)

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The directory or URL."""
        return self._store.url

    def list(self) -> Sequence[CheckpointMetadata]:
        """All that are committed, oldest first."""
        return self._catalog.summaries()

    def get(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """
        Raises:
            NoCheckpoint: There is none such.
        """
        return of_manifest(self._find(step, id), self._store.url)

    def _find(self, step: int | None, id: str | None) -> Manifest:
        step, id = arguments.which(step, id)
        return self._catalog.find(step=step, id=id)

    def latest(self) -> CheckpointMetadata | None:
        found = self._catalog.summaries()
        return found[-1] if found else None

    @property
    def schedule(self) -> str:
        """When `maybe_save` saves and what stays, in words."""
        return f"{policy.in_words(self._pacer.strategy)}; {retention.in_words(self._policies)}"

    @property
    def problems(self) -> dict[str, str]:
        """What the last look passed over: id → why."""
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
        """The state as it was saved. Without `step` or `id`, of the newest checkpoint that can be trusted: one that
        cannot is put into quarantine, and the one before it is tried. With several ranks, all must call it then: they
        load the same one.

        Args:
            only: Patterns of tensor names (`["model.*"]`); nothing else is read.
            slices: Of some tensors a part: name → (start, shape). Only what meets it is read.
            mmap: Maps files of a local directory instead of reading them: pages come when they are touched, and are
                not verified. What cannot be mapped is read.

        Raises:
            NoCheckpoint: There is none.
            CheckpointInvalid: The one that was named cannot be trusted; the message names file and tensor.
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
        """Of the one that is named; else of the newest of which `use` finds nothing wrong."""
        if step is not None or id is not None:
            return use(self._find(step, id))
        refused: dict[str, str] = {}

        def unless_refused(manifest: Manifest) -> T:
            try:
                return use(manifest)
            except CheckpointInvalid as error:
                if not executing.is_committed(self._store, manifest.id) and len(refused) < MAX_GONE:
                    self._catalog.forget(manifest.id)  # somebody's retention was at work, so there is a newer one
                else:
                    log.warning("checkpoint %s cannot be trusted, the one before it is tried: %s", manifest.id, error)
                    self._catalog.quarantine(manifest.id, str(error))
                refused[manifest.id] = str(error)
                raise

        if self._ranks is not None and self._ranks.size > 1:
            self._num_loads += 1
            choice = Choice(self._store, self._ranks, self._num_loads)
            return choice.load(
                lambda others: self._catalog.newest_but({*refused, *others}),
                lambda chosen: self._catalog.find(id=chosen),
                unless_refused,
            )
        while (manifest := self._catalog.newest_but(refused)) is not None:
            with suppress(CheckpointInvalid):
                return unless_refused(manifest)
        reasons = "; ".join([f"{id}: {why}" for id, why in {**self._catalog.problems, **refused}.items()][:5])
        raise NoCheckpoint(f"there is no checkpoint in {self._store.url}" + (f" ({reasons})" if reasons else ""))

    def restore(
        self, into: Mapping[str, Any], *, step: int | None = None, id: str | None = None, strict: bool = True
    ) -> CheckpointMetadata:
        """Loads the parts of a saved dict into modules, optimizers and whatever else has `load_state_dict`.

        Gives what is known of the checkpoint: its step, its epoch, its metadata. With several ranks, all must call it.

        Raises:
            NoCheckpoint: There is none.
            InvalidArgument: `strict`, and the checkpoint has no such part.
        """
        arguments.check_targets(into)
        held = loading.Places(into)

        def use(manifest: Manifest) -> tuple[Manifest, Any]:
            structure = loading.parts_for(manifest, self._rank, into)
            slices = loading.slices_held(manifest, structure, held.within(manifest))
            with self._watching(manifest, structure, slices) as watch:
                return manifest, loading.load(self._store, manifest, structure, slices=slices, watch=watch)

        manifest, state = self._trusted(step, id, use)
        missing = [key for key in into if key not in state]
        if missing and (strict or len(missing) == len(into)):
            cure = "; strict=False restores the others" if len(missing) < len(into) else ""
            raise InvalidArgument(
                f"checkpoint {manifest.id} has no part {', '.join(map(repr, missing))}{cure}", field="into"
            )
        places = held.within(manifest)
        for key, target in into.items():
            if key not in missing:
                loading.load_into(target, state[key], path=key, strict=strict, places=places)
        self._staging.forget()  # rows that are told from now on are not all that differ from the last save
        self._pacer.restored(manifest.step)
        return of_manifest(manifest, self._store.url)

    # -- checking and removing -------------------------------------------------------------------------------------

    def verify(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """Reads every byte of a checkpoint and compares it with its hash.

        Raises:
            CheckpointInvalid: Something differs; the message says what.
        """
        manifest = self._find(step, id)
        with watching(f"verifying {manifest.id}", manifest.size_bytes, show=self._progress) as watch:
            integrity.verify(self._store, manifest, watch=watch)
        return of_manifest(manifest, self._store.url)

    def delete(self, *, step: int | None = None, id: str | None = None) -> None:
        """
        Raises:
            NoCheckpoint: There is none such.
            InvalidArgument: Another checkpoint refers to it, it is a symbolic link, or none is named.
        """
        if step is None and id is None:
            raise InvalidArgument("delete() removes nothing that is not named; say step= or id=", field="step")
        step, id = arguments.which(step, id)
        files = inspect.removable(self._store, self._catalog, step=step, id=id)
        inspect.remove(self._store, self._catalog, files)

    def compact(self, *, step: int | None = None, id: str | None = None) -> CheckpointMetadata:
        """Writes an incremental checkpoint anew, in full, and removes it: its bases are needed no longer. A full one
        stays as it is.

        Raises:
            NoCheckpoint: There is none such.
            CheckpointInvalid: It cannot be trusted; it stays as it is.
            InvalidArgument: Others refer to it; compact these first.
        """
        manifest = self._find(step, id)
        if not manifest.bases:
            return of_manifest(manifest, self._store.url)
        inspect.removable(self._store, self._catalog, id=manifest.id)
        with watching(f"compacting {manifest.id}", manifest.size_bytes, show=self._progress) as watch:
            whole = of_manifest(compacting.compact(self._store, manifest, watch=watch), self._store.url)
        self._catalog.note(whole)
        inspect.remove(self._store, self._catalog, inspect.removable(self._store, self._catalog, id=manifest.id))
        return whole

    def _tidy(self, just_saved: str) -> None:
        """After a commit, never before: what the policies let go, and what dead writers left."""
        try:
            self._remove_old(just_saved)
            now_s = inspect.files_of(self._store, just_saved).modified_at_s  # by the store's clock, as all else is
            for files in inspect.leftovers(self._store):
                if files.is_given_up(now_s=now_s) and inspect.collect(self._store, files):
                    log.info("the leftovers of %s are gone: nobody wrote into it for an hour", files.id)
            inspect.sweep(self._store)
        except (StrataError, OSError) as error:
            log.warning("old checkpoints could not be removed; the next save tries again: %s", error)
        except Exception:  # a policy of the user's
            log.exception("old checkpoints could not be removed; the next save tries again")

    def _remove_old(self, just_saved: str) -> None:
        """One at a time, each by a new look: another manager may just have saved what refers to it."""
        while True:
            there = self.list()
            if all(one.id != just_saved for one in there):
                return  # somebody has removed it, or puts something else in its place
            links = links_in(self._store)  # not ours to remove
            wanted = retention.removals(there, self._policies, just_saved=just_saved)
            removals = [one for one in wanted if one.id not in links]
            if not removals:
                return
            log.info("checkpoint %s goes: %s", removals[0].id, removals[0].reason)
            inspect.remove(self._store, self._catalog, inspect.files_of(self._store, removals[0].id))

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the save under way. Loading is still possible.

        Raises:
            CheckpointError, StorageError: Why a save has failed that nobody waited for.
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
            if error is None:  # else that one matters more
                raise

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the CheckpointManager is closed; make a new one")
        self._home.require("this CheckpointManager")


def _wait_at_exit(reference: weakref.ref[CheckpointManager]) -> None:
    """A program may end without closing: what it has staged is written first."""
    manager = reference()
    if manager is None:
        return
    last = manager._last
    if last is not None and not last.until_ended(TELL_AFTER_S):
        log.warning(
            "checkpoint %s is being written (%.0f%%), and this process ends after it; Ctrl-C ends it now",
            last.path,
            last.progress * 100,
        )
    try:
        manager.wait()
    except StrataError as error:
        log.error("a checkpoint was not saved: %s", error)  # noqa: TRY400 - whoever reads it knows where


def _let_go(saver: Saver, withdraw: Callable[[], None]) -> None:
    withdraw()
    saver.let_go()


def _held_here(told: Mapping[str, Any] | None, flat: tree.Flat) -> Mapping[str, Any] | None:
    """Without the tensors of which this rank has no rows to tell of: all of them are on other ranks."""
    none = [name for name, rows in (told or {}).items() if hasattr(rows, "__len__") and len(rows) == 0]
    if told is None or not none:
        return told
    held = {leaf.tensor for leaf in flat.leaves}
    elsewhere = [name for name in tree.names_in(flat.structure) if name not in held]
    gone = {name for name in none if any(other == name or other.endswith(f".{name}") for other in elsewhere)}
    return {name: rows for name, rows in told.items() if name not in gone}


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
