"""Simulated processes of trials, all in this process: `tune_scale_workers ADDRESS`.

They speak to the driver at the address as real ones do: a connection each, a report, its answer, the next report. Each
line of stdin starts or kills one, each line of stdout is an exit.

The losses fall from report to report, so that ASHA compares at every rung and stops hardly any trial.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys

import msgspec

from strata.launch.environment import STOPPED
from strata.transport.addresses import parse_address
from strata.tune import messages as m

NUM_REPORTS = 100


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Start the process of a rank, or kill it."""

    rank: int
    launch: int = 0
    is_kill: bool = False


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    code: int


class Stopped(Exception):
    pass


class Workers:
    def __init__(self, path: str) -> None:
        self._path = path
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """Carry out orders until stdin ends."""
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while line := await orders.readline():
            order = msgspec.json.decode(line, type=Order)
            if not order.is_kill:
                self._tasks[order.rank] = asyncio.create_task(self._lived(order))
            elif order.rank in self._tasks:
                self._tasks[order.rank].cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _lived(self, order: Order) -> None:
        code = 1
        try:
            await self._train(order)
            code = 0
        except Stopped:
            code = STOPPED
        except asyncio.CancelledError:
            code = -signal.SIGKILL
        except (OSError, EOFError) as error:
            print(f"rank {order.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        del self._tasks[order.rank]
        print(msgspec.json.encode(Exit(rank=order.rank, code=code)).decode(), flush=True)

    async def _train(self, order: Order) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=m.MAX_BYTES)
        try:
            writer.write(m.encode(m.Hello(launch=order.launch, rank=order.rank)))
            begun = await _receive(reader)
            assert isinstance(begun, m.Order)
            loss = 0.0
            for number in range(1, NUM_REPORTS + 1):
                loss = 1.0 / next(self._numbers)
                writer.write(m.encode(m.Report(lease=begun.lease, number=number, step=number, values=(loss,))))
                await _receive(reader)
            writer.write(m.encode(m.Result(lease=begun.lease, number=NUM_REPORTS + 1, values=(loss,))))
            await _receive(reader)
        finally:
            writer.close()


async def _receive(reader: asyncio.StreamReader) -> m.ToTrial:
    """
    Raises:
        EOFError: The driver has closed the connection.
        Stopped: It has asked the trial to stop.
    """
    message = m.to_trial.decode(await reader.readuntil(b"\n"))
    if isinstance(message, m.StopTrial):
        raise Stopped
    return message


if __name__ == "__main__":
    asyncio.run(Workers(parse_address(sys.argv[1], field="ADDRESS").path).run())
