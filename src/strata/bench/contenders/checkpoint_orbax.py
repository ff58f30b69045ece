"""orbax with default settings, made as durable as Strata. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import statistics
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
common = importlib.import_module("checkpoint_state")


def sync_all(directory: Path) -> None:
    """Flush every file that was written, and the directories that contain them."""
    for path, _, names in os.walk(directory):
        for name in names:
            common.sync(Path(path, name))
        common.sync(Path(path))
    common.sync(directory.parent)


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        jax = importlib.import_module("jax")
        orbax = importlib.import_module("orbax.checkpoint")
    except ImportError:
        print(json.dumps({"not_installed": "orbax-checkpoint"}))
        return
    state = {name: jax.numpy.asarray(array) for name, array in common.state().items()}
    jax.block_until_ready(state)
    stalls, totals = [], []
    with common.directory() as place, orbax.StandardCheckpointer() as checkpointer:
        for number in range(common.REPETITIONS + 1):  # the first one is a warm-up
            path = Path(place, str(number))
            start = time.perf_counter()
            checkpointer.save(path, state)
            stalls.append(time.perf_counter() - start)
            checkpointer.wait_until_finished()
            sync_all(path)
            totals.append(time.perf_counter() - start)
            shutil.rmtree(path)
    figures = {
        "orbax_ms": statistics.median(totals[1:]) * 1e3,
        "orbax_async_stall_ms": statistics.median(stalls[1:]) * 1e3,
    }
    versions = {"orbax-checkpoint": metadata.version("orbax-checkpoint"), "jax": metadata.version("jax")}
    print(json.dumps({"figures": figures, "versions": versions}))


if __name__ == "__main__":
    main()
