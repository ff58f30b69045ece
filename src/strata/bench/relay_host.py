"""Many relays in one process, each with its own server and upstream session: `relay_host UPSTREAM PREFIX COUNT`.

In production every node runs its own relay. On a small machine, one process per relay would take minutes to start and
gigabytes of memory, and a call would pass through the same code.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from strata.coordinator.relay.relay import RelayConfig, RelayServer
from strata.coordinator.serve.listener import settle_memory

AT_ONCE = 16


async def main(upstream: str, prefix: str, count: int) -> None:
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    hosted = [RelayServer(RelayConfig(upstream=upstream, listen=f"unix:{prefix}-{i}.sock")) for i in range(count)]
    addresses: list[str] = []
    for start in range(0, count, AT_ONCE):
        started = await asyncio.gather(*(relay.start() for relay in hosted[start : start + AT_ONCE]))
        addresses += [found.grpc for found in started]
    settle_memory()
    print(json.dumps({"grpc": ",".join(addresses)}), flush=True)
    await leave.wait()
    await asyncio.gather(*(relay.stop() for relay in hosted))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
