"""What a benchmark is, and how the samples of its rounds become figures. No processes, no clock.

A contender is a Python module that measures, then prints one line of JSON, its last:

    {"figures": {"assign_10k_ms": 1.7}, "versions": {"uhashring": "2.4"}}      versions only where ours do not tell
    {"not_installed": "uhashring"}                                             the peer is not there; no error

It is given `--quick` when figures matter less than an answer soon, and finds settings in its environment.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from strata.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROCESS_TIMEOUT_S = 300.0
"""How long one round of one contender may take when it does not say."""

USUAL_S = 15.0
"""How long one round of a contender usually takes, on two cores, when it does not say."""

QUICK_SHARE = 0.5
"""Of that time, with `--quick`: starting processes takes as long as ever."""

MINUTE_S = 60.0

MAX_LOST = 2
"""Rounds that a contender may lose to its deadline before it is left out of the others."""

MAX_ROUNDS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity. Its key says what it is and, last, its unit."""

    key: str
    title: str
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"
    peers: tuple[str, ...] = ()
    """Keys of the figures of others that this one stands against."""
    quotient: tuple[str, *tuple[str, ...]] | None = None
    """It is not measured but is one figure over another, of the same round; over the best of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One who is measured: a module, run in its own process each round."""

    name: str
    module: str
    venv: Literal["ours", "peers"] = "ours"
    """Whose interpreter runs it. One that runs in the peers' cannot import strata."""
    timeout_s: float = PROCESS_TIMEOUT_S
    usual_s: float = USUAL_S
    """What a round takes, for the estimate that is printed at the start."""

    def __post_init__(self) -> None:
        if not 0 < self.usual_s <= self.timeout_s:
            raise ConfigError(
                f"contender {self.name!r} usually takes usual_s={self.usual_s}, which must be above 0 and within its "
                f"deadline, timeout_s={self.timeout_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A size or a shape that the user may choose: `--set NAME=VALUE`, or the variable in the environment."""

    name: str
    title: str
    """What it is, with its default."""
    at_least: float
    whole: bool = True

    @property
    def variable(self) -> str:
        """Where contenders find it."""
        return f"STRATA_BENCH_{self.name.upper()}"

    def checked(self, value: str) -> str:
        """
        Raises:
            InvalidArgument: It is no number, or too small a one.
        """
        kind = "a whole number" if self.whole else "a number"
        try:
            found = int(value) if self.whole else float(value)
        except ValueError:
            found = math.nan
        if not self.at_least <= found < math.inf:
            raise InvalidArgument(
                f"--set {self.name}={value}: {self.title}; give {kind} of at least {self.at_least:g}", field="set"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    name: str
    title: str
    contenders: tuple[Contender, ...]
    figures: tuple[Figure, ...]
    rounds: int = 5
    quick_rounds: int = 2
    notes: tuple[str, ...] = ()
    """What a reader must know to read the figures right."""
    settings: tuple[Setting, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """What contenders find in theirs, besides ours."""

    def __post_init__(self) -> None:
        keys = [figure.key for figure in self.figures]
        if len(set(keys)) != len(keys):
            raise ConfigError(f"benchmark {self.name!r} names a figure twice: {sorted(keys)}")
        named = {key for figure in self.figures for key in (*figure.peers, *(figure.quotient or ()))}
        unknown = named - set(keys)
        if unknown:
            raise ConfigError(f"benchmark {self.name!r} compares with figures that it does not have: {sorted(unknown)}")

    def narrowed(self, only: Sequence[str]) -> Benchmark:
        """The same with these contenders alone; all, if none is named."""
        known = {contender.name for contender in self.contenders}
        strangers = sorted(set(only) - known)
        if strangers:
            raise InvalidArgument(
                f"benchmark {self.name!r} has no contender {strangers[0]!r}; known: {', '.join(sorted(known))}",
                field="only",
            )
        return replace(self, contenders=tuple(c for c in self.contenders if not only or c.name in only))

    def with_settings(self, given: Sequence[str]) -> Benchmark:
        """The same with other sizes, each given as NAME=VALUE.

        Raises:
            InvalidArgument: There is no such setting, or its value cannot be; the message says what there is.
        """
        by_name = {setting.name: setting for setting in self.settings}
        environment = dict(self.environment)
        for one in given:
            name, _, value = one.partition("=")
            if name not in by_name:
                known = "; ".join(f"{setting.name}: {setting.title}" for setting in self.settings) or "none"
                raise InvalidArgument(
                    f"benchmark {self.name!r} has no setting {name!r} (of --set {one}); there are: {known}",
                    field="set",
                )
            environment[by_name[name].variable] = by_name[name].checked(value)
        return replace(self, environment=environment)

    def num_rounds(self, rounds: int | None, *, quick: bool) -> int:
        if rounds is None:
            return self.quick_rounds if quick else self.rounds
        if not 1 <= rounds <= MAX_ROUNDS:
            raise InvalidArgument(f"rounds={rounds} must be from 1 to {MAX_ROUNDS}", field="rounds")
        return rounds

    def estimate(self, rounds: int | None, *, quick: bool) -> str:
        """How long it will take, and when it ends at the latest, in words."""
        num_rounds = self.num_rounds(rounds, quick=quick)
        usual_s = num_rounds * sum(each.usual_s for each in self.contenders) * (QUICK_SHARE if quick else 1.0)
        deadline_s = num_rounds * sum(each.timeout_s for each in self.contenders)
        return (
            f"{self.name}: {_counted(num_rounds, 'round')} of {_counted(len(self.contenders), 'contender')}, "
            f"about {_duration(usual_s)}; every contender has a deadline, so at most {_duration(deadline_s)}"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender measured in one round."""

    contender: str
    round: int
    figures: Mapping[str, float]
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender that has nothing to measure here, and how to change that."""

    contender: str
    note: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A contender that should have answered and did not."""

    contender: str
    round: int
    reason: str
    stderr_tail: str = ""
    is_lost: bool = False
    """It missed its deadline; the next round may go better."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that came out of a run."""

    samples: tuple[Sample, ...]
    absent: tuple[Absent, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """What the contenders say about the packages they measured."""
        found: dict[str, str] = {}
        for sample in self.samples:
            found |= sample.versions
        return dict(sorted(found.items()))


def interleave(contenders: Sequence[Contender], rounds: int) -> list[tuple[int, Contender]]:
    """Who runs when: A B C, A B C, …; never A A A, B B B, where a machine that slows down would slow down only C."""
    return [(number, contender) for number in range(rounds) for contender in contenders]


def is_left_out(failures: Sequence[Failure]) -> bool:
    """Whether a contender with these failures is not run again: it has failed, or missed its deadline too often."""
    return len(failures) >= MAX_LOST or any(not failure.is_lost for failure in failures)


def read_answer(stdout: str, *, contender: str, round_: int, known: frozenset[str]) -> Sample | Absent | Failure:
    """The last line a contender printed, as what it means; `known` are the figures the benchmark has."""
    lines = stdout.strip().splitlines()
    if not lines:
        return Failure(contender, round_, "printed nothing; its last line must be a JSON object of figures")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        answer = None
    match answer:
        case {"not_installed": str(package)}:
            return Absent(contender, f"{package} is not installed; get it with `make bench-setup`")
        case {"figures": dict(figures)}:
            wrong = [key for key, value in figures.items() if key not in known or not _is_number(value)]
            if wrong or not figures:
                return Failure(contender, round_, f"gave figures that are unknown or no numbers: {sorted(wrong)}")
            named = answer.get("versions")
            versions = {str(k): str(v) for k, v in named.items()} if isinstance(named, dict) else {}
            return Sample(contender, round_, {key: float(value) for key, value in figures.items()}, versions)
        case _:
            return Failure(contender, round_, f"its last line is not a JSON object of figures: {lines[-1][:200]!r}")


def aggregate(samples: Sequence[Sample]) -> dict[str, Spread]:
    """Median, least and most of each figure over the rounds."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in sample.figures.items():
            values.setdefault(key, []).append(value)
    return {key: spread(found) for key, found in values.items()}


def quotients(figures: Sequence[Figure], samples: Sequence[Sample]) -> list[Sample]:
    """The figures that are one over another, round by round: the two of a round ran under the same weather."""
    by_round: dict[int, dict[str, float]] = {}
    for sample in samples:
        by_round.setdefault(sample.round, {}).update(sample.figures)
    found = []
    for number, measured in by_round.items():
        values = {
            figure.key: measured[figure.quotient[0]] / _best(figure, measured)
            for figure in figures
            if figure.quotient and figure.quotient[0] in measured and all(map(measured.get, figure.quotient[1:]))
        }
        if values:
            found.append(Sample("quotients", number, values))
    return found


def _best(figure: Figure, measured: Mapping[str, float]) -> float:
    assert figure.quotient is not None
    others = [measured[key] for key in figure.quotient[1:]]
    return min(others) if figure.better == "lower" else max(others)


def ratios(figure: Figure, peer: str, samples: Sequence[Sample]) -> Spread | None:
    """How many times better ours is than the peer's; above 1 we win. None if the two never met in a round.

    Taken round by round, since the two of a round ran under the same weather, and only then summarised.
    """
    by_round: dict[int, dict[str, float]] = {}
    for sample in samples:
        by_round.setdefault(sample.round, {}).update(sample.figures)
    found = []
    for figures in by_round.values():
        ours, theirs = figures.get(figure.key), figures.get(peer)
        if ours and theirs:
            found.append(theirs / ours if figure.better == "lower" else ours / theirs)
    return spread(found) if found else None


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(seconds: float) -> str:
    """Rounded up to what somebody who waits wants to know: 40 s, 3 min, 1 h 20 min."""
    if seconds <= MINUTE_S:
        return f"{math.ceil(seconds / 10) * 10} s"
    hours, minutes = divmod(math.ceil(seconds / MINUTE_S), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
