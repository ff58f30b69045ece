"""Rows in half precision: the nearest half, never infinity, and the same bits with numba and with numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_servers_table import without_kernels

from strata.errors import InvalidArgument
from strata.servers.table import native
from strata.servers.table.half import LARGEST, from_half, to_half

SPECIAL = [0, 1, 2, 0x3300_0000, 0x3300_0001, 0x3380_0000, 0x387F_FFFF, 0x3880_0000, 0x3F80_1000, 0x477F_E000]
SPECIAL += [0x477F_EFFF, 0x477F_F000, 0x4780_0000, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF]


@pytest.fixture(params=["numpy", "numba"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numba" and native.to_half is None:
        pytest.skip("numba is not installed")
    if request.param == "numpy":
        without_kernels(monkeypatch)


def floats_of(bits: Any) -> np.ndarray[Any, Any]:
    return np.array(bits, np.uint32).view(np.float32)


def test_every_half_is_exact_in_both_directions() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    numbers = from_half(halves)

    assert numbers.tobytes() == halves.view(np.float16).astype(np.float32).tobytes()
    is_finite = np.isfinite(numbers)
    assert (to_half(numbers)[is_finite] == halves[is_finite]).all()


@given(st.floats(-LARGEST, LARGEST, width=32))
def test_a_number_becomes_the_nearest_half(number: float) -> None:
    half = to_half(np.array([number], np.float32))
    found = float(from_half(half)[0])

    below, above = (float(np.nextafter(np.float16(found), np.float16(limit))) for limit in (-LARGEST, LARGEST))
    assert abs(found - number) <= min(abs(below - number), abs(above - number))
    assert math.copysign(1, found) == math.copysign(1, number)


def test_ties_go_to_the_even_half() -> None:
    assert from_half(to_half(np.array([1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25], np.float32))).tolist() == [
        1.0,
        1 + 2**-9,
        0.0,
        2**-23,
    ]


@given(st.floats(LARGEST, float(np.finfo(np.float32).max), width=32))
def test_a_number_that_is_too_large_becomes_the_largest_half(number: float) -> None:
    assert from_half(to_half(np.array([number, -number], np.float32))).tolist() == [LARGEST, -LARGEST]


def test_what_is_not_finite_becomes_nan_so_that_a_server_refuses_it() -> None:
    halves = to_half(np.array([np.inf, -np.inf, np.nan], np.float32))
    assert np.isnan(from_half(halves)).all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (6,)])
def test_shapes_are_kept_and_rows_are_written_where_they_belong(shape: tuple[int, ...]) -> None:
    rows = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    room = np.full(shape, np.nan, np.float32)

    assert to_half(rows).shape == shape
    assert from_half(to_half(rows), room) is room
    assert (room == rows).all()
    assert (from_half(to_half(rows[::2])) == rows[::2]).all()


@pytest.mark.parametrize("room", [np.empty((2, 2), np.float32), np.empty((3, 4), np.float32)[:, ::2]])
def test_room_of_another_shape_or_with_gaps_is_refused(room: Any) -> None:
    with pytest.raises(InvalidArgument, match="use a contiguous array of the same shape"):
        from_half(np.zeros((3, 2), np.uint16), room)


@pytest.mark.skipif(native.to_half is None, reason="numba is not installed")
def test_halves_have_the_same_bits_with_numba_and_numpy() -> None:
    drawn = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    special = np.array(SPECIAL, np.uint32)
    numbers = floats_of(np.concatenate([drawn, special, special | np.uint32(1 << 31)]))
    compiled = to_half(numbers)

    with pytest.MonkeyPatch.context() as patched:
        without_kernels(patched)
        assert to_half(numbers).tobytes() == compiled.tobytes()
