"""The model that the loops of the overhead benchmark train, and its batch size. Does not import Strata."""

from __future__ import annotations

import hashlib
import statistics
import time

import torch

STEP_S = 0.020
WIDTH = 512
NUM_BATCHES = 8
_FIRST_BATCH_SIZE = 64
_TRIES = 3
_TRIED_STEPS = 12


class Training:
    """The same in every process: seed, data, arithmetic."""

    def __init__(self, batch_size: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self._features = torch.randn(NUM_BATCHES, batch_size, WIDTH)
        self._targets = self._features.sum(2).tanh()

    def step(self, number: int) -> float:
        features, targets = self._features[number % NUM_BATCHES], self._targets[number % NUM_BATCHES]
        loss = torch.nn.functional.mse_loss(self.model(features).squeeze(1), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.optimizer.step()
        return loss.item()

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in self.model.parameters():
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()


def fitting_batch_size() -> int:
    """Return the batch size with which a step takes about 20 ms of CPU time on this machine.

    Call it in a process with the environment of the loops: the settings of malloc make half of the difference.
    """
    batch_size = _FIRST_BATCH_SIZE
    for _ in range(_TRIES):
        training = Training(batch_size)
        times_s = []
        for number in range(_TRIED_STEPS):
            began_s = time.thread_time()
            training.step(number)
            times_s.append(time.thread_time() - began_s)
        batch_size = max(round(batch_size * STEP_S / statistics.median(times_s)), 8)
    return batch_size


if __name__ == "__main__":
    print(fitting_batch_size())
