"""Commit a checkpoint: all ranks of it, or none.

The ranks communicate through the store, under an id that each computes on its own. Each rank puts these objects, only
if absent:

    claim-00003.json     rank 3 uses this id, which is new
    part-00003.json      the files of rank 3 are durable, and this is their content
    failed-00003.json    rank 3 will not finish

Rank 0 alone puts either `manifest.json` or `aborted.json`, never both. A rank that dies silently costs a timeout; with
a coordinator (`Commit`), its death is known at once. In either case the store decides.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from strata.checkpoint.catalog import of_manifest
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format import merge
from strata.checkpoint.format import part as parts
from strata.checkpoint.format.part import RankPart, part_name
from strata.clock import SystemClock
from strata.errors import (
    CheckpointAborted,
    CheckpointInvalid,
    InvalidArgument,
    ObjectExists,
    ObjectMissing,
    StorageError,
    StorageUnavailable,
    StrataError,
    TransferCancelled,
)
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from strata.checkpoint.catalog import CheckpointMetadata
    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.format.merge import Head
    from strata.checkpoint.group.ranks import Ranks
    from strata.clock import Clock
    from strata.storage import Store

log = logging.getLogger(__name__)

T = TypeVar("T")
ABORTED = "aborted.json"
MIN_PAUSE_S = 0.005
MAX_PAUSE_S = 1.0
PAUSE_PER_WAITED = 0.1
"""Each pause is a tenth of the time waited so far: long waits poll seldom and still notice a change early."""
GRACE = 0.25
"""Other ranks wait this share of the timeout longer than rank 0, which merges and commits in that time."""
NUM_AT_ONCE = 8
_MAX_REASON_BYTES = 1 << 16
_MAX_NAMED = 8


class BaseIsGone(CheckpointAborted):
    """The base of an incremental checkpoint was deleted while it was written; nothing was committed."""


class Commit(Protocol):
    """What a coordinator adds to a commit. Called in the thread or process that saves."""

    def all_written(self, id: str, *, step: int, rank: int, size: int, timeout_s: float) -> None:
        """Wait until the part of every rank is durable.

        Raises:
            CheckpointAborted: A rank will not finish; the message names it. All ranks get the same error.
            CoordinatorError: The coordinator cannot be reached; the store decides alone.
        """
        ...

    def committed(self, metadata: CheckpointMetadata) -> None:
        """Receive, on every rank, a checkpoint that is committed."""
        ...


# -- objects of the ranks ------------------------------------------------------------------------------------------


def claim(store: Store, ranks: Ranks, id: str) -> None:
    """Claim an id for this rank, before it writes anything.

    Raises:
        InvalidArgument: The id is in use: the session is not new.
    """
    try:
        store.put(f"{id}/{_claim_name(ranks.rank)}", b"{}\n", if_absent=True)
    except ObjectExists:
        raise _used_before(id, ranks.rank) from None
    if _exists(store, f"{id}/{m.FILE_NAME}"):
        store.delete([f"{id}/{_claim_name(ranks.rank)}"])
        raise _used_before(id, ranks.rank)


def put_part(store: Store, part: RankPart) -> None:
    """Put the part of this rank.

    Raises:
        InvalidArgument: The part exists: the session is not new.
    """
    try:
        store.put(f"{part.checkpoint}/{part_name(part.rank)}", parts.encode(part), if_absent=True)
    except ObjectExists:
        raise _used_before(part.checkpoint, part.rank) from None


def fail(store: Store, id: str, rank: int, reason: object) -> None:
    """Report that a rank failed, if the store still works, so that rank 0 does not wait for it."""
    _put_reason(store, f"{id}/{_failed_name(rank)}", rank, reason)


def abort(store: Store, id: str, reason: object) -> None:
    """Abort as rank 0, if the store still works. Never called once the manifest may have been put."""
    _put_reason(store, f"{id}/{ABORTED}", 0, reason)


@contextlib.contextmanager
def reporting_failure(store: Store, ranks: Ranks, id: str) -> Iterator[None]:
    """Report any failure to the other ranks, except an id in use, which belongs to another start."""
    try:
        with translating_cancel(id):
            yield
    except InvalidArgument:
        raise
    except BaseException as error:
        _report(store, ranks, id, error)
        raise


@contextlib.contextmanager
def translating_cancel(id: str) -> Iterator[None]:
    """Raise `CheckpointAborted` for a cancelled transfer: storage raises storage errors only."""
    try:
        yield
    except TransferCancelled as error:
        raise CheckpointAborted(f"checkpoint {id} was cancelled") from error


@contextlib.contextmanager
def reporting_early_failure(store: Store, ranks: Ranks, id: str) -> Iterator[None]:
    """Report any failure before the id is claimed, such as a state that cannot be stored.

    If the id cannot be claimed, it is in use, or the saver has claimed it and reports failures itself.
    """
    try:
        yield
    except BaseException as error:
        if ranks.size > 1:
            with contextlib.suppress(InvalidArgument, StorageError):
                claim(store, ranks, id)
                _report(store, ranks, id, error)
        raise


def report_lost_saver(store: Store, ranks: Ranks, id: str, error: BaseException) -> None:
    """Report that the saver of this rank died, so that the others do not wait for it.

    Once the part of rank 0 exists, its saver may have put the manifest, so nothing is reported.
    """
    with contextlib.suppress(StorageError):  # the others run into their timeout, and the caller raises `error`
        if not (ranks.is_leader and _exists(store, f"{id}/{part_name(0)}")):
            _report(store, ranks, id, error)


def _report(store: Store, ranks: Ranks, id: str, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}"
    if ranks.size == 1:
        return
    if ranks.is_leader:
        abort(store, id, f"rank 0 failed: {reason}")
    else:
        fail(store, id, ranks.rank, reason)


def discard(store: Store, ranks: Ranks, id: str) -> None:
    """Delete the files of this rank if rank 0 has aborted; otherwise the checkpoint may still be committed.

    The objects of the ranks stay until leftovers are collected: a slow rank may still read them.
    """
    try:
        if _exists(store, f"{id}/{ABORTED}"):
            own = f"{id}/rank-{ranks.rank:05d}"
            store.delete([listed.key for listed in store.walk(id) if listed.key.startswith(own)])
    except StorageError as error:
        log.warning("could not delete the leftovers of %s; a later save will: %s", id, error)


def _put_reason(store: Store, key: str, rank: int, reason: object) -> None:
    data = msgspec.json.encode({"rank": rank, "reason": str(reason)[:4_000]})
    try:
        store.put(key, data, if_absent=True)
    except ObjectExists:
        pass
    except StorageError as error:
        log.warning("could not put %s, so the other ranks wait for their timeout: %s", key, error)


def _reason(store: Store, key: str) -> str:
    try:
        return str(msgspec.json.decode(store.get(key, max_bytes=_MAX_REASON_BYTES), type=dict[str, Any])["reason"])
    except (StorageError, msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
        return f"the reason cannot be read ({error})"


def _used_before(id: str, rank: int) -> InvalidArgument:
    return InvalidArgument(
        f"checkpoint {id} already has files of rank {rank}: the session name was used before; "
        "use a new session for every start",
        field="session",
    )


def _claim_name(rank: int) -> str:
    return f"claim-{rank:05d}.json"


def _failed_name(rank: int) -> str:
    return f"failed-{rank:05d}.json"


# -- the commit ----------------------------------------------------------------------------------------------------


def finish(
    store: Store,
    ranks: Ranks,
    part: RankPart,
    head: Head,
    *,
    commit: Commit | None = None,
    clock: Clock | None = None,
    wait: Callable[[float], object] | None = None,
    watch: Watch | None = None,
) -> Manifest:
    """Put the part of this rank, whose files are durable; return the manifest once the checkpoint is committed.

    A single rank puts only the manifest. Raises what `conclude` raises.
    """
    head = msgspec.structs.replace(head, written_s=time.monotonic())
    if ranks.size > 1:
        with reporting_failure(store, ranks, head.id):
            put_part(store, part)
    return conclude(store, ranks, head, own=part, commit=commit, clock=clock, wait=wait, watch=watch)


def conclude(
    store: Store,
    ranks: Ranks,
    head: Head,
    *,
    own: RankPart | None = None,
    commit: Commit | None = None,
    clock: Clock | None = None,
    wait: Callable[[float], object] | None = None,
    watch: Watch | None = None,
) -> Manifest:
    """Return the manifest once the checkpoint is committed; rank 0 commits it. The part of this rank is put.

    `own` is this part, if the caller has it. `wait` sleeps for up to the given number of seconds.

    Raises:
        CheckpointAborted: Nothing was committed; the message names the rank that failed.
        CheckpointInvalid: The parts of the ranks contradict each other; nothing was committed.
        StorageError: On rank 0, while the manifest was put: it is unknown whether it exists.
    """
    clock, watch = clock or SystemClock(), watch or Watch()
    with reporting_failure(store, ranks, head.id):
        agreement = _Agreement(commit, head, ranks, wait) if commit is not None and ranks.size > 1 else None
        if agreement is not None:
            wait = agreement.pause
        is_agreed = agreement.is_over if agreement is not None else _always
        if ranks.is_leader:
            found = gather(store, ranks, head.id, own=own, clock=clock, wait=wait, watch=watch, is_agreed=is_agreed)
            manifest = timed(merge.merge(found, head=head), head, now_s=time.monotonic())
            data = m.encode(manifest)
            if ranks.size > 1:  # merging takes a while
                _check_failures(store, head.id, _names(store, head.id))
            watch.check()
        else:
            manifest = await_verdict(store, ranks, head.id, clock=clock, wait=wait, watch=watch, is_agreed=is_agreed)
    if ranks.is_leader:  # from here on it may be committed, so it is never aborted
        publish(store, manifest, data)
        if ranks.size > 1:
            _delete_rank_objects(store, ranks, head.id)
    if commit is not None:
        notify(commit, of_manifest(manifest, store.url))
    return manifest


def timed(manifest: Manifest, head: Head, *, now_s: float) -> Manifest:
    """Add how long the save took, as far as it was measured."""
    if head.called_s is None or head.staged_s is None or head.written_s is None:
        return manifest
    return msgspec.structs.replace(
        manifest,
        stall_s=round(max(head.staged_s - head.called_s, 0.0), 6),
        write_s=round(max(head.written_s - head.staged_s, 0.0), 6),
        duration_s=round(max(now_s - head.called_s, 0.0), 6),
    )


def _always() -> bool:
    """Agree at once: without a coordinator, the parts suffice."""
    return True


def gather(
    store: Store,
    ranks: Ranks,
    id: str,
    *,
    own: RankPart | None = None,
    clock: Clock,
    wait: Callable[[float], object] | None = None,
    watch: Watch,
    is_agreed: Callable[[], bool] = _always,
) -> list[RankPart]:
    """Wait, as rank 0, for the parts of all ranks and for `is_agreed`, which may raise; return them in order.

    Raises:
        CheckpointAborted: A rank failed or was too late.
        CheckpointInvalid: A part is malformed.
        TransferCancelled: `watch` was cancelled.
    """
    found = {own.rank: own} if own is not None else {}
    if len(found) == ranks.size:
        return list(found.values())

    def look() -> list[RankPart] | None:
        names = _names(store, id)
        _check_failures(store, id, names)
        new = [rank for rank in range(ranks.size) if rank not in found and part_name(rank) in names]
        found.update(zip(new, _read_parts(store, id, new), strict=True))
        return [found[rank] for rank in range(ranks.size)] if is_agreed() and len(found) == ranks.size else None

    def late(waited_s: float) -> CheckpointAborted:
        missing = [rank for rank in range(ranks.size) if rank not in found]
        if not missing:
            return CheckpointAborted(
                f"checkpoint {id}: all ranks have written, but not all reached the coordinator within {waited_s:g} s; "
                "pass commit= on every rank"
            )
        return CheckpointAborted(
            f"checkpoint {id}: {_named(missing)} wrote no part within {waited_s:g} s; check that each is alive, faster "
            f"than timeout_s, and writes to {store.url}",
            missing={str(rank): "wrote no part" for rank in missing},
        )

    return until(look, late, timeout_s=ranks.timeout_s, clock=clock, wait=wait, watch=watch)


def await_verdict(
    store: Store,
    ranks: Ranks,
    id: str,
    *,
    clock: Clock,
    wait: Callable[[float], object] | None = None,
    watch: Watch,
    is_agreed: Callable[[], bool] = _always,
) -> Manifest:
    """Wait, as another rank than 0, for the manifest; `is_agreed` is called because it may raise.

    The timeout for the commit begins when the part of rank 0 exists; until then rank 0 may be as late as any rank.

    Raises:
        CheckpointAborted: Rank 0 aborted, or did not commit in time.
        TransferCancelled: `watch` was cancelled.
    """

    def verdict() -> Manifest | None:
        key = f"{id}/{m.FILE_NAME}"
        if _exists(store, key):
            return m.decode(store.get(key, max_bytes=m.MAX_MANIFEST_BYTES), file=key)
        if _exists(store, f"{id}/{ABORTED}"):
            raise CheckpointAborted(f"checkpoint {id} was aborted: {_reason(store, f'{id}/{ABORTED}')}")
        is_agreed()
        return None

    def verdict_or_part() -> Manifest | Literal[True] | None:
        return verdict() or _exists(store, f"{id}/{part_name(0)}") or None

    def late(waited_s: float) -> CheckpointAborted:
        return CheckpointAborted(
            f"checkpoint {id}: rank 0 did not commit within {waited_s:g} s; check that it is alive and writes to "
            f"{store.url}. If it resumes, the checkpoint may still appear",
            missing={"0": "did not commit"},
        )

    found: Manifest | Literal[True] = until(
        verdict_or_part, late, timeout_s=ranks.timeout_s, clock=clock, wait=wait, watch=watch
    )
    if found is not True:
        return found
    timeout_s = ranks.timeout_s * (1 + GRACE)
    return until(verdict, late, timeout_s=timeout_s, clock=clock, wait=wait, watch=watch)


def until(
    look: Callable[[], T | None],
    late: Callable[[float], CheckpointAborted],
    *,
    timeout_s: float,
    clock: Clock,
    wait: Callable[[float], object] | None,
    watch: Watch,
) -> T:
    """Poll `look`, ever less often, until it returns a value; retry while the store is unavailable."""
    wait = wait or threading.Event().wait
    began_s = clock.monotonic_s()
    while True:
        watch.check()
        unanswered: StorageUnavailable | None = None
        try:
            found = look()
            if found is not None:
                return found
        except StorageUnavailable as error:
            unanswered = error
        waited_s = clock.monotonic_s() - began_s
        if waited_s >= timeout_s:
            raise late(timeout_s) from unanswered
        wait(min(max(waited_s * PAUSE_PER_WAITED, MIN_PAUSE_S), MAX_PAUSE_S, timeout_s - waited_s))


def _check_failures(store: Store, id: str, names: Iterable[str]) -> None:
    """Raise if a rank failed or rank 0 aborted."""
    failed = sorted(name for name in names if name.startswith("failed-"))
    if ABORTED in names:
        raise CheckpointAborted(f"checkpoint {id} was aborted: {_reason(store, f'{id}/{ABORTED}')}")
    if failed:
        reasons = {name[len("failed-") : -len(".json")]: _reason(store, f"{id}/{name}") for name in failed[:_MAX_NAMED]}
        missing = {rank.lstrip("0") or "0": reason for rank, reason in reasons.items()}
        reports = "; ".join(f"rank {rank} failed: {reason}" for rank, reason in missing.items())
        more = f"; and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        raise CheckpointAborted(f"checkpoint {id}: {reports}{more}", missing=missing)


def _read_parts(store: Store, id: str, ranks: Sequence[int]) -> list[RankPart]:
    def read(rank: int) -> RankPart:
        key = f"{id}/{part_name(rank)}"
        part = parts.decode(store.get(key, max_bytes=parts.MAX_PART_BYTES), file=key)
        if (part.checkpoint, part.rank) != (id, rank):
            raise CheckpointInvalid(f"{key} belongs to rank {part.rank} of checkpoint {part.checkpoint[:80]}")
        return part

    if len(ranks) < 2:
        return [read(rank) for rank in ranks]
    with ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="strata-parts") as pool:
        return list(pool.map(read, ranks))


def publish(store: Store, manifest: Manifest, data: bytes | None = None) -> None:
    """Commit a checkpoint whose files are durable. Nothing else puts a manifest.

    `data` is the encoded manifest, if the caller has it.

    Raises:
        CheckpointAborted: Some of its files are gone; the manifest was removed again.
        StorageError: It is not known whether the manifest was put.
    """
    _put_manifest(store, manifest.id, m.encode(manifest) if data is None else data)
    _require_files(store, manifest)


def _put_manifest(store: Store, id: str, data: bytes) -> None:
    """Put the manifest. After an error, what the store holds decides."""
    key = f"{id}/{m.FILE_NAME}"
    try:
        store.put(key, data, if_absent=True)
    except StorageError as error:
        try:
            is_ours = store.get(key, max_bytes=len(data)) == data
        except StorageError:
            is_ours = False
        if is_ours:
            return
        if isinstance(error, ObjectExists):
            raise _used_before(id, 0) from None
        raise


def _require_files(store: Store, manifest: Manifest) -> None:
    """Withdraw a manifest whose files were collected as leftovers because the save took more than an hour.

    A collector puts `aborted.json` before it looks for a manifest, and deletes it last; the manifest is put before we
    look for `aborted.json`. So one of the two notices the other.

    The checkpoint may also be deleted again already: other managers have saved later steps, and their retention does
    not keep it. They delete the manifest first, which a collector never does. That is not a failed save.

    Raises:
        CheckpointAborted: Files are gone; the manifest was deleted.
        BaseIsGone: Retention of another manager deleted the base; the manifest was deleted.
    """
    try:
        sizes = {listed.key: listed.size_bytes for listed in store.walk(manifest.id)}
    except StorageError as error:
        log.warning("checkpoint %s is committed, but its files could not be checked: %s", manifest.id, error)
        return
    own = {f"{manifest.id}/{file.path}": file.size_bytes for file in manifest.files if "/" not in file.path}
    gone = [key for key, size in own.items() if sizes.get(key) != size]
    base = next((base for base in manifest.bases if not _exists(store, f"{base}/{m.FILE_NAME}")), None)
    if not gone and base is None and f"{manifest.id}/{ABORTED}" not in sizes:
        return
    key = f"{manifest.id}/{m.FILE_NAME}"
    if not _exists(store, key):
        log.info("checkpoint %s was committed, and deleted by a manager that has saved later ones", manifest.id)
        return
    store.delete([key])
    if base is not None:
        raise BaseIsGone(f"its base {base} was deleted while it was written")
    raise CheckpointAborted(
        f"checkpoint {manifest.id} took so long that another manager deleted its files as leftovers "
        f"({', '.join(gone[:3]) or 'deletion has begun'}); nothing was committed"
    )


def _delete_rank_objects(store: Store, ranks: Ranks, id: str) -> None:
    """Delete the parts and claims, whose content is in the manifest now."""
    every = range(ranks.size)
    try:
        store.delete(f"{id}/{name(rank)}" for rank in every for name in (part_name, _claim_name))
    except StorageError as error:
        log.warning("could not delete the parts of %s, which does no harm: %s", id, error)


def _names(store: Store, id: str) -> set[str]:
    return {listed.key.rpartition("/")[2] for listed in store.walk(id)}


def _exists(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except ObjectMissing:
        return False
    return True


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


# -- with a coordinator --------------------------------------------------------------------------------------------


class _Agreement:
    """Waits for the coordinator in a thread while the store is polled: either may report a failure.

    Without an answer from the coordinator, the store decides alone.
    """

    def __init__(self, commit: Commit, head: Head, ranks: Ranks, wait: Callable[[float], object] | None) -> None:
        self._commit = commit
        self._head = head
        self._ranks = ranks
        self._wait = wait or threading.Event().wait
        self._over = threading.Event()
        self._error: CheckpointAborted | None = None
        # A daemon: once the store has decided, nothing waits for the coordinator, whose call has a deadline.
        threading.Thread(target=self._await_ranks, name="strata-commit", daemon=True).start()

    def is_over(self) -> bool:
        """Return whether the coordinator has answered.

        Raises:
            CheckpointAborted: A rank will not finish.
        """
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def pause(self, seconds: float) -> None:
        """Sleep, but wake up when the coordinator answers."""
        if self._over.is_set():
            self._wait(seconds)
        else:
            self._over.wait(seconds)

    def _await_ranks(self) -> None:
        id, ranks = self._head.id, self._ranks
        try:
            self._commit.all_written(
                id, step=self._head.step, rank=ranks.rank, size=ranks.size, timeout_s=ranks.timeout_s
            )
        except CheckpointAborted as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a thread boundary; the store decides
            log.warning("the coordinator failed for checkpoint %s; the store decides alone: %s", id, error)
        finally:
            self._over.set()


def notify(commit: Commit, metadata: CheckpointMetadata) -> None:
    """Notify the coordinator of a committed checkpoint; a failure is only logged."""
    try:
        commit.committed(metadata)
    except StrataError as error:
        log.warning("checkpoint %s is committed, but the coordinator could not be notified: %s", metadata.id, error)
