"""Random generators of a user's torch `DataLoader`, saved as of the beginning of an epoch.

`iter(loader)` draws a seed for its workers, and a random sampler draws its order, from torch's global generator unless
the user passed one. An epoch that is resumed in the middle would draw once more than an uninterrupted one, and so a
different order. Therefore the loader gets its own generators, and a checkpoint keeps the states that they had when the
epoch began. This module imports torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from strata.train import rng

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Beginnings:
    """States of a loader's generators, by owner, as of the beginning of its current epoch."""

    def __init__(self, by_owner: Mapping[str, torch.Generator]) -> None:
        self._generators = by_owner
        self._states: dict[str, torch.Tensor] = {}
        self.note()
        self.is_resuming = False
        """A state was loaded, and no epoch has begun from it yet."""

    def note(self) -> None:
        self._states = {name: each.get_state() for name, each in self._generators.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Begin the next epoch with these states."""
        for name, each in self._generators.items():
            if name in states:
                each.set_state(torch.as_tensor(states[name], dtype=torch.uint8).cpu())
        self.note()
        self.is_resuming = True


def remember(loader: Any, name: str) -> Beginnings:
    """Record the states of the loader's generators at each beginning of an epoch, and add generators where it has none.

    Their seeds derive from torch's seed, so that a program that seeds torch reads the same rows after every start.
    """
    owners = {"loader": loader, "sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    for place, owner in owners.items():
        if isinstance(owner, (DataLoader, *_RANDOM_SAMPLERS)) and owner.generator is None:
            owner.generator = torch.Generator()
            seed = xxhash.xxh3_64_intdigest(f"{torch.initial_seed()}/{name}/{place}".encode())
            owner.generator.manual_seed(seed)
    found = {place: getattr(owner, "generator", None) for place, owner in owners.items()}
    beginnings = Beginnings({place: each for place, each in found.items() if isinstance(each, torch.Generator)})
    loader._beginnings = beginnings
    kind: Any = type(loader)
    loader.__class__ = _noting(kind)
    return beginnings


@functools.cache
def _noting(kind: Any) -> Any:
    """Return a subclass that records the states when an epoch begins."""

    class Noting(kind):  # type: ignore[misc]
        _beginnings: Beginnings

        def __iter__(self) -> Any:
            is_reset = self.persistent_workers and self._iterator is not None
            if is_reset and not getattr(self, "_initial_iter_for_state_dict", False):
                self._beginnings.note()  # torch reuses its iterator
            return super().__iter__()

        def _get_iterator(self) -> Any:
            self._beginnings.note()
            if not self._beginnings.is_resuming:
                return super()._get_iterator()
            self._beginnings.is_resuming = False
            before = rng.take()
            try:
                return super()._get_iterator()
            finally:  # a dataset without a state was read again up to its position
                rng.put(before)

    Noting.__name__ = Noting.__qualname__ = kind.__name__
    return Noting
