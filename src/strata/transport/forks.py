"""gRPC and fork.

gRPC has threads of its own, and no process that was forked from one that uses it can use it, too: calls hang or crash.
Its own handlers for forks do not help while those threads are at work. They crash children that never touch gRPC, such
as a DataLoader's workers, so they are switched off (in `strata.transport`, before gRPC is loaded).
"""

from __future__ import annotations

from strata.errors import ForkedProcess
from strata.lifecycle import Home

_user: Home | None = None
"""The first process, of this one and its parents, that has used gRPC."""


def may_use_grpc() -> bool:
    return _user is None or _user.is_here


def use_grpc() -> None:
    """Before the first use.

    Raises:
        ForkedProcess: This process was forked from one that uses it.
    """
    global _user  # noqa: PLW0603 - there is one gRPC in a process
    if not may_use_grpc():
        raise ForkedProcess(
            "this process was forked from one that is connected to a coordinator, and gRPC does not survive a fork; "
            "start it with multiprocessing.get_context('spawn') or 'forkserver', or connect only after the fork"
        )
    _user = _user or Home()
