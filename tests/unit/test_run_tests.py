"""`scripts/run_tests.py` decides what a failed test means."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["run_tests.py"])
    return module


def outcomes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, *runs: tuple[int, dict[str, str]]
) -> Iterator[object]:
    results = iter(runs)
    monkeypatch.setattr(script, "run_pytest", lambda *_: next(results))
    return results


def test_a_test_that_passes_alone_is_listed_as_flaky_and_does_not_fail_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(script, monkeypatch, (1, {"a::b": "late"}), (0, {}), (0, {}))
    assert script.main() == 0
    assert capsys.readouterr().out.endswith("flaky:\n  a::b\n    in parallel: late\n    alone: passed\n")


def test_a_test_that_fails_alone_too_fails_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(script, monkeypatch, (0, {}), (1, {"a::b": "late", "a::c": "wrong"}), (1, {"a::c": "wrong"}))
    assert script.main() == 1
    printed = capsys.readouterr().out
    assert "failed: a::c\n" in printed
    assert "flaky:\n  a::b\n" in printed


def test_an_interrupted_run_and_a_broken_suite_are_not_repeated(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = outcomes(script, monkeypatch, (2, {}), (0, {}))
    assert script.main() == 2
    assert list(left) == [(0, {})]


def test_a_phase_without_tests_of_the_suite_is_skipped(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(script, monkeypatch, (script.NONE_COLLECTED, {}), (0, {}))
    assert script.main() == 0


def test_a_suite_without_any_test_is_a_failure(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(script, monkeypatch, (script.NONE_COLLECTED, {}), (script.NONE_COLLECTED, {}))
    assert script.main() == script.NONE_COLLECTED


@pytest.mark.parametrize(("suite", "marks"), [("fast", "not slow"), ("slow", "slow")])
def test_each_suite_selects_tests_by_the_slow_mark(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, suite: str, marks: str
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "run_pytest", lambda *arguments: (calls.append(arguments), (0, {}))[1])
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--suite", suite])
    assert script.main() == 0
    assert [call[:2] for call in calls] == [("-m", marks)] * 2


def test_many_failures_are_not_taken_for_bad_luck(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"a::{number}": "wrong" for number in range(script.MAX_RERUNS + 1)}
    outcomes(script, monkeypatch, (1, many), (0, {}))
    assert script.main() == 1
