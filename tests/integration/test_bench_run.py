"""Benchmarks with real processes: tiny contenders that answer, are missing, fail, hang or leave processes behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from servers import until

from strata.bench.contenders import recovery_torchrun, recovery_watch
from strata.bench.frame import MAX_LOST, Benchmark, Contender, Figure
from strata.bench.processes import killed_with_descendants
from strata.bench.run import ROUND_VARIABLE, find_peers_python, run_benchmark, run_with_progress, venv_variable

FIGURES = (Figure(key="one_ms", title="one", unit="ms"), Figure(key="two_ms", title="two", unit="ms"))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for modules of contenders; there is no peers' environment unless a test creates one."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(venv_variable("peers"), str(tmp_path / "no-peers"))
    return tmp_path


def benchmark(*contenders: Contender) -> Benchmark:
    return Benchmark(name="tiny", title="Tiny", contenders=contenders, figures=FIGURES, rounds=3)


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_two_contenders_take_turns_in_fresh_processes(modules: Path) -> None:
    log = modules / "log"
    for name in ("one", "two"):
        (modules / f"tiny_{name}.py").write_text(
            "import json, os, pathlib\n"
            f"with pathlib.Path({str(log)!r}).open('a') as log: log.write(f'{name} {{os.getpid()}}\\n')\n"
            "print('warming up')\n"
            f"print(json.dumps({{'figures': {{'{name}_ms': os.getpid()}}}}))\n"
        )
    one, two = (Contender(name=name, module=f"tiny_{name}") for name in ("one", "two"))
    started: list[tuple[int, str]] = []
    outcome = run_benchmark(benchmark(one, two), on_start=lambda number, c: started.append((number, c.name)))
    ran = [line.split() for line in log.read_text().splitlines()]
    assert [name for name, _ in ran] == ["one", "two"] * 3
    assert len({pid for _, pid in ran}) == 6
    assert started == [(0, "one"), (0, "two"), (1, "one"), (1, "two"), (2, "one"), (2, "two")]
    assert [s.figures for s in outcome.samples] == [{f"{name}_ms": float(pid)} for name, pid in ran]
    assert not outcome.failures


def test_contenders_know_the_number_of_their_round(modules: Path) -> None:
    (modules / "tiny_seeded.py").write_text(
        f"import json, os\nprint(json.dumps({{'figures': {{'one_ms': int(os.environ['{ROUND_VARIABLE}'])}}}}))\n"
    )
    outcome = run_benchmark(benchmark(Contender(name="seeded", module="tiny_seeded")))
    assert [(sample.round, sample.figures["one_ms"]) for sample in outcome.samples] == [(0, 0), (1, 1), (2, 2)]


def test_a_failed_contender_is_reported_with_its_last_output_and_the_others_continue(modules: Path) -> None:
    (modules / "tiny_bad.py").write_text("import sys\nprint('x' * 10, file=sys.stderr)\nraise KeyError('lost')\n")
    (modules / "tiny_good.py").write_text('print(\'{"figures": {"one_ms": 1}}\')\n')
    bad, good = (Contender(name=name, module=f"tiny_{name}") for name in ("bad", "good"))
    outcome = run_with_progress(benchmark(bad, good))
    (failure,) = outcome.failures
    assert failure.contender == "bad"
    assert failure.reason == "failed with exit code 1"
    assert failure.stderr_tail.endswith("KeyError: 'lost'")
    assert len(outcome.samples) == 3


def test_a_contender_without_figures_fails_with_its_last_output(modules: Path) -> None:
    (modules / "tiny_mute.py").write_text("import sys\nprint('sorry', file=sys.stderr)\n")
    outcome = run_benchmark(benchmark(Contender(name="mute", module="tiny_mute")))
    assert "printed nothing" in outcome.failures[0].reason
    assert outcome.failures[0].stderr_tail == "sorry"


LEAVES_ONE = """
import os, pathlib, subprocess, sys, time
child = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
with pathlib.Path(sys.argv[0]).with_suffix(".pids").open("a") as pids:
    print(os.getpid(), file=pids, flush=True)
    subprocess.run([sys.executable, "-c", parent], stdout=pids)
time.sleep(600)
"""
"""Starts a process that leaves its session and its parent, like those of torchrun and Ray, and hangs."""


RUNS_HANG = """
from strata.bench.frame import *
from strata.bench.run import run_with_progress
hang = Contender(name="hang", module="tiny_hang")
run_with_progress(Benchmark(name="tiny", title="Tiny", contenders=(hang,), figures=()))
"""


def pids_in(path: Path, number: int) -> list[int]:
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= number, f"{number} processes have begun")
    return [int(line) for line in path.read_text().splitlines()]


def test_a_hung_contender_counts_as_lost_and_the_benchmark_continues(modules: Path) -> None:
    (modules / "tiny_hang.py").write_text(LEAVES_ONE)
    (modules / "tiny_good.py").write_text('print(\'{"figures": {"one_ms": 1}}\')\n')
    hang = Contender(name="hang", module="tiny_hang", timeout_s=4.0, usual_s=1.0)
    outcome = run_benchmark(benchmark(hang, Contender(name="good", module="tiny_good")))
    assert [(each.round, each.reason) for each in outcome.failures] == [
        (number, "lost: killed after its deadline of 4 s") for number in range(MAX_LOST)
    ]
    assert [sample.contender for sample in outcome.samples] == ["good"] * 3
    assert all(map(gone, pids_in(modules / "tiny_hang.pids", 2 * MAX_LOST)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_benchmark_kills_its_contenders(modules: Path, number: signal.Signals) -> None:
    (modules / "tiny_hang.py").write_text(LEAVES_ONE)
    (modules / "tiny_driver.py").write_text(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # even if this test runs under nohup, which ignores it
        f"{RUNS_HANG}"
    )
    with (
        killed_with_descendants(),
        subprocess.Popen([sys.executable, "-m", "tiny_driver"], stderr=subprocess.PIPE, text=True) as driver,
    ):
        try:
            started = pids_in(modules / "tiny_hang.pids", 2)
            driver.send_signal(number)
            errors = driver.communicate(timeout=30)[1]
            left = [pid for pid in started if not gone(pid)]  # before this test kills them
        finally:
            driver.kill()
    assert driver.returncode == (-number if number == signal.SIGINT else 128 + number), errors
    assert errors.startswith("tiny: 5 rounds of 1 contender, about 2 min, at most")
    assert not left


def test_a_benchmark_under_nohup_outlives_its_terminal(modules: Path) -> None:
    (modules / "tiny_hang.py").write_text(LEAVES_ONE)
    (modules / "tiny_driver.py").write_text(f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{RUNS_HANG}")
    with killed_with_descendants(), subprocess.Popen([sys.executable, "-m", "tiny_driver"]) as driver:
        try:
            pids_in(modules / "tiny_hang.pids", 2)
            driver.send_signal(signal.SIGHUP)
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(30) == 128 + signal.SIGTERM
        finally:
            driver.kill()


def test_a_peers_job_that_does_not_recover_is_counted_and_its_processes_end(
    modules: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (modules / "tiny_job.py").write_text(LEAVES_ONE)
    monkeypatch.setattr(recovery_watch, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(recovery_torchrun, "command", lambda _: [sys.executable, str(modules / "tiny_job.py")])
    recovery_torchrun.main()
    assert json.loads(capfd.readouterr().out) == {"figures": {"torchrun_lost_jobs": recovery_torchrun.MAX_JOBS}}
    assert all(map(gone, pids_in(modules / "tiny_job.pids", 2 * recovery_torchrun.MAX_JOBS)))


def test_a_killed_contender_is_reported_with_the_signal(modules: Path) -> None:
    (modules / "tiny_dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    outcome = run_benchmark(benchmark(Contender(name="dies", module="tiny_dies")))
    assert outcome.failures[0].reason == "killed by SIGTERM"


def test_quick_is_passed_to_the_contender(modules: Path) -> None:
    (modules / "tiny_quick.py").write_text(
        "import json, sys\nprint(json.dumps({'figures': {'one_ms': float('--quick' in sys.argv)}}))\n"
    )
    quick = Contender(name="quick", module="tiny_quick")
    assert run_benchmark(benchmark(quick), rounds=1, quick=True).samples[0].figures == {"one_ms": 1.0}
    assert run_benchmark(benchmark(quick), rounds=1).samples[0].figures == {"one_ms": 0.0}


def test_contenders_have_the_environment_of_the_benchmark(modules: Path) -> None:
    (modules / "tiny_size.py").write_text(
        "import json, os\nprint(json.dumps({'figures': {'one_ms': float(os.environ['STRATA_TEST_SIZE'])}}))\n"
    )
    sized = replace(benchmark(Contender(name="size", module="tiny_size")), environment={"STRATA_TEST_SIZE": "7"})
    assert run_benchmark(sized, rounds=1).samples[0].figures == {"one_ms": 7.0}
    assert "STRATA_TEST_SIZE" not in os.environ


def test_without_their_environment_peers_are_absent_without_failure(modules: Path) -> None:
    outcome = run_benchmark(benchmark(Contender(name="peer", module="tiny_peer", venv="peers")))
    assert outcome.absent[0].note == "the peers' environment does not exist; run `make bench-setup`"
    assert not outcome.failures


def test_a_peer_runs_in_the_peers_environment_or_is_absent(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = modules / "peers" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nSTRATA_TEST_PEERS=1 exec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv(venv_variable("peers"), str(modules / "peers"))
    assert find_peers_python() == interpreter
    monkeypatch.setenv("STRATA_PEERS_DASHBOARD_VENV", str(modules / "peers"))
    assert find_peers_python("peers-dashboard") == interpreter
    (modules / "tiny_there.py").write_text(
        "import json, os\nprint(json.dumps({'figures': {'two_ms': float(os.environ['STRATA_TEST_PEERS'])}}))\n"
    )
    there = Contender(name="there", module="tiny_there", venv="peers")
    uhashring = Contender(name="uhashring", module="strata.bench.contenders.shards_uhashring", venv="peers")
    outcome = run_benchmark(benchmark(there, uhashring), rounds=1, quick=True)
    assert outcome.samples[0].figures == {"two_ms": 1.0}
    assert outcome.absent[0].note == "uhashring is not installed; run `make bench-setup`"
    assert os.environ.get("STRATA_TEST_PEERS") is None
