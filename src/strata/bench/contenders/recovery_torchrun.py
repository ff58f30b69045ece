"""torchrun with `--max-restarts`, and a job that saves with torch.save."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from strata.bench.contenders import recovery_job_torchrun
from strata.bench.contenders.recovery_watch import NUM_RANKS, NUM_STEPS, JobLost, kill_one

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_JOBS = 2
"""Sometimes gloo does not connect after a restart, and the job hangs or fails; then another one is measured."""


def command(directory: Path) -> Sequence[str]:
    job = recovery_job_torchrun.__file__
    options = (f"--nproc-per-node={NUM_RANKS}", "--max-restarts=10", "--standalone")
    return [sys.executable, "-m", "torch.distributed.run", *options, job, str(directory), str(NUM_STEPS)]


def main() -> None:
    figures: dict[str, float] = {"torchrun_lost_jobs": 0}
    for _ in range(MAX_JOBS):
        try:
            measured = kill_one(command)
        except JobLost as error:
            figures["torchrun_lost_jobs"] += 1
            print(error, file=sys.stderr)
        else:
            figures |= {"torchrun_recovery_s": measured.recovery_s, "torchrun_start_s": measured.start_s}
            break
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
