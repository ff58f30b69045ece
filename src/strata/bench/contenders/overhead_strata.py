"""Strata: the same loop with the runtime and twice without it (plain).

Fresh processes alternate every few steps, so that a machine that slows down affects all of them; the figure is the
ratio of turns that follow each other. One turn in five contains a save. Turns with and without a save have separate
medians, because a common median would ignore the saves.

No two processes are equally fast, for example because of where their memory lies. So there are two plain loops, started
before and after Strata's, which is compared with their mean. Their difference is reported as noise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from strata.bench.contenders import overhead_loop, overhead_model
from strata.bench.contenders.overhead_loop import TURNS_A_SAVE
from strata.launch.record.directory import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

SAVE_EVERY, NUM_SAVES = 50, 12
QUICK_SAVE_EVERY, QUICK_NUM_SAVES, QUICK_BATCH_SIZE = 10, 2, 64
TIMEOUT_S = 120.0
SAME_FOR_BOTH = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""malloc learns to keep memory when a process frees something large. A process that has saved a checkpoint has done so,
and would train faster than the plain loop.
"""
RUN = ("-m", "strata.cli", "run", "--quiet", "--workers", "1")


class Loop:
    """A process that trains on command."""

    def __init__(self, kind: str, batch_size: int, save_every: int, directory: Path) -> None:
        directory.mkdir()
        self._output = directory / "output.txt"
        path = directory / "sock"
        script = [overhead_loop.__file__, kind, str(batch_size), str(save_every), str(path)]
        with socket.socket(socket.AF_UNIX) as listener, self._output.open("wb") as output:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(TIMEOUT_S)
            self._process = subprocess.Popen(
                [sys.executable, *(RUN if kind == "strata" else ()), *script],
                cwd=directory,
                env={**os.environ, **SAME_FOR_BOTH, DIRECTORY_VARIABLE: str(directory / "runs")},
                stdout=output,
                stderr=output,
                start_new_session=True,  # like workers; Linux divides a busy machine among sessions
            )
            try:
                self._link, _ = listener.accept()
            except BaseException:
                self.end()
                raise
        self._link.settimeout(TIMEOUT_S)
        self._lines = self._link.makefile("rb")

    def receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"the loop ended:\n{self._output.read_text(errors='replace')[-2000:]}")
        report: dict[str, Any] = json.loads(line)
        return report

    def turn(self) -> dict[str, Any]:
        """Train for one turn."""
        self._link.sendall(b".")
        return self.receive()

    def final_report(self) -> dict[str, Any]:
        self._link.shutdown(socket.SHUT_WR)
        report = self.receive()
        if self._process.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the loop failed:\n{self._output.read_text(errors='replace')[-2000:]}")
        return report

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)  # an agent's workers end with it
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._lines.close()
        self._link.close()


def main() -> None:
    is_quick = "--quick" in sys.argv
    save_every, num_saves = (QUICK_SAVE_EVERY, QUICK_NUM_SAVES) if is_quick else (SAVE_EVERY, NUM_SAVES)
    batch_size = QUICK_BATCH_SIZE if is_quick else fitting_batch_size()
    turns: list[Turn] = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-bench-")))
        one, ours, two = loops = [
            stack.enter_context(Loop(kind, batch_size, save_every, directory / str(number)))
            for number, kind in enumerate(("bare", "strata", "bare"))
        ]
        for loop in loops:
            loop.receive()  # the loop is warm
        for number in range(num_saves * TURNS_A_SAVE):
            first = number % len(loops)
            reports = {loop: loop.turn() for loop in (*loops[first:], *loops[:first])}
            turns.append(Turn(reports[ours], (reports[one], reports[two])))
        final, plain = ours.final_report(), (one.final_report(), two.final_report())
    if {final["digest"]} != {each["digest"] for each in plain}:
        raise RuntimeError("the loops ended with different weights")
    num_steps = save_every // TURNS_A_SAVE
    bare_s = statistics.median(turn.bare_mean("turn_s") for turn in turns)
    ratio = over_bare(turns, "turn_s")
    in_calls_s = sum(map(sum, (final["report_s"], final["idle_s"], final["stall_s"])))
    figures = {
        "overhead_fraction": ratio - 1.0,
        "overhead_cpu_fraction": over_bare(turns, "cpu_s") - 1.0,
        "noise_fraction": abs(statistics.median(one["turn_s"] / two["turn_s"] for _, (one, two) in turns) - 1.0),
        "in_calls_fraction": in_calls_s / sum(turn.ours["turn_s"] for turn in turns),
        "step_ms": bare_s * ratio / num_steps * 1e3,
        "bare_step_ms": bare_s / num_steps * 1e3,
        "report_us": statistics.median(final["report_s"]) * 1e6,
        "maybe_checkpoint_us": statistics.median(final["idle_s"]) * 1e6,
        "save_stall_ms": statistics.median(final["stall_s"]) * 1e3,
    }
    print(json.dumps({"figures": figures}))


def fitting_batch_size() -> int:
    """Return the batch size of `overhead_model`, found in a process like those of the loops."""
    command = [sys.executable, overhead_model.__file__]
    variables = {**os.environ, **SAME_FOR_BOTH}
    return int(subprocess.run(command, env=variables, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True).stdout)


class Turn(NamedTuple):
    """The times that the loops reported for the same steps."""

    ours: Mapping[str, Any]
    bare: tuple[Mapping[str, Any], Mapping[str, Any]]

    def bare_mean(self, what: str) -> float:
        return statistics.fmean(each[what] for each in self.bare)


def over_bare(turns: Sequence[Turn], what: str) -> float:
    """Return Strata's time divided by the plain loops' mean."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for turn in turns:
        ratios[bool(turn.ours["has_saved"])].append(turn.ours[what] / turn.bare_mean(what))
    return sum(len(each) * statistics.median(each) for each in ratios.values() if each) / len(turns)


if __name__ == "__main__":
    main()
