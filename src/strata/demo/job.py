"""One run of the demo: starts it as a process, kills its workers or servers on schedule, and ends it.

Everything known about the run comes from files: the events of the run and the step logs of its workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.demo.outcome import Kill
from strata.demo.step_log import StepLogReader
from strata.errors import StrataError
from strata.launch.record.directory import DIRECTORY_VARIABLE, RunDirectory
from strata.launch.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.coordinator.state.server_figures import ServerFigures
    from strata.demo.config import DemoConfig, PlannedKill
    from strata.demo.step_log import WorkerSteps
    from strata.launch.record.timeline import RunEvent

SCRIPT = Path(__file__).with_name("train.py")
SERVERS_SCRIPT = Path(__file__).with_name("train_servers.py")
STOP_TIMEOUT_S = 3.0
"""Time that a run has to stop; then it is killed with all its processes."""
_ASK_AGAIN_S = 0.5
_EXIT_TIMEOUT_S = 1.0
"""Time for processes that outlive the run: savers, which finish writing and wait for other ranks."""
_POLL_S = 0.01
_NUM_LAST_LINES = 6


class Job:
    def __init__(
        self,
        name: str,
        config: DemoConfig,
        directory: Path,
        variables: Mapping[str, str],
        *,
        kills: Sequence[PlannedKill] = (),
    ) -> None:
        self.name = name
        self.kills: list[Kill] = []
        """The kills carried out so far."""
        self.began_s = self.ended_s = 0.0
        sizes = ("--workers", str(config.num_workers), "--every", str(config.every))
        restarts = ("--max-restarts", str(len(kills) + 1)) if len(kills) > 2 else ()
        data = ("--data", "clicks", "--step-log", f"steps/{name}")
        self.command: tuple[str, ...]
        """As a user would type it; paths are relative to the demo's directory."""
        if config.num_servers:
            servers = ("--servers", str(config.num_servers), "--checkpoints", f"checkpoints/{name}")
            self.command = ("python", SERVERS_SCRIPT.name, "--name", name, *sizes, *servers, *restarts, *data)
            self._program = (sys.executable, *self.command[1:])
        else:
            self.command = ("strata", "run", "--name", name, *sizes, *restarts, SCRIPT.name, *data)
            self._program = (sys.executable, "-m", "strata.cli", *self.command[1:])
        self._name_of = config.name_of
        self._num_workers = config.num_workers
        self._directory = directory
        self._variables = {**os.environ, **variables, DIRECTORY_VARIABLE: str(directory / "runs")}
        self._timeout_s = config.timeout_s
        self._planned = list(kills)
        self._reader = StepLogReader(directory / "steps" / name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def entries(self) -> list[WorkerSteps]:
        """The step logs so far, ordered by attempt and rank."""
        return [entry for _, entry in sorted(self._reader.entries.items())]

    @property
    def run_directory(self) -> Path:
        return self._directory / "runs" / self.name

    @property
    def checkpoints(self) -> Path:
        own = self._directory / "checkpoints" / self.name
        return own if own.exists() else self.run_directory / "checkpoints"

    def events(self) -> list[RunEvent]:
        run = self._run
        return [] if run is None else run.events()

    @property
    def servers(self) -> ServerFigures | None:
        """What the parameter servers have last reported, together."""
        run = self._run
        status = None if run is None else run.status
        return None if status is None else status.servers

    @property
    def _run(self) -> RunDirectory | None:
        try:
            spec = msgspec.json.decode((self.run_directory / "run.json").read_bytes(), type=RunSpec)
        except (OSError, ValueError):  # the run has not written it yet
            return None
        return RunDirectory(self.run_directory, spec)

    def start(self) -> None:
        self.began_s = time.monotonic()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._program,
                cwd=self._directory,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then ends the run
            )

    def look(self) -> bool:
        """Read new records and kill the process that is due. Return False once the run is done.

        Raises:
            StrataError: The run failed or missed its deadline.
        """
        assert self._process is not None
        code = self._process.poll()  # before reading, so that the last read sees everything the run wrote
        self._reader.look()
        if code is None:
            if time.monotonic() - self.began_s > self._timeout_s:
                raise StrataError(f"the run did not finish within {self._timeout_s:g} s; use fewer --rows")
            self._kill_due()
            return True
        self.ended_s = time.monotonic()
        if code:
            raise StrataError(f"the run failed with exit code {code}: {' / '.join(self._last_lines())}")
        return False

    def stop(self) -> None:
        """End the run and all its processes."""
        if self._process is not None:
            self._end(self._process)
        self._reader.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM until the run ends: after the first it saves, after the second it stops and cleans up."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                process.kill()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ASK_AGAIN_S)

    def _kill_due(self) -> None:
        if not self._planned:
            return
        planned = self._planned[0]
        is_server = planned.rank >= self._num_workers
        watched = 0 if is_server else planned.rank  # servers write no step log
        entry = max((e for e in self.entries if e.rank == watched), key=lambda e: e.attempt, default=None)
        if entry is None or not entry.trained or any(kill.attempt == entry.attempt for kill in self.kills):
            return
        step = entry.trained[-1].step
        if step < planned.step:
            return
        name = self._name_of(planned.rank)
        pid = self._pid_of(name) if is_server else entry.pid
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                if belongs_to(pid, self._variables):  # the pid may have been reused
                    at_s = time.monotonic()
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    self.kills.append(Kill(entry.attempt, planned.rank, name, pid, step, at_s))
                    self._planned.pop(0)
            finally:
                os.close(fd)

    def _pid_of(self, name: str) -> int:
        """Return the process id of a parameter server, by the title of its process.

        Raises:
            ProcessLookupError: It has ended, or is being started.
        """
        title = f"strata: {self.name} {name}:".encode()
        for pid in _all_pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title) and belongs_to(pid, self._variables):
                    return pid
        raise ProcessLookupError(name)

    @property
    def _output(self) -> Path:
        return self._directory / f"{self.name}.log"

    def _last_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self._output.read_text(errors="replace").strip().splitlines()[-_NUM_LAST_LINES:]
        return []


# -- processes of the demo ---------------------------------------------------------------------------------------------


def belongs_to(pid: int, variables: Mapping[str, str]) -> bool:
    """Return whether a process has the demo's temporary directory in its environment, which is unique."""
    with contextlib.suppress(OSError):
        return f"TMPDIR={variables['TMPDIR']}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def wait_until_gone(variables: Mapping[str, str]) -> None:
    """Wait until no process of the demo is left; kill those that take too long."""
    began_s = time.monotonic()
    while left := [pid for pid in _all_pids() if belongs_to(pid, variables)]:
        waited_s = time.monotonic() - began_s
        if waited_s > _EXIT_TIMEOUT_S:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if waited_s > 2 * _EXIT_TIMEOUT_S:  # the kernel cannot end them either
            return
        time.sleep(_POLL_S)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 (names only)
