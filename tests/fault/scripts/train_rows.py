"""A typical training script with one addition: it counts how often the model was trained on each row.

The counts are saved with the model, so they cover exactly the rows that the final model has seen, whatever was lost on
the way. At the end, the script writes its results to OUT/rank-R.json. After every step it prints a line `step N`.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import strata
from strata import StructuredDataset
from strata.data import mix

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--rows", type=int, required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--own", choices=["dataset", "sampler", "stateful"], help="a dataset of its own, not files")
parser.add_argument(
    "--batches", choices=["rows", "tokens", "mix"], default="rows", help="how batches of files are made"
)
parser.add_argument("--step-s", type=float, default=0.0, help="sleep after each step")
parser.add_argument("--until", type=Path, help="sleep no more when there is this file")
parser.add_argument("--gate", type=Path, help="wait after the step whose number is in this file, or a later one")
parser.add_argument("--fail-at", type=int, default=-1, help="raise at this step, on the last rank, every time")
parser.add_argument("--hang-at", type=int, default=-1, help="stand still at this step of the first attempt")
arguments = parser.parse_args()

print("pid", os.getpid(), flush=True)
random.seed(7)
np.random.seed(7)
torch.manual_seed(7)
torch.set_num_threads(1)
ctx = strata.init(every=arguments.every)
dist.init_process_group("gloo")


net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
# Otherwise DDP rebuilds its buckets after its first step, and with three or more ranks the sums of the first step after
# a restart are rounded differently.
parallel = DistributedDataParallel(net, find_unused_parameters=True)
counts = torch.zeros(arguments.rows, dtype=torch.int64)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


class Rows(torch.utils.data.Dataset):
    """The same columns, with noise drawn when a row is read."""

    def __len__(self):
        return arguments.rows

    def __getitem__(self, row):
        noise = torch.rand(3) + random.random() + np.random.random()
        return {"id": row, **dict(zip("abc", noise, strict=True)), "y": float(row % 7)}


if arguments.own == "stateful":
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    loader = ctx.attach(
        StatefulDataLoader(
            Rows(), arguments.batch_size, sampler=StatefulDistributedSampler(Rows(), ctx.world_size, ctx.rank)
        )
    )
elif arguments.own == "sampler":
    own = Rows()
    loader = ctx.attach(torch.utils.data.DataLoader(own, arguments.batch_size, sampler=ctx.sampler(own), num_workers=2))
elif arguments.own == "dataset":
    loader = ctx.dataloader(
        Rows(), batch_size=arguments.batch_size, shuffle=True, num_workers=2, persistent_workers=True
    )
elif arguments.batches == "tokens":
    loader = ctx.dataloader(
        arguments.data,
        "parquet",
        batch_tokens=240,
        length_buckets=True,
        sequences="padded",
        shuffle=True,
        shuffle_buffer_size=128,
    )
elif arguments.batches == "mix":
    ranks = {"rank": ctx.rank, "num_ranks": ctx.world_size}
    sources = {
        path.name: StructuredDataset.create_dataloader(path, columns=["id", *"abcy"], shuffle=True, **ranks)[0]
        for path in sorted(Path(arguments.data).iterdir())
    }
    sizes = {name: source.dataset.plan.num_rows for name, source in sources.items()}
    loader = ctx.attach(mix(sources, sizes, batch_size=arguments.batch_size))
else:
    loader = ctx.dataloader(
        arguments.data, "parquet", batch_size=arguments.batch_size, shuffle=True, shuffle_seed=3, tail="uneven"
    )


class Counts:
    """How often the model was trained on each row."""

    def state_dict(self):
        return {"counts": counts}

    def load_state_dict(self, state):
        counts.copy_(state["counts"])


parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "counts": Counts()}
progress = ctx.restore(parts)
step = progress.step
print("restored", step, flush=True)
for _ in ctx.epochs(arguments.epochs):
    for batch in loader:
        step += 1
        if step == arguments.fail_at and ctx.rank == ctx.world_size - 1:
            raise ValueError(f"row {int(batch['id'][0])} is bad")
        if step == arguments.hang_at and ctx.attempt == 0 and ctx.rank == 0:
            time.sleep(3600)
        features = torch.stack([batch["a"], batch["b"], batch["c"]], 1).float()
        loss = torch.nn.functional.mse_loss(parallel(features).squeeze(1), batch["y"].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        # Noise from all generators: one that differs after a restart changes the weights.
        noise = random.random() + np.random.random() + torch.rand(()).item()
        drift = torch.tensor([noise if ctx.rank == 0 else 0.0], dtype=torch.float64)
        seen = torch.zeros_like(counts).index_add_(0, batch["id"], torch.ones_like(batch["id"]))
        dist.all_reduce(seen)
        dist.all_reduce(drift)
        counts.add_(seen)
        with torch.no_grad():
            net[0].bias += drift.float() * 1e-3
        ctx.report(step=step, loss=loss.item())
        ctx.maybe_checkpoint(parts)
        print("step", step, flush=True)
        if arguments.step_s and not (arguments.until and arguments.until.exists()):
            time.sleep(arguments.step_s)
        while arguments.gate and step >= int(arguments.gate.read_text()):
            time.sleep(0.01)
digest = hashlib.sha256()
for tensor in [*net.parameters(), counts]:
    digest.update(tensor.detach().numpy().tobytes())
result = {
    "rank": ctx.rank,
    "world_size": ctx.world_size,
    "attempt": ctx.attempt,
    "step": step,
    "counts": sorted({int(count) for count in counts}),
    "digest": digest.hexdigest(),
}
out = Path(arguments.out)
out.mkdir(parents=True, exist_ok=True)
temporary = out / f".rank-{ctx.rank}"
temporary.write_text(json.dumps(result))
temporary.replace(out / f"rank-{ctx.rank}.json")
dist.destroy_process_group()
ctx.close()
sys.exit(0)
