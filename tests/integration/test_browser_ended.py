"""`strata dashboard RUN` of a real run that is over: its API, and its page in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import browser, tab
from playwright.sync_api import Browser, expect
from servers import DEADLINE_S, STRATA, until

__all__ = ["browser"]

pytestmark = pytest.mark.timeout(180)
NUM_STEPS = 40
TRAIN = f"""
    import os, signal, time
    from pathlib import Path

    import torch

    import strata

    ctx = strata.init(every=10)
    state = {{"model": torch.nn.Linear(4, 2)}}
    step = ctx.restore(state).step
    print(f"rank {{ctx.rank}} starts at step {{step}}", flush=True)
    while step < {NUM_STEPS}:
        step += 1
        ctx.report(step=step, loss=1.0 / step)
        ctx.maybe_checkpoint(state)
        time.sleep(0.02)  # the pace of the steps
        if ctx.rank == 1 and step == 25 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    while not Path("seen").exists() and os.path.exists(f"/proc/{{os.environ['TEST_PID']}}"):
        ctx.report(step=step, loss=1.0 / step)
        time.sleep(0.02)
"""


class Ended:
    def __init__(self, directory: Path, announced: dict[str, Any]) -> None:
        self.directory, self.announced, self.url = directory, announced, announced["http"]

    def get(self, path: str, **query: Any) -> Any:
        answer = httpx.get(f"{self.url}{path}", params=query, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()


def loss_of(url: str) -> float | None:
    """Return the lowest loss of any rank so far."""
    query = {"job": "job", "name": "metric:loss"}
    (series,) = httpx.get(f"{url}/api/history", params=query, timeout=DEADLINE_S).json()["series"]
    return min(series["min"], default=None)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """A run that was killed once, is over, and is open in `strata dashboard`."""
    directory = tmp_path_factory.mktemp("ended")
    (directory / "train.py").write_text(textwrap.dedent(TRAIN))
    environment = {
        **os.environ,
        "STRATA_RUNS_DIR": str(directory / "runs"),
        "OMP_NUM_THREADS": "1",
        "TEST_PID": str(os.getpid()),
    }
    run = [str(STRATA), "run", "--workers=2", "--name=job", "--logs=none", "train.py"]
    with subprocess.Popen(run, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            live = process.stderr.readline().removeprefix("dashboard: ").strip()
            until(lambda: loss_of(live) == 1 / NUM_STEPS, "the last loss is in the history", deadline_s=120.0)
        finally:
            (directory / "seen").touch()
            _, words = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, words
    command = [str(STRATA), "dashboard", "job", "--port=0", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Ended(directory, json.loads(process.stdout.readline()))
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def test_the_api_of_an_ended_run_answers_from_its_directory(ended: Ended) -> None:
    assert ended.announced["run"] == "job"
    overview = ended.get("/api/overview")
    end = overview["ended"]
    assert (end["state"], end["step"], end["num_restarts"], end["missing"]) == ("done", NUM_STEPS, 1, [])
    assert overview["jobs"]["items"][0]["checkpoint_step"] == NUM_STEPS

    spans = {"since_s": end["began_at_s"] - 600, "until_s": end["ended_at_s"]}
    (loss,) = ended.get("/api/history", job="job", name="metric:loss", **spans)["series"]
    assert min(loss["min"]) == pytest.approx(1 / NUM_STEPS)
    goodput = ended.get("/api/goodput", job="job")
    assert sum(goodput["run"]["parts_s"].values()) == pytest.approx(goodput["run"]["total_s"], abs=1e-5)
    assert [each["attempt"] for each in goodput["attempts"]] == [0, 1]

    (recovery,) = ended.get("/api/recoveries", job="job")["items"]
    assert (recovery["rank"], recovery["cause"]) == (1, "rank 1: killed by SIGKILL")
    assert recovery["last_lines"][-1] == "rank 1 starts at step 0"
    kinds = {each["kind"] for each in ended.get("/api/events", job="job", limit=1000)["items"]}
    assert {"WorkerJoined", "WorkerLeft", "GenerationStarted"} <= kinds
    assert ended.get("/api/run/log", rank=1, attempt=0)["lines"] == ["rank 1 starts at step 0"]
    assert ended.get("/api/run/log", rank=1, attempt=1)["lines"] == [f"rank 1 starts at step {recovery['step']}"]
    place = ended.announced["places"][0]
    newest = ended.get("/api/lineage", job="job")["checkpoints"]["items"][0]["checkpoint_id"]
    tensors = ended.get("/api/explorer/tensors", place=place, id=newest)["items"]
    assert {"model.bias", "model.weight"} <= {each["name"] for each in tensors}


def test_an_ended_run_takes_no_orders(ended: Ended) -> None:
    own = {"x-strata-request": "1"}
    for order, body in (("stop", {}), ("scale", {"workers": 1}), ("stacks", {"rank": 0})):
        answer = httpx.post(f"{ended.url}/api/run/{order}", json=body, headers=own, timeout=DEADLINE_S)
        assert answer.status_code in (404, 405), order
    assert ended.get("/api/run")["may_command"] is False


def test_the_page_of_an_ended_run_shows_charts_of_its_whole_time_goodput_and_logs(
    browser: Browser, ended: Ended
) -> None:
    with tab(browser, ended.url) as opened:
        page = opened.open("/")
        expect(page.locator(".connection")).to_contain_text("Ended")
        expect(page.get_by_label("Figures").first).to_contain_text("done")
        loss = page.get_by_role("article", name="loss")
        loss.scroll_into_view_if_needed()
        expect(loss.locator("canvas")).to_be_visible()
        expect(page.get_by_role("group", name="Time span")).to_have_count(0)
        expect(page.locator(".recent li").first).to_be_visible()
        opened.shoot("ended-overview")
        assert opened.violations() == []
        opened.open("/goodput")
        expect(page.get_by_role("rowheader", name="Attempt 1").or_(page.get_by_text("Attempt 1")).first).to_be_visible()
        opened.shoot("ended-goodput")
        opened.open("/workers")
        expect(page.get_by_role("button", name="Stop…")).to_have_count(0)
        page.get_by_role("button", name="Log of rank 1").click()
        expect(page.get_by_label("Log of rank 1").last.get_by_text("rank 1 starts at step")).to_be_visible()
        expect(page.get_by_role("button", name="Dump stacks")).to_have_count(0)
        opened.shoot("ended-workers")
        assert opened.violations() == []
