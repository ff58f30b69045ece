"""Several ranks save one checkpoint, and either all of it is committed or nothing.

They meet in the store, under an id that all of them work out for themselves. There each rank puts, and only if absent:

    claim-00003.json     this name is mine: nobody has used it before
    part-00003.json      my files are durable, and this is in them
    failed-00003.json    I will not finish; do not wait for me

and rank 0, alone, either `manifest.json` or `aborted.json`, never both. So a rank that dies without a word costs a
timeout. Whoever has a coordinator hands in a `Commit`: then a death is known at once. What is in the store decides in
either case.
"""

from __future__ import annotations

import contextlib
import logging
import threading
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
"""Each pause is a tenth of what was waited so far: looking is cheap for who waits long, and late by little."""
GRACE = 0.25
"""By this much of the timeout the others are more patient than rank 0, which merges and commits in that time."""
NUM_AT_ONCE = 8
_MAX_REASON_BYTES = 1 << 16
_MAX_NAMED = 8


class BaseIsGone(CheckpointAborted):
    """What an incremental checkpoint refers to was removed while it was written; nothing was committed."""


class Commit(Protocol):
    """What a coordinator adds. Called from the thread or process that saves."""

    def all_written(self, id: str, *, step: int, rank: int, size: int, timeout_s: float) -> None:
        """Returns when every rank's part is durable.

        Raises:
            CheckpointAborted: It never will be; the message names the missing. All ranks hear the same.
            CoordinatorError: The coordinator cannot be asked; the store decides alone.
        """
        ...

    def committed(self, metadata: CheckpointMetadata) -> None:
        """Hears, on every rank, of a checkpoint that exists."""
        ...


# -- what ranks tell each other ------------------------------------------------------------------------------------


def claim(store: Store, ranks: Ranks, id: str) -> None:
    """Before anything is written under an id: nobody has used it.

    Raises:
        InvalidArgument: Somebody has: the session is not new.
    """
    try:
        store.put(f"{id}/{_claim_name(ranks.rank)}", b"{}\n", if_absent=True)
    except ObjectExists:
        raise _used_before(id, ranks.rank) from None
    if _is_there(store, f"{id}/{m.FILE_NAME}"):
        store.delete([f"{id}/{_claim_name(ranks.rank)}"])
        raise _used_before(id, ranks.rank)


def put_part(store: Store, part: RankPart) -> None:
    """
    Raises:
        InvalidArgument: There is one already: the session is not new.
    """
    try:
        store.put(f"{part.checkpoint}/{part_name(part.rank)}", parts.encode(part), if_absent=True)
    except ObjectExists:
        raise _used_before(part.checkpoint, part.rank) from None


def fail(store: Store, id: str, rank: int, reason: object) -> None:
    """Spares rank 0 the wait, if the store still takes anything."""
    _say(store, f"{id}/{_failed_name(rank)}", rank, reason)


def abort(store: Store, id: str, reason: object) -> None:
    """Rank 0 gives up, for all, if the store still takes anything. Never after it has begun to put the manifest."""
    _say(store, f"{id}/{ABORTED}", 0, reason)


@contextlib.contextmanager
def telling(store: Store, ranks: Ranks, id: str) -> Iterator[None]:
    """Whatever fails in here is told to the other ranks; but a used name is another's, who must hear nothing."""
    try:
        yield
    except InvalidArgument:
        raise
    except BaseException as error:
        _tell_of(store, ranks, id, error)
        raise


@contextlib.contextmanager
def beginning(store: Store, ranks: Ranks, id: str) -> Iterator[None]:
    """The same before the id is claimed, where whatever fails is told: a state that cannot be stored, too. Who cannot
    claim it has a used name, or has handed the state over to a saver, which tells by itself.
    """
    try:
        yield
    except BaseException as error:
        if ranks.size > 1:
            with contextlib.suppress(InvalidArgument, StorageError):
                claim(store, ranks, id)
                _tell_of(store, ranks, id, error)
        raise


def lost_saver(store: Store, ranks: Ranks, id: str, error: BaseException) -> None:
    """For a trainer whose saver has died: the others need not wait for it. But rank 0's may have put the manifest, once
    its part is there, and it may be on its way: then nothing is said.
    """
    with contextlib.suppress(StorageError):  # then they wait for their timeout, and `error` is what matters here
        if not (ranks.is_leader and _is_there(store, f"{id}/{part_name(0)}")):
            _tell_of(store, ranks, id, error)


def _tell_of(store: Store, ranks: Ranks, id: str, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}"
    if ranks.size == 1:
        return
    if ranks.is_leader:
        abort(store, id, f"rank 0 failed: {reason}")
    else:
        fail(store, id, ranks.rank, reason)


def discard(store: Store, ranks: Ranks, id: str) -> None:
    """Removes this rank's files of an attempt that rank 0 has aborted; of any other they stay, for it may be committed
    yet. What everybody has said stays too, until leftovers are collected: somebody may still be on his way.
    """
    try:
        if _is_there(store, f"{id}/{ABORTED}"):
            own = f"{id}/rank-{ranks.rank:05d}"
            store.delete([listed.key for listed in store.walk(id) if listed.key.startswith(own)])
    except StorageError as error:
        log.warning("the leftovers of %s stay for now: %s", id, error)


def _say(store: Store, key: str, rank: int, reason: object) -> None:
    data = msgspec.json.encode({"rank": rank, "reason": str(reason)[:4_000]})
    try:
        store.put(key, data, if_absent=True)
    except ObjectExists:
        pass
    except StorageError as error:
        log.warning("%s could not be put, so the other ranks wait for their timeout: %s", key, error)


def _reason(store: Store, key: str) -> str:
    try:
        return str(msgspec.json.decode(store.get(key, max_bytes=_MAX_REASON_BYTES), type=dict[str, Any])["reason"])
    except (StorageError, msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
        return f"for a reason that cannot be read ({error})"


def _used_before(id: str, rank: int) -> InvalidArgument:
    return InvalidArgument(
        f"rank {rank} finds its files of checkpoint {id} there already: the session's name was used before; "
        "every start needs its own",
        field="session",
    )


def _claim_name(rank: int) -> str:
    return f"claim-{rank:05d}.json"


def _failed_name(rank: int) -> str:
    return f"failed-{rank:05d}.json"


# -- the agreement -------------------------------------------------------------------------------------------------


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
    """This rank's files are durable: tells so, and gives the manifest when the checkpoint is committed.

    Alone there is nobody to tell, and only the manifest is put. Raises what `conclude` does.
    """
    if ranks.size > 1:
        with telling(store, ranks, head.id):
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
    """This rank has put its part: gives the manifest when the checkpoint is committed. Rank 0 sees to that.

    `own` is that part, if it is at hand. `wait` pauses for so many seconds, or less.

    Raises:
        CheckpointAborted: Nothing was committed; the message says which rank is to blame.
        CheckpointInvalid: The ranks' parts do not fit together; nothing was committed.
        StorageError: On rank 0, while the manifest was put: it is not known whether it was.
    """
    clock, watch = clock or SystemClock(), watch or Watch()
    with telling(store, ranks, head.id):
        agreement = _Agreement(commit, head, ranks, wait) if commit is not None and ranks.size > 1 else None
        if agreement is not None:
            wait = agreement.pause
        is_agreed = agreement.is_over if agreement is not None else _nobody_else
        if ranks.is_leader:
            found = gather(store, ranks, head.id, own=own, clock=clock, wait=wait, watch=watch, is_agreed=is_agreed)
            manifest = merge.merge(found, head=head)
            data = m.encode(manifest)
            if ranks.size > 1:  # merging takes its time
                _look_for_failures(store, head.id, _names(store, head.id))
            watch.check()
        else:
            manifest = await_verdict(store, ranks, head.id, clock=clock, wait=wait, watch=watch, is_agreed=is_agreed)
    if ranks.is_leader:  # from here on it may be committed, whatever is heard of it: no abort
        publish(store, manifest, data)
        if ranks.size > 1:
            _clear_messages(store, ranks, head.id)
    if commit is not None:
        tell(commit, of_manifest(manifest, store.url))
    return manifest


def _nobody_else() -> bool:
    """Without a coordinator the parts suffice."""
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
    is_agreed: Callable[[], bool] = _nobody_else,
) -> list[RankPart]:
    """For rank 0: every rank's part, in order. `is_agreed` must be true as well, and may raise.

    Raises:
        CheckpointAborted: A rank has failed, or did not come in time, or this save was cancelled.
        CheckpointInvalid: A part is none.
    """
    found = {own.rank: own} if own is not None else {}
    if len(found) == ranks.size:
        return list(found.values())

    def look() -> list[RankPart] | None:
        names = _names(store, id)
        _look_for_failures(store, id, names)
        new = [rank for rank in range(ranks.size) if rank not in found and part_name(rank) in names]
        found.update(zip(new, _read_parts(store, id, new), strict=True))
        return [found[rank] for rank in range(ranks.size)] if is_agreed() and len(found) == ranks.size else None

    def late(waited_s: float) -> CheckpointAborted:
        missing = [rank for rank in range(ranks.size) if rank not in found]
        if not missing:
            return CheckpointAborted(
                f"checkpoint {id}: the coordinator did not hear of every rank within {waited_s:g} s, though all have "
                "written; do all ranks hand in a Commit?"
            )
        return CheckpointAborted(
            f"checkpoint {id}: {_named(missing)} wrote no part within {waited_s:g} s; dead, slower than timeout_s, or "
            f"writing elsewhere than to {store.url}?",
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
    is_agreed: Callable[[], bool] = _nobody_else,
) -> Manifest:
    """For the other ranks: the manifest, when rank 0 has committed it. `is_agreed` is asked because it may raise.

    Rank 0's time begins when its part is there; until then it is as late as any rank may be.

    Raises:
        CheckpointAborted: Rank 0 says so, or says nothing in time, or this save was cancelled.
    """

    def verdict() -> Manifest | None:
        key = f"{id}/{m.FILE_NAME}"
        if _is_there(store, key):
            return m.decode(store.get(key, max_bytes=m.MAX_MANIFEST_BYTES), file=key)
        if _is_there(store, f"{id}/{ABORTED}"):
            raise CheckpointAborted(f"checkpoint {id} was given up: {_reason(store, f'{id}/{ABORTED}')}")
        is_agreed()
        return None

    def verdict_or_part() -> Manifest | Literal[True] | None:
        return verdict() or _is_there(store, f"{id}/{part_name(0)}") or None

    def late(waited_s: float) -> CheckpointAborted:
        return CheckpointAborted(
            f"checkpoint {id}: rank 0 did not commit within {waited_s:g} s; it is dead, hangs, or writes elsewhere "
            f"than to {store.url}. If it goes on after all, the checkpoint may still appear",
            missing={"0": "did not commit"},
        )

    found: Manifest | Literal[True] = until(
        verdict_or_part, late, timeout_s=ranks.timeout_s, clock=clock, wait=wait, watch=watch
    )
    if found is not True:
        return found
    patience_s = ranks.timeout_s * (1 + GRACE)
    return until(verdict, late, timeout_s=patience_s, clock=clock, wait=wait, watch=watch)


def until(
    look: Callable[[], T | None],
    late: Callable[[float], CheckpointAborted],
    *,
    timeout_s: float,
    clock: Clock,
    wait: Callable[[float], object] | None,
    watch: Watch,
) -> T:
    """Looks again and again, ever less often. A store that does not answer is asked again until the time is up."""
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


def _look_for_failures(store: Store, id: str, names: Iterable[str]) -> None:
    failed = sorted(name for name in names if name.startswith("failed-"))
    if ABORTED in names:
        raise CheckpointAborted(f"checkpoint {id} was given up: {_reason(store, f'{id}/{ABORTED}')}")
    if failed:
        reasons = {name[len("failed-") : -len(".json")]: _reason(store, f"{id}/{name}") for name in failed[:_MAX_NAMED]}
        missing = {rank.lstrip("0") or "0": reason for rank, reason in reasons.items()}
        told = "; ".join(f"rank {rank} failed: {reason}" for rank, reason in missing.items())
        more = f"; and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        raise CheckpointAborted(f"checkpoint {id}: {told}{more}", missing=missing)


def _read_parts(store: Store, id: str, ranks: Sequence[int]) -> list[RankPart]:
    def read(rank: int) -> RankPart:
        key = f"{id}/{part_name(rank)}"
        part = parts.decode(store.get(key, max_bytes=parts.MAX_PART_BYTES), file=key)
        if (part.checkpoint, part.rank) != (id, rank):
            raise CheckpointInvalid(f"{key} is the part of rank {part.rank} of {part.checkpoint[:80]}")
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
    """Trust what the store holds, not what it answered."""
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
    """Who takes more than an hour may have been taken for dead, and its files for leftovers: then it is not committed.

    A collector puts `aborted.json` before it looks for a manifest, and removes it last; we put the manifest before we
    look for that. So one of us sees the other.

    It may also be gone again as a checkpoint: others have saved later steps meanwhile, and their retention keeps none
    as old as this. They remove the manifest first, a collector never does. That is no failure to save.

    Raises:
        CheckpointAborted: Some of the files are gone; so is the manifest.
        BaseIsGone: Somebody's retention has removed what it refers to; so is the manifest.
    """
    try:
        sizes = {listed.key: listed.size_bytes for listed in store.walk(manifest.id)}
    except StorageError as error:
        log.warning("checkpoint %s is committed; its files could not be listed again: %s", manifest.id, error)
        return
    own = {f"{manifest.id}/{file.path}": file.size_bytes for file in manifest.files if "/" not in file.path}
    gone = [key for key, size in own.items() if sizes.get(key) != size]
    base = next((base for base in manifest.bases if not _is_there(store, f"{base}/{m.FILE_NAME}")), None)
    if not gone and base is None and f"{manifest.id}/{ABORTED}" not in sizes:
        return
    key = f"{manifest.id}/{m.FILE_NAME}"
    if not _is_there(store, key):
        log.info("checkpoint %s was committed, and removed by somebody who has saved later ones", manifest.id)
        return
    store.delete([key])
    if base is not None:
        raise BaseIsGone(f"its base {base} was removed while it was written")
    raise CheckpointAborted(
        f"checkpoint {manifest.id} took so long that somebody has removed its files as leftovers "
        f"({', '.join(gone[:3]) or 'is about to'}); nothing is committed"
    )


def _clear_messages(store: Store, ranks: Ranks, id: str) -> None:
    """All that they said is in the manifest now."""
    every = range(ranks.size)
    try:
        store.delete(f"{id}/{name(rank)}" for rank in every for name in (part_name, _claim_name))
    except StorageError as error:
        log.warning("the ranks' parts of %s stay beside its manifest, which does no harm: %s", id, error)


def _names(store: Store, id: str) -> set[str]:
    return {listed.key.rpartition("/")[2] for listed in store.walk(id)}


def _is_there(store: Store, key: str) -> bool:
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
    """Stands at the coordinator's barrier in a thread, while the store is looked at: either may tell of a failure.

    Without an answer from the coordinator the store decides alone.
    """

    def __init__(self, commit: Commit, head: Head, ranks: Ranks, wait: Callable[[float], object] | None) -> None:
        self._commit = commit
        self._head = head
        self._ranks = ranks
        self._wait = wait or threading.Event().wait
        self._over = threading.Event()
        self._error: CheckpointAborted | None = None
        # A daemon: when the store has decided, nobody waits for the barrier any more, and it has a deadline.
        threading.Thread(target=self._stand, name="strata-commit", daemon=True).start()

    def is_over(self) -> bool:
        """
        Raises:
            CheckpointAborted: A rank will never come.
        """
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def pause(self, seconds: float) -> None:
        """Ends early when the coordinator has answered."""
        if self._over.is_set():
            self._wait(seconds)
        else:
            self._over.wait(seconds)

    def _stand(self) -> None:
        id, ranks = self._head.id, self._ranks
        try:
            self._commit.all_written(
                id, step=self._head.step, rank=ranks.rank, size=ranks.size, timeout_s=ranks.timeout_s
            )
        except CheckpointAborted as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - the edge of the thread; the store still decides
            log.warning("the coordinator does not help with checkpoint %s, its parts alone decide: %s", id, error)
        finally:
            self._over.set()


def tell(commit: Commit, metadata: CheckpointMetadata) -> None:
    """Of a checkpoint that exists, whether or not the coordinator hears it."""
    try:
        commit.committed(metadata)
    except StrataError as error:
        log.warning("checkpoint %s is committed, but the coordinator could not be told: %s", metadata.id, error)
