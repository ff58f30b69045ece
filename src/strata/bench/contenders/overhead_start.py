"""Strata: from `strata run` to the first step of a small script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.contenders import overhead_start_job
from strata.launch.record.directory import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_RANKS = 2
TIMEOUT_S = 120.0


def first_step_s(module: str, *options: str) -> float:
    """Return the time from a command to the first step of the script that it starts.

    Raises:
        RuntimeError: The script made no step.
    """
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        out = Path(name) / "out"
        command: Sequence[str] = [sys.executable, "-m", module, *options, overhead_start_job.__file__, str(out)]
        began_s = time.time()
        ended = subprocess.run(
            command,
            cwd=name,
            env={**os.environ, DIRECTORY_VARIABLE: f"{name}/runs"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"the job failed:\n{(ended.stdout + ended.stderr)[-2000:]}")
        return float(out.read_text()) - began_s


def main() -> None:
    start_s = first_step_s("strata.cli", "run", "--quiet", "--workers", str(NUM_RANKS))
    print(json.dumps({"figures": {"start_s": start_s}}))


if __name__ == "__main__":
    main()
