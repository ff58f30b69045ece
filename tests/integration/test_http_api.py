"""The HTTP API of a real coordinator: its answers about real calls, its permissions and its errors."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import (
    CALM,
    DEADLINE_S,
    EAGER_CLIENT,
    STRATA,
    STRICT,
    CoordinatorProcess,
    Nursery,
    command_line,
    free_port,
    until,
)

from strata.cli.exit_codes import ExitCode
from strata.coordinator.client import CoordinatorClient
from strata.transport.certificates import write_set

READER, WORKER = "reader-token-0123456789", "worker-token-0123456789"
NUM_SHARDS = 40
LISTS = ("jobs", "workers", "datasets", "checkpoints", "barriers")


def start(nursery: Nursery, directory: Path, **settings: Any) -> CoordinatorProcess:
    limits = {"max_http_requests_per_s": 100_000}
    process = CoordinatorProcess(
        nursery, directory, **{"http": f"127.0.0.1:{free_port()}", "lease": CALM, "limits": limits, **settings}
    )
    process.start()
    return process


def get(
    process: CoordinatorProcess,
    path: str,
    *,
    token: str = "",
    context: ssl.SSLContext | None = None,
    **query: Any,
) -> tuple[int, Any]:
    """Return the status and the answer, parsed if it is JSON."""
    url = f"{'https' if context else 'http'}://{process.settings['http']}{path}?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S, context=context) as response:
            body = response.read()
            is_json = response.headers["content-type"] == "application/json"
            return response.status, json.loads(body) if is_json else body.decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def items(process: CoordinatorProcess, path: str, **query: Any) -> list[dict[str, Any]]:
    code, answer = get(process, f"/api/{path}", **query)
    assert code == 200, answer
    return answer["items"]


def metric(process: CoordinatorProcess, name: str, **labels: str) -> float:
    """Return the value of a metric; 0 if it has not been counted yet."""
    families = text_string_to_metric_families(get(process, "/metrics")[1])
    return sum(s.value for f in families for s in f.samples if s.name == name and s.labels == labels)


def strata(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160"}
    return subprocess.run(
        [STRATA, *args], env={**os.environ, **plain, **environment}, capture_output=True, text=True, check=False
    )


def do_something(client: CoordinatorClient) -> None:
    """3 registrations, a dataset, 4 acks of 2 shards, a barrier of 3, a checkpoint, half a checkpoint, 1 error."""
    workers = [client.register_worker(f"w{i}", job_id="resnet") for i in range(3)]
    client.register_dataset("images", job_id="resnet", total_samples=400, shard_size=10, shuffle=True, seed=7)
    for worker in workers:
        worker.refresh()
    for _ in range(4):
        workers[0].ack(workers[0].shards("images")[:2])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda worker: worker.barrier("sync", step=1), workers))
    for worker in workers:
        worker.notify_checkpoint("c1", step=1, epoch=0, path="/c1", size_bytes=5, data_cursor=b"\x00\xff")
    workers[1].notify_checkpoint("c2", step=2, epoch=0, path="/c2")
    workers[2].report(state="TRAINING", step=5, loss=0.5, broken=float("nan"))
    workers[2].heartbeat()
    client.register_dataset("text", job_id="bert", total_samples=10, shard_size=10)
    with pytest.raises(Exception, match="does not exist"):
        client.list_datasets(job_id="nowhere")


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """A coordinator after all calls of `do_something`; its session stays open."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))  # its own: the shared one ends its children after each test
    process = start(nursery, tmp_path_factory.mktemp("busy"))
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        do_something(client)
        yield process
    nursery.close()


# -- answers -------------------------------------------------------------------------------------------------------


def test_status_summarises_the_coordinator(busy: CoordinatorProcess) -> None:
    code, status = get(busy, "/api/status")

    assert (code, status["num_jobs"], status["num_workers"], status["num_sessions"]) == (200, 2, 3, 1)
    assert status["journal_bytes"] > 0
    assert (status["journal_damage"], status["journal_failure"]) == (None, None)
    assert [job["job_id"] for job in status["jobs"]] == ["resnet", "bert"]


def test_jobs_are_listed_with_the_reason_of_their_generation(busy: CoordinatorProcess) -> None:
    resnet, bert = items(busy, "jobs")

    assert (resnet["num_workers"], resnet["num_checkpoints"], resnet["checkpoint_id"]) == (3, 1, "c1")
    assert "w2 joined" in resnet["reason"]
    assert (bert["job_id"], bert["num_workers"], bert["checkpoint_step"]) == ("bert", 0, None)


def test_workers_are_listed_by_rank_and_can_be_filtered(busy: CoordinatorProcess) -> None:
    assert [(w["rank"], w["worker_id"]) for w in items(busy, "workers")] == [(0, "w0"), (1, "w1"), (2, "w2")]

    (training,) = items(busy, "workers", state="TRAINING")
    assert (training["worker_id"], training["step"], training["capacity"]) == ("w2", 5, 1.0)
    assert training["metrics"] == {"loss": 0.5, "broken": None}
    assert [w["worker_id"] for w in items(busy, "workers", job="resnet", worker="w1")] == ["w1"]
    assert items(busy, "workers", job="bert") == []
    assert items(busy, "workers", suspect="true") == []


def test_datasets_are_listed_with_their_progress(busy: CoordinatorProcess) -> None:
    (images,) = items(busy, "datasets", job="resnet")

    assert (images["num_done"], images["num_shards"], images["complete"]) == (8, NUM_SHARDS, False)
    assert (images["shuffle"], images["seed"], images["total_samples"]) == (True, 7, 400)
    assert items(busy, "datasets", complete="true") == []
    assert len(items(busy, "datasets")) == 2


def test_checkpoints_are_listed_without_their_cursors(busy: CoordinatorProcess) -> None:
    committed, attempt = items(busy, "checkpoints")

    assert (committed["state"], committed["num_ranks"], committed["size_bytes"]) == ("committed", 3, 15)
    assert "data_cursor" not in committed
    assert (attempt["checkpoint_id"], attempt["num_acked"], attempt["num_ranks"]) == ("c2", 1, 3)
    assert attempt["committed_at_s"] is None
    assert items(busy, "checkpoints", state="open") == [attempt]
    assert items(busy, "checkpoints", kind="MODEL_ONLY") == []


def test_a_barrier_is_listed_while_it_waits_and_after_its_release(nursery: Nursery, tmp_path: Path) -> None:
    process = start(nursery, tmp_path)
    with (
        CoordinatorClient(process.address, config=EAGER_CLIENT) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        first, second = (client.register_worker(worker_id) for worker_id in ("a", "b"))
        first.refresh()
        waiting = pool.submit(first.barrier, "sync", step=3)
        until(lambda: bool(items(process, "barriers")), "the barrier waits")
        (barrier,) = items(process, "barriers", state="open")
        assert (barrier["num_arrived"], barrier["num_members"], barrier["missing"]) == (1, 2, ["b"])
        assert barrier["waited_s"] >= 0
        assert 0 < barrier["remaining_s"] <= 300
        assert metric(process, "strata_barriers_open") == 1

        second.barrier("sync", step=3)
        waiting.result(DEADLINE_S)
        (barrier,) = items(process, "barriers")
        assert (barrier["state"], barrier["num_arrived"], barrier["remaining_s"]) == ("released", 2, None)


def test_events_are_listed_with_their_reason_and_worker(busy: CoordinatorProcess) -> None:
    events = items(busy, "events", job="resnet", limit=1000)

    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})
    assert events[0]["words"].startswith("w0 joined on ")
    assert events[0]["words"].endswith(" (incarnation 1)")
    assert all(datetime.fromisoformat(event["at"]).tzinfo == UTC for event in events)
    generations = items(busy, "events", job="resnet", kind="GenerationStarted")
    assert [event["generation"] for event in generations] == list(range(1, len(generations) + 1))
    assert all(event["reason"] and event["reason"] in event["words"] for event in generations)
    done = items(busy, "events", worker="w0", kind="ShardsDone")
    assert len(done) == 4
    assert {event["worker_id"] for event in done} == {"w0"}


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LISTS)
def test_pages_of_one_item_make_up_the_whole_list(busy: CoordinatorProcess, path: str) -> None:
    def names(answer: dict[str, Any]) -> list[Any]:
        return [
            [item.get(key) for key in ("job_id", "worker_id", "dataset_id", "checkpoint_id", "barrier_id")]
            for item in answer["items"]
        ]

    _, whole = get(busy, f"/api/{path}")
    pieces, offset = [], 0
    while offset is not None:
        _, answer = get(busy, f"/api/{path}", limit=1, offset=offset)
        assert answer["total"] == whole["total"]
        pieces += names(answer)
        offset = answer["next_offset"]

    assert pieces == names(whole)
    assert len(pieces) == whole["total"] >= 1
    assert whole["next_offset"] is None
    assert get(busy, f"/api/{path}", offset=10**6)[1]["items"] == []


def test_events_are_paged_by_number_even_with_a_filter(busy: CoordinatorProcess) -> None:
    for query in ({}, {"kind": "WorkerJoined"}):
        whole = items(busy, "events", limit=1000, **query)
        pieces, after, more = [], 0, True
        while more:
            _, answer = get(busy, "/api/events", limit=2, after=after, **query)
            assert len(answer["items"]) <= 2
            pieces += answer["items"]
            after, more = answer["next_after"], answer["more"]
        assert pieces == whole
        assert len(whole) >= 3


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "query", "code", "field"),
    [
        *((f"/api/{path}", {"job": "nowhere"}, 404, "job_id") for path in (*LISTS, "events")),
        ("/api/jobs", {"job": "no way"}, 422, "job_id"),
        ("/api/jobs", {"limit": 1001}, 422, "limit"),
        ("/api/jobs", {"limit": 0}, 422, "limit"),
        ("/api/jobs", {"offset": -1}, 422, "offset"),
        ("/api/workers", {"state": "SLEEPING"}, 422, "state"),
        ("/api/events", {"kind": "Nonsense"}, 422, "kind"),
        ("/api/events", {"after": 2**70}, 422, "after"),
        ("/api/nothing", {}, 404, ""),
    ],
)
def test_a_refusal_has_one_shape_and_names_the_parameter(
    busy: CoordinatorProcess, path: str, query: dict[str, Any], code: int, field: str
) -> None:
    found, answer = get(busy, path, **query)

    assert (found, answer["error"]["field"]) == (code, field)
    assert len(answer["error"]["message"]) > 10


def test_only_health_is_available_without_a_token(nursery: Nursery, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"reader {READER}\nworker {WORKER}\n")
    process = start(nursery, tmp_path, security={"tokens": str(tokens)})
    guarded = [f"/api/{path}" for path in ("status", *LISTS, "events")] + ["/metrics"]

    assert get(process, "/api/health") == (200, {"status": "ok"})
    for path in guarded:
        code, answer = get(process, path)
        assert (code, answer["error"]["kind"]) == (401, "Unauthenticated")
        assert get(process, path, token="a-stranger's-token-0123")[0] == 401
        assert get(process, path, token=READER)[0] == 200
    assert get(process, "/api/jobs", token=WORKER)[0] == 200
    url = f"http://{process.settings['http']}"
    assert strata("events", "--http", url).returncode == ExitCode.FAILED
    assert strata("events", "--http", url, STRATA_TOKEN=READER).returncode == ExitCode.OK


def test_a_certificate_enables_https_and_an_authority_requires_client_certificates(
    nursery: Nursery, tmp_path: Path
) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], now=datetime.now(UTC), days=1)
    security = {name: str(tmp_path / file) for name, file in (("certificate", "server.crt"), ("key", "server.key"))}
    bare = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    known = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    known.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")

    process = start(nursery, tmp_path, security=security)
    assert get(process, "/api/health", context=bare) == (200, {"status": "ok"})
    with pytest.raises(OSError, match=r"."):
        get(process, "/api/health")

    strict = start(nursery, tmp_path, state="memory", security={**security, "client_ca": str(tmp_path / "ca.crt")})
    assert get(strict, "/api/health", context=known) == (200, {"status": "ok"})
    with pytest.raises(OSError, match=r"."):
        get(strict, "/api/health", context=bare)
    trusted = {"STRATA_TLS_CA": "ca.crt", "STRATA_TLS_CERT": "client.crt", "STRATA_TLS_KEY": "client.key"}
    environment = {name: str(tmp_path / file) for name, file in trusted.items()}
    result = strata("events", "--http", f"https://{strict.settings['http']}", **environment)
    assert (result.returncode, result.stdout.strip()) == (0, "no events yet")


# -- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_count_exactly_what_was_done(busy: CoordinatorProcess) -> None:
    def num(method: str, status: str = "OK") -> float:
        return metric(busy, "strata_requests_total", method=method, status=status)

    assert [num("RegisterWorker"), num("RegisterDataset"), num("AckShards")] == [3, 2, 4]
    assert [num("WaitBarrier"), num("NotifyCheckpoint"), num("ListDatasets", "NOT_FOUND")] == [3, 4, 1]
    assert metric(busy, "strata_request_seconds_count", method="AckShards") == 4
    assert metric(busy, "strata_request_seconds_sum", method="AckShards") > 0
    assert metric(busy, "strata_shards_done_total") == 8
    assert metric(busy, "strata_workers_joined_total") == 3
    assert metric(busy, "strata_checkpoints_committed_total") == 1
    assert metric(busy, "strata_barrier_latency_seconds_count") == 1
    assert metric(busy, "strata_barrier_latency_seconds_sum") > 0
    assert metric(busy, "strata_sessions") == 1
    assert metric(busy, "strata_jobs") == 2
    assert metric(busy, "strata_workers", job="resnet", state="TRAINING") == 1
    assert metric(busy, "strata_shards_moved_total") == NUM_SHARDS  # those of bert wait for a worker


def test_metrics_agree_with_the_journal_and_with_one_another(busy: CoordinatorProcess) -> None:
    events = items(busy, "events", limit=1000)

    assert metric(busy, "strata_journal_commit_events_sum") == len(events)
    started = [event for event in events if event["kind"] == "GenerationStarted"]
    assert metric(busy, "strata_generation_changes_total") == len(started)
    assert metric(busy, "strata_generation", job="resnet") == started[-1]["generation"]
    assert metric(busy, "strata_journal_commit_seconds_count") == metric(busy, "strata_journal_commit_events_count")
    assert metric(busy, "strata_frame_bytes_count", direction="in") > 3
    assert metric(busy, "strata_frame_bytes_sum", direction="out") > 100
    assert metric(busy, "strata_journal_size_bytes") > 0
    assert metric(busy, "strata_journal_commit_failures_total") == metric(busy, "strata_refusing") == 0


def test_heartbeats_show_as_a_rate_and_a_killed_worker_as_an_expiry(nursery: Nursery, tmp_path: Path) -> None:
    process = start(nursery, tmp_path, lease=STRICT)
    victim = nursery.fork("children:workers", address=process.address, worker_ids=["victim"])
    victim.receive()
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        survivor = client.register_worker("survivor")
        until(lambda: metric(process, "strata_coordinator_rps") > 1, "two workers at 5 beats a second make a rate")
        victim.kill()
        until(lambda: metric(process, "strata_lease_expiries_total", cause="connection") == 1, "the death is counted")
        survivor.refresh()

        assert metric(process, "strata_workers_left_total", cause="connection") == 1
        assert metric(process, "strata_lease_expiries_total", cause="lease") == 0
        result = strata("events", "--job", "default", "--http", f"http://{process.settings['http']}")
        story = result.stdout.splitlines()
        (left,) = [place for place, line in enumerate(story) if line.split(maxsplit=4)[4].startswith("victim left")]
        assert "with 1 worker: victim left: connection lost and not restored within 0.2 s" in story[left + 1]


# -- the command line ----------------------------------------------------------------------------------------------


def test_the_api_and_the_state_list_the_same_events(busy: CoordinatorProcess) -> None:
    url = f"http://{busy.settings['http']}"
    over_http = strata("events", "--job", "resnet", "--http", url, "--json")
    from_state = strata("events", "--job", "resnet", "--state", str(busy.state), "--json")

    assert over_http.returncode == 0, over_http.stderr
    assert over_http.stdout == from_state.stdout
    lines = [json.loads(line) for line in over_http.stdout.splitlines()]
    assert lines == items(busy, "events", job="resnet", limit=1000)


def test_events_can_be_filtered_and_errors_come_from_the_coordinator(busy: CoordinatorProcess) -> None:
    url = f"http://{busy.settings['http']}"
    joined = strata("events", "--http", url, "--kind", "WorkerJoined", "--worker", "w1")
    (line,) = joined.stdout.splitlines()
    assert "w1 joined on " in line
    assert line.endswith(" (incarnation 2)")
    unknown = strata("events", "--http", url, "--job", "nowhere")
    assert "job 'nowhere' does not exist" in unknown.stderr
    assert strata("events", "--http", url, "--kind", "X").returncode == ExitCode.USAGE
    assert strata("events", "--http", f"http://127.0.0.1:{free_port()}").returncode == ExitCode.UNAVAILABLE
    assert strata("events", "--http", url, "--state", "x").returncode == ExitCode.USAGE


@pytest.mark.parametrize("form", ["text", "json"])
def test_events_are_followed_live_and_past_the_death_of_the_leader(nursery: Nursery, tmp_path: Path, form: str) -> None:
    leader = start(nursery, tmp_path)
    standby = start(nursery, tmp_path, standby=True, leadership={"poll_s": 0.02})
    urls = ",".join(f"http://{one.settings['http']}" for one in (standby, leader))
    flags = ("--http", urls, "--follow", *(["--json"] if form == "json" else []), "--kind", "DatasetRegistered")
    with CoordinatorClient(f"{leader.address},{standby.address}", config=EAGER_CLIENT) as client:
        client.register_dataset("before", total_samples=1, shard_size=1)
        with command_line(tmp_path, *flags, command="events") as process:
            assert "dataset before registered" in process.line()
            client.register_dataset("while", total_samples=1, shard_size=1)
            assert "dataset while registered" in process.line()
            leader.kill()
            assert standby.child.receive()["leads"] is True
            client.register_dataset("after", total_samples=1, shard_size=1)
            last = process.line()
            assert "dataset after registered" in last
            assert form == "text" or json.loads(last)["kind"] == "DatasetRegistered"
            process.signal(signal.SIGINT)
            assert process.ended()[0] == ExitCode.INTERRUPTED


def test_a_standby_returns_no_events_but_the_address_of_the_leader(nursery: Nursery, tmp_path: Path) -> None:
    leader = start(nursery, tmp_path)
    standby = start(nursery, tmp_path, standby=True)
    refused = strata("events", "--http", f"http://{standby.settings['http']}")
    assert refused.returncode == ExitCode.UNAVAILABLE
    assert f"the leader is at {leader.address}" in refused.stderr


def test_explain_shows_the_chain_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    shown = strata("coordinator", "--explain")
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in ("suspicion", "heartbeat", "605.1", "lease + tick", "5.1"))

    settings = tmp_path / "c.yaml"
    settings.write_text("lease: {lease_s: 8.0}\n")
    report = json.loads(strata("coordinator", "--explain", "--json", "--config", str(settings)).stdout)
    assert {link["name"]: link["seconds"] for link in report["chain"]}["lease"] == 8.0
    assert report["detection"][1]["within_s"] == pytest.approx(8.1)

    settings.write_text("lease: {lease_s: 400.0}\n")
    refused = strata("coordinator", "--explain", "--config", str(settings))
    assert refused.returncode == ExitCode.USAGE
    assert "barrier.timeout_s=300.0 does not exceed lease.lease_s=400.0" in refused.stderr


# -- rate limits and standbys --------------------------------------------------------------------------------------


def test_a_machine_above_the_rate_limit_gets_429_until_it_slows_down(nursery: Nursery, tmp_path: Path) -> None:
    process = start(nursery, tmp_path, limits={"max_http_requests_per_s": 5})
    answers = [get(process, "/api/jobs") for _ in range(20)]
    assert [code for code, _ in answers[:5]] == [200] * 5
    refused = next(answer["error"] for code, answer in answers if code == 429)
    assert refused["kind"] == "LimitExceeded"
    assert "limits.max_http_requests_per_s=5 requests per second from 127.0.0.1" in refused["message"]
    assert [get(process, "/api/health")[0] for _ in range(20)] == [200] * 20
    until(lambda: get(process, "/api/jobs")[0] == 200, "it is let in again")


def test_a_standby_returns_no_stale_data_but_the_address_of_the_leader(nursery: Nursery, tmp_path: Path) -> None:
    leader = start(nursery, tmp_path)
    standby = start(nursery, tmp_path, standby=True, leadership={"poll_s": 0.02})
    with CoordinatorClient(leader.address, config=EAGER_CLIENT) as client:
        client.register_dataset("d", job_id="resnet", total_samples=1, shard_size=1)
    for path in ("status", *LISTS, "events"):
        code, answer = get(standby, f"/api/{path}")
        assert (code, answer["error"]["kind"]) == (503, "NotLeader"), path
        assert answer["error"]["message"].endswith(f"the leader is at {leader.address}")
    code, answer = get(standby, "/api/health")
    assert (code, answer["status"]) == (503, "standby")
    assert leader.address in answer["reason"]
    assert [metric(one, name) for one in (leader, standby) for name in ("strata_leading", "strata_jobs")] == [
        1,
        1,
        0,
        0,
    ]
    leader.kill()
    assert standby.child.receive()["leads"] is True
    assert [job["job_id"] for job in items(standby, "jobs")] == ["resnet"]
    assert get(standby, "/api/health") == (200, {"status": "ok"})
    assert metric(standby, "strata_leading") == 1


def test_a_dropped_job_is_gone_but_its_history_remains(nursery: Nursery, tmp_path: Path) -> None:
    process = start(nursery, tmp_path)
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        client.register_dataset("d", job_id="old", total_samples=1, shard_size=1)
        assert client.drop_job("old", reason="it is done")
    assert get(process, "/api/jobs", job="old")[0] == 404
    assert items(process, "events", job="old")[-1]["words"] == "the job was dropped: it is done"
    assert get(process, "/api/events", job="never")[0] == 404


def test_an_invalid_token_file_is_reported_and_the_old_tokens_stay(nursery: Nursery, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"reader {READER}\n")
    process = start(nursery, tmp_path, security={"tokens": str(tokens)})

    def seen() -> tuple[str | None, bool]:
        status = get(process, "/api/status", token=READER)[1]
        return status["token_file_problem"], "strata_token_file_ok 1.0" in get(process, "/metrics", token=READER)[1]

    assert seen() == (None, True)
    tokens.write_text(f"reeder {READER} and more\n")
    problem, is_ok = seen()
    assert (problem, is_ok) == (f"{tokens}, line 1: expected ROLE TOKEN, with the role worker, reader or admin", False)
    assert READER not in problem
    tokens.write_text(f"# rotated\nreader {READER}\n")
    assert seen() == (None, True)


# -- arbitrary requests --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_schemathesis_finds_no_5xx_and_no_undocumented_answer(busy: CoordinatorProcess, tmp_path: Path) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    found = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"http://{busy.settings['http']}/openapi.json",
            *("--checks", checks, "--phases", "fuzzing", "--max-examples", "15"),
            *("--seed", "1", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-1000:]
    assert "9 selected / 9 total" in found.stdout
    assert get(busy, "/api/health") == (200, {"status": "ok"})
