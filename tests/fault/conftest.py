"""The fixtures of `tests/integration/servers.py`, for every test here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from postgres import postgres
from servers import _nursery, coordinator, embedded, nursery, strict_coordinator

__all__ = ["_nursery", "coordinator", "embedded", "nursery", "postgres", "strict_coordinator"]
