"""The id program of a module: the part of its forward pass that computes the ids of its lookups.

A worker runs it before the forward pass, so that one pull fetches the rows of all tables, and so that the rows of the
next batches can be prefetched. It is built by tracing the module with `torch.fx`. Dense layers are neither run nor
traced: a submodule without a lookup is traced only if ids depend on it.

Plain `torch.fx` stops at the first `if`. The tracer here therefore carries, beside each symbolic value, the value that
it has for the batch at hand. A condition becomes a *decision* of the traced *path*, and the path checks its decisions
whenever it runs. A batch that decides differently gets a path of its own. Only what follows from inputs and buffers has
a value. The rows of lookups, parameters and random numbers have none: they *taint* what is computed from them, and the
ids of a program cannot be tainted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._pytree import tree_leaves

from strata.errors import StrataError
from strata.trainer.strategy.lookup import BagLookup, Lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from strata.trainer.strategy.base import Arguments

MAX_PATHS = 64
"""Paths of one program. A module that needs more decides by values that differ from batch to batch."""
MAX_GUESSES = 16
"""Ways through a forward pass to compare where conditions depend on dense values."""

_LOOKUPS = (Lookup, BagLookup)
_LEAF = "leaf"
_METADATA = frozenset({"shape", "ndim", "dtype", "device", "layout", "is_cpu", "is_cuda", "is_sparse"})
_METADATA_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point"})
"""What is known of a tensor without its elements, and so of a parameter too."""
_IN_PLACE = {
    f"__{name}__": getattr(operator, name)
    for name in ("iadd", "iand", "ifloordiv", "imod", "imul", "ior", "ipow", "isub", "itruediv", "ixor")
}
_SIZED = ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
"""Functions that torch does not dispatch if only their size is symbolic."""
_RANDOM_COMPOSITES = frozenset({"gumbel_softmax", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"})
_tracing = threading.Lock()
"""A trace patches `nn.Module`, so a process makes one at a time."""


class NotTraceable(StrataError):
    """The ids of a module's lookups cannot be computed before its forward pass; the message gives the reason."""


class IdProgram:
    """Computes the ids of all lookups of a module, without running its dense layers.

    Paths are traced when a batch first needs them, so any call may raise `NotTraceable`. Plain attributes of modules,
    such as a number of buckets, are constants of a path; buffers are read in every call. A trace calls forward with
    symbolic values in the calling thread and then undoes what it has assigned to attributes, so no other thread should
    run the same module meanwhile.
    """

    def __init__(self, module: nn.Module) -> None:
        self._entry = _Entry(_unwrapped(module))
        modules = list(self._entry.module.modules())
        self._opened = {each for each in modules if any(isinstance(part, _LOOKUPS) for part in each.modules())}
        """The modules to trace: those with lookups, and those on which ids have turned out to depend."""
        self._modal = [each for each in modules if each in self._opened or not _is_of_torch(each)]
        self._paths: dict[Any, list[_Path]] = {}
        """By the structure of the arguments and the modes of the modules."""
        self._recent: dict[Any, _Path] = {}
        self._refusals: dict[Any, str] = {}

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the program of a module in which lookups stand for embeddings. Tracing begins with the first call."""
        return cls(module)

    def of_batch(self, batch: Arguments) -> list[tuple[str, Tensor]]:
        """Return the table and the ids of each lookup that `batch.call(module)` will make."""
        found: list[tuple[str, Tensor]] = batch.call(self)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> list[tuple[str, Tensor]]:
        """Return the table and the ids of each lookup that `module(*args, **kwargs)` will make, in the same order.

        Raises:
            NotTraceable: The ids are not known before the forward pass.
        """
        if not self._opened:
            return []
        leaves: list[Any] = []
        structure = _flatten((args, kwargs), leaves)
        key = structure, tuple(each.training for each in self._modal)
        paths = self._paths.get(key, [])
        path = self._recent.get(key)
        for _ in range(len(paths)):
            if path is None:
                break
            try:
                found = path.ids(self._entry, leaves)
            except _OtherPath as other:
                path = path.sibling(paths, other)
            else:
                self._recent[key] = path
                return found
        path = self._recent[key] = self._new_path(key, leaves)
        self._paths.setdefault(key, []).append(path)
        return path.ids(self._entry, leaves)

    def _new_path(self, key: Any, leaves: list[Any]) -> _Path:
        if key in self._refusals:
            raise NotTraceable(self._refusals[key])
        if sum(map(len, self._paths.values())) + len(self._refusals) >= MAX_PATHS:
            raise NotTraceable(
                f"forward has taken {MAX_PATHS} different ways for as many batches: it decides by values that change "
                "from batch to batch, such as int(x.max()) or a list of ids"
            )
        try:
            with _tracing, _preserved(self._entry.module):
                self._entry.structure = key[0]
                return self._explore(leaves)
        except NotTraceable as refusal:
            self._refusals[key] = refusal.message
            raise

    def _explore(self, leaves: list[Any]) -> _Path:
        """Trace all outcomes of conditions on dense values, which are unknown; all must make the same lookups."""
        numbers: dict[Any, int] = {}
        found: list[tuple[_Tracer, tuple[int, ...]]] = []
        errors: list[Exception] = []
        pending: list[tuple[bool, ...]] = [()]
        while pending:
            guesses = pending.pop()
            tracer = _Tracer(self._opened, leaves, guesses)
            try:
                tracer.trace(self._entry)
                found.append((tracer, tracer.signature(numbers)))
            except _Stop as stop:
                if stop.module is None:
                    raise NotTraceable(stop.reason) from None
                self._opened.add(stop.module)
                return self._explore(leaves)
            except StrataError as error:
                errors.append(error)
            except Exception as error:  # whatever the user's forward raises
                if isinstance(error, TraceError) or not isinstance(error, AssertionError | ValueError | RuntimeError):
                    raise NotTraceable(tracer.describe(error)) from error
                errors.append(NotTraceable(tracer.describe(error)))
            made = tracer.guesses
            pending += [(*made[:at], not made[at]) for at in range(len(guesses), len(made))]
            if len({signature for _, signature in found}) > 1:
                raise NotTraceable(f"forward decides by {tracer.guess_reason} which lookups it makes")
            if len(found) + len(errors) > MAX_GUESSES:
                raise NotTraceable(f"forward decides by {tracer.guess_reason} in more than {MAX_GUESSES} ways")
        if not found:  # the forward pass will raise the same error
            raise errors[0]
        return found[0][0].path()


class _Entry(nn.Module):
    """Calls the module with symbolic values; a path reads buffers through it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.structure: Any = None

    def forward(self, leaves: Any) -> None:
        args, kwargs = _unflatten(self.structure, (leaves[at] for at in itertools.count()))
        self.module(*args, **kwargs)


class _Path:
    """A straight-line program for the batches with the same decisions."""

    def __init__(self, run: Callable[..., Sequence[Tensor]], tables: Sequence[str], decisions: tuple[Any, ...]) -> None:
        self._run = run
        self._tables = tables
        self._decisions = decisions

    def ids(self, entry: _Entry, leaves: list[Any]) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            return list(zip(self._tables, self._run(entry, leaves), strict=True))

    def sibling(self, paths: Sequence[_Path], other: _OtherPath) -> _Path | None:
        """Return the path that agrees with this one up to a decision, and there decides as the batch does."""
        wanted = (*self._decisions[: other.at], other.found)
        return next((path for path in paths if path._decisions[: len(wanted)] == wanted), None)


class _OtherPath(Exception):
    """A batch decides differently than the path that runs."""

    def __init__(self, at: int, found: Any) -> None:
        super().__init__(at, found)
        self.at = at
        self.found = found


def _expect(found: Any, expected: Any, at: int) -> None:
    if found != expected:
        raise _OtherPath(at, found)


def _ids(found: Tensor) -> Tensor:
    """Mark the ids of a lookup in a graph."""
    return found


def _unknown(*_: Any) -> None:
    """Stand for a call that a program never makes."""


class _Stop(BaseException):
    """Ends a trace. Not an `Exception`, which the module might catch."""

    def __init__(self, reason: str, module: nn.Module | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.module = module
        """Trace again, into this one too."""


@dataclass(frozen=True, slots=True)
class _Taint:
    """Why a value is unknown before the forward pass."""

    reason: str
    module: nn.Module | None = None
    """The submodule that was not traced, and that returned the value."""
    is_dense: bool = True
    """Whether tracing into the submodule cannot help, because its own inputs are tainted."""


class _Value(fx.Proxy):
    """A symbolic value. What Python needs to know of it becomes a decision of the path."""

    tracer: _Tracer

    def __getattr__(self, name: str) -> Any:
        return self.tracer.attribute(self, name)

    def __len__(self) -> int:
        return int(self.tracer.decide(self, len))

    def __index__(self) -> int:
        return int(self.tracer.decide(self, operator.index))

    def __int__(self) -> int:
        return int(self.tracer.decide(self, int))

    def __float__(self) -> float:
        return float(self.tracer.decide(self, float))

    def __hash__(self) -> int:
        is_number = isinstance(self.tracer.values.get(self.node), int | float)
        return hash(self.tracer.decide(self, _same)) if is_number else id(self)

    def __contains__(self, item: Any) -> bool:
        return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))

    def __setitem__(self, item: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, item, value), {})


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[_Value, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _function in _IN_PLACE.items():
    setattr(_Value, _name, _in_place(_function))


class _Attribute(_Value):
    """An attribute or a method of an unknown value."""

    def __init__(self, root: _Value, name: str) -> None:
        self.root = root
        self.name = name
        self.tracer = root.tracer

    @functools.cached_property
    def node(self) -> fx.Node:  # type: ignore[override]
        found: fx.Node = self.tracer.create_proxy("call_function", getattr, (self.root, self.name), {}).node
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.name, (self.root, *args), kwargs)


class _Recording(TorchFunctionMode):
    """Records the calls of torch that have no symbolic argument, such as `torch.arange(8)` or `torch.rand(8)`."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_symbolic = any(issubclass(each, fx.Proxy) for each in types)
        is_setting = name.startswith("_") and not name.startswith("__")  # such as `_set_grad_enabled`
        if is_symbolic or is_setting or self._tracer.is_evaluating or name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if is_tensor_method_or_property(func):
            found = self._tracer.create_proxy("call_method", name, args, kwargs)
        else:
            found = self._tracer.create_proxy("call_function", func, args, kwargs)
        value = self._tracer.values.get(found.node) if isinstance(found, fx.Proxy) else found
        is_constant = value is not None and not any(isinstance(each, Tensor) for each in tree_leaves(value))
        return value if is_constant else found


class _Tracer(fx.Tracer):
    """Traces a module for one batch, whose tensors are `leaves`."""

    def __init__(self, opened: set[nn.Module], leaves: list[Any], guesses: tuple[bool, ...]) -> None:
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        """What is known for this batch."""
        self.is_evaluating = False
        self.guesses: list[bool] = []
        """Outcomes of conditions on tainted values: the given ones first, then False."""
        self.guess_reason = "dense values"
        self._given_guesses = guesses
        self._opened = opened
        self._leaves = leaves
        self._taints: dict[fx.Node, _Taint] = {}
        self._spoiled: dict[int, _Taint] = {}
        """Memory that a traced call would have changed although it is not the program's own."""
        self._foreign = {_memory(each) for each in tree_leaves(leaves) if isinstance(each, Tensor)}
        self._fixed: set[fx.Node] = set()
        """Values that are the same for all batches."""
        self._kept: list[fx.Node] = []
        """Checks, ids and changes of the program's own tensors, in their order."""
        self._decisions: list[Any] = []
        self._tables: list[str] = []
        self._buffers: dict[str, Any] = {}
        self._thread = threading.get_ident()
        self._failed_in = ""

    # -- what the module does ------------------------------------------------------------------------------------------

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._names = {id(each): name for name, each in root.named_parameters(remove_duplicate=False)}
        self._names |= {id(each): name for name, each in root.named_buffers(remove_duplicate=False)}
        self._modules = {each: _plain(name) for name, each in root.named_modules()}
        with _Recording(self), self._patched():
            return super().trace(root, concrete_args)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Let symbolic values be sizes of new tensors, and be assigned to buffers; `_preserved` removes them again."""
        assign: Any = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if not isinstance(value, fx.Proxy):
                assign(module, name, value)
                return
            if isinstance(before := {**module._parameters, **module._buffers}.get(name), Tensor):
                self._spoiled[_memory(before)] = _Taint("a buffer that forward changes")
            module.__dict__[name] = value

        def sized(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if any(isinstance(each, fx.Proxy) for each in tree_leaves(args)):
                    return self.create_proxy("call_function", function, args, kwargs)
                return function(*args, **kwargs)

            return call

        originals = {(torch, name): getattr(torch, name) for name in _SIZED}
        patches = {place: sized(each) for place, each in originals.items()}
        for (owner, name), patch in (patches | {(nn.Module, "__setattr__"): set_attribute}).items():
            setattr(owner, name, patch)
        try:
            yield
        finally:
            for (owner, name), original in (originals | {(nn.Module, "__setattr__"): assign}).items():
                setattr(owner, name, original)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._thread != threading.get_ident():  # another thread runs a module while its class is patched
            return forward(*args, **kwargs)
        name = self._modules.get(m, "")
        if isinstance(m, _LOOKUPS):
            return self._call_lookup(m, name, args[0] if args else kwargs["input"])
        if m in self._opened:
            try:
                return forward(*args, **kwargs)
            except Exception:
                self._failed_in = self._failed_in or name
                raise
        inputs = [each.node for each in tree_leaves((args, kwargs)) if isinstance(each, fx.Proxy)]
        is_dense = any(node in self._taints for node in inputs)
        layer = f"{name or 'a layer'} ({type(m).__name__})"
        return self._tainted(_Taint(f"the output of {layer}", None if _is_dense_layer(m) else m, is_dense))

    def _call_lookup(self, lookup: Any, name: str, ids: Any) -> _Value:
        node = self.create_arg(ids)
        if not isinstance(node, fx.Node):
            raise _Stop(f"the ids of lookup {name or lookup.table!r} are a {type(ids).__name__}, not a tensor")
        taint = self._taints.get(node)
        if taint is not None:
            raise _Stop(
                f"the ids of lookup {name or lookup.table!r} are not known before the forward pass: they depend on "
                f"{taint.reason}",
                taint.module,
            )
        self._kept.append(super().create_node("call_function", _ids, (node,), {}))
        self._tables.append(lookup.table)
        return self._tainted(_Taint(f"the rows of table {lookup.table!r}"))

    def _tainted(self, taint: _Taint) -> _Value:
        node = super().create_node("call_function", _unknown, (), {})
        self._taints[node] = taint
        return self.proxy(node)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:  # noqa: ARG002 - of torch
        """Return a symbolic value for a parameter or a buffer, so that a path reads it in every call."""
        name = self._names.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None or self.is_evaluating or self._thread != threading.get_ident():
            return attr_val
        if name not in self._buffers:
            self._buffers[name] = self.create_proxy("get_attr", name, (), {})
        return self._buffers[name]

    # -- what happens to values ----------------------------------------------------------------------------------------

    def proxy(self, node: fx.Node) -> _Value:
        return _Value(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        found = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        value = self.values.get(found.node, found)
        if value is None and target is operator.setitem:
            return None
        if value is None or isinstance(value, str):  # Python compares these with `is` and looks them up in dictionaries
            return self.decide(found, _same)
        return found

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        if kind != "output":
            with self._evaluating():
                self._evaluate(node)
        return node

    def attribute(self, value: _Value, name: str) -> Any:
        node = value.node
        if node in self.values:
            with self._evaluating():
                found = getattr(self.values[node], name)
            if callable(found):
                return _Attribute(value, name)
            return self.create_proxy("call_function", getattr, (value, name), {})
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(value, name)

    def to_bool(self, obj: Any) -> bool:
        return bool(self.decide(obj, bool))

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[at] for at in range(len(obj))])

    def decide(self, value: fx.Proxy, function: Callable[[Any], Any]) -> Any:
        """Return a plain value; the path is then for batches that have the same."""
        node = value.node
        taint = self._taints.get(node)
        is_length = function is len and node in self.values
        if taint is not None and not is_length:
            return self._guess(taint, function)
        with self._evaluating():
            found = function(self.values[node])
        if node not in self._fixed and not (is_length and node.op == "get_attr"):
            asked = super().create_node("call_function", function, (node,), {})
            self._kept.append(super().create_node("call_function", _expect, (asked, found, len(self._decisions)), {}))
            self._decisions.append(found)
        return found

    def _guess(self, taint: _Taint, function: Callable[[Any], Any]) -> bool:
        if taint.module is not None and not taint.is_dense:
            raise _Stop(taint.reason, taint.module)
        self.guess_reason = taint.reason
        if function is not bool:
            raise _Stop(f"forward needs {function.__name__}() of a value that depends on {taint.reason}")
        at = len(self.guesses)
        self.guesses.append(at < len(self._given_guesses) and self._given_guesses[at])
        return self.guesses[-1]

    def _evaluate(self, node: fx.Node) -> None:
        """Compute the value of a new node, or find out why it is unknown."""
        taint = self._read(node) if node.op == "get_attr" else self._call(node)
        value = self.values.get(node)
        if taint is None and isinstance(value, Tensor):
            taint = self._spoiled.get(_memory(value))
        if taint is not None:
            self._taints[node] = taint

    def _read(self, node: fx.Node) -> _Taint | None:
        name = str(node.target)
        value = self.values[node] = operator.attrgetter(name)(self.root)
        self._foreign.add(_memory(value))
        return _Taint(f"the parameter {_plain(name)}") if isinstance(value, nn.Parameter) else None

    def _call(self, node: fx.Node) -> _Taint | None:
        taint = self._taint_of(node)
        argument = _changed_argument(node)
        if argument is not None and isinstance(changed := self.values.get(argument), Tensor):
            taint = self._spoil(_memory(changed), taint)
            if taint is None:
                self._kept.append(node)
        if taint is None:
            self.values[node] = self._run(node)
        inputs = node.all_input_nodes
        if inputs and all(each in self._fixed or (each.op == "get_attr" and _reads_metadata(node)) for each in inputs):
            self._fixed.add(node)
        return taint

    def _taint_of(self, node: fx.Node) -> _Taint | None:
        if _is_random(node):
            return _Taint("random numbers")
        if _reads_metadata(node) and all(each in self.values for each in node.all_input_nodes):
            return None
        return next((self._taints[each] for each in node.all_input_nodes if each in self._taints), None)

    def _spoil(self, memory: int, taint: _Taint | None) -> _Taint | None:
        """Taint the tensors in memory that a call changes, if the program may not make this call."""
        if taint is None and memory in self._foreign:
            taint = _Taint("a tensor that forward changes in place, and that is not its own")
        if taint is not None:
            self._spoiled[memory] = taint
            shared = [
                node for node, each in self.values.items() if isinstance(each, Tensor) and _memory(each) == memory
            ]
            self._taints |= dict.fromkeys(shared, taint)
        return taint

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._leaves
        args: Any = map_arg(node.args, self.values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self.values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was, self.is_evaluating = self.is_evaluating, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_evaluating = was

    # -- the result ----------------------------------------------------------------------------------------------------

    def signature(self, numbers: dict[Any, int]) -> tuple[int, ...]:
        """Return numbers that are the same for graphs that make the same checks and lookups."""
        known: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            arguments = repr(map_arg((node.args, node.kwargs), known.get))
            known[node] = numbers.setdefault((node.op, node.target, arguments), len(numbers))
        return tuple(known[node] for node in self._kept)

    def path(self) -> _Path:
        """Compile what the checks and the ids need, and nothing else."""
        found = [node for node in self._kept if node.target is _ids]
        if len(found) + len(self._decisions) < len(self._kept):  # ids that a later call may change
            for node in found:
                node.target = torch.clone
        needed, pending = set(self._kept), list(self._kept)
        while pending:
            inputs = [each for each in pending.pop().all_input_nodes if each not in needed]
            needed.update(inputs)
            pending += inputs
        for node in needed:  # the program may run several batches ahead of the forward pass
            if node.op == "get_attr" and _memory(self.values[node]) in self._spoiled:
                raise NotTraceable(f"ids depend on the buffer {_plain(node.target)}, which forward changes")
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                node.args = (tuple(found),)
            elif node.op != "placeholder" and node not in needed:
                self.graph.erase_node(node)
        compiled: Any = type(fx.GraphModule(self.root, self.graph, "IdProgram"))
        return _Path(compiled.forward, self._tables, tuple(self._decisions))

    def describe(self, error: Exception) -> str:
        where = f"submodule {self._failed_in!r}" if self._failed_in else "the module"
        text = " ".join(str(error).split())
        return f"forward of {where} cannot be traced: {type(error).__name__}: {text}"


def _plain(name: Any) -> str:
    """Return a name as the user knows it, without the entry."""
    return str(name).removeprefix("module").removeprefix(".")


def _same(value: Any) -> Any:
    return value


def _memory(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share; empty tensors have different ones too."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _reads_metadata(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] in _METADATA
    return node.target is len or (node.op == "call_method" and node.target in _METADATA_METHODS)


def _changed_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that a call changes in place; None if there is none."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_operator = f"__{name}__" in _IN_PLACE or name in _IN_PLACE or name in ("setitem", "__setitem__")
    is_in_place = is_operator or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    found = node.args[0] if is_in_place and node.args else node.kwargs.get("out")
    return found if isinstance(found, fx.Node) else None


def _is_random(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _RANDOM_COMPOSITES or _draws(name)


@functools.cache
def _draws(name: str) -> bool:
    """Return whether a function of torch draws random numbers."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_dense_layer(module: nn.Module) -> bool:
    return _is_of_torch(module) and next(module.parameters(recurse=False), None) is not None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that the wrappers of torch call."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # `torch.compile`
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Append the tensors and numbers of nested containers to `leaves`; return the rest, which is hashable."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return _LEAF
    if isinstance(value, Mapping):
        return "dict", tuple(value), tuple([_flatten(each, leaves) for each in value.values()])
    is_text = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], str)  # a column of strings
    if isinstance(value, list | tuple) and not is_text and not isinstance(value, torch.Size):
        return type(value), tuple([_flatten(each, leaves) for each in value])
    if value is None or isinstance(value, str | bool):
        return "constant", value
    leaves.append(value)
    return _LEAF


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure == _LEAF:
        return next(leaves)
    kind, *rest = structure
    if kind == "constant":
        return rest[0]
    if kind == "dict":
        return dict(zip(rest[0], [_unflatten(each, leaves) for each in rest[1]], strict=True))
    children = [_unflatten(each, leaves) for each in rest[0]]
    return kind(*children) if hasattr(kind, "_fields") else kind(children)


@contextlib.contextmanager
def _preserved(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules and the random number generators.

    Raises:
        NotTraceable: The module counts calls or draws from a generator that cannot be traced.
    """
    modules = dict(module.named_modules())
    attributes = {name: dict(each.__dict__) for name, each in modules.items()}
    containers = [value for each in attributes.values() for value in each.values() if type(value) in (list, dict, set)]
    contents = [value.copy() for value in containers]
    generators = _generators()
    try:
        yield
    finally:
        for value, before in zip(containers, contents, strict=True):
            _restore(value, before)
        changed = [found for name, each in modules.items() for found in _restored(name, each, attributes[name])]
        drawn = [kind for kind, state in _generators().items() if state[1] != generators[kind][1]]
        random.setstate(generators["Python"][0])
        np.random.set_state(generators["numpy"][0])
        torch.set_rng_state(generators["torch"][0])
    if drawn:
        raise NotTraceable(f"forward draws random numbers from the generator of {drawn[0]}, on which ids may depend")
    if changed:
        raise NotTraceable(f"forward changes the attribute {changed[0]!r}, on which ids may depend; make it a buffer")


def _generators() -> dict[str, tuple[Any, Any]]:
    """Return the states of the random number generators, and the same in a form that can be compared."""
    python, numpy, ours = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    state: Any = numpy["state"]
    plain = state["pos"], state["key"].tobytes()
    return {"Python": (python, python), "numpy": (numpy, plain), "torch": (ours, ours.numpy().tobytes())}


def _restore(value: Any, before: Any) -> None:
    now, then = (list(each.items()) if isinstance(each, dict) else list(each) for each in (value, before))
    if isinstance(value, dict):
        is_same = len(now) == len(then) and all(a is c and b is d for (a, b), (c, d) in zip(now, then, strict=True))
    else:
        is_same = len(now) == len(then) and all(map(operator.is_, now, then))
    if not is_same:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(before)


def _restored(name: str, module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Restore the attributes of a module; return the names of those that held something else than a traced value."""
    found = []
    for attribute in {*module.__dict__, *before}:
        now = module.__dict__.get(attribute)
        if now is before.get(attribute):
            continue
        if not any(isinstance(each, fx.Proxy) for each in tree_leaves(now)):
            found.append(f"{name}.{attribute}".lstrip("."))
        if attribute in before:
            module.__dict__[attribute] = before[attribute]
        else:
            del module.__dict__[attribute]
    return found
