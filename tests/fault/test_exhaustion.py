"""Callers that try to exhaust a coordinator, each at the limit that docs/security.md states.

The coordinator is a real process whose memory is watched. A worker in another process calls all the time meanwhile,
with its own token and the default lease: it must stay a member, and each call must be answered within the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from servers import DEADLINE_S, Child, CoordinatorProcess, Nursery, free_port

from strata.coordinator import wire
from strata.transport.frames import PREFACE, packed
from strata.v1 import calls_pb2 as calls
from strata.v1 import session_pb2 as pb

MB = 1024 * 1024
READER, WORKER = "reader-token-0123456789", "worker-token-0123456789"
LEASE_S = 5.0
METADATA = {READER: (("authorization", f"Bearer {READER}"),), WORKER: (("authorization", f"Bearer {WORKER}"),), "": ()}
NUM_LISTS = 100
EMPTY_SHARD = b"\x2a\x00"
"""Part of a RegisterDatasetRequest: two bytes that become sixty."""


class Attacked:
    """A coordinator under attack: its peak memory, and how long other callers wait."""

    def __init__(self, process: CoordinatorProcess, onlooker: Child) -> None:
        self.process = process
        self._onlooker = onlooker
        self._server = psutil.Process(process.child.pid)

    @contextlib.contextmanager
    def within(self, *, grown_mb: float) -> Iterator[None]:
        """Check that memory grows by at most this much during the block, and that the bystander is served."""
        self._onlooker.ask(report=True)
        before = most = self._server.memory_info().rss
        over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.005):
                most = max(most, self._server.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
        report = self._onlooker.ask(report=True)
        print(f"grown by {(most - before) / MB:.0f} MB; {report['num_calls']} other calls, {report['slowest_s']:.2f} s")
        assert (most - before) / MB < grown_mb
        assert report["slowest_s"] < LEASE_S
        assert (report["num_calls"] > 0, report["failures"], report["lost"]) == (True, [], "None")


@pytest.fixture
def attacked(nursery: Nursery, tmp_path: Path) -> Attacked:
    (tmp_path / "tokens").write_text(f"reader {READER}\nworker {WORKER}\n")
    process = CoordinatorProcess(
        nursery,
        tmp_path,
        frames=f"127.0.0.1:{free_port()}",
        http=f"127.0.0.1:{free_port()}",
        security={"tokens": str(tmp_path / "tokens")},
    )
    process.start()
    onlooker = nursery.fork("children:bystander", address=process.address, token=WORKER, name="bystander")
    assert onlooker.receive() == {"ready": True}
    return Attacked(process, onlooker)


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8_192, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- unary calls ---------------------------------------------------------------------------------------------------


async def called(address: str, method: str, body: bytes, token: str, *, num: int) -> Counter[tuple[str, str]]:
    """Make `num` concurrent calls, each on its own connection; return how they ended."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]

    async def one() -> tuple[str, str]:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            try:
                call = channel.unary_unary(f"/{wire.SERVICE}/{method}")
                await call(body, metadata=METADATA[token], timeout=DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                return error.code().name, (error.details() or "")[:60]
            return "OK", ""

    return Counter(await asyncio.gather(*(one() for _ in range(num))))


def test_large_bodies_without_a_token_are_not_read(attacked: Attacked) -> None:
    body = EMPTY_SHARD * (8 * MB)
    with attacked.within(grown_mb=100):
        for _ in range(3):
            ends = asyncio.run(called(attacked.process.address, "RegisterDataset", body, "", num=10))
            assert sum(num for (code, _), num in ends.items() if code == "UNAUTHENTICATED") == 10, ends


def test_the_largest_unary_calls_are_refused_and_stall_no_other_caller(attacked: Attacked) -> None:
    body = EMPTY_SHARD * (MB // 2)
    with attacked.within(grown_mb=250):
        for _ in range(3):
            ends = asyncio.run(called(attacked.process.address, "RegisterDataset", body, WORKER, num=24))
            assert {code for code, _ in ends} == {"RESOURCE_EXHAUSTED"}
            assert all("shards has 524288" in details for _, details in ends), ends
    too_large = asyncio.run(called(attacked.process.address, "RegisterDataset", body + EMPTY_SHARD, WORKER, num=1))
    assert {code for code, _ in too_large} == {"RESOURCE_EXHAUSTED"}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class HalfCalls:
    """Hand-made HTTP/2: calls on one connection that announce a message and send all but its end."""

    DATA, HEADERS, SETTINGS, PING, WINDOW = 0, 1, 4, 6, 8

    def __init__(self, path: str, token: str, *, num: int, announced: int) -> None:
        self._path, self._token = path, token
        self._announced = announced
        self._left = {2 * number + 1: announced + 4 for number in range(num)}
        """Stream → bytes left to send, except for the last one."""
        self._room = {0: 65_535, **dict.fromkeys(self._left, 65_535)}
        self.num_ended = 0
        self.num_sent = 0

    async def run(self, address: str) -> None:
        """Send whatever flow control allows and keep the connection open until cancelled."""
        host, _, port = address.rpartition(":")
        reader, self._writer = await asyncio.open_connection(host, int(port))
        try:
            self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(self.SETTINGS, 0, 0, b""))
            for stream in self._left:
                self._writer.write(frame(self.HEADERS, 4, stream, self._headers()))
                self._send(stream, b"\x00" + struct.pack(">I", self._announced))
            while True:
                head = await reader.readexactly(9)
                body = await reader.readexactly(int.from_bytes(head[:3], "big"))
                self._handle(head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, body)
                for stream in list(self._left):
                    while self._left.get(stream, 0) > 0 and self._room[0] > 0 and self._room[stream] > 0:
                        most = min(16_384, self._left[stream], self._room[0], self._room[stream])
                        self._send(stream, bytes(most))
                await self._writer.drain()
        finally:
            self._writer.transport.abort()

    def _headers(self) -> bytes:
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", self._path), (":authority", "x")]
        pairs += [("te", "trailers"), ("content-type", "application/grpc")]
        pairs += [("authorization", f"Bearer {self._token}")] if self._token else []
        return b"".join(literal(*pair) for pair in pairs)

    def _send(self, stream: int, data: bytes) -> None:
        self._writer.write(frame(self.DATA, 0, stream, data))
        self._left[stream] -= len(data)
        self._room[stream] -= len(data)
        self._room[0] -= len(data)
        self.num_sent += len(data)

    def _handle(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == self.WINDOW:
            self._room[stream] = self._room.get(stream, 0) + int.from_bytes(body, "big")
        elif kind == self.SETTINGS and not flags & 1:
            self._writer.write(frame(self.SETTINGS, 1, 0, b""))
        elif kind == self.PING and not flags & 1:
            self._writer.write(frame(self.PING, 1, 0, body))
        elif kind == self.HEADERS and flags & 1:  # the status
            self._left.pop(stream, None)
            self.num_ended += 1


@contextlib.asynccontextmanager
async def held(address: str, *attacks: HalfCalls) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(attack.run(address)) for attack in attacks]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets are closed in the next iteration of the loop


async def when(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what changes is the attacker's count
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "token"),
    [("/grpc.health.v1.Health/Check", ""), (f"/{wire.SERVICE}/ListJobs", READER), (f"/{wire.SERVICE}/Session", READER)],
    ids=["health without a token", "a reader's calls", "a reader's sessions"],
)
def test_incomplete_grpc_requests_hold_a_bounded_number_of_messages(attacked: Attacked, path: str, token: str) -> None:
    async def attack() -> None:
        attacks = [HalfCalls(path, token, num=100, announced=MB) for _ in range(8)]
        address = attacked.process.address
        async with held(address, *attacks):
            # Refused and timed-out calls have a status; the others have sent what they could.
            await when(lambda: sum(one.num_ended for one in attacks) > 400)
            if path.endswith("ListJobs"):
                ends = await called(address, "ListJobs", b"", READER, num=4)
                assert {code for code, _ in ends} == {"OK"}, "a reader that sends its request at once is served"

    with attacked.within(grown_mb=250):
        asyncio.run(attack())


# -- bare connections ---------------------------------------------------------------------------------------------


def bare(attacked: Attacked, token: str, number: int = 0) -> socket.socket:
    """Open a session and read its `welcome`."""
    host, _, port = attacked.process.settings["frames"].rpartition(":")
    link = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    hello = pb.Hello(session_id=f"attack-{number}", token=token)
    link.sendall(PREFACE + packed(pb.ClientFrame(hello=hello).SerializeToString()))
    assert answered(link).HasField("welcome")
    return link


def answered(link: socket.socket) -> pb.ServerFrame:
    length = int.from_bytes(exactly(link, 4), "big")
    return pb.ServerFrame.FromString(exactly(link, length))


def exactly(link: socket.socket, num: int) -> bytes:
    data = b""
    while len(data) < num:
        piece = link.recv(num - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def test_silent_connections_are_displaced_by_those_that_send_hello(attacked: Attacked) -> None:
    host, _, port = attacked.process.settings["frames"].rpartition(":")
    with attacked.within(grown_mb=60), contextlib.ExitStack() as stack:
        for number in range(1_100):
            link = stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
            with contextlib.suppress(ConnectionError):
                link.sendall(PREFACE[: number % 10])
        stack.enter_context(bare(attacked, READER))


def test_unread_answers_are_bounded_for_all_sessions_together(attacked: Attacked) -> None:
    declaring = [
        calls.RegisterDatasetRequest(dataset_id=f"{n:0128}", total_samples=1, shard_size=1) for n in range(999)
    ]
    asking = [pb.Request(id=n + 1, list_datasets=calls.ListDatasetsRequest()) for n in range(NUM_LISTS)]
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(bare(attacked, WORKER))
        requests = [pb.Request(id=n + 1, register_dataset=one) for n, one in enumerate(declaring)]
        owner.sendall(packed(pb.ClientFrame(requests=requests).SerializeToString()))
        num_answered = 0
        while num_answered < len(requests):
            num_answered += len(answered(owner).responses)
        with attacked.within(grown_mb=1_200):
            links = [stack.enter_context(bare(attacked, READER, number)) for number in range(1, 41)]
            for link in links:
                link.sendall(packed(pb.ClientFrame(requests=asking).SerializeToString()))
            messages = [goodbye_of(link) for link in links]
    assert any("max_unread_bytes=268435456 are unread" in message for message in messages), messages


def goodbye_of(link: socket.socket) -> str:
    """Read a session to its end; return the message of its goodbye, or nothing once all its calls are answered."""
    num_answered = 0
    with contextlib.suppress(ConnectionError):
        while num_answered < NUM_LISTS:
            frame = answered(link)
            if frame.HasField("goodbye"):
                return frame.goodbye.message
            num_answered += len(frame.responses)
    return ""


def all_but_the_end(link: socket.socket, announced: int) -> None:
    with contextlib.suppress(ConnectionError):
        link.sendall(announced.to_bytes(4, "big") + bytes(announced - 1))


def test_a_reader_may_not_announce_a_large_frame(attacked: Attacked) -> None:
    with attacked.within(grown_mb=60), contextlib.ExitStack() as stack:
        for number in range(150):
            link = stack.enter_context(bare(attacked, READER, number))
            all_but_the_end(link, 16 * MB)
            with contextlib.suppress(ConnectionError):
                bye = answered(link).goodbye
                assert "16777216 bytes; the limit is 65536" in bye.message


def test_incomplete_frames_of_a_reader_are_small_and_time_out(attacked: Attacked) -> None:
    with attacked.within(grown_mb=150), contextlib.ExitStack() as stack:
        links = [stack.enter_context(bare(attacked, READER, number)) for number in range(1_000)]
        for link in links:
            all_but_the_end(link, 65_536)
        assert "did not arrive within 10 s" in answered(links[0]).goodbye.message
        assert "did not arrive within 10 s" in answered(links[-1]).goodbye.message


def test_incomplete_frames_of_workers_share_a_bounded_buffer(attacked: Attacked) -> None:
    with attacked.within(grown_mb=400):
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                links = [stack.enter_context(bare(attacked, WORKER, number)) for number in range(40)]
                for link in links:
                    all_but_the_end(link, 16 * MB)
                bye = answered(links[0]).goodbye
                assert "limits.max_receive_bytes=134217728 are in use" in bye.message


def test_frames_full_of_elements_are_refused_before_they_are_decoded(attacked: Attacked) -> None:
    shards = EMPTY_SHARD * (8 * MB - 64)
    call = b"\x2a" + varint(len(shards)) + shards  # Request.register_dataset
    many_shards = b"\x12" + varint(len(call)) + call
    many_calls = b"\x12\x00" * (8 * MB)
    with attacked.within(grown_mb=400), contextlib.ExitStack() as stack:
        for frame in (many_shards, many_calls):
            links = [stack.enter_context(bare(attacked, WORKER, number)) for number in range(6)]
            for link in links:
                with contextlib.suppress(ConnectionError):
                    link.sendall(packed(frame))
            goodbyes = [answered(link).goodbye.message for link in links]
            assert all("max_message_elements=250000" in message for message in goodbyes), goodbyes


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def test_the_largest_legal_calls_of_many_sessions_take_turns_with_others(attacked: Attacked) -> None:
    """Datasets with as many shards as a call may list; and frames with as many calls as a session may have open."""
    dataset = calls.RegisterDatasetRequest(dataset_id="d")
    for number in range(249_000):
        dataset.shards.add(shard_id=f"s{number}", num_samples=1)
    large = pb.ClientFrame(requests=[pb.Request(id=1, register_dataset=dataset)]).SerializeToString()
    heartbeat = calls.HeartbeatRequest(worker_id="nobody")
    many = pb.ClientFrame(requests=[pb.Request(id=n + 1, heartbeat=heartbeat) for n in range(10_000)])
    with attacked.within(grown_mb=700), contextlib.ExitStack() as stack:
        for frame in (large, many.SerializeToString()):
            links = [stack.enter_context(bare(attacked, WORKER, number)) for number in range(4)]
            for link in links:
                link.sendall(packed(frame))
            for link in links:
                first = answered(link).responses[0]
                assert first.HasField("register_dataset") or first.error.kind == "UnknownWorker", first


# -- HTTP ----------------------------------------------------------------------------------------------------------


def get(process: CoordinatorProcess, path: str, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://{process.settings['http']}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_incomplete_http_requests_do_not_block_complete_ones(attacked: Attacked) -> None:
    host, _, port = attacked.process.settings["http"].rpartition(":")
    with attacked.within(grown_mb=150), contextlib.ExitStack() as stack:
        for number in range(1_200):
            link = stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
            half = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * (number % 2 * 10_000)
            with contextlib.suppress(ConnectionError):
                link.sendall(half)
            if number % 200 == 199:
                assert get(attacked.process, "/api/health") == (200, {"status": "ok"})


def test_a_page_of_another_site_cannot_read_a_coordinator_without_tokens(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(
        nursery, tmp_path, http=f"127.0.0.1:{free_port()}", security={"hosts": ["coord.example"]}
    )
    process.start()
    for host in ("localhost", "127.0.0.1:51051", "[::1]:80", "coord.example", socket.gethostname()):
        assert get(process, "/api/status", host=host)[0] == 200, host
    for host in ("evil.example", "localhost.evil.example:51051", "127.0.0.1.evil.example"):
        for path in ("/api/status", "/api/health", "/metrics", "/openapi.json"):
            code, body = get(process, path, host=host)
            assert (code, body["error"]["kind"]) == (421, "RequestRefused")
            assert "security.hosts" in body["error"]["message"]
