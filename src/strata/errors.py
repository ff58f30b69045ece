"""Every error a user of Strata can meet.

    StrataError
    ├── ConfigError                a setting is wrong; the message names the cure
    ├── InvalidArgument            a call's argument is wrong; `field` names it
    │   ├── LimitExceeded          … because a bound was reached
    │   └── ForkedProcess          … or what is used belongs to the process that forked this one
    ├── CoordinatorError
    │   ├── UnknownJob             no such job
    │   ├── JobInUse               workers are in the job that was to be dropped
    │   ├── UnknownWorker          no such worker: never registered, or declared dead
    │   ├── UnknownDataset         no such dataset
    │   ├── WorkerExists           another live process has this worker id
    │   ├── DatasetExists          registered before with other contents
    │   ├── StaleIncarnation       this process was replaced or declared dead
    │   ├── StaleGeneration        the membership has moved on; `generation` says where to
    │   ├── ShardNotLeased         an ack for a shard that this worker does not own
    │   ├── EpochMismatch          the dataset is in another epoch
    │   ├── BarrierBroken          a barrier cannot complete; `missing` says who and why
    │   ├── BarrierMismatch        members named different sets for one barrier
    │   ├── CheckpointMismatch     ranks disagree on what one checkpoint is
    │   ├── Unauthenticated        a token is needed, or it is not known
    │   ├── PermissionRefused      the token's role does not suffice
    │   └── CoordinatorUnavailable nobody answers
    │       └── NotLeader          a standby answers; the message says where the leader is
    ├── JournalError
    │   ├── JournalLocked          another coordinator has this state open
    │   ├── JournalDamaged         the state cannot be read back
    │   ├── JournalWriteFailed     the state cannot be written: disk full, database gone
    │   └── JournalFenced          another coordinator has become the leader: nothing was written
    ├── CheckpointError
    │   ├── NoCheckpoint           no checkpoint exists, or none with this step or id
    │   ├── CheckpointInvalid      a checkpoint cannot be trusted; the message names the file and the tensor
    │   │   ├── CheckpointCorrupt  … a hash does not match: `file`, `tensor`, `expected`, `found`
    │   │   ├── CheckpointMissing  … one of its files does not exist
    │   │   └── CheckpointTooNew   … a newer version of Strata wrote it
    │   ├── CheckpointAborted      the save was cancelled, or a rank failed; nothing was committed
    │   └── CheckpointBusy         another save is in progress
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
    ├── RunFailed                  a run has ended without its result; the message shows what the worker said
    └── StorageError
        ├── ObjectMissing          no object has this key
        ├── ObjectExists           an object has this key, and the write was conditional on its absence
        ├── StorageDenied          credentials are missing or insufficient
        ├── BucketMissing          the bucket or container does not exist
        ├── StorageFull            no space is left
        ├── StorageUnavailable     the store did not answer in time
        └── TransferCancelled      the caller cancelled a read or a write

Each condition has its own name, so that a program can act on it, and a message that says what to do, so that a person
can. The names travel over the wire as they stand here (see `strata.v1.Error.kind`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class StrataError(Exception):
    """The root of all errors that Strata raises on purpose."""

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
        """The argument at fault, where it is one argument."""
        self.generation = generation
        """The membership generation that stands, where the caller's was stale."""
        self.missing: dict[str, str] = dict(missing or {})
        """For a broken barrier: worker id → why it did not come."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[StrataError], message: str, fields: dict[str, Any]) -> StrataError:
    """Restore a pickled error with all its fields, those of subclasses included."""
    error = kind(message)
    error.__dict__.update(fields)
    return error


class ConfigError(StrataError):
    """A setting is wrong."""


class InvalidArgument(StrataError, ValueError):
    """An argument is wrong; nothing was changed."""


class LimitExceeded(InvalidArgument):
    """A bound was reached; nothing was changed."""


class ForkedProcess(InvalidArgument):
    """What is used belongs to the process that forked this one."""


class CoordinatorError(StrataError):
    """The coordinator refused a call; nothing was changed."""


class UnknownJob(CoordinatorError):
    """No such job."""


class JobInUse(CoordinatorError):
    """Workers are in the job, so it is not dropped."""


class UnknownWorker(CoordinatorError):
    """No such worker in this job."""


class UnknownDataset(CoordinatorError):
    """No such dataset in this job."""


class WorkerExists(CoordinatorError):
    """Another live process has this worker id."""


class DatasetExists(CoordinatorError):
    """The dataset is registered with other contents."""


class StaleIncarnation(CoordinatorError):
    """This process was replaced or declared dead; it must register again."""


class StaleGeneration(CoordinatorError):
    """The membership has moved on since the caller last looked."""


class ShardNotLeased(CoordinatorError):
    """The worker does not own this shard."""


class EpochMismatch(CoordinatorError):
    """The dataset is in another epoch."""


class BarrierBroken(CoordinatorError):
    """The barrier cannot complete; everybody who waited gets this at once."""


class BarrierMismatch(CoordinatorError):
    """Members named different sets for the same barrier."""


class CheckpointMismatch(CoordinatorError):
    """Ranks disagree on what one checkpoint is."""


class Unauthenticated(CoordinatorError):
    """A token is needed, or the one that was sent is not known."""


class PermissionRefused(CoordinatorError):
    """The token's role does not suffice for this call."""


class CoordinatorUnavailable(CoordinatorError):
    """No coordinator answered in time."""


class NotLeader(CoordinatorUnavailable):
    """This coordinator stands by, or has lost its leadership."""


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
    """A run has ended without what it was to give."""


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
    """The coordinator's durable state failed."""


class JournalLocked(JournalError):
    """Another coordinator has this state open."""


class JournalDamaged(JournalError):
    """The state cannot be read back."""


class JournalWriteFailed(JournalError):
    """The state cannot be written."""


class JournalFenced(JournalError):
    """Another coordinator has become the leader; nothing was written."""


def _subclasses(root: type[StrataError]) -> dict[str, type[StrataError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _subclasses(child)
    return found


BY_KIND: dict[str, type[StrataError]] = _subclasses(StrataError)
"""Error classes by the name that travels over the wire."""
