"""A place for Unix sockets: their paths may not be long, whatever TMPDIR says."""

from __future__ import annotations

import tempfile
from pathlib import Path

MAX_PATH = 107
"""Of a socket, in bytes; Linux has no room for more."""
MAX_NAME = 24
"""Of a socket within the directory, with the slash."""
SHORT = "/tmp"  # noqa: S108 - mkdtemp makes a directory in it that only its user can enter


def make_directory(prefix: str) -> Path:
    """A new one, which only this user can enter; the caller removes it."""
    made = Path(tempfile.mkdtemp(prefix=prefix))
    if len(bytes(made)) + MAX_NAME <= MAX_PATH:
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=SHORT))
