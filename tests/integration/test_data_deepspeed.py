"""DeepSpeed's own engine trains over gloo on real ranks, with the script of the page on ranks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents import ROOT, blocks
from servers import Nursery, TorchRanks, free_port

from strata.data.ranks import find_ranks

if TYPE_CHECKING:
    from nursery import Lifeline

FILE_ROWS = [7_000, 3, 900, 4_597]
NUM_ROWS = sum(FILE_ROWS)
BATCH_SIZE = 256
SAVED_AT = 20
DEADLINE_S = 50


@pytest.fixture(scope="module")
def deepspeed_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchRanks]:
    """Ranks that have imported DeepSpeed."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    nursery = Nursery(tmp_path_factory.mktemp("ranks"), __name__, "deepspeed", "torch._dynamo", **variables)
    yield TorchRanks(nursery, __name__)
    nursery.close()


def rank_main(lifeline: Lifeline, *, script: str, directory: str, port: int, rank: int, num_ranks: int) -> None:
    """Run the script as `deepspeed` would, and report the rows that the model was given."""
    torch: Any = importlib.import_module("torch")
    # DeepSpeed would compile its collectives in shared memory, which takes minutes; without them it uses gloo.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    batches: list[list[int]] = []

    def record(module: Any, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Linear):
            batches.append((arguments[0].flatten().double() * NUM_ROWS).round().int().tolist())

    torch.nn.modules.module.register_module_forward_pre_hook(record)
    os.chdir(directory)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    names: dict[str, Any] = {}
    exec(script, names)
    engine, dataset = names["engine"], names["dataset"]
    del sys.modules["torch.distributed"]  # so that DeepSpeed is the first source
    alone = find_ranks(environment={})
    lifeline.send(
        said={
            "engine": type(engine).__module__,
            "steps": engine.global_steps,
            "weights": [float(each) for each in engine.module.parameters()],
            "ranks": (dataset.ranks.rank, dataset.ranks.world_size, dataset.ranks.found_in),
            "alone": (alone.rank, alone.world_size, alone.found_in),
            "batches": batches,
        }
    )


@pytest.mark.timeout(120)  # the import of DeepSpeed, then two runs
def test_the_engine_trains_on_every_row_once_and_resumes_mid_epoch_on_more_ranks(
    tmp_path: Path, deepspeed_ranks: TorchRanks
) -> None:
    (tmp_path / "clicks").mkdir()
    for number, ids in enumerate(np.split(np.arange(NUM_ROWS), np.cumsum(FILE_ROWS)[:-1])):
        table = pa.table({"price": (ids / NUM_ROWS).astype(np.float32), "clicked": (ids % 2).astype(np.float32)})
        pq.write_table(table, tmp_path / "clicks" / f"{number}.parquet", row_group_size=500)
    (script,) = [block.text for block in blocks(ROOT / "docs" / "data-ranks.md") if "import deepspeed" in block.text]

    def train(num_ranks: int) -> list[Any]:
        ranks = deepspeed_ranks.run(
            rank_main, num_ranks, deadline_s=DEADLINE_S, script=script, directory=str(tmp_path), port=free_port()
        )
        assert {one["engine"] for one in ranks} == {"deepspeed.runtime.engine"}
        assert [one["ranks"] for one in ranks] == [[rank, num_ranks, "torch.distributed"] for rank in range(num_ranks)]
        assert [one["alone"] for one in ranks] == [[rank, num_ranks, "DeepSpeed"] for rank in range(num_ranks)]
        assert len({len(one["batches"]) for one in ranks}) == 1, "all ranks take the same steps"
        assert len({tuple(one["weights"]) for one in ranks}) == 1, "all ranks have the same model"
        return ranks

    begun = train(2)
    num_steps = -(-NUM_ROWS // (2 * BATCH_SIZE))
    assert {one["steps"] for one in begun} == {num_steps}
    assert sorted(rows_of(begun)) == list(range(NUM_ROWS))

    resumed = train(3)
    left = NUM_ROWS - SAVED_AT * 2 * BATCH_SIZE
    assert {one["steps"] for one in resumed} == {SAVED_AT - left // (-3 * BATCH_SIZE)}
    assert sorted(rows_of(begun, last=SAVED_AT) + rows_of(resumed)) == list(range(NUM_ROWS))


def rows_of(ranks: list[Any], *, last: int | None = None) -> list[int]:
    """Return the rows of the batches up to `last`, of all ranks."""
    return [row for one in ranks for batch in one["batches"][:last] for row in batch]
