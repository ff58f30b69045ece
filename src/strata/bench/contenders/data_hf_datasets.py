"""HF datasets with torch format, in its two fastest ways. Runs in the peers' environment without Strata.

Two workers of torch's DataLoader take whole batches (`batch`) from an iterable dataset: one that streams the Parquet
files, and one over an Arrow copy of them, which is written before and memory-mapped. The better one counts. Its
map-style dataset in a DataLoader, and `iter` in the consumer's process, were slower when we chose.
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
NUM_FILES = 2
"""Files read of the 8, because a pass over all would take long."""
NUM_SHARDS = 8


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
    common = importlib.import_module("data_consumer")
    torch_data = importlib.import_module("torch.utils.data")
    files = common.data_files.table_again(common.num_rows(), NUM_FILES)
    paths = [str(path) for path in files.paths]

    def loader_of(dataset: Any) -> Any:
        batches = dataset.with_format("torch").batch(common.batch_size())
        return torch_data.DataLoader(batches, batch_size=None, num_workers=common.NUM_WORKERS)

    def write_copy(directory: Path) -> None:
        datasets.load_dataset("parquet", data_files=paths, split="train").save_to_disk(directory)

    name = f"hf-{metadata.version('datasets')}-{common.num_rows()}-files-{NUM_FILES}"
    copy = common.data_files.kept(name, write_copy)
    common.warm(Path(copy), *files.paths)
    arrow = datasets.load_from_disk(copy)
    streaming = loader_of(datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True))
    mapped = loader_of(arrow.to_iterable_dataset(num_shards=NUM_SHARDS))
    figures: dict[str, float] = {
        "hf_streaming_rows_per_s": common.rows_per_s_once(lambda: streaming, files),
        "hf_mapped_rows_per_s": common.rows_per_s_once(lambda: mapped, files),
    }
    figures["hf_rows_per_s"] = max(figures.values())
    return figures


if __name__ == "__main__":
    main()
