"""The wire protocol is independent of languages: workers written in Node.js against the .proto files alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks
from servers import command_line

from strata import CoordinatorClient
from strata.coordinator.state.views import WorkerInfo

NODE_DIR = ROOT / "tests" / "integration" / "node"
JOBS = {"unary": "node-unary", "framed": "node-session"}
NUM_SHARDS = 100


@pytest.fixture(scope="module")
def node(requires_service: Callable[..., Path]) -> Path:
    requires_service(NODE_DIR / "node_modules" / "@grpc" / "grpc-js")
    return requires_service("node")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator with 30 shards per page."""
    directory = tmp_path_factory.mktemp("coordinator")
    (directory / "small-pages.yaml").write_text("limits: {max_shards_per_reply: 30}\n")
    flags = ("--listen=127.0.0.1:0", "--http=off", "--state=memory", "--config=small-pages.yaml", "--json")
    with command_line(directory, *flags) as coordinator:
        yield coordinator.addresses()["grpc"]
        coordinator.terminate()
        assert coordinator.ended() == (0, "")


@contextlib.contextmanager
def driving(node: Path, address: str) -> Iterator[dict[str, Any]]:
    """Run drive.js and yield its output; its workers live until the block ends."""
    command = [node, NODE_DIR / "drive.js", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
            process.stdin.close()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def drive(node: Path, address: str) -> Iterator[dict[str, Any]]:
    """The output of drive.js, and under `live` and `left` the view of the Python client meanwhile and afterwards."""
    with CoordinatorClient(address) as client:
        with driving(node, address) as seen:
            live = {run: client.list_workers(job_id=job) for run, job in JOBS.items()}
        left = {run: client.list_workers(job_id=job) for run, job in JOBS.items()}
        yield {**seen, "live": live, "left": left, "client": client}


@pytest.fixture(params=list(JOBS))
def run(request: pytest.FixtureRequest) -> str:
    """Every promise holds for unary calls and for session frames."""
    return str(request.param)


def test_both_clients_join_and_registering_again_changes_nothing(drive: dict[str, Any], run: str) -> None:
    a, b = drive[run]["joined"]

    assert {a["rank"], b["rank"]} == {0, 1}
    assert max(a["world_size"], b["world_size"]) == 2
    assert (a["lease_s"], a["heartbeat_s"]) == (5.0, 1.0)
    assert drive[run]["joinedAgain"]["incarnation"] == a["incarnation"]


def test_heartbeats_are_visible_to_other_clients(drive: dict[str, Any], run: str) -> None:
    seen = {w["worker_id"]: w for w in drive[run]["members"]["workers"]}

    assert (seen["node-a"]["state"], seen["node-a"]["step"]) == ("WORKER_STATE_TRAINING", 7)
    assert seen["node-a"]["metrics"] == {"loss": 0.5, "lr/base": 0.01}
    assert (seen["node-b"]["state"], seen["node-b"]["step"]) == ("WORKER_STATE_LOADING_DATA", 3)
    assert {beat["num_workers"] for beat in drive[run]["beats"]} == {2}


def test_shards_are_disjoint_complete_and_come_in_pages(drive: dict[str, Any], run: str) -> None:
    shards = drive[run]["shards"]
    a, b = ({s["index"] for s in shards[name]} for name in "ab")

    assert a & b == set()
    assert a | b == set(range(NUM_SHARDS))
    assert shards["numPages"] == [2, 2]  # about 50 shards each, 30 a page
    assert sum(s["end"] - s["start"] for s in shards["a"] + shards["b"]) == 9_950


def test_acks_count_and_an_epoch_is_advanced_once(drive: dict[str, Any], run: str) -> None:
    assert drive[run]["allDone"] == {"num_done": NUM_SHARDS, "num_shards": NUM_SHARDS}
    assert drive[run]["advanced"] == [{"epoch": 1}, {"epoch": 1}]
    assert drive[run]["partDone"]["num_done"] == 3


def test_both_clients_pass_the_barrier(drive: dict[str, Any], run: str) -> None:
    assert [met["num_members"] for met in drive[run]["barrier"]] == [2, 2]


def test_a_worker_reads_its_rank_and_a_finished_job_is_dropped_once(drive: dict[str, Any], run: str) -> None:
    seen = drive[run]

    assert (seen["standing"]["rank"], seen["standing"]["world_size"]) == (0, 2)
    assert seen["standing"]["generation"] == seen["members"]["generation"]
    assert seen["dropped"] == [{"dropped": True}, {"dropped": False}]


@pytest.mark.parametrize(
    ("what", "kind", "status", "field"),
    [
        ("staleGeneration", "StaleGeneration", "FAILED_PRECONDITION", "generation"),
        ("staleIncarnation", "StaleIncarnation", "FAILED_PRECONDITION", "incarnation"),
        ("unknownWorker", "UnknownWorker", "NOT_FOUND", "worker_id"),
        ("unknownJob", "UnknownJob", "NOT_FOUND", "job_id"),
        ("unknownDataset", "UnknownDataset", "NOT_FOUND", "dataset_id"),
        ("workerExists", "WorkerExists", "ALREADY_EXISTS", "worker_id"),
        ("datasetExists", "DatasetExists", "ALREADY_EXISTS", "dataset_id"),
        ("notMine", "ShardNotLeased", "FAILED_PRECONDITION", "indices"),
        ("invalid", "InvalidArgument", "INVALID_ARGUMENT", "worker_id"),
        ("barrierBroken", "BarrierBroken", "ABORTED", "barrier_id"),
        ("jobInUse", "JobInUse", "FAILED_PRECONDITION", "job_id"),
    ],
)
def test_an_error_has_its_kind_status_and_field(
    drive: dict[str, Any], run: str, what: str, kind: str, status: str, field: str
) -> None:
    refused = drive[run]["refused"][what]

    assert (refused["kind"], refused["status"], refused["field"]) == (kind, status, field)
    assert refused["message"]


def test_a_stale_caller_gets_the_current_generation(drive: dict[str, Any], run: str) -> None:
    assert drive[run]["refused"]["staleGeneration"]["generation"] == drive[run]["members"]["generation"]
    assert drive[run]["refused"]["barrierBroken"]["generation"] == drive[run]["third"]["generation"]


def test_a_checkpoint_commits_with_the_last_rank_and_recovery_names_it(drive: dict[str, Any], run: str) -> None:
    seen = drive[run]
    checkpoint = seen["latest"]["checkpoint"]

    assert seen["noCheckpoint"]["checkpoint"] is None
    assert [(n["committed"], n["num_acked"]) for n in seen["notified"]] == [(False, 1), (True, 2)]
    assert (checkpoint["checkpoint_id"], checkpoint["step"], checkpoint["size_bytes"]) == ("step-7", 7, 2_000)
    assert bytes(checkpoint["data_cursor"]["data"]) == b"\x00\xff\x01"
    assert seen["recovery"]["checkpoint"] == checkpoint
    assert (seen["recovery"]["rank"], seen["recovery"]["world_size"]) == (0, 2)
    assert seen["recovery"]["next_offset"] == 30


def test_a_stop_command_arrives_once_and_ends_when_acknowledged(drive: dict[str, Any], run: str) -> None:
    (command,) = drive[run]["commands"]

    assert (command["kind"], command["reason"]) == ("COMMAND_KIND_STOP", "enough")
    assert [sent["command_id"] for sent in drive[run]["sent"]] == [command["command_id"]] * 2  # same request_id
    assert drive[run]["commandsAfterAck"] == []


def test_a_session_receives_commands_and_generations_as_notices(drive: dict[str, Any]) -> None:
    seen = drive["framed"]

    assert seen["commandNotice"]["command_queued"]["worker_id"] == "node-a"
    assert seen["commandNotice"]["command_queued"]["command"] == seen["commands"][0]
    changed = seen["generationNotice"]["generation_changed"]
    assert (changed["generation"], changed["num_workers"]) == (seen["third"]["generation"], 3)
    assert changed["reason"].startswith("node-c joined")


def test_each_call_of_a_frame_gets_its_own_answer(drive: dict[str, Any], run: str) -> None:
    beat, members, refused, checkpoint, other_beat = drive[run]["mixed"]

    assert beat["generation"] == other_beat["generation"] == members["generation"]
    assert refused["kind"] == "UnknownWorker"
    assert checkpoint == {"checkpoint": None}
    assert drive["frames"]["maxCallsPerFrame"] == 5
    assert drive["frames"]["server"].startswith("strata ")


def test_the_python_client_sees_the_same_members(drive: dict[str, Any], run: str) -> None:
    membership = drive["live"][run]
    by_id: dict[str, WorkerInfo] = {w.worker_id: w for w in membership.workers}
    theirs = {w["worker_id"]: w for w in drive[run]["members"]["workers"]}

    assert membership.generation == drive[run]["thirdLeft"]["generation"]
    assert by_id.keys() == theirs.keys() == {"node-a", "node-b"}
    for worker_id, worker in by_id.items():
        assert (worker.rank, str(worker.incarnation)) == (theirs[worker_id]["rank"], theirs[worker_id]["incarnation"])
        assert f"WORKER_STATE_{worker.state}" == theirs[worker_id]["state"]
        assert worker.metrics == theirs[worker_id]["metrics"]
        assert not worker.suspect


def test_the_python_client_sees_the_same_data_and_checkpoint(drive: dict[str, Any], run: str) -> None:
    client: CoordinatorClient = drive["client"]
    (dataset,) = client.list_datasets(job_id=JOBS[run])
    record = client.latest_checkpoint(job_id=JOBS[run])

    assert (dataset.dataset_id, dataset.epoch, dataset.num_done) == ("images", 1, 3)
    assert record is not None
    assert record.checkpoint.path == "checkpoints/step-7"
    assert record.data_cursor == b"\x00\xff\x01"


def test_no_worker_is_left_after_both_deregister(drive: dict[str, Any], run: str) -> None:
    assert drive["left"][run].workers == []
    assert "left: drive.js is done" in drive["left"][run].reason


def test_the_node_example_of_the_documentation_runs(node: Path, address: str, tmp_path: Path) -> None:
    (example,) = [b for b in blocks(ROOT / "docs" / "wire-protocol.md") if b.info == "js"]
    script = tmp_path / "worker.js"
    script.write_text(example.text.replace("localhost:50051", address))
    shown = subprocess.run(
        [node, script],
        cwd=ROOT,
        env={**os.environ, "NODE_PATH": str(NODE_DIR / "node_modules")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "all 10 shards done" in shown.stdout
