"""How two loops that take turns are compared."""

from __future__ import annotations

import pytest

from strata.bench.contenders.overhead_strata import over_bare


def test_turns_with_a_save_count_as_often_as_they_come() -> None:
    plain = ({"turn_s": 1.0}, {"turn_s": 1.01, "has_saved": False})
    saving = ({"turn_s": 1.0}, {"turn_s": 1.06, "has_saved": True})

    assert over_bare([*[plain] * 4, saving], "turn_s") == pytest.approx(1.02)


def test_a_moment_of_bad_weather_counts_for_nobody() -> None:
    plain = ({"turn_s": 1.0}, {"turn_s": 1.01, "has_saved": False})
    slow = ({"turn_s": 9.0}, {"turn_s": 9.09, "has_saved": False})
    unlucky = ({"turn_s": 1.0}, {"turn_s": 50.0, "has_saved": False})

    assert over_bare([plain, slow, plain, slow, unlucky], "turn_s") == pytest.approx(1.01)
