"""Code that the tests of `strata.data` run in other processes: transforms of worker processes, and whole scripts.

As a script, `python data_children.py NAME ARGUMENT…` runs the function of that name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

POISONED = 777
"""The id at which `poisoned` and `fatal` fail."""


# Transforms, at the top level so that other processes can import them


def doubled(batch: pa.RecordBatch) -> dict[str, Any]:
    return {"id": batch["id"], "twice": pc.multiply(batch["id"], 2), "process": [os.getpid()] * batch.num_rows}


def poisoned(batch: pa.RecordBatch) -> pa.RecordBatch:
    if POISONED in batch["id"].to_pylist():
        raise ValueError(f"id {POISONED} is poisoned")
    return batch


def fatal(batch: pa.RecordBatch) -> pa.RecordBatch:
    if POISONED in batch["id"].to_pylist():
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


@dataclass(frozen=True)
class FatalOnce:
    """Kills its process at the first row group that any process decodes."""

    mark: Path

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def endless(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Never returns, except for the first rows."""
    if batch["id"][0].as_py():
        time.sleep(3600)
    return batch


# Scripts


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def loop_for_ever(path: str, worker_type: str, transform: str) -> None:
    """Print the processes after the first batch, and read until interrupted."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it would take seconds
    import psutil

    from strata import StructuredDataset

    loader, _ = StructuredDataset.create_dataloader(
        path,
        batch_size=100,
        num_workers=2,
        worker_type=worker_type,  # type: ignore[arg-type]
        transform=globals()[transform],
        shuffle=True,
        shuffle_buffer_size=100,
        shuffle_seed=1,
        output_format="numpy",
        split_rows=100,
        lanes=1,
    )
    is_reported = False
    while True:
        for _ in loader:
            if not is_reported:
                report(children=[child.pid for child in psutil.Process().children(recursive=True)])
                is_reported = True


def read_in_two_halves(url: str, num_rows: str) -> None:
    """Read with threads and with processes; print what was read and wait for a line, before and within an epoch."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from strata import StructuredDataset
    from strata.errors import StrataError

    loaders = {
        worker_type: StructuredDataset.create_dataloader(
            url,
            batch_size=25,
            num_workers=1,
            worker_type=worker_type,  # type: ignore[arg-type]
            output_format="arrow",
            shuffle=True,
            shuffle_buffer_size=50,  # so that little is read ahead
            lanes=1,
            prefetch_bytes=1,
            cache=False,
        )
        for worker_type in ("thread", "process")
    }
    report(planned=loaders["thread"][1].plan.num_rows)
    sys.stdin.readline()
    batches = {worker_type: iter(loader) for worker_type, (loader, _) in loaders.items()}

    def read(worker_type: str, num_batches: int) -> list[int]:
        found = [next(batches[worker_type]) for _ in range(num_batches)]
        return [number for batch in found for number in batch["id"].to_pylist()]

    num_batches = int(num_rows) // 25
    report(ids={worker_type: read(worker_type, num_batches // 2) for worker_type in batches})
    sys.stdin.readline()
    ids, errors = {}, {}
    for worker_type in batches:
        try:
            ids[worker_type] = read(worker_type, num_batches - num_batches // 2)
        except StrataError as error:
            errors[worker_type] = f"{type(error).__name__}: {error}"
    report(ids=ids, errors=errors)
    for _, dataset in loaders.values():
        dataset.close()


def read_samples(path: str) -> None:
    """Print the keys of each batch of tar shards, and the state after it, until killed."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from strata import StructuredDataset

    loader, dataset = StructuredDataset.create_dataloader(
        path, batch_size=3, num_workers=2, shuffle=True, shuffle_buffer_size=12, output_format="numpy", cache=False
    )
    for batch in loader:
        report(keys=batch["__key__"].tolist(), state=dataset.state_dict())
    sys.stdin.readline()


def read_tokens(path: str) -> None:
    """Print the ids of each batch of at most 200 tokens, and the state after it, until killed."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from strata import StructuredDataset

    loader, dataset = StructuredDataset.create_dataloader(
        path,
        batch_tokens=200,
        sequences="padded",
        length_buckets=True,
        num_workers=2,
        shuffle=True,
        shuffle_buffer_size=60,
        output_format="numpy",
    )
    for batch in loader:
        report(ids=batch["id"].tolist(), state=dataset.state_dict())
    sys.stdin.readline()


def without_torch(path: str) -> None:
    """Run in a Python without torch."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from strata import StructuredDataset
    from strata.errors import StrataError

    loader, dataset = StructuredDataset.create_dataloader(path, batch_size=100, num_workers=2)
    found: dict[str, Any] = {"loader": type(loader).__name__, "len": len(loader)}
    batches = iter(loader)
    begun = [next(batches) for _ in range(3)]
    found["type"] = type(begun[0]["id"]).__name__
    state = json.loads(json.dumps(loader.state_dict()))
    dataset.close()
    arrow, _ = StructuredDataset.create_dataloader(path, batch_size=70, num_workers=1, output_format="arrow")
    arrow.load_state_dict(state)
    rest = list(arrow)
    found["arrow_type"] = type(rest[0]).__name__
    ids = [number for batch in begun for number in batch["id"].tolist()]
    ids += [number for batch in rest for number in batch["id"].to_pylist()]
    found["ids"] = ids
    loader.set_epoch(3)
    found["epoch"] = loader.state_dict()["epoch"]
    try:
        refused, _ = StructuredDataset.create_dataloader(path, output_format="torch")
        next(iter(refused))
    except StrataError as error:
        found["refusal"] = f"{type(error).__name__}: {error}"
    report(**found, torch=sys.modules.get("torch") is not None)


def train(path: str, meeting: str, rank: str, num_ranks: str) -> None:
    """Run one rank of a DDP training over gloo and print what it read."""
    import torch
    import torch.distributed as distributed
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from strata import StructuredDataset, data

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(num_ranks))
    looked = []
    structured: Any = data.structured
    survey = structured.survey

    def counted(*arguments: Any, **options: Any) -> Any:
        looked.append(1)
        return survey(*arguments, **options)

    structured.survey = counted
    loader, dataset = StructuredDataset.create_dataloader(
        path,
        batch_size=16,
        filters="part < 3",
        shuffle=True,
        shuffle_buffer_size=200,
        num_workers=2,
        cache=False,
    )
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ids: list[int] = []
    sizes: list[int] = []
    for batch in loader:
        features = torch.stack([batch["x0"], batch["part"]], dim=1).float()
        loss = (model(features).squeeze(1) - batch["part"].float()).square().mean()
        optimizer.zero_grad()
        loss.backward()  # waits for all ranks: a rank with fewer steps would leave the others waiting here
        optimizer.step()
        ids += batch["id"].tolist()
        sizes.append(len(batch["id"]))
    distributed.barrier()
    report(
        rank=dataset.ranks.rank,
        num_ranks=dataset.ranks.world_size,
        found_in=dataset.ranks.found_in,
        looked=len(looked),
        ids=ids,
        sizes=sizes,
        length=len(loader),
        weight=model.module.weight.flatten().tolist(),
        state=loader.state_dict(),
    )
    dataset.close()
    distributed.destroy_process_group()


def codes(path: str, meeting: str, rank: str, num_ranks: str) -> None:
    """Run one of several ranks over gloo and print the vocabulary and what it read for it."""
    import torch.distributed as distributed

    from strata import StructuredDataset
    from strata.data.runtime.decoder import ThreadDecoder
    from strata.errors import DataError

    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(num_ranks))
    decoded = []
    decode = ThreadDecoder.decode

    def counted(self: ThreadDecoder, number: int) -> pa.Table:
        decoded.append(number)
        return decode(self, number)

    ThreadDecoder.decode = counted  # type: ignore[method-assign]
    _, dataset = StructuredDataset.create_dataloader(path, strings="codes", num_workers=1, cache=False)
    result = {"decoded": len(decoded), "values": dataset.vocabulary("s").values.to_pylist()}
    own = ["a", "b"] if rank == "0" else ["b", "a"]
    refusal = ""
    try:
        StructuredDataset.create_dataloader(path, strings="codes", vocabularies={"s": own}, num_workers=1, cache=False)
    except DataError as error:
        refusal = str(error)
    distributed.barrier()
    report(**result, refusal=refusal)
    distributed.destroy_process_group()


def hold(path: str, output_format: str, split_bytes: str) -> None:
    """Read a shuffled epoch; print the lanes, and the peak bytes of the loader and of the process."""
    from strata import StructuredDataset

    def own_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))

    loader, dataset = StructuredDataset.create_dataloader(
        path,
        batch_size=1000,
        shuffle=True,
        shuffle_buffer_size=20_000,
        split_bytes=int(split_bytes),
        num_workers=1,
        output_format=output_format,
    )
    before = most = own_bytes()
    for number, _ in enumerate(loader):
        if number % 20 == 0:
            most = max(most, own_bytes())
    metrics = dataset.get_metrics()
    print(json.dumps([dataset.state_dict()["lanes"], metrics.peak_buffered_bytes, most - before]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
