"""Nested state, taken apart into structure and tensors, and put together again.

The structure is plain JSON: what JSON has stands for itself (None, bools, strings, finite floats, ints of 53 bits), all
else is an object with one tag:

    {"dict": [[key, node], …]}    in order, keys are nodes, so that an optimizer's int keys stay ints
    {"odict": …}                  an OrderedDict, as `state_dict()` gives
    {"list": […]}  {"tuple": […]}
    {"int": "…"}  {"float": "nan"}  {"complex": [re, im]}
    {"tensor": NAME, "as": KIND}  KIND: torch, numpy, jax, scalar (of numpy), bytes

A tensor that occurs twice (tied weights) is stored once and comes back as one object; tensors that merely overlap are
stored each for itself. Of a tensor that lies over several ranks or devices the leaves are the parts that this rank
writes (see `shards.py`); the structure refers to the whole.

Nothing is ever executed, and a type that is not listed is refused by name before anything is written.
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
"""Beyond it, other languages' JSON readers lose digits."""
_RESERVED = "__metadata__"
_KEY_TAGS = {"tuple", "int", "float", "complex"}
"""Of a dict's keys, beside what JSON has."""


class Leaf(NamedTuple):
    """One tensor to be stored, or a part of one."""

    name: str
    """In the data file."""
    dtype: DType
    shape: tuple[int, ...]
    """Of what is stored here."""
    kind: Kind
    source: Any
    """The tensor, array or bytes itself."""
    num_bytes: int
    global_shape: tuple[int, ...] | None = None
    """Of the whole tensor, if this may be a part of one."""
    start: tuple[int, ...] | None = None
    """Likewise, where in it the part begins."""
    part_of: str = ""
    """The whole tensor's name, where it is another: several parts of one tensor are named `name#0`, `name#1`, …"""

    @property
    def tensor(self) -> str:
        """The name in the structure and in the manifest."""
        return self.part_of or self.name


@dataclass(frozen=True, slots=True)
class Flat:
    structure: Node
    leaves: list[Leaf]

    @property
    def sharded(self) -> tuple[str, ...]:
        """The tensors of which these leaves may be parts only, each once."""
        return tuple(dict.fromkeys(leaf.tensor for leaf in self.leaves if leaf.global_shape is not None))


def is_text(value: str) -> bool:
    """Strings of undecodable bytes (as file names may be) have no place in JSON."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def flatten(state: Any) -> Flat:
    """
    Raises:
        InvalidArgument: Something in it cannot be stored; the message says where it is and what it is.
    """
    flattener = _Flattener()
    structure = flattener.node(state, ())
    return Flat(structure, flattener.finished())


def unflatten(structure: Node, tensor: Callable[[str, Kind], Any]) -> Any:
    """`tensor` gives what is stored under a name, as a kind; asked once for each name.

    Raises:
        CheckpointInvalid: The structure is not one that `flatten` makes.
    """
    return _Builder(tensor).build(structure, 0)


def names_in(structure: Node) -> list[str]:
    """The tensors that a structure refers to, each once, in order."""
    found: dict[str, None] = {}
    _Builder(lambda name, _kind: found.setdefault(name)).build(structure, 0)
    return list(found)


def leaves_in(structure: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """The tensors of a structure that `names_in` accepts, in order, each with the keys that lead to it."""
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
    """The structure with other names for some tensors; what need not change is shared with the old one."""
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
    """The structure without tensors that are not wanted, nor the dicts that only held these. None: nothing is left."""
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


# -- taking apart --------------------------------------------------------------------------------------------------

Path = tuple[str, ...]


class _Flattener:
    def __init__(self) -> None:
        self._leaves: dict[str, list[Leaf]] = {}
        """By the tensor's name; none, where another rank writes it. Names must not depend on what this rank holds."""
        self._by_identity: dict[tuple[Any, ...], str] = {}
        """What makes two tensors the same memory → the name it is stored under."""
        self._alive: list[Any] = []
        """What is known by its id and not held by its leaf: a freed id would be given to another."""
        self._modules: tuple[Any, ...] = tuple(sys.modules.get(name) for name in ("torch", "numpy", "jax"))
        """Those that are not loaded have no tensors in the state."""
        torch_module = self._modules[0]
        self._plain_types = (torch_module.Tensor, torch_module.nn.Parameter) if torch_module is not None else ()
        """Nearly all tensors are of these, and need not be asked what else they are."""
        self._torch_dtypes: dict[torch.dtype, DType] = {}

    def node(self, value: Any, path: Path) -> Node:
        if len(path) > MAX_DEPTH:
            raise InvalidArgument(f"{_at(path)} is nested deeper than {MAX_DEPTH}; is it part of itself?")
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
        """A scalar, or None if it is none."""
        kind = type(value)
        if kind is str:
            if not is_text(value):
                raise InvalidArgument(f"{value!r} holds what is not Unicode; save it as bytes", field="state")
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
            f"a key of {_at(path)} is a {type(key).__name__}; keys may be strings, numbers or tuples of them"
        )

    def _array(self, value: Any, path: Path) -> Node:
        torch_module, numpy, jax = self._modules
        if torch_module is not None and isinstance(value, torch_module.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Shard):
            return self._shard(value, path)
        if numpy is not None and isinstance(value, numpy.ma.MaskedArray):
            raise InvalidArgument(f"{_at(path)} is a masked array; save its data and its mask", field=".".join(path))
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
            f"{_at(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold; "
            "save tensors, arrays, bytes, and dicts, lists and tuples of them with plain numbers and strings",
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
                f"{_at(path)} is a Shard of a {type(local).__module__}.{type(local).__qualname__}; it holds a torch "
                "tensor, a numpy array or a JAX array that lies here alone (others know their places themselves)",
                field=".".join(path),
            )
        self._alive.append(shard)
        dtype = dtype or dtypes.of_numpy(local.dtype, _at(path))
        held = Held(shard.shape, [Piece(shard.start, local)])
        return self._parts(path, dtype, kind, held, identity=(*memory, shard.shape, shard.start))  # type: ignore[arg-type]  # one of two literals

    def _parts(self, path: Path, dtype: DType, kind: Kind, held: Held, *, identity: tuple[Any, ...]) -> Node:
        """Empty parts are left out, unless all of the tensor is empty."""
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
                f"{_at(path)} is a ShardedTensor; let the state dict hold DTensors, or wrap its parts into Shard(…)"
            )
        if value.is_nested:
            raise InvalidArgument(f"{_at(path)} is a nested tensor; save its values() and offsets()")
        if value.layout is not self._modules[0].strided:
            raise InvalidArgument(f"{_at(path)} is a sparse tensor; save its indices and values, or to_dense()")
        if value.is_quantized:
            raise InvalidArgument(f"{_at(path)} is a quantized tensor; save its int_repr(), scale and zero point")
        if value.is_meta:
            raise InvalidArgument(f"{_at(path)} is on the meta device: it has a shape and no contents")
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
            raise InvalidArgument(f"the path {name[:80]}… is longer than {MAX_NAME_BYTES} bytes; use shorter keys")
        candidate, number = name, 2
        while candidate in self._leaves or candidate == _RESERVED:  # "a.b" may be one key, or two
            candidate, number = f"{name}#{number}", number + 1
        return candidate

    def finished(self) -> list[Leaf]:
        """Parts get names of their own last, when it is known which are free."""
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
    done: torch.Tensor = local.wait() if hasattr(local, "wait") else local  # a collective may be under way
    return done


def _at(path: Iterable[str]) -> str:
    return ".".join(path) or "the state"


# -- putting together ----------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, tensor: Callable[[str, Kind], Any]) -> None:
        self._tensor = tensor
        self._built: dict[tuple[str, Kind], Any] = {}

    def build(self, node: Node, depth: int, *, is_key: bool = False) -> Any:
        if depth > MAX_DEPTH + 2:
            raise CheckpointInvalid(f"the structure is nested deeper than {MAX_DEPTH}")
        if node is None or isinstance(node, bool | str | int | float):
            return node
        if not isinstance(node, dict):
            raise CheckpointInvalid(f"the structure holds a bare {type(node).__name__}")
        if is_key and not node.keys() <= _KEY_TAGS:
            raise CheckpointInvalid("a dict of the structure has a key that cannot be one")
        if "tensor" in node:
            return self._leaf(node)
        if len(node) != 1:
            raise CheckpointInvalid(f"a node of the structure has the tags {', '.join(sorted(node))}; one is expected")
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
                    f"the structure has the tag {tag!r}, which is not known; was it written by a newer version?"
                )

    def _mapping(self, tag: str, pairs: Sequence[Any], depth: int) -> dict[Any, Any]:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise CheckpointInvalid("a dict of the structure has an entry that is not a pair")
        items = [(self.build(key, depth + 1, is_key=True), self.build(value, depth + 1)) for key, value in pairs]
        built = OrderedDict(items) if tag == "odict" else dict(items)
        if len(built) != len(items):
            raise CheckpointInvalid("a dict of the structure has a key twice")
        return built

    def _leaf(self, node: dict[str, Any]) -> Any:
        name, kind = node["tensor"], node.get("as")
        if not isinstance(name, str) or kind not in ("torch", "numpy", "jax", "scalar", "bytes"):
            raise CheckpointInvalid(f"the structure refers to the tensor {name!r} as {kind!r}, which is not known")
        if (name, kind) not in self._built:
            self._built[name, kind] = self._tensor(name, kind)
        return self._built[name, kind]


def _number(tag: str, value: Any) -> Any:
    try:
        if tag == "int":
            return int(value)  # Python itself refuses thousands of digits
        if tag == "float":
            return float(value)
        real, imaginary = (part if isinstance(part, float | int) else float(part["float"]) for part in value)
        return complex(real, imaginary)
    except (TypeError, ValueError, KeyError):
        raise CheckpointInvalid(f"the structure holds an {tag} that is none: {str(value)[:40]!r}") from None
