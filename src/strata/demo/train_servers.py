"""Train a model that predicts clicks, with its embedding tables on parameter servers.

    python train_servers.py --data clicks --step-log steps

The Trainer starts the workers and the servers. The step log is needed only by the demo: it records which rows each
worker has trained on, so that the demo can count them. In your script, use `strata.Trainer`.
"""

import argparse

import torch

from strata.demo.logged_trainer import LoggedTrainer
from strata.demo.train import ClickModel
from strata.train import AllReduce, Hybrid, ParameterServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory of Parquet files")
    parser.add_argument("--step-log", required=True, help="directory for the demo's step log")
    parser.add_argument("--name", default="", help="name of the run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--checkpoints", default=None, help="directory for checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="rows per step on each worker")
    parser.add_argument("--max-restarts", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    tables = ParameterServer(servers=args.servers, tables=("users", "items", "recent"))
    trainer = LoggedTrainer(
        ClickModel(),
        torch.nn.BCEWithLogitsLoss(),
        torch.optim.Adagrad,
        optimizer_args={"lr": 0.05},
        strategy=Hybrid(dense=AllReduce(), sparse=tables),
        workers=args.workers,
        name=args.name,
        checkpoints=args.checkpoints,
        max_restarts=args.max_restarts,
    )
    trainer.step_log_directory = args.step_log
    trainer.fit(args.data, label="clicked", epochs=args.epochs, batch_size=args.batch_size, every=args.every)


if __name__ == "__main__":
    main()
