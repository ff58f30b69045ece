"""How alternating loops are compared."""

from __future__ import annotations

import pytest

from strata.bench.contenders.overhead_strata import Turn, over_bare


def turn(ours_s: float, *bare_s: float, has_saved: bool = False) -> Turn:
    one, two = bare_s
    return Turn({"turn_s": ours_s, "has_saved": has_saved}, ({"turn_s": one}, {"turn_s": two}))


def test_turns_with_a_save_are_weighted_by_their_frequency() -> None:
    plain, saving = turn(1.01, 1.0, 1.0), turn(1.06, 1.0, 1.0, has_saved=True)
    assert over_bare([*[plain] * 4, saving], "turn_s") == pytest.approx(1.02)


def test_a_short_slowdown_affects_no_loop() -> None:
    plain, slow, unlucky = turn(1.01, 1.0, 1.0), turn(9.09, 9.0, 9.0), turn(50.0, 1.0, 1.0)
    assert over_bare([plain, slow, plain, slow, unlucky], "turn_s") == pytest.approx(1.01)


def test_strata_is_compared_with_the_mean_of_both_plain_loops() -> None:
    assert over_bare([turn(1.01, 0.9, 1.1)] * 3, "turn_s") == pytest.approx(1.01)
