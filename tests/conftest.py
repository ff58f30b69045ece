"""What all tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

IN_CI = os.environ.get("CI") == "true"

# Deadlines are off: a shared machine's hiccup is no finding. In CI the examples are the same in every run.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if IN_CI else "dev")


@pytest.fixture(scope="session")
def requires_service() -> Callable[..., Path]:
    """`requires_service("node")`: the path of a tool or file; without it the test skips, under CI=true it fails."""

    def require(what: str | Path, cure: str = "run scripts/system_packages.sh") -> Path:
        found = shutil.which(what) if isinstance(what, str) else str(what) if what.exists() else None
        if found is None:
            (pytest.fail if IN_CI else pytest.skip)(f"{what} is missing; {cure}")
        return Path(found)

    return require
