"""Sessions without HTTP/2 against a real coordinator: invalid connections, slow readers and firewalls."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import psutil
import pytest
from servers import CALM, DEADLINE_S, EAGER_CLIENT, CoordinatorProcess, Nursery, free_port, until

from strata.coordinator.client import AsyncCoordinatorClient, ClientConfig, CoordinatorClient
from strata.coordinator.client._link import FramesAddress
from strata.coordinator.client._streams import FramedStream, GrpcStream
from strata.errors import Unauthenticated
from strata.transport.certificates import write_set
from strata.transport.credentials import ClientSecurity
from strata.transport.frames import PREFACE, packed
from strata.transport.tokens import write_tokens
from strata.v1 import calls_pb2 as calls
from strata.v1 import session_pb2 as pb

MB = 1024 * 1024
INSECURE = {"insecure": True}
HELLO = packed(pb.ClientFrame(hello=pb.Hello(session_id="by-hand")).SerializeToString())


@pytest.fixture
def coordinator(nursery: Nursery, tmp_path: Path) -> CoordinatorProcess:
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, frames=f"127.0.0.1:{free_port()}")
    process.start()
    return process


def connected(process: CoordinatorProcess) -> socket.socket:
    host, _, port = process.settings["frames"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def frames_of(stranger: socket.socket) -> Iterator[pb.ServerFrame]:
    """Read until the coordinator closes the connection."""
    with contextlib.suppress(ConnectionError), stranger.makefile("rb") as stream:
        while head := stream.read(4):
            yield pb.ServerFrame.FromString(stream.read(int.from_bytes(head, "big")))


def goodbye(stranger: socket.socket) -> tuple[str, str]:
    *_, last = frames_of(stranger)
    return next(c.name for c in grpc.StatusCode if c.value[0] == last.goodbye.code), last.goodbye.message


@pytest.mark.parametrize(
    ("sent", "code", "message"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "INVALID_ARGUMENT", "gRPC uses another port"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "INVALID_ARGUMENT", "gRPC uses another port"),
        (PREFACE + b"\xff\xff\xff\xff", "INVALID_ARGUMENT", "4294967295 bytes; the limit is"),
        (PREFACE + b"\x00\x01\x00\x01", "INVALID_ARGUMENT", "65537 bytes; the limit is 65536"),
        (
            PREFACE + packed(pb.ClientFrame(hello=pb.Hello(session_id="x" * 129)).SerializeToString()),
            "RESOURCE_EXHAUSTED",
            "128",
        ),
        (PREFACE + packed(b"\xff\xff\xff"), "INVALID_ARGUMENT", "not a strata.v1.ClientFrame"),
        (PREFACE + packed(b""), "INVALID_ARGUMENT", "hello.session_id"),
        (
            PREFACE + packed(pb.ClientFrame(hello=pb.Hello()).SerializeToString()),
            "INVALID_ARGUMENT",
            "hello.session_id",
        ),
        (PREFACE + HELLO + packed(b"\xff\xff\xff"), "INVALID_ARGUMENT", "not a strata.v1.ClientFrame"),
    ],
)
def test_an_invalid_session_is_closed_with_the_reason(
    coordinator: CoordinatorProcess, sent: bytes, code: str, message: str
) -> None:
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        worker = client.register_worker("w0")
        for _ in range(3):
            with connected(coordinator) as stranger:
                stranger.sendall(sent)
                ended_with, why = goodbye(stranger)
                assert ended_with == code
                assert message in why
        worker.heartbeat()
        assert client.num_connections == 1


def test_hundreds_of_silent_or_invalid_connections_affect_no_client(coordinator: CoordinatorProcess) -> None:
    rng = random.Random(11)
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client, contextlib.ExitStack() as stack:
        worker = client.register_worker("w0")
        before = psutil.Process(coordinator.child.pid).memory_info().rss
        for number in range(300):
            stranger = stack.enter_context(connected(coordinator))
            begun = (b"", PREFACE[:7], PREFACE, PREFACE + HELLO[:6], PREFACE + b"\x00\xff\xff\xff" + b"x" * 1000)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(rng.choice((*begun, rng.randbytes(rng.randint(1, 5_000)))))
            if number % 3 == 0:
                stranger.close()
        worker.heartbeat()
        assert [w.worker_id for w in client.list_workers().workers] == ["w0"]
        assert client.num_connections == 1
        assert psutil.Process(coordinator.child.pid).memory_info().rss - before < 60 * MB


def test_a_closed_connection_makes_its_worker_suspect_even_at_a_barrier(coordinator: CoordinatorProcess) -> None:
    """A killed process closes its connection in good order, because the kernel does."""
    register = calls.RegisterWorkerRequest(worker_id="mortal", instance_id="m")
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client, connected(coordinator) as mortal:
        client.register_worker("other")
        frames = frames_of(mortal)
        request = pb.Request(id=1, register_worker=register)
        mortal.sendall(PREFACE + HELLO + packed(pb.ClientFrame(requests=[request]).SerializeToString()))
        assert next(frames).welcome.max_message_bytes == 16 * MB
        joined = next(frame.responses[0] for frame in frames if frame.responses).register_worker
        barrier = calls.WaitBarrierRequest(
            worker_id="mortal",
            incarnation=joined.incarnation,
            generation=joined.generation,
            barrier_id="b",
            timeout_s=60,
        )
        request = pb.Request(id=2, wait_barrier=barrier)
        mortal.sendall(packed(pb.ClientFrame(requests=[request]).SerializeToString()))
        until(lambda: not any(w.suspect for w in client.list_workers().workers), "both are here")
        mortal.shutdown(socket.SHUT_WR)
        until(lambda: any(w.suspect for w in client.list_workers().workers), "it is suspect")


def test_a_client_that_does_not_read_is_dropped_and_takes_no_memory(nursery: Nursery, tmp_path: Path) -> None:
    limits = {"max_session_backlog": 2_000, "max_calls_per_s": 10_000_000}
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, limits=limits, frames=f"127.0.0.1:{free_port()}")
    process.start()
    asked = pb.ClientFrame(requests=[pb.Request(id=n, list_workers=calls.ListWorkersRequest()) for n in range(500)])
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client, connected(process) as stranger:
        for number in range(50):
            client.register_worker(f"w{number}")
        before = psutil.Process(process.child.pid).memory_info().rss
        stranger.sendall(PREFACE + HELLO)
        with contextlib.suppress(OSError):  # the coordinator closes the connection in the end
            for _ in range(1_000):
                stranger.sendall(packed(asked.SerializeToString()))
        assert client.list_jobs()
        assert psutil.Process(process.child.pid).memory_info().rss - before < 200 * MB


def test_a_client_that_cannot_reach_the_port_uses_grpc(nursery: Nursery, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as taken:
        process = CoordinatorProcess(nursery, tmp_path, lease=CALM, frames="auto")
        process.start()
        with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
            link = client._client._link
            assert link is not None
            assert link._frames_at
            # Like a firewall: the announced port does not answer.
            link._frames_at = {process.address: FramesAddress(f":{taken.getsockname()[1]}", "x")}
            worker = client.register_worker("w0")
            process.restart()
            worker.heartbeat()
            assert worker.lost is None


def test_a_coordinator_without_plain_connections_serves_sessions_through_grpc(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, frames="off")
    process.start()
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        client.register_worker("w0").heartbeat()
        assert client._client._link is not None
        assert not client._client._link._frames_at


def test_a_unix_socket_has_a_frames_socket_beside_it(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, listen=f"unix:{tmp_path}/s")
    process.start()
    with CoordinatorClient(f"unix:{tmp_path}/s", config=EAGER_CLIENT) as client:
        client.register_worker("w0").heartbeat()
        assert client._client._link is not None
        (place,) = client._client._link._frames_at.values()
        assert place.announced == f"unix:{tmp_path}/s.frames"
    assert process.child.terminate() == 0
    assert not (tmp_path / "s.frames").exists()


def test_another_coordinator_behind_a_tunnel_is_not_mistaken_for_the_announced_one(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Two coordinators behind tunnels: the port of the first, on its apparent host, belongs to the second."""
    port = free_port()
    first = CoordinatorProcess(nursery, tmp_path / "1", lease=CALM, frames=f"127.0.0.2:{port}", security=INSECURE)
    second = CoordinatorProcess(nursery, tmp_path / "2", lease=CALM, frames=f"127.0.0.1:{port}", security=INSECURE)
    for process in (first, second):
        process.state.parent.mkdir()
        process.start()
    with CoordinatorClient(first.address, config=EAGER_CLIENT) as client:
        client.register_worker("w0", job_id="of-the-first")
        assert not client._client._link._frames_at
        with CoordinatorClient(second.address, config=EAGER_CLIENT) as other:
            assert other.list_jobs() == []


def test_plain_connections_require_the_same_tokens_and_tls_as_grpc(nursery: Nursery, tmp_path: Path) -> None:
    write_set(tmp_path, hosts=["localhost", "127.0.0.1"], now=datetime.now(UTC), days=1)
    write_tokens(tmp_path)
    security = {
        "certificate": str(tmp_path / "server.crt"),
        "key": str(tmp_path / "server.key"),
        "tokens": str(tmp_path / "tokens"),
    }
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, security=security, frames=f"127.0.0.1:{free_port()}")
    process.start()
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    for token, expected in (("", "the token is missing"), ("wrong" * 10, "the token is unknown")):
        hello = pb.Hello(session_id="s", token=token)
        with trusting.wrap_socket(connected(process), server_hostname="127.0.0.1") as stranger:
            stranger.sendall(PREFACE + packed(pb.ClientFrame(hello=hello).SerializeToString()))
            code, why = goodbye(stranger)
            assert code == "UNAUTHENTICATED"
            assert expected in why
    with connected(process) as plain:
        plain.sendall(PREFACE + HELLO)
        with contextlib.suppress(ConnectionError):
            assert b"welcome" not in plain.recv(100)
    mine = ClientSecurity(ca=str(tmp_path / "ca.crt"), token_file=str(tmp_path / "worker.token"))
    with CoordinatorClient(process.address, security=mine, config=EAGER_CLIENT) as client:
        client.register_worker("w0").heartbeat()
        assert client._client._link is not None
        assert client._client._link._frames_at
    with pytest.raises(Unauthenticated):
        CoordinatorClient(
            process.address, security=ClientSecurity(ca=str(tmp_path / "ca.crt")), config=ClientConfig()
        ).connect()


def answering(reply: bytes) -> Callable[[socketserver.StreamRequestHandler], None]:
    def handle(request: socketserver.StreamRequestHandler) -> None:
        request.wfile.write(reply)
        request.rfile.read(1)

    return handle


@contextlib.contextmanager
def stranger_at(port: int, reply: bytes) -> Iterator[None]:
    """Another service that answers at this port."""
    handler = type("Handler", (socketserver.StreamRequestHandler,), {"handle": answering(reply)})
    with socketserver.ThreadingTCPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


REFUSAL = pb.ServerFrame(
    goodbye=pb.Goodbye(code=grpc.StatusCode.UNAUTHENTICATED.value[0], message="the token is missing")
)


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-OpenSSH_9.2\r\n", packed(REFUSAL.SerializeToString())], ids=["ssh", "refusal"]
)
def test_any_service_behind_a_tunnel_does_not_keep_a_client_from_grpc(
    nursery: Nursery, tmp_path: Path, reply: bytes
) -> None:
    port = free_port()
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, frames=f"127.0.0.2:{port}")
    process.start()
    with stranger_at(port, reply), CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        client.register_worker("w0").heartbeat()
        assert not client._client._link._frames_at


def test_a_client_reconnects_over_a_plain_connection(coordinator: CoordinatorProcess) -> None:
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        worker = client.register_worker("w0")
        for number in range(2, 5):
            coordinator.restart()
            worker.heartbeat()
            until(lambda number=number: client.num_connections == number, "it is back")
            assert client._client._link._frames_at, "not through gRPC"
            assert not client._client._link._failed_frames


def test_a_coordinator_stops_in_time_whatever_its_connections(coordinator: CoordinatorProcess) -> None:
    """Connections that are silent, that are in the middle of a frame, and that do not read."""
    with contextlib.ExitStack() as stack:
        for sent in (b"", PREFACE, PREFACE + HELLO, PREFACE + HELLO + b"\x00\x00"):
            stack.enter_context(connected(coordinator)).sendall(sent)
        start_s = time.monotonic()
        assert coordinator.child.terminate() == 0
        assert time.monotonic() - start_s < 8


def test_a_thousand_incomplete_frames_without_hello_take_little_memory(coordinator: CoordinatorProcess) -> None:
    before = psutil.Process(coordinator.child.pid).memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stranger = stack.enter_context(connected(coordinator))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(PREFACE + b"\x00\x00\xff\xff" + b"x" * 65_000)
        with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
            assert client.list_jobs() == []
        assert psutil.Process(coordinator.child.pid).memory_info().rss - before < 80 * MB


def test_empty_frames_count_against_the_rate(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(
        nursery, tmp_path, lease=CALM, limits={"max_calls_per_s": 100}, frames=f"127.0.0.1:{free_port()}"
    )
    process.start()
    with connected(process) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(PREFACE + HELLO + packed(b"") * 5_000)
        code, why = goodbye(stranger)
        assert code == "RESOURCE_EXHAUSTED"
        assert "max_calls_per_s=100" in why


def test_a_session_is_not_taken_over_by_a_lower_role(nursery: Nursery, tmp_path: Path) -> None:
    write_tokens(tmp_path)
    process = CoordinatorProcess(
        nursery, tmp_path, lease=CALM, security={"tokens": str(tmp_path / "tokens")}, frames=f"127.0.0.1:{free_port()}"
    )
    process.start()
    with contextlib.ExitStack() as stack:
        for role, greeted in (("worker", True), ("reader", False), ("admin", True)):
            token = (tmp_path / f"{role}.token").read_text().strip()
            caller = stack.enter_context(connected(process))
            hello = pb.Hello(session_id="by-hand", token=token)
            caller.sendall(PREFACE + packed(pb.ClientFrame(hello=hello).SerializeToString()))
            first = next(frames_of(caller))
            assert first.HasField("welcome") == greeted
            if not greeted:
                assert first.goodbye.error.kind == "PermissionRefused"


def test_a_token_is_not_sent_over_an_unencrypted_plain_connection(nursery: Nursery, tmp_path: Path) -> None:
    """gRPC sends it to the address that the user gave; where the announced port leads is unknown."""
    write_tokens(tmp_path)
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, security={"tokens": str(tmp_path / "tokens")})
    process.start()
    mine = ClientSecurity(token_file=str(tmp_path / "worker.token"))
    with CoordinatorClient(process.address, security=mine, config=EAGER_CLIENT) as client:
        client.register_worker("w0").heartbeat()
        assert not client._client._link._frames_at


def test_a_cancelled_connect_closes_both_grpc_and_the_plain_connection(
    coordinator: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.Event()
    close_frames, close_grpc = FramedStream.close, GrpcStream.close

    async def noted(stream: FramedStream) -> None:
        await close_frames(stream)
        closed.set()

    async def given_up(stream: GrpcStream) -> None:
        await close_grpc(stream)
        raise asyncio.CancelledError

    async def connect() -> None:
        client = AsyncCoordinatorClient(coordinator.address, config=EAGER_CLIENT)
        connecting = asyncio.create_task(client.connect())
        async with asyncio.timeout(DEADLINE_S):
            await closed.wait()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        monkeypatch.undo()
        await client.close()

    monkeypatch.setattr(FramedStream, "close", noted)
    monkeypatch.setattr(GrpcStream, "close", given_up)
    asyncio.run(connect())
