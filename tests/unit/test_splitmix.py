"""Splitmix64 has the values of its published reference, on which row orders and placements rely."""

from __future__ import annotations

import numpy as np

from strata.splitmix import GOLDEN, finalize, mix


def test_it_generates_the_published_sequence() -> None:
    counters = np.uint64(1_234_567) + np.arange(1, 6, dtype=np.uint64) * GOLDEN
    assert finalize(counters).tolist() == [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
        4_593_380_528_125_082_431,
        16_408_922_859_458_223_821,
    ]


def test_a_hash_leaves_its_argument_as_it_is() -> None:
    values = np.arange(3, dtype=np.uint64)
    assert mix(values)[0] == 0xE220A8397B1DCDAF
    assert values.tolist() == [0, 1, 2]
