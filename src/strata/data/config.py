"""What a user may choose about the delivery of a dataset. Settings that exist are valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from strata.data.order.assignment import Strategy, by_name
from strata.data.order.order import MAX_LANES, MAX_SEED
from strata.data.order.steps import Tail
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

OutputFormat: TypeAlias = Literal["torch", "numpy", "arrow", "pandas", "dict"]
WorkerType: TypeAlias = Literal["thread", "process"]
OnError: TypeAlias = Literal["raise", "skip"]
OnEmpty: TypeAlias = Literal["raise", "empty"]

DEFAULT_BUFFER_ROWS = 100_000
MAX_BATCH_ROWS = 1 << 31
MAX_WORKERS = 256


def check_on_empty(on_empty: object) -> None:
    """
    Raises:
        InvalidArgument: There is no such choice.
    """
    if on_empty not in get_args(OnEmpty):
        raise InvalidArgument(f"on_empty={on_empty!r}; use one of {', '.join(get_args(OnEmpty))}", field="on_empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    batch_size: int
    shuffle: bool
    shuffle_seed: int
    shuffle_buffer_size: int
    """Rows that are shuffled among themselves, of all ranks together."""
    split_strategy: str | Strategy | None
    num_workers: int
    worker_type: WorkerType
    output_format: OutputFormat
    tail: Tail
    on_error: OnError
    lanes: int | None
    """None: chosen anew at the start of each epoch, by the number of ranks."""
    lane_bytes: int
    """How much the decoded units of a rank's lanes may take together. Decides the number of lanes, and so the order:
    the same on every rank, whatever its machine."""
    prefetch_bytes: int
    """How much may be decoded and not yet handed over."""
    transform: Callable[[Any], Any] | None = None
    collate_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        self._check_choice("worker_type", get_args(WorkerType))
        self._check_choice("output_format", get_args(OutputFormat))
        self._check_choice("tail", get_args(Tail))
        self._check_choice("on_error", get_args(OnError))
        self._check_count("batch_size", 1, MAX_BATCH_ROWS)
        self._check_count("shuffle_seed", 0, MAX_SEED)
        self._check_count("shuffle_buffer_size", 1, MAX_BATCH_ROWS)
        self._check_count("num_workers", 0, MAX_WORKERS)
        self._check_count("prefetch_bytes", 0, 1 << 50)
        self._check_count("lane_bytes", 1, 1 << 50)
        if not isinstance(self.shuffle, bool):
            raise InvalidArgument(f"shuffle={self.shuffle!r} must be True or False", field="shuffle")
        if self.lanes is not None:
            self._check_count("lanes", 1, MAX_LANES)
        for name in ("transform", "collate_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidArgument(f"{name} is not callable: {getattr(self, name)!r}", field=name)
        by_name(self.split_strategy)

    def _check_choice(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise InvalidArgument(f"{name}={getattr(self, name)!r}; use one of {', '.join(known)}", field=name)

    def _check_count(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidArgument(f"{name}={value!r} must be a whole number from {least} to {most}", field=name)
