"""Metrics gathered over the processes of a gloo group have the values of one process."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import distributed

from strata.errors import LimitExceeded
from strata.trainer.metrics import AUC, F1, FunctionMetric, MetricSet

NUM_ROWS = 3_000
BORDERS = (0, 0, 1_900, NUM_ROWS)
"""Where the rows of each rank begin and end: one rank has none."""


def positive_share(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float((predictions > 0).double().mean())


def metrics() -> MetricSet:
    return MetricSet(
        {
            "auc": "auc",
            "binned": AUC(max_rows=2_000),
            "logloss": "logloss",
            "f1": F1(),
            "share": positive_share,
        },
        from_logits=True,
    )


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(NUM_ROWS, generator=generator) * 50).round() / 50
    return logits, (torch.rand(NUM_ROWS, generator=generator) < logits.sigmoid()).long()


def fill(together: MetricSet, begin: int, end: int) -> None:
    logits, labels = rows()
    for some, true in zip(logits[begin:end].split(128), labels[begin:end].split(128), strict=True):
        together.update(some, true)


def work(rank: int, place: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=len(BORDERS) - 1
    )
    together, limited = metrics(), MetricSet([FunctionMetric(positive_share, max_elements=2_999)])
    begin, end = BORDERS[rank : rank + 2]
    for each in (together, limited):
        fill(each, begin, end)
    together.gather()
    values = together.compute()
    try:
        limited.gather()
    except LimitExceeded as error:
        values["limit"] = str(error)  # type: ignore[assignment]
    together.reset()
    together.gather()
    values["empty"] = together.compute()["auc"]
    Path(place, f"{rank}.json").write_text(json.dumps(values))
    distributed.destroy_process_group()


def test_gathered_values_are_those_of_one_process_on_every_rank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(len(BORDERS) - 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(50)
        assert worker.exitcode == 0
    alone = metrics()
    fill(alone, 0, NUM_ROWS)
    expected = alone.compute()

    for rank in range(len(workers)):
        found = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        # Every rank hits the limit at once, and none waits for the others.
        assert "would keep 3000 predictions" in found.pop("limit")
        assert math.isnan(found.pop("empty"))
        assert found == pytest.approx(expected, rel=1e-12)
        assert found["auc"] == expected["auc"]
        assert found["binned.error_bound"] > 0
