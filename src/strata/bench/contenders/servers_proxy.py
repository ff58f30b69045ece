"""A process between workers and a server that delays every byte: a long network on one machine, without privileges."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

CHUNK_BYTES = 256 << 10
MAX_CHUNKS = 1_024
"""Chunks on their way in one direction."""
HOST = "127.0.0.1"
START_S = 60.0


@contextlib.contextmanager
def delayed(address: str, delay_s: float) -> Iterator[str]:
    """Run a proxy in front of an address; yield its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, address, delay_s))
    process.start()
    there.close()
    try:
        if not here.poll(START_S):
            raise TimeoutError(f"the proxy has not started within {START_S:g} s")
        yield here.recv()
    finally:
        process.terminate()
        process.join()


def _serve(ready: Connection, address: str, delay_s: float) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_server((HOST, 0)) as listening:
        ready.send(f"{HOST}:{listening.getsockname()[1]}")
        while True:
            near, _ = listening.accept()
            far = socket.create_connection((host, int(port)))
            for source, target in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(MAX_CHUNKS)
                threading.Thread(target=_receive, args=(source, chunks, delay_s), daemon=True).start()
                threading.Thread(target=_send, args=(target, chunks), daemon=True).start()


def _receive(source: socket.socket, chunks: queue.Queue[tuple[float, bytes]], delay_s: float) -> None:
    chunk = b"-"
    while chunk:
        try:
            chunk = source.recv(CHUNK_BYTES)
        except OSError:
            chunk = b""
        chunks.put((time.monotonic() + delay_s, chunk))


def _send(target: socket.socket, chunks: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due_s, chunk = chunks.get()
        time.sleep(max(due_s - time.monotonic(), 0.0))
        with contextlib.suppress(OSError):  # the other side has closed the connection
            if not chunk:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(chunk)
