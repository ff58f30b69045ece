"""Train a model that predicts clicks: a script as you would write it for `strata run`.

    strata run --workers 2 train.py --data clicks --step-log steps

Only the lines with `ctx` differ from a script without Strata. The step log is needed only by the demo: it records which
rows each worker has trained on, so that the demo can count them.
"""

import argparse

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import strata
from strata.demo.clicks import NUM_COUNTRIES, NUM_ITEMS, NUM_USERS
from strata.demo.step_log import StepLog


class ClickModel(torch.nn.Module):
    """Embedding tables for user, item and country, and a small network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(NUM_USERS, 16)
        self.items = torch.nn.Embedding(NUM_ITEMS, 16)
        self.countries = torch.nn.Embedding(NUM_COUNTRIES, 4)
        self.recent = torch.nn.EmbeddingBag(NUM_ITEMS, 16)  # items viewed before: a list in each row
        self.head = torch.nn.Sequential(
            torch.nn.Linear(55, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        user, item, recent = self.users(batch["user"]), self.items(batch["item"]), self.recent(*batch["recent"])
        similarity = torch.stack([(user * item).sum(1), (recent * item).sum(1), batch["price"]], dim=1)
        features = [user, item, recent, self.countries(batch["country"]), similarity]
        logits: torch.Tensor = self.head(torch.cat(features, dim=1))
        return logits.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory of Parquet files")
    parser.add_argument("--step-log", required=True, help="directory for the demo's step log")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="rows per step on each worker")
    args = parser.parse_args()

    ctx = strata.init()
    ctx.init_process_group()
    torch.manual_seed(ctx.rank)
    model = ClickModel()
    # Gradient sums are bit-identical after a restart: see docs/run.md.
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = ctx.dataloader(args.data, batch_size=args.batch_size, shuffle=True)

    state = {"model": model, "optimizer": optimizer}
    step = ctx.restore(state).step  # 0 on a fresh start
    step_log = StepLog(args.step_log, ctx, step)
    for epoch in ctx.epochs(args.epochs):
        for batch in loader:
            loss = binary_cross_entropy_with_logits(parallel(batch), batch["clicked"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            optimizer.step()
            step += 1
            ctx.report(step=step, loss=loss.item())
            step_log.trained(step, epoch, loss.item(), batch["row"])
            step_log.saved(ctx.maybe_checkpoint(state))
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    ctx.checkpoint(state).wait()


if __name__ == "__main__":
    main()
