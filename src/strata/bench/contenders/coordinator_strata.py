"""The coordinator under load: a real process with its journal on disk, called over sessions and with unary calls.

The mix is 90 % heartbeats, 9 % shard acks, each durable before its answer, and 1 % other calls. An error ends the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from strata.bench.load import OPEN, SESSION, count_responses, framed, stream_rate, unary_rate
from strata.bench.server_processes import CLIENT_CORE, coordinator, cpu_s, pin
from strata.coordinator.client import AsyncCoordinatorClient
from strata.v1 import calls_pb2, session_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from strata.coordinator.client import AsyncWorker
    from strata.transport.credentials import ClientSecurity

JOB = "bench"
DATASET = "rows"
NUM_WORKERS = 100
NUM_SHARDS = 200_000
NUM_STREAMS = 4
FRAME_SIZE = 64
WINDOW = 8
CONCURRENCY = 64


def mixed(
    workers: list[AsyncWorker], shards: dict[str, Iterator[int]], num_calls: int
) -> Iterator[session_pb2.Request]:
    """Spread nine acks and one other call evenly over every hundred calls."""
    for number in range(num_calls):
        worker = workers[number % len(workers)]
        request = session_pb2.Request(id=number + 1)
        place = number // len(workers) % 100
        if place % 11 == 10:
            request.ack_shards.CopyFrom(ack(worker, next(shards[worker.worker_id])))
        elif place == 99:
            request.get_latest_checkpoint.CopyFrom(calls_pb2.GetLatestCheckpointRequest(job_id=JOB))
        else:
            request.heartbeat.CopyFrom(beat(worker, step=number))
        yield request


def beat(worker: AsyncWorker, step: int) -> calls_pb2.HeartbeatRequest:
    return calls_pb2.HeartbeatRequest(
        job_id=JOB,
        worker_id=worker.worker_id,
        incarnation=worker.fence,
        state=types_pb2.WORKER_STATE_TRAINING,
        step=step,
    )


def ack(worker: AsyncWorker, index: int) -> calls_pb2.AckShardsRequest:
    return calls_pb2.AckShardsRequest(
        job_id=JOB,
        worker_id=worker.worker_id,
        incarnation=worker.fence,
        generation=worker.generation,
        dataset_id=DATASET,
        indices=[index],
    )


async def registered(client: AsyncCoordinatorClient) -> tuple[list[AsyncWorker], dict[str, Iterator[int]]]:
    """Return the workers, each with the shards that it has not acknowledged."""
    workers = [await client.register_worker(f"worker-{i:05d}", job_id=JOB) for i in range(NUM_WORKERS)]
    await client.register_dataset(DATASET, job_id=JOB, total_samples=NUM_SHARDS, shard_size=1)
    shards = {worker.worker_id: iter([s.index for s in await worker.shards(DATASET)]) for worker in workers}
    return workers, shards


def session_of(number: int, requests: Iterable[session_pb2.Request]) -> list[bytes]:
    """Return the frames of one session; the first includes the greeting."""
    hello = session_pb2.ClientFrame(hello=session_pb2.Hello(session_id=f"bench-{number}"))
    first, *others = framed(requests, size=FRAME_SIZE)
    return [hello.SerializeToString() + first, *others]


async def measure(
    address: str, pid: int, *, num_calls: int, seconds: float, security: ClientSecurity = OPEN
) -> dict[str, float]:
    async with AsyncCoordinatorClient(address, security=security) as client:
        workers, shards = await registered(client)
        streams = [
            # In a thread, so that the workers keep sending heartbeats.
            await asyncio.to_thread(
                session_of, number, mixed(workers[number::NUM_STREAMS], shards, num_calls // NUM_STREAMS)
            )
            for number in range(NUM_STREAMS)
        ]
        server = psutil.Process(pid)
        cpu_before_s, start_s = cpu_s(server), time.perf_counter()
        rate = await stream_rate(address, SESSION, streams, window=WINDOW, count=count_responses, security=security)
        taken_s = time.perf_counter() - start_s
        used_s = cpu_s(server) - cpu_before_s
        # The workers' sessions are closed; heartbeats keep them alive before the lost connections count against them.
        await asyncio.gather(*(worker.heartbeat() for worker in workers))
        unary = await unary_rate(
            address,
            "/strata.v1.Coordinator/Heartbeat",
            beat(workers[0], step=1).SerializeToString(),
            seconds=seconds,
            concurrency=CONCURRENCY,
            security=security,
        )
        return {
            "requests_per_s": rate,
            "unary_requests_per_s": unary,
            "session_server_cpu_fraction": used_s / taken_s,
            "session_cpu_us_per_request": used_s / (rate * taken_s) * 1e6,
            "server_rss_mb": server.memory_info().rss / 1e6,
        }


def main() -> None:
    quick = "--quick" in sys.argv
    num_calls, seconds = (40_000, 1.0) if quick else (200_000, 3.0)
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, pid),
    ):
        pin(CLIENT_CORE)
        figures = asyncio.run(measure(address, pid, num_calls=num_calls, seconds=seconds))
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
