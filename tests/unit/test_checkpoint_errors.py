"""Errors of checkpoints and stores keep their fields when they are pickled or sent by the saver process."""

from __future__ import annotations

import copy
import pickle

import pytest

from strata import errors
from strata.checkpoint.group.commit import translating_cancel
from strata.checkpoint.saver import protocol
from strata.errors import (
    CheckpointAborted,
    CheckpointCorrupt,
    CheckpointError,
    StorageError,
    StorageFull,
    StrataError,
    TransferCancelled,
)
from strata.storage import Watch

CORRUPT = CheckpointCorrupt(
    "tensor 'w' in rank-00000.safetensors: the hash is b, expected a",
    file="rank-00000.safetensors",
    tensor="w",
    expected="a",
    found="b",
)


def fields_of(error: BaseException) -> tuple[object, ...]:
    assert isinstance(error, CheckpointCorrupt)
    return error.message, error.file, error.tensor, error.expected, error.found


def test_a_corrupt_checkpoint_keeps_its_fields_when_it_is_pickled_or_copied() -> None:
    assert fields_of(pickle.loads(pickle.dumps(CORRUPT))) == fields_of(CORRUPT)
    assert fields_of(copy.copy(CORRUPT)) == fields_of(CORRUPT)


def test_a_corrupt_checkpoint_keeps_its_fields_in_a_message_of_the_saver() -> None:
    received = protocol.decode_from_saver(protocol.encode(protocol.encode_error(CORRUPT)))
    assert isinstance(received, protocol.Failed)
    assert fields_of(protocol.decode_error(received)) == fields_of(CORRUPT)


@pytest.mark.parametrize(
    "error",
    [
        StorageFull("/data: no space left", field="storage_path"),
        CheckpointAborted("rank 1 failed", missing={"1": "disk full"}),
        TransferCancelled("the transfer was cancelled"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_strata_error_survives_a_message_of_the_saver(error: StrataError) -> None:
    received = protocol.decode_error(protocol.encode_error(error))
    assert isinstance(received, StrataError)
    assert (type(received), received.message, received.field, received.missing) == (
        type(error),
        error.message,
        error.field,
        error.missing,
    )


def test_an_unknown_error_of_the_saver_becomes_a_storage_error() -> None:
    received = protocol.decode_error(protocol.encode_error(ZeroDivisionError("by nothing")))
    assert type(received) is StorageError
    assert str(received) == "ZeroDivisionError: by nothing"


@pytest.mark.parametrize("kind", sorted(errors.BY_KIND))
def test_every_kind_can_be_rebuilt_from_a_message_alone(kind: str) -> None:
    assert str(errors.BY_KIND[kind]("what happened")) == "what happened"


def test_a_cancelled_transfer_is_a_storage_error_that_a_save_translates() -> None:
    watch = Watch()
    watch.cancel()
    with pytest.raises(TransferCancelled) as cancelled:
        watch.check()
    assert isinstance(cancelled.value, StorageError)
    assert not isinstance(cancelled.value, CheckpointError)
    with pytest.raises(CheckpointAborted, match="checkpoint step-1 was cancelled"), translating_cancel("step-1"):
        watch.check()
