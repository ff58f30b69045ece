"""Counting values, hashing them, and finding their ids: compared with dictionaries of Python."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import LimitExceeded
from strata.trainer.features import counts, hashing, portable, vocabulary
from strata.trainer.features.counts import ValueCounter
from strata.trainer.features.values import ValueType
from strata.trainer.features.vocabulary import Buckets, IntegerVocabulary, StringVocabulary, encode_ids

INT64 = st.integers(-(2**63), 2**63 - 1)
NEAR = st.integers(-20, 20)
FAR = st.sampled_from([-(2**63), -1, 0, 1, 2**40, 2**63 - 1])
TEXT = st.text(max_size=20) | st.text(alphabet="ab", min_size=250, max_size=260)


def ranked(values: list[Any], min_count: int, max_size: int | None) -> list[Any]:
    found = [(value, count) for value, count in Counter(values).items() if count >= min_count]
    found.sort(key=lambda pair: (-pair[1], pair[0].encode() if isinstance(pair[0], str) else pair[0]))
    return [value for value, _ in found[:max_size]]


# Counting


@given(
    st.lists(st.lists(NEAR, max_size=30) | st.lists(FAR, max_size=9) | st.lists(INT64, max_size=9), max_size=6),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
)
def test_integers_are_ranked_by_count_then_value(
    batches: list[list[int]], min_count: int, max_size: int | None
) -> None:
    counter = ValueCounter(pa.int64(), 1000, "x")
    for batch in batches:
        counter.add_integers(np.array(batch, np.int64))

    found = counter.ranking(min_count=min_count, max_size=max_size)

    everything = [value for batch in batches for value in batch]
    assert found.values.to_pylist() == ranked(everything, min_count, max_size)
    assert found.num_counted == len(everything)
    assert found.num_distinct == len(set(everything))
    assert found.num_kept == sum(value in set(found.values.to_pylist()) for value in everything)


@given(st.lists(st.lists(st.sampled_from(["a", "b", "ä", "Z", ""]), max_size=20), max_size=6), st.integers(1, 3))
def test_strings_are_ranked_by_count_then_bytes(batches: list[list[str]], min_count: int) -> None:
    counter = ValueCounter(pa.large_string(), 1000, "x")
    for batch in batches:
        counter.add(pa.array(batch, pa.large_string()), np.ones(len(batch), np.int64))

    found = counter.ranking(min_count=min_count, max_size=None)

    assert found.values.to_pylist() == ranked([value for batch in batches for value in batch], min_count, None)


def test_pending_counts_take_at_most_twice_the_memory_of_the_merged_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_MIN_PENDING", 100)
    counter = ValueCounter(pa.int64(), 10_000, "x")
    spread = np.arange(150, dtype=np.int64) * 10**12

    for _ in range(1000):
        counter.add_integers(spread)
        assert counter._num_pending <= 2 * 150

    assert counter.ranking(min_count=1000, max_size=None).values.to_pylist() == spread.tolist()


def test_ranges_that_drift_apart_are_counted_without_a_huge_array() -> None:
    counter = ValueCounter(pa.int64(), 10_000, "x")
    starts = [0, 50, 2**40, 2**62, -(2**62), 2**40 + 50]
    for start in starts:
        counter.add_integers(np.arange(start, start + 100, dtype=np.int64))

    found = counter.ranking(min_count=2, max_size=None)

    assert found.values.to_pylist() == [*range(50, 100), *range(2**40 + 50, 2**40 + 100)]
    assert found.num_distinct == 150 + 150 + 200


def test_the_bound_on_distinct_values_holds_for_every_way_of_counting() -> None:
    for values in (np.arange(11), np.arange(11) * 10**15):
        counter = ValueCounter(pa.int64(), 10, "user")
        counter.add_integers(values.astype(np.int64))
        with pytest.raises(LimitExceeded, match=r"'user' has more than 10 distinct values.*hash_buckets="):
            counter.ranking(min_count=1, max_size=None)


def test_threads_count_each_value_once() -> None:
    counter = ValueCounter(pa.int64(), 10**6, "x")
    batches = [np.random.default_rng(seed).integers(0, 2**62, 500) >> (8 * (seed % 8)) for seed in range(16)]
    threads = [threading.Thread(target=counter.add_integers, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    everything = np.concatenate(batches).tolist()
    assert counter.ranking(min_count=1, max_size=None).values.to_pylist() == ranked(everything, 1, None)


# Hashing


@given(st.lists(TEXT | st.text(min_size=250, max_size=400)), st.integers(0, 3))
def test_strings_have_the_hashes_of_the_exported_code(texts: list[str], offset: int) -> None:
    array = pa.array(["before"] * offset + texts, pa.large_string()).slice(offset)

    assert hashing.hash_strings(array).tolist() == [portable.hash_bytes(text.encode()) for text in texts]


@given(st.lists(INT64))
def test_integers_have_the_hashes_of_the_exported_code(values: list[int]) -> None:
    wanted = [portable.mix(value & (2**64 - 1)) for value in values]

    assert hashing.mix(np.array(values, np.int64)).tolist() == wanted


def test_the_hashes_never_change() -> None:
    """They are part of the saved features: other hashes would give other ids."""
    assert portable.mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0
    assert [portable.hash_bytes(data) for data in (b"", b"a", b"12345678", b"x" * 300)] == [
        16294208416658607535,
        portable.mix(portable.mix(1) ^ ord("a")),
        portable.mix(portable.mix(8) ^ int.from_bytes(b"12345678", "little")),
        7115261214417345448,
    ]


def test_hashes_spread_evenly_over_buckets() -> None:
    names = pa.array([f"user {number}" for number in range(100_000)], pa.large_string())
    for hashes in (hashing.hash_strings(names), hashing.mix(np.arange(100_000))):
        per_bucket = np.bincount((hashes % np.uint64(100)).astype(np.int64), minlength=100)
        assert per_bucket.min() > 850  # 1,000 expected, standard deviation 32
        assert per_bucket.max() < 1150


# Ids


@given(
    st.lists(NEAR | INT64, min_size=1, unique=True) | st.lists(NEAR, min_size=1, unique=True),
    st.lists(NEAR | INT64 | st.none()),
)
def test_integer_vocabularies_find_what_a_dictionary_finds(known: list[int], values: list[int | None]) -> None:
    ids = {value: place for place, value in enumerate(known, 2)}
    found = IntegerVocabulary(ValueType("integer"), np.array(known, np.int64)).ids(pa.array(values, pa.int64()), "x")

    assert found.tolist() == [0 if value is None else ids.get(value, 1) for value in values]


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000))
def test_large_hash_tables_find_every_key_and_no_other(seed: int, num_keys: int) -> None:
    random = np.random.default_rng(seed)
    keys = np.unique(random.integers(-(2**63), 2**63 - 1, num_keys))
    random.shuffle(keys)
    table = vocabulary._HashTable(keys)

    assert table.find(keys).tolist() == list(range(2, 2 + len(keys)))
    others = np.setdiff1d(random.integers(-(2**63), 2**63 - 1, 40_000), keys)
    assert (table.find(others) == 1).all()


@given(st.lists(TEXT, min_size=1, unique=True), st.lists(TEXT | st.none()))
def test_string_vocabularies_find_what_a_dictionary_finds(known: list[str], values: list[str | None]) -> None:
    values = [*values, *known[:3]]
    ids = {value: place for place, value in enumerate(known, 2)}
    words = StringVocabulary(ValueType("text"), pa.array(known, pa.large_string()))
    wanted = [0 if value is None else ids.get(value, 1) for value in values]

    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        assert encode_ids(words, pa.array(values, kind), "x").tolist() == wanted


def test_strings_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(array: pa.Array) -> Any:
        return np.array([len(value) for value in array.to_pylist()], np.uint64)

    monkeypatch.setattr(vocabulary, "hash_strings", lengths)
    values = pa.array(["a", "b", "cc", "dd", None], pa.large_string())

    collides = StringVocabulary(ValueType("text"), pa.array(["a", "b", "cc"], pa.large_string()))
    does_not = StringVocabulary(ValueType("text"), pa.array(["a", "cc"], pa.large_string()))

    assert collides.ids(values, "x").tolist() == [2, 3, 4, 1, 0]
    assert does_not.ids(values, "x").tolist() == [2, 1, 3, 1, 0]


def test_signed_and_unsigned_integers_are_never_confused() -> None:
    """The bits of -1 and of 2**64 - 1 are the same."""
    signed = IntegerVocabulary(ValueType("integer"), np.array([-1, 5]))
    unsigned = IntegerVocabulary(
        ValueType("integer", is_unsigned=True), np.array([2**64 - 1, 5], np.uint64).view(np.int64)
    )
    negative, large = pa.array([-1, 5]), pa.array([2**64 - 1, 5], pa.uint64())

    assert signed.ids(negative, "x").tolist() == [2, 3]
    assert signed.ids(large, "x").tolist() == [1, 3]
    assert unsigned.ids(negative, "x").tolist() == [1, 3]
    assert unsigned.ids(large, "x").tolist() == [2, 3]


def test_null_values_inside_a_dictionary_are_missing() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2], pa.uint8()), pa.array(["a", None, "z"]))
    words = StringVocabulary(ValueType("text"), pa.array(["a"], pa.large_string()))

    assert encode_ids(words, array, "x").tolist() == [2, 0, 0, 1]
    assert encode_ids(Buckets(ValueType("text"), 1), array, "x").tolist() == [2, 0, 0, 2]


def test_a_dictionary_larger_than_its_batch_gives_the_same_ids() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([3, None], pa.int32()), pa.array([b"a", b"b", b"c", b"d"]))
    words = StringVocabulary(ValueType("bytes"), pa.array([b"d"], pa.large_binary()))

    assert encode_ids(words, array, "x").tolist() == [2, 0]
    assert encode_ids(words, array.cast(pa.dictionary(pa.int8(), pa.binary(1))), "x").tolist() == [2, 0]


def test_run_ends_are_decoded() -> None:
    array = pa.RunEndEncodedArray.from_arrays([2, 3], pa.array([7, None]))

    assert encode_ids(IntegerVocabulary(ValueType("integer"), np.array([7])), array, "x").tolist() == [2, 2, 0]
