"""Find the embedding tables of a plain module that torchrec shards, and stand in for them on a worker.

torchrec shards collections of bags (`EmbeddingBagCollection`), which take a KeyedJaggedTensor. An `nn.Embedding` is a
collection of one table whose bags hold one id each, and an `nn.EmbeddingBag` one with its own bags; their stand-ins
convert ids into a KeyedJaggedTensor. A stand-in has no parameters, so that everything that remains in the module is the
dense part.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WEIGHT = "weight"
"""Name of the table of an `nn.Embedding` or `nn.EmbeddingBag`, as in a plan of torchrec."""
BAGS = "embedding_bags"
"""Attribute of an `EmbeddingBagCollection` with one `nn.EmbeddingBag` for each table."""
MEAN_CURE = (
    "its bags are means, which torchrec does not compute as one process does on several CPU workers; use sums with "
    "weights, or ParameterServer()"
)
_MODULES = "torchrec.modules.embedding_modules"


@dataclass(frozen=True, slots=True)
class Collection:
    """A module whose tables torchrec shards together."""

    place: str
    module: Any
    is_plain: bool
    """Whether it is an embedding of torch, with one table."""

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """The weights by table."""
        if self.is_plain:
            return {WEIGHT: self.module.weight}
        return {name: bag.weight for name, bag in getattr(self.module, BAGS).items()}

    def parameter_name(self, table: str) -> str:
        """Return the name of a table's weights in the module, as in `named_parameters`."""
        return f"{self.place}.{WEIGHT}" if self.is_plain else f"{self.place}.{BAGS}.{table}.{WEIGHT}"

    def put(self, table: str, weight: nn.Parameter) -> None:
        """Replace the weights of a table."""
        (self.module if self.is_plain else getattr(self.module, BAGS)[table]).weight = weight


def is_collection(module: nn.Module) -> bool:
    """Return whether a module is an `EmbeddingBagCollection`. If torchrec is not imported, none is."""
    modules = sys.modules.get(_MODULES)
    return modules is not None and isinstance(module, modules.EmbeddingBagCollection)


def find(module: nn.Module, names: Sequence[str] | None, *, min_bytes: int, plan: Any = None) -> list[Collection]:
    """Return the collections to shard: those of a plan, those with these names, or all with a table above a size.

    Raises:
        InvalidArgument: A name matches nothing, nothing is left, or a collection cannot be sharded.
    """
    every = _collections(module)
    if plan is not None:
        names = list(plan.plan)
    if names is None:
        chosen = [each for each in every if any(one.nbytes >= min_bytes for one in each.tables.values())]
        if not chosen:
            raise InvalidArgument(
                f"no embedding has {min_bytes} bytes or more, so torchrec would shard nothing; name the modules with "
                "TorchRec(tables=…), lower min_bytes=, or use AllReduce()",
                field="strategy",
            )
    else:
        chosen = [each for each in every if any(_matches(each, name) for name in names)]
        for name in names:
            if not any(_matches(each, name) for each in every):
                known = ", ".join(each.place for each in every) or "none"
                what = "tables=" if plan is None else "plan="
                raise InvalidArgument(f"{what} names {name!r}; the embeddings of the module are: {known}")
    users: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for each in chosen:
        _check(each, users)
    return chosen


def _collections(module: nn.Module) -> list[Collection]:
    found: list[Collection] = []
    inside: tuple[str, ...] = ()
    for place, each in module.named_modules():
        if inside and place.startswith(inside):
            continue
        if is_collection(each):
            found.append(Collection(place, each, is_plain=False))
            inside = (*inside, f"{place}." if place else "")
        elif isinstance(each, nn.Embedding | nn.EmbeddingBag):
            found.append(Collection(place, each, is_plain=True))
    return found


def _matches(each: Collection, name: str) -> bool:
    return fnmatchcase(each.place, name) or any(fnmatchcase(each.parameter_name(table), name) for table in each.tables)


def _check(each: Collection, users: Mapping[int, Sequence[str]]) -> None:
    if not each.place:
        raise InvalidArgument(
            "the module is itself an embedding; wrap it in another module, for example nn.Sequential",
            field="module",
        )
    own = {each.parameter_name(table) for table in each.tables}
    for table, weight in each.tables.items():
        name = each.parameter_name(table)
        if not weight.requires_grad:
            raise _refusal(name, "its weights are frozen; leave it in the workers with tables= or min_bytes=")
        if weight.dtype != torch.float32:
            raise _refusal(name, f"its weights are {weight.dtype}, and only float32 is supported")
        tied = [other for other in users[id(weight)] if other != name]
        if tied:
            cure = "use ParameterServer(), or one EmbeddingBagCollection table with several feature_names"
            where = "another table of the collection" if tied[0] in own else tied[0]
            raise _refusal(name, f"its weights are tied to {where}; {cure}")
    (_check_plain if each.is_plain else _check_collection)(each.place, each.module)


def _check_collection(place: str, module: Any) -> None:
    if type(module).__name__ != "EmbeddingBagCollection":
        raise _refusal(place, f"it is a {type(module).__name__}; only EmbeddingBagCollection itself works")
    means = [config.name for config in module.embedding_bag_configs() if config.pooling.name == "MEAN"]
    if means:
        raise _refusal(f"{place}.{means[0]}", MEAN_CURE)


def _check_plain(place: str, embedding: Any) -> None:
    if type(embedding) not in (nn.Embedding, nn.EmbeddingBag):
        raise _refusal(
            place,
            f"it is a {type(embedding).__name__}, whose own forward would be lost; use ParameterServer(), or leave it "
            "in the workers with tables=",
        )
    if embedding.max_norm is not None:
        raise _refusal(place, "max_norm changes rows in a forward pass; leave it out")
    if embedding.scale_grad_by_freq:
        raise _refusal(place, "scale_grad_by_freq needs the counts of the whole batch; leave it out")
    if isinstance(embedding, nn.EmbeddingBag):
        if embedding.mode == "max":
            raise _refusal(place, "torchrec has no bags with mode='max'; use 'sum', or ParameterServer()")
        if embedding.mode == "mean":
            raise _refusal(place, MEAN_CURE)
        return
    padding = embedding.padding_idx
    if padding is not None and not embedding.weight.is_meta and bool(embedding.weight[padding].any()):
        raise _refusal(place, f"row {padding}, its padding_idx, is not zero; set it to zero")


def _refusal(name: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"torchrec cannot shard {name}: {reason}", field="module")


# -- what stands in for them ---------------------------------------------------------------------------------------


class Tables(Protocol):
    """The sharded tables of one collection."""

    def pooled(self, features: Any) -> Any:
        """Return the KeyedTensor for a KeyedJaggedTensor. Collective."""
        ...


class CollectionStandIn(nn.Module):
    """Stands for an `EmbeddingBagCollection`."""

    def __init__(self, collection: Collection, tables: Tables) -> None:
        super().__init__()
        self._tables = tables
        self._configs = collection.module.embedding_bag_configs()
        self._is_weighted = collection.module.is_weighted()

    def forward(self, features: Any) -> Any:
        return self._tables.pooled(features)

    def embedding_bag_configs(self) -> Any:
        return self._configs

    def is_weighted(self) -> bool:
        return bool(self._is_weighted)


class EmbeddingStandIn(nn.Module):
    """Stands for an `nn.Embedding`: each id is a bag, which is empty if the id is the padding."""

    def __init__(self, collection: Collection, tables: Tables) -> None:
        super().__init__()
        embedding: nn.Embedding = collection.module
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self._tables = tables

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, which callers may use
        ids = input.reshape(-1).long()
        lengths = torch.ones_like(ids)
        if self.padding_idx is not None:
            is_kept = ids != self.padding_idx
            ids, lengths = ids[is_kept], is_kept.long()
        found: Tensor = self._tables.pooled(_features(ids, lengths)).values()
        return found.view(*input.shape, self.embedding_dim)


class BagStandIn(nn.Module):
    """Stands for an `nn.EmbeddingBag`."""

    def __init__(self, collection: Collection, tables: Tables) -> None:
        super().__init__()
        bag: nn.EmbeddingBag = collection.module
        self.num_embeddings = bag.num_embeddings
        self.embedding_dim = bag.embedding_dim
        self.padding_idx = bag.padding_idx
        self.include_last_offset = bag.include_last_offset
        self._tables = tables

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name, which callers may use
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        if per_sample_weights is not None:
            raise InvalidArgument(
                "per_sample_weights does not work for an nn.EmbeddingBag that torchrec shards; use an "
                "EmbeddingBagCollection with is_weighted=True",
                field="module",
            )
        ids = input.reshape(-1).long()
        if offsets is None:
            lengths = torch.full((input.shape[0],), input.shape[1], dtype=torch.long)
        else:
            ends = offsets if self.include_last_offset else torch.cat([offsets, offsets.new_tensor([len(ids)])])
            lengths = torch.diff(ends).long()
        if self.padding_idx is not None:
            is_kept = ids != self.padding_idx
            bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            ids, lengths = ids[is_kept], torch.bincount(bags[is_kept], minlength=len(lengths))
        found: Tensor = self._tables.pooled(_features(ids, lengths)).values()
        return found


def stand_in(collection: Collection, tables: Tables) -> nn.Module:
    """Return what stands for the module of a collection."""
    if not collection.is_plain:
        return CollectionStandIn(collection, tables)
    kind = BagStandIn if isinstance(collection.module, nn.EmbeddingBag) else EmbeddingStandIn
    return kind(collection, tables)


def _features(ids: Tensor, lengths: Tensor) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: PLC0415 - slow to import

    return KeyedJaggedTensor([WEIGHT], ids, lengths=lengths)
