"""One `strata run` of the demo: a process of its own, watched from outside, whose workers are killed on the way.

All that is known of it comes from its files: the run's events, and the diaries of the workers.
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

    from strata.demo.config import DemoConfig, PlannedKill
    from strata.demo.step_log import WorkerSteps
    from strata.launch.record.timeline import RunEvent

SCRIPT = Path(__file__).with_name("train.py")
STOP_TIMEOUT_S = 3.0
"""For a run that was told to stop at once; then it is killed, and its processes with it."""
_ASK_AGAIN_S = 0.5
_GONE_TIMEOUT_S = 1.0
"""For processes that outlive the run by a moment: savers, which finish what they write, and wait for other ranks'."""
_POLL_S = 0.01
_NUM_LAST_WORDS = 6


class Job:
    def __init__(
        self,
        name: str,
        config: DemoConfig,
        place: Path,
        variables: Mapping[str, str],
        *,
        kills: Sequence[PlannedKill] = (),
    ) -> None:
        self.name = name
        self.kills: list[Kill] = []
        """Those that were carried out."""
        self.began_s = self.ended_s = 0.0
        self.arguments: tuple[str, ...] = (
            *("run", "--name", name, "--workers", str(config.num_workers), "--every", str(config.every)),
            *(("--max-restarts", str(len(kills) + 1)) if len(kills) > 2 else ()),
            *(SCRIPT.name, "--data", "clicks", "--step-log", f"steps/{name}"),
        )
        """Of `strata`; files are named from the place on."""
        self._place = place
        self._variables = {**os.environ, **variables, DIRECTORY_VARIABLE: str(place / "runs")}
        self._timeout_s = config.timeout_s
        self._planned = list(kills)
        self._reader = StepLogReader(place / "steps" / name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def entries(self) -> list[WorkerSteps]:
        """What the workers have written so far, by attempt and rank."""
        return [entry for _, entry in sorted(self._reader.entries.items())]

    @property
    def directory(self) -> Path:
        return self._place / "runs" / self.name

    def events(self) -> list[RunEvent]:
        try:
            spec = msgspec.json.decode((self.directory / "run.json").read_bytes(), type=RunSpec)
        except (OSError, ValueError):  # it has hardly begun
            return []
        return RunDirectory(self.directory, spec).events()

    def start(self) -> None:
        self.began_s = time.monotonic()
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "strata.cli", *self.arguments],
                cwd=self._place,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-C is for us: we end it then, whatever it is doing
            )

    def look(self) -> bool:
        """Reads what is new, and kills whoever is due. False when the run is done.

        Raises:
            StrataError: It has failed, or takes for ever.
        """
        assert self._process is not None
        code = self._process.poll()  # before the look: what was written before the end is seen after it
        self._reader.look()
        if code is None:
            if time.monotonic() - self.began_s > self._timeout_s:
                raise StrataError(f"the run did not end within {self._timeout_s:g} s; try fewer --rows")
            self._kill_who_is_due()
            return True
        self.ended_s = time.monotonic()
        if code:
            raise StrataError(f"strata run ended with code {code}: {' / '.join(self._last_words())}")
        return False

    def stop(self) -> None:
        """Nobody of it is left then."""
        if self._process is not None:
            self._end(self._process)
        self._reader.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Asked once, a run saves first; asked twice, it stops. It cleans up better than we could."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline_s:
                process.kill()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ASK_AGAIN_S)

    def _kill_who_is_due(self) -> None:
        if not self._planned:
            return
        planned = self._planned[0]
        entry = max((e for e in self.entries if e.rank == planned.rank), key=lambda e: e.attempt, default=None)
        if entry is None or not entry.trained or any(kill.attempt == entry.attempt for kill in self.kills):
            return
        step = entry.trained[-1].step
        if step < planned.step:
            return
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(entry.pid)
            try:
                if is_of(entry.pid, self._variables):  # numbers of processes are used again
                    at_s = time.monotonic()
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    self.kills.append(Kill(entry.attempt, entry.rank, entry.pid, step, at_s))
                    self._planned.pop(0)
            finally:
                os.close(fd)

    @property
    def _said(self) -> Path:
        return self._place / f"{self.name}.log"

    def _last_words(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self._said.read_text(errors="replace").strip().splitlines()[-_NUM_LAST_WORDS:]
        return []


# -- whose a process is ------------------------------------------------------------------------------------------------


def is_of(pid: int, variables: Mapping[str, str]) -> bool:
    """Whether it was started with our own directory for temporary files, which nobody else has."""
    with contextlib.suppress(OSError):
        return f"TMPDIR={variables['TMPDIR']}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def wait_until_gone(variables: Mapping[str, str]) -> None:
    """Until no process of ours is left; who takes too long is killed."""
    began_s = time.monotonic()
    while left := [pid for pid in map(_number, os.listdir("/proc")) if pid and is_of(pid, variables)]:  # noqa: PTH208
        waited_s = time.monotonic() - began_s
        if waited_s > _GONE_TIMEOUT_S:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if waited_s > 2 * _GONE_TIMEOUT_S:  # the system cannot end it; so neither can we
            return
        time.sleep(_POLL_S)


def _number(name: str) -> int:
    return int(name) if name.isdecimal() else 0
