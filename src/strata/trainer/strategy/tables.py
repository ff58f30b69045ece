"""Find the embeddings of a plain module that move to parameter servers, replace them, and put their rows back."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from strata.errors import InvalidArgument
from strata.trainer.strategy.lookup import BagLookup, Lookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from strata.trainer.strategy.lookup import StepRows

DEFAULT_MIN_BYTES = 1 << 20
"""Smaller tables stay in the workers: all-reducing them costs less than a pull and a push."""


@dataclass(frozen=True, slots=True)
class FoundTable:
    """An embedding table of a module."""

    name: str
    """Of the parameter, as in `named_parameters`; the first one of tied weights."""
    weight: Tensor
    places: tuple[str, ...]
    """Names of the modules that use it; several if weights are tied."""

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def is_frozen(self) -> bool:
        """Whether its rows never change."""
        return not self.weight.requires_grad


def find(
    module: nn.Module, names: str | Sequence[str] | None = None, *, min_bytes: int = DEFAULT_MIN_BYTES
) -> list[FoundTable]:
    """Return the tables that move: those with these names (patterns such as `*.user`), or all above a size.

    Raises:
        InvalidArgument: A name matches no table, or a table cannot move; the message names the reason.
    """
    by_weight: dict[int, list[tuple[str, Any]]] = {}
    for place, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag):
            by_weight.setdefault(id(each.weight), []).append((place, each))
    tables = [
        FoundTable(f"{users[0][0]}.weight".lstrip("."), users[0][1].weight, tuple(place for place, _ in users))
        for users in by_weight.values()
    ]
    names = [names] if isinstance(names, str) else names
    if names is None:
        chosen = [table for table in tables if table.weight.nbytes >= min_bytes]
    else:
        chosen = [table for table in tables if any(_matches(table, name) for name in names)]
        for name in names:
            if not any(_matches(table, name) for table in tables):
                known = ", ".join(place for table in tables for place in table.places) or "none"
                raise InvalidArgument(f"tables= names {name!r}; the embeddings of the module are: {known}")
    others = dict(module.named_parameters(remove_duplicate=False))
    for table in chosen:
        users = dict(by_weight[id(table.weight)])
        _check(table, users, [name for name, each in others.items() if each is table.weight])
    return chosen


def _matches(table: FoundTable, name: str) -> bool:
    patterns = (name, f"{name}.embedding_bags.*")  # all tables of an EmbeddingBagCollection of torchrec
    return any(
        fnmatchcase(place, each) or fnmatchcase(f"{place}.weight", each) for place in table.places for each in patterns
    )


def _check(table: FoundTable, users: dict[str, Any], parameter_names: Sequence[str]) -> None:
    """
    Raises:
        InvalidArgument: The table cannot be on parameter servers.
    """
    for place, each in users.items():
        if each.max_norm is not None:
            raise _refusal(place, "max_norm changes rows in a forward pass; leave it out, or clip gradients")
        if each.scale_grad_by_freq:
            raise _refusal(place, "scale_grad_by_freq needs the counts of the whole batch; leave it out")
        if each.weight.dtype.itemsize != 4 or not each.weight.dtype.is_floating_point:
            raise _refusal(place, f"its weights are {each.weight.dtype}, and servers keep float32")
        if type(each) not in (nn.Embedding, nn.EmbeddingBag) and not hasattr(each, "on_servers"):
            raise _refusal(
                place,
                f"it is a {type(each).__name__}, whose own forward would be lost; give it a method on_servers(lookup) "
                "that returns a module with the same forward over the rows of the lookup",
            )
    tied = [name for name in parameter_names if name.rpartition(".")[0] not in users]
    if tied:
        raise _refusal(table.places[0], f"its weights are tied to {tied[0]}, which uses all rows at once")


def _refusal(place: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"embedding {place or 'of the module'} cannot move to parameter servers: {reason}")


def replace(module: nn.Module, tables: Sequence[FoundTable], rows: StepRows) -> nn.Module:
    """Replace the embeddings of these tables by lookups; return the module, or its lookup if it is one itself."""
    for table in tables:
        for place in table.places:
            embedding: Any = module.get_submodule(place)
            lookup: nn.Module = (BagLookup if isinstance(embedding, nn.EmbeddingBag) else Lookup)(
                embedding, table.name, rows
            )
            if hasattr(embedding, "on_servers"):
                lookup = embedding.on_servers(lookup)
            if not place:
                return lookup
            parent, _, attribute = place.rpartition(".")
            setattr(module.get_submodule(parent), attribute, lookup)
    return module
