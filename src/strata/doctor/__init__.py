"""What this machine has, what it lacks, and how to get it.

Each check is a small function that looks at one thing and returns a `Check`; what it looks at is an argument, so that a
test can hand in something else. Nothing is changed on the machine: what is written to try a disk is removed again.
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
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (we look at it)


def examine(place: Path | None = None) -> list[Check]:
    """All checks, in the order in which a person wants to read them. `place` is where checkpoints go; else here."""
    state = state_directory()
    where, there = (Path.cwd(), "here") if place is None else (place, "there")
    with ThreadPoolExecutor(max_workers=4) as pool:  # importing an extra can take seconds
        extras = [pool.submit(software.extra, name) for name in software.EXTRAS]
        return [
            software.python(sys.version_info[:3]),
            software.dependencies(),
            *(extra.result() for extra in extras),
            machine.processors(),
            machine.open_files(),
            machine.shared_memory(SHARED_MEMORY),
            machine.staging_memory(machine.nameless_memory, _place_of_files()),
            machine.huge_pages(Path("/sys/kernel/mm/transparent_hugepage")),
            machine.writable_state(state),
            disks.direct_io("direct I/O, state", state),
            disks.direct_io(f"direct I/O, {there}", where),
            disks.exclusive_names(f"exclusive names, {there}", where),
            disks.flushed_names(f"flushed names, {there}", where),
            machine.port(GRPC_PORT, flag="--listen"),
            machine.port(HTTP_PORT, flag="--http"),
            machine.rdma(Path("/sys/class/infiniband")),
        ]


def _place_of_files() -> Path:
    """Where memory that processes share is, if it must be a file."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def state_directory() -> Path:
    """Where the coordinator keeps its state when it is not told."""
    import platformdirs  # noqa: PLC0415 (only needed here)

    return platformdirs.user_state_path("strata")


def is_healthy(checks: Sequence[Check]) -> bool:
    return not any(check.essential and check.status is Status.MISSING for check in checks)
