"""The port behind the service: the engine in a coordinator, the upstream session in a relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from strata.coordinator.config import CoordinatorConfig, Limits
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.serve.service import Method
    from strata.coordinator.state.job import Notice
    from strata.errors import StrataError

Done = Callable[["Message | StrataError"], None]
"""Receives the answer; called exactly once, on the event loop."""
Listener = Callable[["list[Notice]"], None]


class Backend(Protocol):
    """Runs on one event loop; no method blocks."""

    limits: Limits
    listeners: list[Listener]
    """Called with notices once they are durable."""

    def submit(self, method: Method, request: Any, done: Done) -> None:
        """Run a call. Calls of one caller run in the order of submission."""
        ...

    def suspect(self, job_id: str, worker_id: str, fence: int) -> None:
        """Report that the connection of this worker was lost."""
        ...


class EngineBackend:
    """The backend of a coordinator."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._config: CoordinatorConfig = engine.config
        self.limits = engine.config.limits
        self.listeners = engine.listeners

    def submit(self, method: Method, request: Any, done: Done) -> None:
        call = self._engine.call_volatile if method.volatile else self._engine.call
        call(
            lambda core, clock: method.decide(core, request, clock),
            lambda value: done(method.answer(value, self._config)),
        )

    def suspect(self, job_id: str, worker_id: str, fence: int) -> None:
        self._engine.suspect(job_id, worker_id, fence)
