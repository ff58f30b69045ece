"""Wide & Deep learning (Cheng et al., 2016)."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strata.errors import InvalidArgument
from strata.trainer.models.embedding import FeatureInputs, FeatureWeights, FieldIds, FlatInput, look_up
from strata.trainer.models.fields import FieldSpec, Layout
from strata.trainer.models.layers import MLP
from strata.trainer.models.recommender import Recommender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers whose bits are mixed well, as used by integer hashes."""
MAX_CROSSED = len(_MULTIPLIERS)


class CrossedWeights(nn.Module):
    """Returns the sum of a weight per combination of ids, for each cross of sparse fields: `[rows]`.

    This is the paper's cross-product transformation. A cross of few combinations has a weight for each of them; one of
    more than `buckets` is hashed to `buckets` weights.
    """

    members: Tensor
    factors: Tensor
    sizes: Tensor
    hashed: Tensor
    offsets: Tensor

    def __init__(
        self, fields: Sequence[FieldSpec], crosses: Sequence[Sequence[str]], *, buckets: int, sparse_gradients: bool
    ) -> None:
        """
        Raises:
            InvalidArgument: A cross does not consist of 2 to 4 different sparse fields, or `buckets` is not positive.
        """
        super().__init__()
        if buckets < 1:
            raise InvalidArgument(f"cross_buckets={buckets} must be 1 or more", field="cross_buckets")
        sparse = {field.name: field for field in fields if field.kind == "sparse"}
        for cross in crosses:
            _check_cross(cross, sparse)
        used = sorted(set(itertools.chain.from_iterable(crosses)), key=list(sparse).index)
        self.ids = FieldIds(Layout.of(fields, used))
        counts = [[sparse[name].num_ids for name in cross] for cross in crosses]
        sizes = [min(math.prod(each), buckets) for each in counts]
        hashed = [math.prod(each) > buckets for each in counts]
        pad = max(map(len, crosses))
        members = [[used.index(name) for name in cross] + [0] * (pad - len(cross)) for cross in crosses]
        factors = [_factors(each, pad, by_hash=by_hash) for each, by_hash in zip(counts, hashed, strict=True)]
        self._constant("members", members)
        self._constant("factors", factors)
        self._constant("sizes", sizes)
        self._constant("offsets", list(itertools.accumulate(sizes[:-1], initial=0)))
        self.register_buffer("hashed", torch.tensor(hashed), persistent=False)
        self.table = nn.Embedding(sum(sizes), 1, sparse=sparse_gradients)
        nn.init.zeros_(self.table.weight)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return look_up(self.table, self.combinations(batch) + self.offsets).sum(dim=(1, 2))

    def combinations(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of each row's combination of ids: int64 `[rows, crosses]`."""
        ids = self.ids.sparse(batch)[:, self.members]
        keys = (ids * self.factors).sum(dim=2)
        # The high bits of a product depend on all bits of its factors, the low ones only on low ones.
        keys = torch.where(self.hashed, keys ^ (keys >> 31), keys)
        return torch.remainder(keys, self.sizes)

    def _constant(self, name: str, values: Sequence[int] | Sequence[Sequence[int]]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)


class WideDeep(Recommender):
    """A linear model over features and their crosses, and a perceptron over embeddings, summed and trained together.

    `crosses=[("carrier", "origin")]` adds cross-product features to the wide part. `wide` and `deep` name the fields of
    the two parts; by default both have all. The paper trains the wide part with FTRL and the deep part with AdaGrad:
    the parameters of the wide part have names that start with `wide`.
    """

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        *,
        wide: Sequence[str] | None = None,
        deep: Sequence[str] | None = None,
        crosses: Sequence[Sequence[str]] = (),
        cross_buckets: int = 100_000,
        embedding_dim: int | None = 16,
        hidden: Sequence[int] = (400, 400, 400),
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
        sparse_gradients: bool = False,
    ) -> None:
        """
        Raises:
            InvalidArgument: A part has no field, a name is unknown, or a cross is invalid.
        """
        super().__init__(fields)
        for part, names in (("wide", wide), ("deep", deep)):
            if names is not None and not names:
                raise InvalidArgument(f"{part} names no field; name one, or leave {part}= out for all", field=part)
        self.wide_inputs = FeatureInputs(Layout.of(fields, wide))
        self.wide = FeatureWeights(self.wide_inputs, sparse_gradients=sparse_gradients)
        self.wide_crosses: CrossedWeights | None = None
        if crosses:
            self.wide_crosses = CrossedWeights(
                fields, crosses, buckets=cross_buckets, sparse_gradients=sparse_gradients
            )
        self.deep_inputs = FlatInput(fields, deep, embedding_dim=embedding_dim, sparse_gradients=sparse_gradients)
        self.deep = MLP(
            self.deep_inputs.width,
            hidden,
            out_features=1,
            activation=activation,
            dropout=dropout,
            batch_norm=batch_norm,
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        deep: Tensor = self.deep(self.deep_inputs(batch))
        logits: Tensor = deep.squeeze(1) + self.wide(*self.wide_inputs(batch))
        if self.wide_crosses is not None:
            logits = logits + self.wide_crosses(batch)
        return logits


WideAndDeep = WideDeep


def _check_cross(cross: Sequence[str], sparse: Mapping[str, FieldSpec]) -> None:
    for name in cross:
        if name not in sparse:
            raise InvalidArgument(
                f"crosses names {name!r}, which is not a sparse field; the sparse fields are: "
                f"{', '.join(sparse) or 'none'}",
                field="crosses",
            )
    if not 2 <= len(set(cross)) == len(cross) <= MAX_CROSSED:
        raise InvalidArgument(f"a cross has 2 to {MAX_CROSSED} different fields, not {tuple(cross)}", field="crosses")


def _factors(counts: Sequence[int], pad: int, *, by_hash: bool) -> list[int]:
    """Return the numbers by which ids are multiplied: place values, or multipliers of a hash modulo 2⁶⁴."""
    if by_hash:
        factors = [number - 2**64 if number >= 2**63 else number for number in _MULTIPLIERS[: len(counts)]]
    else:
        factors = [math.prod(counts[at + 1 :]) for at in range(len(counts))]
    return factors + [0] * (pad - len(counts))
