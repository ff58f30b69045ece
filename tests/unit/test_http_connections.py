"""Idle connections to the HTTP port, the host names that a coordinator accepts, and the size of bodies."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from strata.clock import ManualClock
from strata.coordinator.config import CoordinatorConfig, SecurityConfig
from strata.coordinator.http import server as module
from strata.coordinator.http.checks import MAX_BODY_BYTES, BodyLimit, is_own, own_names
from strata.coordinator.http.server import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_PEER, Connections


class Peer:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.is_gone = False

    def abort(self) -> None:
        self.is_gone = True


def test_a_new_connection_displaces_the_longest_waiting_one_of_its_machine() -> None:
    async def play() -> None:
        all_ = Connections()
        other = Peer("b")
        assert all_.add(other)
        peers = [Peer("a") for _ in range(MAX_CONNECTIONS_PER_PEER)]
        assert all(all_.add(peer) for peer in peers)
        all_.mark_busy(peers[0])
        assert all_.add(Peer("a"))
        assert [peer.is_gone for peer in (other, *peers[:3])] == [False, False, True, False]
        all_.remove(peers[1])
        all_.mark_idle(peers[0])  # it has been answered: now it is the newest
        assert all_.add(Peer("a"))
        assert [peer.is_gone for peer in (peers[0], peers[2])] == [False, True]

    asyncio.run(play())


def test_a_machine_whose_connections_are_all_busy_is_refused_another() -> None:
    async def play() -> None:
        all_ = Connections()
        for _ in range(MAX_CONNECTIONS_PER_PEER):
            peer = Peer("a")
            assert all_.add(peer)
            all_.mark_busy(peer)
        assert not all_.add(Peer("a"))
        assert all_.add(Peer("b"))

    asyncio.run(play())


def test_a_full_server_displaces_the_longest_waiting_connection() -> None:
    async def play() -> None:
        all_ = Connections()
        peers = [Peer(f"machine-{number}") for number in range(MAX_CONNECTIONS)]
        assert all(all_.add(peer) for peer in peers)
        assert all_.add(Peer("late"))
        assert [peer.is_gone for peer in peers[:2]] == [True, False]
        all_.remove(peers[0])
        assert len(all_) == MAX_CONNECTIONS

    asyncio.run(play())


def test_a_connection_without_a_complete_request_is_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REQUEST_WITHIN_S", 0.01)

    async def play() -> None:
        clock = ManualClock()
        all_ = Connections(now_s=clock.monotonic_s)
        slow, served, later = Peer("a"), Peer("a"), Peer("a")
        all_.add(slow)
        all_.add(served)
        all_.mark_busy(served)
        clock.advance(0.009)
        all_.add(later)
        clock.advance(0.001)
        async with asyncio.timeout(30):
            while not slow.is_gone:  # noqa: ASYNC110 - by a timer of its own
                await asyncio.sleep(0.001)
        assert [peer.is_gone for peer in (served, later)] == [False, False]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:51051", True),
        ("LocalHost.", True),
        ("grafana.localhost", True),
        ("127.0.0.1", True),
        ("10.1.2.3:51051", True),
        ("[::1]:51051", True),
        ("bound.example:51051", True),
        ("Added.Example", True),
        ("evil.example", False),
        ("evil.example:51051", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("notlocalhost", False),
        ("[evil.example]", False),
        ("", False),
    ],
)
def test_a_host_is_accepted_if_it_is_an_ip_address_or_one_of_our_names(host: str, is_ours: bool) -> None:
    config = CoordinatorConfig(http="bound.example:51051", security=SecurityConfig(hosts=("added.example",)))
    assert is_own(host, own_names(config)) is is_ours


class _NoProtocol(asyncio.Protocol):
    def __init__(self, **_arguments: object) -> None:
        raise AssertionError("no connection is given to another protocol")


async def _answers(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _first_line_for(request: bytes) -> bytes:
    """Return the first line of what a server answers to these bytes."""

    async def play() -> bytes:
        server = module.make_server(_answers, SecurityConfig())  # type: ignore[arg-type]  # any application works
        server.config.ws_protocol_class = _NoProtocol  # as if a library for web sockets were installed
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(request)
        line = await reader.readline()
        writer.close()
        server.should_exit = True
        await serving
        return line

    return asyncio.run(play())


def test_an_upgrade_to_a_web_socket_is_answered_like_any_request(capfd: pytest.CaptureFixture[str]) -> None:
    upgrade = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"

    assert _first_line_for(upgrade).startswith(b"HTTP/1.1 200")
    assert capfd.readouterr().err == ""


def test_bytes_that_are_no_request_print_nothing_on_the_terminal_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert _first_line_for(b"\x16\x03\x01\x02\x00\x01\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert capfd.readouterr().err == ""


# -- bodies ------------------------------------------------------------------------------------------------------------


async def _read_body(_scope: Scope, receive: Receive, _send: Send) -> None:
    while (await receive()).get("more_body"):
        pass


async def _never_sent(_message: Message) -> None:
    raise AssertionError("the app sends nothing")


def _body_through_the_limit(pieces: list[bytes], *, ends: bool, within_s: float = 60.0) -> int | None:
    """Return the status with which a body is refused; None if it is read to its end."""
    left = list(pieces)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()  # a client that sends nothing more
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not ends}

    try:
        asyncio.run(BodyLimit(_read_body, within_s=within_s)({"type": "http"}, receive, _never_sent))
    except HTTPException as refused:
        return refused.status_code
    return None


def test_a_body_is_bounded_in_size_and_time() -> None:
    half = b"x" * (MAX_BODY_BYTES // 2)

    assert _body_through_the_limit([half, half], ends=True) is None
    assert _body_through_the_limit([half, half, b"x"], ends=False) == 413
    assert _body_through_the_limit([half], ends=False, within_s=0.01) == 408
