"""Several ranks commit one checkpoint, all of it or nothing, whichever rank dies. The tests advance a manual clock; the
last ones kill real processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from servers import DEADLINE_S, EAGER_CLIENT, Nursery, free_port, until
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.catalog import CheckpointMetadata, of_manifest
from strata.checkpoint.format import layout, tree
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.merge import Head
from strata.checkpoint.format.part import RankPart, part_name
from strata.checkpoint.format.shards import Shard
from strata.checkpoint.group import commit
from strata.checkpoint.group.ranks import Ranks, checkpoint_id
from strata.clock import ManualClock
from strata.coordinator.client import CoordinatorClient, Worker
from strata.coordinator.config import CoordinatorConfig, LeaseConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.errors import (
    CheckpointAborted,
    CheckpointInvalid,
    ConfigError,
    CoordinatorUnavailable,
    InvalidArgument,
    StorageFull,
    StorageUnavailable,
    StrataError,
)
from strata.launch.commit import CoordinatorCommit
from strata.storage import Store, Watch
from strata.storage.local import LocalStore
from strata.storage.memory import MemoryStore

if TYPE_CHECKING:
    from nursery import Lifeline

ROWS_PER_RANK = 2


def ranks_of(size: int, *, session: str = "first start", timeout_s: float = 60.0) -> list[Ranks]:
    return [Ranks(rank=rank, size=size, session=session, timeout_s=timeout_s) for rank in range(size)]


def head_of(ranks: Ranks, step: int = 5, number: int = 0) -> Head:
    return Head(id=checkpoint_id(ranks, number, step), step=step, created_at_s=1.5, metadata={"loss": 0.5})


def write(store: Store, ranks: Ranks, head: Head) -> RankPart:
    """Write the files of a rank: a slice of a table, a replicated tensor and one of the rank."""
    rows = np.full((ROWS_PER_RANK, 3), ranks.rank, np.float32)
    shape, start = (ROWS_PER_RANK * ranks.size, 3), (ROWS_PER_RANK * ranks.rank, 0)
    state = {"table": Shard(rows, shape=shape, start=start), "bias": np.ones(4), "rng": np.array([ranks.rank])}
    flat = tree.flatten(state)
    plan = layout.plan(flat.leaves, {})
    sources = {leaf.name: leaf.source.tobytes() for leaf in flat.leaves}
    data = plan.header + b"".join(sources[place.name] for place in plan.places)
    path = f"rank-{ranks.rank:05d}.safetensors"
    store.put_large(f"{head.id}/{path}", memoryview(data))
    leaves = {leaf.name: leaf for leaf in flat.leaves}
    tensors = tuple(
        m.TensorEntry(
            name=leaves[place.name].tensor,
            dtype=place.dtype.name,
            shape=leaves[place.name].global_shape or place.shape,
            slices=(
                m.Slice(
                    file=0,
                    offset=place.offset,
                    start=leaves[place.name].start or (0,) * len(place.shape),
                    shape=place.shape,
                    hashes=(xxh3_128_hexdigest(sources[place.name]),),
                ),
            ),
        )
        for place in plan.places
    )
    own = m.DataFile(
        path=path,
        rank=ranks.rank,
        size_bytes=len(data),
        header_bytes=len(plan.header),
        header_hash=xxh3_128_hexdigest(plan.header),
    )
    return RankPart(
        checkpoint=head.id,
        rank=ranks.rank,
        files=(own,),
        tensors=tensors,
        sharded=flat.sharded,
        structure=flat.structure,
        full_bytes=len(data),
        written_bytes=len(data),
    )


def read(store: Store, manifest: m.Manifest, rank: int) -> dict[str, Any]:
    """Read the state of a rank from the files of the manifest."""

    def tensor(name: str, _kind: str) -> list[Any]:
        entry = next(entry for entry in manifest.tensors if entry.name == name)
        out = np.zeros(entry.shape, {"F32": np.float32, "F64": np.float64, "I64": np.int64}[entry.dtype])
        for part in entry.slices:
            region = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
            piece = np.empty(part.shape, out.dtype)
            store.read_into(f"{manifest.id}/{manifest.files[part.file].path}", part.offset, memoryview(piece))
            out[region] = piece
        return out.tolist()

    state: dict[str, Any] = tree.unflatten(manifest.structures[manifest.structure_of_rank[rank]], tensor)
    return state


def assert_is_whole(store: Store, manifest: m.Manifest, size: int) -> None:
    table = [[float(rank)] * 3 for rank in range(size) for _ in range(ROWS_PER_RANK)]
    for rank in range(size):
        assert read(store, manifest, rank) == {"table": table, "bias": [1.0] * 4, "rng": [rank]}


def names(store: Store, checkpoint: str) -> list[str]:
    return [listed.key.rpartition("/")[2] for listed in store.walk(checkpoint)]


class Time:
    """A clock that advances with each wait and runs planned actions on the way."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._began_s = self.clock.monotonic_s()
        self._plans: list[tuple[float, Callable[[], object]]] = []
        self.num_waits = 0

    @property
    def passed_s(self) -> float:
        return self.clock.monotonic_s() - self._began_s

    def at(self, second: float, action: Callable[[], object]) -> None:
        self._plans.append((second, action))

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.num_waits += 1
        self.clock.advance(seconds)
        due = [plan for plan in self._plans if plan[0] <= self.passed_s]
        self._plans = [plan for plan in self._plans if plan[0] > self.passed_s]
        for _, action in due:
            action()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def passing() -> Time:
    return Time()


# -- ranks and ids -------------------------------------------------------------------------------------------------


def test_all_ranks_compute_the_same_id_and_another_start_a_different_one() -> None:
    ids = {checkpoint_id(ranks, 3, 500) for ranks in ranks_of(4)}
    assert len(ids) == 1
    assert next(iter(ids)).startswith("step-000000000500-")
    assert m.is_safe_name(next(iter(ids)))
    others = [(0, 500, "first start"), (3, 501, "first start"), (3, 500, "second start")]
    for number, step, session in others:
        assert checkpoint_id(Ranks(size=4, session=session), number, step) not in ids


def test_a_single_rank_never_uses_an_id_twice_whatever_its_session() -> None:
    alone = Ranks(session="always the same")
    assert checkpoint_id(alone, 0, 5) != checkpoint_id(alone, 0, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 4, "size": 4, "session": "s"}, "rank=4 is out of range for size=4; use 0 to 3"),
        ({"rank": -1, "size": 4, "session": "s"}, "rank=-1"),
        ({"size": 0}, "size=0"),
        ({"size": 1_000_000, "session": "s"}, "1 to 100000"),
        ({"size": 2}, "from_torch"),
        ({"size": 2, "session": "s" * 2_000}, "1 to 1000 characters"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
    ],
    ids=str,
)
def test_invalid_ranks_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranks(**fields)


TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_the_environment_of_torchrun_suffices() -> None:
    ranks = Ranks.from_environment(TORCHRUN, timeout_s=5.0)
    assert ranks == Ranks(rank=2, size=4, session="job-7/1/host:29500", timeout_s=5.0)
    restarted = Ranks.from_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert restarted.session != ranks.session
    assert Ranks.from_environment({**TORCHRUN, "STRATA_SESSION": "mine"}).session == "mine"
    assert Ranks.from_environment({"RANK": "0", "WORLD_SIZE": "1"}).size == 1
    assert msgspec.json.decode(msgspec.json.encode(ranks), type=Ranks) == ranks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "has WORLD_SIZE but not RANK; .*start the script with torchrun"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' in the environment is not a number"),
        ({"TORCHELASTIC_RUN_ID": None}, "'not set'.* --rdzv-id .*STRATA_SESSION"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "'none', so the next start would have the same session"),
    ],
    ids=str,
)
def test_an_incomplete_environment_is_rejected_with_the_cure(change: dict[str, Any], message: str) -> None:
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        Ranks.from_environment(env)


TORCH_CHILD = """
import json, sys, torch
from torch import distributed
from strata.checkpoint.group.ranks import Ranks
rank, port = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(7)
distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
found = [Ranks.from_torch(timeout_s=9.0) for _ in range(2)]
print(json.dumps([[r.rank, r.size, r.session, r.timeout_s] for r in found]))
distributed.destroy_process_group()
"""


def test_torchs_process_group_agrees_on_a_session_that_no_seed_repeats() -> None:
    port = free_port()
    children = [
        subprocess.Popen([sys.executable, "-c", TORCH_CHILD, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [json.loads(child.communicate(timeout=50)[0]) for child in children]
    assert [[found[:2] for found in each] for each in outputs] == [[[0, 2]] * 2, [[1, 2]] * 2]
    sessions = [[found[2] for found in each] for each in outputs]
    assert sessions[0] == sessions[1]
    assert len({*sessions[0]}) == 2
    assert all(len(session) == 32 for session in sessions[0])
    with pytest.raises(ConfigError, match="init_process_group"):
        Ranks.from_torch()


# -- all ranks arrive ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 9])
def test_ranks_in_threads_commit_one_checkpoint(store: MemoryStore, size: int) -> None:
    group = ranks_of(size)

    def save(ranks: Ranks) -> m.Manifest:
        head = head_of(ranks)
        if ranks.size > 1:
            commit.claim(store, ranks, head.id)
        with commit.reporting_failure(store, ranks, head.id):
            part = write(store, ranks, head)
        return commit.finish(store, ranks, part, head)

    with ThreadPoolExecutor(size) as pool:
        manifests = list(pool.map(save, group))
    assert all(manifest == manifests[0] for manifest in manifests)
    assert (manifests[0].num_ranks, manifests[0].metadata) == (size, {"loss": 0.5})
    assert_is_whole(store, manifests[0], size)
    files = [f"rank-{rank:05d}.safetensors" for rank in range(size)]
    assert names(store, manifests[0].id) == ["manifest.json", *files]


def test_rank_0_waits_for_the_last_part_and_polls_ever_less_often(store: MemoryStore, passing: Time) -> None:
    leader, other = ranks_of(2, timeout_s=600.0)
    head = head_of(leader)
    passing.at(400.0, lambda: commit.put_part(store, write(store, other, head)))
    manifest = commit.finish(store, leader, write(store, leader, head), head, clock=passing.clock, wait=passing.wait)
    assert_is_whole(store, manifest, 2)
    assert 400.0 <= passing.passed_s <= 401.0
    assert passing.num_waits < 550


def test_the_other_ranks_notice_a_late_commit(store: MemoryStore, passing: Time) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    parts = [write(store, ranks, head) for ranks in (leader, other)]
    commit.put_part(store, parts[1])
    passing.at(50.0, lambda: commit.put_part(store, parts[0]))
    passing.at(109.0, lambda: commit.conclude(store, leader, head))  # a minute after the part of rank 0
    found = commit.await_verdict(store, other, head.id, clock=passing.clock, wait=passing.wait, watch=Watch())
    assert_is_whole(store, found, 2)
    assert passing.passed_s < 111


def test_one_process_may_put_the_part_and_another_conclude(store: MemoryStore) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    for ranks in (leader, other):
        commit.put_part(store, write(store, ranks, head))
    manifest = commit.conclude(store, leader, head)
    assert commit.conclude(store, other, head) == manifest


# -- a rank is missing ---------------------------------------------------------------------------------------------


def verdict_of(store: Store, ranks: Ranks, checkpoint: str, passing: Time | None = None) -> m.Manifest:
    passing = passing or Time()
    return commit.await_verdict(store, ranks, checkpoint, clock=passing.clock, wait=passing.wait, watch=Watch())


def test_a_missing_rank_is_named_and_nothing_is_committed(store: MemoryStore, passing: Time) -> None:
    group = ranks_of(4)
    head = head_of(group[0])
    for ranks in (group[1], group[3]):
        commit.put_part(store, write(store, ranks, head))
    part = write(store, group[0], head)
    with pytest.raises(CheckpointAborted, match=r"rank 2 wrote no part within 60 s") as caught:
        commit.finish(store, group[0], part, head, clock=passing.clock, wait=passing.wait)
    assert caught.value.missing == {"2": "wrote no part"}
    assert 60.0 <= passing.passed_s < 61.0
    for ranks in group[1:]:
        with pytest.raises(CheckpointAborted, match=r"was aborted: rank 0 failed: .*rank 2 wrote no part"):
            verdict_of(store, ranks, head.id)
    commit.put_part(store, write(store, group[2], head))  # late
    with pytest.raises(CheckpointAborted, match="was aborted"):
        commit.conclude(store, group[0], head)
    assert "manifest.json" not in names(store, head.id)


def test_a_rank_that_fails_reports_it_and_no_rank_waits(store: MemoryStore, passing: Time) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    with pytest.raises(StorageFull), commit.reporting_failure(store, other, head.id):
        raise StorageFull("no space is left on /data")
    part = write(store, leader, head)
    with pytest.raises(CheckpointAborted, match="rank 1 failed: StorageFull: no space is left on /data") as caught:
        commit.finish(store, leader, part, head, clock=passing.clock, wait=passing.wait)
    assert caught.value.missing == {"1": "StorageFull: no space is left on /data"}
    assert passing.num_waits == 0
    with pytest.raises(CheckpointAborted, match="rank 1 failed"):
        verdict_of(store, other, head.id, passing)
    assert passing.num_waits == 0


def test_rank_0_that_fails_before_its_part_aborts_for_all(store: MemoryStore, passing: Time) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    with pytest.raises(ZeroDivisionError), commit.reporting_failure(store, leader, head.id):
        raise ZeroDivisionError("by nothing")
    commit.put_part(store, write(store, other, head))
    with pytest.raises(CheckpointAborted, match="rank 0 failed: ZeroDivisionError: by nothing"):
        verdict_of(store, other, head.id, passing)
    assert passing.num_waits == 0


@pytest.mark.parametrize(("has_part", "patience_s"), [(False, 60.0), (True, 75.0)])
def test_the_other_ranks_abort_when_rank_0_is_dead(
    store: MemoryStore, passing: Time, has_part: bool, patience_s: float
) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    if has_part:
        commit.put_part(store, write(store, leader, head))
    part = write(store, other, head)
    with pytest.raises(CheckpointAborted, match="rank 0 did not commit within"):
        commit.finish(store, other, part, head, clock=passing.clock, wait=passing.wait)
    assert patience_s <= passing.passed_s < patience_s + 1
    assert "failed-00001.json" in names(store, head.id)
    if has_part:  # a leader that was only paused finds that it is too late
        with pytest.raises(CheckpointAborted, match=r"rank 1 failed: CheckpointAborted: .* rank 0 did not commit"):
            commit.conclude(store, leader, head)
    assert "manifest.json" not in names(store, head.id)


def test_parts_that_contradict_each_other_abort_the_save(store: MemoryStore) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    part = write(store, other, head)
    commit.put_part(store, msgspec.structs.replace(part, tensors=part.tensors[:-1], sharded=()))
    own = write(store, leader, head)
    with pytest.raises(CheckpointInvalid):
        commit.finish(store, leader, own, head)
    with pytest.raises(CheckpointAborted, match="rank 0 failed: CheckpointInvalid"):
        verdict_of(store, other, head.id)


@pytest.mark.parametrize("data", [b"{}", b"\xff"])
def test_a_malformed_part_names_its_file(store: MemoryStore, data: bytes) -> None:
    leader = ranks_of(2)[0]
    head = head_of(leader)
    store.put(f"{head.id}/{part_name(1)}", data)
    own = write(store, leader, head)
    with pytest.raises(CheckpointInvalid, match=f"{head.id}/part-00001.json"):
        commit.finish(store, leader, own, head)


def test_a_part_under_the_name_of_another_rank_is_rejected(store: MemoryStore) -> None:
    group = ranks_of(3)
    head = head_of(group[0])
    commit.put_part(store, write(store, group[1], head))
    store.put(f"{head.id}/{part_name(2)}", store.get(f"{head.id}/{part_name(1)}", max_bytes=1 << 20))
    own = write(store, group[0], head)
    with pytest.raises(CheckpointInvalid, match=r"part-00002\.json belongs to rank 1"):
        commit.finish(store, group[0], own, head)


def test_an_unreadable_reason_still_aborts(store: MemoryStore) -> None:
    leader = ranks_of(2)[0]
    head = head_of(leader)
    store.put(f"{head.id}/failed-00001.json", b"\xff{")
    own = write(store, leader, head)
    with pytest.raises(CheckpointAborted, match="rank 1 failed: the reason cannot be read"):
        commit.finish(store, leader, own, head)


def test_cancelling_ends_the_wait_and_is_reported_to_the_others(store: MemoryStore, passing: Time) -> None:
    leader, other = ranks_of(2)
    watch = Watch()
    passing.at(3.0, watch.cancel)
    for ranks, marker in ((leader, "aborted.json"), (other, "failed-00001.json")):
        head = head_of(leader, number=ranks.rank)
        part = write(store, ranks, head)
        with pytest.raises(CheckpointAborted, match="cancelled"):
            commit.finish(store, ranks, part, head, clock=passing.clock, wait=passing.wait, watch=watch)
        assert marker in names(store, head.id)
    assert passing.passed_s < 4.0


def test_files_are_deleted_only_once_rank_0_has_aborted(store: MemoryStore) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    write(store, leader, head)
    commit.put_part(store, write(store, other, head))
    before = names(store, head.id)
    commit.discard(store, other, head.id)
    assert names(store, head.id) == before
    commit.abort(store, head.id, "enough")
    commit.discard(store, other, head.id)
    assert names(store, head.id) == ["aborted.json", "part-00001.json", "rank-00000.safetensors"]


# -- names that were used before -----------------------------------------------------------------------------------


def test_two_starts_at_one_step_do_not_interfere(store: MemoryStore) -> None:
    ids = []
    for session in ("first start", "second start"):
        group = ranks_of(2, session=session)
        head = head_of(group[0])
        for ranks in reversed(group):
            commit.claim(store, ranks, head.id)
            commit.put_part(store, write(store, ranks, head))
        manifest = commit.conclude(store, group[0], head)
        assert_is_whole(store, manifest, 2)
        ids.append(manifest.id)
    assert len(set(ids)) == 2


def test_a_session_that_was_used_before_is_rejected_before_anything_is_written(store: MemoryStore) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    commit.claim(store, other, head.id)
    with pytest.raises(InvalidArgument, match="session name was used before; use a new session for every start"):
        commit.claim(store, other, head.id)
    for ranks in (other, leader):
        commit.put_part(store, write(store, ranks, head))
    with (
        pytest.raises(InvalidArgument, match=r"rank 1: .* used before"),
        commit.reporting_failure(store, other, head.id),
    ):
        commit.put_part(store, write(store, other, head))
    assert not [
        name for name in names(store, head.id) if name.startswith("failed")
    ]  # the checkpoint belongs to another start
    commit.conclude(store, leader, head)
    after = names(store, head.id)
    for ranks in (leader, other):
        with pytest.raises(InvalidArgument, match="used before"):
            commit.claim(store, ranks, head.id)
    assert names(store, head.id) == after


# -- an unreliable store -------------------------------------------------------------------------------------------


class Moody(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.refuse: Callable[[str, str], Exception | None] = lambda _call, _key: None
        """(call, key) → the error to raise, or None."""
        self.keeps = False
        """Whether a rejected put is stored nevertheless."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        error = self.refuse("put", key)
        if error is None or self.keeps:
            super().put(key, data, if_absent=if_absent)
        if error is not None:
            raise error

    def walk(self, prefix: str = "") -> Iterator[Any]:
        self._maybe("walk", prefix)
        return super().walk(prefix)

    def size(self, key: str) -> int:
        self._maybe("size", key)
        return super().size(key)

    def _maybe(self, call: str, key: str) -> None:
        error = self.refuse(call, key)
        if error is not None:
            raise error


def refusing(*calls: str) -> Callable[[str, str], Exception | None]:
    return lambda call, key: StorageUnavailable(f"{call} {key}: 503") if call in calls else None


def test_a_store_that_is_unavailable_for_a_while_is_polled_again(passing: Time) -> None:
    store = Moody()
    leader, other = ranks_of(2)
    head = head_of(leader)
    parts = [write(store, ranks, head) for ranks in (leader, other)]
    commit.put_part(store, parts[1])
    commit.put_part(store, parts[0])
    store.refuse = refusing("walk", "size")
    passing.at(20.0, lambda: setattr(store, "refuse", lambda _call, _key: None))
    manifest = commit.conclude(store, leader, head, clock=passing.clock, wait=passing.wait)
    store.refuse = refusing("walk", "size")
    passing.at(40.0, lambda: setattr(store, "refuse", lambda _call, _key: None))
    assert verdict_of(store, other, head.id, passing) == manifest


def test_an_unavailable_store_is_the_cause_of_the_abort(passing: Time) -> None:
    store = Moody()
    leader, other = ranks_of(2)
    store.refuse = refusing("size")
    with pytest.raises(CheckpointAborted, match="rank 0 did not commit") as caught:
        verdict_of(store, other, head_of(leader).id, passing)
    assert "503" in str(caught.value.__cause__)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_manifest_whose_response_was_lost_is_committed_exactly_if_it_exists(keeps: bool) -> None:
    store = Moody()
    leader, other = ranks_of(2)
    head = head_of(leader)
    for ranks in (leader, other):
        commit.put_part(store, write(store, ranks, head))
    store.keeps = keeps
    store.refuse = lambda call, key: (
        StorageUnavailable("no answer") if key.endswith("manifest.json") and call == "put" else None
    )
    if keeps:
        manifest = commit.conclude(store, leader, head)
        assert verdict_of(store, other, head.id) == manifest
    else:
        with pytest.raises(StorageUnavailable):
            commit.conclude(store, leader, head)
        assert "aborted.json" not in names(store, head.id)  # the put may still arrive, so files must stay


def test_a_failing_store_does_not_hide_why_a_rank_failed(caplog: pytest.LogCaptureFixture) -> None:
    store = Moody()
    store.refuse = refusing("put")
    with pytest.raises(ZeroDivisionError), commit.reporting_failure(store, ranks_of(2)[1], "x"):
        raise ZeroDivisionError
    assert "could not put x/failed-00001.json" in caplog.text


# -- with a coordinator --------------------------------------------------------------------------------------------


class Helper:
    """A scripted `Commit`."""

    def __init__(self, outcome: Exception | threading.Event | None = None) -> None:
        self.outcome = outcome
        self.asked: list[tuple[str, int, int, int, float]] = []
        self.notified: list[CheckpointMetadata] = []
        self.refusal: StrataError | None = None

    def all_written(self, id: str, *, step: int, rank: int, size: int, timeout_s: float) -> None:  # noqa: A002 - its name
        self.asked.append((id, step, rank, size, timeout_s))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is not None:
            assert self.outcome.wait(DEADLINE_S)

    def committed(self, metadata: CheckpointMetadata) -> None:
        self.notified.append(metadata)
        if self.refusal is not None:
            raise self.refusal


def two_parts(store: Store) -> tuple[Ranks, Ranks, Head]:
    leader, other = ranks_of(2)
    head = head_of(leader)
    for ranks in (leader, other):
        commit.put_part(store, write(store, ranks, head))
    return leader, other, head


def test_every_rank_calls_the_coordinator_once_and_notifies_it_afterwards(store: MemoryStore) -> None:
    leader, other, head = two_parts(store)
    for ranks in (leader, other):
        helper = Helper()
        manifest = commit.conclude(store, ranks, head, commit=helper)
        assert helper.asked == [(head.id, 5, ranks.rank, 2, 60.0)]
        assert helper.notified == [of_manifest(manifest, store.url)]


def test_a_death_known_to_the_coordinator_aborts_at_once_although_all_parts_exist(store: MemoryStore) -> None:
    leader, other, head = two_parts(store)
    for ranks in (other, leader):
        helper = Helper(CheckpointAborted("w1 died"))
        with pytest.raises(CheckpointAborted, match="w1 died"):
            commit.conclude(store, ranks, head, commit=helper)
        assert helper.notified == []
    assert "manifest.json" not in names(store, head.id)


def test_rank_0_commits_only_when_all_ranks_reached_the_coordinator(store: MemoryStore) -> None:
    leader, _, head = two_parts(store)
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit.conclude, store, leader, head, commit=Helper(gate))
        with pytest.raises(TimeoutError):
            committing.result(0.05)
        assert "manifest.json" not in names(store, head.id)
        gate.set()
        assert_is_whole(store, committing.result(DEADLINE_S), 2)


def test_a_reported_failure_is_noticed_while_the_coordinator_waits(store: MemoryStore) -> None:
    leader, other = ranks_of(2)
    head = head_of(leader)
    commit.put_part(store, write(store, leader, head))
    commit.fail(store, head.id, other.rank, "disk full")
    gate = threading.Event()
    with pytest.raises(CheckpointAborted, match="rank 1 failed: disk full"):
        commit.conclude(store, leader, head, commit=Helper(gate))
    gate.set()


def test_without_an_answer_from_the_coordinator_the_store_decides(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    leader, other, head = two_parts(store)
    for ranks in (leader, other):
        helper = Helper(CoordinatorUnavailable("nobody answers"))
        helper.refusal = CoordinatorUnavailable("still nobody")
        assert_is_whole(store, commit.conclude(store, ranks, head, commit=helper), 2)
    assert "the store decides alone: nobody answers" in caplog.text
    assert "could not be notified: still nobody" in caplog.text


QUIET = CoordinatorConfig(state="memory", lease=LeaseConfig(lease_s=120.0, heartbeat_s=60.0, suspicion_s=60.0))
QUICK = CoordinatorConfig(state="memory", lease=LeaseConfig(lease_s=1.5, heartbeat_s=0.2, suspicion_s=0.2, tick_s=0.02))


def join(clients: list[CoordinatorClient]) -> list[Worker]:
    workers = [client.register_worker(f"w{i}") for i, client in enumerate(clients)]
    for worker in workers:
        worker.wait_for_workers(len(clients))
    return workers


def save_with(store: Store, ranks: Ranks, coordinator: commit.Commit) -> m.Manifest:
    head = head_of(ranks)
    return commit.finish(store, ranks, write(store, ranks, head), head, commit=coordinator)


def test_the_coordinator_knows_a_checkpoint_that_all_its_workers_have_saved(store: MemoryStore) -> None:
    with EmbeddedCoordinator(QUIET) as coordinator, CoordinatorClient(coordinator.address) as client:
        workers = join([client] * 3)
        with ThreadPoolExecutor(3) as pool:
            saving = [
                pool.submit(save_with, store, ranks, CoordinatorCommit(worker))
                for ranks, worker in zip(ranks_of(3), workers, strict=True)
            ]
            manifest = saving[0].result(DEADLINE_S)
            assert [each.result(DEADLINE_S) for each in saving] == [manifest] * 3
        record = client.latest_checkpoint()
    assert record is not None
    assert (record.checkpoint.checkpoint_id, record.checkpoint.step, record.num_ranks) == (manifest.id, 5, 3)
    assert (record.size_bytes, record.model_hash) == (manifest.written_bytes, manifest.model_hash)
    assert record.metadata == {"loss": "0.5"}
    assert_is_whole(store, manifest, 3)


def test_a_worker_that_dies_before_its_part_aborts_the_checkpoint_quickly(store: MemoryStore) -> None:
    with (
        EmbeddedCoordinator(QUICK) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as ours,
        ThreadPoolExecutor(2) as pool,
    ):
        theirs = CoordinatorClient(coordinator.address, config=EAGER_CLIENT)
        theirs.connect()
        workers = join([ours, ours, theirs])
        group = ranks_of(3, timeout_s=600.0)
        began_s = time.monotonic()
        saving = [
            pool.submit(save_with, store, ranks, CoordinatorCommit(worker))
            for ranks, worker in zip(group[:2], workers[:2], strict=True)
        ]
        theirs.close()  # disconnects silently
        for each in saving:
            with pytest.raises(CheckpointAborted, match="w2"):
                each.result(DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S
        assert ours.latest_checkpoint() is None
    assert "manifest.json" not in names(store, head_of(group[0]).id)


def test_a_job_of_another_world_size_is_rejected_at_once(store: MemoryStore) -> None:
    with EmbeddedCoordinator(QUIET) as coordinator, CoordinatorClient(coordinator.address) as client:
        worker = join([client])[0]
        with pytest.raises(CheckpointAborted, match=r"has 2 ranks, but generation 1 .* has 1 workers"):
            save_with(store, ranks_of(2)[0], CoordinatorCommit(worker))


def test_metadata_too_large_for_the_coordinator_stays_in_the_manifest() -> None:
    with EmbeddedCoordinator(QUIET) as coordinator, CoordinatorClient(coordinator.address) as client:
        worker = join([client])[0]
        metadata = CheckpointMetadata(
            id="c",
            step=1,
            epoch=0,
            path="memory://c",
            size_bytes=7,
            checkpoint_type=m.CheckpointType.FULL,
            metadata={"long": "x" * 100_000},
        )
        CoordinatorCommit(worker).committed(metadata)
        record = client.latest_checkpoint()
    assert record is not None
    assert (record.size_bytes, record.metadata) == (7, {})


# -- real processes, killed ----------------------------------------------------------------------------------------


def a_rank(lifeline: Lifeline, *, directory: str, ranks: dict[str, Any]) -> None:
    """Write the files of a rank in a separate process, report it, and continue on command."""
    mine = Ranks(**ranks)
    store, head = LocalStore(directory), head_of(mine)
    commit.claim(store, mine, head.id)
    part = write(store, mine, head)
    lifeline.send(written=True)
    assert lifeline.receive() is not None
    try:
        manifest = commit.finish(store, mine, part, head)
    except CheckpointAborted as error:
        commit.discard(store, mine, head.id)
        lifeline.send(id="", error=str(error))
    else:
        lifeline.send(id=manifest.id, error="")
    lifeline.receive()


def start(nursery: Nursery, directory: Path, *, session: str, timeout_s: float) -> list[Any]:
    children = [
        nursery.fork("test_checkpoint_commit:a_rank", directory=str(directory), ranks=msgspec.to_builtins(ranks))
        for ranks in ranks_of(3, session=session, timeout_s=timeout_s)
    ]
    for child in children:
        assert child.receive() == {"written": True}
    return children


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_killed_before_its_part_leaves_the_previous_checkpoint_as_the_latest(
    nursery: Nursery, tmp_path: Path, victim: int
) -> None:
    directory = tmp_path / "checkpoints"
    first = start(nursery, directory, session="first", timeout_s=DEADLINE_S)
    for child in first:
        child.send(go=True)
    good = {child.receive()["id"] for child in first}
    assert len(good) == 1

    second = start(nursery, directory, session="second", timeout_s=0.5)
    second[victim].kill()
    survivors = [child for rank, child in enumerate(second) if rank != victim]
    for child in survivors:
        child.send(go=True)
    for child in survivors:
        message = "rank 0 did not commit" if victim == 0 else f"rank {victim} wrote no part"
        assert message in child.receive()["error"]

    store = LocalStore(directory)
    committed = [name for name in store.children() if "manifest.json" in names(store, name)]
    assert set(committed) == good
    assert_is_whole(store, m.decode(store.get(f"{committed[0]}/manifest.json", max_bytes=1 << 20), file="x"), 3)

    third = start(nursery, directory, session="third", timeout_s=DEADLINE_S)
    for child in third:
        child.send(go=True)
    assert len({child.receive()["id"] for child in third} - good) == 1
    store.close()


def test_a_process_killed_after_its_part_does_not_hinder_the_commit(nursery: Nursery, tmp_path: Path) -> None:
    children = start(nursery, tmp_path, session="s", timeout_s=DEADLINE_S)
    children[1].send(go=True)
    store, checkpoint = LocalStore(tmp_path), head_of(ranks_of(3, session="s")[0]).id
    until(lambda: part_name(1) in names(store, checkpoint), "the part exists")
    children[1].kill()
    for rank in (0, 2):
        children[rank].send(go=True)
    assert [children[rank].receive()["id"] for rank in (0, 2)] == [checkpoint, checkpoint]
    assert_is_whole(store, m.decode(store.get(f"{checkpoint}/manifest.json", max_bytes=1 << 20), file="x"), 3)
    store.close()
