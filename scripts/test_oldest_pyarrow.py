"""Run the tests of `strata.data` with the oldest pyarrow that pyproject.toml admits.

    .venv/bin/python scripts/test_oldest_pyarrow.py [pytest arguments]

The first run creates `.venv-pyarrow-VERSION` with the pins of requirements/dev.txt, except for pyarrow; later runs
reuse it. The suite itself runs with the newest pyarrow (`make test`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("accelerate", "cloudpickle", "cryptography", "fastapi", "fsspec", "grpcio", "grpcio-health-checking"),
    *("grpcio-reflection", "httpx", "hypothesis", "ml-dtypes", "msgspec", "numpy", "obstore", "pandas"),
    *("platformdirs", "prometheus-client", "protobuf", "psutil", "psycopg", "psycopg-binary", "pyiceberg"),
    *("pyroaring", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "rich", "sqlalchemy", "tenacity"),
    *("torch", "typer", "uvicorn", "xxhash", "zstandard"),
)
"""What the tests of data import, directly or through a fixture."""
TESTS = (
    *("tests/unit/test_data_*.py", "tests/contract/test_data_format_*.py", "tests/contract/test_data_parquet_pages.py"),
    *("tests/integration/test_data_pyarrow_fallback.py", "tests/integration/test_data_pages.py"),
    *("tests/integration/test_data_pruning.py", "tests/integration/test_data_odd_files.py"),
    *("tests/integration/test_data_iceberg.py",),
)


def oldest_pyarrow() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [re.fullmatch(r"pyarrow>=(\d+)", each) for each in project["optional-dependencies"]["data"]]
    return f"{next(found[1] for found in bounds if found)}.0.0"


def pins() -> list[str]:
    lock = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE)
    wanted = [(name, version) for name, version in found if re.sub(r"[-_.]+", "-", name).lower() in PACKAGES]
    return [f"{name}=={version}" for name, version in wanted]


def environment(version: str) -> Path:
    """Return the interpreter of the virtual environment, which is created if its pins have changed."""
    place = ROOT / f".venv-pyarrow-{version}"
    wanted = [*pins(), f"pyarrow=={version}"]
    stamp = place / "pins.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8").split() != wanted:
        venv.create(place, with_pip=True)
        subprocess.run([place / "bin" / "python", "-m", "pip", "install", "-q", *wanted], check=True)
        stamp.write_text("\n".join(wanted), encoding="utf-8")
    return place / "bin" / "python"


def main(arguments: list[str]) -> int:
    python = environment(oldest_pyarrow())
    chosen = arguments or sorted(str(path.relative_to(ROOT)) for tests in TESTS for path in ROOT.glob(tests))
    found = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *chosen]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": found}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
