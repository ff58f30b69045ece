"""The fixtures of `servers.py`, for every test here."""

from postgres import postgres
from servers import _nursery, coordinator, embedded, nursery, strict_coordinator, torch_ranks

__all__ = ["_nursery", "coordinator", "embedded", "nursery", "postgres", "strict_coordinator", "torch_ranks"]
