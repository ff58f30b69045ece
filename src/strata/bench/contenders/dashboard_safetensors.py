"""The same looks with safetensors and numpy in a script: load the file, list its tensors or draw a histogram."""

from __future__ import annotations

import json
import statistics
import time
from importlib import metadata, util
from typing import TYPE_CHECKING

import numpy as np

from strata.bench.contenders.dashboard_files import LARGE, NUM_BINS, NUM_TENSORS, many_tensors, one_large_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def list_tensors(path: Path) -> None:
    from safetensors.numpy import load_file  # noqa: PLC0415

    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(path).items()}
    if len(shapes) != NUM_TENSORS:
        raise RuntimeError(f"{path} has {len(shapes)} tensors, not {NUM_TENSORS}")


def draw(path: Path) -> None:
    from safetensors.numpy import load_file  # noqa: PLC0415

    np.histogram(load_file(path)[LARGE], NUM_BINS)


def median_ms(paths: Sequence[Path], look: Callable[[Path], None]) -> float:
    taken_s = []
    for path in paths:
        start_s = time.perf_counter()
        look(path)
        taken_s.append(time.perf_counter() - start_s)
    return statistics.median(taken_s[1:]) * 1e3


def main() -> None:
    with many_tensors() as paths:
        tree_ms = median_ms(paths, list_tensors)
    with one_large_tensor() as paths:
        histogram_ms = median_ms(paths, draw)
    figures = {"safetensors_tree_20k_ms": tree_ms, "safetensors_histogram_64mib_ms": histogram_ms}
    print(json.dumps({"figures": figures, "versions": {"safetensors": metadata.version("safetensors")}}))


if __name__ == "__main__":
    if util.find_spec("safetensors") is None:
        print(json.dumps({"not_installed": "safetensors"}))
    else:
        main()
