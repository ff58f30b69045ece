"""Ray Train with `FailureConfig`, on a cluster on this machine, and a job that saves with torch.save."""

from __future__ import annotations

import json
import sys
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.contenders import recovery_watch
from strata.bench.contenders.recovery_watch import NUM_STEPS, JobLost, kill_one

if TYPE_CHECKING:
    from collections.abc import Sequence

JOB = Path(recovery_watch.__file__).with_name("recovery_job_ray.py")
"""A path, because importing it would import Ray, which may not be installed."""


def command(directory: Path) -> Sequence[str]:
    return [sys.executable, str(JOB), str(directory), str(NUM_STEPS)]


def main() -> None:
    if util.find_spec("ray") is None:
        print(json.dumps({"not_installed": "ray"}))
        return
    figures: dict[str, float] = {"ray_train_lost_jobs": 0}
    try:
        measured = kill_one(command, {"RAY_USAGE_STATS_ENABLED": "0"})
    except JobLost as error:
        figures["ray_train_lost_jobs"] = 1
        print(error, file=sys.stderr)
    else:
        figures |= {"ray_train_recovery_s": measured.recovery_s, "ray_train_start_s": measured.start_s}
    print(json.dumps({"figures": figures, "versions": {"ray": metadata.version("ray")}}))


if __name__ == "__main__":
    main()
