"""Server processes for benchmarks: started on one core, asked from another, ended for certain."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from strata.errors import StrataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import psutil

SERVER_CORE = 0
CLIENT_CORE = 1
STOP_S = 10.0


def pin(core: int) -> None:
    """Keeps this process on one core, where there are two to choose from."""
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def serving(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A Python server that prints `{"grpc": ADDRESS}` when it is up: its address and process id."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: pin(SERVER_CORE),  # noqa: PLW1509 - this process has no threads yet
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise StrataError(f"the server did not start: {' '.join(arguments)} ended with {process.wait()}")
        yield json.loads(line)["grpc"], process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def coordinator(directory: Path) -> Iterator[tuple[str, int]]:
    """A coordinator with its journal in a directory: its address and process id."""
    arguments = ["-m", "strata.cli", "coordinator", "--listen", "127.0.0.1:0", "--http", "off", "--json"]
    with serving([*arguments, "--state", str(directory / "state.db")]) as served:
        yield served


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
