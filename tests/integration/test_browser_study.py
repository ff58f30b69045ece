"""The view of a study in a real browser: a running study with several objectives, new reports, axe, a phone, and a
study that is over.
"""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import PHONE, Tab, Theme, browser, tab
from playwright.sync_api import Browser, expect
from servers import DEADLINE_S, STRATA, until

pytest.importorskip("cloudpickle")

__all__ = ["browser"]

pytestmark = pytest.mark.timeout(300)
HOSTILE = "<img src=x onerror=alert(1)>"
NUM_TRIALS = 16
SPACE = """
parameters:
  learning_rate: {type: float, min: 1e-4, max: 1.0, log: true}
  layers: {type: int, values: [1, 2, 3]}
  optimizer: {type: categorical, choices: [sgd, adam]}
"""
TRAIN = f"""
    import argparse, os, time
    from pathlib import Path

    import strata

    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--optimizer")
    arguments = parser.parse_args()
    ctx = strata.init()
    is_late = len(list(Path("ended").iterdir())) >= 7
    for step in range(1, 5):
        if is_late and step > 1:
            Path("waiting", str(os.getpid())).touch()
            while not (Path(f"go-{{step}}").exists() or Path("enough").exists()):
                time.sleep(0.02)
        loss = (arguments.learning_rate - 0.1) ** 2 + 1 / step
        ctx.report(step=step, loss=loss, latency=float(arguments.layers) + arguments.learning_rate)
    Path("ended", str(os.getpid())).touch()
    if arguments.optimizer == "sgd" and not is_late:
        raise ValueError("{HOSTILE}")
    ctx.close()
"""


class Sweep:
    def __init__(self, directory: Path, process: subprocess.Popen[str], url: str) -> None:
        self.directory, self.process, self.url = directory, process, url

    def get(self, path: str, **query: Any) -> Any:
        return httpx.get(f"{self.url}{path}", params=query, timeout=DEADLINE_S).json()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """A study of which at least seven trials have ended, and two wait after their first report."""
    directory = tmp_path_factory.mktemp("sweep")
    (directory / "train.py").write_text(textwrap.dedent(TRAIN))
    (directory / "space.yaml").write_text(SPACE)
    for folder in ("ended", "waiting"):
        (directory / folder).mkdir()
    aims = ("--metric=loss", "--metric=latency", "--direction=min", "--direction=min", "--max-failures=1")
    command = [
        *(str(STRATA), "tune", "train.py", "--space=space.yaml", "--name=sweep", f"--trials={NUM_TRIALS}", *aims),
        *("--workers=2", "--mode=random", "--seed=3"),
    ]
    environment = {**os.environ, "STRATA_RUNS_DIR": str(directory / "runs"), "OMP_NUM_THREADS": "1"}
    with (directory / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=errors, text=True
        )
    try:
        log = directory / "stderr"
        until(lambda: "dashboard: " in log.read_text() or process.poll() is not None, "it starts", deadline_s=120)
        found = re.search(r"dashboard: (http://\S+)/tuning\n", log.read_text())
        assert found, log.read_text()
        until(
            lambda: len(list((directory / "waiting").iterdir())) == 2 or process.poll() is not None,
            "two trials wait",
            deadline_s=120,
        )
        yield Sweep(directory, process, found[1])
    finally:
        (directory / "enough").touch()
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def loaded(opened: Tab, path: str = "/tuning", **query: str) -> Any:
    page = opened.open(path, **query)
    page.locator("tbody tr").first.wait_for()
    expect(page.locator(".loading")).to_have_count(0)
    return page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_wrong_on_the_view_of_a_study(browser: Browser, sweep: Sweep, theme: Theme) -> None:
    with tab(browser, sweep.url, theme=theme) as opened:
        page = loaded(opened, trial="0")
        expect(page.get_by_role("heading", name="Pareto front")).to_be_visible()
        expect(page.get_by_role("heading", name="Trial 0", exact=True)).to_be_visible()
        page.set_viewport_size({"width": 1280, "height": 2_400})
        opened.shoot(f"tuning-{theme}")

        assert opened.violations() == []
        assert page.locator("img[src=x]").count() == 0


def test_a_phone_shows_a_study_without_scrolling_sideways(browser: Browser, sweep: Sweep) -> None:
    with tab(browser, sweep.url, size=PHONE, is_phone=True) as opened:
        page = loaded(opened, trial="0")
        page.set_viewport_size({"width": PHONE[0], "height": 4_000})
        opened.shoot("tuning-phone")

        assert opened.overflow_px() <= 0


def test_failed_trials_are_found_with_their_reasons(browser: Browser, sweep: Sweep) -> None:
    failed = sweep.get("/api/study")["counts"]["failed"]
    assert failed
    with tab(browser, sweep.url) as opened:
        page = loaded(opened)
        page.get_by_label("State").select_option("failed")
        expect(page.get_by_text(f"{failed} trial{'s' if failed > 1 else ''} match")).to_be_visible()
        expect(page.get_by_role("row")).to_have_count(failed + 1)
        expect(page.get_by_text(HOSTILE).first).to_be_visible()
        opened.shoot("tuning-failed")


def test_a_new_report_appears_without_a_reload(browser: Browser, sweep: Sweep) -> None:
    with tab(browser, sweep.url) as opened:
        page = loaded(opened, state="running")
        expect(page.get_by_role("row")).to_have_count(3)
        page.evaluate("window.isSame = true")
        steps = page.locator("tbody tr td:nth-child(5)")
        expect(steps.first).to_have_text("1")
        (sweep.directory / "go-2").touch()
        expect(steps.first).to_have_text("2")
        opened.shoot("tuning-running")

        assert page.evaluate("window.isSame")


def test_a_stop_of_a_trial_asks_first(browser: Browser, sweep: Sweep) -> None:
    number = sweep.get("/api/study/trials", state="running")["items"][0]["number"]
    with tab(browser, sweep.url) as opened:
        page = loaded(opened, trial=str(number))
        page.get_by_role("button", name="Stop…").click()
        expect(page.get_by_role("dialog", name=f"Stop trial {number}?")).to_be_visible()
        opened.shoot("tuning-stop")
        assert opened.violations() == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert sweep.get("/api/study/trial", number=number)["state"] == "running"


def test_a_study_that_is_over_opens_by_its_name(browser: Browser, sweep: Sweep) -> None:
    (sweep.directory / "enough").touch()
    assert sweep.process.wait(timeout=120) == 0
    environment = {**os.environ, "STRATA_RUNS_DIR": str(sweep.directory / "runs")}
    command = [str(STRATA), "dashboard", "sweep", "--port=0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with tab(browser, address.rstrip("/")) as opened:
                opened.expected += ["404"]  # how the page finds out that there is no coordinator
                page = loaded(opened, "/")
                expect(page.get_by_role("heading", name="Tuning", exact=True)).to_be_visible()
                expect(page.get_by_text(f"all {NUM_TRIALS} trials have ended")).to_be_visible()
                opened.shoot("tuning-over")
        finally:
            server.terminate()
