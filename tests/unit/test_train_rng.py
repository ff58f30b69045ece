"""Random generators resume exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from strata.errors import CheckpointInvalid
from strata.train import rng


@pytest.fixture(autouse=True)
def _as_before() -> object:
    states = rng.take()
    yield
    rng.put(states)


def numbers() -> tuple[float, ...]:
    normal = (random.gauss(0, 1), float(np.random.normal()))  # they keep a second number for the next call
    return (*normal, random.random(), float(np.random.random()), float(torch.rand(())))


def test_what_was_taken_gives_the_same_numbers_again() -> None:
    numbers()
    states = rng.take()
    first = [numbers() for _ in range(3)]
    rng.put(states)
    assert [numbers() for _ in range(3)] == first


def test_a_new_rank_derives_its_own_numbers_and_always_the_same() -> None:
    states = rng.take()
    own = numbers()
    found = {}
    for rank in (2, 3, 2):
        rng.derive(states, rank)
        found.setdefault(rank, []).append(numbers())
    assert found[2][0] == found[2][1] != found[3][0]
    assert own not in (found[2][0], found[3][0])


def test_states_that_are_none_are_refused_with_the_cure() -> None:
    with pytest.raises(CheckpointInvalid, match=r"generators=False"):
        rng.put({"python": {"version": 3, "words": [1, 2], "gauss": None}})
