"""Dump the stacks of a worker to its log before it is killed.

A worker with a context does so itself on a signal; for others, py-spy does, if it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from strata.launch.environment import STACKS_SIGNAL

WAIT_S = 2.0
PY_SPY_S = 10.0
_POLL_S = 0.02


async def dump(pid: int, log: Path) -> bool:
    """Dump the stacks; return whether something was written."""
    number = signal.Signals[STACKS_SIGNAL]
    if handles(pid, number):
        before = _size(log)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return await _grown(log, before)
    return await _ask_py_spy(pid, log)


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether the process handles this signal; one that does not would die of it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


async def _grown(log: Path, before: int) -> bool:
    """Wait until the log stops growing."""
    deadline_s = time.monotonic() + WAIT_S
    last = before
    while time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
        size = _size(log)
        if size > before and size == last:
            return True
        last = size
    return last > before


async def _ask_py_spy(pid: int, log: Path) -> bool:
    program = shutil.which("py-spy")
    if program is None:
        return False
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *(program, "dump", "--pid", str(pid)), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            async with asyncio.timeout(PY_SPY_S):
                return await process.wait() == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            return False


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
