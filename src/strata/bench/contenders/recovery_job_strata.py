"""The job as a script for `strata run`: DATA LOG STEPS."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import strata
from strata.bench.contenders.recovery_model import BATCH_SIZE, SAVE_EVERY, StepLog, network, train_step

if __name__ == "__main__":
    data, directory, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    step_log = StepLog(directory)
    ctx = strata.init(every=SAVE_EVERY)
    dist.init_process_group("gloo")
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    loader = ctx.dataloader(data, "parquet", batch_size=BATCH_SIZE, shuffle=True)
    step = ctx.restore({"model": model, "optimizer": optimizer}).step
    for _ in ctx.epochs(1_000):
        for batch in loader:
            features = torch.stack([column for name, column in batch.items() if name != "y"], 1)
            loss = train_step(parallel, optimizer, features, batch["y"])
            step += 1
            ctx.report(step=step, loss=loss)
            ctx.maybe_checkpoint({"model": model, "optimizer": optimizer})
            step_log.step(step)
            if step == num_steps:
                sys.exit(0)
