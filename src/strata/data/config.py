"""The settings of a loader: one frozen object per concern, valid once it exists.

`create_dataloader` makes a `LoaderConfig` of its keyword arguments and hands it, or the part that a component needs,
down unchanged. Each field has the name of its keyword argument; `StructuredDataset.create_dataloader` documents them.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import pyarrow as pa

from strata.config import parse_bytes
from strata.data.order.assignment import Strategy, by_name
from strata.data.order.order import MAX_LANES, MAX_SEED
from strata.data.order.steps import Tail
from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OutputFormat: TypeAlias = Literal["torch", "numpy", "arrow", "pandas", "dict"]
WorkerType: TypeAlias = Literal["thread", "process"]
OnError: TypeAlias = Literal["raise", "skip"]
OnEmpty: TypeAlias = Literal["raise", "empty"]
SchemaMode: TypeAlias = Literal["unify", "strict"]
Missing: TypeAlias = Literal["raise", "skip", "none"]
LongRows: TypeAlias = Literal["raise", "skip", "truncate"]
Sequences: TypeAlias = Literal["ragged", "padded", "packed"]

DEFAULT_BATCH_SIZE = 1024
DEFAULT_SHUFFLE_BUFFER_SIZE = 100_000
MAX_BATCH_ROWS = 1 << 31
MAX_BATCH_LENGTH = (1 << 31) - 1
MAX_WORKERS = 256
MAX_DEFAULT_WORKERS = 8
MIN_SHARED_BYTES = 1 << 20
DEFAULT_CACHE_BYTES = "32GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesConfig:
    """Which files to read, and how to interpret them."""

    path: Any
    format: str | None = None
    partitioning: Literal["hive"] | None = "hive"
    filesystem: Any = None
    storage_options: Mapping[str, Any] | None = None
    format_options: Mapping[str, Any] | None = None
    schema: pa.Schema | None = None
    schema_mode: SchemaMode = "unify"

    def __post_init__(self) -> None:
        if not self._paths() or not all(isinstance(each, str | os.PathLike) for each in self._paths()):
            raise InvalidArgument(
                f"path={self.path!r} is not a path; pass a path or URL as text, or a list of them", field="path"
            )
        if self.schema is not None and not isinstance(self.schema, pa.Schema):
            raise InvalidArgument(
                f"schema is a {type(self.schema).__name__}; pass a pyarrow schema: pa.schema({{'x': pa.int32()}})",
                field="schema",
            )

    @property
    def roots(self) -> list[str]:
        """The paths that the user gave."""
        return [os.fspath(each) for each in self._paths()]

    def _paths(self) -> Sequence[Any]:
        return self.path if isinstance(self.path, list | tuple) else [self.path]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What to read of the dataset, and how to divide it into splits."""

    columns: Sequence[str] | None = None
    filters: Any = None
    split_bytes: int = 128 << 20
    """Besides the size of a split: the memory for the decoded row groups of a rank's lanes. It decides the number of
    lanes and with it the row order, so it must be the same on every rank, whatever its machine."""
    split_rows: int | None = None
    on_error: OnError = "raise"
    on_empty: OnEmpty = "raise"
    cache: bool = True
    show_progress: bool = False

    def __post_init__(self) -> None:
        _check_choice(self, "on_error", get_args(OnError))
        _check_choice(self, "on_empty", get_args(OnEmpty))
        _set_number(self, "split_bytes", 1, 1 << 50)
        if self.columns is not None:
            _check_columns(self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig:
    """Batches by bytes or tokens instead of by rows."""

    unit: Literal["tokens", "bytes"]
    limit: int
    """Maximum tokens or bytes of a batch on each rank."""
    length_column: str | None = None
    length_buckets: bool = False
    long_rows: LongRows = "raise"

    def __post_init__(self) -> None:
        _check_choice(self, "long_rows", get_args(LongRows))
        if not isinstance(self.length_buckets, bool):
            raise InvalidArgument(
                f"length_buckets={self.length_buckets!r} must be True or False", field="length_buckets"
            )
        _set_number(self, "limit", 1, MAX_BATCH_LENGTH, field=self.option)

    @property
    def option(self) -> str:
        """The name of the argument."""
        return f"batch_{self.unit}"

    @classmethod
    def create(
        cls,
        *,
        batch_size: int | None,
        batch_tokens: int | None,
        batch_bytes: int | str | None,
        length_column: str | None,
        length_buckets: bool,
        long_rows: LongRows,
    ) -> Self | None:
        """Return None if batches have a number of rows.

        Raises:
            InvalidArgument: More than one size is given, or an argument that has no effect.
        """
        given = {"batch_size": batch_size, "batch_tokens": batch_tokens, "batch_bytes": batch_bytes}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise InvalidArgument(f"{chosen[0]}= and {chosen[1]}= are both given; pass one of them", field=chosen[1])
        if chosen in ([], ["batch_size"]):
            others = {
                "length_column": length_column is not None,
                "length_buckets": length_buckets is not False,
                "long_rows": long_rows != "raise",
            }
            useless = [name for name, is_given in others.items() if is_given]
            if useless:
                raise InvalidArgument(
                    f"{useless[0]}= needs batch_tokens= or batch_bytes=; pass one of them", field=useless[0]
                )
            return None
        return cls(
            unit="bytes" if batch_tokens is None else "tokens",
            limit=parse_bytes(batch_bytes or 0, field="batch_bytes") if batch_tokens is None else batch_tokens,
            length_column=length_column,
            length_buckets=length_buckets,
            long_rows=long_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """Which rows form a batch, and in which order."""

    batch_size: int
    """Rows per batch; without effect if there is a `size`."""
    shuffle: bool
    shuffle_seed: int
    shuffle_buffer_size: int
    """Rows that are shuffled together, summed over all ranks."""
    lanes: int | None
    """None chooses the number at the start of each epoch, from the world size."""
    tail: Tail
    size: SizeConfig | None = None

    @classmethod
    def create(
        cls,
        *,
        batch_size: int | None,
        batch_tokens: int | None,
        batch_bytes: int | str | None,
        length_column: str | None,
        length_buckets: bool,
        long_rows: LongRows,
        shuffle: bool,
        shuffle_seed: int,
        shuffle_buffer_size: int | None,
        lanes: int | None,
        tail: Tail,
    ) -> Self:
        """Fill in the defaults of the arguments that may be None."""
        return cls(
            batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_buffer_size=DEFAULT_SHUFFLE_BUFFER_SIZE if shuffle_buffer_size is None else shuffle_buffer_size,
            lanes=lanes,
            tail=tail,
            size=SizeConfig.create(
                batch_size=batch_size,
                batch_tokens=batch_tokens,
                batch_bytes=batch_bytes,
                length_column=length_column,
                length_buckets=length_buckets,
                long_rows=long_rows,
            ),
        )

    def __post_init__(self) -> None:
        _check_choice(self, "tail", get_args(Tail))
        _set_number(self, "batch_size", 1, MAX_BATCH_ROWS)
        _set_number(self, "shuffle_seed", 0, MAX_SEED)
        _set_number(self, "shuffle_buffer_size", 1, MAX_BATCH_ROWS)
        if self.lanes is not None:
            _set_number(self, "lanes", 1, MAX_LANES)
        if not isinstance(self.shuffle, bool):
            raise InvalidArgument(f"shuffle={self.shuffle!r} must be True or False", field="shuffle")
        if self.size is not None and self.size.length_buckets and not self.shuffle:
            raise InvalidArgument(
                "length_buckets=True regroups rows by length, so they do not keep the order of the files; pass "
                "shuffle=True as well",
                field="length_buckets",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How columns are delivered; `batch/policy.py` has the table of types."""

    output_format: OutputFormat
    strings: str | Mapping[str, str] = "python"
    string_width: int | None = None
    nulls: str | Mapping[str, Any] | None = None
    decimals: str | Mapping[str, str] | None = None
    vocabularies: Mapping[str, Any] | None = None
    max_vocabulary: int = 1_000_000
    transform: Callable[[Any], Any] | None = None
    collate_fn: Callable[[Any], Any] | None = None
    decode: Any = None
    missing: Missing = "raise"
    sequences: Sequences = "ragged"

    def __post_init__(self) -> None:
        _check_choice(self, "output_format", get_args(OutputFormat))
        _check_choice(self, "sequences", get_args(Sequences))
        if self.sequences != "ragged" and self.output_format not in ("torch", "numpy"):
            raise InvalidArgument(
                f"sequences={self.sequences!r} needs tensors or arrays, but output_format={self.output_format!r}; use "
                'output_format="torch" or "numpy", or leave out sequences=',
                field="sequences",
            )
        _check_choice(self, "missing", get_args(Missing))
        for name in ("transform", "collate_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidArgument(f"{name}={getattr(self, name)!r} is not callable; pass a function", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How rows are decoded, and how far ahead of the training loop."""

    num_workers: int
    worker_type: WorkerType
    split_strategy: str | Strategy | None
    prefetch_bytes: int
    """Bytes that may be decoded and not yet delivered."""
    shared_bytes: int = 0
    """Limit of the node cache; 0: row groups are not shared with other processes."""
    cache_dir: Any = None
    """Directory on a local disk for the fetched bytes of remote files."""
    cache_bytes: int = parse_bytes(DEFAULT_CACHE_BYTES)

    def __post_init__(self) -> None:
        _check_choice(self, "worker_type", get_args(WorkerType))
        _set_number(self, "num_workers", 0, MAX_WORKERS)
        _set_number(self, "prefetch_bytes", 0, 1 << 50)
        if self.shared_bytes:
            _set_number(self, "shared_bytes", MIN_SHARED_BYTES, 1 << 50)
        _set_number(self, "cache_bytes", MIN_SHARED_BYTES, 1 << 50)
        self._check_cache_dir()
        by_name(self.split_strategy)

    @classmethod
    def create(
        cls,
        *,
        num_workers: int | None,
        worker_type: WorkerType,
        split_strategy: str | Strategy | None,
        prefetch_bytes: int | str | None,
        split_bytes: int | str,
        shared_bytes: int | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str = DEFAULT_CACHE_BYTES,
    ) -> Self:
        """Fill in the defaults: one worker per core, and half a split per worker plus as much for the lanes."""
        if num_workers is None:
            num_workers = min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))
        config = cls(
            num_workers=num_workers,
            worker_type=worker_type,
            split_strategy=split_strategy,
            prefetch_bytes=0,
            cache_dir=cache_dir,
            cache_bytes=parse_bytes(cache_bytes, field="cache_bytes"),
            shared_bytes=0 if shared_bytes is None else parse_bytes(shared_bytes, field="shared_bytes"),
        )
        if prefetch_bytes is None:
            default = parse_bytes(split_bytes) // 2 * (1 + config.num_threads)
            return replace(config, prefetch_bytes=default)
        return replace(config, prefetch_bytes=parse_bytes(prefetch_bytes, field="prefetch_bytes"))

    def _check_cache_dir(self) -> None:
        if self.cache_dir is None:
            return
        if not isinstance(self.cache_dir, str | os.PathLike) or "://" in os.fspath(self.cache_dir):
            raise InvalidArgument(
                f"cache_dir={self.cache_dir!r} is not a local directory; pass a path on a disk of this machine",
                field="cache_dir",
            )
        if self.worker_type == "process":
            raise InvalidArgument(
                "cache_dir has no effect with worker_type='process', whose processes read for themselves; use "
                "worker_type='thread', or leave out cache_dir",
                field="cache_dir",
            )

    @property
    def num_threads(self) -> int:
        """Threads that decode, or that each wait for a decoding process; `num_workers=0` has one as well."""
        return max(1, self.num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """All settings that a loader over files and one over an Iceberg table share."""

    name: str
    plan: PlanConfig
    order: OrderConfig
    batch: BatchConfig
    runtime: RuntimeConfig


def default_output_format() -> OutputFormat:
    return "torch" if has_torch() else "numpy"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _check_columns(columns: Sequence[str]) -> None:
    if isinstance(columns, str):
        raise InvalidArgument(f"columns={columns!r} is a string; pass a list: [{columns!r}]", field="columns")
    if not columns:
        raise InvalidArgument("columns=[] delivers nothing; name some, or leave it out for all", field="columns")
    repeated = {name for name in columns if list(columns).count(name) > 1}
    if repeated:
        raise InvalidArgument(f"columns names {min(repeated)!r} twice; name each once", field="columns")


def _check_choice(config: object, name: str, known: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in known:
        raise InvalidArgument(f"{name}={value!r} is unknown; use one of {', '.join(known)}", field=name)


def _set_number(config: object, name: str, minimum: int, maximum: int, *, field: str = "") -> None:
    """Check a whole number, of numpy's types as well, and store it as an int; `field` is its name for the user."""
    value = getattr(config, name)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not minimum <= number <= maximum:
        shown = field or name
        raise InvalidArgument(f"{shown}={value!r} must be a whole number from {minimum} to {maximum}", field=shown)
    object.__setattr__(config, name, number)
