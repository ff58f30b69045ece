"""Prevent the use of gRPC in forked processes.

gRPC runs its own threads, and a process forked from one that uses gRPC cannot use it: calls hang or crash. gRPC's fork
handlers do not help while those threads are busy, and they crash children that never use gRPC, such as the workers of a
DataLoader. `strata.transport` therefore disables them before gRPC is loaded.
"""

from __future__ import annotations

from strata.errors import ForkedProcess
from strata.lifecycle import Home

_user: Home | None = None
"""The first process, among this one and its ancestors, that used gRPC."""


def may_use_grpc() -> bool:
    return _user is None or _user.is_here


def use_grpc() -> None:
    """Declare that this process is about to use gRPC.

    Raises:
        ForkedProcess: This process was forked from one that uses gRPC.
    """
    global _user  # noqa: PLW0603 - gRPC is global to the process
    if not may_use_grpc():
        raise ForkedProcess(
            "this process was forked from one that is connected to a coordinator, and gRPC does not work after a fork; "
            "start it with multiprocessing.get_context('spawn') or 'forkserver', or connect only after the fork"
        )
    _user = _user or Home()
