"""Loops over rows, compiled by numba where it is installed (extra `servers`); None otherwise.

Each has a twin in numpy, next to where it is called, which computes the same values bit for bit. The exception is the
sum of squares of a row in `adagrad_rows`, whose order of additions is left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
Kernel: TypeAlias = Callable[..., Any] | None

find: Kernel = None
place: Kernel = None
sum_rows: Kernel = None
sgd: Kernel = None
adagrad: Kernel = None
adagrad_rows: Kernel = None
adam: Kernel = None
ftrl: Kernel = None

try:
    import numba
except ImportError:
    pass
else:
    _compiled: Callable[[F], Any] = numba.njit(cache=True, nogil=True, error_model="numpy")
    _compiled_freely: Callable[[F], Any] = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})

    @_compiled
    def _mix(key: Any) -> Any:
        key += np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return key ^ (key >> np.uint64(31))

    @_compiled
    def find(cells: Any, row_keys: Any, keys: Any) -> Any:
        found = np.empty(len(keys), np.int32)
        last = np.uint64(len(cells) - 1)
        for i in range(len(keys)):
            key = keys[i]
            at = _mix(key) & last
            slot = cells[at]
            while slot != -1 and (slot < 0 or row_keys[slot] != key):
                at = (at + np.uint64(1)) & last
                slot = cells[at]
            found[i] = slot
        return found

    @_compiled
    def place(cells: Any, row_keys: Any, slots: Any) -> None:
        last = np.uint64(len(cells) - 1)
        for i in range(len(slots)):
            at = _mix(row_keys[slots[i]]) & last
            while cells[at] >= 0:
                at = (at + np.uint64(1)) & last
            cells[at] = slots[i]

    @_compiled
    def sum_rows(values: Any, positions: Any, starts: Any, sums: Any) -> None:
        for i in range(len(starts)):
            end = starts[i + 1] if i + 1 < len(starts) else len(positions)
            first = positions[starts[i]]
            for j in range(values.shape[1]):
                sums[i, j] = values[first, j]
            for at in range(starts[i] + 1, end):
                position = positions[at]
                for j in range(values.shape[1]):
                    sums[i, j] += values[position, j]

    @_compiled
    def sgd(weights: Any, slots: Any, gradients: Any, lr: Any) -> None:
        for i in range(len(slots)):
            slot = slots[i]
            for j in range(weights.shape[1]):
                weights[slot, j] -= lr * gradients[i, j]

    @_compiled
    def adagrad(weights: Any, sums: Any, slots: Any, gradients: Any, lr: Any, eps: Any) -> None:
        for i in range(len(slots)):
            slot = slots[i]
            for j in range(weights.shape[1]):
                gradient = gradients[i, j]
                sums[slot, j] += gradient * gradient
                weights[slot, j] -= lr * (gradient / (np.sqrt(sums[slot, j]) + eps))

    @_compiled_freely
    def _mean_square(gradients: Any, i: Any) -> Any:
        total = np.float32(0.0)
        for j in range(gradients.shape[1]):
            total += gradients[i, j] * gradients[i, j]
        return total / np.float32(gradients.shape[1])

    @_compiled
    def adagrad_rows(weights: Any, sums: Any, slots: Any, gradients: Any, lr: Any, eps: Any) -> None:
        for i in range(len(slots)):
            slot = slots[i]
            sums[slot, 0] += _mean_square(gradients, i)
            scale = lr / (np.sqrt(sums[slot, 0]) + eps)
            for j in range(weights.shape[1]):
                weights[slot, j] -= scale * gradients[i, j]

    @_compiled
    def adam(
        weights: Any, moments: Any, slots: Any, gradients: Any, rate: Any, first_share: Any, second_share: Any, eps: Any
    ) -> None:
        width = weights.shape[1]
        for i in range(len(slots)):
            slot = slots[i]
            for j in range(width):
                gradient = gradients[i, j]
                first = moments[slot, j]
                second = moments[slot, width + j]
                first += first_share * (gradient - first)
                second += second_share * (gradient * gradient - second)
                moments[slot, j] = first
                moments[slot, width + j] = second
                weights[slot, j] -= rate * (first / (np.sqrt(second) + eps))

    @_compiled
    def ftrl(weights: Any, state: Any, slots: Any, gradients: Any, inverse: Any, offset: Any, l1: Any) -> None:
        width = weights.shape[1]
        for i in range(len(slots)):
            slot = slots[i]
            for j in range(width):
                gradient = gradients[i, j]
                state[slot, j] += gradient * gradient
                strength = np.sqrt(state[slot, j]) * inverse + offset
                value = weights[slot, j] * strength + state[slot, width + j] - gradient
                dual = min(max(value, -l1), l1)
                state[slot, width + j] = dual
                weights[slot, j] = (value - dual) / strength
