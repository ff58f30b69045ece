"""The fixtures of `servers.py`, for every test here."""

from servers import _nursery, coordinator, embedded, nursery, strict_coordinator

__all__ = ["_nursery", "coordinator", "embedded", "nursery", "strict_coordinator"]
