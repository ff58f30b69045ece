"""Sessions over gRPC: one bidirectional stream each, for clients in any language."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc

from strata.coordinator.service import abort
from strata.coordinator.session import HELLO_WITHIN_S, NO_FRAME, NO_HELLO
from strata.errors import StrataError
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from strata.coordinator.door import Door
    from strata.coordinator.session import Link, SessionHub

Context = grpc.aio.ServicerContext[Any, Any]


class _Malformed:
    """A frame that cannot be decoded."""


def session_handler(hub: SessionHub, door: Door) -> grpc.RpcMethodHandler[Any, Any]:
    def decode(data: bytes) -> pb.ClientFrame | _Malformed:
        # Raised here, an error would end the call under the writer's feet: gRPC then sometimes loses the status.
        return hub.decode(data) or _Malformed()

    async def serve(_requests: Any, context: Context) -> None:
        try:
            role = door.role(context)
            first = await _first_frame(context)
            news = asyncio.Event()
            link = hub.begin(first.hello, role, news.set)
        except StrataError as error:
            await abort(context, error)
            return
        writer = asyncio.create_task(_write(hub, link, context, news))
        try:
            frame: Any = first
            while isinstance(frame, pb.ClientFrame):
                hub.take_in(link, frame.requests)
                frame = await context.read()
            if isinstance(frame, _Malformed):
                link.give_up(grpc.StatusCode.INVALID_ARGUMENT, NO_FRAME)
            link.end()
            # Not cancelled: a status cannot be sent while a message is on its way.
            await writer
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            hub.closed(link)

    return grpc.stream_stream_rpc_method_handler(serve, request_deserializer=decode, response_serializer=hub.encode)


async def _first_frame(context: Context) -> pb.ClientFrame:
    try:
        async with asyncio.timeout(HELLO_WITHIN_S):
            first = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no frame within {HELLO_WITHIN_S:g} s")
    if not isinstance(first, pb.ClientFrame) or not first.HasField("hello"):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_HELLO)
    frame: pb.ClientFrame = first
    return frame


async def _write(hub: SessionHub, link: Link, context: Context, news: asyncio.Event) -> None:
    await context.write(hub.welcome())
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
