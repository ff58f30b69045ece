"""Faults of the network, the disk and hostile peers, each against a real coordinator.

Raw sockets send bytes that are not HTTP/2; raw sessions send what our clients never would. In every test other callers
are served meanwhile, and everything acknowledged is present at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from servers import CALM, DEADLINE_S, EAGER_CLIENT, CoordinatorProcess, Nursery, free_port, until
from test_coordinator_kill import fold

from strata.coordinator import wire
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.journal import open_journal
from strata.errors import CoordinatorUnavailable, JournalWriteFailed
from strata.v1 import calls_pb2 as calls
from strata.v1 import session_pb2 as pb

IN_CI = os.environ.get("CI") == "true"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
MB = 1024 * 1024


class RawSession:
    """A session in bytes: sends any frame, reads only on request."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self.stream: Any = self._channel.stream_stream(f"/{wire.SERVICE}/Session")()

    async def greet(self, session_id: str) -> RawSession:
        await self.send_bytes(pb.ClientFrame(hello=pb.Hello(session_id=session_id)).SerializeToString())
        assert pb.ServerFrame.FromString(await self.stream.read()).HasField("welcome")
        return self

    async def send_bytes(self, frame: bytes) -> None:
        await self.stream.write(frame)

    async def send(self, *requests: pb.Request) -> None:
        await self.send_bytes(pb.ClientFrame(requests=requests).SerializeToString())

    async def answers(self, num: int) -> list[pb.Response]:
        """Return the next frames, in the order of arrival."""
        found: list[pb.Response] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < num:
                frame = await self.stream.read()
                assert frame is not grpc.aio.EOF, await self.ended()
                found += pb.ServerFrame.FromString(frame).responses
        return found

    async def ask(self, *requests: pb.Request) -> list[pb.Response]:
        await self.send(*requests)
        return await self.answers(len(requests))

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end of the stream; return its status."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self.stream.read() is not grpc.aio.EOF:
                    pass
            return await self.stream.code(), await self.stream.details()

    async def close(self) -> None:
        self.stream.cancel()
        await self._channel.close()


def register(number: int, worker_id: str) -> pb.Request:
    call = calls.RegisterWorkerRequest(worker_id=worker_id, instance_id=f"process-of-{worker_id}")
    return pb.Request(id=number, register_worker=call)


def served(nursery: Nursery, directory: Path, **settings: Any) -> CoordinatorProcess:
    """A coordinator with HTTP."""
    process = CoordinatorProcess(nursery, directory, **{"lease": CALM, "http": f"127.0.0.1:{free_port()}", **settings})
    process.start()
    return process


def health(process: CoordinatorProcess) -> tuple[int, dict[str, Any]]:
    url = f"http://{process.settings['http']}/api/health"
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def rss_mb(process: CoordinatorProcess) -> float:
    return psutil.Process(process.child.pid).memory_info().rss / MB


def kinds_of_events(process: CoordinatorProcess) -> Counter[str]:
    """The state of a coordinator that has exited."""
    journal = open_journal(str(process.state))
    try:
        return Counter(record.kind for record in journal.read(limit=100_000))
    finally:
        journal.close()


# -- invalid connections -------------------------------------------------------------------------------------------


def garbage(rng: random.Random) -> bytes:
    return rng.choice(
        (
            rng.randbytes(rng.randint(1, 4_096)),
            PREFACE[: rng.randint(1, len(PREFACE))],
            PREFACE + SETTINGS_FRAME + rng.randbytes(rng.randint(1, 500)),
            PREFACE + b"\xff\xff\xff" + rng.randbytes(6),  # a frame of 16 MB that never arrives
            PREFACE + SETTINGS_FRAME + b"\x00\x00\x20\x01\x04\x00\x00\x00\x01" + rng.randbytes(16),  # half a HEADERS
            PREFACE + SETTINGS_FRAME * 500,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),  # the beginning of a TLS hello
            b"GET / HTTP/1.1\r\nHost: " + b"x" * rng.randint(0, 60_000),
            b"POST /api/health HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + rng.randbytes(100),
        )
    )


def test_garbage_and_incomplete_frames_on_both_ports_affect_no_client(nursery: Nursery, tmp_path: Path) -> None:
    process = served(nursery, tmp_path)
    rng = random.Random(7)
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client, contextlib.ExitStack() as stack:
        worker = client.register_worker("w0")
        before_mb = rss_mb(process)
        for address in (process.address, process.settings["http"]):
            host, _, port = address.rpartition(":")
            for number in range(150):
                stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(garbage(rng))
                if number % 3 == 0:
                    stranger.close()  # the others stay connected and silent
            worker.heartbeat()
        assert health(process) == (200, {"status": "ok"})
        assert [w.worker_id for w in client.list_workers().workers] == ["w0"]
        assert (worker.lost, client.num_connections) == (None, 1)
        grown_mb = rss_mb(process) - before_mb
        print(f"300 strangers: {grown_mb:.1f} MB")
        assert grown_mb < 60


def test_a_session_with_a_truncated_frame_or_without_hello_ends_alone(
    coordinator: CoordinatorProcess,
) -> None:
    async def play() -> list[tuple[grpc.StatusCode, str]]:
        whole = pb.ClientFrame(requests=[register(1, "w1")]).SerializeToString()
        ends = []
        for cut in range(1, len(whole)):
            session = await RawSession(coordinator.address).greet(f"s{cut}")
            await session.send_bytes(whole[:cut])
            ends.append(await session.ended())
            await session.close()
        for frame in (b"", pb.ClientFrame(requests=[register(1, "w2")]).SerializeToString()):
            session = RawSession(coordinator.address)
            await session.send_bytes(frame)
            ends.append(await session.ended())
            await session.close()
        return ends

    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client:
        worker = client.register_worker("w0")
        *truncated, empty, eager = shared_loop().run(play())
        assert grpc.StatusCode.OK not in {code for code, _ in truncated}
        assert {code for code, _ in (empty, eager)} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert "hello.session_id" in eager[1]
        worker.heartbeat()
        assert [w.worker_id for w in client.list_workers().workers] == ["w0"]
        assert client.num_connections == 1


def test_duplicate_and_late_frames_change_nothing_twice(coordinator: CoordinatorProcess) -> None:
    async def play() -> None:
        session = await RawSession(coordinator.address).greet("one")
        first, second = await session.ask(register(1, "w0"), register(1, "w0"))
        assert first == second
        me = {
            "worker_id": "w0",
            "incarnation": first.register_worker.incarnation,
            "generation": first.register_worker.generation,
        }
        dataset = calls.RegisterDatasetRequest(dataset_id="d", total_samples=4, shard_size=1)
        ack = calls.AckShardsRequest(**me, dataset_id="d", epoch=0, indices=[0, 1])
        command = calls.SendCommandRequest(kind=wire.encode_command_name("CHECKPOINT_NOW"), request_id="once")
        checkpoint = calls.NotifyCheckpointRequest(
            **me, checkpoint_id="c", step=1, path="/c", type=wire.encode_checkpoint_kind("FULL")
        )
        story = [
            register(1, "w0"),
            pb.Request(id=2, register_dataset=dataset),
            pb.Request(id=3, ack_shards=ack),
            pb.Request(id=4, send_command=command),
            pb.Request(id=5, wait_barrier=calls.WaitBarrierRequest(**me, barrier_id="b", timeout_s=5)),
            pb.Request(id=6, notify_checkpoint=checkpoint),
            pb.Request(id=7, advance_epoch=calls.AdvanceEpochRequest(dataset_id="d", from_epoch=0)),
        ]
        answers = {answer.id: answer for answer in await session.ask(*story)}
        answers[2].register_dataset.epoch = 1  # the current epoch
        again = await RawSession(coordinator.address).greet("another")
        for connection in (session, again):
            twice = await connection.ask(*story, *story)
            for answer in twice:
                if answer.id == 3:
                    assert answer.error.kind == "EpochMismatch"  # an old ack, after the epoch has ended
                else:
                    assert answer == answers[answer.id]
            late = await connection.ask(*reversed(story))
            assert {answer.id for answer in late if answer.HasField("error")} == {3}
        await session.close()
        await again.close()

    shared_loop().run(play())
    coordinator.kill()
    assert kinds_of_events(coordinator) == {
        "WorkerJoined": 1,
        "GenerationStarted": 1,
        "DatasetRegistered": 1,
        "ShardsAssigned": 1,
        "ShardsDone": 1,
        "CommandSent": 1,
        "BarrierReleased": 1,
        "CheckpointAcked": 1,
        "CheckpointCommitted": 1,
        "EpochAdvanced": 1,
    }


def test_a_session_that_does_not_read_is_dropped_in_bounded_memory_while_others_are_served(
    nursery: Nursery, tmp_path: Path
) -> None:
    process = served(nursery, tmp_path, limits={"max_session_backlog": 1_000})
    num_frames, num_calls = 40, 500

    async def flood(session: RawSession) -> None:
        asking = [pb.Request(id=n + 1, list_workers=calls.ListWorkersRequest()) for n in range(num_calls)]
        for _ in range(num_frames):
            await session.send(*asking)

    async def play() -> tuple[grpc.StatusCode, str]:
        session = await RawSession(process.address).greet("deaf")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await flood(session)
            for _ in range(20):
                await asyncio.to_thread(onlooker.heartbeat)
            return await session.ended()
        finally:
            await session.close()

    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client, ThreadPoolExecutor(1) as pool:
        onlooker = client.register_worker("onlooker")
        for number in range(49):
            client.register_worker(f"w{number}")
        answer_bytes = 100 * len(client.list_workers().workers)
        before_mb = rss_mb(process)
        playing = pool.submit(shared_loop().run, play())
        most_mb = before_mb
        num_served = 0
        while not playing.done():
            client.register_dataset("d", total_samples=1, shard_size=1)
            num_served += 1
            most_mb = max(most_mb, rss_mb(process))
        code, details = playing.result()
        print(f"{most_mb - before_mb:.1f} MB grown, {num_served} calls of another served meanwhile")
        assert (code, "unread answers" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert num_served > 3
        unbounded_mb = num_frames * num_calls * answer_bytes / MB
        assert most_mb - before_mb < unbounded_mb * 0.7
        assert onlooker.lost is None


# -- many at once --------------------------------------------------------------------------------------------------


def test_1000_registrations_over_50_sessions_make_few_generations(
    coordinator: CoordinatorProcess,
) -> None:
    num_sessions, num_each = 50, 20

    async def play() -> list[pb.Response]:
        sessions = [RawSession(coordinator.address) for _ in range(num_sessions)]
        await asyncio.gather(*(session.greet(f"s{n}") for n, session in enumerate(sessions)))
        answers = await asyncio.gather(
            *(
                session.ask(*(register(k + 1, f"w{n}-{k}") for k in range(num_each)))
                for n, session in enumerate(sessions)
            )
        )
        await asyncio.gather(*(session.close() for session in sessions))
        return [answer for some in answers for answer in some]

    answers = shared_loop().run(play())
    assert {answer.WhichOneof("result") for answer in answers} == {"register_worker"}
    assert len({answer.register_worker.incarnation for answer in answers}) == num_sessions * num_each
    num_generations = max(answer.register_worker.generation for answer in answers)
    print(f"1,000 registrations: {num_generations} generations")
    assert num_generations <= 200


def test_300_of_1000_workers_that_die_at_once_are_one_generation(nursery: Nursery, tmp_path: Path) -> None:
    lease = {"lease_s": 60.0, "heartbeat_s": 5.0, "suspicion_s": 0.5, "tick_s": 0.02}
    process = CoordinatorProcess(nursery, tmp_path, lease=lease)
    process.start()

    async def join(sessions: Iterable[RawSession]) -> None:
        for n, session in enumerate(sessions):
            await session.greet(f"s{n}")
            await session.ask(*(register(k + 1, f"survivor-{n}-{k}") for k in range(100)))

    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        client.register_dataset("d", total_samples=5_000, shard_size=1)
        survivors = shared_loop().run(_opened(process.address, 7))
        shared_loop().run(join(survivors))
        doomed = nursery.fork("children:workers", address=process.address, worker_ids=[f"d{n}" for n in range(300)])
        assert len(doomed.receive()["incarnations"]) == 300
        before = client.list_workers()
        assert len(before.workers) == 1_000
        doomed.kill()
        until(lambda: len(client.list_workers().workers) < 1_000, "the deaths are noticed")
        after = client.list_workers()
        assert (len(after.workers), after.generation) == (700, before.generation + 1)
        assert "and 296 more" in after.reason
        shared_loop().run(_closed(survivors))


async def _opened(address: str, num: int) -> list[RawSession]:
    return [RawSession(address) for _ in range(num)]


async def _closed(sessions: Iterable[RawSession]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


# -- disk faults and kills -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    where = tmp_path / "small"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        (pytest.fail if IN_CI else pytest.skip)(f"a tmpfs needs root: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(path: Path) -> None:
    """Fill it to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def test_a_full_disk_refuses_writes_answers_reads_and_loses_nothing_acknowledged(
    nursery: Nursery, tmp_path: Path, small_disk: Path
) -> None:
    process = served(nursery, small_disk)
    acknowledged: list[int] = []
    with CoordinatorClient(process.address, config=EAGER_CLIENT) as client:
        worker = client.register_worker("w0")
        client.register_dataset("d", total_samples=20_000, shard_size=1)
        shards = iter(worker.shards("d"))

        def ack() -> bool:
            some = [shard for shard, _ in zip(shards, range(5), strict=False)]
            try:
                worker.ack(some)
            except JournalWriteFailed:
                return False
            acknowledged.extend(shard.index for shard in some)
            return True

        assert ack()
        fill(small_disk / "filler")
        until(lambda: not ack(), "the journal has used up its free space")
        with pytest.raises(JournalWriteFailed):
            client.register_dataset("another", total_samples=1, shard_size=1)
        status, body = health(process)
        assert (status, body["status"]) == (503, "refusing")
        assert body["reason"]
        assert [w.worker_id for w in client.list_workers().workers] == ["w0"]
        assert [d.num_done for d in client.list_datasets()] == [len(acknowledged)]
        worker.heartbeat()
        (small_disk / "filler").unlink()
        until(ack, "writes succeed again once there is space")
        assert health(process) == (200, {"status": "ok"})
        assert worker.lost is None
    process.kill()
    done = fold(process.state, tmp_path / "at-death").jobs["default"].shards.datasets["d"].done
    assert [index for index in acknowledged if not done[index]] == []


def test_a_kill_under_load_keeps_every_acknowledged_ack(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM, journal={"snapshot_every": 50})
    process.start()
    num_clients, num_shards, num_kills = 4, 2_400, 3
    acknowledged: list[int] = []

    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(CoordinatorClient(process.address, config=EAGER_CLIENT)) for _ in range(num_clients)
        ]
        workers = [client.register_worker(f"w{n}") for n, client in enumerate(clients)]
        clients[0].register_dataset("d", total_samples=num_shards, shard_size=1)
        for worker in workers:
            worker.wait_for_workers(num_clients)

        def work(number: int) -> None:
            worker = workers[number]
            shards = worker.shards("d")
            while shards:
                now, shards = shards[:2], shards[2:]
                try:
                    worker.ack(now)
                except CoordinatorUnavailable:
                    shards = now + shards
                else:
                    acknowledged.extend(shard.index for shard in now)

        pool = stack.enter_context(ThreadPoolExecutor(num_clients))
        working = [pool.submit(work, number) for number in range(num_clients)]
        for kill in range(1, num_kills + 1):
            until(lambda kill=kill: len(acknowledged) > num_shards * kill // 5, "some are acknowledged")
            process.kill()
            known = list(acknowledged)
            done = fold(process.state, tmp_path / f"death-{kill}").jobs["default"].shards.datasets["d"].done
            assert [index for index in known if not done[index]] == []
            process.start()
        for one in working:
            one.result(DEADLINE_S)
        assert sorted(acknowledged) == list(range(num_shards))
        assert [d.num_done for d in clients[0].list_datasets()] == [num_shards]
