"""Loops over rows, compiled by numba where it is installed (extra `servers`); None otherwise.

Each has a twin in numpy, next to where it is called, which computes the same values bit for bit. The exception is the
sum of squares of a row in `adagrad_rows`, whose order of additions is left to the compiler.

The arithmetic of normal initial values is written once, for numbers and for arrays: both use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
Kernel: TypeAlias = Callable[..., Any] | None

fill_uniform: Kernel = None
fill_normal: Kernel = None
group: Kernel = None
find: Kernel = None
pull: Kernel = None
touch: Kernel = None
place: Kernel = None
sum_rows: Kernel = None
to_half: Kernel = None
from_half: Kernel = None
sgd: Kernel = None
adagrad: Kernel = None
adagrad_rows: Kernel = None
adam: Kernel = None
ftrl: Kernel = None

KERNELS = (
    *("fill_uniform", "fill_normal", "group", "find", "pull", "touch", "place", "sum_rows"),
    *("to_half", "from_half"),
    *("sgd", "adagrad", "adagrad_rows", "adam", "ftrl"),
)
"""Names of all compiled loops."""
_AHEAD = 8
"""Rows between the one in use and the one that is loaded into the cache."""
_LINE = 16
"""Numbers in a cache line."""
_DIGIT_BITS = 12
"""Bits that one pass of a radix sort looks at; the counts of a digit fit into the L1 cache."""
_GOLDEN = 0x9E3779B97F4A7C15
UNIT_53 = 2.0**-53
ROOT_HALF = 0x3FE6A09E667F3BCD
"""The bits of the square root of 1/2. Numbers from here to twice as much have logarithms around 0."""


def fraction(bits: Any) -> Any:
    """Turn 32 bits into a number between 0 and 1, both excluded."""
    return (bits + 0.5) * 2.0**-32


def radius(mantissa: Any, power: Any, scale: float) -> Any:
    """Return √(-2 ln u) · scale of u = mantissa · 2^power, with an error below 1e-9."""
    s = (mantissa - 1.0) / (mantissa + 1.0)
    q = s * s
    series = ((((((q * (1 / 15) + 1 / 13) * q + 1 / 11) * q + 1 / 9) * q + 1 / 7) * q + 1 / 5) * q + 1 / 3) * q + 1.0
    return np.sqrt(-2.0 * (power * math.log(2.0) + 2.0 * s * series)) * scale


def angle(bits: Any) -> Any:
    """Turn 31 bits into an angle between -π/2 and π/2."""
    return (bits - 2.0**30) * (math.pi * 2.0**-31)


def sign(bit: Any) -> Any:
    return 1.0 - 2.0 * bit


def sine(x: Any) -> Any:
    """Return the sine of an angle between -π/2 and π/2, with an error below 1e-10."""
    y = x * x
    series = y * (1 / 355_687_428_096_000) - 1 / 1_307_674_368_000
    series = ((series * y + 1 / 6_227_020_800) * y - 1 / 39_916_800) * y + 1 / 362_880
    return ((((series * y - 1 / 5_040) * y + 1 / 120) * y - 1 / 6) * y + 1.0) * x


def cosine(x: Any) -> Any:
    """Return the cosine of an angle between -π/2 and π/2, with an error below 1e-10."""
    y = x * x
    series = y * (1 / 20_922_789_888_000) - 1 / 87_178_291_200
    series = ((series * y + 1 / 479_001_600) * y - 1 / 3_628_800) * y + 1 / 40_320
    return (((series * y - 1 / 720) * y + 1 / 24) * y - 1 / 2) * y + 1.0


try:
    import numba
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba.extending import intrinsic
except ImportError:
    pass
else:
    _compiled: Callable[[F], Any] = numba.njit(cache=True, nogil=True, error_model="numpy")
    _compiled_freely: Callable[[F], Any] = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})

    @_compiled
    def _mix(key: Any) -> Any:
        key += np.uint64(_GOLDEN)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return key ^ (key >> np.uint64(31))

    @_compiled
    def fill_uniform(keys: Any, word: Any, scale: Any, rows: Any, at: Any) -> None:
        for i in range(len(keys)):
            of_key = _mix(_mix(keys[i]) ^ word)
            for j in range(rows.shape[1]):
                bits = _mix(of_key + np.uint64(j) * np.uint64(_GOLDEN)) >> np.uint64(11)
                rows[at[i], j] = (np.float64(np.int64(bits)) * UNIT_53 * 2.0 - 1.0) * scale

    @_compiled
    def group(keys: Any, key_bits: Any, position_bits: Any, unique: Any, inverse: Any, order: Any, starts: Any) -> Any:
        """Group the positions of equal keys by a radix sort of keys and positions in one word; return the number of
        different keys.
        """
        words, spare = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint64)
        shift = np.uint64(position_bits)
        num_passes = max((key_bits + _DIGIT_BITS - 1) // _DIGIT_BITS, 1)
        digit_bits = max((key_bits + num_passes - 1) // num_passes, 1)
        counts = np.zeros((num_passes, 1 << digit_bits), np.int32)
        mask = np.uint64((1 << digit_bits) - 1)
        for i in range(len(keys)):
            words[i] = (keys[i] << shift) | np.uint64(i)
            for n in range(num_passes):
                counts[n, np.int64((keys[i] >> np.uint64(n * digit_bits)) & mask)] += 1
        for n in range(num_passes):
            total = 0
            for at in range(counts.shape[1]):
                count = counts[n, at]
                counts[n, at] = total
                total += count
            low = np.uint64(position_bits + n * digit_bits)
            for i in range(len(words)):
                digit = np.int64((words[i] >> low) & mask)
                spare[counts[n, digit]] = words[i]
                counts[n, digit] += 1
            words, spare = spare, words
        num = 0
        of_position = np.uint64((1 << position_bits) - 1)
        for i in range(len(words)):
            key, position = words[i] >> shift, np.int64(words[i] & of_position)
            if i == 0 or key != unique[num - 1]:
                unique[num] = key
                starts[num] = i
                num += 1
            order[i] = position
            inverse[position] = num - 1
        return num

    _fraction, _radius, _angle = _compiled(fraction), _compiled(radius), _compiled(angle)
    _sign, _sine, _cosine = _compiled(sign), _compiled(sine), _compiled(cosine)

    @_compiled
    def fill_normal(keys: Any, word: Any, scale: Any, rows: Any, at: Any) -> None:
        width = rows.shape[1]
        num = (width + 1) // 2
        fractions, angles, signs = np.empty(num), np.empty(num), np.empty(num)
        bits = fractions.view(np.int64)
        pairs = np.empty(2 * num, np.float32)
        for i in range(len(keys)):
            of_key = _mix(_mix(keys[i]) ^ word)
            for p in range(num):
                drawn = _mix(of_key + np.uint64(p) * np.uint64(_GOLDEN))
                fractions[p] = _fraction(np.float64(np.int64(drawn >> np.uint64(32))))
                angles[p] = _angle(np.float64(np.int64(drawn & np.uint64(0x7FFF_FFFF))))
                signs[p] = _sign(np.float64(np.int64((drawn >> np.uint64(31)) & np.uint64(1))))
            for p in range(num):
                power = (bits[p] - ROOT_HALF) >> 52
                bits[p] -= power << 52
                length = _radius(fractions[p], np.float64(power), scale)
                pairs[2 * p] = length * _sine(angles[p])
                pairs[2 * p + 1] = length * _cosine(angles[p]) * signs[p]
            for j in range(width):
                rows[at[i], j] = pairs[j]

    def _emit_prefetch(_: Any, rows: Any, i: Any, j: Any) -> Any:
        """Begin to load the cache line of `rows[i, j]`."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, values[0])
            row, column = (context.cast(builder, values[n], signature.args[n], numba.intp) for n in (1, 2))
            width = builder.extract_value(array.shape, 1)
            pointer = builder.gep(array.data, [builder.add(builder.mul(row, width), column)])
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            hint = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            )
            for_reading, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
            builder.call(hint, [builder.bitcast(pointer, byte), for_reading, keep, data])
            return context.get_dummy_value()

        return numba.void(rows, i, j), generate

    _prefetch: Any = intrinsic(_emit_prefetch)

    @_compiled
    def _prefetch_row(rows: Any, slots: Any, i: Any) -> None:
        """Begin to load the row that comes up a few iterations after `i`: rows are too far apart for the hardware."""
        if i + _AHEAD < len(slots) and 0 <= slots[i + _AHEAD] < len(rows):
            for j in range(0, rows.shape[1], _LINE):
                _prefetch(rows, slots[i + _AHEAD], j)

    @_compiled
    def find(cells: Any, row_keys: Any, keys: Any) -> Any:
        found = np.empty(len(keys), np.int32)
        last = np.uint64(len(cells) - 1)
        for i in range(len(keys)):  # without a branch, so that many loads are under way at a time
            found[i] = cells[_mix(keys[i]) & last]
        for i in range(len(keys)):
            key, slot = keys[i], found[i]
            if slot < 0 or row_keys[slot] != key:
                at = _mix(key) & last
                while slot != -1 and (slot < 0 or row_keys[slot] != key):
                    at = (at + np.uint64(1)) & last
                    slot = cells[at]
                found[i] = slot
        return found

    @_compiled
    def pull(weights: Any, slots: Any, rows: Any) -> Any:
        num_left = 0
        for i in range(len(slots)):
            _prefetch_row(weights, slots, i)
            slot = slots[i]
            if slot < 0 or slot >= len(weights):
                num_left += 1
                continue
            for j in range(weights.shape[1]):
                rows[i, j] = weights[slot, j]
        return num_left

    @_compiled
    def touch(versions: Any, counts: Any, marks: Any, slots: Any, clock: Any, mark: Any) -> None:
        for i in range(len(slots)):
            versions[slots[i]] = clock
            counts[slots[i]] += np.uint32(1)
            marks[slots[i]] = mark

    @_compiled
    def place(cells: Any, row_keys: Any, slots: Any) -> None:
        last = np.uint64(len(cells) - 1)
        for i in range(len(slots)):
            at = _mix(row_keys[slots[i]]) & last
            while cells[at] >= 0:
                at = (at + np.uint64(1)) & last
            cells[at] = slots[i]

    @_compiled
    def sum_rows(values: Any, inverse: Any, sums: Any) -> None:
        """Read the values in their order, which the hardware foresees; the sums are fewer and fit into a cache."""
        has_sum = np.zeros(len(sums), np.uint8)
        for i in range(len(inverse)):
            _prefetch_row(sums, inverse, i)
            at = inverse[i]
            if has_sum[at]:
                for j in range(values.shape[1]):
                    sums[at, j] += values[i, j]
            else:
                has_sum[at] = 1
                for j in range(values.shape[1]):
                    sums[at, j] = values[i, j]

    @_compiled
    def to_half(floats: Any, halves: Any) -> None:
        """Convert bits. Without branches, so that several numbers are converted at a time."""
        u32 = np.uint32
        for i in range(len(floats)):
            size = floats[i] & u32(0x7FFF_FFFF)
            normal = (size - u32(0x3800_0000) + u32(0xFFF) + ((size >> u32(13)) & u32(1))) >> u32(13)
            fraction = (size & u32(0x7F_FFFF)) | u32(0x80_0000)
            shift = u32(126) - min(max(size >> u32(23), u32(101)), u32(113))
            subnormal = (fraction + (u32(1) << (shift - u32(1))) - u32(1) + ((fraction >> shift) & u32(1))) >> shift
            half = min(subnormal if size < u32(0x3880_0000) else normal, u32(0x7BFF))
            half = u32(0x7E00) if size >= u32(0x7F80_0000) else half
            halves[i] = half | ((floats[i] >> u32(16)) & u32(0x8000))

    @_compiled
    def from_half(halves: Any, floats: Any, numbers: Any) -> None:
        for i in range(len(halves)):
            numbers[i] = floats[halves[i]]

    @_compiled
    def sgd(weights: Any, slots: Any, gradients: Any, lr: Any) -> None:
        for i in range(len(slots)):
            _prefetch_row(weights, slots, i)
            slot = slots[i]
            for j in range(weights.shape[1]):
                weights[slot, j] -= lr * gradients[i, j]

    @_compiled
    def adagrad(weights: Any, sums: Any, slots: Any, gradients: Any, lr: Any, eps: Any) -> None:
        for i in range(len(slots)):
            _prefetch_row(weights, slots, i)
            _prefetch_row(sums, slots, i)
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
            _prefetch_row(weights, slots, i)
            _prefetch_row(sums, slots, i)
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
            _prefetch_row(weights, slots, i)
            _prefetch_row(moments, slots, i)
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
            _prefetch_row(weights, slots, i)
            _prefetch_row(state, slots, i)
            slot = slots[i]
            for j in range(width):
                gradient = gradients[i, j]
                state[slot, j] += gradient * gradient
                strength = np.sqrt(state[slot, j]) * inverse + offset
                value = weights[slot, j] * strength + state[slot, width + j] - gradient
                dual = min(max(value, -l1), l1)
                state[slot, width + j] = dual
                weights[slot, j] = (value - dual) / strength
