"""Which entries of the node cache go, for any sizes and uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.data.shared.eviction import MAX_WAIT_S, MIN_WAIT_S, CacheEntry, choose, wait_limit_s

sizes = st.lists(st.integers(1, 1_000), max_size=40)


def entries(num_bytes: list[int]) -> list[CacheEntry]:
    """Entries in the order of their last use."""
    return [CacheEntry(f"{number:03}", size, number) for number, size in enumerate(num_bytes)]


@given(sizes, st.integers(0, 2_000), st.integers(1, 20_000), st.sets(st.integers(0, 39)), st.integers(1, 50))
def test_what_remains_fits_and_no_entry_in_use_goes(
    num_bytes: list[int], need_bytes: int, max_bytes: int, in_use: set[int], max_entries: int
) -> None:
    found = entries(num_bytes)
    pinned = {entry.name for entry in found if entry.used_ns in in_use}
    decided = choose(found, need_bytes=need_bytes, max_bytes=max_bytes, max_entries=max_entries, pinned=pinned)
    left = [entry for entry in found if entry not in decided.victims]

    assert not pinned & {victim.name for victim in decided.victims}
    if decided.fits:
        assert sum(entry.num_bytes for entry in left) + need_bytes <= max_bytes
        assert len(left) < max_entries
    else:
        assert left == found, "an entry that does not fit anyway costs no other one"
        kept = [entry for entry in found if entry.name in pinned]
        assert sum(entry.num_bytes for entry in kept) + need_bytes > max_bytes or len(kept) >= max_entries


@given(sizes, st.integers(0, 2_000), st.integers(1, 20_000))
def test_the_least_recently_used_entries_go_and_no_more_than_needed(
    num_bytes: list[int], need_bytes: int, max_bytes: int
) -> None:
    found = entries(num_bytes)
    victims = list(choose(found[::-1], need_bytes=need_bytes, max_bytes=max_bytes).victims)

    assert victims == found[: len(victims)]
    if victims:
        assert sum(entry.num_bytes for entry in found[len(victims) - 1 :]) + need_bytes > max_bytes


def test_among_many_entries_an_eviction_makes_room_for_several() -> None:
    decided = choose(entries([1] * 1_600), need_bytes=1, max_bytes=1_600)
    assert decided.fits
    assert len(decided.victims) == 101  # 1 for the new entry, and a sixteenth


def test_a_process_waits_for_another_some_times_its_own_longest_decode() -> None:
    assert wait_limit_s(0.0) == MIN_WAIT_S
    assert wait_limit_s(1.5) == 6.0
    assert wait_limit_s(1_000.0) == MAX_WAIT_S
