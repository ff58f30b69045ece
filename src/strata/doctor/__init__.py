"""What this machine has, what it lacks, and how to get it.

Each check is a small function that looks at one thing and returns a `Check`; what it looks at is an argument, so that a
test can hand in something else. Nothing is changed on the machine: what is written to try a disk is removed again.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from strata.doctor import machine, software
from strata.doctor.check import Check as Check
from strata.doctor.check import Status as Status

if TYPE_CHECKING:
    from collections.abc import Sequence

GRPC_PORT, HTTP_PORT = 50051, 51051


def examine() -> list[Check]:
    """All checks, in the order in which a person wants to read them."""
    state = state_directory()
    with ThreadPoolExecutor(max_workers=4) as pool:  # importing an extra can take seconds
        extras = [pool.submit(software.extra, name) for name in software.EXTRAS]
        return [
            software.python(sys.version_info[:3]),
            software.dependencies(),
            *(extra.result() for extra in extras),
            machine.processors(),
            machine.open_files(),
            machine.shared_memory(Path("/dev/shm")),  # noqa: S108 (we look at it)
            machine.writable_state(state),
            machine.direct_io("direct I/O, state", state),
            machine.direct_io("direct I/O, here", Path.cwd()),
            machine.port(GRPC_PORT, flag="--listen"),
            machine.port(HTTP_PORT, flag="--http"),
            machine.rdma(Path("/sys/class/infiniband")),
        ]


def state_directory() -> Path:
    """Where the coordinator keeps its state when it is not told."""
    import platformdirs  # noqa: PLC0415 (only needed here)

    return platformdirs.user_state_path("strata")


def is_healthy(checks: Sequence[Check]) -> bool:
    return not any(check.essential and check.status is Status.MISSING for check in checks)
