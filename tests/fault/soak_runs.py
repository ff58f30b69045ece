"""Play random stories of runs that are killed, stopped, scaled and resumed, until one fails.

`soak_runs.py --minutes 30` plays new stories; `soak_runs.py --seed 12` replays one. In every story, real workers train
over gloo. At its end, every row must have been trained on once per epoch; and if the number of workers never changed,
the weights must be those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from leftovers import nothing_is_left
from runs import Run, write_rows

from strata.errors import ConfigError
from strata.launch.control import Scale

EPOCHS = 2
FAULTS = ("worker", "worker", "worker", "storm", "freeze", "agent", "stop", "scale")
"""The faults to choose from; a killed worker is the most frequent."""
STEP_TIMEOUT_S = 5.0
"""Seconds after which a frozen worker counts as hung."""
_undisturbed: dict[int, str] = {}


class Story:
    """One run and the faults that are injected into it."""

    def __init__(self, seed: int, place: Path, data: Path) -> None:
        self.seed = seed
        self.faults: list[str] = []
        self.num_kills = 0
        """Processes that were killed with SIGKILL."""
        self._rng = random.Random(seed)
        self._place = place
        self._data = data
        self._most = self._rng.choice((2, 2, 3))
        self._is_scaled = False
        limits = ("--max-restarts", "50", "--step-timeout-s", str(STEP_TIMEOUT_S))
        self._run = Run(place, data, "--workers", f"1:{self._most}", *limits)

    def play(self) -> None:
        run, rng = self._run, self._rng
        run.start("--step-s", "0.005")
        try:
            for _ in range(rng.randrange(1, 6)):
                attempt = self._attempt()
                run.wait_for(attempt, 0, r"restored (\d+)")
                if not self._reached(attempt, rng.randrange(1, 12)):
                    break  # the run is done
                self._inject(rng.choice(FAULTS), attempt)
            while True:
                code, output = run.wait()
                if code == 0:
                    break
                assert code in (130, 143), output
                run.resume()
            self._check()
        finally:
            run.bury()

    def _inject(self, fault: str, attempt: int) -> None:
        run, rng = self._run, self._rng
        self.faults.append(fault)
        if fault == "worker":
            self._kill(attempt, rng.randrange(run.num_workers(attempt)))
        elif fault == "storm":
            for rank in range(run.num_workers(attempt)):
                self._kill(attempt, rank)
        elif fault == "freeze":
            self._kill(attempt, rng.randrange(run.num_workers(attempt)), signal.SIGSTOP)
        elif fault == "agent":
            run.agent.kill()
            self.num_kills += 1
            run.agent.communicate()
            run.resume()
        elif fault == "stop":
            run.agent.send_signal(rng.choice((signal.SIGINT, signal.SIGTERM)))
            if run.wait()[0] != 0:
                run.resume()
        else:
            self._is_scaled = True
            with contextlib.suppress(ConfigError):  # the run is done
                run.ask(Scale(rng.randrange(1, self._most + 1)))
        self._wait_for_more_than(attempt)

    def _kill(self, attempt: int, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # the worker is done
            self._run.kill(attempt, rank, number)
            self.num_kills += number == signal.SIGKILL

    def _attempt(self) -> int:
        return max(
            (int(path.name.split("-")[1]) for path in (self._run.directory / "logs").glob("attempt-*")), default=0
        )

    def _reached(self, attempt: int, more: int) -> bool:
        """Return whether the attempt completes this many more steps before the run ends."""
        start = int(self._run.found(attempt, 0, r"restored (\d+)")[1])
        while self._run.last_step(attempt, 0) < start + more:
            if self._run.agent.poll() is not None:
                return False
            time.sleep(0.005)
        return self._run.agent.poll() is None

    def _wait_for_more_than(self, attempt: int) -> None:
        """Wait for the next attempt or the end; scaling to the same number changes nothing."""
        end_s = time.monotonic() + 4 * STEP_TIMEOUT_S
        while self._attempt() == attempt and self._run.agent.poll() is None and time.monotonic() < end_s:
            time.sleep(0.005)

    def _check(self) -> None:
        results = self._run.results()
        num_workers = results[0]["world_size"]
        last = [each for each in results if each["attempt"] == max(each["attempt"] for each in results)]
        assert [each["rank"] for each in last] == list(range(num_workers)), results
        assert [each["counts"] for each in last] == [[EPOCHS]] * num_workers, results
        digests = {each["digest"] for each in last}
        assert len(digests) == 1, results
        if not self._is_scaled:
            assert digests == {self._undisturbed_digest(num_workers)}, "not the weights of an undisturbed run"

    def _undisturbed_digest(self, num_workers: int) -> str:
        if num_workers not in _undisturbed:
            place = self._place / "undisturbed"
            place.mkdir()
            run = Run(place, self._data, "--workers", str(num_workers))
            run.start()
            try:
                assert run.wait()[0] == 0
                _undisturbed[num_workers] = run.results()[0]["digest"]
            finally:
                run.bury()
        return _undisturbed[num_workers]


def play(seed: int, data: Path) -> Story:
    """Play one story and return it; keep the files of a story that failed."""
    place = Path(tempfile.mkdtemp(prefix=f"strata-soak-{seed}-"))
    story = Story(seed, place, data)
    try:
        with nothing_is_left(place):
            story.play()
    except BaseException:
        print(f"seed {seed} FAILED after {', '.join(story.faults) or 'nothing'}; see {place}", flush=True)
        raise
    shutil.rmtree(place)
    return story


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="the story to play, or the first of several")
    parser.add_argument("--minutes", type=float, help="play new stories for this long")
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else int(time.time())
    with tempfile.TemporaryDirectory(prefix="strata-soak-rows-") as directory:
        data = write_rows(Path(directory) / "rows")
        end_s = time.monotonic() + 60 * (arguments.minutes or 0)
        num_faults = num_kills = seed = 0
        for seed in range(first, sys.maxsize):
            story = play(seed, data)
            num_faults += len(story.faults)
            num_kills += story.num_kills
            print(f"seed {seed}: {', '.join(story.faults) or 'nothing happened'}; every row once", flush=True)
            if time.monotonic() >= end_s:
                break
    print(f"{seed - first + 1} stories from seed {first} on, {num_faults} faults, {num_kills} kill -9, all well")


if __name__ == "__main__":
    main()
