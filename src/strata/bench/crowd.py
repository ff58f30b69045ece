"""Many cheap simulated workers.

The workers of a node share one session. Their frames are built before the clock starts, and only the kind and the time
of an answer are examined. The same code talks to a relay and to a coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from strata.bench.load import OPTIONS
from strata.coordinator.client._streams import FramedStream, GrpcStream, StreamEnded
from strata.transport.credentials import ClientSecurity
from strata.v1 import calls_pb2, types_pb2
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

JOB = "bench"
WORKERS_PER_NODE = 8
AT_ONCE = 25
"""Nodes that connect and register at the same time."""
ANSWER_S = 60.0
MAX_MESSAGE_BYTES = 16 << 20
WARM_UP_ROUNDS = 5


class Node:
    """One session and the workers that share it."""

    def __init__(self, address: str, worker_ids: Sequence[str]) -> None:
        self.worker_ids = list(worker_ids)
        self.fences: list[int] = []
        self._address = address
        self._stream: FramedStream | None = None
        self._awaited: asyncio.Future[None] | None = None
        self._num_awaited = 0
        self._came_s: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        stream = self._stream = await opened(self._address, f"of-{self.worker_ids[0]}")
        registrations = [
            pb.Request(
                id=number,
                register_worker=calls_pb2.RegisterWorkerRequest(job_id=JOB, worker_id=name, instance_id=name),
            )
            for number, name in enumerate(self.worker_ids)
        ]
        await stream.write(pb.ClientFrame(requests=registrations))
        fences: dict[int, int] = {}
        while len(fences) < len(self.worker_ids):
            for response in checked(await stream.read()).responses:
                fences[response.id] = response.register_worker.incarnation
        self.fences = [fences[number] for number in range(len(self.worker_ids))]
        self._tasks.append(asyncio.create_task(self._read()))

    def beat(self, *, first_s: float, every_s: float) -> None:
        """Start sending heartbeats for all workers of the node."""
        beats = [
            pb.Request(
                id=number,
                heartbeat=calls_pb2.HeartbeatRequest(
                    job_id=JOB, worker_id=name, incarnation=fence, state=types_pb2.WORKER_STATE_TRAINING
                ),
            )
            for number, (name, fence) in enumerate(zip(self.worker_ids, self.fences, strict=True))
        ]
        frame = pb.ClientFrame(requests=beats).SerializeToString()
        stream = self._stream
        assert stream is not None, "the node is not open"

        async def forever() -> None:
            await asyncio.sleep(first_s)
            while True:
                await stream.write_bytes(frame)
                await asyncio.sleep(every_s)

        self._tasks.append(asyncio.create_task(forever()))

    async def meet(self, frame: bytes, num_answers: int) -> tuple[float, list[float]]:
        """Send a frame of arrivals and return when it was sent and when each release came."""
        self._came_s, self._num_awaited = [], num_answers
        self._awaited = asyncio.get_running_loop().create_future()
        assert self._stream is not None
        sent_s = time.perf_counter()
        await self._stream.write_bytes(frame)
        async with asyncio.timeout(ANSWER_S):
            await self._awaited
        return sent_s, self._came_s

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is not None:
            await self._stream.close()

    async def _read(self) -> None:
        assert self._stream is not None
        try:
            while True:
                self._receive(checked(await self._stream.read()), time.perf_counter())
        except (RuntimeError, StreamEnded) as error:
            if self._awaited is not None and not self._awaited.done():
                self._awaited.set_exception(error)
            raise

    def _receive(self, frame: pb.ServerFrame, now_s: float) -> None:
        self._came_s += [now_s for response in frame.responses if response.HasField("wait_barrier")]
        if self._awaited is not None and len(self._came_s) == self._num_awaited and not self._awaited.done():
            self._awaited.set_result(None)


@contextlib.asynccontextmanager
async def gathered(addresses: Sequence[str], *, heartbeat_s: float = 1.0) -> AsyncIterator[list[Node]]:
    """Yield one node of registered workers per address, each with its own connection; heartbeats are spread evenly."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for i, address in enumerate(addresses):
            names = [f"worker-{i * WORKERS_PER_NODE + j:04d}" for j in range(WORKERS_PER_NODE)]
            nodes.append(Node(address, names))
        for start in range(0, len(nodes), AT_ONCE):
            some = nodes[start : start + AT_ONCE]
            await asyncio.gather(*(node.open() for node in some))
            for number, node in enumerate(some, start):
                stack.push_async_callback(node.close)
                node.beat(first_s=heartbeat_s * number / len(nodes), every_s=heartbeat_s)
        yield nodes


def arrivals(node: Node, generation: int, step: int, *, folded: bool) -> bytes:
    """Return a frame with the arrival of every worker; `folded` makes it one call, as a relay does."""

    def arrival(i: int) -> calls_pb2.WaitBarrierRequest:
        return calls_pb2.WaitBarrierRequest(
            job_id=JOB,
            worker_id=node.worker_ids[i],
            incarnation=node.fences[i],
            generation=generation,
            barrier_id="bench",
            step=step,
        )

    requests = [pb.Request(id=i, wait_barrier=arrival(i)) for i in range(1 if folded else len(node.worker_ids))]
    if folded:
        others = zip(node.worker_ids[1:], node.fences[1:], strict=True)
        requests[0].wait_barrier.with_workers.extend(
            calls_pb2.Arrival(worker_id=name, incarnation=fence) for name, fence in others
        )
    return pb.ClientFrame(requests=requests).SerializeToString()


async def meet_often(
    nodes: Sequence[Node], generation: int, num_rounds: int, *, folded: bool, on_warm: Callable[[], None]
) -> list[float]:
    """Run barriers of all workers and return how long each worker waited after the last arrival was sent."""
    rounds = [
        [arrivals(node, generation, step, folded=folded) for node in nodes]
        for step in range(WARM_UP_ROUNDS + num_rounds)
    ]
    waits_s: list[float] = []
    for number, frames in enumerate(rounds):
        if number == WARM_UP_ROUNDS:
            on_warm()
        num_answers = 1 if folded else WORKERS_PER_NODE
        met = await asyncio.gather(*(node.meet(frame, num_answers) for node, frame in zip(nodes, frames, strict=True)))
        last_s = max(sent_s for sent_s, _ in met)
        if number >= WARM_UP_ROUNDS:
            waits_s += [came_s - last_s for _, releases in met for came_s in releases]
    return waits_s


async def opened(address: str, session_id: str) -> FramedStream:
    """Open a plain connection like the client: its address comes from a gRPC session."""
    hello = pb.ClientFrame(hello=pb.Hello(session_id=session_id))
    grpc_stream = GrpcStream.open(address, ClientSecurity(), OPTIONS)
    try:
        await grpc_stream.write(hello)
        welcome = (await grpc_stream.read()).welcome
    finally:
        await grpc_stream.close()
    stream = await FramedStream.open(address, welcome.frames, ClientSecurity(), max_message_bytes=MAX_MESSAGE_BYTES)
    await stream.write(hello)
    await stream.read()
    return stream


def checked(frame: pb.ServerFrame) -> pb.ServerFrame:
    """Return the frame, or raise if it contains an error: an error must not count as an answer."""
    for response in frame.responses:
        if response.HasField("error"):
            raise RuntimeError(f"the server refused a call: {response.error.message}")
    return frame
