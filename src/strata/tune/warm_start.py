"""Warm starts: a sampler that knows the trials of earlier studies before it chooses.

A trial can be used if it has finished, its configuration is one of the new space, and it reported all metrics of the
new study, with the same directions. Others are counted by the reason, for the log.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from strata.errors import ConfigError, LimitExceeded
from strata.printing import counted
from strata.tune.state import events as e
from strata.tune.state.objectives import Objectives
from strata.tune.study import Study

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from strata.tune.space import SearchSpace


@dataclass(slots=True)
class WarmStart:
    known: list[e.Known] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason → number of trials that do not fit."""

    def __str__(self) -> str:
        used = f"warm start with {counted(len(self.known), 'trial')}"
        if not self.skipped:
            return used
        reasons = [f"{number} × {reason}" for reason, number in self.skipped.most_common(3)]
        more = len(self.skipped) - len(reasons)
        return (
            f"{used}; {counted(self.skipped.total(), 'finished trial')} of the given studies cannot be used: "
            f"{'; '.join(reasons)}{f'; and {more} other reasons' if more else ''}"
        )


def warm_start(studies: Iterable[Study | str | os.PathLike[str]], spec: e.StudySpec, space: SearchSpace) -> WarmStart:
    """Collect what the sampler of a new study can learn from others, which are objects, names or directories.

    Raises:
        ConfigError: There is no such study.
        LimitExceeded: The studies have too many trials.
    """
    objectives = Objectives(spec)
    found = WarmStart()
    for study in [each if isinstance(each, Study) else _open(each) for each in studies]:
        other = dict(zip(study.metrics, study.directions, strict=True))
        wrong = [
            name for name, each in zip(spec.metrics, spec.directions, strict=True) if other.get(name, each) != each
        ]
        for trial in study.trials:
            if trial.state != "finished":
                continue
            values = study.values_of(trial)
            missing = [name for name in objectives.names if name not in values]
            if wrong:
                reason = f"{wrong[0]!r} has the other direction"
            elif missing:
                reason = f"{missing[0]!r} was not reported"
            else:
                reason = space.why_not(trial.config)
            if reason:
                found.skipped[reason] += 1
                continue
            known = tuple(values[name] for name in objectives.names)
            found.known.append(e.Known(source=f"{study.name}/{trial.number}", config=dict(trial.config), values=known))
    if len(found.known) > e.MAX_KNOWN:
        raise LimitExceeded(
            f"warm_start has {len(found.known):,} trials that fit, at most {e.MAX_KNOWN:,} are allowed; pass fewer "
            "studies",
            field="warm_start",
        )
    return found


def _open(study: str | os.PathLike[str]) -> Study:
    from strata.launch.record import directory as runs  # noqa: PLC0415 - heavy

    by_name = runs.root() / study if isinstance(study, str) and "/" not in study else None
    for path in (by_name, Path(study)):
        if path is not None and path.is_dir():
            return Study.load(path)
    raise ConfigError(
        f"warm_start={str(study)!r} is neither the name nor the directory of a study; see `strata ps` for names",
        field="warm_start",
    )
