"""A place for Unix sockets: their paths may not be long, whatever TMPDIR says."""

from __future__ import annotations

import tempfile
from pathlib import Path

from strata.scratch import NUM_RANDOM, Scratch

MAX_PATH = 107
"""Of a socket, in bytes; Linux has no room for more."""
MAX_NAME = 24
"""Of a socket within the directory, with the slash."""
PREFIX = "strata-sockets-"
SHORT = "/tmp"  # noqa: S108 - a directory is made in it that only its user can enter


def place() -> Scratch:
    """A new one."""
    room = MAX_PATH - MAX_NAME - NUM_RANDOM - len(f"/{PREFIX}")
    is_long = len(tempfile.gettempdir().encode()) > room
    return Scratch(PREFIX, Path(SHORT) if is_long else None)
