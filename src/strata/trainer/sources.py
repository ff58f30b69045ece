"""Data for a Trainer: everything that users pass becomes a loader with a position, sharded across ranks.

path, URL, list of them        strata.data, only the columns that are needed
directory that grows           `Stream`: the same, one pass after the other over the files that are new
pandas or Arrow table          an Arrow file in a scratch directory, then the same
tensors, arrays, dict of them  `ArrayRows`, a map-style dataset that is indexed in bulk
map-style Dataset              an exact loader over it, with the dataset's own `collate_fn` if it has one
torch DataLoader over one      the same, with its options
any loader with a state        as it is; only the same number of workers can resume from its state
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from strata.errors import InvalidArgument, NoData, StrataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from strata.data.stream import Listed
    from strata.identity import Identity

log = logging.getLogger(__name__)

MAX_LANES = 8
"""Lanes of a shuffled loader over files. A fixed number makes the order independent of the number of workers."""

_OWN_OPTIONS = ("batch_size", "shuffle", "shuffle_seed")
"""Options of loaders that the Trainer sets."""
_INSTEAD_OF_BATCH_SIZE = ("batch_tokens", "batch_bytes")
_OF_BATCHES = (*_INSTEAD_OF_BATCH_SIZE, "length_column", "length_buckets", "long_rows", "sequences")
"""Options that decide which rows form a batch and how, and not which columns there are."""
_OF_METHODS = (
    *("label", "valid", "epochs", "batch_size", "inputs", "weight", "shuffle", "max_steps", "early_stopping"),
    *("monitor", "restore_best", "resume", "every", "stream", "idle_timeout_s"),
)
"""Arguments of `fit`, which a misspelt option may mean; other methods take some of them."""
_OF_TRAINING = ("filters", "tail", "drop_last", "length_buckets")
"""Options that leave rows out of the training or regroup shuffled rows, and do not apply to an evaluation."""
_OF_LISTINGS = ("format", "filesystem", "storage_options")
"""Options that decide which files a directory has."""
_TABLES = ("DataFrame", "RecordBatch", "Table")
_ADVICE = "a path or URL, a map-style Dataset, a loader with a state, a pandas or Arrow table, or tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A directory, or a prefix in a bucket, to which files are added while a fit runs."""

    path: str
    columns: tuple[str, ...]
    """Of its first file; the files of a stream have the same columns."""
    sample: str
    """The first file that was found. It may be deleted once it is trained on."""
    idle_timeout_s: float | None
    """Time without a new file after which training ends; None: it does not."""


class ArrayRows(Dataset[Any]):
    """Rows of arrays of equal length, by name or in order. A batch is indexed at once, not row by row."""

    draws_no_random_numbers = True

    def __init__(self, arrays: Mapping[str, Any] | Sequence[Any]) -> None:
        """
        Raises:
            InvalidArgument: The arrays have different lengths, or there are none.
        """
        is_mapping = hasattr(arrays, "items")
        pairs = list(arrays.items()) if is_mapping else list(enumerate(arrays))  # type: ignore[union-attr]
        self._tensors = {name: _tensor(value, name) for name, value in pairs}
        self.names = [str(name) for name in self._tensors] if is_mapping else None
        lengths = {name: len(value) for name, value in self._tensors.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} has {count}" for name, count in lengths.items()) or "there are none"
            raise InvalidArgument(f"arrays must have the same number of rows: {listed}", field="data")
        self._num_rows = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> Any:
        return self._packed({name: value[row] for name, value in self._tensors.items()})

    def __getitems__(self, rows: Sequence[int]) -> Any:
        index = torch.as_tensor(rows)
        return self._packed({name: value[index] for name, value in self._tensors.items()})

    def _packed(self, found: dict[Any, Any]) -> Any:
        return found if self.names is not None else tuple(found.values())


def resolve(data: Any, *, has_features: bool, scratch: Path) -> Any:
    """Turn what a user passed into something that every worker can open; called once, before workers start.

    Args:
        scratch: Directory for tables, which become files.

    Raises:
        InvalidArgument: The type is not supported.
    """
    if is_path(data) or is_loader(data):
        return data
    if isinstance(data, torch.Tensor | np.ndarray):
        data = (data,)
    if _is_table(data) or (has_features and isinstance(data, dict)):
        return _write_table(data, scratch)
    if _of_table_packages(data):
        raise InvalidArgument(
            f"a {type(data).__name__} is not a table; pass a DataFrame or an Arrow table that also has the label",
            field="data",
        )
    if isinstance(data, dict) or (isinstance(data, list | tuple) and all(map(_is_array, data)) and data):
        return ArrayRows(data)
    if is_map_style(data):
        return data
    raise InvalidArgument(f"cannot train on a {type(data).__name__}; pass {_ADVICE}", field="data")


def resolve_stream(data: Any, options: Mapping[str, Any], *, idle_timeout_s: float | None) -> Stream:
    """Wait for the first file of a stream, which determines the columns.

    Raises:
        InvalidArgument: It is not one directory, or an option needs all files at once.
        NoData: There is no file after `idle_timeout_s`.
    """
    from strata.data.stream import POLL_S, complete_files  # noqa: PLC0415 - imports pyarrow

    path = os.fspath(data) if isinstance(data, str | os.PathLike) else ""
    if not path or os.path.isfile(path) or (any(each in path for each in "*?[") and not os.path.isdir(path)):  # noqa: PTH112, PTH113 - may be a URL
        raise InvalidArgument(
            f"stream=True reads a directory or a prefix in a bucket to which files are added, not {data!r}",
            field="data",
        )
    strings = options.get("strings", "python")
    if "codes" in (strings, *(strings.values() if hasattr(strings, "values") else ())) and not options.get(
        "vocabularies"
    ):
        raise InvalidArgument(
            "strings='codes' collects the values of all files, which a stream does not have yet; pass vocabularies=, "
            "or encode with features=",
            field="strings",
        )
    began_s, listed = time.monotonic(), list_stream(path, options)
    if not listed:
        log.warning("waiting for the first file in %s", path)
    while True:
        time.sleep(POLL_S)
        before, listed = listed, list_stream(path, options)
        if complete := complete_files(listed, before, ()):
            break
        if not listed and idle_timeout_s is not None and time.monotonic() - began_s > idle_timeout_s:
            raise NoData(f"{path} has no file after {idle_timeout_s:g} s; check the path", field="data")
    sample = f"{path.rstrip('/')}/{complete[0]}"
    columns = column_names(sample, {**options, "on_empty": "empty"})
    assert columns is not None, "files have columns"
    return Stream(path=path, columns=tuple(columns), sample=sample, idle_timeout_s=idle_timeout_s)


def list_stream(path: str, options: Mapping[str, Any]) -> dict[str, Listed]:
    """Return the files of a stream, by name."""
    from strata.data.stream import list_files  # noqa: PLC0415 - imports pyarrow

    return list_files(path, **{name: options[name] for name in _OF_LISTINGS if name in options})


def column_names(source: Any, options: Mapping[str, Any], ranks: Identity | None = None) -> list[str] | None:
    """Return the names of the columns without reading rows of files; None if batches have no names or are unknown.

    `ranks`: this worker among those that read; without it, the loader looks for it.

    Raises:
        NoData, DataError, StorageError: The files cannot be planned.
    """
    if isinstance(source, Stream):
        return list(source.columns)
    if is_path(source):
        from strata.data import StructuredDataset  # noqa: PLC0415 - imports pyarrow

        planned = {
            name: value for name, value in options.items() if name not in ("columns", "num_workers", *_OF_BATCHES)
        }
        if ranks is not None:
            planned |= {"rank": ranks.rank, "num_ranks": ranks.world_size}
        _, dataset = StructuredDataset.create_dataloader(source, **{**planned, "output_format": "arrow"})
        return list(dataset.plan.columns)
    if isinstance(source, ArrayRows):
        return source.names
    if is_map_style(source) and not isinstance(source, DataLoader):
        row = source[0] if len(source) else None
        return list(row) if isinstance(row, dict) else None
    return None


def check_options(source: Any, options: Mapping[str, Any]) -> None:
    """Check that the loader of this data takes the options.

    Raises:
        InvalidArgument: It does not; the message lists what it takes.
    """
    known = known_options(source)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*_OF_METHODS, *known], n=1)
            hint = f"did you mean {close[0]}=? " if close else ""
            takes = f"The loader takes {', '.join(known)}" if known else "A loader has its own options: set them there"
            raise InvalidArgument(
                f"{name}= is neither an argument of this method nor of the loader for this data; {hint}{takes}",
                field=name,
            )


def check_loader(source: Any, *, batch_size: int | None, shuffle: bool | None) -> None:
    """Check that settings which a loader already has are not given again with other values; None: not given.

    Raises:
        InvalidArgument: They are; they would have no effect.
    """
    if not is_loader(source):
        return
    kind, own = type(source).__name__, getattr(source, "batch_size", None)
    if batch_size is not None and batch_size != own:
        size = "its own size" if own is None else f"{own} rows"
        raise InvalidArgument(
            f"batch_size={batch_size} has no effect on a {kind}, whose batches have {size}; set it on the {kind}",
            field="batch_size",
        )
    is_reopened = isinstance(source, DataLoader) and not hasattr(source, "state_dict")
    is_effective = is_reopened and (not shuffle or isinstance(source.sampler, RandomSampler))
    if shuffle is not None and not is_effective:
        raise InvalidArgument(
            f"shuffle={shuffle} has no effect on a {kind}, which has its own order; set it on the {kind}",
            field="shuffle",
        )


def check_batch_size(batch_size: int | None, options: Mapping[str, Any]) -> None:
    """Check that the size of batches is given once.

    Raises:
        InvalidArgument: It is given as a number of rows and in another unit.
    """
    if batch_size is not None and (others := [name for name in _INSTEAD_OF_BATCH_SIZE if name in options]):
        raise InvalidArgument(f"batch_size= and {others[0]}= are both given; pass one of them", field=others[0])


def known_options(source: Any) -> list[str]:
    """Return the names of the options that the loader of this data takes from the user."""
    if is_files(source):
        from strata.data import StructuredDataset  # noqa: PLC0415 - imports pyarrow

        made = inspect.signature(StructuredDataset.create_dataloader).parameters
        return [name for name in made if name not in ("path", "rank", "num_ranks", *_OWN_OPTIONS)]
    if is_map_style(source):
        made = inspect.signature(DataLoader.__init__).parameters
        return ["tail", *(name for name in made if name not in ("self", "dataset", *_OWN_OPTIONS))]
    return []


def inherited_options(source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a fit that also apply to other data, of which every row counts."""
    known = known_options(source)
    return {name: value for name, value in options.items() if name in known and name not in _OF_TRAINING}


def how_to_drop(source: Any) -> str:
    """Return the option that leaves incomplete batches of this data out."""
    if is_files(source):
        return "tail='drop'"
    return "drop_last=True" if is_map_style(source) else f"drop_last=True of the {type(source).__name__}"


def num_values(source: Any) -> int | None:
    """Return the number of elements of a row that is a tuple; None if rows have names or are unknown."""
    if isinstance(source, DataLoader):
        source = source.dataset if source.collate_fn is default_collate else None
    if source is None or not is_map_style(source) or not len(source):
        return None
    row = source[0]
    return len(row) if isinstance(row, list | tuple) else None


def open_loader(
    source: Any,
    *,
    ranks: Identity,
    batch_size: int,
    shuffle: bool,
    seed: int,
    columns: Sequence[str] | None = None,
    transform: Any = None,
    options: Mapping[str, Any],
) -> Any:
    """Open a loader for this rank.

    Args:
        columns: The columns of files to read; None: all.
        transform: Encodes the rows of files in the decode threads.
    """
    if is_files(source):
        of_files = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "shuffle_seed": seed,
            "columns": columns,
            "transform": transform,
            "lanes": MAX_LANES if shuffle and ranks.world_size <= MAX_LANES else None,
            **options,
        }
        if not options.keys().isdisjoint(_INSTEAD_OF_BATCH_SIZE):
            del of_files["batch_size"]
        if isinstance(source, Stream):
            return _open_stream(source, ranks=ranks, options=of_files)
        return _open_files(source, ranks=ranks, options=of_files)
    if transform is not None:
        raise InvalidArgument(
            f"features= encodes files and tables, but the data is a {type(source).__name__}; pass a path, a DataFrame "
            "or a dict of columns",
            field="features",
        )
    if is_map_style(source):
        return _open_map(source, ranks=ranks, batch_size=batch_size, shuffle=shuffle, seed=seed, options=options)
    if isinstance(source, DataLoader) and not hasattr(source, "state_dict"):
        return _reopen(source, ranks=ranks, shuffle=shuffle, seed=seed)
    return source


def _open_files(source: Any, *, ranks: Identity, options: dict[str, Any]) -> Any:
    from strata.data import StructuredDataset  # noqa: PLC0415 - imports pyarrow

    loader, _ = StructuredDataset.create_dataloader(source, rank=ranks.rank, num_ranks=ranks.world_size, **options)
    return loader


def _open_stream(stream: Stream, *, ranks: Identity, options: dict[str, Any]) -> Any:
    from strata.data.stream import FileStream  # noqa: PLC0415 - imports pyarrow

    of_a_pass = {"name": stream.path, "cache": False, "on_empty": "empty", **options}
    return FileStream(
        stream.path,
        lambda: list_stream(stream.path, options),
        lambda files: _open_files(files, ranks=ranks, options=of_a_pass),
        ranks,
    )


def _open_map(
    dataset: Any, *, ranks: Identity, batch_size: int, shuffle: bool, seed: int, options: Mapping[str, Any]
) -> Any:
    from strata.data.map_style import map_loader  # noqa: PLC0415

    if not len(dataset):
        raise InvalidArgument("the dataset has no rows", field="data")
    own = _identity if isinstance(dataset, ArrayRows) else getattr(dataset, "collate_fn", None)
    defaults = {} if own is None else {"collate_fn": own}
    try:
        return map_loader(
            dataset, ranks=ranks, batch_size=batch_size, shuffle=shuffle, shuffle_seed=seed, **{**defaults, **options}
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, StrataError):
            raise
        raise InvalidArgument(f"a DataLoader cannot be created with {dict(options)}: {error}", field="data") from error


def _reopen(loader: DataLoader[Any], *, ranks: Identity, shuffle: bool, seed: int) -> Any:
    """Return an exact loader with the dataset and the options of a torch `DataLoader`.

    Raises:
        InvalidArgument: It has its own sampler, or its dataset is not map-style.
    """
    sampler = loader.sampler
    is_random = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler)
    if (
        not is_map_style(loader.dataset)
        or loader.batch_size is None
        or not (is_random or type(sampler) is SequentialSampler)
    ):
        raise InvalidArgument(
            f"a DataLoader with a {type(sampler).__name__} over a {type(loader.dataset).__name__} has no position to "
            "resume from; pass its map-style Dataset with batch_size= and shuffle=, or a torchdata StatefulDataLoader",
            field="data",
        )
    options: dict[str, Any] = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "worker_init_fn": loader.worker_init_fn}
    return _open_map(
        loader.dataset,
        ranks=ranks,
        batch_size=loader.batch_size,
        shuffle=is_random and shuffle,  # predictions come in the order of the rows
        seed=seed,
        options={**options, "drop_last": loader.drop_last},
    )


def is_path(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, str | os.PathLike) for each in data)
    return isinstance(data, str | os.PathLike)


def is_files(data: Any) -> bool:
    """Return whether it is read by strata.data: files, now or as they arrive."""
    return is_path(data) or isinstance(data, Stream)


def is_loader(data: Any) -> bool:
    return isinstance(data, DataLoader) or (hasattr(data, "__iter__") and hasattr(data, "load_state_dict"))


def is_map_style(data: Any) -> bool:
    is_iterable_only = isinstance(data, IterableDataset | DataLoader)
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_iterable_only and not is_path(data)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_table(data: Any) -> bool:
    """Return whether it is a table of Arrow, pandas or Polars, without importing any of them."""
    return any(each.__name__ in _TABLES for each in _of_table_packages(data))


def _of_table_packages(data: Any) -> list[type]:
    """Return the classes of Arrow, pandas and Polars that an object is an instance of."""
    packages = ("pyarrow", "pandas", "polars")
    return [each for each in type(data).__mro__ if each.__module__.split(".")[0] in packages]


def _tensor(value: Any, name: Any) -> torch.Tensor:
    try:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except TypeError as error:
        raise InvalidArgument(
            f"{name!r} is an array of {np.asarray(value).dtype}, which torch has no type for; convert it to numbers, "
            "or encode it with SparseFeat in features=",
            field="data",
        ) from error


def _write_table(data: Any, scratch: Path) -> str:
    """Write a table to an Arrow file, from which strata.data reads it like any other."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import feather  # noqa: PLC0415

    if isinstance(data, dict):
        table = pa.table({name: _column(value) for name, value in data.items()})
    elif isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data])
    elif isinstance(data, pa.Table):
        table = data
    elif hasattr(data, "to_arrow"):
        table = data.to_arrow()
    else:
        table = pa.Table.from_pandas(data, preserve_index=False)
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / f"table-{len(list(scratch.iterdir()))}.arrow"
    feather.write_feather(table, str(path), compression="uncompressed", chunksize=1 << 17)
    return str(path)


def _column(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _identity(batch: Any) -> Any:
    return batch
