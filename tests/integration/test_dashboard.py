"""The dashboard of a real coordinator: login, cross-site requests, live updates, history, hostile names."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from servers import DEADLINE_S, EAGER_CLIENT, STRATA, until

from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig, Limits, SecurityConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.extension import HttpOptions
from strata.coordinator.http import peers
from strata.coordinator.http import server as http_server
from strata.coordinator.state.server_figures import SERVER, ServerFigures
from strata.dashboard.extension import Dashboard
from strata.transport.certificates import write_set

READER, WORKER, OTHER = "reader-token-0123456789", "worker-token-0123456789", "other-token-0123456789"
CALM = LeaseConfig(lease_s=20.0, heartbeat_s=0.2, suspicion_s=5.0, tick_s=0.02)
INTERVAL_S = 0.05
CSRF = {"x-strata-request": "1"}


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Page:
    """A browser's view of one coordinator: it keeps cookies, as browsers do."""

    url: str
    cookies: dict[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname
        if self.context is not None:
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=DEADLINE_S, context=self.context)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = self.connect()
        with contextlib.closing(connection):
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            if self.cookies:
                given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, given)
            response = connection.getresponse()
            for cookie in response.headers.get_all("set-cookie") or ():
                name, _, value = cookie.partition(";")[0].partition("=")
                self.cookies[name] = value.strip('"')
            return Answer(response.status, response.headers, response.read())

    def get(self, path: str, **query: Any) -> Answer:
        return self.send("GET", f"{path}?{urlencode(query, doseq=True)}" if query else path)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.send("POST", path, body, **{"x_strata_request": "1", **headers})

    @contextlib.contextmanager
    def live(self, cursor: str = "", **headers: str) -> Iterator[Events]:
        connection = self.connect()
        with contextlib.closing(connection):
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            if self.cookies:
                given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            connection.request("GET", f"/api/live?{urlencode({'cursor': cursor})}", headers=given)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield Events(response)


class Events:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def __iter__(self) -> Iterator[tuple[str, str, Any]]:
        """Yield name, cursor and data of each event, until the stream ends."""
        event: dict[str, str] = {}
        while line := self._response.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name in ("event", "id", "data"):
                event[name] = value
            elif not name and event:
                yield event["event"], event["id"], json.loads(event["data"])
                event = {}

    def next(self, *names: str) -> tuple[str, str, Any]:
        """Return the next event of one of these names."""
        end_s = time.monotonic() + DEADLINE_S
        for event in self:
            if event[0] in names:
                return event
            assert time.monotonic() < end_s, f"no {names} within {DEADLINE_S} s"
        raise AssertionError(f"the stream ended without {names}")


@contextlib.contextmanager
def serving(
    directory: Path, *, security: SecurityConfig | None = None, name: str = "c.db", **options: Any
) -> Iterator[tuple[EmbeddedCoordinator, Page]]:
    config = CoordinatorConfig(
        state=str(directory / name),
        lease=CALM,
        limits=Limits(max_http_requests_per_s=100_000),
        security=security or SecurityConfig(),
    )
    dashboard = Dashboard(history=directory / "h.db", interval_s=INTERVAL_S, static=directory / "static")
    http_options = HttpOptions(extensions=(dashboard,), **options)
    listen = f"unix:{directory}/c.sock"
    with EmbeddedCoordinator(config, listen=listen, http="127.0.0.1:0", options=http_options) as coordinator:
        yield coordinator, Page(coordinator.http_address)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"reader {READER}\nworker {WORKER}\n")
    return path


def train(client: CoordinatorClient, job_id: str, num_workers: int, *, step: int = 5, **metrics: float) -> list[Any]:
    workers = [client.register_worker(f"w{number}", job_id=job_id) for number in range(num_workers)]
    for worker in workers:
        worker.refresh()
        worker.report(state="TRAINING", step=step, **metrics)
        worker.heartbeat()
    return workers


def overview_when(page: Page, condition: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def holds() -> bool:
        nonlocal found
        found = page.get("/api/overview").json
        return bool(condition(found))

    until(holds, "the overview shows it")
    return found


def has_loss(overview: dict[str, Any]) -> bool:
    """Whether the first job has reported its loss."""
    return "metric:loss" in overview["jobs"]["items"][0]["values"]


def loss_in(overview: dict[str, Any]) -> list[float]:
    """Return the smallest and the largest loss of the first job; nothing if not all of its three ranks report it."""
    job = overview["jobs"]["items"][0]
    found = job["values"].get("metric:loss")
    return [found["min"], found["max"]] if found and job["workers_by_state"] == {"TRAINING": 3} else []


# -- overview ----------------------------------------------------------------------------------------------------------


def test_the_overview_shows_measured_values_of_a_real_job(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        empty = page.get("/api/overview").json
        assert empty["jobs"]["items"] == []
        assert empty["health"]["line"] == "no jobs yet; strata run train.py starts one"

        workers = train(client, "resnet", 3, loss=0.5, rows_per_s=10.0)
        workers[2].report(step=7, loss=0.8)
        workers[2].heartbeat()
        found = overview_when(page, lambda seen: seen["jobs"]["items"] and loss_in(seen) == [0.5, 0.8])
        (job,) = found["jobs"]["items"]

        assert (job["job_id"], job["state"], job["num_workers"], job["step"]) == ("resnet", "training", 3, 5)
        assert job["rows_per_s"] == 30.0
        assert job["values"]["metric:loss"]["mean"] == pytest.approx(0.6)
        assert found["health"] == {
            "level": "ok",
            "line": "all 3 workers report; no checkpoint yet",
            "findings": [],
            "num_findings": 0,
        }
        for worker in workers:
            worker.notify_checkpoint("c1", step=7, epoch=0, path="/c1")
        saved = overview_when(page, lambda seen: seen["jobs"]["items"][0]["checkpoint_id"] == "c1")
        assert 0 <= saved["jobs"]["items"][0]["checkpoint_age_s"] < DEADLINE_S


def test_a_worker_whose_connection_is_lost_is_named_within_a_second(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        train(client, "resnet", 1)
        with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as other:
            lost = other.register_worker("worker-3", job_id="resnet")
            lost.heartbeat()
            overview_when(page, lambda seen: seen["num_workers"] == 2)
        found = overview_when(page, lambda seen: seen["num_suspects"] == 1)

        assert found["health"]["level"] == "warning"
        assert "worker-3 lost its connection" in found["health"]["line"]
        assert found["health"]["findings"][0]["worker_id"] == "worker-3"


# -- history -----------------------------------------------------------------------------------------------------------


def test_the_history_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        train(client, "resnet", 2, loss=0.25)
        overview_when(page, lambda seen: seen["workers_by_state"] == {"TRAINING": 2} and has_loss(seen))
        before = page.get("/api/history", job="resnet", name=["metric:loss", "nothing"]).json["series"]

    assert [len(each["t"]) > 0 for each in before] == [True, False]
    with serving(tmp_path) as (_, page):
        after = page.get("/api/history", job="resnet", name="metric:loss").json["series"][0]

        assert (after["interval_s"], set(after["mean"])) == (10.0, {0.25})
        names = [each["name"] for each in page.get("/api/series", job="resnet").json["items"]]
        assert "metric:loss" in names
        assert "workers.TRAINING" in names


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"name": "x", "since_s": 9, "until_s": 1}, "since_s"),
        ({"name": "x", "max_points": 10**9}, "max_points"),
        ({"name": "x" * 500}, "name"),
        ({"name": ["x"] * 33}, "name"),
        ({"name": "x", "since_s": "nan"}, "since_s"),
        ({}, "name"),
    ],
)
def test_an_invalid_question_about_the_history_names_its_field(
    tmp_path: Path, query: dict[str, Any], field: str
) -> None:
    with serving(tmp_path) as (_, page):
        found = page.get("/api/history", **query)

        assert (found.status, found.json["error"]["field"]) == (422, field)


# -- live updates ------------------------------------------------------------------------------------------------------


def test_a_stream_sends_what_is_new_and_resumes_after_a_lost_connection(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        start = page.get("/api/overview").json["cursor"]
        workers = train(client, "resnet", 1, loss=0.5)
        with page.live(start) as events:
            assert events.next("hello")[2]["interval_s"] == INTERVAL_S
            _, _, joined = events.next("workers")
            assert [each["worker_id"] for each in joined["changed"]] == ["w0"]
            _, cursor, points = events.next("points")
            assert points["values"].get("metric:loss", [0.5] * 3) == [0.5, 0.5, 0.5]
        # The page is away while a worker joins.
        client.register_worker("w1", job_id="resnet")
        workers[0].refresh()
        overview_when(page, lambda seen: seen["num_workers"] == 2)

        with page.live(last_event_id=cursor) as events:
            assert events.next("hello", "reset")[0] == "hello"
            missed = [events.next("workers")[2]]
            while all(each["worker_id"] != "w1" for each in missed[-1]["changed"]):
                missed.append(events.next("workers")[2])
            again = [each for data in missed for each in data["changed"] if each["worker_id"] == "w0"]
            assert all(each["state"] == "TRAINING" for each in again)  # its joining is not sent again


def test_the_journal_is_followed_live(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        page.get("/api/overview")
        with page.live() as events:
            events.next("hello")
            client.register_worker("w0", job_id="resnet")
            found: list[str] = []
            while not any(words.startswith("generation 1") for words in found):
                found += [line["words"] for line in events.next("events")[2]["items"]]

    assert found[0].startswith("w0 joined on ")
    assert len(found) == len(set(found))


@pytest.mark.parametrize("cursor", ["0000-5", "nonsense", "' OR 1=1", "-1"])
def test_a_cursor_of_another_process_asks_the_page_to_load_again(tmp_path: Path, cursor: str) -> None:
    with serving(tmp_path) as (_, page), page.live(cursor) as events:
        name, _, data = events.next("hello", "reset")

        assert name == "reset"
        assert data["reason"] == "the coordinator was restarted"


def test_a_browser_that_stops_reading_is_dropped_and_slows_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "READ_WITHIN_S", 0.5)
    monkeypatch.setattr(http_server, "SEND_BUFFER_BYTES", 4_096)
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        workers = train(client, "job", 3, **{f"{'long' * 25}{number}": 1.0 for number in range(30)})
        parts = urlsplit(page.url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            slow.settimeout(DEADLINE_S)
            slow.connect((parts.hostname, parts.port))
            slow.sendall(f"GET /api/live HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
            # Answers and steps of workers go on; the slow connection ends without being read.
            end_s = time.monotonic() + DEADLINE_S
            slowest_s, is_dropped, step = 0.0, False, 10
            while not is_dropped:
                assert time.monotonic() < end_s, "the slow reader is still connected"
                step += 1
                started_s = time.monotonic()
                workers[step % len(workers)].report(step=step)
                workers[step % len(workers)].heartbeat()
                slowest_s = max(slowest_s, time.monotonic() - started_s)
                is_dropped = has_reset(slow)

        assert slowest_s < 5.0
        assert page.get("/api/overview").status == 200


def has_reset(connection: socket.socket) -> bool:
    """Whether the other end has aborted the connection. Reads nothing."""
    time.sleep(0.02)  # a pace for the loop of the test
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def test_the_number_of_streams_is_bounded_and_a_stopped_coordinator_ends_them(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with serving(tmp_path) as (_, page):
            streams = [stack.enter_context(page.live()) for _ in range(64)]
            refused = page.get("/api/live")
            assert (refused.status, refused.json["error"]["kind"]) == (429, "LimitExceeded")
            assert page.get("/api/overview").status == 200
            started_s = time.monotonic()
        assert time.monotonic() - started_s < DEADLINE_S / 2
        names = [name for name, _, _ in streams[0]]  # until the stream ends
        assert names[0] == "hello"


# -- pages -------------------------------------------------------------------------------------------------------------


def test_the_data_of_a_job_are_its_shards_by_owner_and_the_last_move(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        workers = train(client, "resnet", 2)
        assert page.get("/api/data", job="resnet").json["shards"] is None
        client.register_dataset("done", job_id="resnet", total_samples=2, shard_size=2)
        client.register_dataset("images", job_id="resnet", total_samples=100, shard_size=10)
        for worker in workers:
            worker.refresh()
        mine = list(workers[0].shards("images"))
        workers[0].ack(mine[:1])
        first = page.get("/api/data", job="resnet", dataset="images", limit=1).json["shards"]

        assert (first["dataset"]["num_done"], first["dataset"]["num_shards"]) == (1, 10)
        assert first["owners"]["next_offset"] == 1
        (owner,) = first["owners"]["items"]
        assert (owner["worker_id"], owner["num_shards"], owner["num_done"]) == ("w0", len(mine), 1)
        assert owner["cells"] == [1] + [0] * (len(mine) - 1)
        assert (first["last_move"]["num_moved"], owner["num_gained"]) == (10, len(mine))

        workers[1].deregister("no longer needed")
        moved = page.get("/api/data", job="resnet", dataset="images").json["shards"]
        assert [each["num_shards"] for each in moved["owners"]["items"]] == [10]
        assert moved["last_move"]["num_moved"] == 10 - len(mine)
        assert "no longer needed" in moved["last_move"]["reason"]
        assert page.get("/api/data", job="resnet", dataset="unknown").status == 404
        assert page.get("/api/data", job="resnet", limit=201).status == 422


def test_parameter_servers_are_listed_with_what_they_measured(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        train(client, "resnet", 1)
        none = page.get("/api/servers", job="resnet").json
        assert (none["total"], none["servers"]["total"]) == (None, 0)

        for number, rows in ((1, 5), (0, 7)):
            server = client.register_worker(f"s{number}", job_id="resnet")
            figures = ServerFigures(rows=rows, bytes=100, evicted=0, pulls_per_s=2.0, hits=1, misses=number)
            server.note("TRAINING", 3, None, {SERVER: float(number), **figures.as_metrics()})
            server.heartbeat()
        found = page.get("/api/servers", job="resnet").json

        assert [(each["number"], each["rows"], each["hit_rate"]) for each in found["servers"]["items"]] == [
            (0, 7, 1.0),
            (1, 5, 0.5),
        ]
        total = found["total"]
        assert (total["rows"], total["bytes"], total["pulls_per_s"]) == (12, 200, 4.0)
        assert (total["pushes_per_s"], total["staleness"]) == (None, None)
        until(
            lambda: "servers.rows" in [each["name"] for each in page.get("/api/series", job="resnet").json["items"]],
            "the servers have a history",
        )


def test_the_time_and_the_lineage_of_a_job_claim_nothing_that_is_not_recorded(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        workers = train(client, "resnet", 2)
        for worker in workers:
            worker.refresh()
            worker.notify_checkpoint("c1", step=5, epoch=0, path="/c1")
        overview_when(page, lambda seen: seen["jobs"]["items"][0]["checkpoint_id"] == "c1")
        time_use = page.get("/api/time", job="resnet").json
        lineage = page.get("/api/lineage", job="resnet").json

    assert time_use["straggler"] is None
    assert time_use["no_verdict"] == "2 of 2 ranks have not measured the last 10 s yet"
    assert [each["computing"] for each in time_use["workers"]["items"]] == [[], []]
    assert lineage["is_recorded"] is False
    (line,) = lineage["checkpoints"]["items"]
    assert (line["checkpoint_id"], line["step"], line["attempt"], line["resumed_by"]) == ("c1", 5, None, [])


# -- login -------------------------------------------------------------------------------------------------------------


def test_a_login_exchanges_the_token_for_a_cookie_that_scripts_cannot_read(tmp_path: Path, tokens: Path) -> None:
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        session = page.get("/api/session").json
        assert (session["login_required"], session["role"]) == (True, None)
        for path in ("/api/overview", "/api/series", "/api/live", "/api/workers", "/metrics", "/api/history?name=x"):
            assert page.get(path).status == 401, path

        answer = page.post("/api/login", {"token": READER})
        cookie = answer.headers["set-cookie"]
        assert (answer.status, answer.json["role"]) == (200, "reader")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Path=/" in cookie
        assert READER not in cookie
        for path in ("/api/overview", "/api/series", "/api/workers", "/metrics"):
            assert page.get(path).status == 200, path
        with page.live() as events:
            assert events.next("hello")

        stolen = Page(page.url, dict(page.cookies))
        assert stolen.get("/api/overview").status == 200
        assert page.post("/api/logout").status == 204
        assert page.get("/api/overview").status == 401
        assert stolen.get("/api/overview").status == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token": OTHER}, 401),
        ({"token": ""}, 422),
        ({"token": 5}, 422),
        ({}, 422),
        ([], 422),
        (b"\xff\x00 not json", 422),
        (b"", 422),
        ({"token": "x" * 2_000}, 422),
        (b"x" * 10_000, 429),
        (b"x" * 100_000, 413),  # of any request
    ],
)
def test_a_login_without_a_valid_token_is_refused_and_repeats_nothing_of_it(
    tmp_path: Path, tokens: Path, body: Any, status: int
) -> None:
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        answer = page.post("/api/login", body)

        assert answer.status == status
        assert "set-cookie" not in answer.headers
        assert OTHER.encode() not in answer.body
        assert b"x" * 50 not in answer.body


def test_a_token_in_the_header_works_without_a_login_and_one_in_the_url_does_not(tmp_path: Path, tokens: Path) -> None:
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        assert page.send("GET", "/api/overview", authorization=f"Bearer {READER}").status == 200
        assert page.get("/api/overview", token=READER).status == 401
        assert page.get("/api/overview", access_token=READER).status == 401


def test_removing_a_token_from_the_file_ends_its_sessions_and_streams(tmp_path: Path, tokens: Path) -> None:
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        assert page.post("/api/login", {"token": READER}).status == 200
        with page.live() as events:
            events.next("hello")
            tokens.write_text(f"worker {WORKER}\n# the reader was removed\n")
            assert page.get("/api/overview").status == 401
            assert [name for name, _, _ in events][-1:] != ["reset"]  # the stream ends by itself


def test_tokens_and_sessions_never_appear_in_the_log(
    tmp_path: Path, tokens: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        page.post("/api/login", {"token": READER})
        page.post("/api/login", {"token": OTHER})
        page.get("/api/overview")
        session = next(iter(page.cookies.values()))

    printed = caplog.text + "".join(capfd.readouterr())
    assert [secret for secret in (READER, OTHER, session) if secret in printed] == []


def test_under_tls_the_cookie_is_bound_to_the_host_and_to_tls(tmp_path: Path, tokens: Path) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], now=datetime.now(UTC), days=1)
    security = SecurityConfig(
        certificate=str(tmp_path / "server.crt"), key=str(tmp_path / "server.key"), tokens=str(tokens)
    )
    with serving(tmp_path, security=security) as (_, page):
        page.context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        cookie = page.post("/api/login", {"token": READER}).headers["set-cookie"]

        assert page.url.startswith("https://")
        assert cookie.startswith("__Host-strata_session_")
        assert "Secure" in cookie
        assert page.get("/api/overview").status == 200


# -- cross-site requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x_strata_request": "1", "origin": "https://evil.example"},
        {"x_strata_request": "1", "origin": "null"},
        {"x_strata_request": "1", "origin": "http://["},
        {"x_strata_request": "1", "sec_fetch_site": "cross-site"},
        {"x_strata_request": "1", "sec_fetch_site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/api/login", "/api/logout"])
def test_a_page_of_another_site_can_change_nothing(
    tmp_path: Path, tokens: Path, path: str, headers: dict[str, str]
) -> None:
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        assert page.post("/api/login", {"token": READER}).status == 200

        refused = page.send("POST", path, {"token": WORKER}, **headers)

        assert (refused.status, refused.json["error"]["kind"]) == (403, "PermissionRefused")
        assert page.get("/api/session").json["role"] == "reader"


def test_the_page_itself_may_send_requests(tmp_path: Path, tokens: Path) -> None:
    with serving(tmp_path, security=SecurityConfig(tokens=str(tokens))) as (_, page):
        assert page.post("/api/login", {"token": READER}, origin=page.url, sec_fetch_site="same-origin").status == 200
        assert page.post("/api/logout", origin=page.url).status == 204


def test_without_tokens_no_login_is_needed_and_the_host_check_stays(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, page):
        session = page.get("/api/session").json
        assert (session["login_required"], session["role"]) == (False, "admin")
        assert page.post("/api/login", {"token": READER}).status == 422
        for path in ("/", "/api/overview", "/api/live"):
            assert page.send("GET", path, host="evil.example").status == 421, path


# -- hostile names -----------------------------------------------------------------------------------------------------


def test_hostile_names_are_refused_or_stay_plain_text(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        for name in ("<script>alert(1)</script>", "../../etc/passwd", "a/../b"):
            with pytest.raises(Exception, match="worker_id"):
                client.register_worker(name, job_id="job")
        worker = client.register_worker("w0", job_id="job")
        worker.report(state="TRAINING", step=1, **{"a/b": 1.0})
        worker.heartbeat()
        worker.deregister("<script>alert(1)</script>\nevent: job")
        overview_when(page, lambda seen: seen["num_jobs"] == 1 and seen["num_workers"] == 0)
        found = page.get("/api/overview")

        assert found.headers["content-type"] == "application/json"
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "<script>" in found.json["jobs"]["items"][0]["reason"]
        with page.live("0-0") as events:
            assert {name for name, _, _ in (events.next("reset"), events.next("coordinator"))} == {
                "reset",
                "coordinator",
            }


@pytest.mark.parametrize("job", ["../..", "<script>", "a'; DROP TABLE series; --", "%00", "\x00", "x" * 128])
def test_hostile_ids_in_requests_find_nothing(tmp_path: Path, job: str) -> None:
    with serving(tmp_path) as (_, page):
        history = page.get("/api/history", job=job, name=job)

        assert (history.status, history.json["series"][0]["t"]) == (200, [])
        assert page.get("/api/series", job=job).json["items"] == []


@pytest.mark.parametrize(
    "path",
    [
        "/../tokens",
        "/..%2ftokens",
        "/%2e%2e/tokens",
        "/assets/../../tokens",
        "/assets/..%2f..%2ftokens",
        "//etc/passwd",
    ],
)
def test_no_path_leads_out_of_the_folder_of_the_page(tmp_path: Path, tokens: Path, path: str) -> None:
    (tmp_path / "static" / "assets").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("<!doctype html>")
    with serving(tmp_path) as (_, page):
        found = page.get(path)

        assert found.status in (200, 404)
        assert READER.encode() not in found.body
        assert b"root:" not in found.body


def test_the_page_is_served_on_the_port_of_the_api_and_the_api_keeps_its_errors(tmp_path: Path) -> None:
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index.html").write_text("<!doctype html><title>Strata</title>")
    with serving(tmp_path) as (_, page):
        for path in ("/", "/jobs/resnet"):
            found = page.get(path)
            assert (found.status, found.body) == (200, b"<!doctype html><title>Strata</title>")
            assert "frame-ancestors 'none'" in found.headers["content-security-policy"]
        assert page.send("HEAD", "/").status == 200
        assert page.get("/api/nothing").json["error"]["kind"] == "RequestRefused"
        assert page.send("POST", "/jobs").status == 404


# -- private pages -----------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_refuses_connections_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, is_private=True) as (_, page):
        assert page.get("/api/overview").status == 200

        monkeypatch.setattr(peers, "find_owner", lambda *_, **__: os.geteuid() + 1)
        with pytest.raises(OSError, match=r".*"):
            page.get("/api/overview")
        monkeypatch.setattr(peers, "find_owner", lambda *_, **__: None)
        with pytest.raises(OSError, match=r".*"):
            page.get("/api/overview")


LAZY = """
import sys, urllib.request
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.extension import HttpOptions
from strata.dashboard.extension import Dashboard

options = HttpOptions(extensions=(Dashboard(),), is_lazy=True)
with EmbeddedCoordinator(CoordinatorConfig(state="memory"), http="127.0.0.1:0", options=options) as coordinator:
    before = {"fastapi", "uvicorn", "pydantic"} & set(sys.modules)
    status = urllib.request.urlopen(coordinator.http_address + "/api/overview").status
    print(sorted(before), status, "fastapi" in sys.modules)
with EmbeddedCoordinator(CoordinatorConfig(state="memory"), http="127.0.0.1:0", options=options):
    print("stopped without a visit")
"""


def test_a_lazy_server_is_imported_when_the_first_client_connects() -> None:
    found = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)

    assert found.stdout.splitlines() == ["[] 200 True", "stopped without a visit"], found.stderr


# -- arbitrary requests ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_schemathesis_finds_no_5xx_and_no_undocumented_answer(tmp_path: Path) -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    with (
        serving(tmp_path) as (coordinator, page),
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        train(client, "resnet", 2, loss=0.5)
        found = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                "run",
                f"{page.url}/openapi.json",
                *("--checks", checks, "--phases", "fuzzing", "--max-examples", "15"),
                *("--include-path-regex", "/api/(overview|series|history|session|login|logout)"),
                *("--seed", "1", "--no-color", "--header", "x-strata-request: 1"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-1000:]
        assert page.get("/api/overview").status == 200


# -- commands ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, time
import strata
ctx = strata.init()
for step in range(1, 2_000):
    ctx.report(step=step, loss=1.0 / step)
    time.sleep(0.01)
    if os.path.exists("enough"):
        break
"""


def test_a_run_prints_the_address_of_its_page_and_serves_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "STRATA_RUNS_DIR": str(tmp_path / "runs")}
    with subprocess.Popen(
        [STRATA, "run", "--workers", "2", "--no-warm", "--name", "seen", "train.py"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            line = next(each for each in process.stderr if each.startswith("dashboard: "))
            page = Page(line.split()[1])
            found = overview_when(page, lambda seen: seen["jobs"]["items"] and seen["num_workers"] == 2)
            assert found["jobs"]["items"][0]["num_workers"] == 2
            overview_when(page, lambda seen: "metric:loss" in seen["jobs"]["items"][0]["values"])
            (place,) = page.get("/api/explorer/places").json["items"]
            assert (place["label"], place["location"]) == ("seen", str(tmp_path / "runs" / "seen" / "checkpoints"))
            saved = page.get("/api/explorer/checkpoints", place=place["place"]).json
            assert saved["items"] == [], "it has not saved yet"
        finally:
            (tmp_path / "enough").touch()
            rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert list((tmp_path).rglob("coordinator.history.db"))


def test_a_run_refuses_to_serve_its_page_to_other_machines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    found = subprocess.run(
        [STRATA, "run", "--dashboard", "0.0.0.0:0", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode != 0
    assert "loopback" in found.stderr
