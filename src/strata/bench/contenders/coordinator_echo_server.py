"""A plain grpc.aio server that returns what it receives: the cost of any Python server before it does any work."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import grpc

from strata.v1 import session_pb2 as pb


async def _unary(request: bytes, _context: Any) -> bytes:
    return request


async def _stream(_requests: Any, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


async def _framed(_requests: Any, context: Any) -> None:
    """Parse a frame and answer each request in it, like a session."""
    while (frame := await context.read()) is not grpc.aio.EOF:
        requests = pb.ClientFrame.FromString(frame).requests
        answer = pb.ServerFrame(responses=[pb.Response(id=request.id) for request in requests])
        await context.write(answer.SerializeToString())


async def main() -> None:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Stream": grpc.stream_stream_rpc_method_handler(_stream),
        "Framed": grpc.stream_stream_rpc_method_handler(_framed),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"grpc": f"127.0.0.1:{port}"}), flush=True)
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)
    await leave.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
