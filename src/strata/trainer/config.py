"""The settings of a Trainer and of one fit: frozen, and valid once they exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from strata.errors import InvalidArgument
from strata.trainer.sources import Stream

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
        _require_count("accumulate", self.accumulate)
        _require_count("log_every", self.log_every)
        _require(_is_seed(self.seed), "seed", self.seed, "must be a whole number from 0 to 2147483647")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            _require(value is None or (_is_number(value) and value > 0), name, value, "must be a number above 0")
        _require(self.ema is None or _is_share(self.ema), "ema", self.ema, "is the decay; it must be between 0 and 1")
        is_function = self.scheduler is None or callable(self.scheduler)
        cure = "is not a function of the optimizer; write scheduler=lambda optimizer: StepLR(optimizer, 10)"
        _require(is_function, "scheduler", self.scheduler, cure)
        is_compile = isinstance(self.compile, bool | Mapping)
        _require(is_compile, "compile", self.compile, "must be True, False or a dict of arguments for torch.compile")
        _require_flag("deterministic", self.deterministic)
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
    data_options: Mapping[str, Any] = field(default_factory=dict)
    num_inputs: int | None = None
    """Elements of a tuple that are inputs, without the target; None if it is unknown."""
    is_resumed: bool = False
    """The user asked to continue an earlier fit."""
    started_s: float = 0.0
    """Wall-clock time of the call."""

    @property
    def is_stream(self) -> bool:
        return isinstance(self.train, Stream)

    def __post_init__(self) -> None:
        _require_count("epochs", self.epochs)
        if self.is_stream and self.epochs != 1:
            raise InvalidArgument(
                f"epochs={self.epochs}: a stream trains on each file once; leave epochs= out", field="epochs"
            )
        _require_count("batch_size", self.batch_size)
        if self.max_steps is not None:
            _require_count("max_steps", self.max_steps)
        _require_flag("shuffle", self.shuffle)
        _require_flag("resume", self.is_resumed)
        is_name = self.weight is None or isinstance(self.weight, str)
        _require(is_name, "weight", self.weight, "must be the name of a column")
        is_key = isinstance(self.monitor, str)
        _require(is_key, "monitor", self.monitor, "must be a key of the history, such as 'valid_auc'")
        monitor = self.monitor or (self.early_stopping.monitor if self.early_stopping is not None else "")
        if self.early_stopping is not None and self.valid is None and not monitor:
            raise InvalidArgument(
                "early stopping needs validation data; pass valid=, or monitor the training loss with "
                'early_stopping=EarlyStopping(monitor="loss")',
                field="early_stopping",
            )


def column_names(argument: str, columns: Any) -> tuple[str, ...]:
    """Return the names of columns that a user passed: one, or several.

    Raises:
        InvalidArgument: They are not names.
    """
    names = (columns,) if isinstance(columns, str) else tuple(columns) if isinstance(columns, Iterable) else ()
    are_names = bool(names) and all(isinstance(each, str) for each in names)
    _require(are_names, argument, columns, f"must be the name of a column or several: {argument}=['a', 'b']")
    return names


def check_idle_timeout(seconds: Any) -> None:
    """
    Raises:
        InvalidArgument: It is not a positive number or None.
    """
    is_valid = seconds is None or (_is_number(seconds) and seconds > 0)
    _require(is_valid, "idle_timeout_s", seconds, "must be a number of seconds above 0, or None")


def mapping(argument: str, given: Any) -> dict[str, Any]:
    """Return keyword arguments that a user passed as a dict; empty for None.

    Raises:
        InvalidArgument: It is not a dict, or a key is not a string.
    """
    is_mapping = given is None or (isinstance(given, Mapping) and all(isinstance(key, str) for key in given))
    _require(is_mapping, argument, given, f"must be a dict of arguments; write {argument}={{'name': value}}")
    return dict(given or {})


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value < 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_flag(name: str, value: Any) -> None:
    _require(isinstance(value, bool), name, value, "must be True or False")


def _require_count(name: str, value: Any) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(is_count, name, value, "must be a whole number, at least 1")


def _require(is_valid: bool, name: str, value: Any, rule: str) -> None:
    if not is_valid:
        raise InvalidArgument(f"{name}={value!r} {rule}", field=name)
