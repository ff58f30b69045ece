"""Processes that read through a node cache, and what a loader in this process delivers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import shared_children

from strata.data import StructuredDataset
from strata.data.shared.cache import NodeCache, directory_for

_numbers = itertools.count()


@pytest.fixture
def limit() -> int:
    """A limit that no other test uses, and with it a cache of its own."""
    return (256 << 20) + os.getpid() * 1_000 + next(_numbers)


@pytest.fixture
def held(limit: int) -> Iterator[int]:
    """A limit whose cache stays during the test, however long this process is kept from running."""
    member = NodeCache(directory_for(limit), max_bytes=limit, linger_s=0.1)
    assert member.join()
    yield limit
    member.leave()


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


class Reader:
    """A child that reads the data."""

    def __init__(self, children: list[subprocess.Popen[str]], data: str, how: str = "", **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, shared_children.__file__, data, json.dumps(options), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(self.process)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line())
        return found

    def end(self) -> None:
        self.process.communicate(timeout=30)


def deliver(data: str, **options: Any) -> tuple[list[Any], Any]:
    loader, dataset = StructuredDataset.create_dataloader(
        data, **{"batch_size": 500, "num_workers": 2, "output_format": "numpy"} | options
    )
    batches = [{name: values.copy() for name, values in batch.items()} for batch in loader]
    total = dataset.get_metrics().total
    dataset.close()
    return batches, total


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, two, strict=True)
    )
