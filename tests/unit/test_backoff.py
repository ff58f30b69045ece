"""Pauses between attempts to connect."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from strata.transport.backoff import pauses


def test_pauses_grow_and_do_not_use_the_programs_random_generator() -> None:
    pause = pauses(0.05, 0.25)
    before = random.getstate()
    seen: dict[int, list[float]] = {}
    for number in range(1, 9):
        state: Any = SimpleNamespace(attempt_number=number)
        seen[number] = [pause(state) for _ in range(200)]
    assert random.getstate() == before
    assert 0.04 < max(seen[1]) <= 0.05
    assert 0.2 < max(seen[8]) <= 0.25
    assert len(set(seen[8])) > 100
