"""Servers of bare connections: they stop without leaving a connection behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest

from strata.transport import frames
from strata.transport.addresses import Address
from strata.tune import endpoint


@asynccontextmanager
async def plain_server(_place: Path) -> AsyncIterator[Callable[[], socket.socket]]:
    connections: list[asyncio.StreamWriter] = []
    server, address = await frames.listen(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), lambda _, writer: connections.append(writer)),
        Address("127.0.0.1", 0),
        None,
    )
    yield lambda: socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    await frames.close_server(server)
    for connection in connections:
        connection.close()


@asynccontextmanager
async def server_of_a_study(place: Path) -> AsyncIterator[Callable[[], socket.socket]]:
    async def handle(*_: object) -> None:
        raise AssertionError("it was sent no message")

    async with endpoint.serve(handle, place):

        def connect() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(place / "trials"))
            return connection

        yield connect


@pytest.mark.parametrize("serve", [plain_server, server_of_a_study])
@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_is_being_accepted_while_a_server_stops_is_closed(
    serve: Callable[[Path], AbstractAsyncContextManager[Callable[[], socket.socket]]], turns: int, tmp_path: Path
) -> None:
    """`turns`: how often the event loop turns between the connection and the stop."""

    async def stop_after_a_connection() -> None:
        async with serve(tmp_path) as connect:
            connection = connect()
            for _ in range(turns):
                await asyncio.sleep(0)
        with connection, suppress(ConnectionResetError):  # reset: it was not accepted yet
            assert await asyncio.to_thread(connection.recv, 1) == b""

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(stop_after_a_connection())
        gc.collect()
    assert [str(each.message) for each in found] == []
