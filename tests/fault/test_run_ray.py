"""`strata run --engine ray` on a Ray cluster of several nodes, which are killed: every row counts once, and the weights
are those of an undisturbed local run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from leftovers import nothing_is_left, processes_with
from ray_cluster import LOOPBACK_ONLY, RayNodes, actor_of, ray_nodes
from runs import DEADLINE_S, SCRIPTS, Run, write_rows
from servers import until

EPOCHS = 2
SLOW_ALONE = """
import os, runpy, sys
import torch
sys.argv += ["--step-s", "1" if os.environ["WORLD_SIZE"] == "1" else "0"]
runpy.run_path("train_rows.py", run_name="__main__")
"""
"""A script that does not finish before the run has grown."""
FUNCTION = """
import json, sys
import strata

def train(place):
    import beside

    with strata.init(saver="thread") as ctx:
        ctx.checkpoint({"weights": beside.WEIGHTS}, step=1).wait()
        return ctx.rank, ctx.world_size, place

print(json.dumps(strata.TrainingOrchestrator().run(train, "here", engine="ray", **json.loads(sys.argv[1]))))
"""
TRAINER = """
import json, sys
import torch
from strata import Trainer

engine, workers, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
x = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
module = torch.nn.Linear(3, 1)
trainer = Trainer(module, torch.nn.MSELoss(), torch.optim.Adam, ["mse"], workers=workers, engine=engine, logs="none")
result = trainer.fit((x, x.sum(1)), valid=(x, x.sum(1)), epochs=2, batch_size=batch_size)
print(json.dumps([*module.weight.flatten().tolist(), result.history[-1]["valid_mse"]]))
"""
SERVERS = """
import json, os, sys
from pathlib import Path
import psutil, torch
from torch import nn
from strata import Trainer
from strata.train import Hybrid, ParameterServer

class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(100, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, user):
        return self.top(self.user(user)).squeeze(1)

class Killed(Trainer):
    calls = 0
    places = Path(sys.argv[2]).absolute()  # pickled by value: a worker has other arguments
    kills = bool(sys.argv[3:])

    def training_step(self, module, batch):
        self.calls += 1
        rank = int(os.environ["RANK"])
        if self.calls == 2:
            client = next(iter(self.module.user._rows._source._clients.values()))
            kinds = ["shared" if link._connection.can_share else "tls" for link in client._links]
            (self.places / f"links-{rank}").write_text(json.dumps([os.environ["GROUP_RANK"], kinds]))
        mark = self.places / "killed"
        if self.kills and rank == 0 and self.calls == 6 and not mark.exists():
            mark.touch()
            title = f"strata: {os.environ['STRATA_RUN']} server 1"
            found = psutil.process_iter(["cmdline"])  # not cmdline(), which raises for zombies
            (server,) = [each for each in found if " ".join(each.info["cmdline"] or ()).startswith(title)]
            server.kill()
        return super().training_step(module, batch)

if __name__ == "__main__":
    user = torch.randint(0, 100, (400,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = Clicks()
    options = {"strategy": Hybrid(sparse=ParameterServer(servers=2, tables="user")), "workers": 2, "logs": "none"}
    trainer = Killed(module, nn.MSELoss(), torch.optim.Adagrad, engine=sys.argv[1], **options)
    result = trainer.fit({"user": user, "y": user.float() / 100}, label="y", epochs=2, batch_size=16, every=4)
    weights = [value for each in module.parameters() for value in each.flatten().tolist()]
    print(json.dumps({"weights": weights, "rows": [each["rows"] for each in result.servers]}))
"""
ALONE = """
import json, os, signal, time
from pathlib import Path
import psutil, torch
from torch import nn
from strata import Trainer
from strata.train import ParameterServer

NUM_USERS = 200

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(NUM_USERS, 1)
        nn.init.zeros_(self.user.weight)

    def forward(self, user):
        return self.user(user).squeeze(1)

class Killed(Trainer):
    calls = 0
    marks = Path("marks").absolute()

    def training_step(self, module, batch):
        self.calls += 1
        rank = os.environ["RANK"]
        (self.marks / f"process-{rank}-{os.getpid()}").touch()
        mark = self.marks / f"killed-{rank}"
        if self.calls == 6 and not mark.exists():
            mark.touch()
            os.kill(os.getpid() if rank == "1" else self.server_to_kill(), signal.SIGKILL)
        return batch.call(module).sum()

    def server_to_kill(self):
        deadline_s = time.monotonic() + 240
        while len(list(self.marks.glob("process-1-*"))) < 2:
            assert time.monotonic() < deadline_s, "rank 1 has not returned"
            time.sleep(0.05)
        title = f"strata: {os.environ['STRATA_RUN']} server 1"
        found = psutil.process_iter(["cmdline"])
        (server,) = [each for each in found if " ".join(each.info["cmdline"] or ()).startswith(title)]
        return server.pid

if __name__ == "__main__":
    module = Counts()
    strategy = ParameterServer(servers=2, tables="user", staleness=None, replicas=1)
    options = {"strategy": strategy, "workers": 2, "engine": "ray", "logs": "none", "optimizer_args": {"lr": 1.0}}
    trainer = Killed(module, optimizer=torch.optim.SGD, **options)
    result = trainer.fit({"user": torch.arange(NUM_USERS)}, epochs=1, batch_size=4, every=1_000)
    counts = sorted(set(module.user.weight.flatten().tolist()))
    print(json.dumps({"counts": counts, "lost": result.lost_updates, "steps": result.steps}))
"""
"""Rank 1 kills itself, and rank 0 a server once rank 1 has returned. Each row lowers the weight of its user by one."""
pytestmark = pytest.mark.timeout(300)  # Ray starts slowly


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data")


@pytest.fixture
def job(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Create runs in directories with their script, and remove them after the test."""
    made: list[Run] = []
    for name, value in LOOPBACK_ONLY.items():
        monkeypatch.setenv(name, value)

    def make(name: str, *options: str, wrapper: str = "") -> Run:
        place = tmp_path / name
        place.mkdir()
        script = shutil.copy(SCRIPTS / "train_rows.py", place)
        if wrapper:
            script = place / "wrapper.py"
            script.write_text(wrapper)
        mark = f"STRATA_TEST={tmp_path}"
        made.append(Run(place, data, "--env", mark, *options, script=Path(script)))
        return made[-1]

    with nothing_is_left(tmp_path, but="ray"):  # Ray keeps the logs of a cluster
        yield make
        for run in made:
            run.bury()
        until(lambda: not processes_with(f"STRATA_TEST={tmp_path}"), "no worker is left")


def checked(run: Run, num_workers: int) -> str:
    """Check that every row was trained on once per epoch, on all ranks alike; return the digest of the weights."""
    results = run.results()
    assert [each["rank"] for each in results] == list(range(num_workers))
    assert [each["counts"] for each in results] == [[EPOCHS]] * num_workers
    digests = {each["digest"] for each in results}
    assert len(digests) == 1
    return digests.pop()


@pytest.mark.slow
def test_actors_and_nodes_that_are_killed_cost_no_row(ray: RayNodes, job: Callable[..., Run]) -> None:
    ray.have(2)  # one more than needed: a place for the worker of a killed node
    run = job("killed", "--engine", "ray", "--address", ray.address, "--workers", "2", "--max-restarts", "10")
    run.start("--step-s", "0.05")
    run.wait_for_step(0, 8)
    actor_of(run.pid(0, 1)).kill()
    start = int(run.wait_for(1, 0, r"restored (\d+)")[1])
    run.wait_for_step(1, start + 6)
    assert any(ray.kill_node_of(run.pid(1, rank)) for rank in (0, 1))
    code, output = run.wait()
    assert code == 0, output
    assert "its Ray actor has ended" in output
    assert min(each["attempt"] for each in run.results()) >= 2
    local = job("local", "--workers", "2")
    local.start()
    assert local.wait()[0] == 0
    assert checked(run, 2) == checked(local, 2)


@pytest.mark.slow
def test_a_run_grows_onto_a_node_that_joins_later_over_the_network(ray: RayNodes, job: Callable[..., Run]) -> None:
    """Not all workers fit, so other machines may join: Ray copies the directory, and the run uses TLS and a token."""
    ray.have(0)
    options = ("--engine", "ray", "--address", ray.address, "--workers", "1:2", "--checkpoints", "saved")
    run = job("grows", *options, wrapper=SLOW_ALONE)
    run.start()
    run.wait_for_step(0, 3)  # its log is transferred by Ray
    variables = psutil.Process(run.pid(0, 0)).environ()
    assert Path(variables["STRATA_TLS_CA"]).read_bytes().startswith(b"-----BEGIN CERTIFICATE-----")
    assert Path(variables["STRATA_TOKEN_FILE"]).stat().st_mode & 0o077 == 0
    connections = psutil.Process(run.pid(0, 0)).net_connections(kind="tcp")
    assert any(each.raddr and each.raddr.ip == "127.0.0.1" for each in connections)
    assert not Path(f"/proc/{run.pid(0, 0)}/cwd").readlink().is_relative_to(run.place)  # it runs in Ray's copy
    ray.have(1)
    code, output = run.wait()
    assert code == 0, output
    checked(run, 2)
    assert "from 1 to 2 workers" in output
    assert [event["what"] for event in run.events()].count("failed") == 0
    assert not Path(variables["STRATA_TOKEN_FILE"]).exists()


def test_without_a_shared_place_for_checkpoints_machines_cannot_work_together(
    ray: RayNodes, job: Callable[..., Run]
) -> None:
    run = job("refused", "--engine", "ray", "--address", ray.address, "--workers", "1", "--ship")
    run.start()
    code, output = run.wait()
    assert code == 2
    assert "pass a location that all of them can reach" in output


def listened_at(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.NoSuchProcess):  # some processes of Ray are short-lived
        connections = process.net_connections("tcp")
        return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return set()


@pytest.fixture
def call(ray: RayNodes, job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let a program call a function on the cluster; return its last line of output and its stderr."""
    place = job("function").place
    (place / "function.py").write_text(FUNCTION)
    (place / "beside.py").write_text("WEIGHTS = b'w'")
    monkeypatch.setenv("RAY_ADDRESS", ray.address)
    monkeypatch.setenv("STRATA_RUNS_DIR", str(place / "runs"))

    def called(**options: Any) -> tuple[str, str]:
        ended = subprocess.run(
            [sys.executable, "function.py", json.dumps(options)],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return "".join(ended.stdout.splitlines()[-1:]), ended.stderr  # Ray prints warnings before it

    return called


def test_a_function_runs_on_a_cluster_of_this_machine(ray: RayNodes, call: Callable[..., Any]) -> None:
    ray.have(1)
    output, errors = call(workers=2)
    assert output, errors
    assert json.loads(output) == [[0, 2, "here"], [1, 2, "here"]]


@pytest.mark.slow
def test_a_trainer_on_ray_makes_the_steps_of_one_in_this_process(
    ray: RayNodes, job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.have(1)
    place = job("trainer").place
    (place / "fit.py").write_text(TRAINER)
    monkeypatch.setenv("RAY_ADDRESS", ray.address)
    monkeypatch.setenv("STRATA_RUNS_DIR", str(place / "runs"))

    def fit(*arguments: str) -> list[float]:
        command = [sys.executable, "fit.py", *arguments]
        ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert ended.returncode == 0, ended.stderr
        found: list[float] = json.loads(ended.stdout.splitlines()[-1])
        return found

    assert fit("ray", "2", "8") == pytest.approx(fit("local", "1", "16"), abs=1e-6)


@pytest.mark.slow
def test_parameter_servers_on_ray_are_spread_over_nodes_and_survive_a_kill_bit_for_bit(
    job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two nodes has a worker and a server; between nodes, they speak TLS."""
    place = job("servers").place
    (place / "fit.py").write_text(SERVERS)
    monkeypatch.setenv("STRATA_RUNS_DIR", str(place / "runs"))

    def fit(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "fit.py", *arguments]
        ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240, check=False)
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found

    for each in ("local", "ray"):
        (place / each).mkdir()
    local = fit("local", "local")
    with ray_nodes(num_cpus=2) as nodes:
        nodes.have(1)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        assert fit("ray", "ray", "kills") == local
    assert (place / "ray" / "killed").exists()
    links = [json.loads((place / "ray" / f"links-{rank}").read_text()) for rank in (0, 1)]
    assert [node for node, _ in links] == ["0", "1"]
    assert sorted(kinds for _, kinds in links) == [["shared", "tls"], ["tls", "shared"]]
    events = [
        json.loads(line) for path in (place / "runs").glob("*/events.jsonl") for line in path.read_text().splitlines()
    ]
    assert any(each["text"] == "server 1: killed by SIGKILL" for each in events), events


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_asynchronous_worker_and_a_server_on_ray_restart_alone_and_every_row_counts_once(
    job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = job("alone").place
    (place / "fit.py").write_text(ALONE)
    (place / "marks").mkdir()
    monkeypatch.setenv("STRATA_RUNS_DIR", str(place / "runs"))
    with ray_nodes(num_cpus=2) as nodes:
        nodes.have(1)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        command = [sys.executable, "fit.py"]
        ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode == 0, ended.stderr

    assert json.loads(ended.stdout.splitlines()[-1]) == {"counts": [-1.0], "lost": 0, "steps": 25}
    events = [
        json.loads(line) for path in (place / "runs").glob("*/events.jsonl") for line in path.read_text().splitlines()
    ]
    assert [each["rank"] for each in events if each["what"] == "restarted"] == [1, 3]
    assert {each["attempt"] for each in events} <= {-1, 0}
    assert len(list((place / "marks").glob("process-0-*"))) == 1, "the other worker has kept its process"


@pytest.mark.slow
def test_a_function_runs_over_the_network_if_all_reach_its_checkpoints(ray: RayNodes, call: Callable[..., Any]) -> None:
    """Not all workers fit, as above; all machines share the directory of runs."""
    ray.have(0)
    _, errors = call(workers="1:2")
    assert "checkpoints='/shared/run'" in errors
    output, errors = call(workers="1:2", checkpoints="saved")
    assert output, errors
    assert json.loads(output) == [[0, 1, "here"]]


@pytest.mark.slow
def test_without_an_address_a_run_starts_a_private_cluster(
    job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LOOPBACK_ONLY:
        monkeypatch.delenv(name)
    run = job("own", "--engine", "ray", "--workers", "1", "--max-restarts", "0")
    seen = run.place / "seen"
    run.start("--fail-at", "100", "--step-s", "0.5", "--until", str(seen))
    run.wait_for_step(0, 1)
    agent = psutil.Process(run.agent.pid)
    processes = [agent, *agent.children(recursive=True)]
    worker = run.pid(0, 0)  # excluded: torch's store in the worker listens on all addresses
    listening = set[str]().union(*(listened_at(each) for each in processes if each.pid != worker))
    seen.touch()
    assert listening
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    out, err = run.agent.communicate(timeout=DEADLINE_S)
    assert run.agent.returncode == 1
    assert "ValueError: row" in out, "the output of rank 0 is shown"
    assert "failed: rank 0: exit code 1: ValueError: row" in err
