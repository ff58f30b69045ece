"""One thousand workers with a heartbeat per second, and three pages open in Chromium: what the HTTP side costs.

HTTP and heartbeats share an event loop, so the cost of the pages is the CPU time of the coordinator with the pages open
minus that without them, measured in turns. What the coordinator spends on the dashboard even without a page, mostly its
sample per second, is the difference to a coordinator without HTTP.

A heartbeat that is not sent costs nothing, so that pages would look cheap on a busy machine. Therefore heartbeats are
counted, and a machine that is too busy to send them is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from strata.bench.contenders.dashboard_page import TIMEOUT_MS, chromium, missing, report
from strata.bench.server_processes import CLIENT_CORE, coordinator, coordinator_with_page, cpu_s, pin
from strata.bench.timing import quantile
from strata.coordinator.client import AsyncCoordinatorClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.coordinator.client import AsyncWorker

NUM_WORKERS, NUM_QUICK_WORKERS = 1_000, 50
NUM_PAGES = 3
AT_ONCE = 50
JOIN_S = 120.0
SETTLE_S = 3.0
LOOK_S, QUICK_LOOK_S = 12.0, 2.0
NUM_ASKED, NUM_QUICK_ASKED = 60, 8
ASK_EVERY_S = 0.25
"""Overviews are built once per sample, so requests meet new samples and old ones."""
ASK_S = 10.0
JOB = "bench"
MIN_SENT = 0.9
"""Share of the heartbeats due that must be sent in every look, unless it is a quick one."""


# -- workers -------------------------------------------------------------------------------------------------------


class Crowd:
    """Workers that report a step and two metrics with each heartbeat."""

    def __init__(self, workers: Sequence[AsyncWorker]) -> None:
        self.num_sent = 0
        self.due_per_s = sum(1 / worker.heartbeat_s for worker in workers)
        self._workers = workers
        for worker in workers:
            worker.measure(self._count)  # called for every heartbeat

    async def report_forever(self) -> None:
        for step in itertools.count():
            for worker in self._workers:
                worker.report(state="TRAINING", step=step, loss=1 / (1 + step), accuracy=step / (1 + step))
            await asyncio.sleep(1.0)

    def _count(self) -> None:
        self.num_sent += 1


@contextlib.contextmanager
def crowd(address: str, num_workers: int) -> Iterator[Crowd]:
    """Keep workers alive for the duration of the block; all must survive."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="workers", daemon=True)
    thread.start()
    clients = [AsyncCoordinatorClient(address) for _ in range(num_workers)]

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(JOIN_S)

    try:
        workers = Crowd(run(join(clients)))
        reports = asyncio.run_coroutine_threadsafe(workers.report_forever(), loop)
        time.sleep(SETTLE_S)
        yield workers
        members = run(clients[0].list_workers(job_id=JOB))
        if len(members.workers) != num_workers:
            raise RuntimeError(f"only {len(members.workers)} of {num_workers} workers are alive: {members.reason}")
        reports.cancel()
        run(close(clients))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def join(clients: Sequence[AsyncCoordinatorClient]) -> list[AsyncWorker]:
    workers: list[AsyncWorker] = []
    for start in range(0, len(clients), AT_ONCE):
        some = clients[start : start + AT_ONCE]
        await asyncio.gather(*(client.connect() for client in some))
        registered = (client.register_worker(f"worker-{start + i:04d}", job_id=JOB) for i, client in enumerate(some))
        workers += await asyncio.gather(*registered)
    return workers


async def close(clients: Sequence[AsyncCoordinatorClient]) -> None:
    await asyncio.gather(*(client.close() for client in clients))


# -- pages ---------------------------------------------------------------------------------------------------------


class Pages:
    """Pages that are open at the same time, each in a window of its own, so that none is in the background."""

    def __init__(self, browser: Any, url: str, path: str) -> None:
        self._contexts = [browser.new_context(viewport={"width": 1_280, "height": 800}) for _ in range(NUM_PAGES)]
        self._pages = [context.new_page() for context in self._contexts]
        for page in self._pages:
            page.goto(f"{url}{path}", wait_until="load", timeout=TIMEOUT_MS)
            page.locator("h1").first.wait_for(timeout=TIMEOUT_MS)

    def wait(self, seconds: float) -> None:
        """Wait, and fail if a page shows nothing new after it: a page that hangs costs nothing."""
        before = [page.inner_text("body") for page in self._pages]
        self._pages[0].wait_for_timeout(seconds * 1e3)
        if any(page.inner_text("body") == seen for page, seen in zip(self._pages, before, strict=True)):
            raise RuntimeError(f"a page showed nothing new for {seconds:g} s")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


class Meter:
    """Looks at a coordinator for a while, and at how many heartbeats its workers sent meanwhile."""

    def __init__(self, pid: int, workers: Crowd, seconds: float) -> None:
        self.seconds = seconds
        self.sent_fractions: list[float] = []
        self._server = psutil.Process(pid)
        self._workers = workers

    def fraction_of_core(self, pages: Pages | None, seconds: float) -> float:
        """Return the CPU time of the coordinator per second."""
        before_s, num_before, begun_s = cpu_s(self._server), self._workers.num_sent, time.perf_counter()
        if pages is None:
            time.sleep(seconds)
        else:
            pages.wait(seconds)
        used_s, num_sent = cpu_s(self._server) - before_s, self._workers.num_sent - num_before
        taken_s = time.perf_counter() - begun_s
        self.sent_fractions.append(num_sent / (taken_s * self._workers.due_per_s))
        return used_s / taken_s

    def with_pages(self, browser: Any, url: str, path: str) -> float:
        """Return the fraction of a core that three open pages cost, between two looks without them."""
        before = self.fraction_of_core(None, self.seconds / 2)
        pages = Pages(browser, url, path)
        time.sleep(SETTLE_S)
        opened = self.fraction_of_core(pages, self.seconds)
        pages.close()
        time.sleep(SETTLE_S)
        after = self.fraction_of_core(None, self.seconds / 2)
        return opened - (before + after) / 2


def ask_overview(url: str, num_asked: int) -> dict[str, float]:
    """Return the size of the overview and how long one connection waits for it."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ASK_S)
    taken_s, body = [], b""
    for _ in range(num_asked):
        start_s = time.perf_counter()
        connection.request("GET", "/api/overview")
        answer = connection.getresponse()
        body = answer.read()
        taken_s.append(time.perf_counter() - start_s)
        if answer.status != http.client.OK:
            raise RuntimeError(f"/api/overview has status {answer.status}: {body[:200]!r}")
        time.sleep(ASK_EVERY_S)
    connection.close()
    return {
        "overview_kb": len(body) / 1e3,
        "overview_ms": quantile(taken_s, 0.5) * 1e3,
        "overview_p99_ms": quantile(taken_s, 0.99) * 1e3,
    }


# -- the measurement -----------------------------------------------------------------------------------------------


def without_http(directory: Path, num_workers: int, seconds: float) -> tuple[float, float]:
    """Return the fraction of a core of a coordinator that serves no HTTP, and the share of heartbeats sent."""
    with coordinator(directory) as (address, pid), crowd(address, num_workers) as workers:
        meter = Meter(pid, workers, seconds)
        return meter.fraction_of_core(None, seconds), min(meter.sent_fractions)


def with_http(directory: Path, num_workers: int, seconds: float, *, num_asked: int) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        address, url, pid = stack.enter_context(coordinator_with_page(directory, on_server_core=True))
        meter = Meter(pid, stack.enter_context(crowd(address, num_workers)), seconds)
        closed_fraction = meter.fraction_of_core(None, seconds)
        browser = stack.enter_context(chromium())
        figures = {
            "http_cpu_fraction": meter.with_pages(browser, url, "/"),
            "http_workers_cpu_fraction": meter.with_pages(browser, url, "/workers"),
            "http_unseen_cpu_fraction": closed_fraction,
            "heartbeats_fraction": min(meter.sent_fractions),
        }
        pages = Pages(browser, url, "/")
        figures |= ask_overview(url, num_asked)
        pages.close()
        return figures


def main() -> None:
    quick = "--quick" in sys.argv
    num_workers, seconds = (NUM_QUICK_WORKERS, QUICK_LOOK_S) if quick else (NUM_WORKERS, LOOK_S)
    pin(CLIENT_CORE)  # workers and browser; the servers choose their core themselves
    with contextlib.ExitStack() as stack:
        bare, served = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-"))) for _ in range(2)
        )
        bare_fraction, sent_fraction = without_http(bare, num_workers, seconds)
        figures = with_http(served, num_workers, seconds, num_asked=NUM_QUICK_ASKED if quick else NUM_ASKED)
    figures["without_http_cpu_fraction"] = bare_fraction
    figures["http_unseen_cpu_fraction"] -= bare_fraction
    figures["heartbeats_fraction"] = min(figures["heartbeats_fraction"], sent_fraction)
    if figures["heartbeats_fraction"] < MIN_SENT and not quick:
        raise RuntimeError(
            f"the workers sent only {figures['heartbeats_fraction']:.0%} of their heartbeats; this machine is too busy "
            "to measure what pages cost: stop other programs and run it again"
        )
    report("", figures, {})


if __name__ == "__main__":
    absent = missing()
    if absent is None:
        main()
    else:
        print(json.dumps({"not_installed": absent}))
