"""The trial of the handover: it is stopped at its second report, and the next one starts.

Losses grow from trial to trial, so a scheduler stops each after its first report. The mark after that report is the
moment at which a system can decide, and the first mark of the next trial the moment at which user code runs again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.contenders.tune_marks import Marks

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_REPORTS = 1_000
PAUSE_S = 0.001


def run(marks_path: str, report: Callable[[int, float], None]) -> None:
    """Report until the system stops the trial: `report(step, loss)`."""
    marks = Marks(marks_path)
    loss = float(len(Path(marks_path).read_bytes()))
    for step in range(1, MAX_REPORTS):
        if step == 1:
            marks.add()
        report(step, loss)
        time.sleep(PAUSE_S)
