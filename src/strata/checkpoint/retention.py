"""Retention: which checkpoints to keep. Pure: checkpoints in, removals with their reasons out.

A checkpoint is kept if any policy keeps it. The newest checkpoint is always kept, and so is every base of a kept one.
To add a policy, implement `Policy.keep` and describe it in `_in_words`; `arguments.py` turns keyword arguments such as
`keep_count` into policies. When to save is decided in `policy.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.catalog import CheckpointMetadata


class Policy(Protocol):
    """Decides which checkpoints to keep."""

    def keep(self, checkpoints: Sequence[CheckpointMetadata]) -> dict[str, str]:
        """Return the ids to keep, with the reasons. The checkpoints are sorted, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class KeepCount:
    """Keep the newest checkpoints."""

    count: int

    def __post_init__(self) -> None:
        _require_whole(self.count, "keep_count", "keep_count")

    def keep(self, checkpoints: Sequence[CheckpointMetadata]) -> dict[str, str]:
        return {c.id: f"one of the newest {self.count}" for c in checkpoints[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep the first checkpoint of every interval of steps, forever."""

    steps: int

    def __post_init__(self) -> None:
        _require_whole(self.steps, "keep_every", "keep_every")

    def keep(self, checkpoints: Sequence[CheckpointMetadata]) -> dict[str, str]:
        first_of: dict[int, str] = {}
        for checkpoint in checkpoints:
            first_of.setdefault(checkpoint.step // self.steps, checkpoint.id)
        return {id: f"the first from step {n * self.steps} on" for n, id in first_of.items()}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the best checkpoints by a number in their metadata; those without it do not count."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode={self.mode!r} is invalid; use 'min' or 'max'", field="keep_best")
        _require_whole(self.count, "count", "keep_best")

    def keep(self, checkpoints: Sequence[CheckpointMetadata]) -> dict[str, str]:
        rated = [(value, c) for c in checkpoints if (value := self._value(c)) is not None]
        rated.sort(key=lambda pair: pair[0], reverse=self.mode == "max")
        return {c.id: f"{self.metric}={value:g} is among the best {self.count}" for value, c in rated[: self.count]}

    def _value(self, checkpoint: CheckpointMetadata) -> float | None:
        value = checkpoint.metadata.get(self.metric)
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            return None
        return float(value)


def _require_whole(value: object, name: str, field: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is invalid; use an integer of 1 or more", field=field)


def in_words(policies: Sequence[Policy]) -> str:
    """Describe what is kept."""
    return f"{' and '.join(map(_in_words, policies))} are kept" if policies else "all are kept"


def _in_words(policy: Policy) -> str:
    match policy:
        case KeepCount(count):
            return f"the last {count}"
        case KeepEvery(steps):
            return f"one of every {steps} steps"
        case KeepBest(metric, mode, count):
            return f"the {count} with the {'lowest' if mode == 'min' else 'highest'} {metric}"
        case _:
            return f"what {type(policy).__name__} keeps"


@dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint to delete."""

    id: str
    reason: str


def removals(
    checkpoints: Sequence[CheckpointMetadata], policies: Sequence[Policy], *, just_saved: str = ""
) -> list[Removal]:
    """Return the checkpoints to delete, oldest first; none without a policy.

    The checkpoint that was just saved is kept whatever its step: a run resumed from an earlier step needs it.
    """
    if not policies or not checkpoints:
        return []
    kept: dict[str, str] = {checkpoints[-1].id: "the newest", just_saved: "just saved"}
    for policy in policies:
        kept |= policy.keep(checkpoints)
    for checkpoint in checkpoints:
        if checkpoint.id in kept:
            kept |= dict.fromkeys(checkpoint.bases, "a base that is needed")
    return [Removal(c.id, "no policy keeps it") for c in checkpoints if c.id not in kept]
