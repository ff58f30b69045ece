"""Bulk messages arrive as they were sent, over Unix sockets, TCP and TLS; hostile peers lose only their connection."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import ConfigError, Unauthenticated
from strata.transport import bulk
from strata.transport.bulk import BulkConnection, BulkServer, ConnectionLost, connect
from strata.transport.certificates import write_set
from strata.transport.frames import client_context, server_context
from strata.transport.slab import Slab
from strata.transport.tokens import Grant, Guard, Role

MAX_BYTES = 64 << 20
TOKEN = "a-token-for-these-tests"
GUARD = Guard(lambda: (Grant(Role.WORKER, TOKEN.encode()),))


def echo(connection: BulkConnection, _role: Role) -> None:
    while (message := connection.receive()) is not None:
        connection.send(message.header, message.buffers)


class Place:
    """An address of each kind, with what a client needs to connect."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.address = f"unix:{directory}/bulk" if kind == "unix" else "localhost:0"
        self.server_context: ssl.SSLContext | None = None
        self.client_context: ssl.SSLContext | None = None
        if kind == "tls":
            write_set(directory, hosts=["localhost"], now=dt.datetime.now(dt.UTC), days=1)
            self.server_context = server_context(str(directory / "server.crt"), str(directory / "server.key"), "")
            self.client_context = client_context(str(directory / "ca.crt"), "", "")

    def serve(
        self, serve: Callable[[BulkConnection, Role], None] = echo, *, max_bytes: int = MAX_BYTES, **more: Any
    ) -> BulkServer:
        server = BulkServer(self.address, serve, guard=GUARD, context=self.server_context, max_bytes=max_bytes, **more)
        self.address = server.address
        return server

    def connect(self, token: str = TOKEN) -> BulkConnection:
        return connect(self.address, token=token, context=self.client_context, max_bytes=MAX_BYTES)

    def raw(self) -> socket.socket:
        """A connection that has sent its token and may now send anything."""
        connection = self.connect()
        return connection._sock


@pytest.fixture(params=["unix", "tcp", "tls"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def server(place: Place) -> Iterator[BulkServer]:
    server = place.serve()
    yield server
    server.close()


@pytest.mark.usefixtures("server")
def test_headers_and_arrays_of_any_size_and_type_arrive_as_they_were_sent(place: Place) -> None:
    arrays: list[Any] = [
        np.arange(10, dtype=np.uint64),
        np.empty((0, 4), np.float32),
        np.random.default_rng(0).normal(size=(1_000, 64)).astype(np.float32),
        np.arange(100)[::3],  # not contiguous
        np.random.default_rng(1).integers(0, 256, 20_000_000, dtype=np.uint8),
    ]
    with place.connect() as connection:
        for header, sent in ((b"all", arrays), (b"", []), (b"x" * bulk.MAX_HEADER_BYTES, arrays[:2] * 100)):
            connection.send(header, sent)
            message = connection.receive()
            assert message is not None
            assert message.header == header
            assert [each.tobytes() for each in message.buffers] == [each.tobytes() for each in sent]


@pytest.mark.usefixtures("server")
def test_messages_of_several_threads_do_not_mix(place: Place) -> None:
    with place.connect() as connection:

        def send(number: int) -> None:
            for _ in range(50):
                connection.send(bytes([number]), [np.full(5_000, number, np.uint8)])

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        counts = [0] * 4
        for _ in range(200):
            message = connection.receive()
            assert message is not None
            (number,) = message.header
            assert (message.buffers[0] == number).all()
            counts[number] += 1
        for thread in threads:
            thread.join()

    assert counts == [50] * 4


def test_a_connection_that_the_peer_closed_between_messages_ends_without_an_error(place: Place) -> None:
    ended: list[Any] = []
    done = threading.Event()

    def serve(connection: BulkConnection, _role: Role) -> None:
        while (message := connection.receive()) is not None:
            ended.append(message.header)
        ended.append(None)
        done.set()

    server = place.serve(serve)
    with place.connect() as connection:
        connection.send(b"last")
    assert done.wait(10)
    assert ended == [b"last", None]
    server.close()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("token", ["", "another-token-that-is-not-known"])
def test_a_client_without_the_token_is_refused_with_the_reason(place: Place, token: str) -> None:
    with pytest.raises(Unauthenticated, match=r"the token is (missing|unknown)"):
        place.connect(token)


def test_an_address_that_other_machines_reach_needs_a_token_and_tls() -> None:
    for guard, context in ((Guard(), None), (GUARD, None), (Guard(), ssl.create_default_context())):
        with pytest.raises(ConfigError, match="reachable from other machines without a token and TLS"):
            BulkServer("0.0.0.0:0", echo, guard=guard, context=context, max_bytes=1)


def test_no_server_is_an_error_that_names_the_address(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=f"no server answers at unix:{tmp_path}/nothing"):
        connect(f"unix:{tmp_path}/nothing", max_bytes=1)


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


# -- shared memory -----------------------------------------------------------------------------------------------------


def test_a_buffer_in_shared_memory_is_the_same_memory_on_both_sides(tmp_path: Path) -> None:
    place = Place("unix", tmp_path)

    def serve(connection: BulkConnection, _role: Role) -> None:
        while (message := connection.receive()) is not None:
            given, out = message.buffers
            out.view(np.float32)[:] = given.view(np.float32) * 2
            connection.send(b"done")

    server = place.serve(serve, max_bytes=0)  # nothing is sent inline
    slab = Slab.create(1 << 20)
    with place.connect() as connection:
        assert connection.can_share
        connection.share(slab)
        given, out = slab.view(0, 4_000).view(np.float32), slab.view(8_000, 4_000).view(np.float32)
        for number in range(3):
            given[:] = number
            connection.send(b"double", [given, out])
            assert connection.receive() is not None
            assert (out == 2 * number).all()
    slab.close()
    server.close()


def test_shared_memory_ends_with_the_processes_that_have_it(tmp_path: Path) -> None:
    before = num_descriptors()
    place = Place("unix", tmp_path)
    server = place.serve()

    def use() -> None:
        slab = Slab.create(4_096)
        with place.connect() as connection:
            connection.share(slab)
            connection.send(b"", [slab.view(0, 10)])
            connection.receive()
        slab.close()

    for _ in range(5):
        use()
    server.close()
    for _ in range(100):
        if num_descriptors() <= before:
            break
        threading.Event().wait(0.05)  # the threads of the server close their ends
    assert num_descriptors() <= before


@pytest.mark.parametrize("offset", [4_097, 2**62, 4_096])
def test_a_reference_outside_the_shared_memory_ends_the_connection(tmp_path: Path, offset: int) -> None:
    place = Place("unix", tmp_path)
    server = place.serve()
    slab = Slab.create(4_096)
    with place.connect() as connection:
        connection.share(slab)
        words = [10 | bulk._REFERENCE, offset]
        connection._send([bulk._PREFIX.pack(0, 1, 0), *(word.to_bytes(8, "little") for word in words)])
        assert_ended(connection)
    slab.close()
    server.close()


def test_shared_memory_is_closed_once_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close would hit a file that has got the number of the descriptor in the meantime."""
    slab, close, closed = Slab.create(4_096), os.close, []

    def close_while_another_thread_closes(fd: int) -> None:
        closed.append(fd)
        if len(closed) == 1:
            other = threading.Thread(target=slab.close)
            other.start()
            other.join()
        close(fd)

    fd = slab.fd
    monkeypatch.setattr(os, "close", close_while_another_thread_closes)
    slab.close()
    assert closed == [fd]


def test_memory_that_could_shrink_is_refused(tmp_path: Path) -> None:
    place = Place("unix", tmp_path)
    server = place.serve()
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4_096)
    with place.connect() as connection:
        connection._send([bulk._PREFIX.pack(0, 0, 1)])
        socket.send_fds(connection._sock, [b"\0"], [fd])
        assert_ended(connection)
    os.close(fd)
    server.close()


# -- hostile peers -----------------------------------------------------------------------------------------------------


def assert_ended(connection: BulkConnection) -> None:
    with contextlib.suppress(ConnectionLost):
        assert connection.receive() is None


def assert_serves(place: Place) -> None:
    with place.connect() as connection:
        connection.send(b"still there")
        message = connection.receive()
        assert message is not None
        assert message.header == b"still there"


@pytest.mark.parametrize(
    "sent",
    [
        bulk._PREFIX.pack(bulk.MAX_HEADER_BYTES + 1, 0, 0),
        bulk._PREFIX.pack(0, bulk.MAX_BUFFERS + 1, 0),
        bulk._PREFIX.pack(0, 0, 7),
        bulk._PREFIX.pack(0, 1, 0) + (MAX_BYTES + 1).to_bytes(8, "little"),
        bulk._PREFIX.pack(0, 2, 0) + (MAX_BYTES).to_bytes(8, "little") * 2,
        bulk._PREFIX.pack(0, 1, 0) + (5 | bulk._REFERENCE).to_bytes(8, "little") + bytes(8),
        b"GET / HTTP/1.1\r\nHost: strata\r\n\r\n",
    ],
)
@pytest.mark.usefixtures("server")
def test_a_message_that_breaks_the_rules_ends_its_connection_only(place: Place, sent: bytes) -> None:
    with place.connect() as other, place.connect() as hostile:
        hostile._sock.sendall(sent)
        assert_ended(hostile)
        other.send(b"unharmed")
        assert other.receive() is not None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.binary(max_size=200))
def test_no_bytes_harm_the_server(tmp_path_factory: pytest.TempPathFactory, sent: bytes) -> None:
    place = Place("unix", tmp_path_factory.mktemp("bulk"))
    server = place.serve(max_bytes=1_000)
    with place.connect() as hostile:
        hostile._sock.sendall(sent)
    assert_serves(place)
    server.close()


def test_a_peer_that_stops_in_the_middle_of_a_message_is_dropped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STALL_S", 0.2)
    server = place.serve()
    with place.connect() as stalled:
        stalled._sock.sendall(bulk._PREFIX.pack(10, 0, 0) + b"half")
        assert_ended(stalled)
    assert_serves(place)
    server.close()


def test_connections_without_a_token_do_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_GREETING", 4)
    place = Place("unix", tmp_path)
    server = place.serve()
    silent = []
    for _ in range(20):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place.address.removeprefix("unix:"))
        silent.append(sock)
    assert_serves(place)
    for sock in silent:
        sock.close()
    server.close()


def test_a_slow_greeting_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "HELLO_WITHIN_S", 0.3)
    place = Place("unix", tmp_path)
    server = place.serve()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(place.address.removeprefix("unix:"))
        slow.sendall(bulk.PREFACE[:3])
        slow.settimeout(10)
        assert slow.recv(1) == b""
    server.close()


def test_more_connections_than_allowed_are_closed(tmp_path: Path) -> None:
    place = Place("unix", tmp_path)
    server = place.serve(max_connections=1)
    with place.connect() as first:
        first.send(b"1")
        assert first.receive() is not None
        with place.connect() as second:
            assert_ended(second)
        first.send(b"2")
        assert first.receive() is not None
    server.close()


def test_a_second_server_at_the_same_socket_is_refused(tmp_path: Path) -> None:
    place = Place("unix", tmp_path)
    server = place.serve()
    with pytest.raises(ConfigError):
        Place("unix", tmp_path).serve()
    assert_serves(place)
    server.close()
    assert not Path(place.address.removeprefix("unix:")).exists()
