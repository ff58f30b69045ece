"""What a benchmark is, and how the samples of its rounds become figures. Pure: no processes, no clock.

A contender is a Python module that measures and prints one JSON object as its last line:

    {"figures": {"assign_10k_ms": 1.7}, "versions": {"uhashring": "2.4"}}      versions of peers' packages
    {"not_installed": "uhashring"}                                             the peer is missing; not an error
    {"not_fetched": "npm is not installed"}                                    its data is missing; not an error

It receives `--quick` for a fast run with small sizes, and reads settings and the number of the round from its
environment.
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
"""Default deadline of one round of a contender."""

USUAL_S = 15.0
"""Default estimate of how long one round of a contender takes on two cores."""

QUICK_SHARE = 0.5
"""Share of the estimate that a round takes with `--quick`; starting processes is not faster."""

MINUTE_S = 60.0

MAX_LOST = 2
"""Missed deadlines after which a contender is left out of further rounds."""

MAX_ROUNDS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity. Its key names the quantity and ends with the unit."""

    key: str
    title: str
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"
    peers: tuple[str, ...] = ()
    """Keys of the peers' figures that this one is compared with."""
    quotient: tuple[str, *tuple[str, ...]] | None = None
    """Computed instead of measured: the first figure divided by the second, or by the best of the others, per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A measured system: a module that runs in a fresh process each round."""

    name: str
    module: str
    venv: Literal["ours", "peers", "peers-dashboard"] = "ours"
    """The virtual environment that runs it. A contender in that of peers cannot import strata."""
    timeout_s: float = PROCESS_TIMEOUT_S
    usual_s: float = USUAL_S
    """Usual duration of a round, for the estimate printed at the start."""

    def __post_init__(self) -> None:
        if not 0 < self.usual_s <= self.timeout_s:
            raise ConfigError(
                f"usual_s={self.usual_s} of contender {self.name!r} must be above 0 and at most its deadline, "
                f"timeout_s={self.timeout_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A size that the user can set: `--set NAME=VALUE` or the environment variable."""

    name: str
    title: str
    """Description with the default."""
    at_least: float
    whole: bool = True

    @property
    def variable(self) -> str:
        """The environment variable that contenders read."""
        return f"STRATA_BENCH_{self.name.upper()}"

    def checked(self, value: str) -> str:
        """Return the value if it is valid.

        Raises:
            InvalidArgument: The value is not a number, or too small.
        """
        kind = "a whole number" if self.whole else "a number"
        try:
            found = int(value) if self.whole else float(value)
        except ValueError:
            found = math.nan
        if not self.at_least <= found < math.inf:
            raise InvalidArgument(
                f"--set {self.name}={value} is invalid ({self.title}); use {kind}, at least {self.at_least:g}",
                field="set",
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
    """How the figures were measured; printed below the tables."""
    settings: tuple[Setting, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of contenders."""

    def __post_init__(self) -> None:
        keys = [figure.key for figure in self.figures]
        if len(set(keys)) != len(keys):
            raise ConfigError(f"benchmark {self.name!r} has two figures with the same key: {sorted(keys)}")
        named = {key for figure in self.figures for key in (*figure.peers, *(figure.quotient or ()))}
        unknown = named - set(keys)
        if unknown:
            raise ConfigError(f"benchmark {self.name!r} refers to unknown figures: {sorted(unknown)}")

    def narrowed(self, only: Sequence[str]) -> Benchmark:
        """Return the benchmark with only these contenders; with all if none is named."""
        known = {contender.name for contender in self.contenders}
        unknown = sorted(set(only) - known)
        if unknown:
            raise InvalidArgument(
                f"benchmark {self.name!r} has no contender {unknown[0]!r}; it has: {', '.join(sorted(known))}",
                field="only",
            )
        return replace(self, contenders=tuple(c for c in self.contenders if not only or c.name in only))

    def with_settings(self, given: Sequence[str]) -> Benchmark:
        """Return the benchmark with these settings, each given as NAME=VALUE.

        Raises:
            InvalidArgument: The setting is unknown or its value invalid; the message lists the settings.
        """
        by_name = {setting.name: setting for setting in self.settings}
        environment = dict(self.environment)
        for one in given:
            name, _, value = one.partition("=")
            if name not in by_name:
                known = "; ".join(f"{setting.name}: {setting.title}" for setting in self.settings) or "none"
                raise InvalidArgument(
                    f"benchmark {self.name!r} has no setting {name!r} (--set {one}); settings: {known}",
                    field="set",
                )
            environment[by_name[name].variable] = by_name[name].checked(value)
        return replace(self, environment=environment)

    def num_rounds(self, rounds: int | None, *, quick: bool) -> int:
        if rounds is None:
            return self.quick_rounds if quick else self.rounds
        if not 1 <= rounds <= MAX_ROUNDS:
            raise InvalidArgument(f"rounds={rounds} is out of range; use 1 to {MAX_ROUNDS}", field="rounds")
        return rounds

    def estimate(self, rounds: int | None, *, quick: bool) -> str:
        """Return the estimated and the longest possible duration as a sentence."""
        num_rounds = self.num_rounds(rounds, quick=quick)
        usual_s = num_rounds * sum(each.usual_s for each in self.contenders) * (QUICK_SHARE if quick else 1.0)
        deadline_s = num_rounds * sum(each.timeout_s for each in self.contenders)
        return (
            f"{self.name}: {_counted(num_rounds, 'round')} of {_counted(len(self.contenders), 'contender')}, "
            f"about {_duration(usual_s)}, at most {_duration(deadline_s)}"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all rounds."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one contender in one round."""

    contender: str
    round: int
    figures: Mapping[str, float]
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender that is not installed or has no data, and the cure."""

    contender: str
    note: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A contender that did not report figures."""

    contender: str
    round: int
    reason: str
    stderr_tail: str = ""
    is_lost: bool = False
    """It missed its deadline; the next round may succeed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a benchmark."""

    samples: tuple[Sample, ...]
    absent: tuple[Absent, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that the contenders measured."""
        found: dict[str, str] = {}
        for sample in self.samples:
            found |= sample.versions
        return dict(sorted(found.items()))


def interleave(contenders: Sequence[Contender], rounds: int) -> list[tuple[int, Contender]]:
    """Return the order A B C, A B C, …, so that a machine that slows down affects all contenders and not only C."""
    return [(number, contender) for number in range(rounds) for contender in contenders]


def is_left_out(failures: Sequence[Failure]) -> bool:
    """Return whether a contender is not run again: it has failed, or missed its deadline too often."""
    return len(failures) >= MAX_LOST or any(not failure.is_lost for failure in failures)


def read_answer(stdout: str, *, contender: str, round_: int, known: frozenset[str]) -> Sample | Absent | Failure:
    """Parse the last line that a contender printed; `known` are the keys of the benchmark's figures."""
    lines = stdout.strip().splitlines()
    if not lines:
        return Failure(contender, round_, "printed nothing; the last line must be a JSON object of figures")
    try:
        answer = json.loads(lines[-1])
    except ValueError:
        answer = None
    match answer:
        case {"not_installed": str(package)}:
            return Absent(contender, f"{package} is not installed; run `make bench-setup`")
        case {"not_fetched": str(reason)}:
            return Absent(contender, f"{reason}; when that is solved, run `make bench-setup`, which fetches it")
        case {"figures": dict(figures)}:
            wrong = [key for key, value in figures.items() if key not in known or not _is_number(value)]
            if wrong or not figures:
                return Failure(contender, round_, f"reported unknown or non-numeric figures: {sorted(wrong)}")
            named = answer.get("versions")
            versions = {str(k): str(v) for k, v in named.items()} if isinstance(named, dict) else {}
            return Sample(contender, round_, {key: float(value) for key, value in figures.items()}, versions)
        case _:
            return Failure(contender, round_, f"the last line is not a JSON object of figures: {lines[-1][:200]!r}")


def aggregate(samples: Sequence[Sample]) -> dict[str, Spread]:
    """Return median, minimum and maximum of each figure over the rounds."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in sample.figures.items():
            values.setdefault(key, []).append(value)
    return {key: spread(found) for key, found in values.items()}


def quotients(figures: Sequence[Figure], samples: Sequence[Sample]) -> list[Sample]:
    """Return the computed figures, divided within each round, because conditions differ between rounds."""
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
    """Return how many times better Strata is than the peer; None if no round has both figures.

    The ratio is computed within each round, because conditions differ between rounds, and then summarised.
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
    """Return a duration rounded up: 40 s, 3 min, 1 h 20 min."""
    if seconds <= MINUTE_S:
        return f"{math.ceil(seconds / 10) * 10} s"
    hours, minutes = divmod(math.ceil(seconds / MINUTE_S), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
