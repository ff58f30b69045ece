"""Settings, hooks and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

IN_CI = os.environ.get("CI") == "true"

# Deadlines are off: a hiccup of a shared machine is not a failure. In CI, every run uses the same examples.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if IN_CI else "dev")

# A shell makes its background jobs ignore Ctrl-C, and the processes that tests start would inherit that; but some tests
# send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise torch keeps compiled code among the temporary files.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".build" / "inductor"))


LONGEST = (
    "test_run_kill",
    "test_run_nodes",
    "test_bench_cli",
    "test_docs_snippets",
    "test_run_ray",
    "test_coordinator_kill",
    "test_network_faults",
    "test_checkpoint_kill",
    "test_storage_faults",
    "test_checkpoint_memory",
    "test_http_api",
    "test_checkpoint_ranks_kill",
    "test_demo",
    "test_run_jax",
    "test_standby",
    "test_bench_checkpoint",
    "test_docs_data_pages",
    "test_train_orchestrator",
    "test_trainer_nodes",
    "test_checkpoint_ranks",
    "test_bench_overhead",
)
"""Files that take half a minute or more, the longest one first."""


# Imports create a million permanent objects; repeated garbage collection among them would take a third of the time of
# the test collection.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures-to", type=Path, help="write failed tests and their errors to this JSON file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the failed tests to a file for `scripts/run_tests.py`, which runs them again."""
    path = terminalreporter.config.getoption("--failures-to")
    if path is None:
        return
    reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    path.write_text(json.dumps({report.nodeid: _first_error_line(report) for report in reports}))


def _first_error_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line for line in text.splitlines() if line.strip()), "no message")[:300]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Turn off xdist's reordering: with `--dist loadfile` it would start with the files that have the most tests and
    end with the few that take longest, while the other workers are idle.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    # Without xdist, tests run in this process, and their forks would inherit the handler.
    if config.getoption("dist", "no") != "no":
        config.pluginmanager.register(RunningTests())


class RunningTests:
    """Ends the run on SIGTERM, which CI sends when its time is over, and lists the tests that were running."""

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        signal.signal(signal.SIGTERM, self._terminated)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started_s[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._started_s.pop(nodeid, None)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        now_s = time.monotonic()
        running = [f"  {name} for {now_s - start_s:.0f} s" for name, start_s in self._started_s.items()]
        raise KeyboardInterrupt("\n".join(["ended by SIGTERM; these tests were running:", *running]))


class FileScheduling(LoadFileScheduling):
    """`--dist loadfile` that goes on after a worker crashed.

    xdist 3.8.0 starts the crashed test again, assigns finished files as empty ones, and gives a new worker one file,
    while a worker starts a test only once it knows the next one: the run then hangs (its issues 1323, 1327 and 1378).
    """

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        waiting = ((file, test) for file, tests in files.items() for test, is_done in tests.items() if not is_done)
        file, crashed = next(waiting, (None, None))
        if file is None or crashed is None:
            return None
        files[file][crashed] = True  # xdist reports that it failed
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        restarted = self.collection is not None
        super().schedule()
        if restarted:
            for node in self.nodes:
                self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # a worker that replaces another one has still to collect the tests
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        with contextlib.suppress(OSError):  # it crashed just now: the next event removes it and queues its files again
            super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True)
def log_stays_on() -> Iterator[None]:
    """Fail the test that turns the log off, instead of a later one of this process that reads it."""
    yield
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert not disabled, f"the test left logging.disable({disabled}) behind; undo it"


@pytest.fixture(scope="session")
def requires_service() -> Callable[..., Path]:
    """Return a function that finds a tool or file: `requires_service("node")`.

    If it is missing, the test is skipped; with CI=true, it fails.
    """

    def require(what: str | Path, cure: str = "run scripts/system_packages.sh") -> Path:
        found = shutil.which(what) if isinstance(what, str) else str(what) if what.exists() else None
        if found is None:
            (pytest.fail if IN_CI else pytest.skip)(f"{what} is missing; {cure}")
        return Path(found)

    return require


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new working directory, in which runs are recorded. Workers can import modules of the tests."""
    from strata.launch.record.directory import DIRECTORY_VARIABLE

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    return tmp_path
