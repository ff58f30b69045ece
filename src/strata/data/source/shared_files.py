"""File systems of fsspec whose files share one place to read at.

In memory, every `open` of a path gives the one file that there is; in an archive, all files are read through that of
the archive. Two threads that read at once would each get bytes from where the other has asked for them, and nobody
would notice. So they take turns here, each with a place of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from strata.data.source.ranged_file import RangedFile
from strata.lifecycle import renewed

_PROTOCOLS = ("memory", "tar", "libarchive")
_turn = renewed(threading.Lock())
"""One for all: file systems that look like two may be views of the same."""


def handler_of(filesystem: Any) -> pafs.FSSpecHandler:
    """Makes one of fsspec's file systems one of pyarrow's, that several threads can read from."""
    return _InTurns(filesystem) if _shares(filesystem) else pafs.FSSpecHandler(filesystem)


def in_turns(filesystem: pafs.FileSystem) -> pafs.FileSystem:
    """The same for one that was made into one of pyarrow's already."""
    if isinstance(filesystem, pafs.SubTreeFileSystem):
        return pafs.SubTreeFileSystem(filesystem.base_path, in_turns(filesystem.base_fs))
    if isinstance(filesystem, pafs.PyFileSystem) and type(filesystem.handler) is pafs.FSSpecHandler:
        return pafs.PyFileSystem(handler_of(filesystem.handler.fs))
    return filesystem


def _shares(filesystem: Any) -> bool:
    """Also what is a view of another one, as a directory of it."""
    while filesystem is not None:
        protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
        if any(protocol in _PROTOCOLS for protocol in protocols):
            return True
        filesystem = getattr(filesystem, "fs", None)
    return False


class _InTurns(pafs.FSSpecHandler):  # type: ignore[misc]
    def open_input_file(self, path: str) -> pa.PythonFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        with _turn:
            file = self.fs.open(path, mode="rb")
            size_bytes = file.seek(0, 2)

        def read(offset: int, num_bytes: int) -> pa.Buffer:
            with _turn:
                file.seek(offset)
                return pa.py_buffer(file.read(num_bytes))

        return pa.PythonFile(RangedFile(size_bytes, read), mode="r")

    open_input_stream = open_input_file
