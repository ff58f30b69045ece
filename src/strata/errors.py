"""Every error that Strata raises on purpose.

    StrataError
    ├── ConfigError                a setting is invalid; the message says how to fix it
    ├── InvalidArgument            an argument of a call is invalid; `field` names it
    │   ├── LimitExceeded          … a limit was reached
    │   └── ForkedProcess          … an object was used in a process forked from its owner
    ├── CoordinatorError
    │   ├── UnknownJob             the job does not exist
    │   ├── JobInUse               the job to drop still has workers
    │   ├── UnknownWorker          the worker never registered, or was declared dead
    │   ├── UnknownDataset         the dataset is not registered
    │   ├── WorkerExists           another live process uses this worker id
    │   ├── DatasetExists          the dataset is registered with different contents
    │   ├── StaleIncarnation       this process was replaced or declared dead
    │   ├── StaleGeneration        the membership has changed; `generation` is the current one
    │   ├── ShardNotLeased         the worker acknowledged a shard that it does not own
    │   ├── EpochMismatch          the dataset is in another epoch
    │   ├── BarrierBroken          a barrier cannot complete; `missing` lists the workers and reasons
    │   ├── BarrierMismatch        workers named different members for one barrier
    │   ├── CheckpointMismatch     ranks reported different contents for one checkpoint
    │   ├── Unauthenticated        the token is missing or unknown
    │   ├── PermissionRefused      the role of the token does not permit the call
    │   └── CoordinatorUnavailable no coordinator answered in time
    │       └── NotLeader          a standby answered; the message names the leader
    ├── JournalError
    │   ├── JournalLocked          another coordinator has the state open
    │   ├── JournalDamaged         the state cannot be read
    │   ├── JournalWriteFailed     the state cannot be written: disk full, database down
    │   └── JournalFenced          another coordinator leads; nothing was written
    ├── CheckpointError
    │   ├── NoCheckpoint           there is none to load
    │   ├── CheckpointInvalid      what was read is no checkpoint; the message names the file, and the tensor
    │   │   ├── CheckpointCorrupt  … a hash does not match
    │   │   ├── CheckpointMissing  … a file of it is not there
    │   │   └── CheckpointTooNew   … a newer version wrote it
    │   ├── CheckpointAborted      the save was cancelled, or a rank did not finish; nothing was committed
    │   └── CheckpointBusy         another save is under way
    ├── DataError
    │   ├── NoData                 no files, no rows, or too few rows for the ranks
    │   ├── DataFileInvalid        a file is damaged, or of another format; the message names it, and where
    │   │   └── DataFileChanged    … or not the one that was planned
    │   ├── DataFileMissing        a file that was planned is gone
    │   ├── SchemaMismatch         a column is missing, files disagree on it, or its type has no policy
    │   ├── NullsFound             nulls in a column whose policy does not allow any
    │   ├── PlanChanged            the state is of another dataset; the message says what changed
    │   ├── TransformFailed        a user's transform raised, or gave back another number of rows
    │   └── DataWorkerDied         a process that decodes ended
    ├── RunFailed                  a run failed; the message includes the last output of the worker
    └── StorageError
        ├── ObjectMissing          nothing is stored under this key
        ├── ObjectExists           something is, and was to be written only if not
        ├── StorageDenied          credentials are missing or do not suffice
        ├── BucketMissing          there is no such bucket or container
        ├── StorageFull            no space is left
        └── StorageUnavailable     the store does not answer, or not in time

Each condition has its own class, so that a program can handle it, and a message that says how to fix it. Class names
travel over the wire (see `strata.v1.Error.kind`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class StrataError(Exception):
    """The base class of all errors that Strata raises on purpose."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        generation: int = 0,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """The invalid argument, if it is a single one."""
        self.generation = generation
        """The current membership generation, if the caller's was stale."""
        self.missing: dict[str, str] = dict(missing or {})
        """For a broken barrier: worker id → why the worker did not arrive."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.field, self.generation, self.missing)


def _rebuild(
    kind: type[StrataError], message: str, field: str, generation: int, missing: dict[str, str]
) -> StrataError:
    return kind(message, field=field, generation=generation, missing=missing)


class ConfigError(StrataError):
    """A setting is invalid."""


class InvalidArgument(StrataError, ValueError):
    """An argument is invalid; nothing was changed."""


class LimitExceeded(InvalidArgument):
    """A limit was reached; nothing was changed."""


class ForkedProcess(InvalidArgument):
    """The object belongs to the process that forked this one."""


class CoordinatorError(StrataError):
    """The coordinator rejected a call; nothing was changed."""


class UnknownJob(CoordinatorError):
    """The job does not exist."""


class JobInUse(CoordinatorError):
    """The job still has workers, so it was not dropped."""


class UnknownWorker(CoordinatorError):
    """The job has no such worker."""


class UnknownDataset(CoordinatorError):
    """The job has no such dataset."""


class WorkerExists(CoordinatorError):
    """Another live process uses this worker id."""


class DatasetExists(CoordinatorError):
    """The dataset is registered with different contents."""


class StaleIncarnation(CoordinatorError):
    """This process was replaced or declared dead; it must register again."""


class StaleGeneration(CoordinatorError):
    """The membership has changed since the caller last read it."""


class ShardNotLeased(CoordinatorError):
    """The worker does not own this shard."""


class EpochMismatch(CoordinatorError):
    """The dataset is in another epoch."""


class BarrierBroken(CoordinatorError):
    """The barrier cannot complete; every waiting caller receives this error at once."""


class BarrierMismatch(CoordinatorError):
    """Workers named different members for the same barrier."""


class CheckpointMismatch(CoordinatorError):
    """Ranks reported different contents for one checkpoint."""


class Unauthenticated(CoordinatorError):
    """The token is missing or unknown."""


class PermissionRefused(CoordinatorError):
    """The role of the token does not permit this call."""


class CoordinatorUnavailable(CoordinatorError):
    """No coordinator answered in time."""


class NotLeader(CoordinatorUnavailable):
    """This coordinator is a standby, or has lost the leadership."""


class CheckpointError(StrataError):
    """A checkpoint could not be saved or read."""


class NoCheckpoint(CheckpointError, LookupError):
    """There is none to load."""


class CheckpointInvalid(CheckpointError, ValueError):
    """What was read is no checkpoint."""


class CheckpointCorrupt(CheckpointInvalid):
    """The bytes are not those that were saved."""


class CheckpointMissing(CheckpointInvalid):
    """A file of the checkpoint is not there."""


class CheckpointTooNew(CheckpointInvalid):
    """A newer version of Strata wrote it."""


class CheckpointAborted(CheckpointError):
    """Nothing was committed; the checkpoint before stays the latest."""


class CheckpointBusy(CheckpointError):
    """Another save is under way."""


class DataError(StrataError):
    """A dataset cannot be read as asked."""


class NoData(DataError):
    """There are no files, no rows, or too few of them."""


class DataFileInvalid(DataError, ValueError):
    """A file is damaged, or not of the format that it was taken for."""


class DataFileChanged(DataFileInvalid):
    """The file is not the one that was planned."""


class DataFileMissing(DataError, LookupError):
    """A file that was planned is gone."""


class SchemaMismatch(DataError, ValueError):
    """A column is missing, files disagree on it, or nobody knows what to make of its type."""


class NullsFound(DataError, ValueError):
    """There are nulls in a column whose policy does not allow any."""


class PlanChanged(DataError):
    """The state belongs to a dataset with other rows, or another order."""


class TransformFailed(DataError):
    """The user's transform raised, or gave back another number of rows."""


class DataWorkerDied(DataError):
    """A process that decodes ended before its work did."""


class RunFailed(StrataError):
    """A run ended without a result."""


class StorageError(StrataError, OSError):
    """A store could not do what it was asked."""


class ObjectMissing(StorageError, LookupError):
    """Nothing is stored under this key."""


class ObjectExists(StorageError):
    """Something is stored under this key already."""


class BucketMissing(StorageError):
    """There is no such bucket or container."""


class StorageDenied(StorageError):
    """Credentials are missing or do not suffice."""


class StorageFull(StorageError):
    """No space is left."""


class StorageUnavailable(StorageError):
    """The store does not answer."""


class JournalError(StrataError):
    """The journal, the durable state of a coordinator, failed."""


class JournalLocked(JournalError):
    """Another coordinator has the state open."""


class JournalDamaged(JournalError):
    """The state cannot be read."""


class JournalWriteFailed(JournalError):
    """The state cannot be written."""


class JournalFenced(JournalError):
    """Another coordinator leads; nothing was written."""


def _subclasses(root: type[StrataError]) -> dict[str, type[StrataError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _subclasses(child)
    return found


BY_KIND: dict[str, type[StrataError]] = _subclasses(StrataError)
"""Error classes by their names on the wire."""
