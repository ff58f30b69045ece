"""The dashboard's page in a real browser: a killed worker, the explorer, login, themes, a phone, large jobs, axe."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from browser import DESKTOP, PHONE, TIMEOUT_MS, Tab, Theme, browser, tab
from playwright.sync_api import Browser, expect
from servers import DEADLINE_S, EAGER_CLIENT, STRATA, until

from strata.bench.contenders.dashboard_load import crowd
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig, Limits, SecurityConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.extension import HttpOptions
from strata.coordinator.journal.base import Entry
from strata.coordinator.journal.open import open_journal
from strata.coordinator.state.server_figures import SERVER, ServerFigures
from strata.coordinator.state.time_use import TimeUse
from strata.dashboard.explorer.part import NoPlaces
from strata.dashboard.extension import Dashboard

__all__ = ["browser"]

pytestmark = pytest.mark.timeout(180)
CALM = LeaseConfig(lease_s=60.0, heartbeat_s=2.0, suspicion_s=30.0, tick_s=0.02)
TOKEN = "reader-token-0123456789"
HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_ID = "javascript:alert"
"""As hostile as an id may be."""
VIEWS = ("/", "/workers", "/data", "/servers", "/goodput", "/recovery", "/events", "/checkpoints")
SHOWN_WITHIN_S = 1.0
MANY_EVENTS = 100_000
MANY_TENSORS = 20_000
MAX_ROWS = 80
"""Rows of a virtual list in the document: those in view and a few around them."""
HEAP_SETTLES_S, HEAP_WATCHED_S = 20.0, 40.0
MAX_HEAP_GROWTH = 2 << 20
"""One list of 1,000 workers that is kept per look, every 5 s, would be more."""

TRAIN = """
    import os, sys, time
    from pathlib import Path

    import torch

    import strata

    ctx = strata.init(every=40)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    Path(f"pid-{ctx.rank}").write_text(str(os.getpid()))
    step = ctx.restore({"model": model}).step
    print(f"rank {ctx.rank} starts at step {step}", flush=True)
    while not Path("enough").exists() and os.path.exists(f"/proc/{os.environ['TEST_PID']}"):
        step += 1
        ctx.report(step=step, loss=1.0 / (1 + step), accuracy=1 - 1.0 / (1 + step), rows_per_s=320.0)
        ctx.maybe_checkpoint({"model": model})
        time.sleep(0.02)
    print(f"rank {ctx.rank} ends", flush=True)
"""


@contextmanager
def serving(directory: Path, *, tokens: str = "", state: str = "memory") -> Iterator[EmbeddedCoordinator]:
    security = SecurityConfig()
    if tokens:
        (directory / "tokens").write_text(tokens)
        security = SecurityConfig(tokens=str(directory / "tokens"))
    config = CoordinatorConfig(
        state=state, lease=CALM, limits=Limits(max_http_requests_per_s=100_000), security=security
    )
    options = HttpOptions(extensions=(Dashboard(parts=[NoPlaces()]),))
    listen = f"unix:{directory}/c.sock"
    with EmbeddedCoordinator(config, listen=listen, http="127.0.0.1:0", options=options) as coordinator:
        yield coordinator


def train(client: CoordinatorClient, job_id: str, names: list[str], **metrics: float) -> list[Any]:
    workers = [client.register_worker(name, job_id=job_id) for name in names]
    for worker in workers:
        worker.refresh()
        worker.report(state="TRAINING", step=5, **metrics)
        worker.heartbeat()
    return workers


class Run:
    """`strata run` of the script above."""

    def __init__(self, directory: Path, process: subprocess.Popen[str], url: str) -> None:
        self.directory, self.process, self.url = directory, process, url

    def pid_of(self, rank: int) -> int:
        path = self.directory / f"pid-{rank}"
        until(lambda: path.exists() and path.read_text() != "", f"rank {rank} runs")
        return int(path.read_text())

    def get(self, path: str, **query: Any) -> Any:
        return httpx.get(f"{self.url}{path}", params=query, timeout=DEADLINE_S).json()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("run")
    (directory / "train.py").write_text(textwrap.dedent(TRAIN))
    command = [str(STRATA), "run", "--workers=2", "--name=job", "--logs=none", "train.py"]
    environment = {
        **os.environ,
        "STRATA_RUNS_DIR": str(directory / "runs"),
        "OMP_NUM_THREADS": "1",
        "TEST_PID": str(os.getpid()),
    }
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"dashboard: (http://\S+)\n", line)
        assert found, line
        one = Run(directory, process, found[1])
        until(
            lambda: one.get("/api/overview")["workers_by_state"].get("TRAINING") == 2,
            "both workers train",
            deadline_s=90.0,
        )
        yield one
    finally:
        with suppress(OSError):
            (directory / "enough").touch()
        try:
            process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


# -- a real run --------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_shown_within_a_second_of_its_detection(browser: Browser, run: Run) -> None:
    with tab(browser, run.url) as opened:
        page = opened.open("/")
        expect(page.locator(".recent li").first).to_be_visible()
        opened.shoot("overview")
        last = run.get("/api/events", limit=1000)["next_after"]
        # The browser itself notes when the line appears: the test may be scheduled later.
        page.evaluate(
            """() => {
              const known = new Set([...document.querySelectorAll('.recent li span')].map((e) => e.textContent));
              window.shown = [];
              new MutationObserver(() => {
                for (const line of document.querySelectorAll('.recent li span')) {
                  if (known.has(line.textContent)) continue;
                  known.add(line.textContent);
                  window.shown.push([Date.now() / 1000, line.textContent]);
                }
              }).observe(document.body, { subtree: true, childList: true, characterData: true });
            }"""
        )
        os.kill(run.pid_of(1), signal.SIGKILL)
        expect(page.locator(".recent li", has_text="rank-1 left").first).to_be_visible(timeout=30_000)
        shown_s = next(at for at, words in page.evaluate("window.shown") if words.startswith("rank-1 left"))
        left = [
            event
            for event in run.get("/api/events", after=last, kind="WorkerLeft", limit=1000)["items"]
            if event["worker_id"] == "rank-1"
        ]
        page.locator(".recent").scroll_into_view_if_needed()
        opened.shoot("worker-killed")

        assert shown_s - left[0]["at_s"] < SHOWN_WITHIN_S, left[0]
        until(
            lambda: run.get("/api/overview")["workers_by_state"].get("TRAINING") == 2,
            "the run has recovered",
            deadline_s=60.0,
        )
        expect(page.locator(".badge").first).to_have_text("training")


def test_the_explorer_shows_the_tensors_of_a_real_checkpoint(browser: Browser, run: Run) -> None:
    until(lambda: run.get("/api/overview")["jobs"]["items"][0]["checkpoint_id"] is not None, "a checkpoint exists")
    with tab(browser, run.url) as opened:
        page = opened.open("/checkpoints")
        page.get_by_role("treeitem").first.wait_for()
        page.get_by_label(re.compile("filter|search", re.IGNORECASE)).last.wait_for()
        page.goto(f"{page.url.partition('?')[0]}?name=model.0.weight")
        expect(page.get_by_text("32 × 16").first).to_be_visible()
        opened.shoot("explorer")


def test_the_log_of_a_worker_is_shown_and_a_stop_asks_first(browser: Browser, run: Run) -> None:
    with tab(browser, run.url) as opened:
        page = opened.open("/workers")
        page.get_by_role("button", name="Log of rank-1").click()
        expect(page.get_by_label("Log of rank 1").get_by_text("rank 1 starts at step")).to_be_visible()
        opened.shoot("worker-log")
        assert opened.violations() == []
        page.get_by_role("button", name="Dump stacks").click()
        expect(page.get_by_label("Log of rank 1").get_by_text("most recent call first")).to_be_visible()
        opened.shoot("worker-stacks")
        page.get_by_role("button", name="Stop…").click()
        expect(page.get_by_role("dialog", name="Stop job?")).to_be_visible()
        opened.shoot("stop")
        assert opened.violations() == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert run.process.poll() is None


def test_a_moment_of_a_recovery_leads_to_its_events(browser: Browser, run: Run) -> None:
    with tab(browser, run.url) as opened:
        if run.get("/api/recoveries", job="job")["num_recoveries"] == 0:
            os.kill(run.pid_of(1), signal.SIGKILL)
        page = opened.open("/recovery", job="job")
        page.locator(".recovery-moment", has_text="New generation").first.get_by_role("link").click()
        expect(page.get_by_role("heading", name="Events")).to_be_visible()
        expect(page.locator('li[aria-current="true"]')).to_be_in_viewport()
        expect(page.get_by_text("rank-1 left").first).to_be_visible()
        opened.shoot("moment")


def test_a_link_shows_others_the_same_view(browser: Browser, run: Run) -> None:
    with tab(browser, run.url) as opened, tab(browser, run.url) as other:
        page = opened.open("/")
        page.get_by_role("button", name="1h").click()
        page.get_by_label("Smoothing").select_option("0.9")
        loss = page.get_by_role("article", name="loss")
        loss.get_by_role("button", name="log:").click()
        chart = loss.locator(".u-over")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 20, steps=4)
        page.mouse.up()
        page.get_by_role("button", name="Back to live").wait_for()

        other.page.goto(page.url)
        other.page.get_by_role("button", name="Back to live").wait_for()
        assert other.page.get_by_label("Smoothing").input_value() == "0.9"
        log = other.page.get_by_role("article", name="loss").get_by_role("button", name="log:")
        assert log.get_attribute("aria-pressed") == "true"
        span = page.locator(".page-tools .num").inner_text()
        assert other.page.locator(".page-tools .num").inner_text() == span
        with other.page.expect_download() as download:
            other.page.get_by_role("article", name="loss").get_by_role("button", name="csv:").click()
        header, *rows = Path(download.value.path()).read_text().splitlines()
        assert header == "time,series,unit,min,mean,max"
        assert rows
        assert all(row.split(",")[1] == "metric:loss" for row in rows)


def test_the_palette_reaches_every_page_from_the_keyboard(browser: Browser, run: Run) -> None:
    with tab(browser, run.url) as opened:
        page = opened.open("/")
        page.keyboard.press("Control+k")
        expect(page.get_by_role("combobox", name="Search pages, jobs and commands")).to_be_focused()
        opened.shoot("palette")
        assert opened.violations() == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        for name in ("Workers", "Data", "Goodput", "Recovery", "Events", "Checkpoints"):
            page.keyboard.press("Control+k")
            page.keyboard.type(name)
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name=name, exact=True, level=1)).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_wrong_on_any_page_of_a_run(browser: Browser, run: Run, view: str, theme: Theme) -> None:
    with tab(browser, run.url, theme=theme) as opened:
        opened.open(view)
        opened.shoot(f"{view.strip('/') or 'overview'}-{theme}")

        assert opened.violations() == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_every_page_without_scrolling_sideways(browser: Browser, run: Run, view: str) -> None:
    with tab(browser, run.url, size=PHONE, is_phone=True) as opened:
        opened.open(view)
        opened.shoot(f"{view.strip('/') or 'overview'}-phone")

        assert opened.overflow_px() <= 0


# -- coordinators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_with_no_job_names_what_to_do(browser: Browser, tmp_path: Path, theme: Theme) -> None:
    with serving(tmp_path) as coordinator, tab(browser, coordinator.http_address, theme=theme) as opened:
        for view in VIEWS:
            page = opened.open(view)
            opened.shoot(f"empty-{view.strip('/') or 'overview'}-{theme}")
            assert opened.violations() == [], view
        page = opened.open("/workers")
        expect(page.get_by_text("strata run --workers 2 train.py")).to_be_visible()


def test_a_login_is_needed_once_and_its_token_stays_out_of_address_and_scripts(
    browser: Browser, tmp_path: Path
) -> None:
    with (
        serving(tmp_path, tokens=f"reader {TOKEN}\n") as coordinator,
        tab(browser, coordinator.http_address) as opened,
    ):
        opened.expected += ["401"]
        page = opened.page
        page.goto(f"{opened.url}/workers")
        field = page.get_by_label("Token")
        field.fill("wrong-token-0123456789")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_be_visible()
        opened.shoot("login")
        assert opened.violations() == []
        field.fill(TOKEN)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Workers", exact=True).wait_for()

        assert page.url.endswith("/workers")
        assert page.evaluate("document.cookie") == ""
        assert TOKEN not in page.evaluate("JSON.stringify([localStorage, sessionStorage, location.href])")
        page.reload()
        page.get_by_role("heading", name="Workers", exact=True).wait_for()


def test_hostile_parts_of_an_address_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        tab(browser, coordinator.http_address) as opened,
    ):
        longest = "w" * 120
        train(client, "job", ["javascript:alert", longest])
        for view in VIEWS:
            opened.open(view, q=HOSTILE, name=HOSTILE, worker=HOSTILE, state=HOSTILE)
            assert_harmless(opened)
        page = opened.open("/workers")
        expect(page.get_by_text(longest).first).to_be_visible()
        opened.shoot("longest-name")
        assert opened.overflow_px() <= 0


def test_ten_thousand_shards_are_shown_by_owner_with_what_the_last_change_moved(
    browser: Browser, tmp_path: Path
) -> None:
    with (
        serving(tmp_path) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        tab(browser, coordinator.http_address) as opened,
    ):
        workers = train(client, "job", ["w0", "w1", "w2"])
        client.register_dataset(HOSTILE_ID, job_id="job", total_samples=10_000, shard_size=1, shuffle=True)
        workers[0].refresh()
        workers[0].ack(list(workers[0].shards(HOSTILE_ID))[:500])
        page = opened.open("/data")
        expect(page.locator(".shard-row", has_text="500 of")).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.get_by_text(f"Shards of {HOSTILE_ID} by owner")).to_be_visible()
        expect(page.get_by_text("10,000 shards of 10,000 got a new owner")).to_be_visible()
        expect(page.locator(".shard-row")).to_have_count(3)
        expect(page.get_by_text("Not measured yet")).to_be_visible()
        opened.shoot("data-shards")
        assert opened.violations() == []

        workers[2].deregister("test")
        expect(page.locator(".shard-row")).to_have_count(2, timeout=TIMEOUT_MS)
        expect(page.get_by_text("generation 4 with 2 workers")).to_be_visible()
        opened.shoot("data-moved")


def test_parameter_servers_are_shown_with_what_they_report(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        tab(browser, coordinator.http_address) as opened,
    ):
        train(client, "job", ["w0"])
        page = opened.open("/")
        expect(page.get_by_role("link", name="Servers")).to_have_count(0)
        (server,) = train(client, "job", ["s0"])
        figures = ServerFigures(rows=26_093, bytes=1 << 20, evicted=3, pulls_per_s=137.5, staleness=2, hits=1, misses=3)
        server.note("TRAINING", 9, None, {SERVER: 0.0, **figures.as_metrics()})
        server.heartbeat()
        page.get_by_role("link", name="Servers").click(timeout=TIMEOUT_MS)
        expect(page.get_by_role("cell", name="26,093")).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.get_by_role("cell", name="137.5")).to_be_visible()
        expect(page.get_by_role("cell", name="25 %")).to_be_visible()
        opened.shoot("servers")
        assert opened.violations() == []


def test_the_time_of_each_rank_is_shown_and_the_straggler_named(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        tab(browser, coordinator.http_address) as opened,
    ):
        workers = train(client, "job", ["w0", "w1", "w2"])
        began_s = time.monotonic() - 1.0

        def use(rank: int) -> TimeUse:
            measured_s = time.monotonic() - began_s
            slow = rank == 2
            return TimeUse(
                measured_s=measured_s,
                data_s=0.6 * measured_s if slow else 0.0,
                barrier_s=0.0 if slow else 0.6 * measured_s,
                collective_s=0.0,
            )

        page = opened.open("/workers")
        expect(page.get_by_text("No verdict on a straggler")).to_be_visible(timeout=TIMEOUT_MS)
        for rank, worker in enumerate(workers):
            worker.report(state="LOADING_DATA")  # a rank that trains without a step would be stalled, which weighs more
            worker.measure(lambda rank=rank: use(rank))  # type: ignore[misc]
        verdict = re.compile(r"rank 2 is 2\.5× slower than the median since step 5: it waits for data")
        expect(page.locator("main").get_by_text(verdict)).to_be_visible(timeout=60_000)
        expect(page.get_by_role("banner").get_by_text(verdict).first).to_be_visible()
        opened.shoot("straggler")
        assert opened.violations() == []


def test_two_jobs_are_compared_in_one_chart(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        tab(browser, coordinator.http_address) as opened,
    ):
        train(client, "old", ["w0"], loss=0.5)
        train(client, "new", ["w0"], loss=0.25)
        page = opened.open("/", job="new")
        page.get_by_label("Compare with another job").select_option("old")
        legend = page.get_by_role("article", name="loss").get_by_role("listitem")
        expect(legend).to_have_text(["new 0.25", "old 0.5"], timeout=TIMEOUT_MS)
        opened.shoot("compared")
        assert opened.violations() == []
        assert page.url.endswith("/?job=new&with=old")


@contextmanager
def opened_alone(browser: Browser, *paths: Path) -> Iterator[Tab]:
    """Open files with `strata dashboard`."""
    command = [str(STRATA), "dashboard", *map(str, paths), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with tab(browser, address.rstrip("/")) as opened:
                opened.expected += ["404"]  # how the page finds out that there is no coordinator
                yield opened
        finally:
            server.terminate()


def test_hostile_names_of_tensors_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    safetensors.numpy.save_file({HOSTILE: np.ones((2, 2), np.float32)}, tmp_path / "x.safetensors")
    with opened_alone(browser, tmp_path / "x.safetensors") as opened:
        page = opened.open("/checkpoints")
        expect(page.get_by_text("<img src=x").first).to_be_visible()
        page.get_by_text("<img src=x").first.click()
        expect(page.get_by_text("2 × 2").first).to_be_visible()
        assert_harmless(opened)
        opened.shoot("hostile-tensor")


def test_the_checkpoints_of_two_places_are_compared(browser: Browser, tmp_path: Path) -> None:
    paths = [tmp_path / "old.safetensors", tmp_path / "new.safetensors"]
    for path, value in zip(paths, (1.0, 3.0), strict=True):
        tensors = {"weight": np.full((2, 2), value, np.float32), "bias": np.ones(2, np.float32)}
        safetensors.numpy.save_file(tensors, path)
    with opened_alone(browser, *paths) as opened:
        page = opened.open("/checkpoints")
        page.get_by_role("combobox", name="Place", exact=True).select_option(label="new.safetensors")
        page.get_by_role("combobox", name="Compare with a checkpoint of").select_option(label="old.safetensors")
        page.get_by_role("combobox", name="Compare with", exact=True).select_option(label="old.safetensors")
        changes = page.get_by_role("region", name="Changes")
        expect(changes.get_by_text("1 changed, 1 the same")).to_be_visible()
        changes.get_by_text("weight").click()
        expect(changes.get_by_text("Distribution before and after")).to_be_visible()
        expect(changes.get_by_text("200 %").first).to_be_visible()
        opened.shoot("two-places")
        assert opened.violations() == []


def test_twenty_thousand_tensors_are_shown_in_a_few_rows_and_found_by_name(browser: Browser, tmp_path: Path) -> None:
    small = np.ones(2, np.float32)
    tensors = {f"layer.{number}": small for number in range(MANY_TENSORS)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    with opened_alone(browser, tmp_path / "x.safetensors") as opened:
        page = opened.open("/checkpoints")
        expect(page.get_by_role("treeitem").nth(20)).to_be_visible()
        assert page.get_by_role("treeitem").count() < MAX_ROWS
        page.get_by_label("Find tensors").fill(f"layer.{MANY_TENSORS - 1}")
        expect(page.get_by_text(str(MANY_TENSORS - 1)).first).to_be_visible()
        opened.shoot("many-tensors")


def assert_harmless(opened: Tab) -> None:
    opened.check()  # no dialog
    assert opened.page.locator("img[src=x]").count() == 0


@pytest.mark.slow  # half a minute, to register them
def test_a_thousand_workers_are_shown_in_a_few_rows_and_found_by_name(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
        tab(browser, coordinator.http_address, size=DESKTOP) as opened,
    ):
        train(client, "large", [f"worker-{number:04}" for number in range(1_000)], loss=0.5)
        page = opened.open("/workers")
        expect(page.get_by_text("1,000 workers of large")).to_be_visible()
        assert page.get_by_role("row").count() < 60
        opened.shoot("thousand-workers")
        started_s = time.monotonic()
        page.get_by_label("Filter by worker or host").fill("worker-0999")
        expect(page.get_by_text("worker-0999")).to_be_visible()
        took_s = time.monotonic() - started_s
        page.get_by_label("Filter by worker or host").fill("")
        page.get_by_role("table", name="Workers").evaluate("table => { table.scrollTop = table.scrollHeight; }")
        expect(page.get_by_text("worker-0999")).to_be_visible()

        assert took_s < 2.0, "the page answers while it loads a thousand workers every second"
        assert opened.violations() == []


@pytest.mark.slow  # a minute, to watch it
def test_the_memory_of_a_tab_stays_flat_while_a_thousand_workers_report(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as coordinator,
        crowd(coordinator.address, 1_000),
        tab(browser, coordinator.http_address) as opened,
    ):
        page = opened.open("/workers")
        expect(page.get_by_text("1,000 workers of bench")).to_be_visible()
        page.wait_for_timeout(HEAP_SETTLES_S * 1e3)
        before = opened.heap_bytes()
        page.wait_for_timeout(HEAP_WATCHED_S * 1e3)

        assert opened.heap_bytes() - before < MAX_HEAP_GROWTH


@pytest.mark.slow  # writes and replays 100,000 entries
def test_a_hundred_thousand_events_are_shown_in_a_few_rows_and_reached_by_their_moment(
    browser: Browser, tmp_path: Path
) -> None:
    state = str(tmp_path / "state.db")
    at_s = write_events(state, tmp_path, MANY_EVENTS)
    with serving(tmp_path, state=state) as coordinator, tab(browser, coordinator.http_address) as opened:
        page = opened.open("/events", job="job")
        expect(page.get_by_text("rank-0 left").first).to_be_visible()
        assert page.locator(".events-body li").count() < MAX_ROWS
        opened.shoot("many-events")
        started_s = time.monotonic()
        page = opened.open("/events", job="job", time=f"{at_s:.3f}")
        expect(page.locator('li[aria-current="true"]')).to_be_in_viewport()
        took_s = time.monotonic() - started_s

        assert page.locator(".events-body li").count() < MAX_ROWS
        assert took_s < 5.0, "a moment in the middle is found by halving, not by reading everything"
        assert opened.violations() == []


def write_events(state: str, directory: Path, num_events: int) -> float:
    """Write joins and departures of a worker, one entry per second until now; return the time of the middle one."""
    with (
        serving(directory, state=state) as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        client.register_worker("rank-0", job_id="job").deregister("done")
    with closing(open_journal(state)) as journal:
        records = journal.load().records
        began_s = records[-1].at_s - num_events
        entries = [
            Entry(record.job_id, record.kind, began_s + number, record.payload)
            for number, record in zip(range(num_events), itertools.cycle(records), strict=False)
        ]
        for start in range(0, num_events, 10_000):
            journal.append(entries[start : start + 10_000])
    return began_s + num_events / 2


def test_a_stop_that_is_confirmed_ends_the_run_after_a_checkpoint(browser: Browser, run: Run) -> None:
    with tab(browser, run.url) as opened:
        opened.expected += ["ERR_", "HTTP 5"]  # the page ends with the run
        page = opened.open("/workers")
        page.get_by_role("button", name="Stop…").click()
        page.get_by_role("button", name="Save and stop").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        _, errors = run.process.communicate(timeout=60)

    assert "job stopped" in errors
    assert "checkpoints: none saved" not in errors
