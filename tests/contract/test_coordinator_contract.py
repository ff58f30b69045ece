"""The coordinator's contract through every entry point: unary calls, session frames, our client; and internal
errors."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from coordinator_contract import CONFIG, DEADLINE_S, MAX_MESSAGE_BYTES, CoordinatorContract, Refused, Way, World
from google.protobuf.message import Message

from strata.coordinator import wire
from strata.coordinator.client import AsyncCoordinatorClient, ClientConfig
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.serve.service import METHODS
from strata.coordinator.state.core import Core
from strata.errors import StrataError
from strata.v1 import calls_pb2 as pb
from strata.v1 import session_pb2, types_pb2

SERVICE = "strata.v1.Coordinator"
BY_NAME = {method.name: method for method in METHODS}
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class UnaryWay:
    """One gRPC call per call, as from any language."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def call(self, method: str, request: Message) -> Any:
        send = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=BY_NAME[method].response.FromString,
        )
        try:
            return send(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            raise _refused(error) from None

    def close(self) -> None:
        self._channel.close()


class SessionWay:
    """Frames, written and read by hand."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._frames: queue.SimpleQueue[session_pb2.ClientFrame | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[session_pb2.Response]] = {}
        self.generations: list[int] = []
        """The notices received before the answers that follow them."""
        self._frames.put(session_pb2.ClientFrame(hello=session_pb2.Hello(session_id=f"by-hand-{id(self)}")))
        open_session = self._channel.stream_stream(
            f"/{SERVICE}/Session",
            request_serializer=session_pb2.ClientFrame.SerializeToString,
            response_deserializer=session_pb2.ServerFrame.FromString,
        )
        self._stream = open_session(iter(self._frames.get, None))
        assert next(self._stream).welcome.server.startswith("strata ")
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def call(self, method: str, request: Message) -> Any:
        number = next(self._ids)
        answered = self._waiting[number] = Future()
        framed = session_pb2.Request(id=number, **{BY_NAME[method].field: request})
        self._frames.put(session_pb2.ClientFrame(requests=[framed]))
        response = answered.result(DEADLINE_S)
        result = response.WhichOneof("result")
        if result == "error":
            raise Refused(_code(response.error.code), response.error)
        assert result == BY_NAME[method].field
        return getattr(response, result)

    def close(self) -> None:
        self._frames.put(None)
        self._stream.cancel()
        self._reader.join(DEADLINE_S)
        self._channel.close()

    def _read(self) -> None:
        try:
            for frame in self._stream:
                self.generations += [n.generation_changed.generation for n in frame.notices]
                for response in frame.responses:
                    self._waiting.pop(response.id).set_result(response)
        except grpc.RpcError as error:
            for answered in self._waiting.values():
                answered.set_exception(_refused(error))


class ClientWay:
    """Our asyncio client, which the blocking client wraps."""

    def __init__(self, address: str, *, frames: bool = True) -> None:
        config = ClientConfig(max_message_bytes=MAX_MESSAGE_BYTES, call_timeout_s=DEADLINE_S, frames=frames)
        self._client = shared_loop().run(self._connect(address, config))
        assert self._client._link is not None
        assert bool(self._client._link._frames_at) == frames, "the call took the intended way"

    @staticmethod
    async def _connect(address: str, config: ClientConfig) -> AsyncCoordinatorClient:
        client = AsyncCoordinatorClient(address, config=config)
        await client.connect()
        return client

    def call(self, method: str, request: Message) -> Any:
        try:
            return shared_loop().run(self._client.call(BY_NAME[method].field, request))
        except StrataError as error:
            raise Refused(wire.status_of(error), wire.encode_error(error)) from None

    def close(self) -> None:
        shared_loop().run(self._client.close())
        assert self._client.num_connections == 0


WAYS: dict[str, Callable[[str], Way]] = {
    "unary": UnaryWay,
    "session": SessionWay,
    "client": ClientWay,
    "client over gRPC": functools.partial(ClientWay, frames=False),
}


def _refused(error: Any) -> Refused:
    """Build the error from a gRPC status; without our details, gRPC itself refused the call."""
    details = dict(error.trailing_metadata() or ()).get("strata-error-bin")
    known = types_pb2.Error.FromString(details) if details else types_pb2.Error(message=error.details())
    if details:
        assert _code(known.code) is error.code()
        assert known.message.startswith(error.details().removesuffix("…"))
    return Refused(error.code(), known)


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)


class TestDirect(CoordinatorContract):
    """Calls go directly to the coordinator; subclasses use the address of a relay."""

    @pytest.fixture
    def coordinator(self) -> Iterator[EmbeddedCoordinator]:
        with EmbeddedCoordinator(CONFIG) as coordinator:
            yield coordinator

    @pytest.fixture
    def address(self, coordinator: EmbeddedCoordinator) -> str:
        return coordinator.address

    @pytest.fixture(params=list(WAYS))
    def way(self, request: pytest.FixtureRequest, address: str) -> Iterator[Way]:
        way = WAYS[request.param](address)
        yield way
        way.close()

    @pytest.fixture
    def another_way(self, address: str) -> Iterator[Way]:
        way = UnaryWay(address)
        yield way
        way.close()

    @pytest.fixture
    def wait_arrivals(self, coordinator: EmbeddedCoordinator) -> Callable[[int], None]:
        assert coordinator._server is not None
        assert coordinator._server._engine is not None
        core = coordinator._server._engine.core

        def wait(wanted: int) -> None:
            end_s = time.monotonic() + DEADLINE_S
            while sum(len(b.arrived) for job in core.jobs.values() for b in list(job.barriers.open.values())) < wanted:
                assert time.monotonic() < end_s, f"{wanted} workers did not arrive"
                time.sleep(0.001)

        return wait

    # -- internal errors -------------------------------------------------------------------------------------------

    def test_an_unexpected_error_in_a_call_fails_only_its_caller(
        self, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = Core.job

        def stumble(core: Core, job_id: str) -> Any:
            if job_id == "stone":
                raise ZeroDivisionError("oh")
            return found(core, job_id)

        monkeypatch.setattr(Core, "job", stumble)
        before = world.everything()
        for method, request in (
            ("Heartbeat", pb.HeartbeatRequest(job_id="stone", worker_id="a")),
            ("AdvanceEpoch", pb.AdvanceEpochRequest(job_id="stone", dataset_id="d")),
        ):
            with pytest.raises(Refused, match="ZeroDivisionError: oh") as refused:
                world.call(method, request)
            assert refused.value.code is grpc.StatusCode.INTERNAL
        assert world.everything() == before
        assert "unexpected error" in caplog.text

    def test_an_answer_that_cannot_be_encoded_fails_only_its_caller(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "encode_shards", lambda _: [types_pb2.Shard(index=-1)])
        with pytest.raises(Refused, match="cannot encode its answer") as refused:
            world.call("GetAssignedShards", pb.GetAssignedShardsRequest(worker_id="a"))
        assert refused.value.code is grpc.StatusCode.INTERNAL
        assert list(world.workers()) == ["a", "b"]


class TestSession:
    """Errors that only frames can cause."""

    @pytest.fixture
    def stream(self) -> Iterator[Callable[..., Any]]:
        with EmbeddedCoordinator(CONFIG) as coordinator, grpc.insecure_channel(coordinator.address) as channel:
            send = channel.stream_stream(
                f"/{SERVICE}/Session",
                request_serializer=session_pb2.ClientFrame.SerializeToString,
                response_deserializer=session_pb2.ServerFrame.FromString,
            )
            yield lambda *frames: send(iter(frames), timeout=DEADLINE_S)

    @pytest.mark.parametrize(
        "first",
        [
            session_pb2.ClientFrame(),
            session_pb2.ClientFrame(hello=session_pb2.Hello()),
            session_pb2.ClientFrame(requests=[session_pb2.Request(id=1, list_jobs=pb.ListJobsRequest())]),
        ],
        ids=["nothing", "no-id", "no-hello"],
    )
    def test_a_session_without_hello_is_refused(
        self, stream: Callable[..., Any], first: session_pb2.ClientFrame
    ) -> None:
        with pytest.raises(grpc.RpcError) as refused:
            list(stream(first))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello.session_id" in refused.value.details()

    def test_calls_may_arrive_with_hello_and_an_unknown_one_is_refused(self, stream: Callable[..., Any]) -> None:
        hello = session_pb2.Hello(session_id="s1")
        calls = [session_pb2.Request(id=7), session_pb2.Request(id=8, list_jobs=pb.ListJobsRequest())]
        responses = {}
        frames = stream(session_pb2.ClientFrame(hello=hello, requests=calls))
        assert next(frames).HasField("welcome")
        for frame in frames:
            responses |= {r.id: r for r in frame.responses}
            if len(responses) == 2:
                break
        assert responses[7].error.kind == "InvalidArgument"
        assert responses[8].WhichOneof("result") == "list_jobs"

    def test_calls_made_before_the_client_closed_its_side_are_answered(self, stream: Callable[..., Any]) -> None:
        calls = [
            session_pb2.Request(id=n, register_worker=pb.RegisterWorkerRequest(worker_id=f"w{n}", instance_id="i"))
            for n in range(1, 51)
        ]
        hello = session_pb2.Hello(session_id="s1")
        frames = list(stream(session_pb2.ClientFrame(hello=hello), session_pb2.ClientFrame(requests=calls)))
        answers = {r.id: r.register_worker for frame in frames for r in frame.responses}
        assert [answers[n].rank for n in range(1, 51)] == list(range(50))
        # Usually one generation; a frame that takes longer than a slice (5 ms) shares the loop and may span several.
        generations = [answers[n].generation for n in range(1, 51)]
        assert generations[0] == 1
        assert generations == sorted(generations)

    def test_a_frame_above_the_backlog_ends_the_session(self, stream: Callable[..., Any]) -> None:
        calls = [session_pb2.Request(id=n, list_jobs=pb.ListJobsRequest()) for n in range(1, 102)]
        frame = session_pb2.ClientFrame(hello=session_pb2.Hello(session_id="s1"), requests=calls)
        with pytest.raises(grpc.RpcError) as dropped:
            list(stream(frame))
        assert dropped.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_session_backlog=100 unanswered calls" in dropped.value.details()
        assert next(stream(session_pb2.ClientFrame(hello=session_pb2.Hello(session_id="s1")))).HasField("welcome")

    def test_notices_go_to_sessions_with_a_worker_in_the_job_and_to_no_others(self) -> None:
        with EmbeddedCoordinator(CONFIG) as coordinator:
            ways = [SessionWay(coordinator.address) for _ in range(3)]
            one, two, other = World(ways[0]), World(ways[1]), World(ways[2], job_id="another")
            other.join("a")
            one.join("a")
            one.join("b")
            two.join("c")
            one.leave("a")
            one.leave("b")
            two.join("d")
            for world in (one, two, other):
                world.call("ListJobs", pb.ListJobsRequest())
            assert [way.generations for way in ways] == [[1, 2, 3, 4], [3, 4, 5, 6], [1]]
            for way in ways:
                way.close()
