"""Messages on a bare connection, however the network splits them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from strata.transport.frames import PREFACE, Malformed, Splitter, packed

messages = st.lists(st.binary(max_size=50), max_size=8)


@given(messages, st.data())
def test_messages_round_trip_however_they_are_split(sent: list[bytes], data: st.DataObject) -> None:
    stream = PREFACE + b"".join(map(packed, sent))
    splitter = Splitter(max_bytes=50, preface=PREFACE)
    come: list[bytes] = []
    while stream:
        num = data.draw(st.integers(1, len(stream)))
        come += splitter.feed(stream[:num])
        stream = stream[num:]
    assert come == sent


def test_a_message_that_is_too_long_is_refused_before_it_arrives() -> None:
    splitter = Splitter(max_bytes=10)
    assert list(splitter.feed(packed(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(Malformed, match="11 bytes; the limit is 10"):
        list(splitter.feed((11).to_bytes(4, "big")))


def test_messages_before_an_invalid_one_are_returned() -> None:
    messages = Splitter(max_bytes=10).feed(packed(b"a") + packed(b"b") + b"\xff" * 4)
    assert [next(messages), next(messages)] == [b"a", b"b"]
    with pytest.raises(Malformed):
        next(messages)


@given(st.binary(min_size=1, max_size=40))
def test_another_protocol_is_detected_by_its_first_byte(data: bytes) -> None:
    splitter = Splitter(max_bytes=10, preface=PREFACE)
    if PREFACE.startswith(data[: len(PREFACE)]):
        return
    with pytest.raises(Malformed, match="gRPC uses another port"):
        list(splitter.feed(data))
