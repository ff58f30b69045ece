"""A coordinator that kills itself with SIGKILL the nth time it reaches a given point, or counts how often it does.

The points surround the steps that make a fact durable and known: write, commit, answer. They are patched into the real
classes in the child process, before the server starts.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from grpc.aio import _server
from sqlalchemy.engine.default import DefaultDialect

from strata import config as configs
from strata.coordinator import server
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.journal.sql import SqlJournal
from strata.coordinator.serve.engine import Engine
from strata.coordinator.serve.session import Link

if TYPE_CHECKING:
    from nursery import Lifeline

    from strata.v1 import session_pb2

STARTING = ("journal opened", "journal loaded", "gRPC up")
RUNNING = (
    "before append",
    "before commit",
    "after commit",
    "before snapshot",
    "after snapshot",
    "before answers",
    "before frame",
    "after frame",
)


class Trap:
    def __init__(self, point: str, nth: int) -> None:
        self.counts: Counter[str] = Counter()
        self._point = point
        self._nth = nth
        self._lock = threading.Lock()

    def reach(self, point: str) -> None:
        with self._lock:
            self.counts[point] += 1
            if (point, self.counts[point]) == (self._point, self._nth):
                die()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the signal is delivered
        signal.pause()


def serve(lifeline: Lifeline, *, settings: dict[str, Any], point: str = "", nth: int = 0) -> None:
    """Report the addresses and serve until the point or SIGTERM; after SIGTERM, report the counts."""
    trap = Trap(point, nth)
    _watch_starting(trap)
    _watch_journal(trap)
    _watch_engine(trap)
    _watch_sessions(trap)
    config = configs.load(CoordinatorConfig, settings, source="the test")
    server.run(config, announce=lambda addresses: lifeline.send(**dataclasses.asdict(addresses)))
    lifeline.send(counts=trap.counts)


def serve_partial_release(lifeline: Lifeline, *, settings: dict[str, Any], num_released: int) -> None:
    """Send the release of a barrier to `num_released` sessions only, and never to the others."""
    released: set[str] = set()

    def allow(link: Link, frame: session_pb2.ServerFrame) -> bool:
        if any(response.WhichOneof("result") == "wait_barrier" for response in frame.responses):
            if len(released) >= num_released:
                return False
            released.add(link.session_id)
        return True

    _before_frames(allow)
    config = configs.load(CoordinatorConfig, settings, source="the test")
    server.run(config, announce=lambda addresses: lifeline.send(**dataclasses.asdict(addresses)))


def _wrap(
    owner: Any, name: str, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args)
        result = original(*args, **kwargs)
        if after:
            after(*args)
        return result

    setattr(owner, name, wrapped)


def _watch_starting(trap: Trap) -> None:
    _wrap(
        SqlJournal,
        "load",
        before=lambda *_: trap.reach("journal opened"),
        after=lambda *_: trap.reach("journal loaded"),
    )
    start = _server.Server.start

    async def started(listening: _server.Server) -> None:
        await start(listening)
        trap.reach("gRPC up")

    _server.Server.start = started  # type: ignore[method-assign]


def _watch_journal(trap: Trap) -> None:
    appending = threading.local()

    def begin(*_: Any) -> None:
        appending.now = True
        trap.reach("before append")

    def end(*_: Any) -> None:
        appending.now = False

    def reach_inside(point: str) -> Callable[..., None]:
        return lambda *_: trap.reach(point) if getattr(appending, "now", False) else None

    _wrap(SqlJournal, "append", before=begin, after=end)
    _wrap(DefaultDialect, "do_commit", before=reach_inside("before commit"), after=reach_inside("after commit"))
    _wrap(
        SqlJournal,
        "_put_snapshot",
        before=lambda *_: trap.reach("before snapshot"),
        after=lambda *_: trap.reach("after snapshot"),
    )


def _watch_engine(trap: Trap) -> None:
    def before(_: Engine, batch: Any) -> None:
        if batch.events:
            trap.reach("before answers")

    _wrap(Engine, "_deliver", before=before)


def _watch_sessions(trap: Trap) -> None:
    written: set[str] = set()

    def count(link: Link, frame: session_pb2.ServerFrame) -> bool:
        if any(response.WhichOneof("result") != "heartbeat" for response in frame.responses):
            trap.reach("before frame")
            written.add(link.session_id)
        return True

    def written_before(link: Link) -> None:
        if link.session_id in written:
            written.discard(link.session_id)
            trap.reach("after frame")

    _before_frames(count, written_before)


def _before_frames(
    look: Callable[[Link, session_pb2.ServerFrame], bool], ask: Callable[[Link], None] = lambda _: None
) -> None:
    """Call `look` with every frame before it is written; returning False drops the frame.

    Before that, call `ask` with the link, whose previous frame has been written.
    """
    take_frame = Link.take_frame

    def looked_at(link: Link) -> session_pb2.ServerFrame | None:
        ask(link)
        frame = take_frame(link)
        return frame if frame is not None and look(link, frame) else None

    Link.take_frame = looked_at  # type: ignore[method-assign]
