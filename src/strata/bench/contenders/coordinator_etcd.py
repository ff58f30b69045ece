"""Durable small writes to etcd, which flushes its log before it answers.

etcd has no frames, so both of its ways are measured: one Put per call with as many unanswered calls as Strata, and 64
Puts per transaction, as many as a frame of Strata has. The two messages are encoded by hand.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.bench.contenders.coordinator_strata import FRAME_SIZE, NUM_STREAMS, WINDOW
from strata.bench.load import OPEN, OPTIONS
from strata.bench.server_processes import CLIENT_CORE, HOST, START_S, free_port, pin, running, wait_until_it_listens

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "etcd"
PUT = "/etcdserverpb.KV/Put"
TXN = "/etcdserverpb.KV/Txn"
VALUE = b"1" * 32


def field(number: int, content: bytes) -> bytes:
    """Encode a protobuf field of bytes or a message, up to 16 KiB."""
    size = len(content)
    length = bytes([size]) if size < 0x80 else bytes([size & 0x7F | 0x80, size >> 7])
    return bytes([number << 3 | 2]) + length + content


def put(key: bytes) -> bytes:
    """Encode a PutRequest: key = 1, value = 2."""
    return field(1, key) + field(2, VALUE)


def transaction(puts: Sequence[bytes]) -> bytes:
    """Encode a TxnRequest without conditions: success = 2, of RequestOp, request_put = 2."""
    return b"".join(field(2, field(2, one)) for one in puts)


async def rate(port: int, method: str, streams: Sequence[Sequence[bytes]], *, per_call: int, window: int) -> float:
    """Return Puts per second over one connection per stream, with a limited number of unanswered calls."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(OPEN.channel(f"{HOST}:{port}", OPTIONS)) for _ in streams]

        async def ask(call: Any, payloads: Sequence[bytes]) -> None:
            for payload in payloads:
                await call(payload)

        for channel in channels:  # etcd accepts connections before it has elected a leader; that time does not count
            first: Any = channel.unary_unary(PUT)
            await first(put(b"bench/first"), timeout=START_S, wait_for_ready=True)
        start_s = time.perf_counter()
        await asyncio.gather(
            *(
                ask(channel.unary_unary(method), payloads[number::window])
                for channel, payloads in zip(channels, streams, strict=True)
                for number in range(window)
            )
        )
        return per_call * sum(map(len, streams)) / (time.perf_counter() - start_s)


async def measure(port: int, num_calls: int) -> dict[str, float]:
    each = num_calls // NUM_STREAMS // FRAME_SIZE * FRAME_SIZE
    streams = [[put(b"bench/acks/%02d/%08d" % (number, i)) for i in range(each)] for number in range(NUM_STREAMS)]
    joined = [[transaction(puts[i : i + FRAME_SIZE]) for i in range(0, each, FRAME_SIZE)] for puts in streams]
    return {
        "etcd_puts_per_s": await rate(port, PUT, streams, per_call=1, window=WINDOW * FRAME_SIZE),
        "etcd_txn_puts_per_s": await rate(port, TXN, joined, per_call=FRAME_SIZE, window=WINDOW),
    }


def main() -> None:
    program = shutil.which(PROGRAM)
    if program is None:
        print(json.dumps({"not_installed": PROGRAM}))
        return
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    num_calls = 5_000 if "--quick" in sys.argv else 50_000
    port, peer_port = free_port(), free_port()
    clients, peers = f"http://{HOST}:{port}", f"http://{HOST}:{peer_port}"
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        settings = {"name": "bench", "data-dir": f"{directory}/etcd", "log-level": "error"}
        settings |= {"listen-client-urls": clients, "advertise-client-urls": clients}
        settings |= {"listen-peer-urls": peers, "initial-advertise-peer-urls": peers}
        settings |= {"initial-cluster": f"bench={peers}"}
        with running(
            [program, *(f"--{name}={value}" for name, value in settings.items())], stdout=subprocess.DEVNULL
        ) as process:
            wait_until_it_listens(process, port)
            pin(CLIENT_CORE)
            figures = asyncio.run(measure(port, num_calls))
    versions = {"etcd": version.partition("Version: ")[2].split()[0]}
    print(json.dumps({"figures": figures, "versions": versions}))


if __name__ == "__main__":
    main()
