"""The example that trains from Parquet resumes as documented; `test_examples.py` shows that it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from documents import ROOT

EXAMPLE = ROOT / "examples" / "train_from_parquet.py"
MAX_LINES = 60
TIMEOUT_S = 50


def test_the_example_trains_stops_and_resumes_at_the_next_row(tmp_path: Path) -> None:
    data = tmp_path / "clicks"
    data.mkdir()
    for file, num_rows in enumerate([4_000, 77, 2_000]):
        clicks = {
            "price": np.linspace(0, 1, num_rows, dtype=np.float32),
            "country": ["de", "fr"] * (num_rows // 2) + ["it"] * (num_rows % 2),
            "items": [[row % 10] * (row % 3) for row in range(num_rows)],
            "clicked": np.zeros(num_rows, np.float32),
        }
        pq.write_table(pa.table(clicks), data / f"{file}.parquet", row_group_size=500)
    ran = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, data],
        env={**os.environ, "STRATA_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert (ran.returncode, ran.stderr) == (0, "")
    reports = re.findall(r"(\d+) batches, now at row (\d+) of (\d+)", ran.stdout)
    # 48 batches of 128 rows would be 6,144, so the last is smaller. There are 48, with or without the stop.
    assert [tuple(map(int, each)) for each in reports] == [(30, 3_840, 6_077), (18, 6_077, 6_077)]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < MAX_LINES
