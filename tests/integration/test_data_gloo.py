"""Three real ranks that train over gloo: no rank waits for a batch that another does not have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_children
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from servers import TorchRanks

import strata.data.formats.parquet.format
import strata.data.structured
import strata.data.torch  # noqa: F401 - so that the ranks have them when they are forked

if TYPE_CHECKING:
    from nursery import Lifeline

NUM_RANKS = 3
DEADLINE_S = 50
FILE_ROWS = [700, 3, 90, 411]
EXPECTED = {number for number in range(sum(FILE_ROWS)) if number % 7 < 3}


def write_files(folder: Path) -> None:
    folder.mkdir()
    first = 0
    for number, num_rows in enumerate(FILE_ROWS):
        ids = np.arange(first, first + num_rows)
        table = pa.table({"id": ids, "part": ids % 7, "x0": ids * 0.01})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=60)
        first += num_rows


def rank_main(
    lifeline: Lifeline, *, folder: str, meeting: str, rank: int, num_ranks: int, script: str = "train"
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)

    def report(**fields: Any) -> None:
        lifeline.send(said=fields)

    data_children.report = report
    getattr(data_children, script)(folder, meeting, str(rank), str(num_ranks))


def test_three_ranks_train_to_the_end_over_unequal_files_with_a_filter(tmp_path: Path, torch_ranks: TorchRanks) -> None:
    write_files(tmp_path / "data")
    places = {"folder": str(tmp_path / "data"), "meeting": str(tmp_path / "meeting")}
    ranks = torch_ranks.run(rank_main, NUM_RANKS, deadline_s=DEADLINE_S, **places)
    assert [(one["rank"], one["num_ranks"]) for one in ranks] == [(rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    assert {one["found_in"] for one in ranks} == {"torch.distributed"}
    assert [one["looked"] for one in ranks] == [1, 0, 0], "only rank 0 surveys the files"
    assert {len(one["sizes"]) for one in ranks} == {one["length"] for one in ranks} == {len(EXPECTED) // 48 + 1}
    assert all(min(one["sizes"]) > 0 for one in ranks)
    ids = [number for one in ranks for number in one["ids"]]
    assert len(ids) == len(EXPECTED)
    assert set(ids) == EXPECTED
    assert len({tuple(one["weight"]) for one in ranks}) == 1, "all ranks have the same model"
    assert len({json.dumps(one["state"]) for one in ranks}) == 1


def test_only_rank_0_reads_a_column_for_its_vocabulary_and_all_ranks_share_it(
    tmp_path: Path, torch_ranks: TorchRanks
) -> None:
    (tmp_path / "data").mkdir()
    for number, letters in enumerate((["b", "a"], ["c", "b"])):
        pq.write_table(pa.table({"s": letters * 20}), tmp_path / "data" / f"{number}.parquet")
    places = {"folder": str(tmp_path / "data"), "meeting": str(tmp_path / "meeting"), "script": "codes"}
    ranks = torch_ranks.run(rank_main, NUM_RANKS, deadline_s=DEADLINE_S, **places)
    assert [one["decoded"] for one in ranks] == [2, 0, 0]
    assert [one["values"] for one in ranks] == [["a", "b", "c"]] * NUM_RANKS
    assert ranks[0]["refusal"] == ""
    assert all("the vocabulary of s is" in one["refusal"] for one in ranks[1:]), "their own differ from rank 0's"
