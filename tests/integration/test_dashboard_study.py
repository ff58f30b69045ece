"""The page of a study: where it is announced, what it answers while the study runs and after it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import DEADLINE_S, until

from strata import SearchSpace, TrainingOrchestrator
from strata.errors import ConfigError

pytest.importorskip("cloudpickle")

pytestmark = pytest.mark.timeout(300)

STRATA = (sys.executable, "-m", "strata.cli")
SPACE = """
parameters:
  learning_rate: {type: float, min: 1e-4, max: 1.0, log: true}
  layers: {type: int, values: [1, 2]}
"""
TRAIN = """
    import argparse
    import time
    from pathlib import Path

    import strata

    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    ctx = strata.init()
    for step in range(1, 6):
        ctx.report(step=step, loss=arguments.learning_rate / step)
        while step == 2 and not Path("enough").exists():
            time.sleep(0.02)
    ctx.close()
"""
CALL = """
    import time
    from pathlib import Path

    from strata import SearchSpace, TrainingOrchestrator


    def train(config, trial):
        trial.report(step=1, loss=config["x"])
        while not Path("enough").exists():
            time.sleep(0.02)


    if __name__ == "__main__":
        space = SearchSpace().add_float("x", min=0.0, max=1.0)
        TrainingOrchestrator().tune(train, space=space, num_trials=2, workers=1, name="sweep", dashboard=True)
"""
ORDERED = """
    import time
    from pathlib import Path

    from strata import SearchSpace, TrainingOrchestrator


    def train(config, trial):
        step = 0
        while not Path("enough").exists():
            step += 1
            trial.report(step=step, loss=config["x"])
            time.sleep(0.05)


    if __name__ == "__main__":
        space = SearchSpace().add_float("x", min=0.0, max=1.0)
        TrainingOrchestrator().tune(train, space=space, num_trials=3, workers=2, name="sweep", dashboard=True)
"""
FIT = """
    import time
    from pathlib import Path

    import torch

    from strata import Trainer
    from strata.trainer.callbacks import Callback


    class Waiting(Callback):
        def on_start(self, run):
            while not Path("enough").exists():
                time.sleep(0.02)


    if __name__ == "__main__":
        module = torch.nn.Linear(2, 1)
        trainer = Trainer(module, torch.nn.MSELoss(), callbacks=Waiting(), name="fit", dashboard=True, logs="none")
        trainer.fit(torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
"""


class Announced:
    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address
        self.url = re.sub(r"/tuning$", "", address)

    def get(self, path: str, **query: Any) -> Any:
        return httpx.get(f"{self.url}{path}", params=query, timeout=DEADLINE_S).json()


@contextmanager
def announced(place: Path, *command: str) -> Iterator[Announced]:
    """Start a program that prints the address of its page, and let it end."""
    environment = {**os.environ, "STRATA_RUNS_DIR": str(place / "runs"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.fullmatch(r"dashboard: (http://\S+)\n", line):
                yield Announced(process, found[1])
                break
        else:
            raise AssertionError(lines)
        (place / "enough").touch()
        _, errors = process.communicate(timeout=DEADLINE_S * 4)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()


def written(place: Path, name: str, text: str) -> str:
    (place / name).write_text(textwrap.dedent(text))
    return name


def test_a_study_of_the_command_line_prints_the_address_of_its_view(tmp_path: Path) -> None:
    written(tmp_path, "space.yaml", SPACE)
    script = written(tmp_path, "train.py", TRAIN)
    sweep = ("tune", script, "--space", "space.yaml", "--trials", "3", "--name", "sweep")
    with announced(tmp_path, *STRATA, *sweep) as page:
        assert page.address.endswith("/tuning")
        assert [each["name"] for each in page.get("/api/studies")["items"]] == ["sweep"]
        until(lambda: page.get("/api/study")["counts"]["running"] == 2, "two trials run")
        assert page.get("/api/study")["is_running"]
        assert page.get("/api/run") is None, "a trial is not a rank of one run"

    with announced(tmp_path, *STRATA, "tune", "--resume", "sweep", "--trials", "4") as page:
        assert page.address.endswith("/tuning")
    with over(tmp_path, "sweep") as client:
        (study,) = client.get("/api/studies").json()["items"]
        info = client.get("/api/study", params={"study": study["study"]}).json()
        assert (info["state"], info["is_running"], info["counts"]["finished"]) == ("done", False, 4)
        trials = client.get("/api/study/trials", params={"sort": "value", "name": "loss", "limit": 3}).json()
        assert (trials["total"], trials["next_offset"]) == (4, 3)
        assert trials["items"][0]["number"] == info["best"]["number"]
        curves = client.get("/api/study/curves").json()
        assert all(each["steps"] == [1, 2, 3, 4, 5] for each in curves["items"])
        assert len(client.get("/api/study/parallel").json()["items"]) == 4
        assert client.get("/api/study/history").json()["best"][-1]["value"] == info["best"]["values"]["loss"]
        for path, words in (
            ("/api/study?study=other", "no study has the id 'other'"),
            ("/api/study/pareto", "two are needed"),
            ("/api/study/curves?metric=accuracy", "metric 'accuracy' is unknown; the study has loss"),
            ("/api/study/trials?limit=501", "less than or equal to 500"),
        ):
            refused = client.get(path)
            assert refused.status_code == 422, path
            assert words in refused.json()["error"]["message"]


def test_a_trial_is_stopped_or_started_again_and_the_journal_has_it(tmp_path: Path) -> None:
    program = written(tmp_path, "program.py", ORDERED)
    with announced(tmp_path, sys.executable, program) as page:

        def trial(number: int) -> dict[str, Any]:
            return page.get("/api/study/trial", number=number) or {}

        def order(what: str, number: int, **headers: str) -> httpx.Response:
            own = headers or {"x-strata-request": "1"}
            url = f"{page.url}/api/study/trial/{what}"
            return httpx.post(url, json={"number": number}, headers=own, timeout=DEADLINE_S)

        until(lambda: all(trial(each).get("step") for each in (0, 1)), "two trials report", deadline_s=120.0)
        assert page.get("/api/study")["may_command"]
        assert order("stop", 0, origin="http://evil.example").status_code == 403
        assert order("stop", 0).status_code == 204
        until(lambda: trial(0)["state"] == "pruned", "the trial ends", deadline_s=120.0)
        assert trial(0)["reason"] == "stopped by hand"
        assert order("requeue", 1).status_code == 204
        until(lambda: trial(1)["num_starts"] == 2, "the trial starts again", deadline_s=120.0)
        refused = order("stop", 0)
        assert refused.status_code == 422
        assert refused.json()["error"]["message"] == "trial 0 has already pruned"
        journal = (tmp_path / "runs" / "sweep" / "study.jsonl").read_text()
        assert [line.count('"kind":"Ordered"') for line in journal.splitlines()].count(1) == 2
    with over(tmp_path, "sweep") as client:
        assert client.get("/api/study/trial", params={"number": 0}).json()["state"] == "pruned"
        answer = client.post("/api/study/trial/stop", json={"number": 1}, headers={"x-strata-request": "1"})
        assert answer.status_code == 422
        assert "open the page that `strata tune` prints" in answer.json()["error"]["message"]


@contextmanager
def over(place: Path, name: str) -> Iterator[httpx.Client]:
    """Serve a study that is over."""
    environment = {**os.environ, "STRATA_RUNS_DIR": str(place / "runs")}
    command = [*STRATA, "dashboard", name, "--port=0", "--json"]
    with subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            shown = json.loads(server.stdout.readline())
            assert (shown["places"], len(shown["studies"])) == ([], 1)
            with httpx.Client(base_url=shown["http"], timeout=DEADLINE_S) as client:
                yield client
        finally:
            server.terminate()


def test_a_name_that_is_nothing_gets_an_error_with_all_that_was_tried(tmp_path: Path) -> None:
    (tmp_path / "runs" / "otter").mkdir(parents=True)
    environment = {**os.environ, "STRATA_RUNS_DIR": str(tmp_path / "runs")}
    done = subprocess.run(
        [*STRATA, "dashboard", "oter"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    for part in (
        f"{tmp_path / 'oter'} does not exist",
        f"among the runs and studies of {tmp_path / 'runs'}",
        "did you mean otter?",
        "give a directory, a URL, a .safetensors file, or the name of a run or study",
    ):
        assert part in words, words


@pytest.mark.parametrize(("text", "view", "name"), [(CALL, "/tuning", "sweep"), (FIT, "", "fit")])
def test_a_call_with_dashboard_prints_the_address_of_its_page(tmp_path: Path, text: str, view: str, name: str) -> None:
    program = written(tmp_path, "program.py", text)
    with announced(tmp_path, sys.executable, program) as page:
        assert page.address == f"{page.url}{view}"
        studies = page.get("/api/studies")["items"]
        assert [each["name"] for each in studies] == (["sweep"] if view else [])
        if view:
            until(lambda: page.get("/api/study")["counts"]["running"] == 1, "a trial runs", deadline_s=90.0)
            assert page.get("/api/study")["name"] == name
        else:
            until(lambda: page.get("/api/overview")["num_workers"] == 1, "the worker is up", deadline_s=90.0)
            assert page.get("/api/run")["name"] == name


def test_a_call_without_dashboard_opens_no_port_and_imports_no_page(tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    text = textwrap.dedent(CALL).replace(", dashboard=True", "")
    (tmp_path / "program.py").write_text(f"{text}    import sys\n    print('strata.dashboard' in sys.modules)\n")
    environment = {**os.environ, "STRATA_RUNS_DIR": str(tmp_path / "runs")}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert "dashboard:" not in done.stderr
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("dashboard='0.0.0.0:0'", "is not an address of this machine's loopback"),
        ("dashboard=8000", "dashboard=8000 must be True, False or HOST:PORT"),
    ],
)
def test_an_address_that_others_reach_is_refused_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    space = SearchSpace().add_float("x", min=0.0, max=1.0)
    _, value = arguments.split("=")
    dashboard: Any = value.strip("'") if "'" in value else int(value)
    with pytest.raises(ConfigError, match=words):
        TrainingOrchestrator().tune(len, space=space, dashboard=dashboard)
    with pytest.raises(ConfigError, match="leave it out, and open the page of that coordinator"):
        TrainingOrchestrator("127.0.0.1:1").tune(len, space=space, dashboard=True)
    assert not (tmp_path / "runs").exists()
