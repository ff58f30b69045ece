"""Run the suite: each phase in parallel, then every failed test once more, alone.

A test that fails in parallel and passes alone does not fail the run, because a busy machine must not reject good work.
It is listed under `flaky:` at the very end with both outcomes: it is a bug to find. A test that fails twice fails the
run.

    scripts/run_tests.py                 # what `make test` runs: everything except tests marked slow
    scripts/run_tests.py --suite slow    # what `make test-slow` runs: only tests marked slow

TESTS_END_AT, in seconds since 1970, ends the run before CI does, so that its last lines name the tests that were
running.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / ".build"
MAX_RERUNS = 20
"""More failures than this are not bad luck, so nothing runs again."""
PASSED, SOME_FAILED, NONE_COLLECTED = 0, 1, 5
END_AT_VARIABLE = "TESTS_END_AT"
END_WITHIN_S = 60.0
"""For pytest to end its workers and to print its summary."""
MARKS = {"fast": "not slow", "slow": "slow"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the suite, then run failed tests again, alone.")
    parser.add_argument("--suite", choices=sorted(MARKS), default="fast", help="which tests to run")
    parser.add_argument("--jobs", type=int, default=2, help="processes for tests that compute")
    parser.add_argument("--waiting-jobs", type=int, default=3, help="processes for tests that wait for servers")
    arguments = parser.parse_args()
    failed: dict[str, str] = {}
    ran_any = False
    for phase in (
        ("-n", str(arguments.jobs), "tests/unit", "tests/contract", "tests/simulation"),
        ("-n", str(arguments.waiting_jobs), "--dist", "loadfile", "tests/integration", "tests/fault"),
    ):
        code, failures = run_pytest("-m", MARKS[arguments.suite], *phase)
        if code == NONE_COLLECTED:
            continue
        ran_any = True
        if code not in (PASSED, SOME_FAILED) or (code == SOME_FAILED and not failures):
            return code  # interrupted, or an error in the suite itself
        failed |= failures
    if not ran_any:
        return NONE_COLLECTED
    if not failed:
        return 0
    if len(failed) > MAX_RERUNS:
        print(f"\n{len(failed)} tests failed; more than {MAX_RERUNS} are not run again.")
        return 1
    print(f"\nrunning {len(failed)} failed tests again, alone", flush=True)
    code, failed_again = run_pytest("-n", "0", *failed)
    if code not in (PASSED, SOME_FAILED) or (code == SOME_FAILED and not failed_again):
        return code
    print(report(failed, failed_again))
    return 1 if failed_again else 0


def run_pytest(*arguments: str) -> tuple[int, dict[str, str]]:
    """Run pytest; return its exit code and, for every failed test, the line that names the error."""
    BUILD.mkdir(exist_ok=True)
    failures = BUILD / "failures.json"
    failures.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "--durations=10", "--durations-min=1", f"--failures-to={failures}"]
    code = run_until([*pytest, *arguments], end_at_s=float(os.environ.get(END_AT_VARIABLE) or "inf"))
    return code, json.loads(failures.read_text()) if failures.exists() else {}


def run_until(command: list[str], *, end_at_s: float) -> int:
    """Run a command; send it SIGTERM when the time has come, and SIGKILL if it does not end then."""
    left_s = None if math.isinf(end_at_s) else max(0.0, end_at_s - time.time())
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(left_s)
        except subprocess.TimeoutExpired:
            print(f"\nthe time of this run is over ({END_AT_VARIABLE}={end_at_s:.0f})", flush=True)
            process.terminate()
        try:
            return process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def report(failed: dict[str, str], failed_again: dict[str, str]) -> str:
    """List tests that failed twice, then tests that failed once, each with its errors."""
    lines = []
    for name in sorted(failed_again):
        lines += [f"failed: {name}", f"  in parallel: {failed.get(name, '')}", f"  alone: {failed_again[name]}"]
    flaky = sorted(failed.keys() - failed_again.keys())
    if flaky:
        lines.append("flaky:")
    for name in flaky:
        lines += [f"  {name}", f"    in parallel: {failed[name]}", "    alone: passed"]
    return "\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
