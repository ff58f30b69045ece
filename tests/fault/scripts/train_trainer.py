"""A script with a Trainer: run it with plain python, or with `strata run` on one machine or several.

Each worker prints its process id and, before each step, a line `step N` that counts the steps of its attempt. At the
end, the script writes the weights, the history and the scores to OUT/rank-R.json.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from strata import Trainer
from strata.train import AllReduce, Hybrid, ParameterServer
from strata.trainer.history import TIMINGS

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--step-s", type=float, default=0.0, help="sleep before each step")
parser.add_argument("--servers", type=int, default=0, help="parameter servers")
parser.add_argument("--hybrid", action="store_true", help="keep only an embedding on the servers")
parser.add_argument("--until", type=Path, help="sleep no more once this file exists")
arguments = parser.parse_args()

NUM_ROWS = 900
"""Of the data; a row's id is its number."""

print("pid", os.getpid(), flush=True)
torch.set_num_threads(1)
torch.manual_seed(7)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, a, b, c):
        return self.layers(torch.stack([a, b, c], 1).float()).squeeze(1)


class Embedded(Network):
    def __init__(self):
        super().__init__()
        self.row = nn.Embedding(NUM_ROWS, 4)

    def forward(self, id, a, b, c):  # noqa: A002 - the column's name
        return super().forward(a, b, c) + self.row(id).sum(1)


class Observed(Trainer):
    num_calls = 0

    def training_step(self, module, batch):
        self.num_calls += 1
        print("step", self.num_calls, flush=True)
        if arguments.step_s and not (arguments.until and arguments.until.exists()):
            time.sleep(arguments.step_s)
        return super().training_step(module, batch)


strategy = AllReduce()
if arguments.hybrid:
    strategy = Hybrid(sparse=ParameterServer(servers=arguments.servers, staleness=0, tables="row"))
elif arguments.servers:
    strategy = ParameterServer(servers=arguments.servers)
module = Embedded() if arguments.hybrid else Network()
trainer = Observed(module, nn.MSELoss(), torch.optim.Adam, ["mae"], strategy=strategy, workers=2, logs="none")
result = trainer.fit(arguments.data, label="y", valid=arguments.data, epochs=2, batch_size=16, every=5)
found = {
    "steps": result.steps,
    "history": [{name: value for name, value in row.items() if name not in TIMINGS} for row in result.history],
    "scores": trainer.evaluate(arguments.data),
    "weights": [value.tolist() for value in trainer.module.state_dict().values()],
}
arguments.out.mkdir(parents=True, exist_ok=True)
(arguments.out / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
