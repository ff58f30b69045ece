"""Print the pins of a lock file that are not installed in a virtual environment; fail if there is one.

    python -I scripts/missing_pins.py requirements/dev.txt .venv

It reads only names of directories, so it is fast enough for every `make setup`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(venv: Path) -> set[tuple[str, str]]:
    records = (path.stem.rpartition("-") for path in venv.glob("lib/python3*/site-packages/*.dist-info"))
    return {(normalize(name), version.partition("+")[0]) for name, _, version in records}


def main(lock: str, venv: str) -> int:
    pins = [line.split("#")[0].strip() for line in Path(lock).read_text(encoding="utf-8").splitlines()]
    present = installed(Path(venv))
    missing = [
        pin for pin in pins if pin and (normalize(pin.partition("==")[0]), pin.partition("==")[2]) not in present
    ]
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
