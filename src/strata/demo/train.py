"""Learns from a log of clicks which items a user will click on: a script as you would write it, for `strata run`.

    strata run --workers 2 train.py --data clicks --step-log steps

What is different from a script that knows nothing of Strata stands in the lines with `ctx`. The step log is for the demo
alone: there every worker writes down which rows it has trained on, so that they can be counted at the end.
"""

import argparse

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import strata
from strata.demo.clicks import NUM_COUNTRIES, NUM_ITEMS, NUM_USERS
from strata.demo.step_log import StepLog


class ClickModel(torch.nn.Module):
    """Tables of embeddings for who, what and where, and a small network on top of them."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(NUM_USERS, 16)
        self.items = torch.nn.Embedding(NUM_ITEMS, 16)
        self.countries = torch.nn.Embedding(NUM_COUNTRIES, 4)
        self.recent = torch.nn.EmbeddingBag(NUM_ITEMS, 16)  # what the user has looked at before: a list in each row
        self.head = torch.nn.Sequential(
            torch.nn.Linear(55, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        user, item, recent = self.users(batch["user"]), self.items(batch["item"]), self.recent(*batch["recent"])
        alike = torch.stack([(user * item).sum(1), (recent * item).sum(1), batch["price"]], dim=1)
        features = [user, item, recent, self.countries(batch["country"]), alike]
        logits: torch.Tensor = self.head(torch.cat(features, dim=1))
        return logits.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="a directory of Parquet files")
    parser.add_argument("--step-log", required=True, help="a directory, for the demo")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a step, on each worker")
    args = parser.parse_args()

    ctx = strata.init()
    ctx.init_process_group()
    torch.manual_seed(ctx.rank)
    model = ClickModel()
    # Sums of gradients are the same to the last bit after a restart: see "The same weights" in docs/run.md.
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
            loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
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
