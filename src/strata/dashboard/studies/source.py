"""The studies that requests may name, each brought up to date from its journal when it is asked for.

A study without an open page costs nothing. The first look replays its journal, in pieces, so that another thread runs
in between; later ones apply what was added since. All methods may be called from several threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.clock import SystemClock
from strata.errors import ConfigError, InvalidArgument
from strata.launch import control
from strata.launch.record.directory import UNDER_WAY, find_run, is_alive, state_now
from strata.tune.analysis import importances_of
from strata.tune.journal import JOURNAL, JournalFollower
from strata.tune.schedulers import RunAll
from strata.tune.space import SearchSpace
from strata.tune.state import events as e
from strata.tune.state.study import StudyState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from strata.clock import Clock
    from strata.launch.record.directory import RunDirectory

MAX_STUDIES = 100
MAX_KEPT = 32
"""Results that are kept until the study changes."""
MAX_IMPORTANCE_TRIALS = 2_000
"""Finished trials from which importances are computed, the last ones: a request must not take seconds of a driver."""
_NOT_PLAIN = re.compile(r"[^a-z0-9]+")


@dataclass(slots=True)
class StudyNow:
    """A study at one moment. Belongs to the holder of its lock."""

    state: StudyState
    space: SearchSpace
    version: str
    """Changes with every fact."""
    run_state: str
    """Of its driver, as `strata ps` shows it."""
    now_s: float | None
    """Wall time while the driver runs; None: its time ended with its last fact."""
    kept: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return a result that is computed once for all who look at this version."""
        if key not in self.kept:
            if len(self.kept) >= MAX_KEPT:
                self.kept.pop(next(iter(self.kept)))
            self.kept[key] = compute()
        return self.kept[key]


class StudySource:
    """One study, read from its directory."""

    def __init__(self, directory: RunDirectory, clock: Clock | None = None) -> None:
        location = str(directory.path)
        digest = hashlib.blake2b(location.encode(), digest_size=4).hexdigest()
        self.id = f"{_NOT_PLAIN.sub('-', directory.name.lower())[:60].strip('-')}-{digest}".lstrip("-")
        """The same whenever the directory is opened, so that links stay valid."""
        self.directory = directory
        self._clock = clock or SystemClock()
        self._follower = JournalFollower(directory.path / JOURNAL)
        self._lock = threading.Lock()
        self._state: StudyState | None = None
        self._space = SearchSpace()
        self._num_facts = 0
        self._num_replays = 0
        self._kept: tuple[str, dict[Any, Any]] = ("", {})
        self._importance_lock = threading.Lock()
        self._importances: dict[str | None, tuple[int, dict[str, float]]] = {}
        """By objective: number of finished trials, and the result."""

    @contextlib.contextmanager
    def now(self) -> Iterator[StudyNow]:
        """Hold the study as its journal has it now.

        Raises:
            InvalidArgument: The journal has not begun, or is gone.
            JournalDamaged: It cannot be read.
        """
        with self._lock:
            self._catch_up()
            if self._state is None:
                raise InvalidArgument(
                    f"study {self.directory.name} has no journal in {self.directory.path}; start it again with the "
                    "same name, or open another one",
                    field="study",
                )
            version = f"{self._num_replays}-{self._num_facts}"
            if self._kept[0] != version:
                self._kept = (version, {})
            run_state = state_now(self.directory.status)
            now_s = self._clock.wall_s() if run_state in UNDER_WAY else None
            yield StudyNow(self._state, self._space, version, run_state, now_s, self._kept[1])

    def _catch_up(self) -> None:
        while True:
            try:
                found = self._follower.read()
            except FileNotFoundError:
                self._state = None
                return
            for fact in found.facts:
                if isinstance(fact, e.Opened):
                    self._state = StudyState(fact.spec, RunAll())  # nothing is decided here
                    self._space = SearchSpace.from_dict(fact.spec.space)
                    self._num_facts, self._num_replays = 0, self._num_replays + 1
                elif self._state is not None:
                    self._state.apply(fact)
                self._num_facts += 1
            if found.is_anew and not found.facts:
                self._state = None
            if not found.is_more:
                return

    def order(self, trial: int, order: control.TrialOrder) -> None:
        """Stop a trial for good, or let it save and start again. Returns once the journal has it.

        Raises:
            InvalidArgument: The study does not run on this machine, or refuses; nothing was changed.
        """
        status = self.directory.status
        if status is None or not is_alive(status) or not status.control:
            name = self.directory.name
            raise InvalidArgument(
                f"study {name} does not run on this machine; `strata tune --resume {name}` continues it", field="study"
            )
        words = {"stop": "stopped by hand", "requeue": "started again by hand"}
        try:
            control.ask(status.control, control.OrderTrial(trial, order, words[order]))
        except ConfigError as error:
            raise InvalidArgument(error.message, field="number") from error

    def importances(self, objective: str | None) -> tuple[dict[str, float], int]:
        """Return how much each parameter matters, and the number of trials from which that is computed.

        Raises:
            ConfigError: Optuna is not installed.
            RunFailed: Too few trials have finished.
        """
        with self._importance_lock:  # beside the lock of the study: this takes long
            with self.now() as now:
                spec, space = now.state.spec, now.space
                chosen = range(len(spec.metrics)) if objective is None else [spec.metrics.index(objective)]
                finished = [each for each in now.state.trials.values() if each.state == "finished"]
                last = sorted(finished, key=lambda each: each.ended_s or 0.0)[-MAX_IMPORTANCE_TRIALS:]
                trials = [(dict(each.config), [each.values[place] for place in chosen]) for each in last]
            known = self._importances.get(objective)
            if known is None or known[0] != len(finished):
                directions = [spec.directions[place] for place in chosen]
                known = len(finished), importances_of(spec.name, space, directions, trials)
                self._importances[objective] = known
            return known[1], len(trials)


def open_study(location: str) -> StudySource | None:
    """Open the directory or the name of a study, or a unique prefix of its name; return None for anything else."""
    found = find_run(location)
    return StudySource(found) if found is not None and (found.path / JOURNAL).is_file() else None


class Studies:
    """The studies of a server: one on the page of a study, those that were opened by `strata dashboard`, or none."""

    def __init__(self, sources: Iterable[StudySource] = (), *, takes_orders: bool = False) -> None:
        """
        Args:
            takes_orders: An admin may stop trials, and let them start again.

        Raises:
            InvalidArgument: There are too many.
        """
        self.takes_orders = takes_orders
        self._found = {each.id: each for each in sources}
        if len(self._found) > MAX_STUDIES:
            raise InvalidArgument(f"{len(self._found)} studies are more than {MAX_STUDIES}; open fewer", field="study")

    def all(self) -> list[StudySource]:
        return list(self._found.values())

    def get(self, study: str) -> StudySource:
        """Return a study by its id; the first one if it is empty.

        Raises:
            InvalidArgument: No study has this id.
        """
        found = self._found.get(study) if study else next(iter(self._found.values()), None)
        if found is None:
            which = f"has the id {study[:200]!r}; /api/studies lists them" if study else "is open; start `strata tune`"
            raise InvalidArgument(f"no study {which}", field="study")
        return found
