"""JAX pytrees: saved as nested dicts with plain names, loaded into the structure of a target.

The name of a leaf is its key path: `{"params": {"dense": {"kernel": …}}}` and a train state with such a field both give
`params.dense.kernel`. Items of lists and tuples are numbered; fields of namedtuples and dataclasses keep their names.
The types of the nodes are not stored; the target has them: `like` is a pytree of the same structure, of arrays or of
`jax.ShapeDtypeStruct`s (from `jax.eval_shape`), and each array is loaded with its target's dtype, shape and sharding.

Keys of `jax.random.key` are stored as their data and the name of their implementation. Needs no torch.
"""

from __future__ import annotations

import contextlib
import numbers
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strata.checkpoint.handle import Save
    from strata.checkpoint.manager import CheckpointManager

T = TypeVar("T")
KEY_IMPL = "prng_impl"
KEY_DATA = "key_data"
_MAX_NAMED = 5
"""The number of names that an error lists."""
Path = tuple[str, ...]


def save_pytree(manager: CheckpointManager, pytree: Any, *, step: int, **save_kwargs: Any) -> Save:
    """Save a pytree; `save_kwargs` are passed to `manager.save`.

    Raises:
        InvalidArgument: A leaf cannot be stored, or two leaves have the same name; nothing was written.
    """
    return manager.save(to_state(pytree), step=step, **save_kwargs)


def load_pytree(
    manager: CheckpointManager, *, like: T, step: int | None = None, id: str | None = None, strict: bool = True
) -> T:
    """Load a pytree that `save_pytree` saved, with the structure and the shardings of `like`.

    Without `step` or `id`, load the newest checkpoint that can be trusted. `strict=False` ignores leaves of the
    checkpoint that `like` lacks.

    Raises:
        NoCheckpoint: No such checkpoint exists.
        InvalidArgument: The checkpoint does not fit `like`; the message names the leaf and what was found and expected.
    """
    with on_the_host():
        state = manager.load(step=step, id=id)
    return from_state(state, like=like, strict=strict)


def to_state(pytree: Any) -> Any:
    """Convert a pytree to nested dicts of its leaves; a single leaf is returned as it is.

    Raises:
        InvalidArgument: Two leaves have the same name.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(pytree)
    if len(leaves) == 1 and not leaves[0][0]:
        return _stored(leaves[0][1])
    state: dict[str, Any] = {}
    ends: set[Path] = set()
    for key_path, leaf in leaves:
        path = _path(key_path)
        inner = state
        for number, key in enumerate(path[:-1], start=1):
            inner = inner.setdefault(key, {})
            if path[:number] in ends:
                raise _same_name(path[:number])
        if path[-1] in inner:
            raise _same_name(path)
        inner[path[-1]] = _stored(leaf)
        ends.add(path)
    return state


def from_state(state: Any, *, like: T, strict: bool = True) -> T:
    """Convert nested dicts of `to_state` back to a pytree with the structure of `like`.

    Raises:
        InvalidArgument: A leaf is missing, is not in `like` (unless `strict=False`), or has another shape or dtype.
    """
    targets, treedef = jax.tree_util.tree_flatten_with_path(like)
    paths = [_path(key_path) for key_path, _ in targets]
    found = [_find(state, path) for path in paths]
    missing = [path for path, value in zip(paths, found, strict=True) if value is _MISSING]
    if missing:
        others = [path for path in _ends(state, ()) if path not in set(paths)]
        raise InvalidArgument(
            f"the checkpoint lacks {_listed(missing)}; the target lacks {_listed(others) or 'nothing'}. Pass a `like` "
            "with the structure that was saved",
            field=_dotted(missing[0]),
        )
    if strict:
        _require_no_more(state, paths, [target for _, target in targets])
    leaves = [
        _placed(value, target, _dotted(path)) for path, value, (_, target) in zip(paths, found, targets, strict=True)
    ]
    pytree: T = jax.tree_util.tree_unflatten(treedef, leaves)
    return pytree


# -- names ---------------------------------------------------------------------------------------------------------


def _path(key_path: Sequence[Any]) -> Path:
    return tuple(_key(entry) for entry in key_path)


def _key(entry: Any) -> str:
    """Return one entry of a key path: a dict key, an index, a field name or the number of a child."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _dotted(path: Path) -> str:
    return ".".join(path) or "the pytree"


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(map(_dotted, paths[:_MAX_NAMED])) + more


def _same_name(path: Path) -> InvalidArgument:
    return InvalidArgument(
        f"two leaves of the pytree have the name {_dotted(path)}: keys that differ only in type (1 and '1'), or a node "
        "with equal names for its children; rename one of them",
        field=_dotted(path),
    )


# -- values --------------------------------------------------------------------------------------------------------

_MISSING = object()


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _stored(leaf: Any) -> Any:
    if _is_key(leaf):
        return {KEY_IMPL: str(jax.random.key_impl(leaf)), KEY_DATA: jax.random.key_data(leaf)}
    return leaf


def _find(state: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(state, dict) or key not in state:
            return _MISSING
        state = state[key]
    return state


def _ends(state: Any, path: Path) -> Iterator[Path]:
    if not isinstance(state, dict):
        yield path
        return
    for key, value in state.items():
        yield from _ends(value, (*path, str(key)))


def _require_no_more(state: Any, paths: Sequence[Path], targets: Sequence[Any]) -> None:
    wanted = set(paths)
    for path, target in zip(paths, targets, strict=True):
        if _is_key(target):
            wanted |= {(*path, KEY_IMPL), (*path, KEY_DATA)}
    more = [path for path in _ends(state, ()) if path not in wanted]
    if more:
        raise InvalidArgument(
            f"the target lacks {_listed(more)} of the checkpoint; pass strict=False to ignore it",
            field=_dotted(more[0]),
        )


def _placed(value: Any, target: Any, name: str) -> Any:
    """Check a saved value against its target, and put it on the target's devices."""
    if _is_key(target):
        return _key_placed(value, target, name)
    if isinstance(target, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        _require_fits(value, target.shape, target.dtype, name)
        if isinstance(target, np.ndarray):
            return np.array(value) if isinstance(value, jax.Array) else value
        if isinstance(target, np.generic):
            return np.asarray(value)[()]
        return _require_kept(_on_devices(value, target), name, target.dtype)
    if isinstance(value, dict):
        raise _mismatch(name, f"a node with {_listed([(str(key),) for key in value])}", f"a {type(target).__name__}")
    if isinstance(target, numbers.Number) and isinstance(value, numbers.Number):
        return value
    if type(value) is not type(target):
        raise _mismatch(name, f"a {type(value).__name__}", f"a {type(target).__name__}")
    return value


def _require_fits(value: Any, shape: tuple[int, ...], dtype: Any, name: str) -> None:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise _mismatch(name, f"a {type(value).__name__}", _describe_array(shape, dtype))
    if value.shape != tuple(shape) or value.dtype != dtype:
        raise _mismatch(name, _describe_array(value.shape, value.dtype), _describe_array(shape, dtype))


def _describe_array(shape: tuple[int, ...], dtype: Any) -> str:
    return f"an array of {dtype} {tuple(shape)}"


def _mismatch(name: str, found: str, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} is {found} in the checkpoint, expected {expected}; load with a `like` of what was saved and convert "
        "it afterwards",
        field=name,
    )


def on_the_host() -> contextlib.AbstractContextManager[Any]:
    """Load to the host first: the default device may not have memory for everything."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX is configured without a CPU
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = jax.default_device(host)
    return context


def _on_devices(value: Any, target: Any) -> jax.Array:
    """Put a value where its target is; without a committed sharding, JAX chooses the device."""
    if isinstance(value, jax.Array) and not _is_key(value):
        value = np.asarray(value)  # otherwise it stays on the host
    is_free = getattr(target, "sharding", None) is None or not getattr(target, "committed", True)
    placed: jax.Array = jax.device_put(value, None if is_free else target.sharding)
    return placed


def _require_kept(placed: jax.Array, name: str, dtype: Any) -> jax.Array:
    """Reject a silent conversion: JAX narrows 64-bit types unless jax_enable_x64 is set."""
    if placed.dtype != dtype:
        raise _mismatch(
            name, f"an array of {dtype}, which JAX converts to {placed.dtype} (set jax_enable_x64)", str(dtype)
        )
    return placed


def _key_placed(value: Any, target: Any, name: str) -> jax.Array:
    if not isinstance(value, dict) or value.keys() != {KEY_IMPL, KEY_DATA}:
        raise _mismatch(name, f"a {type(value).__name__}", f"a key of {target.dtype}")
    impl, data = value[KEY_IMPL], value[KEY_DATA]
    try:
        key = jax.random.wrap_key_data(jax.device_put(np.asarray(data)), impl=impl)
    except (TypeError, ValueError) as error:
        raise _mismatch(
            name, f"not a key of the implementation {impl!r} ({error})", f"a key of {target.dtype}"
        ) from None
    if key.dtype != target.dtype or key.shape != tuple(target.shape):
        raise _mismatch(name, f"a key of {key.dtype} {key.shape}", f"a key of {target.dtype} {tuple(target.shape)}")
    return _on_devices(key, target)
