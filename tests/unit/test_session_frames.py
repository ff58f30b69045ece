"""The server of bare frames: it stops without leaving a connection behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from typing import Any

import pytest

from strata.coordinator.config import Limits, SecurityConfig
from strata.coordinator.serve.session_frames import FramesServer


class Hub:
    """What a connection without a session needs."""

    frames = ""

    def encode(self, frame: Any) -> bytes:
        encoded: bytes = frame.SerializeToString()
        return encoded


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_is_being_accepted_while_the_server_stops_is_closed(turns: int) -> None:
    """`turns`: how often the event loop turns between the connection and the stop."""

    async def stop_after_a_connection() -> None:
        server = FramesServer(Hub(), Limits())  # type: ignore[arg-type]  # a hub without sessions
        await server.start("127.0.0.1:0", "127.0.0.1:1", SecurityConfig())
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))):
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(stop_after_a_connection())
        gc.collect()
    assert [str(each.message) for each in found] == []
