"""Flatten nested state into a structure and tensors, and build it again.

The structure is plain JSON. Values that JSON has (None, bools, strings, finite floats, ints of 53 bits) represent
themselves; everything else is an object with one tag:

    {"dict": [[key, node], …]}    in order; keys are nodes, so that an optimizer's int keys stay ints
    {"odict": …}                  an OrderedDict, as `state_dict()` returns
    {"list": […]}  {"tuple": […]}
    {"int": "…"}  {"float": "nan"}  {"complex": [re, im]}
    {"tensor": NAME, "as": KIND}  KIND: torch, numpy, jax, scalar (of numpy), bytes

A tensor that occurs twice (tied weights) is stored once and restored as one object; tensors that merely overlap are
stored separately. For a tensor that is spread over several ranks or devices, the leaves are the parts that this rank
writes (see `shards.py`), and the structure refers to the whole tensor.

Loading executes nothing. Saving rejects any other type by name before anything is written.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from strata.checkpoint.format import dtypes, shards
from strata.checkpoint.format.shards import Held, Piece, Shard
from strata.errors import CheckpointInvalid, InvalidArgument

if TYPE_CHECKING:
    import torch

    from strata.checkpoint.format.dtypes import DType

Node = Any
"""JSON."""
Kind = Literal["torch", "numpy", "jax", "scalar", "bytes"]
MAX_DEPTH = 64
MAX_NAME_BYTES = 1_024
_EXACT_INT = 1 << 53
"""Above it, JSON readers of other languages lose digits."""
_RESERVED = "__metadata__"
_KEY_TAGS = {"tuple", "int", "float", "complex"}
"""Tags that the key of a dict may have."""


class Leaf(NamedTuple):
    """One tensor to store, or a part of one."""

    name: str
    """The name in the data file."""
    dtype: DType
    shape: tuple[int, ...]
    """Of the part that is stored."""
    kind: Kind
    source: Any
    """The tensor, array or bytes."""
    num_bytes: int
    global_shape: tuple[int, ...] | None = None
    """The shape of the whole tensor, if this may be a part of one."""
    start: tuple[int, ...] | None = None
    """Where the part begins in the whole tensor, likewise."""
    part_of: str = ""
    """The name of the whole tensor, if it differs: several parts of one tensor are named `name#0`, `name#1`, …"""

    @property
    def tensor(self) -> str:
        """The name in the structure and in the manifest."""
        return self.part_of or self.name


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state."""

    structure: Node
    leaves: list[Leaf]

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names of tensors of which the leaves may be only parts, each once."""
        return tuple(dict.fromkeys(leaf.tensor for leaf in self.leaves if leaf.global_shape is not None))


def is_text(value: str) -> bool:
    """Return whether a string is valid Unicode: JSON cannot hold undecodable bytes, as in some file names."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def flatten(state: Any) -> Flat:
    """Flatten a nested state.

    Raises:
        InvalidArgument: A value cannot be stored; the message names its path and type.
    """
    flattener = _Flattener()
    structure = flattener.node(state, ())
    return Flat(structure, flattener.finished())


def unflatten(structure: Node, tensor: Callable[[str, Kind], Any]) -> Any:
    """Build a state; `tensor` returns the tensor of a name and kind, and is called once for each.

    Raises:
        CheckpointInvalid: The structure is not one that `flatten` returns.
    """
    return _Builder(tensor).build(structure, 0)


def names_in(structure: Node) -> list[str]:
    """Return the names of the tensors that a structure refers to, each once, in order."""
    found: dict[str, None] = {}
    _Builder(lambda name, _kind: found.setdefault(name)).build(structure, 0)
    return list(found)


def leaves_in(structure: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield the tensor nodes of a valid structure in order, each with the path of its keys."""
    if not isinstance(structure, dict):
        return
    if "tensor" in structure:
        yield path, structure
    for tag, inner in structure.items():
        if tag in ("dict", "odict"):
            for key, node in inner:
                text = key if isinstance(key, str) else str(unflatten(key, lambda name, _: name))
                yield from leaves_in(node, (*path, text))
        elif tag in ("list", "tuple"):
            for number, node in enumerate(inner):
                yield from leaves_in(node, (*path, str(number)))


def renamed(structure: Node, names: Mapping[str, str]) -> Node:
    """Rename tensors in a structure; unchanged parts are shared with the old structure."""
    if not isinstance(structure, dict):
        return structure
    if "tensor" in structure:
        name = names.get(structure["tensor"])
        return structure if name is None else {**structure, "tensor": name}
    for tag in ("dict", "odict"):
        if tag in structure:
            pairs = [[key, renamed(value, names)] for key, value in structure[tag]]
            is_same = all(new[1] is old[1] for new, old in zip(pairs, structure[tag], strict=True))
            return structure if is_same else {tag: pairs}
    for tag in ("list", "tuple"):
        if tag in structure:
            items = [renamed(item, names) for item in structure[tag]]
            is_same = all(new is old for new, old in zip(items, structure[tag], strict=True))
            return structure if is_same else {tag: items}
    return structure


def select(structure: Node, keep: Callable[[str], bool]) -> Node | None:
    """Drop the tensors that `keep` rejects, and dicts that become empty; return None if nothing is left."""
    if not isinstance(structure, dict):
        return structure
    if "tensor" in structure:
        return structure if keep(structure["tensor"]) else None
    for tag in ("dict", "odict"):
        if tag in structure:
            kept = [[key, select(value, keep)] for key, value in structure[tag]]
            kept = [pair for pair in kept if pair[1] is not None or _is_none(structure[tag], pair[0])]
            return {tag: kept} if kept or not structure[tag] else None
    for tag in ("list", "tuple"):
        if tag in structure:
            return {tag: [select(item, keep) for item in structure[tag]]}
    return structure


def _is_none(pairs: list[list[Node]], key: Node) -> bool:
    return next(value for k, value in pairs if k == key) is None


# -- flattening ----------------------------------------------------------------------------------------------------

Path = tuple[str, ...]


class _Flattener:
    def __init__(self) -> None:
        self._leaves: dict[str, list[Leaf]] = {}
        """By tensor name; empty if another rank writes it. Names must not depend on what this rank holds."""
        self._by_identity: dict[tuple[Any, ...], str] = {}
        """The key of a tensor's memory → the name under which it is stored."""
        self._alive: list[Any] = []
        """Objects known by their id that no leaf holds: Python would reuse the id of a freed object."""
        self._modules: tuple[Any, ...] = tuple(sys.modules.get(name) for name in ("torch", "numpy", "jax"))
        """A module that is not loaded has no tensors in the state."""
        torch_module = self._modules[0]
        self._plain_types = (torch_module.Tensor, torch_module.nn.Parameter) if torch_module is not None else ()
        """Nearly all tensors have one of these types, and need no further checks."""
        self._torch_dtypes: dict[torch.dtype, DType] = {}

    def node(self, value: Any, path: Path) -> Node:
        if len(path) > MAX_DEPTH:
            raise InvalidArgument(
                f"{_at(path)} is nested deeper than {MAX_DEPTH} levels; check that it does not contain itself"
            )
        if value is None or isinstance(value, bool):
            return value
        plain = self._plain(value)
        if plain is not None:
            return plain
        if isinstance(value, Mapping):
            tag = "odict" if isinstance(value, OrderedDict) else "dict"
            return {tag: [[self._key(k, path), self.node(v, (*path, str(k)))] for k, v in value.items()]}
        if isinstance(value, tuple | list):
            tag = "tuple" if isinstance(value, tuple) else "list"
            return {tag: [self.node(item, (*path, str(i))) for i, item in enumerate(value)]}
        if isinstance(value, bytes | bytearray | memoryview):
            view = memoryview(value)
            if not view.c_contiguous:
                view = memoryview(bytes(view))
            return self._leaf(
                path, dtypes.BY_NAME["U8"], (view.nbytes,), "bytes", view.cast("B") if view.nbytes else b""
            )
        return self._array(value, path)

    def _plain(self, value: Any) -> Node | None:
        """Return the node of a scalar, or None if the value is not a scalar."""
        kind = type(value)
        if kind is str:
            if not is_text(value):
                raise InvalidArgument(f"{value!r} is not valid Unicode; save it as bytes", field="state")
            return value
        if kind is int:
            return value if -_EXACT_INT < value < _EXACT_INT else {"int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is complex:
            return {"complex": [self._plain(value.real), self._plain(value.imag)]}
        return None

    def _key(self, key: Any, path: Path) -> Node:
        if key is None or isinstance(key, bool):
            return key
        plain = self._plain(key)
        if plain is not None:
            return plain
        if isinstance(key, tuple):
            return {"tuple": [self._key(part, path) for part in key]}
        raise InvalidArgument(
            f"a key of {_at(path)} is a {type(key).__name__}; use strings, numbers or tuples of them as keys"
        )

    def _array(self, value: Any, path: Path) -> Node:
        torch_module, numpy, jax = self._modules
        if torch_module is not None and isinstance(value, torch_module.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Shard):
            return self._shard(value, path)
        if numpy is not None and isinstance(value, numpy.ma.MaskedArray):
            raise InvalidArgument(f"{_at(path)} is a masked array; save its data and mask", field=".".join(path))
        if numpy is not None and isinstance(value, numpy.ndarray):
            known = self._by_identity.get((id(value),))
            if known:
                return {"tensor": known, "as": "numpy"}
            dtype = dtypes.of_numpy(value.dtype, _at(path))
            return self._leaf(path, dtype, value.shape, "numpy", value, identity=(id(value),))
        if numpy is not None and isinstance(value, numpy.generic):
            array = numpy.asarray(value)
            return self._leaf(path, dtypes.of_numpy(array.dtype, _at(path)), (), "scalar", array)
        if jax is not None and isinstance(value, jax.Array):
            known = self._by_identity.get((id(value),))
            if known:
                return {"tensor": known, "as": "jax"}
            self._alive.append(value)
            held = shards.of_jax(value)
            if held is not None:
                return self._jax_parts(held, value, path)
            array = numpy.asarray(value)
            return self._leaf(
                path, dtypes.of_numpy(array.dtype, _at(path)), array.shape, "jax", array, identity=(id(value),)
            )
        raise InvalidArgument(
            f"{_at(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot store; "
            "save tensors, arrays, bytes, numbers, strings, and dicts, lists and tuples of these",
            field=".".join(path),
        )

    def _jax_parts(self, held: Held, value: Any, path: Path) -> Node:
        numpy: Any = self._modules[1]
        arrays = [Piece(piece.start, numpy.asarray(piece.source)) for piece in held.pieces]
        dtype = dtypes.of_numpy(numpy.dtype(value.dtype), _at(path))
        return self._parts(path, dtype, "jax", Held(held.shape, arrays), identity=(id(value),))

    def _shard(self, shard: Shard, path: Path) -> Node:
        torch_module, numpy, jax = self._modules
        local, dtype, kind = shard.local, None, "numpy"
        if torch_module is not None and isinstance(local, torch_module.Tensor) and not _is_dtensor(local):
            local = self._plain_tensor(local, path)
            dtype, kind = self._torch_dtype(local, path), "torch"
            memory: tuple[Any, ...] = shards.identity(local)
        elif numpy is not None and isinstance(local, numpy.ndarray):
            memory = (id(local),)
        elif jax is not None and isinstance(local, jax.Array) and shards.of_jax(local) is None:
            local, kind = numpy.asarray(local), "jax"
            memory = (id(shard.local),)
        else:
            raise InvalidArgument(
                f"{_at(path)} is a Shard of a {type(local).__module__}.{type(local).__qualname__}; pass a torch "
                "tensor, a numpy array or a JAX array on one device; DTensors and sharded JAX arrays need no Shard",
                field=".".join(path),
            )
        self._alive.append(shard)
        dtype = dtype or dtypes.of_numpy(local.dtype, _at(path))
        held = Held(shard.shape, [Piece(shard.start, local)])
        return self._parts(path, dtype, kind, held, identity=(*memory, shard.shape, shard.start))  # type: ignore[arg-type]  # one of two literals

    def _parts(self, path: Path, dtype: DType, kind: Kind, held: Held, *, identity: tuple[Any, ...]) -> Node:
        """Add the parts of a tensor; skip empty parts unless the whole tensor is empty."""
        known = self._by_identity.get(identity)
        if known:
            return {"tensor": known, "as": kind}
        name = self._free_name(path)
        self._by_identity[identity] = name
        self._leaves[name] = []
        for start, source in held.pieces:
            shape = tuple(source.shape)
            if math.prod(shape) or not math.prod(held.shape):
                num_bytes = math.prod(shape) * dtype.itemsize
                self._leaves[name].append(Leaf(name, dtype, shape, kind, source, num_bytes, held.shape, start))
        return {"tensor": name, "as": kind}

    def _tensor(self, value: torch.Tensor, path: Path) -> Node:
        if type(value) not in self._plain_types and _is_dtensor(value):
            local = self._plain_tensor(_local_part(value), path)
            self._alive.append(local)
            held = shards.of_dtensor(value, local, _at(path))
            identity = (*shards.identity(local), held.shape)
            return self._parts(path, self._torch_dtype(local, path), "torch", held, identity=identity)
        tensor = self._plain_tensor(value, path)
        dtype = self._torch_dtype(tensor, path)
        identity = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel():
            known = self._by_identity.get(identity)
            if known:
                return {"tensor": known, "as": "torch"}
        return self._leaf(path, dtype, tuple(tensor.shape), "torch", tensor, identity=identity)

    def _plain_tensor(self, value: torch.Tensor, path: Path) -> torch.Tensor:
        if type(value) not in self._plain_types and type(value).__name__ == "ShardedTensor":
            raise InvalidArgument(
                f"{_at(path)} is a ShardedTensor; use DTensors in the state dict, or wrap its parts in Shard(…)"
            )
        if value.is_nested:
            raise InvalidArgument(f"{_at(path)} is a nested tensor; save its values() and offsets()")
        if value.layout is not self._modules[0].strided:
            raise InvalidArgument(f"{_at(path)} is a sparse tensor; save its indices and values, or to_dense()")
        if value.is_quantized:
            raise InvalidArgument(f"{_at(path)} is a quantized tensor; save its int_repr(), scale and zero point")
        if value.is_meta:
            raise InvalidArgument(f"{_at(path)} is on the meta device and has no contents; materialize it first")
        tensor = value.detach()
        return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor

    def _torch_dtype(self, tensor: torch.Tensor, path: Path) -> DType:
        found = self._torch_dtypes.get(tensor.dtype)
        if found is None:
            found = self._torch_dtypes[tensor.dtype] = dtypes.of_torch(tensor.dtype, _at(path))
        return found

    def _leaf(
        self,
        path: Path,
        dtype: DType,
        shape: tuple[int, ...],
        kind: Kind,
        source: Any,
        *,
        identity: tuple[Any, ...] | None = None,
    ) -> Node:
        name = self._free_name(path)
        shape = tuple(shape)
        self._leaves[name] = [Leaf(name, dtype, shape, kind, source, math.prod(shape) * dtype.itemsize)]
        if identity is not None:
            self._by_identity[identity] = name
        return {"tensor": name, "as": kind}

    def _free_name(self, path: Path) -> str:
        name = ".".join(path) or "state"
        if len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(f"the path {name[:80]}… is longer than {MAX_NAME_BYTES} bytes; shorten the keys")
        candidate, number = name, 2
        while candidate in self._leaves or candidate == _RESERVED:  # "a.b" may be one key, or two
            candidate, number = f"{name}#{number}", number + 1
        return candidate

    def finished(self) -> list[Leaf]:
        """Return all leaves. Parts of one tensor are named last, when all taken names are known."""
        found: list[Leaf] = []
        taken = {*self._leaves, _RESERVED}
        for name, leaves in self._leaves.items():
            if len(leaves) == 1:
                found += leaves
                continue
            numbers = itertools.count()
            for leaf in leaves:
                own = next(f"{name}#{number}" for number in numbers if f"{name}#{number}" not in taken)
                taken.add(own)
                found.append(leaf._replace(name=own, part_of=name))
        return found


def _is_dtensor(value: torch.Tensor) -> bool:
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local_part(value: Any) -> torch.Tensor:
    local: Any = value.detach().to_local()
    done: torch.Tensor = local.wait() if hasattr(local, "wait") else local  # a collective may be in progress
    return done


def _at(path: Iterable[str]) -> str:
    return ".".join(path) or "the state"


# -- building ------------------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, tensor: Callable[[str, Kind], Any]) -> None:
        self._tensor = tensor
        self._built: dict[tuple[str, Kind], Any] = {}

    def build(self, node: Node, depth: int, *, is_key: bool = False) -> Any:
        if depth > MAX_DEPTH + 2:
            raise CheckpointInvalid(f"the structure is nested deeper than {MAX_DEPTH} levels")
        if node is None or isinstance(node, bool | str | int | float):
            return node
        if not isinstance(node, dict):
            raise CheckpointInvalid(f"the structure holds a {type(node).__name__} without a tag")
        if is_key and not node.keys() <= _KEY_TAGS:
            raise CheckpointInvalid("a dict of the structure has an invalid key")
        if "tensor" in node:
            return self._leaf(node)
        if len(node) != 1:
            raise CheckpointInvalid(f"a node of the structure has the tags {', '.join(sorted(node))}, expected one")
        tag, value = next(iter(node.items()))
        if tag in ("dict", "odict", "list", "tuple") and not isinstance(value, list):
            raise CheckpointInvalid(f"a {tag} of the structure is not a list")
        match tag:
            case "dict" | "odict":
                return self._mapping(tag, value, depth)
            case "list":
                return [self.build(item, depth + 1) for item in value]
            case "tuple":
                return tuple(self.build(item, depth + 1, is_key=is_key) for item in value)
            case "int" | "float" | "complex":
                return _number(tag, value)
            case _:
                raise CheckpointInvalid(
                    f"the structure has the unknown tag {tag!r}; a newer version of strata may have written it"
                )

    def _mapping(self, tag: str, pairs: Sequence[Any], depth: int) -> dict[Any, Any]:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise CheckpointInvalid("a dict of the structure has an entry that is not a pair")
        items = [(self.build(key, depth + 1, is_key=True), self.build(value, depth + 1)) for key, value in pairs]
        built = OrderedDict(items) if tag == "odict" else dict(items)
        if len(built) != len(items):
            raise CheckpointInvalid("a dict of the structure has a duplicate key")
        return built

    def _leaf(self, node: dict[str, Any]) -> Any:
        name, kind = node["tensor"], node.get("as")
        if not isinstance(name, str) or kind not in ("torch", "numpy", "jax", "scalar", "bytes"):
            raise CheckpointInvalid(f"the structure refers to tensor {name!r} with the unknown kind {kind!r}")
        if (name, kind) not in self._built:
            self._built[name, kind] = self._tensor(name, kind)
        return self._built[name, kind]


def _number(tag: str, value: Any) -> Any:
    try:
        if tag == "int":
            return int(value)  # Python itself rejects thousands of digits
        if tag == "float":
            return float(value)
        real, imaginary = (part if isinstance(part, float | int) else float(part["float"]) for part in value)
        return complex(real, imaginary)
    except (TypeError, ValueError, KeyError):
        raise CheckpointInvalid(f"the structure holds the invalid {tag} {str(value)[:40]!r}") from None
