"""The HTTP API for people, dashboards, probes and autoscalers: status, lists, events and metrics.

Reads only, through the engine of `serve`; it never changes the state of a job. May import `serve`, `journal` and
`state`, never `client` or `relay`.
"""

from strata.coordinator.http.app import make_app
from strata.coordinator.http.server import make_server

__all__ = ["make_app", "make_server"]
