"""Durable small writes to Redis, which flushes its log before it answers (`appendfsync always`).

Uses as many connections as Strata has sessions, and pipelines as large as its frames, with as many unanswered.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from strata.bench.contenders.coordinator_strata import FRAME_SIZE, NUM_STREAMS, WINDOW
from strata.bench.server_processes import CLIENT_CORE, HOST, free_port, pin, running, wait_until_it_listens

PROGRAM = "redis-server"
DONE = b"+OK\r\n"
VALUE = b"1" * 32


def set_command(key: bytes) -> bytes:
    words = (b"SET", key, VALUE)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def pipelines(number: int, num_calls: int) -> list[bytes]:
    keys = (b"bench/acks/%02d/%08d" % (number, i) for i in range(num_calls))
    commands = [set_command(key) for key in keys]
    return [b"".join(commands[i : i + FRAME_SIZE]) for i in range(0, num_calls - FRAME_SIZE + 1, FRAME_SIZE)]


async def drive(port: int, frames: list[bytes]) -> int:
    reader, writer = await asyncio.open_connection(HOST, port)
    num_sent = num_done = 0
    while num_done < len(frames) * FRAME_SIZE:
        while num_sent < len(frames) and num_sent * FRAME_SIZE < num_done + WINDOW * FRAME_SIZE:
            writer.write(frames[num_sent])
            num_sent += 1
        await writer.drain()
        answer = await reader.readexactly(len(DONE))  # an error is not an answer
        answer += await reader.readexactly(len(DONE) * (FRAME_SIZE - 1))
        if answer != DONE * FRAME_SIZE:
            raise RuntimeError(f"Redis refused a write: {answer[:80]!r}")
        num_done += FRAME_SIZE
    writer.close()
    await writer.wait_closed()
    return num_done


async def measure(port: int, num_calls: int) -> float:
    streams = [pipelines(number, num_calls // NUM_STREAMS) for number in range(NUM_STREAMS)]
    start_s = time.perf_counter()
    num_done = sum(await asyncio.gather(*(drive(port, frames) for frames in streams)))
    return num_done / (time.perf_counter() - start_s)


def main() -> None:
    program = shutil.which(PROGRAM)
    if program is None:
        print(json.dumps({"not_installed": PROGRAM}))
        return
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    num_calls = 10_000 if "--quick" in sys.argv else 100_000
    port = free_port()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as directory:
        settings = {"bind": HOST, "port": port, "dir": directory, "save": ""}
        settings |= {"appendonly": "yes", "appendfsync": "always", "auto-aof-rewrite-percentage": 0}
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        with running([program, *flags], stdout=subprocess.DEVNULL) as process:
            wait_until_it_listens(process, port)
            pin(CLIENT_CORE)
            rate = asyncio.run(measure(port, num_calls))
    versions = {"redis": version.partition("v=")[2].split()[0]}
    print(json.dumps({"figures": {"redis_sets_per_s": rate}, "versions": versions}))


if __name__ == "__main__":
    main()
