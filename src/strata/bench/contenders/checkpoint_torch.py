"""torch.save and torch's distributed checkpoint, made as durable as Strata. Runs in the peers' environment."""

from __future__ import annotations

import importlib
import json
import shutil
import statistics
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
common = importlib.import_module("checkpoint_state")


def dcp_async_stall_ms(state: dict[str, object], place: str) -> float:
    """Return how long training stalls; the first save starts the process and does not count."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    dist = importlib.import_module("torch.distributed")
    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=0, world_size=1)
    stalls = []
    for number in range(common.REPETITIONS + 1):
        start = time.perf_counter()
        future = dcp.async_save(
            state,
            checkpoint_id=f"{place}/async-{number}",
            async_checkpointer_type=saver.AsyncCheckpointerType.PROCESS,
        )
        stalls.append(time.perf_counter() - start)
        getattr(future, "upload_completion", future).result()
        shutil.rmtree(f"{place}/async-{number}")
    dist.destroy_process_group()
    return statistics.median(stalls[1:]) * 1e3


def main() -> None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print(json.dumps({"not_installed": "torch"}))
        return
    warnings.simplefilter("ignore")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    state = {name: torch.from_numpy(array) for name, array in common.state().items()}
    with common.directory() as place:

        def plain(number: int) -> None:
            path = Path(place, f"{number}.pt")
            torch.save(state, path)
            common.sync(path)
            common.sync(path.parent)

        def distributed(number: int) -> None:
            writer = dcp.FileSystemWriter(f"{place}/dcp-{number}", thread_count=2, sync_files=True)
            dcp.save(state, storage_writer=writer, no_dist=True)

        figures = {
            "torch_save_ms": common.median_ms(plain, after=lambda number: Path(place, f"{number}.pt").unlink()),
            "dcp_ms": common.median_ms(distributed, after=lambda number: shutil.rmtree(f"{place}/dcp-{number}")),
            "dcp_async_stall_ms": dcp_async_stall_ms(state, place),
        }
    print(json.dumps({"figures": figures, "versions": {"torch": metadata.version("torch")}}))


if __name__ == "__main__":
    main()
