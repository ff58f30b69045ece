"""The generators that a torch DataLoader of the user's draws from when a pass begins.

`iter(loader)` draws a seed for its workers, and a random sampler draws its order, from torch's global generator unless
the user has passed one. A pass that is resumed in its middle draws once more than one that nobody interrupted, and
draws another order. So the loader gets generators of its own, and a checkpoint keeps the states that they had when the
pass began. Imported only where torch is.
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
    """States of generators by whose they are, as of the beginning of the last pass."""

    def __init__(self, by_owner: Mapping[str, torch.Generator]) -> None:
        self._generators = by_owner
        self._states: dict[str, torch.Tensor] = {}
        self.note()
        self.is_resuming = False
        """A state was loaded, and no pass has begun from it."""

    def note(self) -> None:
        self._states = {name: each.get_state() for name, each in self._generators.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """The next pass begins with these."""
        for name, each in self._generators.items():
            if name in states:
                each.set_state(torch.as_tensor(states[name], dtype=torch.uint8).cpu())
        self.note()
        self.is_resuming = True


def remember(loader: Any, name: str) -> Beginnings:
    """From now on its generators' states are noted when a pass begins. Where it has none, it gets some of its own.

    Their seeds follow from torch's, so that a program that seeds torch reads the same rows in every start.
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
    """The same class, which notes when a pass begins."""

    class Noting(kind):  # type: ignore[misc]
        _beginnings: Beginnings

        def __iter__(self) -> Any:
            is_reset = self.persistent_workers and self._iterator is not None
            if is_reset and not getattr(self, "_initial_iter_for_state_dict", False):
                self._beginnings.note()  # torch begins anew with the iterator that there is
            return super().__iter__()

        def _get_iterator(self) -> Any:
            self._beginnings.note()
            if not self._beginnings.is_resuming:
                return super()._get_iterator()
            self._beginnings.is_resuming = False
            before = rng.take()
            try:
                return super()._get_iterator()
            finally:  # a dataset without a state was read again up to its place
                rng.put(before)

    Noting.__name__ = Noting.__qualname__ = kind.__name__
    return Noting
