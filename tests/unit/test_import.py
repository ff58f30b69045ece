"""`import strata` binds names and does nothing else. Each test uses a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

HEAVY = {"asyncio", "fastapi", "grpc", "msgspec", "numpy", "pydantic", "rich", "sqlalchemy", "torch", "typer", "yaml"}
IMPORT_LIMIT_S = 0.2
ROUNDS = 5


def run_fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def modules_after(code: str) -> set[str]:
    return set(json.loads(run_fresh(f"{code}\nimport sys, json; print(json.dumps(list(sys.modules)))")))


def test_importing_strata_loads_only_its_version() -> None:
    added = modules_after("import strata") - modules_after("import importlib, typing")

    assert {name for name in added if name.startswith("strata")} == {"strata", "strata._version"}
    assert {name.split(".")[0] for name in added} & HEAVY == set()
    assert len(added) < 10, sorted(added)


def test_importing_strata_starts_no_thread_and_creates_no_logger() -> None:
    look = "import logging, threading; before = set(logging.root.manager.loggerDict); import strata; "
    report = "print(threading.active_count(), set(logging.root.manager.loggerDict) - before)"

    assert run_fresh(look + report).split() == ["1", "set()"]


def test_importing_the_errors_loads_nothing_heavy() -> None:
    assert {name.split(".")[0] for name in modules_after("import strata; strata.StrataError")} & HEAVY == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    import strata

    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = strata.Nonsense


def test_importing_strata_takes_less_than_200_ms() -> None:
    """Takes the best of several runs, minus a bare interpreter, to measure the import, not the machine's load."""

    def best(code: str) -> float:
        times_s = []
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            run_fresh(code)
            times_s.append(time.perf_counter() - started_s)
        return min(times_s)

    assert best("import strata") - best("pass") < IMPORT_LIMIT_S
