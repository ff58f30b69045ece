"""What the page of a run that is over makes of the run's directory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.journal import Entry, Journal
from strata.coordinator.journal.open import open_journal
from strata.coordinator.state import events as e
from strata.coordinator.state.time_use import TimeUse
from strata.dashboard.ended import EndedRun, EndedSite
from strata.dashboard.explorer.limits import ExplorerConfig
from strata.dashboard.explorer.places import Places
from strata.dashboard.goodput import Life
from strata.dashboard.history.file import HistoryFile, path_beside
from strata.dashboard.history.store import HistoryStore
from strata.dashboard.sample import single
from strata.dashboard.studies.source import Studies
from strata.errors import ConfigError
from strata.launch.record.directory import RunDirectory, RunStatus, create
from strata.launch.record.timeline import RunEvent
from strata.launch.spec import RunSpec, Size
from strata.transport.tokens import Guard

BEGAN_S = 1_700_000_000.0
ADDRESS = "http://127.0.0.1:51052"
Get = Callable[..., Coroutine[Any, Any, Any]]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    spec = RunSpec(name="job", script="/train.py", directory="/", checkpoints=str(tmp_path / "c"), workers=Size(2, 2))
    return create(spec)


def joined(rank: int, *, incarnation: int) -> e.WorkerJoined:
    return e.WorkerJoined(
        job_id="job",
        worker_id=f"rank-{rank}",
        incarnation=incarnation,
        instance_id=f"process-{incarnation}",
        launch_rank=rank,
        attempt=0,
    )


def append(journal: Journal, at_s: float, *events: e.Event) -> None:
    journal.append([Entry(job_id=each.job_id, kind=each.kind, at_s=at_s, payload=e.encode(each)) for each in events])


def write_journal(directory: RunDirectory) -> None:
    """A run whose agent was killed: two workers have joined, and none has left."""
    journal = open_journal(str(directory.journal))
    journal.load()
    append(
        journal,
        BEGAN_S,
        joined(0, incarnation=1),
        joined(1, incarnation=2),
        e.GenerationStarted(job_id="job", generation=1, num_workers=2, reason="both joined"),
    )
    journal.close()


def write_history(directory: RunDirectory) -> None:
    """Rank 0 has measured 40 s, of which it computed 30 s; rank 1 was killed before it had measured anything."""
    store = HistoryStore()
    for second in range(50):
        store.add("job", BEGAN_S + second, {"metric:loss": single(1.0 / (1 + second))})
    first = Life(
        job_id="job",
        worker_id="rank-0",
        incarnation=1,
        rank=0,
        attempt=0,
        joined_at_s=BEGAN_S,
        step=7,
        use=TimeUse(measured_s=40.0, data_s=10.0),
        use_at_s=BEGAN_S + 45.0,
    )
    second = Life(job_id="job", worker_id="rank-1", incarnation=2, rank=1, attempt=0, joined_at_s=BEGAN_S)
    file = HistoryFile(path_beside(directory.journal))
    file.write(store.take_changes(), [first, second])
    file.close()


def visit(directory: RunDirectory, look: Callable[[Get], Coroutine[Any, Any, None]]) -> None:
    """Open the page of a run that is over, and look at it."""

    async def open_it() -> None:
        site = EndedSite(EndedRun(directory), Places(), ExplorerConfig(), Studies())
        app = site.make_app(Guard(), CoordinatorConfig(http="127.0.0.1:51052"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ADDRESS) as client:

            async def get(path: str, **query: Any) -> Any:
                answer = await client.get(path, params=query or None)
                assert answer.status_code == 200, answer.text
                return answer.json()

            try:
                await look(get)
                assert (await client.post("/api/run/stop", json={}, headers={"x-strata-request": "1"})).is_client_error
            finally:
                await site.stop()

    asyncio.run(open_it())


def contents(directory: RunDirectory) -> dict[str, str]:
    files = sorted(path for path in directory.path.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_workers_of_a_killed_agent_are_not_shown_and_what_is_missing_is_named(directory: RunDirectory) -> None:
    write_journal(directory)

    async def look(get: Get) -> None:
        overview = await get("/api/overview")
        ended = overview["ended"]
        assert (overview["num_workers"], (await get("/api/workers"))["total"]) == (0, 0)
        assert (ended["state"], ended["began_at_s"], ended["ended_at_s"]) == ("interrupted", BEGAN_S, BEGAN_S)
        assert [each.partition(":")[0] for each in ended["missing"]] == ["charts", "goodput", "recoveries", "logs"]
        assert overview["health"]["level"] == "warning"
        assert (await get("/api/goodput", job="job"))["run"] is None
        assert (await get("/api/series"))["items"] == []
        assert [each["seq"] for each in (await get("/api/events"))["items"]] == [1, 2, 3]

    visit(directory, look)


def test_the_ledger_of_an_ended_run_stops_at_its_last_record(directory: RunDirectory) -> None:
    write_journal(directory)
    write_history(directory)
    directory.note(RunEvent(at_s=BEGAN_S + 60.0, monotonic_s=60.0, what="checkpoint"))

    async def look(get: Get) -> None:
        overview, goodput = await get("/api/overview"), await get("/api/goodput", job="job")
        assert overview["at_s"] == goodput["at_s"] == BEGAN_S + 60.0
        assert goodput["run"]["total_s"] == 120.0, "two ranks, 60 s each"
        assert sum(goodput["run"]["parts_s"].values()) == pytest.approx(120.0, abs=1e-6)
        assert goodput["run"]["parts_s"]["computing"] == 30.0
        history = await get("/api/history", job="job", name="metric:loss", since_s=BEGAN_S, until_s=BEGAN_S + 60)
        assert history["series"][0]["max"][0] == 1.0
        assert {each["job_id"] for each in (await get("/api/series"))["items"]} == {"job"}, "none of this process"

    visit(directory, look)


def test_opening_an_ended_run_writes_nothing_into_its_directory(directory: RunDirectory) -> None:
    write_journal(directory)
    write_history(directory)
    before = contents(directory)

    async def look(get: Get) -> None:
        await get("/api/events")
        await get("/api/overview")

    visit(directory, look)
    assert contents(directory) == before


def test_a_run_can_be_resumed_while_its_ended_page_is_open(directory: RunDirectory) -> None:
    write_journal(directory)
    write_history(directory)

    async def look(get: Get) -> None:
        before = [await get(path) for path in ("/api/overview", "/api/events", "/api/goodput?job=job")]
        assert (await get("/api/run"))["live_page"] is None
        with directory.lock():
            journal = open_journal(str(directory.journal))
            journal.load()
            append(journal, BEGAN_S + 900.0, joined(0, incarnation=3))
            directory.note(RunEvent(at_s=BEGAN_S + 900.0, monotonic_s=900.0, what="started", attempt=1))
            running = RunStatus.of_this_process(now_s=BEGAN_S + 900.0)
            directory.write_status(RunStatus(**{**as_dict(running), "page": "http://127.0.0.1:4321"}))

            run = await get("/api/run")
            assert (run["live_page"], run["may_command"]) == ("http://127.0.0.1:4321", False)
            assert [await get(path) for path in ("/api/overview", "/api/events", "/api/goodput?job=job")] == before
            with pytest.raises(ConfigError, match=r"run job is active; its page is http://127\.0\.0\.1:4321"):
                EndedRun(directory)
            journal.close()

    visit(directory, look)


def as_dict(status: RunStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__struct_fields__}


def test_entries_that_a_killed_agent_left_in_the_log_of_its_journal_are_read(directory: RunDirectory) -> None:
    write_journal(directory)
    journal = open_journal(str(directory.journal))
    journal.load()
    append(journal, BEGAN_S + 5.0, joined(2, incarnation=3))
    files = [directory.journal, directory.journal.with_name("coordinator.db-wal")]
    left = {path: path.read_bytes() for path in files}
    journal.close()  # moves the entry out of the log, which a killed process does not
    for path, content in left.items():
        path.write_bytes(content)
    assert left[files[1]]

    async def look(get: Get) -> None:
        assert (await get("/api/events"))["items"][-1]["worker_id"] == "rank-2"

    visit(directory, look)


def test_a_run_without_a_journal_is_refused_with_the_reason(directory: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=r"run job has no journal in .*; its coordinator was elsewhere"):
        EndedRun(directory)
