"""Run the whole suite: every phase in parallel, then each failed test once more, alone.

A test that fails in parallel and passes alone does not fail the run: a busy machine must not reject good work. It is
listed under `flaky:` at the very end with both outcomes, because it is a bug to find. A test that fails twice fails
the run.

    scripts/run_tests.py --jobs 2 --waiting-jobs 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / ".build"
MAX_RERUNS = 20
"""More failures than these are not bad luck."""
RAN, SOME_FAILED = 0, 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the whole suite; repeat what failed, alone.")
    parser.add_argument("--jobs", type=int, default=2, help="processes for tests that compute")
    parser.add_argument("--waiting-jobs", type=int, default=3, help="processes for tests that wait for servers")
    arguments = parser.parse_args()
    failed: dict[str, str] = {}
    for phase in (
        ("-n", str(arguments.jobs), "tests/unit", "tests/contract", "tests/simulation"),
        ("-n", str(arguments.waiting_jobs), "--dist", "loadfile", "tests/integration", "tests/fault"),
    ):
        code, failures = run_pytest(*phase)
        if code not in (RAN, SOME_FAILED) or (code == SOME_FAILED and not failures):
            return code  # interrupted, or a mistake in the suite itself
        failed |= failures
    if not failed:
        return 0
    if len(failed) > MAX_RERUNS:
        print(f"\n{len(failed)} tests failed; more than {MAX_RERUNS} are not run again.")
        return 1
    print(f"\nrunning again, alone: {len(failed)} failed", flush=True)
    code, failed_again = run_pytest("-n", "0", *failed)
    if code not in (RAN, SOME_FAILED) or (code == SOME_FAILED and not failed_again):
        return code
    print(report(failed, failed_again))
    return 1 if failed_again else 0


def run_pytest(*arguments: str) -> tuple[int, dict[str, str]]:
    """Run pytest; return its exit code and, for every failed test, the line that names the error."""
    BUILD.mkdir(exist_ok=True)
    failures = BUILD / "failures.json"
    failures.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "--durations=10", "--durations-min=1", f"--failures-to={failures}"]
    code = subprocess.run([*pytest, *arguments], cwd=ROOT, check=False).returncode
    return code, json.loads(failures.read_text()) if failures.exists() else {}


def report(failed: dict[str, str], failed_again: dict[str, str]) -> str:
    """List what failed twice, then what failed once, each with its errors."""
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
