"""Plain grpc.aio echoes: unary, one message per frame, many messages per frame."""

from __future__ import annotations

import asyncio
import json
import sys

from strata.bench.load import count_responses, framed, stream_rate, unary_rate
from strata.bench.server_processes import CLIENT_CORE, pin, serving
from strata.v1 import calls_pb2, session_pb2

NUM_STREAMS = 4
FRAME_SIZE = 64
CONCURRENCY = 64


def main() -> None:
    quick = "--quick" in sys.argv
    seconds, num_calls = (1.0, 50_000) if quick else (3.0, 200_000)
    beat = calls_pb2.HeartbeatRequest(job_id="bench", worker_id="worker-00001", incarnation=1, step=12345)
    request = session_pb2.Request(id=7, heartbeat=beat)
    singles = framed([request] * (num_calls // 20 // NUM_STREAMS), size=1)
    frames = framed([request] * (num_calls // NUM_STREAMS), size=FRAME_SIZE)
    with serving(["-m", "strata.bench.contenders.coordinator_echo_server"]) as (address, _):
        pin(CLIENT_CORE)
        unary = unary_rate(address, "/echo/Unary", beat.SerializeToString(), seconds=seconds, concurrency=CONCURRENCY)
        stream = stream_rate(address, "/echo/Stream", [singles] * NUM_STREAMS, window=32, count=lambda _: 1)
        batched = stream_rate(address, "/echo/Framed", [frames] * NUM_STREAMS, window=8, count=count_responses)
        figures = {
            "raw_unary_echo_per_s": asyncio.run(unary),
            "raw_stream_echo_per_s": asyncio.run(stream),
            "raw_framed_echo_per_s": asyncio.run(batched),
        }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
