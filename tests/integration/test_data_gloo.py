"""Three real ranks that train together over gloo: nobody waits for a batch that another rank does not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import data_children
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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


def train(folder: Path, meeting: Path, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank says at the end; a rank that does not end is an error, not a hang."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, data_children.__file__, "train", folder, meeting, str(rank), str(num_ranks)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [child.communicate(timeout=DEADLINE_S) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, said, strict=True):
        assert child.returncode == 0, errors
    return [json.loads(text.splitlines()[-1]) for text, _ in said]


def test_three_ranks_train_to_the_end_over_unequal_files_with_a_filter(tmp_path: Path) -> None:
    write_files(tmp_path / "data")
    ranks = train(tmp_path / "data", tmp_path / "meeting", NUM_RANKS)
    assert [(one["rank"], one["num_ranks"]) for one in ranks] == [(rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    assert {one["found_in"] for one in ranks} == {"torch.distributed"}
    assert [one["looked"] for one in ranks] == [1, 0, 0], "rank 0 looks at the files and tells the others"
    assert {len(one["sizes"]) for one in ranks} == {one["length"] for one in ranks} == {len(EXPECTED) // 48 + 1}
    assert all(min(one["sizes"]) > 0 for one in ranks)
    ids = [number for one in ranks for number in one["ids"]]
    assert len(ids) == len(EXPECTED)
    assert set(ids) == EXPECTED
    assert len({tuple(one["weight"]) for one in ranks}) == 1, "one model"
    assert len({json.dumps(one["state"]) for one in ranks}) == 1
