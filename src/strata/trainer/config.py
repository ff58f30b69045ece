"""The settings of a Trainer and of one fit: frozen, and valid once they exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from strata.trainer.history import EarlyStopping

Precision = Literal["fp32", "bf16", "fp16"]
OnNan = Literal["raise", "skip", "stop"]
Every = Literal["step", "epoch"]
DEFAULT_BATCH_SIZE = 1024
Label = str | Sequence[str] | Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a step is made. `Trainer` documents each."""

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: Precision = "fp32"
    compile: bool | Mapping[str, Any] = False
    ema: float | None = None
    scheduler: Callable[..., Any] | None = None
    scheduler_every: Every = "epoch"
    class_weights: Mapping[int, float] | None = None
    on_nan: OnNan = "raise"
    seed: int = 0
    deterministic: bool = False
    log_every: int = 10

    def __post_init__(self) -> None:
        _require(self.accumulate >= 1, "accumulate", self.accumulate, "must be at least 1")
        _require(self.log_every >= 1, "log_every", self.log_every, "must be at least 1")
        _require(0 <= self.seed < 1 << 31, "seed", self.seed, "must be from 0 to 2147483647")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            _require(value is None or (value > 0 and math.isfinite(value)), name, value, "must be above 0")
        _require(self.ema is None or 0 < self.ema < 1, "ema", self.ema, "is the decay; it must be between 0 and 1")
        for name, choices in (("precision", Precision), ("on_nan", OnNan), ("scheduler_every", Every)):
            value = getattr(self, name)
            _require(value in get_args(choices), name, value, f"is unknown; use one of {', '.join(get_args(choices))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """The arguments of one fit."""

    train: Any
    """Data for training: see `sources.py`."""
    valid: Any = None
    label: Label = None
    inputs: tuple[str, ...] | None = None
    weight: str | None = None
    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = DEFAULT_BATCH_SIZE
    shuffle: bool = True
    early_stopping: EarlyStopping | None = None
    monitor: str = ""
    every: Any = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    num_inputs: int | None = None
    """Elements of a tuple that are inputs, without the target; None if it is unknown."""
    is_resumed: bool = False
    """The user asked to continue an earlier fit."""
    started_s: float = 0.0
    """Wall-clock time of the call."""

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "epochs", self.epochs, "must be at least 1")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "must be at least 1")
        _require(self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, "must be at least 1")
        monitor = self.monitor or (self.early_stopping.monitor if self.early_stopping is not None else "")
        if self.early_stopping is not None and self.valid is None and not monitor:
            raise InvalidArgument(
                "early stopping needs validation data; pass valid=, or monitor the training loss with "
                'early_stopping=EarlyStopping(monitor="loss")',
                field="early_stopping",
            )


def _require(is_valid: bool, name: str, value: Any, rule: str) -> None:
    if not is_valid:
        raise InvalidArgument(f"{name}={value!r} {rule}", field=name)
