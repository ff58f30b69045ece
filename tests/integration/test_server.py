"""A coordinator from the operator's view: its output, probes, shutdown and errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from servers import CALM, DEADLINE_S, CommandLine, CoordinatorProcess, Nursery, command_line, free_port, until

from strata._version import __version__
from strata.cli.exit_codes import ExitCode
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.serve.listener import GRACE_S
from strata.coordinator.server import CoordinatorServer
from strata.errors import ConfigError
from strata.v1 import calls_pb2, coordinator_pb2

SERVICE = "strata.v1.Coordinator"
LEAVE_MARGIN_S = 8.0
"""Margin for a busy machine, in addition to the grace period."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    lease = ", ".join(f"{name}: {value}" for name, value in CALM.items())
    (tmp_path / "coordinator.yaml").write_text(f"lease: {{{lease}}}\n")
    return tmp_path


@pytest.fixture
def served(directory: Path) -> Iterator[tuple[CommandLine, dict[str, str]]]:
    """`strata coordinator` on free ports, and the addresses that it printed."""
    with command_line(
        directory, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--state", "c.db", "--json"
    ) as process:
        yield process, process.addresses()


@pytest.fixture
def address(embedded: EmbeddedCoordinator) -> str:
    return embedded.address


def get(url: str) -> tuple[int, Any]:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return response.status, json.load(response)


def open_socket(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def is_listening(address: str) -> bool:
    try:
        open_socket(address).close()
    except ConnectionRefusedError:
        return False
    return True


def start_here(**addresses: str) -> None:
    """For errors before anything starts."""

    async def start() -> None:
        await CoordinatorServer(CoordinatorConfig(state="memory", **addresses)).start()

    shared_loop().run(start())


def list_jobs(address: str) -> calls_pb2.ListJobsResponse:
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary(
            f"/{SERVICE}/ListJobs",
            request_serializer=calls_pb2.ListJobsRequest.SerializeToString,
            response_deserializer=calls_pb2.ListJobsResponse.FromString,
        )(calls_pb2.ListJobsRequest(), timeout=DEADLINE_S)


# -- startup -------------------------------------------------------------------------------------------------------


def test_the_printed_addresses_are_reachable_at_once(
    served: tuple[CommandLine, dict[str, str]], directory: Path
) -> None:
    _, addresses = served
    assert get(addresses["http"] + "/api/health") == (200, {"status": "ok"})
    assert list_jobs(addresses["grpc"]).jobs == []
    assert addresses["grpc"].startswith("127.0.0.1:")
    assert not addresses["grpc"].endswith(":0")
    assert (directory / addresses["state"]).samefile(directory / "c.db")


def test_the_addresses_are_printed_for_people(directory: Path) -> None:
    with command_line(directory, "--listen", "127.0.0.1:0", "--http", "off", "--state", "memory") as process:
        shown = [process.line().strip() for _ in range(4)]
    assert shown[0] == "The coordinator is up. Ctrl-C stops it."
    assert shown[1].startswith("gRPC   127.0.0.1:")
    assert shown[2:] == ["HTTP   off", "state  memory"]


def test_the_status_shows_jobs_workers_and_sessions(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(nursery, tmp_path, http=f"127.0.0.1:{free_port()}")
    process.start()
    with CoordinatorClient(process.address) as client:
        client.register_worker("w0", job_id="resnet")
        client.register_dataset("images", job_id="resnet", total_samples=10, shard_size=3)
        code, status = get(f"http://{process.settings['http']}/api/status")
    assert code == 200
    assert status.pop("journal_bytes") > 0
    job = {"job_id": "resnet", "generation": 1, "num_workers": 1, "num_datasets": 1, "num_open_barriers": 0}
    assert status["version"] == __version__
    assert (status["num_sessions"], status["journal_damage"]) == (1, None)
    assert [{key: found[key] for key in job} for found in status["jobs"]] == [job]


def test_the_health_service_reports_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request, timeout=DEADLINE_S).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            health.Check(health_pb2.HealthCheckRequest(service="strata.v1.Nothing"), timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_service_and_describes_all_of_its_calls(address: str) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=DEADLINE_S)
    assert {s.name for s in listed.list_services_response.service} >= {SERVICE, "grpc.health.v1.Health"}
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(file)
        for file in described.file_descriptor_response.file_descriptor_proto
    ]
    (service,) = [s for file in files for s in file.service]
    methods = {m.name: (m.input_type, m.client_streaming, m.server_streaming) for m in service.method}
    assert methods["RegisterWorker"] == (".strata.v1.RegisterWorkerRequest", False, False)
    assert methods["Session"] == (".strata.v1.ClientFrame", True, True)
    assert set(methods) == set(coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name)


# -- shutdown ------------------------------------------------------------------------------------------------------


def test_on_sigterm_health_turns_to_not_serving_before_the_connections_end(coordinator: CoordinatorProcess) -> None:
    with grpc.insecure_channel(coordinator.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        coordinator.child.signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError):
            next(watch)
    assert coordinator.child.wait_gone() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_within_its_grace_period_and_leaves_only_the_state(
    number: signal.Signals, served: tuple[CommandLine, dict[str, str]], directory: Path
) -> None:
    process, addresses = served
    with CoordinatorClient(addresses["grpc"]) as client:
        client.register_worker("w0")
        os.kill(process.pid, number)
        assert process.ended(GRACE_S + LEAVE_MARGIN_S) == (0, "using ./coordinator.yaml\n")
    assert not is_listening(addresses["grpc"])
    assert not is_listening(addresses["http"])
    assert {file.name for file in directory.iterdir()} == {"coordinator.yaml", "c.db", "c.db.lock"}
    assert stat.S_IMODE((directory / "c.db").stat().st_mode) == 0o600


def test_members_survive_a_restart_of_the_coordinator(nursery: Nursery, tmp_path: Path) -> None:
    """Connections that it closes itself make no worker suspect, however short the suspicion."""
    lease = {**CALM, "suspicion_s": 0.001, "tick_s": 0.001}
    process = CoordinatorProcess(nursery, tmp_path, lease=lease, http=f"127.0.0.1:{free_port()}")
    process.start()
    with CoordinatorClient(process.address) as client, open_socket(process.settings["http"]):
        worker = client.register_worker("w0")
        assert process.child.terminate() == 0
        process.start()
        worker.heartbeat()
        assert (client.num_connections, worker.lost) == (2, None)
        members = client.list_workers()
    assert (members.generation, [w.incarnation for w in members.workers]) == (worker.generation, [worker.incarnation])


def test_a_waiting_barrier_does_not_delay_the_shutdown(coordinator: CoordinatorProcess) -> None:
    with CoordinatorClient(coordinator.address) as client, grpc.insecure_channel(coordinator.address) as channel:
        client.register_worker("w1")
        joined = channel.unary_unary(
            f"/{SERVICE}/RegisterWorker",
            request_serializer=calls_pb2.RegisterWorkerRequest.SerializeToString,
            response_deserializer=calls_pb2.RegisterWorkerResponse.FromString,
        )(calls_pb2.RegisterWorkerRequest(worker_id="w0", instance_id="i"), timeout=DEADLINE_S)
        request = calls_pb2.WaitBarrierRequest(
            worker_id="w0",
            incarnation=joined.incarnation,
            generation=joined.generation,
            barrier_id="never",
            timeout_s=600.0,
        )
        waiting = channel.unary_unary(
            f"/{SERVICE}/WaitBarrier",
            request_serializer=calls_pb2.WaitBarrierRequest.SerializeToString,
            response_deserializer=calls_pb2.WaitBarrierResponse.FromString,
        ).future(request, timeout=DEADLINE_S)
        list_jobs(coordinator.address)
        coordinator.child.signal(signal.SIGTERM)
        assert coordinator.child.wait_gone(GRACE_S + LEAVE_MARGIN_S) == 0
        assert waiting.exception(timeout=DEADLINE_S).code() in {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        }


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["listen", "http"])
def test_a_port_in_use_is_refused_with_the_cure(flag: str, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0"}
        addresses[flag] = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [text for name, value in addresses.items() for text in (f"--{name}", value)]
        with command_line(directory, *flags, "--state", "c.db") as process:
            code, errors = process.ended()
    assert code == ExitCode.USAGE
    assert f"error: {flag}='{addresses[flag]}' cannot be bound" in errors
    assert "choose another port" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("flag", ["listen", "http"])
@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "[::]", "example.org"])
def test_a_public_address_is_refused_with_the_cure(flag: str, host: str) -> None:
    with pytest.raises(ConfigError, match=r"is reachable from other machines.*pass --tokens, --tls-cert") as no:
        start_here(**{flag: f"{host}:0"})
    assert no.value.field == flag


def test_the_command_line_refuses_such_an_address_in_one_line(directory: Path) -> None:
    with command_line(directory, "--listen", "0.0.0.0:0", "--state", "c.db") as process:
        code, errors = process.ended()
    assert code == ExitCode.USAGE
    assert errors.splitlines()[-1].startswith("error: listen='0.0.0.0:0' is reachable from other machines")
    assert [file.name for file in directory.iterdir()] == ["coordinator.yaml"]


def test_http_on_a_unix_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT or 'off'") as refused:
        start_here(http=f"unix:{tmp_path}/http.sock")
    assert refused.value.field == "http"


def test_a_second_coordinator_on_one_state_is_refused_with_its_holder(
    coordinator: CoordinatorProcess, directory: Path
) -> None:
    flags = ["--listen", "127.0.0.1:0", "--http", "off", "--state", str(coordinator.state)]
    with command_line(directory, *flags) as second:
        code, errors = second.ended()
    assert code == ExitCode.STATE_BUSY
    assert f"is open in process {coordinator.child.pid} on " in errors
    assert f"(at {coordinator.address}); stop that coordinator" in errors
    assert list_jobs(coordinator.address).jobs == []


def test_a_start_that_failed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ConfigError, match="is a directory"):
        EmbeddedCoordinator(CoordinatorConfig(state=str(tmp_path))).start()
    assert list(tmp_path.iterdir()) == []


# -- robustness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 4096,
        b"\xff" * 65536,
        b"GET /api/health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x17" * 200,
    ],
    ids=["zeros", "ones", "http1", "broken-http2", "tls"],
)
def test_garbage_on_the_grpc_port_affects_no_client(garbage: bytes, coordinator: CoordinatorProcess) -> None:
    with CoordinatorClient(coordinator.address) as client:
        worker = client.register_worker("w0")
        with contextlib.suppress(ConnectionError), open_socket(coordinator.address) as stranger:
            stranger.sendall(garbage)  # the server may close the connection at any time
            with contextlib.suppress(OSError):  # then the socket is "not connected"
                stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(65536):
                pass
        worker.heartbeat()
        assert (client.num_connections, worker.lost, client.list_workers().generation) == (1, None, 1)


def test_a_unix_socket_left_by_a_dead_coordinator_is_taken_over(nursery: Nursery, tmp_path: Path) -> None:
    process = CoordinatorProcess(nursery, tmp_path, listen=f"unix:{tmp_path}/c.sock")
    process.start()
    process.kill()
    assert (tmp_path / "c.sock").is_socket()
    process.start()
    assert list_jobs(process.address).jobs == []
    assert process.child.terminate() == 0
    assert not (tmp_path / "c.sock").exists()


def test_a_second_coordinator_or_relay_on_a_served_socket_is_refused_with_the_pid_of_the_first(
    nursery: Nursery, tmp_path: Path
) -> None:
    listen = f"unix:{tmp_path}/c.sock"
    first = CoordinatorProcess(nursery, tmp_path, listen=listen)
    first.start()
    with CoordinatorClient(first.address) as client:
        worker = client.register_worker("w0")
        sockets = {path.name: path.stat().st_ino for path in tmp_path.glob("c.sock*")}
        assert set(sockets) == {"c.sock", "c.sock.lock", "c.sock.frames", "c.sock.frames.lock"}
        (tmp_path / "frames.yaml").write_text(f"frames: {listen}.frames\n")
        another = ("--http", "off", "--state", "memory", "--config", "frames.yaml", "--listen")
        for command, flags, what in (
            ("coordinator", (*another, listen), "listen"),
            ("coordinator", (*another, "127.0.0.1:0"), "frames"),
            ("relay", ("--upstream", "127.0.0.1:1", "--listen", listen), "listen"),
        ):
            with command_line(tmp_path, *flags, command=command) as second:
                code, errors = second.ended()
            assert (code, f"is served by process {first.child.pid}; stop it" in errors) == (2, True), errors
            assert f"{what}='unix:" in errors
        worker.heartbeat()
        assert {path.name: path.stat().st_ino for path in tmp_path.glob("c.sock*")} == sockets
    with CoordinatorClient(first.address) as client:  # a new client finds the same coordinator
        assert [one.worker_id for one in client.list_workers().workers] == ["w0"]
    assert first.child.terminate() == 0
    assert list(tmp_path.glob("c.sock*")) == []


def test_the_port_is_free_again_right_after_a_stop(coordinator: CoordinatorProcess) -> None:
    """Three suffice: old connections linger on the port."""
    with CoordinatorClient(coordinator.address) as client:
        for num in range(1, 4):
            assert client.num_connections == num
            coordinator.restart()
            until(lambda num=num: client.num_connections == num + 1, "the client is back")
