"""Checks of this machine for `strata doctor`: software, hardware, disks.

Each check is a small function that examines one thing and returns a `Check`. What it examines is an argument, so that
tests can pass something else. A check changes nothing on the machine: files written to test a disk are removed. Checks
may import every package but the command line, `bench` and `demo`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from strata.doctor import disks, machine, software
from strata.doctor.check import Check as Check
from strata.doctor.check import Status as Status

if TYPE_CHECKING:
    from collections.abc import Sequence

GRPC_PORT, HTTP_PORT = 50051, 51051
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (only examined)


def examine(checkpoints: Path | None = None) -> list[Check]:
    """Run all checks, in the order in which they are printed.

    Args:
        checkpoints: The directory for checkpoints; None checks the current directory.
    """
    state = state_directory()
    directory, label = (Path.cwd(), "current directory") if checkpoints is None else (checkpoints, "checkpoints")
    with ThreadPoolExecutor(max_workers=4) as pool:  # importing an extra can take seconds
        extras = [pool.submit(software.extra, name) for name in software.EXTRAS]
        return [
            software.python(sys.version_info[:3]),
            software.dependencies(),
            *(extra.result() for extra in extras),
            machine.processors(),
            machine.open_files(),
            machine.shared_memory(SHARED_MEMORY),
            machine.staging_memory(machine.create_anonymous_memory, _staging_directory()),
            machine.huge_pages(Path("/sys/kernel/mm/transparent_hugepage")),
            machine.writable_state(state),
            disks.direct_io("direct I/O, state", state),
            disks.direct_io(f"direct I/O, {label}", directory),
            disks.exclusive_create(f"exclusive create, {label}", directory),
            disks.directory_fsync(f"directory fsync, {label}", directory),
            machine.port(GRPC_PORT, flag="--listen"),
            machine.port(HTTP_PORT, flag="--http"),
            machine.rdma(Path("/sys/class/infiniband")),
        ]


def _staging_directory() -> Path:
    """Return the directory for shared memory if it must be a file."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def state_directory() -> Path:
    """Return the coordinator's default state directory."""
    import platformdirs  # noqa: PLC0415 (needed only here)

    return platformdirs.user_state_path("strata")


def is_healthy(checks: Sequence[Check]) -> bool:
    """Return whether everything that Strata requires is present."""
    return not any(check.essential and check.status is Status.MISSING for check in checks)
