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
    │   ├── NoCheckpoint           no checkpoint exists, or none with this step or id
    │   ├── CheckpointInvalid      a checkpoint cannot be trusted; the message names the file and the tensor
    │   │   ├── CheckpointCorrupt  … a hash does not match: `file`, `tensor`, `expected`, `found`
    │   │   ├── CheckpointMissing  … one of its files does not exist
    │   │   └── CheckpointTooNew   … a newer version of Strata wrote it
    │   ├── CheckpointAborted      the save was cancelled, or a rank failed; nothing was committed
    │   ├── CheckpointBusy         another save is in progress
    │   ├── ReadTooLarge           a read on demand would take more bytes or time than a request may use
    │   └── TooManyReads           too many requests wait for a read
    ├── DataError
    │   ├── NoData                 no files, no rows, or too few rows for the ranks
    │   ├── DataFileInvalid        a file is damaged or has another format; `path` and `row_group` locate the damage
    │   │   └── DataFileChanged    … or it has changed since it was planned
    │   ├── DataFileMissing        a planned file no longer exists
    │   ├── SchemaMismatch         a column is missing, files disagree on it, or its type has no policy
    │   ├── NullsFound             nulls in a column whose policy does not allow them
    │   ├── PlanChanged            the state belongs to another dataset; the message lists the differences
    │   ├── TransformFailed        a user's transform raised, or returned another number of rows
    │   └── DataWorkerDied         a decode process exited
    ├── RunFailed                  a run failed; the message includes the last output of the worker
    └── StorageError
        ├── ObjectMissing          no object has this key
        ├── ObjectExists           an object has this key, and the write was conditional on its absence
        ├── StorageDenied          credentials are missing or insufficient
        ├── BucketMissing          the bucket or container does not exist
        ├── StorageFull            no space is left
        ├── StorageUnavailable     the store did not answer in time
        └── TransferCancelled      the caller cancelled a read or a write

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
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[StrataError], message: str, fields: dict[str, Any]) -> StrataError:
    """Restore a pickled error with all its fields, those of subclasses included."""
    error = kind(message)
    error.__dict__.update(fields)
    return error


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
    """A checkpoint could not be saved or read.

    `strata.storage` never raises it: a full disk or a store that does not answer is a `StorageError`, also during a
    save. Only a cancelled transfer is translated, to `CheckpointAborted`.
    """


class NoCheckpoint(CheckpointError, LookupError):
    """No checkpoint exists, or none with this step or id."""


class CheckpointInvalid(CheckpointError, ValueError):
    """A checkpoint cannot be trusted."""


class CheckpointCorrupt(CheckpointInvalid):
    """The bytes read are not the bytes that were saved."""

    def __init__(
        self, message: str, *, file: str = "", tensor: str = "", expected: str = "", found: str = "", **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.file = file
        """The path of the corrupt file, relative to its checkpoint or, if a base wrote it, to the store."""
        self.tensor = tensor
        """The name of the corrupt tensor; empty if a header or a manifest is corrupt."""
        self.expected = expected
        """The hash that was saved; empty if the bytes cannot even be decoded."""
        self.found = found
        """The hash of the bytes that were read, likewise."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()[:2]
        return rebuild, arguments, self.details()

    def details(self) -> dict[str, str]:
        """Return the fields that only this error has."""
        return {"file": self.file, "tensor": self.tensor, "expected": self.expected, "found": self.found}


class CheckpointMissing(CheckpointInvalid):
    """A file of the checkpoint does not exist."""


class CheckpointTooNew(CheckpointInvalid):
    """A newer version of Strata wrote the checkpoint."""


class CheckpointAborted(CheckpointError):
    """Nothing was committed; the previous checkpoint remains the latest."""


class CheckpointBusy(CheckpointError):
    """Another save is in progress."""


class ReadTooLarge(CheckpointError):
    """Reading on demand would take more bytes or time than a request may use."""


class TooManyReads(CheckpointError):
    """Too many requests wait for a read; try again later."""


class DataError(StrataError):
    """A dataset cannot be read as requested."""


class NoData(DataError):
    """The dataset has no files, no rows, or too few rows."""


class DataFileInvalid(DataError, ValueError):
    """A file is damaged, or has another format than expected."""

    def __init__(self, message: str, *, path: str = "", row_group: int | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.path = path
        """The path of the file in its file system."""
        self.row_group = row_group
        """The index of the damaged row group, from 0; None if the damage lies elsewhere in the file."""


class DataFileChanged(DataFileInvalid):
    """The file has changed since it was planned."""


class DataFileMissing(DataError, LookupError):
    """A planned file no longer exists."""


class SchemaMismatch(DataError, ValueError):
    """A column is missing, files disagree on it, or its type is not supported."""


class NullsFound(DataError, ValueError):
    """A column contains nulls, which its policy does not allow."""


class PlanChanged(DataError):
    """The state belongs to a dataset with other rows or another order."""


class TransformFailed(DataError):
    """The user's transform raised, or returned another number of rows."""


class DataWorkerDied(DataError):
    """A decode process exited before it finished."""


class RunFailed(StrataError):
    """A run ended without a result."""


class StorageError(StrataError, OSError):
    """A store could not complete a call. All errors of `strata.storage` derive from this one."""


class ObjectMissing(StorageError, LookupError):
    """No object has this key."""


class ObjectExists(StorageError):
    """An object already has this key."""


class BucketMissing(StorageError):
    """The bucket or container does not exist."""


class StorageDenied(StorageError):
    """Credentials are missing or insufficient."""


class StorageFull(StorageError):
    """No space is left."""


class StorageUnavailable(StorageError):
    """The store did not answer in time."""


class TransferCancelled(StorageError):
    """The caller cancelled a read or a write (`Watch.cancel`). Saves and loads translate it to `CheckpointAborted`."""


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
