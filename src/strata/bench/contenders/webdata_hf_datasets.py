"""HF datasets: its own `webdataset` builder, streaming, with two workers and with none. Runs in the peers' environment
without Strata.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-hf-") as home:
        os.environ |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        try:
            datasets = importlib.import_module("datasets")
        except ImportError:
            print(json.dumps({"not_installed": "datasets"}))
            return
        print(json.dumps({"figures": measure(datasets), "versions": {"datasets": metadata.version("datasets")}}))


def measure(datasets: Any) -> dict[str, float]:
    common = importlib.import_module("webdata_consumer")
    torch_data = importlib.import_module("torch.utils.data")

    def loader_of(shards: Any, num_workers: int) -> Any:
        paths = list(map(str, shards.paths))
        dataset = datasets.load_dataset("webdataset", data_files={"train": paths}, split="train", streaming=True)
        return torch_data.DataLoader(dataset.batch(common.batch_size()), batch_size=None, num_workers=num_workers)

    figures = {}
    for size in common.SIZES:
        shards = common.peer_tars(size)
        figures[f"hf_{size}_mb_per_s"] = max(
            common.mb_per_s_once(lambda shards=shards, num=num: loader_of(shards, num), shards)
            for num in (0, common.NUM_WORKERS)
        )
    return figures


if __name__ == "__main__":
    main()
