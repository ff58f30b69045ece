"""Events: they survive a round trip to the disk and describe themselves in words."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coordinator.state import events as e
from strata.errors import JournalDamaged

SPEC = e.CheckpointSpec(checkpoint_id="c", step=7, epoch=1, path="/c", type="INCREMENTAL")
PLAIN: dict[e.Event, str] = {
    e.WorkerJoined(
        job_id="j", worker_id="w0", incarnation=3, instance_id="p", hostname="node-1"
    ): "w0 joined on node-1 (incarnation 3)",
    e.WorkerLeft(job_id="j", worker_id="w0", incarnation=3, cause="lease", reason="silent"): "w0 left: silent",
    e.GenerationStarted(
        job_id="j", generation=4, num_workers=2, reason="w0 left"
    ): "generation 4 with 2 workers: w0 left",
    e.DatasetRegistered(
        job_id="j", dataset=e.DatasetSpec(dataset_id="d", total_samples=25, shard_size=10, shuffle=True, seed=9)
    ): "dataset d registered: 3 shards, shuffled by seed 9",
    e.ShardsAssigned(
        job_id="j", dataset_id="d", generation=4, num_workers=3, num_moved=2, moves=b"\x00\xff"
    ): "2 shards of d moved, assigned to 3 workers",
    e.ShardsAssigned(
        job_id="j", dataset_id="d", generation=5, num_workers=0, num_moved=2, moves=b""
    ): "2 shards of d wait for a worker",
    e.ShardsDone(
        job_id="j", dataset_id="d", epoch=1, worker_id="w0", indices=(1, 2, 3, 4, 5, 6)
    ): "w0 finished 6 shards of d in epoch 1: 1, 2, 3, 4, 5 …",
    e.EpochAdvanced(
        job_id="j", dataset_id="d", epoch=2, num_done=9, num_shards=10
    ): "d entered epoch 2; 9 of 10 shards were done",
    e.BarrierReleased(
        job_id="j", generation=4, barrier_id="sync", step=7, num_members=2, named="00ff"
    ): "barrier sync@7 released 2 workers of generation 4",
    e.CheckpointAborted(
        job_id="j", checkpoint_id="c", num_acked=1, reason="w0 left"
    ): "checkpoint c aborted after 1 acks: w0 left",
    e.CommandsAcked(job_id="j", worker_id="w0", command_id=5): "w0 acknowledged its commands up to 5",
    e.NumbersSkipped(job_id="j", generation=1_000_003, incarnation=1_000_007): (
        "the end of the journal was lost, so numbering continues after generation 1000003"
    ),
    e.JobDropped(job_id="j", generation=5, incarnation=9, command_id=2, num_workers=3, reason="a mistake"): (
        "the job was dropped while it had 3 workers: a mistake"
    ),
}
# These contain maps, which have no hash.
WITH_MAPS: list[tuple[e.Event, str]] = [
    (
        e.CheckpointAcked(
            job_id="j",
            generation=4,
            worker_id="w0",
            checkpoint=SPEC,
            ack=e.RankAck(size_bytes=12, hashes={"f": "h"}, metadata={"k": "v"}, data_cursor=b"\x00\x01"),
        ),
        "w0 wrote its 12 bytes of checkpoint c",
    ),
    (
        e.CheckpointCommitted(
            job_id="j",
            record=e.CheckpointRecord(
                checkpoint=SPEC, generation=4, num_ranks=2, size_bytes=24, data_cursor=b"\xfe", committed_at_s=1.5
            ),
        ),
        "checkpoint c (INCREMENTAL, step 7, epoch 1) committed by 2 ranks at /c",
    ),
    (
        e.CommandSent(
            job_id="j",
            command=e.CommandRecord(command_id=5, name="STOP", reason="night", args={"a": "b"}),
            worker_ids=tuple(f"w{i}" for i in range(6)),
            request_id="r",
        ),
        "STOP sent to 6 workers (w0, w1, w2, w3, w4 …): night",
    ),
]
EXAMPLES = [*PLAIN.items(), *WITH_MAPS]


def test_every_kind_of_event_has_an_example() -> None:
    assert {type(event) for event, _ in EXAMPLES} == set(get_args(e.Event))


@pytest.mark.parametrize(("event", "description"), EXAMPLES, ids=[description for _, description in EXAMPLES])
def test_an_event_round_trips_and_describes_itself(event: e.Event, description: str) -> None:
    again = e.decode(e.encode(event))
    assert again == event
    assert type(again) is type(event)
    assert again.words() == description


def test_an_event_of_an_unknown_kind_is_damage() -> None:
    with pytest.raises(JournalDamaged, match="newer version"):
        e.decode(b'{"kind":"WorkerPromoted","job_id":"j"}')


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"null", b'{"kind":"WorkerLeft"}', b"\xff\xfe"])
def test_invalid_bytes_are_reported_as_a_damaged_event(payload: bytes) -> None:
    with pytest.raises(JournalDamaged):
        e.decode(payload)


@pytest.mark.parametrize("payload", [b"", b"{}", b"[{}]", b"\x00"])
def test_invalid_bytes_are_reported_as_a_damaged_snapshot(payload: bytes) -> None:
    with pytest.raises(JournalDamaged, match="snapshot"):
        e.decode_snapshot(payload)


def test_an_event_with_a_field_of_a_newer_version_is_still_understood() -> None:
    event = e.decode(b'{"kind":"CommandsAcked","job_id":"j","worker_id":"w0","command_id":5,"mood":"fine"}')
    assert event == e.CommandsAcked(job_id="j", worker_id="w0", command_id=5)


@given(st.lists(st.integers(-(2**62), 2**62 - 1), max_size=50))
def test_packed_integers_round_trip(values: list[int]) -> None:
    packed = e.pack_ints(np.array(values, dtype=np.int64))
    assert e.unpack_ints(packed).tolist() == values


def test_10000_shards_that_move_to_one_worker_take_less_than_1_kb() -> None:
    moves = np.concatenate([np.arange(10_000), np.full(10_000, 77)])
    assert len(e.pack_ints(moves)) < 1_000
