"""A hand-written DDP script under torchrun: start and throughput."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from strata.bench.contenders import trainer_job
from strata.bench.contenders.trainer_job import NUM_RANKS, NUM_STEPS, QUICK_STEPS, measured

SCRIPT = Path(trainer_job.__file__).with_name("trainer_script.py")
TIMEOUT_S = 240.0


def main() -> None:
    steps = QUICK_STEPS if "--quick" in sys.argv else NUM_STEPS
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        out = f"{directory}/times.json"
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}", "--standalone", str(SCRIPT)]
        began_s = time.time()
        subprocess.run(
            [sys.executable, *command, out, str(steps)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
        )
        start_s, per_s = measured(out, began_s)
    print(json.dumps({"figures": {"torchrun_start_s": start_s, "torchrun_samples_per_s": per_s}}))


if __name__ == "__main__":
    main()
