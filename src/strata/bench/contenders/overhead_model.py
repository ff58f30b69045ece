"""What the loops of the overhead benchmark train, and how its batch is chosen. Imports nothing of ours."""

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
        self._wanted = self._features.sum(2).tanh()

    def step(self, number: int) -> float:
        features, wanted = self._features[number % NUM_BATCHES], self._wanted[number % NUM_BATCHES]
        loss = torch.nn.functional.mse_loss(self.model(features).squeeze(1), wanted)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
        self.optimizer.step()
        return loss.item()

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in self.model.parameters():
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()


def fitting_batch_size() -> int:
    """With which a step takes about 20 ms of a core here, whatever else the machine does meanwhile.

    For a process with the environment of the loops: how memory is kept makes half of the difference.
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
