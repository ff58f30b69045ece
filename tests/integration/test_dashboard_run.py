"""The page of a run: logs and stacks of its workers, stop and scale, and who may order them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
from servers import DEADLINE_S

from strata.coordinator.config import CoordinatorConfig, Limits, SecurityConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.extension import HttpOptions
from strata.dashboard.extension import Dashboard
from strata.dashboard.run import DirectoryRun, Log
from strata.errors import ConfigError
from strata.launch.record.directory import RunStatus, create
from strata.launch.spec import RunSpec, Size
from strata.transport.tokens import bearer

READER, ADMIN = "reader-token-0123456789", "admin-token-0123456789"
CSRF = {"x-strata-request": "1"}


class Recorded:
    """Implements `RunControl`: records orders, as an agent would receive them."""

    name = "job"
    range = (1, 4)
    num_workers = 2
    takes_orders = True

    def __init__(self) -> None:
        self.orders: list[object] = []

    def live_page(self) -> str | None:
        return None

    def log(self, rank: int, attempt: int | None, num_lines: int) -> Log:
        return Log(rank, attempt or 0, (0,), ["a", "b"][-num_lines:])

    def stop(self, *, is_now: bool) -> None:
        self.orders.append(("stop", is_now))

    def scale(self, workers: int) -> None:
        if workers > 4:
            raise ConfigError(f"workers={workers} is outside 1:4; choose a number within it")
        self.orders.append(("scale", workers))

    def dump_stacks(self, rank: int) -> None:
        if rank > 1:
            raise ConfigError(f"rank={rank} does not run now, ranks 0, 1 run; choose one that runs")
        self.orders.append(("stacks", rank))


@contextmanager
def page(directory: Path, run: Recorded | None, *, tokens: str = "") -> Iterator[httpx.Client]:
    (directory / "tokens").write_text(tokens)
    config = CoordinatorConfig(
        state="memory",
        limits=Limits(max_http_requests_per_s=100_000),
        security=SecurityConfig(tokens=str(directory / "tokens")) if tokens else SecurityConfig(),
    )
    options = HttpOptions(extensions=(Dashboard(run=run),))
    listen = f"unix:{directory}/c.sock"
    with (
        EmbeddedCoordinator(config, listen=listen, http="127.0.0.1:0", options=options) as coordinator,
        httpx.Client(base_url=coordinator.http_address, timeout=DEADLINE_S) as client,
    ):
        yield client


def test_orders_reach_the_run_and_a_refusal_names_its_reason(tmp_path: Path) -> None:
    run = Recorded()
    with page(tmp_path, run) as client:
        assert client.get("/api/run").json() == {
            "name": "job",
            "min_workers": 1,
            "max_workers": 4,
            "num_workers": 2,
            "may_command": True,
            "live_page": None,
        }
        assert client.post("/api/run/stop", json={"is_now": True}, headers=CSRF).status_code == 204
        assert client.post("/api/run/scale", json={"workers": 3}, headers=CSRF).status_code == 204
        refused = client.post("/api/run/scale", json={"workers": 9}, headers=CSRF)

        assert client.post("/api/run/stacks", json={"rank": 1}, headers=CSRF).status_code == 204
        unknown = client.post("/api/run/stacks", json={"rank": 7}, headers=CSRF)

        assert run.orders == [("stop", True), ("scale", 3), ("stacks", 1)]
        assert refused.status_code == unknown.status_code == 422
        assert "outside 1:4" in refused.json()["error"]["message"]
        assert unknown.json()["error"]["message"].startswith("rank=7 does not run now")
        assert unknown.json()["error"]["field"] == "rank"


@pytest.mark.parametrize("headers", [{}, {**CSRF, "origin": "http://evil.example"}])
def test_a_page_of_another_site_cannot_stop_a_run(tmp_path: Path, headers: dict[str, str]) -> None:
    run = Recorded()
    with page(tmp_path, run) as client:
        assert client.post("/api/run/stop", json={}, headers=headers).status_code == 403
    assert run.orders == []


def test_only_an_admin_may_order(tmp_path: Path) -> None:
    run = Recorded()
    with page(tmp_path, run, tokens=f"reader {READER}\nadmin {ADMIN}\n") as client:
        reader, admin = ({"authorization": bearer(token)} for token in (READER, ADMIN))
        assert client.get("/api/run").status_code == 401
        assert client.get("/api/run", headers=reader).json()["may_command"] is False
        assert client.get("/api/run/log", params={"rank": 0}, headers=reader).json()["lines"] == ["a", "b"]
        assert client.post("/api/run/stop", json={}, headers=reader).status_code == 403
        assert client.post("/api/run/stacks", json={"rank": 0}, headers=reader).status_code == 403
        assert run.orders == []
        assert client.post("/api/run/stop", json={}, headers=admin).status_code == 204
    assert run.orders == [("stop", False)]


def test_a_body_that_is_no_json_is_refused_by_its_name(tmp_path: Path) -> None:
    with page(tmp_path, Recorded()) as client:
        headers = {**CSRF, "content-type": "application/json"}
        refused = client.post("/api/run/scale", content=b'{"workers": x}', headers=headers)

        assert refused.status_code == 422
        assert refused.json()["error"]["field"] == "body"


def test_a_large_body_is_refused_before_the_token_is_checked_and_while_it_arrives(tmp_path: Path) -> None:
    with page(tmp_path, Recorded(), tokens=f"admin {ADMIN}\n") as client:
        num_taken = 0

        def endless() -> Iterator[bytes]:
            nonlocal num_taken
            while True:
                num_taken += 1
                yield b"x" * 65_536

        with suppress(httpx.WriteError, httpx.ReadError):  # the server closes the connection at some point
            assert client.post("/api/run/stop", content=endless()).status_code == 413
        assert num_taken < 1_000
        assert client.get("/api/health").status_code == 200


def test_a_coordinator_without_a_run_refuses_orders_with_the_cure(tmp_path: Path) -> None:
    with page(tmp_path, None) as client:
        assert client.get("/api/run").json() is None
        refused = client.post("/api/run/stop", json={}, headers=CSRF)

        assert refused.status_code == 422
        assert "open the page that `strata run` prints" in refused.json()["error"]["message"]


def test_the_end_of_a_log_is_read_by_attempt(run_directory: Path) -> None:
    script = run_directory / "train.py"
    script.write_text("")
    directory = create(
        RunSpec(
            name="job",
            script=str(script),
            workers=Size(2, 5),
            num_servers=1,
            directory=str(run_directory),
            checkpoints=str(run_directory / "checkpoints"),
        )
    )
    for attempt in (0, 1):
        directory.log_path(attempt, 1).write_text("".join(f"line {n} of {attempt}\n" for n in range(5)))
    run = DirectoryRun(directory)

    assert run.range == (1, 4), "without the parameter server"
    assert run.num_workers is None
    assert run.log(1, None, 2) == Log(1, 1, (0, 1), ["line 3 of 1", "line 4 of 1"])
    assert run.log(1, 0, 1).lines == ["line 4 of 0"]
    with pytest.raises(ValueError, match="rank=0 has no log"):
        run.log(0, None, 1)
    with pytest.raises(ValueError, match="attempt=7; choose one of 0, 1"):
        run.log(1, 7, 1)
    with pytest.raises(ConfigError, match="has not started yet"):
        run.stop(is_now=True)


def test_servers_that_a_script_asks_for_are_not_counted_as_workers(run_directory: Path) -> None:
    script = run_directory / "train.py"
    script.write_text("")
    spec = RunSpec(name="job", script=str(script), workers=Size(2, 5), directory=str(run_directory), checkpoints="")
    directory = create(spec)
    started = RunStatus.of_this_process(now_s=0.0)
    directory.write_status(msgspec.structs.replace(started, world_size=4, num_servers=1))
    run = DirectoryRun(directory)

    assert run.range == (1, 4)
    assert run.num_workers == 3
