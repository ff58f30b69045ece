"""The checkpoints that explorers look into: plain safetensors files, in the page cache of the kernel.

Every repetition opens another name of the same file, so that nothing is remembered from the one before.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_TENSORS = 20_000
TENSORS_PER_GROUP = 20
SMALL_ELEMENTS = 256
LARGE = "model.embedding.weight"
LARGE_SHAPE = (16_384, 1_024)
"""64 MiB of fp32."""
NUM_BINS = 100
SEED = 7
NUM_REPETITIONS, NUM_QUICK_REPETITIONS = 7, 2


def repetitions() -> int:
    return NUM_QUICK_REPETITIONS if "--quick" in sys.argv else NUM_REPETITIONS


def path_of(number: int) -> list[str]:
    """Return the groups above a tensor, and its name."""
    return ["model", "layers", str(number // TENSORS_PER_GROUP), f"part{number % TENSORS_PER_GROUP}"]


@contextlib.contextmanager
def many_tensors() -> Iterator[list[Path]]:
    """Yield files with 20,000 small tensors, one per repetition after one that warms up."""
    small = np.arange(SMALL_ELEMENTS, dtype=np.float32)
    with copies({".".join(path_of(number)): small for number in range(NUM_TENSORS)}) as paths:
        yield paths


@contextlib.contextmanager
def one_large_tensor() -> Iterator[list[Path]]:
    """Yield files with one tensor of 64 MiB."""
    with copies({LARGE: np.random.default_rng(SEED).standard_normal(LARGE_SHAPE, np.float32)}) as paths:
        yield paths


@contextlib.contextmanager
def copies(tensors: dict[str, np.ndarray]) -> Iterator[list[Path]]:
    from safetensors.numpy import save_file  # noqa: PLC0415 - not a dependency of Strata

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        first = Path(directory, "0.safetensors")
        save_file(tensors, first)
        others = [Path(directory, f"{number}.safetensors") for number in range(1, 1 + repetitions())]
        for other in others:
            other.hardlink_to(first)
        yield [first, *others]
