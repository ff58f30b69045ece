"""`scripts/run_tests.py` decides what a failed test means."""

from __future__ import annotations

import importlib.util
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from xdist.remote import Producer

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["run_tests.py"])
    return module


def outcomes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, *runs: tuple[int, dict[str, str]]
) -> Iterator[object]:
    results = iter(runs)
    monkeypatch.setattr(script, "run_pytest", lambda *_: next(results))
    return results


def test_a_test_that_passes_alone_is_listed_as_flaky_and_does_not_fail_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(script, monkeypatch, (1, {"a::b": "late"}), (0, {}), (0, {}))
    assert script.main() == 0
    assert capsys.readouterr().out.endswith("flaky:\n  a::b\n    in parallel: late\n    alone: passed\n")


def test_a_test_that_fails_alone_too_fails_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(script, monkeypatch, (0, {}), (1, {"a::b": "late", "a::c": "wrong"}), (1, {"a::c": "wrong"}))
    assert script.main() == 1
    printed = capsys.readouterr().out
    assert "failed: a::c\n" in printed
    assert "flaky:\n  a::b\n" in printed


def test_an_interrupted_run_and_a_broken_suite_are_not_repeated(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = outcomes(script, monkeypatch, (2, {}), (0, {}))
    assert script.main() == 2
    assert list(left) == [(0, {})]


def test_a_phase_without_tests_of_the_suite_is_skipped(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(script, monkeypatch, (script.NONE_COLLECTED, {}), (0, {}))
    assert script.main() == 0


def test_a_suite_without_any_test_is_a_failure(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(script, monkeypatch, (script.NONE_COLLECTED, {}), (script.NONE_COLLECTED, {}))
    assert script.main() == script.NONE_COLLECTED


@pytest.mark.parametrize(("suite", "marks"), [("fast", "not slow"), ("slow", "slow")])
def test_each_suite_selects_tests_by_the_slow_mark(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, suite: str, marks: str
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "run_pytest", lambda *arguments: (calls.append(arguments), (0, {}))[1])
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--suite", suite])
    assert script.main() == 0
    assert [call[:2] for call in calls] == [("-m", marks)] * 2


def test_many_failures_are_not_taken_for_bad_luck(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"a::{number}": "wrong" for number in range(script.MAX_RERUNS + 1)}
    outcomes(script, monkeypatch, (1, many), (0, {}))
    assert script.main() == 1


def test_a_run_whose_time_is_over_is_terminated(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.run_until([sys.executable, "-c", "raise SystemExit(3)"], end_at_s=math.inf) == 3
    assert script.run_until([sys.executable, "-c", "import signal; signal.pause()"], end_at_s=1.0) == -signal.SIGTERM
    assert "the time of this run is over (TESTS_END_AT=1)" in capsys.readouterr().out


def test_a_run_that_ignores_its_end_is_killed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "END_WITHIN_S", 0.1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the program inherits it
    try:
        assert script.run_until(["sleep", "60"], end_at_s=1.0) == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


STARTED = """
@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart():
    Path(f"started-{os.getpid()}").touch()  # of this process, which may be a worker
"""
WAITING = """
import os, signal, time
from pathlib import Path

def test_that_waits():
    while not Path(f"started-{os.getppid()}").exists():
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.timeout(120)
def test_a_terminated_run_names_the_tests_that_were_running(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((SCRIPT.parents[1] / "tests" / "conftest.py").read_text() + STARTED)
    (tmp_path / "test_one.py").write_text(WAITING)
    pytest_command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--rootdir", "."]
    ended = subprocess.run(pytest_command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == pytest.ExitCode.INTERRUPTED
    assert re.search(r"ended by SIGTERM; these tests were running:\n  test_one.py::test_that_waits for ", ended.stdout)


CRASHING = """
import os

def test_before(): ...
def test_that_crashes(): os._exit(1)
def test_after(): ...
"""


def run_in_files(directory: Path, *, workers: int) -> str:
    """Run the tests of a directory as the suite is run; return what is printed."""
    (directory / "conftest.py").write_text((SCRIPT.parents[1] / "tests" / "conftest.py").read_text())
    pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", "."]
    pytest_command += ["-n", str(workers), "--dist", "loadfile"]
    return subprocess.run(
        pytest_command, cwd=directory, capture_output=True, text=True, timeout=100, check=False
    ).stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_goes_on_after_a_worker_crashed(tmp_path: Path, workers: int) -> None:
    for name in ("a", "c", "e"):
        (tmp_path / f"test_{name}.py").write_text("def test_alone(): ...")
    for name in ("b", "d"):
        (tmp_path / f"test_{name}.py").write_text(CRASHING)

    shown = run_in_files(tmp_path, workers=workers)

    assert "2 failed, 7 passed" in shown
    for name in ("b", "d"):
        assert f"crashed while running 'test_{name}.py::test_that_crashes'" in shown


class FakeWorker:
    """A worker as xdist's schedulers see it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.received: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.received += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_new_worker_gets_tests_only_after_it_has_collected_them(request: pytest.FixtureRequest) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    scheduling = next(each.FileScheduling for each in plugins if hasattr(each, "FileScheduling"))
    options = SimpleNamespace(loadscopereorder=False)
    scheduler = scheduling(SimpleNamespace(getvalue=lambda name: ["2*popen"], option=options), Producer("test"))
    collection = [f"test_{number}.py::test" for number in range(8)]
    first, second, third, fourth = (FakeWorker(f"gw{number}") for number in range(4))

    def collected(*workers: FakeWorker) -> None:
        for worker in workers:
            scheduler.add_node_collection(worker, collection)
        scheduler.schedule()

    scheduler.add_node(first)
    scheduler.add_node(second)
    collected(first, second)
    assert scheduler.remove_node(first) == collection[0]  # both crashed at once
    assert scheduler.remove_node(second) == collection[1]
    scheduler.add_node(third)
    scheduler.add_node(fourth)

    collected(third)
    assert third.received
    assert not fourth.received

    collected(fourth)
    assert fourth.received
    assert not set(third.received) & set(fourth.received)
