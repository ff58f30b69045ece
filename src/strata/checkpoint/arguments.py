"""Check the arguments of `CheckpointManager` and convert them. Every error names the fix."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from strata.checkpoint import retention
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.manifest import CheckpointType
from strata.checkpoint.format.tree import is_text
from strata.checkpoint.policy import Manual
from strata.checkpoint.saver.client import ProcessSaver, ThreadSaver
from strata.errors import ConfigError, InvalidArgument
from strata.storage.local import LocalStore
from strata.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.checkpoint.policy import Strategy
    from strata.checkpoint.retention import Policy
    from strata.checkpoint.saver.client import Saver
    from strata.storage import Store

MAX_DEPTH = 16
_SCHEMES = {"s3": "s3", "gcs": "gs", "gs": "gs", "azure": "az", "az": "az"}
_MODEL_KEYS = ("model", "module", "params")
_OPTIMIZER_KEYS = ("optimizer", "optimizers", "optim", "opt")


def check_choices(
    *, when_busy: str, compression: str | None, saver: str | None, depth: object, rebase_at: object
) -> None:
    """Check options that have a fixed set or range of values.

    Raises:
        ConfigError: A value is out of range.
    """
    _one_of("when_busy", when_busy, ("wait", "skip", "raise"))
    _one_of("compression", compression, (None, "zstd"))
    _one_of("saver", saver, (None, "process", "thread"))
    if not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"incremental_depth={depth!r} is invalid; use 1 to {MAX_DEPTH}", field="incremental_depth")
    if not isinstance(rebase_at, int | float) or not 0 < rebase_at <= 1:
        raise ConfigError(f"rebase_at={rebase_at!r} is invalid; use a share above 0, up to 1", field="rebase_at")


def _one_of(field: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        names = " or ".join(str(choice) for choice in choices)
        raise ConfigError(f"{field}={value!r} is invalid; use {names}", field=field)


def choose_saver(wanted: str | None, store: Store, url: str | None, storage_options: Mapping[str, Any] | None) -> Saver:
    """Return a saver process where it can open the same store and share memory; otherwise a thread.

    Raises:
        ConfigError: A process was requested but is not possible.
    """
    why_not = _why_no_process(store, url, storage_options)
    if wanted == "process" and why_not:
        raise ConfigError(f"saver='process' is not possible: {why_not}; use saver='thread'", field="saver")
    if wanted == "thread" or why_not or url is None:
        return ThreadSaver(store)
    return ProcessSaver(store.url if isinstance(store, LocalStore) else url, storage_options)


def _why_no_process(store: Store, url: str | None, storage_options: Mapping[str, Any] | None) -> str:
    if url is None:
        return "store= is an object of this process"
    if isinstance(store, MemoryStore):
        return "a memory:// store is only visible in this process"
    if os.name != "posix":
        return "this system cannot pass file descriptors to a process"
    try:
        msgspec.msgpack.encode(dict(storage_options or {}))
    except (TypeError, OverflowError, ValueError) as error:
        return f"storage_options cannot be sent to another process ({error})"
    return ""


def checked_strategy(strategy: Strategy | None) -> Strategy:
    """Return the strategy, by default `Manual`."""
    if strategy is not None and not callable(getattr(strategy, "decide", None)):
        raise ConfigError(
            f"strategy={strategy!r} is not a strategy; use EverySteps(1_000), for example", field="strategy"
        )
    return strategy or Manual()


def location(storage_path: str | os.PathLike[str] | None, bucket: str | None, storage_type: str | None) -> str:
    """Return the path or URL that the arguments name."""
    if storage_path is not None:
        storage_path = os.fspath(storage_path)
    if "" in (storage_path, bucket):
        raise ConfigError("storage_path is empty; use '.' for the working directory", field="storage_path")
    if bucket is None:
        if storage_path is None:
            raise ConfigError("pass storage_path=, or bucket= with storage_type=", field="storage_path")
        if storage_type not in (None, "local"):
            raise ConfigError(
                "storage_type= needs bucket=; with storage_path=, use a URL instead", field="storage_type"
            )
        return storage_path
    if storage_type is None or storage_type in ("local", "file"):
        return bucket if storage_path is None else f"{bucket.rstrip('/')}/{storage_path}"
    scheme = _SCHEMES.get(storage_type)
    if scheme is None:
        raise ConfigError(f"storage_type={storage_type!r} is unknown; use one of {', '.join(_SCHEMES)}, local")
    return "/".join(filter(None, (f"{scheme}://{bucket}", storage_path)))


def all_policies(
    keep_count: int | None,
    keep_every: int | None,
    keep_best: Any,
    more: Sequence[Policy],
) -> list[Policy]:
    """Return all retention policies."""
    found: list[Policy] = list(more)
    for policy in found:
        if not callable(getattr(policy, "keep", None)):
            raise ConfigError(f"{policy!r} is not a retention policy; use KeepCount(3), for example", field="policies")
    if keep_count is not None:
        found.append(retention.KeepCount(keep_count))
    if keep_every is not None:
        found.append(retention.KeepEvery(keep_every))
    if keep_best is not None:
        if not isinstance(keep_best, tuple | list) or len(keep_best) != 2:
            raise ConfigError(f"keep_best={keep_best!r} is invalid; use (metric, 'min' or 'max')", field="keep_best")
        found.append(retention.KeepBest(*keep_best))
    return found


def kind_of(value: CheckpointType | str) -> CheckpointType:
    """Return the type of a checkpoint, also from its name."""
    try:
        return value if isinstance(value, CheckpointType) else CheckpointType(value.upper())
    except (ValueError, AttributeError):
        names = ", ".join(kind.name for kind in CheckpointType)
        raise InvalidArgument(f"checkpoint_type={value!r} is unknown; use one of {names}") from None


def part_of_kind(state: Any, kind: CheckpointType) -> Any:
    """Return the part of the state that a checkpoint of this type holds."""
    keys = {CheckpointType.MODEL_ONLY: _MODEL_KEYS, CheckpointType.OPTIMIZER_ONLY: _OPTIMIZER_KEYS}.get(kind)
    if keys is None or not isinstance(state, Mapping):
        return state
    part = {key: value for key, value in state.items() if key in keys}
    if not part:
        raise InvalidArgument(
            f"{kind.name} saves the key {' or '.join(map(repr, keys))}, but the state has only "
            f"{', '.join(map(repr, list(state)[:10])) or 'no keys'}",
            field="state",
        )
    return part


def count(value: Any, field: str) -> int:
    """Return a non-negative integer of any integer type, including numpy's."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < 1 << 53:
        raise InvalidArgument(f"{field}={value!r} is invalid; use an integer of 0 or more", field=field)
    return number


def which(step: Any, id: Any) -> tuple[int | None, str | None]:
    """Check the step and the id that identify a checkpoint."""
    if id is not None and not isinstance(id, str):
        raise InvalidArgument(f"id={id!r} is not a string; use step= for a number", field="id")
    return None if step is None else count(step, "step"), id


def check_targets(into: Any) -> None:
    """Check the targets of `restore`.

    Raises:
        InvalidArgument: `into` is not a dict of objects with `load_state_dict`.
    """
    if not isinstance(into, Mapping):
        raise InvalidArgument(
            f"restore() takes a dict such as {{'model': model}}, not a {type(into).__name__}", field="into"
        )
    for key, target in into.items():
        if not callable(getattr(target, "load_state_dict", None)):
            raise InvalidArgument(
                f"restore(): {key!r} is a {type(target).__name__} without load_state_dict; use load() to get its value",
                field="into",
            )


def text(value: Any, field: str) -> str:
    """Return a string that JSON can hold."""
    if not isinstance(value, str) or not is_text(value):
        raise InvalidArgument(f"{field}={value!r} is not a string of valid Unicode", field=field)
    return value


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metadata as JSON stores it."""
    try:
        data = msgspec.json.encode(dict(metadata or {}))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"metadata is not valid JSON: {error}", field="metadata") from None
    if len(data) > m.MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata has {len(data)} bytes as JSON, more than the limit of {m.MAX_METADATA_BYTES}; put large values "
            "into the state",
            field="metadata",
        )
    decoded: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    return decoded
