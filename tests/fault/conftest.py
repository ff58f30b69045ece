"""The fixtures of `tests/integration/servers.py`, for every test here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from network import make_network
from postgres import postgres, replicated_postgres
from servers import _nursery, coordinator, embedded, nursery, strict_coordinator

__all__ = [
    "_nursery",
    "coordinator",
    "embedded",
    "make_network",
    "nursery",
    "postgres",
    "replicated_postgres",
    "strict_coordinator",
]
