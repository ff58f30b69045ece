"""Durable small writes to the coordinator: sessions that only acknowledge shards, each durable before its answer."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strata.bench.contenders.coordinator_strata import NUM_STREAMS, WINDOW, ack, registered, session_of
from strata.bench.load import SESSION, count_responses, stream_rate
from strata.bench.server_processes import CLIENT_CORE, coordinator, pin
from strata.coordinator.client import AsyncCoordinatorClient
from strata.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.coordinator.client import AsyncWorker


def acks(workers: list[AsyncWorker], shards: dict[str, Iterator[int]], count: int) -> Iterator[session_pb2.Request]:
    for number in range(count):
        worker = workers[number % len(workers)]
        yield session_pb2.Request(id=number + 1, ack_shards=ack(worker, next(shards[worker.worker_id])))


async def measure(address: str, num_calls: int) -> float:
    async with AsyncCoordinatorClient(address) as client:
        workers, shards = await registered(client)
        streams = [
            await asyncio.to_thread(
                session_of, number, acks(workers[number::NUM_STREAMS], shards, num_calls // NUM_STREAMS)
            )
            for number in range(NUM_STREAMS)
        ]
        return await stream_rate(address, SESSION, streams, window=WINDOW, count=count_responses)


def main() -> None:
    num_calls = 10_000 if "--quick" in sys.argv else 100_000
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory,
        coordinator(Path(directory)) as (address, _),
    ):
        pin(CLIENT_CORE)
        rate = asyncio.run(measure(address, num_calls))
    print(json.dumps({"figures": {"durable_acks_per_s": rate}}))


if __name__ == "__main__":
    main()
