"""Threads read correctly from file systems whose open files share one position."""

from __future__ import annotations

import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from strata.data.source.filesystem import open_source

CONTENT = {name: np.arange(first, first + 50_000).tobytes() for name, first in (("a", 0), ("b", 10**9))}


@pytest.fixture
def memory() -> Iterator[Any]:
    made = fsspec.filesystem("memory")
    for name, content in CONTENT.items():
        made.pipe_file(f"/place/{name}", content)
    yield made
    made.store.clear()


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def check(filesystem: pafs.FileSystem, path: Callable[[str], str]) -> None:
    def read(seed: int) -> None:
        rng = random.Random(seed)
        name = "ab"[seed % 2]
        with filesystem.open_input_file(path(name)) as opened:
            for _ in range(300):
                offset = rng.randrange(len(CONTENT[name]))
                assert opened.read_at(64, offset) == CONTENT[name][offset : offset + 64]
            opened.seek(0)
            assert opened.read() == CONTENT[name]
        with filesystem.open_input_stream(path(name)) as opened:
            assert opened.read() == CONTENT[name]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


@pytest.mark.parametrize(
    ("wrap", "below"),
    [
        (lambda made: made, "/place"),
        (lambda made: DirFileSystem("/place", made), ""),
        (lambda made: pafs.PyFileSystem(pafs.FSSpecHandler(made)), "/place"),
        (lambda made: pafs.SubTreeFileSystem("/place", pafs.PyFileSystem(pafs.FSSpecHandler(made))), ""),
    ],
    ids=["as it is", "a directory of it", "made pyarrow's", "a directory of pyarrow's"],
)
def test_files_in_memory(memory: Any, wrap: Callable[[Any], Any], below: str) -> None:
    source, _ = open_source("x", filesystem=wrap(memory))
    check(source.filesystem, lambda name: f"{below}/{name}" if below else name)


def test_files_in_an_archive(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        for name, content in CONTENT.items():
            (tmp_path / name).write_bytes(content)
            archive.add(tmp_path / name, name)
    source, _ = open_source("x", filesystem=fsspec.filesystem("tar", fo=str(tmp_path / "data.tar")))
    check(source.filesystem, lambda name: name)


def test_a_missing_file_is_not_found(memory: Any) -> None:
    source, _ = open_source("x", filesystem=memory)
    with pytest.raises(FileNotFoundError):
        source.filesystem.open_input_file("/place/c")
