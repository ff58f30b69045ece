"""What happens in a study, as the journal stores it.

Two kinds of facts make up a study. Some come from outside: an answer of the sampler, a report, the end of a trial. The
others were decided from them: which trial to run where, which to stop. Both are stored, so a newer version that decides
differently cannot change what has happened. A *lease* numbers the starts of a trial; whatever a worker reports under an
old lease is ignored.

JSON has no NaN: a metric that is not a finite number is None.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from strata.errors import ConfigError, LimitExceeded
from strata.printing import counted

FORMAT = 1
MAX_TRIALS = 100_000
MAX_SLOTS = 10_000
MAX_OBJECTIVES = 8
MAX_CONSTRAINTS = 8
MAX_KNOWN = 10_000
"""Trials of other studies."""
MAX_STEP = 2**63 - 1
MAX_CONFIG_BYTES = 64 << 10
MAX_METRIC = 100
"""Characters of the name of a metric."""
RESERVED = ("checkpoint", "duration_s", "epoch", "number", "reason", "state", "step")
"""Columns of a study's tables and arguments of `report`, which no metric can have as its name."""
MAX_REASON = 2_000
"""Characters of a reason, such as the last words of a failed trial."""

StopWhy = Literal["prune", "pause", "preempt", "end", "expire", "grow"]
"""Why a running trial is stopped: it ends; a better one runs first; its slot is gone; the study stops; it was silent
for too long, and is killed; it continues with more slots.
"""
Order = Literal["stop", "requeue"]
"""What a person may ask for: a trial that has started ends as pruned; a running one saves, and is queued again."""
Values = tuple[float | None, ...]


class StudySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a study is, fixed when it is created."""

    name: str
    space: dict[str, Any]
    """As `SearchSpace.to_dict` returns it."""
    metrics: tuple[str, ...] = ("loss",)
    """Objectives."""
    directions: tuple[Literal["min", "max"], ...] = ("min",)
    constraints: tuple[str, ...] = ()
    """Limits of other metrics, such as "memory_gb <= 16"."""
    num_trials: int = 100
    max_failures: int = 3
    """Failures in a row, without progress between them, after which a trial has failed."""
    sampler: str = "random"
    scheduler: str = "none"
    scheduler_options: dict[str, Any] = {}
    seed: int = 0
    ask_ahead: int = 0
    """Configurations to ask for before one of several slots is free, which hides the time that a sampler takes."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not 1 <= self.num_trials <= MAX_TRIALS:
            raise ConfigError(f"num_trials={self.num_trials} must be between 1 and {MAX_TRIALS:,}", field="num_trials")
        if self.max_failures < 1:
            raise ConfigError(f"max_failures={self.max_failures} must be 1 or more", field="max_failures")
        if not 1 <= len(self.metrics) <= MAX_OBJECTIVES or len(set(self.metrics)) != len(self.metrics):
            raise ConfigError(
                f"metric={list(self.metrics)} must be 1 to {MAX_OBJECTIVES} different names", field="metric"
            )
        if len(self.directions) != len(self.metrics):
            raise ConfigError(
                f"mode has {counted(len(self.directions), 'value')} for {counted(len(self.metrics), 'metric')}; pass "
                "one for each",
                field="mode",
            )
        if not 0 <= self.ask_ahead <= MAX_SLOTS:
            raise ConfigError(f"ask_ahead={self.ask_ahead} must be between 0 and {MAX_SLOTS:,}", field="ask_ahead")


def check_metric(name: object, *, field: str) -> None:
    """
    Raises:
        ConfigError: The name is not one that reports and tables can have.
    """
    if not (
        isinstance(name, str)
        and 0 < len(name) <= MAX_METRIC
        and name.isprintable()
        and name == name.strip()
        and name not in RESERVED
        and not name.startswith("config.")
    ):
        raise ConfigError(
            f"{repr(name)[:MAX_METRIC]} cannot be the name of a metric: use 1 to {MAX_METRIC} printable characters, "
            f"but neither {', '.join(RESERVED)} nor config.…, which are other columns of the study's tables",
            field=field,
        )


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", omit_defaults=True):
    at_s: float = 0.0
    """Wall time, for people: no decision depends on it."""


# -- from outside ------------------------------------------------------------------------------------------------------


class Opened(Fact, frozen=True, kw_only=True):
    """The first fact of every journal."""

    spec: StudySpec


class Known(Fact, frozen=True, kw_only=True):
    """A trial of another study, which the sampler learns from before it chooses."""

    source: str
    config: dict[str, bool | int | float | str | None]
    values: tuple[float, ...]
    """As a report of this study would have them."""


class Asked(Fact, frozen=True, kw_only=True):
    """The configuration of a trial is known."""

    trial: int
    config: dict[str, bool | int | float | str | None]
    is_given: bool = False
    """It is a default or was enqueued, so the sampler did not choose it."""
    num_told: int = 0
    """Ends and pauses of trials that the sampler knew of when it chose."""


class Exhausted(Fact, frozen=True, kw_only=True):
    """The sampler has no further configuration."""

    trial: int


class Reported(Fact, frozen=True, kw_only=True):
    """A trial has reported its objectives. Reports of other metrics are not events of the study."""

    trial: int
    lease: int
    step: int
    values: Values
    """Of the objectives and then of the metrics in constraints: see `Objectives.names`."""


class Saved(Fact, frozen=True, kw_only=True):
    """A checkpoint of a trial is committed."""

    trial: int
    lease: int
    step: int
    checkpoint: str
    world_size: int = 0
    """The only world size that can resume from it, because a loader's state is per rank; 0: any."""


class Finished(Fact, frozen=True, kw_only=True):
    """The training function has returned."""

    trial: int
    lease: int
    values: Values | None = None
    """None: the last reported values count."""


class Failed(Fact, frozen=True, kw_only=True):
    """The training function has raised."""

    trial: int
    lease: int
    reason: str
    is_final: bool = False
    """Another try would fail in the same way."""


class Lost(Fact, frozen=True, kw_only=True):
    """The worker of a trial died, or does not answer."""

    trial: int
    lease: int
    reason: str
    is_blameless: bool = False
    """The trial cannot be the cause: its machine or the driver was restarted."""


class Expired(Fact, frozen=True, kw_only=True):
    """A trial has reported nothing for too long."""

    trial: int
    lease: int
    reason: str


class Stopped(Fact, frozen=True, kw_only=True):
    """The worker of a trial has saved and stopped, as it was asked to."""

    trial: int
    lease: int


class Resized(Fact, frozen=True, kw_only=True):
    num_slots: int
    """Trials that can run at the same time."""
    lost: tuple[int, ...] = ()
    """Trials that went with the slots: their ends follow, so the others need not make room."""
    max_slots_per_trial: int = 1
    """Slots that one trial may take if no other needs them."""


class Extended(Fact, frozen=True, kw_only=True):
    """The study may have more trials, and goes on if it had ended."""

    num_trials: int


class StopRequested(Fact, frozen=True, kw_only=True):
    """Running trials save and stop; the study can be continued later."""

    reason: str
    wait_s: float = 0.0
    """Longest time for trials to save; then they are killed. 0: not limited by the request."""


class Ordered(Fact, frozen=True, kw_only=True):
    """A person has asked to stop a trial for good, or to let it save and start again from its checkpoint."""

    trial: int
    order: Order
    reason: str = ""


# -- decided -----------------------------------------------------------------------------------------------------------


class Asking(Fact, frozen=True, kw_only=True):
    """The sampler is asked for the configuration of a new trial."""

    trial: int


class Leased(Fact, frozen=True, kw_only=True):
    """A trial runs in a slot from now on."""

    trial: int
    lease: int
    slot: int
    reason: str = ""
    checkpoint: str = ""
    """Continue from here; empty: from the start."""
    step: int = 0
    """Step of that checkpoint."""
    donor: int | None = None
    """Trial that the checkpoint is from, if not this one."""
    config: dict[str, bool | int | float | str | None] | None = None
    """Configuration from now on; None: as before."""
    extra_slots: tuple[int, ...] = ()
    """Further slots that it takes, because no other trial needs them: each adds the workers of a trial."""


class StopSent(Fact, frozen=True, kw_only=True):
    """A running trial is asked to stop."""

    trial: int
    lease: int
    why: StopWhy
    reason: str


class Pruned(Fact, frozen=True, kw_only=True):
    """A paused trial will not be resumed."""

    trial: int
    reason: str


class Ended(Fact, frozen=True, kw_only=True):
    """The study has ended. Trials that were stopped with it stay queued or paused."""

    reason: str
    is_complete: bool


Event = (
    Opened
    | Known
    | Asked
    | Exhausted
    | Reported
    | Saved
    | Finished
    | Failed
    | Lost
    | Expired
    | Stopped
    | Resized
    | Extended
    | StopRequested
    | Ordered
    | Asking
    | Leased
    | StopSent
    | Pruned
    | Ended
)
FromWorker = Reported | Saved | Finished | Failed | Lost | Expired | Stopped

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(line: bytes) -> Event:
    """
    Raises:
        msgspec.DecodeError: The line is not an event.
    """
    return _decoder.decode(line)


def check_config(config: dict[str, Any]) -> None:
    """
    Raises:
        LimitExceeded: The configuration is too large.
    """
    num_bytes = len(_encoder.encode(config))
    if num_bytes > MAX_CONFIG_BYTES:
        raise LimitExceeded(
            f"a configuration has {num_bytes:,} bytes as JSON, at most {MAX_CONFIG_BYTES:,} are allowed; pass large "
            "values as paths of files",
            field="config",
        )
