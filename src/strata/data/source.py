"""Where files are: a pyarrow file system, with failures told in our words."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.errors import DataFileMissing, StorageDenied, StorageError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    import pyarrow.fs as pafs

    from strata.data.files import DataFile


@dataclass(frozen=True, slots=True)
class Source:
    """A file system to read from. Can be used by several threads at once, and pickled."""

    filesystem: pafs.FileSystem
    is_local: bool
    """Whether reading costs no round trip: then nothing is fetched ahead."""

    def open(self, file: DataFile) -> pa.NativeFile:
        """For reading anywhere in it."""
        with reaching(file.name):
            return self.filesystem.open_input_file(file.path)

    def read(self, file: DataFile, offset: int, num_bytes: int) -> pa.Buffer:
        """These bytes, or fewer where the file ends."""
        with self.open(file) as opened, reaching(file.name):
            return opened.read_at(num_bytes, offset)

    def read_tail(self, file: DataFile, num_bytes: int) -> pa.Buffer:
        """The last bytes of the file."""
        first = max(0, file.size_bytes - num_bytes)
        return self.read(file, first, file.size_bytes - first)


@contextlib.contextmanager
def reaching(name: str) -> Iterator[None]:
    """Turns what file systems raise into ours.

    Raises:
        DataFileMissing, StorageDenied, StorageUnavailable, StorageError: As their names say.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DataFileMissing(f"{name} is gone: {error}") from error
    except PermissionError as error:
        raise StorageDenied(f"{name} may not be read: {error}; check its permissions, or the credentials") from error
    except TimeoutError as error:
        raise StorageUnavailable(f"{name} does not answer: {error}") from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{name} cannot be read: {error}") from error
