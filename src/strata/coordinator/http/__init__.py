"""What people, dashboards, probes and autoscalers may ask over HTTP."""

from strata.coordinator.http.app import make_app
from strata.coordinator.http.server import make_server

__all__ = ["make_app", "make_server"]
