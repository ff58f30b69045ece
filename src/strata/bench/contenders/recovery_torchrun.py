"""torchrun with `--max-restarts`, and a job that saves with torch.save."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from strata.bench.contenders import recovery_job_torchrun
from strata.bench.contenders.recovery_watch import NUM_RANKS, NUM_STEPS, kill_one

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


MAX_LOST = 4
"""Jobs in a row that fail for good, since gloo does not connect."""


def command(place: Path) -> Sequence[str]:
    job = recovery_job_torchrun.__file__
    options = (f"--nproc-per-node={NUM_RANKS}", "--max-restarts=10", "--standalone")
    return [sys.executable, "-m", "torch.distributed.run", *options, job, str(place), str(NUM_STEPS)]


def main() -> None:
    num_lost = 0
    while True:
        try:
            measured = kill_one(command)
            break
        except RuntimeError:
            num_lost += 1
            if num_lost == MAX_LOST:
                raise
    figures = {
        "torchrun_recovery_s": measured.recovery_s,
        "torchrun_start_s": measured.start_s,
        "torchrun_lost_jobs": num_lost,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
