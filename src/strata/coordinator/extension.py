"""What layers above may add to the coordinator's HTTP server.

The coordinator does not know the dashboard. It starts an extension with its engine, lets it add routes, and stops it
before the server stops. The types of FastAPI are named but not imported here: a run serves HTTP only once a browser
connects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastapi import FastAPI

    from strata.coordinator.http.access import Doors
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.serve.session import SessionHub


class Extension(Protocol):
    """All methods except `load` are called on the coordinator's event loop."""

    def start(self, engine: Engine, hub: SessionHub) -> None:
        """Begin to observe the engine, which may not lead yet."""
        ...

    def load(self) -> None:
        """Import what `extend` needs, on another thread: workers must be answered meanwhile."""
        ...

    def extend(self, app: FastAPI, doors: Doors) -> None:
        """Add routes, when HTTP is about to be served; after `start`."""
        ...

    async def stop(self) -> None:
        """End open responses, and save what is to be saved. The engine still answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How a program that embeds a coordinator wants HTTP to be served."""

    extensions: tuple[Extension, ...] = ()
    is_lazy: bool = False
    """Listen now, but import the server when the first client connects: most runs are never looked at."""
    is_private: bool = False
    """Refuse connections of other users of this machine. For loopback."""
