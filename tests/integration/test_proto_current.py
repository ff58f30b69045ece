"""The generated wire messages are what the .proto files say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_generated_messages_are_current() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "generate_proto.sh", "--check"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
