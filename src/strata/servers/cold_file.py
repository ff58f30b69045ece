"""`ColdFiles`: files for the rows of tables that do not fit into memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from strata.errors import LimitExceeded

if TYPE_CHECKING:
    from pathlib import Path


class ColdFiles:
    """Maps files without a name in a directory: they are gone when the process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, num_bytes: int) -> mmap.mmap:
        """Return a mapping of a new file with as many zeros.

        Raises:
            LimitExceeded: The disk is too small. Space is reserved at once, since a full disk would end the process.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise LimitExceeded(
                f"a file of {num_bytes} bytes for the rows of a table cannot be created in {self._directory} "
                f"({error.strerror}); lower max_rows, raise memory_rows, or set TMPDIR to a larger disk",
                field="memory_rows",
            ) from error
        mapped.madvise(mmap.MADV_RANDOM)  # rows lie anywhere: reading ahead would only evict others
        return mapped
