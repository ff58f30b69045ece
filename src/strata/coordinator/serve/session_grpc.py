"""Sessions over gRPC: one bidirectional stream each, for clients in any language."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc

from strata.coordinator.serve.admission import SMALL_BYTES
from strata.coordinator.serve.service import abort
from strata.coordinator.serve.session import HELLO_WITHIN_S, NO_HELLO
from strata.coordinator.state.limits import check_room
from strata.errors import LimitExceeded, StrataError
from strata.transport.tokens import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.coordinator.config import Limits
    from strata.coordinator.serve.admission import AdmissionControl
    from strata.coordinator.serve.session import Link, SessionHub
    from strata.v1 import session_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

MAX_READERS = 64
"""gRPC sessions with the role reader; each may have a message of up to `max_grpc_message_bytes` in transit."""


def session_handler(
    hub: SessionHub, admission: AdmissionControl, slots: StreamSlots
) -> grpc.RpcMethodHandler[Any, Any]:
    async def serve(_requests: Any, context: Context) -> None:
        try:
            role = admission.role(context)
            with slots.take(role):
                await _serve(hub, context, role, slots.max_message_bytes)
        except StrataError as error:
            await abort(context, error.with_traceback(None))

    return grpc.stream_stream_rpc_method_handler(serve, response_serializer=hub.encode)


class StreamSlots:
    """Slots for streams of requests through gRPC, which may buffer a whole message for each."""

    def __init__(self, limits: Limits) -> None:
        self.max_message_bytes = min(limits.max_grpc_message_bytes, limits.max_message_bytes)
        self._max_streams = limits.max_grpc_sessions
        self._num = 0
        self._num_readers = 0

    @contextlib.contextmanager
    def take(self, role: Role) -> Iterator[None]:
        """Take a slot.

        Raises:
            LimitExceeded: All slots are taken.
        """
        is_reader = role <= Role.READER
        check_room(self._num, self._max_streams, "sessions through gRPC", "max_grpc_sessions", field="")
        if is_reader and self._num_readers >= MAX_READERS:
            raise LimitExceeded(f"readers already have {MAX_READERS} gRPC sessions; close one of them")
        self._num += 1
        self._num_readers += is_reader
        try:
            yield
        finally:
            self._num -= 1
            self._num_readers -= is_reader


async def _serve(hub: SessionHub, context: Context, role: Role, max_bytes: int) -> None:
    first = await _first_frame(hub, context)
    news, idle = asyncio.Event(), asyncio.Event()
    link = hub.begin(first.hello, role, carrier_bytes=max_bytes, on_news=news.set, on_idle=idle.set)
    writer = asyncio.create_task(_write(hub, link, context, news))
    try:
        hub.run_calls(link, first.requests)
        while True:
            if link.is_busy:
                idle.clear()
                await idle.wait()
            frame = await context.read()
            if not isinstance(frame, bytes):
                break
            if link.given_up:
                continue  # read on, or a client that is still writing would never receive the reason
            if len(frame) > link.max_request_bytes:
                why = f"a frame has {len(frame)} bytes; the limit is {link.max_request_bytes}"
                link.give_up(grpc.StatusCode.INVALID_ARGUMENT, why)
            else:
                hub.receive(link, frame)
        link.end()
        # Not cancelled: a status cannot be sent while a message is in transit.
        await writer
    finally:
        writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writer
        hub.closed(link)


async def _first_frame(hub: SessionHub, context: Context) -> pb.ClientFrame:
    try:
        async with asyncio.timeout(HELLO_WITHIN_S):
            data = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no frame within {HELLO_WITHIN_S:g} s")
    first = hub.decode(data) if isinstance(data, bytes) and len(data) <= SMALL_BYTES else None
    if first is None or not first.HasField("hello"):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_HELLO)
    frame: pb.ClientFrame = first
    return frame


async def _write(hub: SessionHub, link: Link, context: Context, news: asyncio.Event) -> None:
    await context.write(hub.welcome(link))
    while True:
        news.clear()
        while (frame := link.take_frame()) is not None:
            await context.write(frame)
        if link.is_over:
            break
        await news.wait()
    if link.given_up:
        hub.dropped(link)
        await context.abort(*link.given_up)
