"""`run.py --seed 12345 --trace` replays one simulation; `run.py --minutes 30` runs new ones until one fails."""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import time

from simulation import Outcome, simulate

CHUNK = 50
REPORT_EVERY_S = 10.0


def command(seed: int) -> str:
    return f"python tests/simulation/run.py --seed {seed} --trace"


def play(seeds: range) -> tuple[int, int, Outcome | None]:
    """How many simulations ran, how many faults they had, and the first that failed."""
    num_faults = 0
    for num, seed in enumerate(seeds, start=1):
        outcome = simulate(seed)
        num_faults += outcome.num_faults
        if outcome.violation:
            return num, num_faults, outcome
    return len(seeds), num_faults, None


def soak(minutes: float, first_seed: int, jobs: int) -> int:
    start_s = last_s = time.monotonic()
    num_seeds = num_faults = 0
    next_seed = first_seed
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        waiting: set[concurrent.futures.Future[tuple[int, int, Outcome | None]]] = set()
        while waiting or time.monotonic() < start_s + minutes * 60:
            while len(waiting) < jobs + 1 and time.monotonic() < start_s + minutes * 60:
                waiting.add(pool.submit(play, range(next_seed, next_seed + CHUNK)))
                next_seed += CHUNK
            done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for one in done:
                num, faults, failed = one.result()
                num_seeds, num_faults = num_seeds + num, num_faults + faults
                if failed:
                    pool.shutdown(cancel_futures=True)
                    print(f"seed {failed.seed} FAILED: {failed.violation}\n  {command(failed.seed)}", flush=True)
                    return 1
            if time.monotonic() - last_s > REPORT_EVERY_S:
                last_s = time.monotonic()
                print(f"{last_s - start_s:6.0f} s  {num_seeds} seeds, {num_faults} faults, all well", flush=True)
    print(f"{num_seeds} seeds from {first_seed} on, {num_faults} faults, all well", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="the seed to run, or the first of a soak")
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--minutes", type=float, help="run new seeds for this long")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.minutes is not None:
        first = int(time.time()) * 1_000 if arguments.seed is None else arguments.seed
        return soak(arguments.minutes, first, arguments.jobs)
    if arguments.seed is None:
        parser.error("pass --seed or --minutes")
    outcome = simulate(arguments.seed, tracing=arguments.trace)
    print(outcome)
    return 1 if outcome.violation else 0


if __name__ == "__main__":
    sys.exit(main())
