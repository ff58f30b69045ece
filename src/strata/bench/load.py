"""Load on a gRPC server, the same for the coordinator and for the plain echo server.

Messages are serialised before the clock starts, so that the client's work is not measured.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from strata.transport.credentials import ClientSecurity
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
SESSION = "/strata.v1.Coordinator/Session"
OPEN = ClientSecurity()
WARM_UP_S = 0.5


async def unary_rate(
    address: str, method: str, payload: bytes, *, seconds: float, concurrency: int, security: ClientSecurity = OPEN
) -> float:
    """Return answers per second to one unary call, with `concurrency` calls at a time."""
    metadata = security.metadata()
    async with security.channel(address, OPTIONS) as channel:
        call: Any = channel.unary_unary(method)
        num_answers = 0

        async def ask(until_s: float) -> None:
            nonlocal num_answers
            while time.perf_counter() < until_s:
                await call(payload, metadata=metadata)
                num_answers += 1

        async def together(seconds: float) -> float:
            start_s = time.perf_counter()
            await asyncio.gather(*(ask(start_s + seconds) for _ in range(concurrency)))
            return time.perf_counter() - start_s

        await together(WARM_UP_S)
        num_answers = 0
        taken_s = await together(seconds)
        return num_answers / taken_s


async def stream_rate(
    address: str,
    method: str,
    streams: Sequence[Sequence[bytes]],
    *,
    window: int,
    count: Callable[[bytes], int],
    security: ClientSecurity = OPEN,
) -> float:
    """Return answers per second over several streams, each with at most `window` unanswered frames."""
    metadata = security.metadata()
    async with security.channel(address, OPTIONS) as channel:

        async def drive(frames: Sequence[bytes]) -> int:
            stream: Any = channel.stream_stream(method)(metadata=metadata)
            num_answers, num_sent, num_calls_out = 0, 0, 0
            per_frame = count_requests(frames[0])
            while num_answers < per_frame * len(frames):
                while num_sent < len(frames) and num_calls_out < window * per_frame:
                    await stream.write(frames[num_sent])
                    num_sent += 1
                    num_calls_out += per_frame
                got = count(await stream.read())
                num_answers += got
                num_calls_out -= got
            await stream.done_writing()
            return num_answers

        start_s = time.perf_counter()
        num_answers = sum(await asyncio.gather(*map(drive, streams)))
        return num_answers / (time.perf_counter() - start_s)


def count_requests(frame: bytes) -> int:
    return len(pb.ClientFrame.FromString(frame).requests)


def count_responses(frame: bytes) -> int:
    """Return the number of answers; raise on an error, because errors are faster than answers."""
    responses = pb.ServerFrame.FromString(frame).responses
    for response in responses:
        if response.HasField("error"):
            raise RuntimeError(f"the server refused a call: {response.error.message}")
    return len(responses)


def framed(requests: Iterable[pb.Request], *, size: int) -> list[bytes]:
    """Return full frames only, so that every frame costs the same."""
    everything = list(requests)
    whole = len(everything) - len(everything) % size
    return [pb.ClientFrame(requests=everything[i : i + size]).SerializeToString() for i in range(0, whole, size)]
