"""States of a loader from JSON, from other versions, and from an attacker."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.order.cursor import MAX_COUNT, VERSION, Cursor, Cuts, read_cursor
from strata.data.order.order import MAX_LANES
from strata.errors import InvalidArgument, PlanChanged


def state(**changes: Any) -> dict[str, Any]:
    made = Cursor(
        fingerprint="abc", seed=3, shuffle=True, epoch=2, position=40, num_rows=100, lanes=4, window=8, plan={"a": [1]}
    ).to_dict()
    return {**made, **changes}


def test_a_state_survives_json() -> None:
    cursor = read_cursor(json.loads(json.dumps(state())))
    assert cursor.to_dict() == state()
    assert (cursor.position, cursor.lanes, cursor.plan) == (40, 4, {"a": [1]})


@given(
    st.builds(
        Cursor,
        fingerprint=st.text(max_size=40),
        seed=st.integers(0, MAX_COUNT),
        shuffle=st.booleans(),
        epoch=st.integers(0, MAX_COUNT),
        position=st.integers(0, 1000),
        num_rows=st.integers(1000, MAX_COUNT),
        lanes=st.integers(1, MAX_LANES),
        window=st.integers(1, MAX_COUNT),
    )
)
def test_every_valid_state_survives_json(cursor: Cursor) -> None:
    assert read_cursor(json.loads(json.dumps(cursor.to_dict()))) == cursor


@pytest.mark.parametrize("name", ["fingerprint", "seed", "shuffle", "epoch", "position", "num_rows", "lanes", "window"])
@pytest.mark.parametrize("value", [None, "7", 1.5, float("nan"), [], {"a": 1}, -1, 1 << 65])
def test_an_error_about_an_invalid_value_names_it(name: str, value: Any) -> None:
    if name == "fingerprint" and value == "7":
        return  # any text is valid here; the plan checks whether it matches
    with pytest.raises(InvalidArgument, match=name) as refused:
        read_cursor(state(**{name: value}))
    assert refused.value.field == "state"


@pytest.mark.parametrize("name", ["fingerprint", "seed", "shuffle", "epoch", "position", "num_rows", "lanes", "window"])
def test_an_error_about_a_missing_value_names_it(name: str) -> None:
    incomplete = state()
    del incomplete[name]
    with pytest.raises(InvalidArgument, match=f"this is not a loader's state_dict.. .*{name}"):
        read_cursor(incomplete)


@pytest.mark.parametrize(
    "changes", [{"position": 101}, {"lanes": 0}, {"window": 0}, {"num_rows": 39}, {"position": 1, "num_rows": 0}]
)
def test_numbers_that_contradict_each_other_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="contradict each other: position"):
        read_cursor(state(**changes))


def test_without_shuffle_there_is_no_window() -> None:
    assert read_cursor(state(shuffle=False, window=0)).window == 0


def test_more_lanes_than_the_maximum_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="lanes"):
        read_cursor(state(lanes=MAX_LANES + 1))


@pytest.mark.parametrize("other", [None, 3, "state", [1], b"{}"])
def test_a_state_that_is_not_a_mapping_is_refused(other: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"is a {type(other).__name__}"):
        read_cursor(other)


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.5, True])
def test_a_state_of_an_invalid_version_is_refused(version: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"the state has version (0|-1)|version") as refused:
        read_cursor(state(version=version))
    assert refused.value.field == "state"


def test_a_state_without_a_version_is_refused() -> None:
    without = state()
    del without["version"]
    with pytest.raises(InvalidArgument, match=r"the state has no version.*set_epoch"):
        read_cursor(without)


def test_a_state_of_a_newer_version_is_refused_with_the_cure() -> None:
    with pytest.raises(PlanChanged, match="has version 3, and this version of Strata reads up to 2; upgrade Strata"):
        read_cursor({"version": 3, "whatever": "it holds"})


CUTS = Cuts(
    unit="tokens",
    limit=4096,
    columns=["input_ids"],
    lengths="0f",
    padded=True,
    length_buckets=False,
    long_rows="raise",
    tracks=2,
)


def state_with_cuts(**changes: Any) -> dict[str, Any]:
    return {**state(version=2), "cuts": {**msgspec.to_builtins(CUTS), **changes}}


def test_a_state_of_batches_by_tokens_survives_json_and_older_versions_refuse_it() -> None:
    cursor = read_cursor(json.loads(json.dumps(state_with_cuts())))
    assert cursor.cuts == CUTS
    assert cursor.to_dict() == state_with_cuts()
    assert cursor.version > VERSION
    assert "cuts" not in state(), "a state of batches by rows is as before"


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (state_with_cuts(tracks=3), "4 lanes in 3 tracks, which is impossible"),
        (state_with_cuts(tracks=0), "4 lanes in 0 tracks, which is impossible"),
        (state_with_cuts(limit="4096"), "cuts.limit"),
        ({**state_with_cuts(), "version": 1}, "version 1 with cuts"),
        (state(version=2), "version 2 without cuts"),
    ],
)
def test_impossible_cuts_are_refused(hostile: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_cursor(hostile)


def test_names_that_are_not_strings_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="this is not a loader"):
        read_cursor({"version": 1, 1: 2})  # type: ignore[dict-item]


@given(
    st.dictionaries(
        st.sampled_from([*Cursor.__struct_fields__, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_any_value_is_a_valid_state_or_refused(hostile: dict[str, Any]) -> None:
    for value in (hostile, state(**hostile)):
        try:
            cursor = read_cursor(value)
        except (InvalidArgument, PlanChanged):
            continue
        assert 0 <= cursor.position <= cursor.num_rows <= MAX_COUNT
        assert cursor.lanes >= 1
        assert cursor.window >= 1 or not cursor.shuffle
