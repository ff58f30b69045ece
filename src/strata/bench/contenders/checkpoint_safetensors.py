"""safetensors' writer with fsync. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
common = importlib.import_module("checkpoint_state")


def main() -> None:
    try:
        writer = importlib.import_module("safetensors.numpy")
    except ImportError:
        print(json.dumps({"not_installed": "safetensors"}))
        return
    state = common.state()
    with common.directory() as place:

        def save(number: int) -> None:
            path = Path(place, f"{number}.safetensors")
            writer.save_file(state, path)
            common.sync(path)
            common.sync(path.parent)

        taken_ms = common.median_ms(save, after=lambda number: Path(place, f"{number}.safetensors").unlink())
    versions = {"safetensors": metadata.version("safetensors")}
    print(json.dumps({"figures": {"safetensors_ms": taken_ms}, "versions": versions}))


if __name__ == "__main__":
    main()
