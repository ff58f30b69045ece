"""Ours: the same loop bare and with the runtime. Two fresh processes take turns of a few steps, so that a machine that
slows down slows both down; what counts is the ratio of two turns that follow each other. One turn of five has a save in
it; the median is taken of those and of the others, for one of all would not know of them.
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
from typing import TYPE_CHECKING, Any, Self

from strata.bench.contenders import overhead_loop
from strata.bench.contenders.overhead_loop import TURNS_A_SAVE
from strata.bench.contenders.overhead_model import fitting_batch_size
from strata.launch.run_directory import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

SAVE_EVERY, NUM_SAVES = 50, 8
QUICK_SAVE_EVERY, QUICK_NUM_SAVES = 10, 2
TIMEOUT_S = 120.0
SAME_FOR_BOTH = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""The C library learns to keep memory when a process frees something large. One that has saved a checkpoint has done
so, and would train faster than the bare loop.
"""
RUN = ("-m", "strata.cli", "run", "--quiet", "--workers", "1")


class Loop:
    """A process that trains when it is told to."""

    def __init__(self, kind: str, batch_size: int, save_every: int, place: Path) -> None:
        self._said = place / f"{kind}.txt"
        path = place / f"{kind}.sock"
        script = [overhead_loop.__file__, kind, str(batch_size), str(save_every), str(path)]
        with socket.socket(socket.AF_UNIX) as door, self._said.open("wb") as said:
            door.bind(str(path))
            door.listen()
            door.settimeout(TIMEOUT_S)
            self._process = subprocess.Popen(
                [sys.executable, *(RUN if kind == "strata" else ()), *script],
                cwd=place,
                env={**os.environ, **SAME_FOR_BOTH, DIRECTORY_VARIABLE: str(place / "runs")},
                stdout=said,
                stderr=said,
                start_new_session=True,  # as workers have; Linux shares a busy machine out among sessions
            )
            try:
                self._link, _ = door.accept()
            except BaseException:
                self.end()
                raise
        self._link.settimeout(TIMEOUT_S)
        self._lines = self._link.makefile("rb")

    def hear(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"the loop has ended:\n{self._said.read_text(errors='replace')[-2000:]}")
        said: dict[str, Any] = json.loads(line)
        return said

    def turn(self) -> dict[str, Any]:
        """Lets it train for a turn."""
        self._link.sendall(b".")
        return self.hear()

    def last_words(self) -> dict[str, Any]:
        self._link.shutdown(socket.SHUT_WR)
        said = self.hear()
        if self._process.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the loop failed:\n{self._said.read_text(errors='replace')[-2000:]}")
        return said

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
    batch_size = fitting_batch_size()
    turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-bench-")))
        bare, ours = (stack.enter_context(Loop(kind, batch_size, save_every, place)) for kind in ("bare", "strata"))
        for loop in (bare, ours):
            loop.hear()  # it is warm
        for number in range(num_saves * TURNS_A_SAVE):
            if number % 2 == 0:
                turns.append((bare.turn(), ours.turn()))
            else:
                mine = ours.turn()
                turns.append((bare.turn(), mine))
        plain, told = bare.last_words(), ours.last_words()
    if plain["digest"] != told["digest"]:
        raise RuntimeError("the loops ended with other weights")
    num_steps = save_every // TURNS_A_SAVE
    bare_s = statistics.median(their["turn_s"] for their, _ in turns)
    ratio = over_bare(turns, "turn_s")
    in_calls_s = sum(map(sum, (told["report_s"], told["idle_s"], told["stall_s"])))
    figures = {
        "overhead_fraction": ratio - 1.0,
        "overhead_cpu_fraction": over_bare(turns, "cpu_s") - 1.0,
        "in_calls_fraction": in_calls_s / sum(mine["turn_s"] for _, mine in turns),
        "step_ms": bare_s * ratio / num_steps * 1e3,
        "bare_step_ms": bare_s / num_steps * 1e3,
        "report_us": statistics.median(told["report_s"]) * 1e6,
        "maybe_checkpoint_us": statistics.median(told["idle_s"]) * 1e6,
        "save_stall_ms": statistics.median(told["stall_s"]) * 1e3,
    }
    print(json.dumps({"figures": figures}))


def over_bare(turns: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], what: str) -> float:
    """Ours over the bare loop's, of turns in pairs (bare, ours)."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for bare, ours in turns:
        ratios[bool(ours["has_saved"])].append(ours[what] / bare[what])
    return sum(len(each) * statistics.median(each) for each in ratios.values() if each) / len(turns)


if __name__ == "__main__":
    main()
