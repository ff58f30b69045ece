"""The bounds on a request before it is decoded: elements, bytes, time, and turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from strata.clock import ManualClock
from strata.coordinator.config import Limits
from strata.coordinator.serve import admission
from strata.coordinator.serve.admission import (
    Account,
    BodySlots,
    Buffers,
    FairQueue,
    check_repeated,
    check_wire,
    num_fields,
    receivable_bytes,
)
from strata.errors import ConfigError, InvalidArgument, LimitExceeded
from strata.transport.tokens import Role
from strata.v1 import calls_pb2 as calls
from strata.v1 import session_pb2 as pb

DEADLINE_S = 30.0


def run(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, DEADLINE_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - timers change it
        await asyncio.sleep(0.001)


# -- elements ------------------------------------------------------------------------------------------------------

shards = st.builds(calls.ShardSpec, shard_id=st.text(max_size=200), num_samples=st.integers(0, 2**64 - 1))
datasets = st.builds(calls.RegisterDatasetRequest, job_id=st.just("j"), shards=st.lists(shards, max_size=5))
requests = st.builds(pb.Request, id=st.integers(1, 2**64 - 1), register_dataset=datasets)
frames = st.builds(pb.ClientFrame, requests=st.lists(requests, max_size=5))


@given(frames)
def test_fields_are_counted_on_the_wire_as_they_are_when_decoded(frame: pb.ClientFrame) -> None:
    data = frame.SerializeToString()
    of_dataset = [1 + len(request.register_dataset.shards) for request in frame.requests]
    assert num_fields(data, levels=1, most=100) == len(frame.requests)
    assert num_fields(data, levels=2, most=100) == 3 * len(frame.requests)
    assert num_fields(data, levels=3, most=100) == 3 * len(frame.requests) + sum(of_dataset)
    assert num_fields(data, levels=3, most=4) == min(3 * len(frame.requests) + sum(of_dataset), 5)


@given(st.binary(max_size=300), st.integers(1, 3), st.integers(0, 20))
def test_counting_terminates_on_any_input(data: bytes, levels: int, most: int) -> None:
    assert 0 <= num_fields(data, levels=levels, most=most) <= most + 1


def test_a_large_message_of_too_many_elements_is_refused_and_a_small_one_is_left_to_the_decoder() -> None:
    limits = Limits(max_message_elements=1_000)
    empty = b"\x2a\x00"
    with pytest.raises(LimitExceeded, match="max_message_elements=1000 elements"):
        check_wire(empty * admission.UNSCANNED_BYTES, levels=1, limits=limits)
    check_wire(empty * (admission.UNSCANNED_BYTES // 2), levels=1, limits=limits)
    check_wire(b"\x12" + b"\xff\xff\x7f" + bytes(admission.UNSCANNED_BYTES), levels=1, limits=limits)
    request = calls.RegisterDatasetRequest.FromString(empty * 1_001)
    with pytest.raises(LimitExceeded, match="shards has 1001, more than") as caught:
        check_repeated(("shards",), request, limits)
    assert caught.value.field == "shards"


def test_readers_may_send_little_and_others_what_their_connection_carries() -> None:
    assert [receivable_bytes(role, 1 << 20) for role in Role] == [65_536, 1 << 20, 1 << 20]
    assert receivable_bytes(Role.READER, 1_000) == 1_000


def test_the_buffers_must_have_room_for_the_largest_frame() -> None:
    with pytest.raises(ConfigError, match="so the largest frame could not be received"):
        Limits(max_receive_bytes=1_000)


# -- bytes ---------------------------------------------------------------------------------------------------------


class Holding:
    def __init__(self) -> None:
        self.why = ""

    def displace(self, why: str) -> None:
        self.why = why


def test_full_buffers_displace_the_oldest_holder() -> None:
    async def play() -> None:
        buffers = Buffers(100)
        first, second, third = Holding(), Holding(), Holding()
        buffers.hold(first, 40, is_arriving=True)
        buffers.hold(second, 40, is_arriving=True)
        buffers.hold(first, 50, is_arriving=True)  # more of the same frame: its age does not change
        buffers.hold(third, 30, is_arriving=True)
        assert (first.why[:28], second.why, third.why) == ("limits.max_receive_bytes=100", "", "")
        assert buffers.num_bytes == 70
        buffers.release(first)
        buffers.release(second)
        buffers.release(third)
        assert buffers.num_bytes == 0

    run(play())


def test_a_frame_has_a_deadline_until_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "FRAME_WITHIN_S", 0.01)

    async def play() -> None:
        clock = ManualClock()
        buffers = Buffers(100, now_s=clock.monotonic_s)
        slow, waiting, later = Holding(), Holding(), Holding()
        buffers.hold(slow, 1, is_arriving=True)
        buffers.hold(waiting, 1, is_arriving=False)
        clock.advance(0.009)
        buffers.hold(slow, 2, is_arriving=True)
        buffers.hold(later, 1, is_arriving=True)
        clock.advance(0.001)
        await until(lambda: bool(slow.why))
        assert (slow.why, waiting.why, later.why) == ("a frame did not arrive within 0.01 s", "", "")
        assert buffers.num_bytes == 2

    run(play())


# -- bodies --------------------------------------------------------------------------------------------------------


class Call:
    """The part of gRPC's context that is needed to read a body."""

    def __init__(self, body: bytes | None = None) -> None:
        self._body = body
        self.is_read = asyncio.Event()

    async def read(self) -> bytes | None:
        self.is_read.set()
        if self._body is None:
            await asyncio.Event().wait()
        return self._body if self._body != b"end" else None


def test_a_call_that_waits_for_a_slot_shortens_the_oldest_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CONTENDED_WITHIN_S", 0.01)
    monkeypatch.setattr(admission, "CHECK_EVERY_S", 0.001)

    async def play() -> None:
        bodies = BodySlots(2)
        slow = [Call(), Call()]
        reading = [asyncio.create_task(bodies.receive(call)) for call in slow]  # type: ignore[arg-type]
        for call in slow:
            await call.is_read.wait()
        assert await bodies.receive(Call(b"here")) == b"here"  # type: ignore[arg-type]
        with pytest.raises(LimitExceeded, match="did not arrive in time"):
            await reading[0]
        assert not reading[1].done()
        assert await bodies.receive(Call(b"again")) == b"again"  # type: ignore[arg-type]  # without shortening a deadline
        assert not reading[1].done()
        reading[1].cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        with pytest.raises(InvalidArgument, match="without a message"):
            await bodies.receive(Call(b"end"))  # type: ignore[arg-type]

    run(play())


def test_an_overdue_body_fails_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_WITHIN_S", 0.0)

    async def play() -> None:
        bodies, slow = BodySlots(1), Call()
        reading = asyncio.create_task(bodies.receive(slow))  # type: ignore[arg-type]
        await slow.is_read.wait()
        bodies._check_deadlines()
        monkeypatch.setattr(admission, "BODY_WITHIN_S", 10.0)
        assert await bodies.receive(Call(b"here")) == b"here"  # type: ignore[arg-type]  # in the same turn
        with pytest.raises(LimitExceeded, match="did not arrive in time"):
            await reading

    run(play())


def test_a_caller_that_disconnects_is_not_treated_as_late() -> None:
    async def play() -> None:
        bodies, slow = BodySlots(1), Call()
        reading = asyncio.create_task(bodies.receive(slow))  # type: ignore[arg-type]
        await slow.is_read.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await bodies.receive(Call(b"here")) == b"here"  # type: ignore[arg-type]

    run(play())


def test_a_slot_that_was_handed_to_a_cancelled_call_goes_to_the_next_one() -> None:
    async def play() -> None:
        bodies, slow = BodySlots(1), Call()
        reading = asyncio.create_task(bodies.receive(slow))  # type: ignore[arg-type]
        await slow.is_read.wait()
        waiting = [asyncio.create_task(bodies.receive(Call(b"here"))) for _ in range(3)]  # type: ignore[arg-type]
        await asyncio.sleep(0)  # a turn in which they queue
        waiting[0].cancel()  # before it has a slot
        bodies._release_slot()  # handed to the second one, which is cancelled in the same turn
        waiting[1].cancel()
        assert await waiting[2] == b"here"
        reading.cancel()
        ended = await asyncio.gather(reading, *waiting[:2], return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
        assert bodies._num_free == 2  # the test has released one more than it took

    run(play())


# -- turns ---------------------------------------------------------------------------------------------------------


def test_large_requests_take_turns_with_each_other_and_with_the_loop() -> None:
    async def play() -> None:
        clock = ManualClock()
        lane, done = FairQueue(now_s=clock.monotonic_s), []

        def work(name: str, num: int) -> Iterator[None]:
            for number in range(num):
                done.append(f"{name}{number}")
                clock.advance(0.01)
                yield

        def small(number: int) -> None:
            done.append(f"small{number}")
            if number < 3:
                asyncio.get_running_loop().call_soon(small, number + 1)

        lane.add(work("a", 3), Account())
        lane.add(work("b", 2), Account())
        asyncio.get_running_loop().call_soon(small, 0)
        await until(lambda: "a2" in done)
        assert [name for name in done if name[0] in "ab"] == ["a0", "b0", "a1", "b1", "a2"]
        assert done.index("small1") < done.index("a1")

    run(play())


def test_the_caller_that_used_the_queue_least_comes_first() -> None:
    async def play() -> None:
        clock = ManualClock()
        lane, done = FairQueue(now_s=clock.monotonic_s), []

        def work(name: str, num: int) -> Iterator[None]:
            for _ in range(num):
                done.append(name)
                clock.advance(0.01)
                yield

        for _ in range(20):
            lane.add(work("heavy", 10), Account())
        await until(lambda: len(done) > 40)
        num_before = len(done)
        lane.add(work("light", 1), Account())
        await until(lambda: "light" in done)
        assert done.index("light") - num_before <= 20, "no more than one piece of each of the others"

    run(play())


def test_a_caller_with_much_queued_work_does_not_delay_another() -> None:
    async def play() -> None:
        clock = ManualClock()
        lane, done, busy = FairQueue(now_s=clock.monotonic_s), [], Account()

        def work(name: str) -> Iterator[None]:
            done.append(name)
            clock.advance(0.01)
            yield from ()

        for _ in range(50):
            lane.add(work("busy"), busy)
        lane.add(work("other"), Account())
        await until(lambda: len(done) == 51)
        assert done.index("other") <= 1

    run(play())


def test_a_failing_piece_raises_in_its_caller_and_the_queue_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        lane = FairQueue()

        def broken() -> Iterator[None]:
            yield
            raise RuntimeError("of its own")

        lane.add(broken(), Account())
        with pytest.raises(LimitExceeded, match="too much"):
            await lane.run(_too_much, Account())
        assert await lane.run(lambda: 7, Account()) == 7

    run(play())
    assert "of its own" in caplog.text


def _too_much() -> None:
    raise LimitExceeded("too much")


def test_a_long_piece_is_followed_by_a_pause_as_long_as_itself() -> None:
    async def play() -> None:
        clock = ManualClock()
        lane, loop = FairQueue(now_s=clock.monotonic_s), asyncio.get_running_loop()
        began_s: list[float] = []

        def work() -> Iterator[None]:
            for _ in range(2):
                began_s.append(loop.time())
                clock.advance(0.1)
                yield

        lane.add(work(), Account())
        await lane.run(lambda: None, Account())
        await until(lambda: len(began_s) == 2)
        assert began_s[1] - began_s[0] >= 0.1

    run(play())
