"""A loader as users write it: torch's DataLoader over pyarrow. Runs in the peers' environment without Strata.

Two worker processes share the row groups, decode them, slice them into batches and send dicts of tensors. A second
figure has no workers: pyarrow's threads decode in the consumer's process. The better one counts.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

sys.path.append(str(Path(__file__).parent))
FILES_WITH_WORKERS = 2
"""Files read of the 8, because the queue of the workers is slow."""


class RowGroups:
    """The body of an IterableDataset, defined without importing torch."""

    def __init__(self, paths: Sequence[Path], num_rows: int) -> None:
        self._paths = list(paths)
        self._num_rows = num_rows

    def batches(self, first: int, step: int, *, use_threads: bool) -> Iterator[dict[str, Any]]:
        """Yield the batches of every `step`-th row group."""
        pq, torch = importlib.import_module("pyarrow.parquet"), importlib.import_module("torch")
        number = 0
        for path in self._paths:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                if number % step == first:
                    table = file.read_row_group(group, use_threads=use_threads)
                    columns = [torch.from_dlpack(column.chunk(0)).split(self._num_rows) for column in table.columns]
                    for parts in zip(*columns, strict=True):
                        yield dict(zip(table.column_names, parts, strict=True))
                number += 1


def loader_of(torch_data: Any, row_groups: RowGroups, num_workers: int) -> Any:
    class Dataset(torch_data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            worker = torch_data.get_worker_info()
            if worker is None:
                return row_groups.batches(0, 1, use_threads=True)
            return row_groups.batches(worker.id, worker.num_workers, use_threads=False)

    return torch_data.DataLoader(Dataset(), batch_size=None, num_workers=num_workers)


def main() -> None:
    try:
        torch_data = importlib.import_module("torch.utils.data")
    except ImportError:
        print(json.dumps({"not_installed": "torch"}))
        return
    common = importlib.import_module("data_consumer")
    files = common.data_files.table(common.num_rows())
    some = common.data_files.table_again(common.num_rows(), FILES_WITH_WORKERS)
    inline = loader_of(torch_data, RowGroups(files.paths, common.batch_size()), 0)
    with_workers = loader_of(torch_data, RowGroups(some.paths, common.batch_size()), common.NUM_WORKERS)
    figures = {
        "torch_inline_rows_per_s": common.rows_per_s(lambda: inline, files),
        "torch_2_workers_rows_per_s": common.rows_per_s_once(lambda: with_workers, some),
    }
    figures["torch_rows_per_s"] = max(figures.values())
    print(json.dumps({"figures": figures, "versions": {"torch": metadata.version("torch")}}))


if __name__ == "__main__":
    main()
