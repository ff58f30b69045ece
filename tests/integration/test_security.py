"""Security with real processes: tokens, TLS, roles, rotation, and hostile callers."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from documents import ROOT, blocks
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from servers import STRATA, CommandLine, command_line, free_port

from strata.coordinator.client import AsyncCoordinatorClient, ClientConfig, CoordinatorClient
from strata.errors import (
    ConfigError,
    CoordinatorUnavailable,
    InvalidArgument,
    LimitExceeded,
    PermissionRefused,
    StaleIncarnation,
    StrataError,
    Unauthenticated,
)
from strata.transport.credentials import ClientSecurity
from strata.v1 import calls_pb2 as pb
from strata.v1 import session_pb2

SERVICE = "/strata.v1.Coordinator/"
QUICK_S = 5.0
"""A permanent error is raised long before the client's timeout (10 s)."""
PATIENT = ClientConfig(connect_timeout_s=10.0)
SHORT = ClientConfig(connect_timeout_s=1.0)
BASE = ("--http=off", "--state=memory", "--json")


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("STRATA_TOKEN", "STRATA_TLS"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certs(tmp_path_factory.mktemp("security") / "certs")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another authority."""
    return make_certs(tmp_path_factory.mktemp("security") / "others")


def make_certs(directory: Path) -> Path:
    made = subprocess.run([STRATA, "certs", directory], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    return directory


def tls(certs: Path) -> tuple[str, ...]:
    return (f"--tls-cert={certs}/server.crt", f"--tls-key={certs}/server.key")


def secured(certs: Path) -> tuple[str, ...]:
    return (*tls(certs), f"--tokens={certs}/tokens")


def as_role(certs: Path, role: str, **more: str) -> ClientSecurity:
    return ClientSecurity(ca=f"{certs}/ca.crt", token_file=f"{certs}/{role}.token", **more)


def secrets_of(certs: Path) -> list[str]:
    return [line.split()[1] for line in (certs / "tokens").read_text().splitlines()]


@pytest.fixture(scope="module")
def server(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator with tokens and TLS on all addresses; its output contains none of its tokens."""
    flags = ("--listen=0.0.0.0:0", *BASE, *secured(certs))
    with command_line(tmp_path_factory.mktemp("server"), *flags) as coordinator:
        address = coordinator.addresses()["grpc"]
        yield f"localhost:{address.rpartition(':')[2]}"
        coordinator.terminate()
        code, errors = coordinator.ended()
        assert code == 0
        assert [secret for secret in secrets_of(certs) if secret in errors] == []
        assert "Traceback" not in errors


def channel_to(server: str, certs: Path) -> grpc.Channel:
    return grpc.secure_channel(server, grpc.ssl_channel_credentials((certs / "ca.crt").read_bytes()))


def refusal(server: str, security: ClientSecurity, config: ClientConfig = PATIENT) -> tuple[StrataError, float]:
    """Return why a client cannot connect, and after how long."""
    start_s = time.monotonic()
    with pytest.raises(StrataError) as refused, CoordinatorClient(server, config=config, security=security):
        pass
    return refused.value, time.monotonic() - start_s


# -- listening -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
@pytest.mark.parametrize(
    ("given", "lacks"), [("", "without tokens and TLS"), ("tokens", "without TLS"), ("tls", "without tokens")]
)
def test_a_public_address_requires_tokens_and_tls(
    tmp_path: Path, certs: Path, listen: str, given: str, lacks: str
) -> None:
    flags = {"": (), "tokens": (f"--tokens={certs}/tokens",), "tls": tls(certs)}[given]
    with command_line(tmp_path, f"--listen={listen}", *BASE, *flags) as coordinator:
        code, errors = coordinator.ended()
    assert code == 2
    assert lacks in errors
    assert "--insecure" in errors


def test_insecure_allows_every_address(tmp_path: Path) -> None:
    with command_line(tmp_path, "--listen=0.0.0.0:0", *BASE, "--insecure") as coordinator:
        port = coordinator.addresses()["grpc"].rpartition(":")[2]
        with CoordinatorClient(f"127.0.0.1:{port}") as client:
            assert client.list_jobs() == []


def test_a_public_http_address_requires_tokens_and_tls(tmp_path: Path) -> None:
    flags = ("--listen=127.0.0.1:0", "--http=0.0.0.0:0", "--state=memory", "--json")
    with command_line(tmp_path, *flags) as coordinator:
        code, errors = coordinator.ended()
    assert (code, "http='0.0.0.0:0' is reachable from other machines" in errors) == (2, True)


# -- connecting ----------------------------------------------------------------------------------------------------


def test_every_entry_point_works_with_a_token_and_tls(server: str, certs: Path) -> None:
    worker = as_role(certs, "worker")
    with CoordinatorClient(server, security=worker) as client:
        joined = client.register_worker("w0", job_id="ways")
        joined.heartbeat()

    async def look() -> int:
        async with AsyncCoordinatorClient(server, security=worker) as other:
            return len(await other.list_jobs())

    assert asyncio.run(look()) >= 1
    with channel_to(server, certs) as channel:
        answer = channel.unary_unary(
            SERVICE + "ListJobs", pb.ListJobsRequest.SerializeToString, pb.ListJobsResponse.FromString
        )(pb.ListJobsRequest(), metadata=worker.metadata(), timeout=QUICK_S)
        assert "ways" in [job.job_id for job in answer.jobs]
        frames = channel.stream_stream(
            SERVICE + "Session", session_pb2.ClientFrame.SerializeToString, session_pb2.ServerFrame.FromString
        )
        hello = session_pb2.ClientFrame(hello=session_pb2.Hello(session_id="raw"))
        assert next(frames(iter([hello]), metadata=worker.metadata(), timeout=QUICK_S)).HasField("welcome")


def test_a_missing_or_wrong_token_fails_at_once(server: str, certs: Path) -> None:
    ca = f"{certs}/ca.crt"
    error, took_s = refusal(server, ClientSecurity(ca=ca))
    assert isinstance(error, Unauthenticated)
    assert "STRATA_TOKEN" in str(error)
    assert took_s < QUICK_S
    error, took_s = refusal(server, ClientSecurity(ca=ca, token="not-one-of-theirs"))
    assert isinstance(error, Unauthenticated)
    assert "not-one-of-theirs" not in str(error)
    assert took_s < QUICK_S


@pytest.mark.parametrize("sent", [(), (("authorization", "Bearer not-one-of-theirs"),)])
def test_a_unary_call_without_a_token_is_refused(server: str, certs: Path, sent: Any) -> None:
    with channel_to(server, certs) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(SERVICE + "ListJobs")(b"", metadata=sent, timeout=QUICK_S)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_server_of_another_authority_is_not_trusted(server: str, certs: Path, others: Path) -> None:
    error, took_s = refusal(server, ClientSecurity(ca=f"{others}/ca.crt", token_file=f"{certs}/worker.token"))
    assert isinstance(error, CoordinatorUnavailable)
    assert "certificate is not trusted" in str(error)
    assert took_s < QUICK_S


def test_a_client_without_tls_gets_a_hint(server: str, certs: Path) -> None:
    error, _ = refusal(server, ClientSecurity(token_file=f"{certs}/worker.token"), SHORT)
    assert isinstance(error, CoordinatorUnavailable)
    assert "if it requires TLS" in str(error)


def test_a_client_with_tls_learns_that_the_server_has_none(tmp_path: Path, certs: Path) -> None:
    with command_line(tmp_path, "--listen=127.0.0.1:0", *BASE) as coordinator:
        error, took_s = refusal(coordinator.addresses()["grpc"], as_role(certs, "worker"))
    assert "does not use TLS" in str(error)
    assert took_s < QUICK_S


def test_a_missing_token_file_is_named_at_once(server: str, certs: Path) -> None:
    error, took_s = refusal(server, ClientSecurity(ca=f"{certs}/ca.crt", token_file="/none/such"))
    assert isinstance(error, ConfigError)
    assert "/none/such" in str(error)
    assert took_s < QUICK_S


def test_required_client_certificates_are_enforced(tmp_path: Path, certs: Path, others: Path) -> None:
    flags = ("--listen=127.0.0.1:0", *BASE, *secured(certs), f"--client-ca={certs}/ca.crt")
    with command_line(tmp_path, *flags) as coordinator:
        address = coordinator.addresses()["grpc"]
        error, _ = refusal(address, as_role(certs, "worker"), SHORT)
        assert "for a client certificate" in str(error)
        foreign = as_role(certs, "worker", certificate=f"{others}/client.crt", key=f"{others}/client.key")
        assert isinstance(refusal(address, foreign, SHORT)[0], CoordinatorUnavailable)
        ours = as_role(certs, "worker", certificate=f"{certs}/client.crt", key=f"{certs}/client.key")
        with CoordinatorClient(address, security=ours) as client:
            assert client.list_jobs() == []


def test_health_is_open_and_reflection_is_not(server: str, certs: Path) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with channel_to(server, certs) as channel:
        healthy = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="strata.v1.Coordinator"), timeout=QUICK_S
        )
        assert healthy.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.ServerReflectionInfo(iter([ask]), timeout=QUICK_S))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = next(
            stub.ServerReflectionInfo(iter([ask]), metadata=as_role(certs, "reader").metadata(), timeout=QUICK_S)
        )
        assert "strata.v1.Coordinator" in [s.name for s in answer.list_services_response.service]


# -- roles ---------------------------------------------------------------------------------------------------------


def test_a_reader_may_read_but_change_nothing(server: str, certs: Path) -> None:
    with CoordinatorClient(server, security=as_role(certs, "worker")) as client:
        client.register_worker("w0", job_id="read")
        with CoordinatorClient(server, security=as_role(certs, "reader")) as reader:
            before = reader.list_workers(job_id="read")
            with pytest.raises(PermissionRefused, match="RegisterWorker requires the role worker"):
                reader.register_worker("w1", job_id="read")
            with pytest.raises(PermissionRefused, match="RegisterDataset"):
                reader.register_dataset("d", job_id="read", total_samples=1, shard_size=1)
            with pytest.raises(PermissionRefused, match="SendCommand"):
                reader.send_command("STOP", job_id="read")
            after = reader.list_workers(job_id="read")
    assert (after.generation, len(after.workers)) == (before.generation, 1)


def test_a_worker_may_command_save_and_stop_and_everything_else_requires_an_admin(server: str, certs: Path) -> None:
    with CoordinatorClient(server, security=as_role(certs, "worker")) as client:
        client.register_worker("w0", job_id="command")
        assert [client.send_command(name, job_id="command") for name in ("CHECKPOINT_NOW", "STOP")] == [1, 2]
        for name in ("MESSAGE", "REBALANCE", "DUMP_STACKS"):
            with pytest.raises(PermissionRefused, match="SendCommand requires the role admin"):
                client.send_command(name, job_id="command")
        with CoordinatorClient(server, security=as_role(certs, "admin")) as admin:
            assert admin.send_command("MESSAGE", job_id="command") == 3


# -- rotation ------------------------------------------------------------------------------------------------------


def test_tokens_are_rotated_under_load_without_a_restart(tmp_path: Path, certs: Path) -> None:
    old, new = "o" * 32, "n" * 32
    file = tmp_path / "tokens"

    def write(*tokens: str) -> None:
        (tmp_path / "next").write_text("".join(f"worker {token}\n" for token in tokens))
        (tmp_path / "next").rename(file)

    def security(token: str) -> ClientSecurity:
        return ClientSecurity(ca=f"{certs}/ca.crt", token=token)

    write(old)
    flags = ("--listen=127.0.0.1:0", *BASE, *tls(certs), f"--tokens={file}")
    with command_line(tmp_path, *flags) as coordinator:
        address = coordinator.addresses()["grpc"]
        done, failures, num_calls = threading.Event(), [], [0]
        with CoordinatorClient(address, security=security(old)) as busy:

            def load() -> None:
                while not done.is_set():
                    try:
                        busy.list_jobs()
                        num_calls[0] += 1
                    except StrataError as error:
                        failures.append(error)

            thread = threading.Thread(target=load)
            thread.start()
            try:
                assert isinstance(refusal(address, security(new))[0], Unauthenticated)
                write(old, new)
                for token in (old, new):
                    with CoordinatorClient(address, security=security(token)) as client:
                        client.list_jobs()
                file.write_text("nonsense\n")  # a typo locks no client out
                with CoordinatorClient(address, security=security(new)) as client:
                    client.list_jobs()
                write(new)
                assert isinstance(refusal(address, security(old))[0], Unauthenticated)
            finally:
                done.set()
                thread.join()
        assert failures == []
        assert num_calls[0] > 0
        coordinator.terminate()
        code, errors = coordinator.ended()
        assert code == 0
        assert old not in errors
        assert new not in errors


# -- hostile callers -----------------------------------------------------------------------------------------------


def test_a_hostile_worker_cannot_impersonate_another(server: str, certs: Path) -> None:
    security = as_role(certs, "worker")
    with (
        CoordinatorClient(server, security=security) as client,
        CoordinatorClient(server, security=security) as hostile,
    ):
        victim = client.register_worker("victim", job_id="harm")
        client.register_dataset("d", job_id="harm", total_samples=10, shard_size=1)
        victim.shards("d")
        victim.report(state="TRAINING", step=7)
        victim.heartbeat()
        shown = hostile.list_workers(job_id="harm").workers[0].incarnation
        guesses = [0, shown, shown + (1 << 32), (1 << 63) - 1, (12345 << 32) | shown]
        me = {"job_id": "harm", "worker_id": "victim"}
        fenced = {**me, "generation": victim.generation}
        for guess in guesses:
            for field, request in {
                "ack_shards": pb.AckShardsRequest(**fenced, incarnation=guess, dataset_id="d", indices=[0]),
                "heartbeat": pb.HeartbeatRequest(**me, incarnation=guess, step=999),
                "deregister_worker": pb.DeregisterWorkerRequest(**me, incarnation=guess),
                "wait_barrier": pb.WaitBarrierRequest(**fenced, incarnation=guess, barrier_id="b", timeout_s=1),
                "notify_checkpoint": pb.NotifyCheckpointRequest(
                    **fenced, incarnation=guess, checkpoint_id="c", step=1, path="/evil", type=1
                ),
                "request_recovery": pb.RequestRecoveryRequest(**me, incarnation=guess),
            }.items():
                if guess == 0 and field == "request_recovery":
                    continue  # it only returns what every caller may see
                with pytest.raises(StaleIncarnation if guess else (StaleIncarnation, InvalidArgument)):
                    hostile._loop.run(hostile._client.call(field, request))
        members = hostile.list_workers(job_id="harm")
        assert [(w.worker_id, w.step, w.suspect) for w in members.workers] == [("victim", 7, False)]
        assert members.generation == victim.generation
        assert hostile.list_datasets(job_id="harm")[0].num_done == 0
        assert hostile.latest_checkpoint(job_id="harm") is None
        assert victim.lost is None


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A coordinator with small limits."""
    (tmp_path / "coordinator.yaml").write_text(
        "limits: {max_calls_per_s: 200, max_sessions: 2, max_message_bytes: 65536}\n"
    )
    with command_line(tmp_path, "--listen=127.0.0.1:0", *BASE, "--config=coordinator.yaml") as coordinator:
        yield coordinator.addresses()["grpc"]


def test_a_flooding_session_is_limited_and_others_are_served(small: str) -> None:
    async def flood() -> tuple[int, int]:
        async with AsyncCoordinatorClient(small) as flooding, AsyncCoordinatorClient(small) as other:
            calls = [flooding.list_jobs() for _ in range(2_000)]
            answers = asyncio.gather(*calls, return_exceptions=True)
            served = 0
            while not answers.done():
                await other.list_jobs()
                served += 1
                await asyncio.sleep(0.01)
            refused = [a for a in await answers if isinstance(a, LimitExceeded)]
            assert "max_calls_per_s=200" in str(refused[0])
            await other.list_jobs()
            return len(refused), served

    refused, served = asyncio.run(flood())
    assert refused > 1_000
    assert served > 0


def test_sessions_above_the_limit_are_refused_until_one_closes(small: str) -> None:
    with CoordinatorClient(small), CoordinatorClient(small) as second:
        error, _ = refusal(small, ClientSecurity(), SHORT)
        assert "max_sessions" in str(error)
        assert second.list_jobs() == []
    with CoordinatorClient(small) as client:
        assert client.list_jobs() == []


def test_oversized_frames_and_ids_are_refused_and_the_coordinator_survives(small: str) -> None:
    with grpc.insecure_channel(small) as channel:
        call = channel.unary_unary(SERVICE + "RegisterWorker", pb.RegisterWorkerRequest.SerializeToString)
        for length, code in ((129, "INVALID_ARGUMENT"), (100_000, "RESOURCE_EXHAUSTED")):
            with pytest.raises(grpc.RpcError) as refused:
                call(pb.RegisterWorkerRequest(worker_id="x" * length, instance_id="i"), timeout=QUICK_S)
            assert refused.value.code().name == code
        stream = channel.stream_stream(SERVICE + "Session", session_pb2.ClientFrame.SerializeToString)
        with pytest.raises(grpc.RpcError) as refused:
            list(stream(iter([session_pb2.ClientFrame(hello=session_pb2.Hello(session_id="x" * 100_000))])))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with CoordinatorClient(small) as client:
        assert client.list_jobs() == []


# -- documentation -------------------------------------------------------------------------------------------------


def test_the_five_documented_commands_work(tmp_path: Path) -> None:
    (shown,) = [b.text for b in blocks(ROOT / "docs" / "security.md") if b.info == "console five commands"]
    port = free_port()
    lines = [line.removeprefix("$ ") for line in shown.replace("50051", str(port)).splitlines() if line[:2] == "$ "]
    assert len(lines) == 5
    env = {
        **os.environ,
        "NO_COLOR": "1",
        "PATH": f"{STRATA.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path),
    }
    server: CommandLine | None = None
    try:
        for line in lines:
            line = line.replace("coord.example:", "localhost:")
            arguments = shlex.split(line)
            if arguments[:2] == ["strata", "coordinator"]:
                server = CommandLine(tmp_path, *arguments[2:], "--http=off", "--state=memory")
                assert re.match("The coordinator is up", server.line())
            elif arguments[0] == "export":
                env |= dict(argument.split("=", 1) for argument in arguments[1:])
            else:
                ran = subprocess.run(arguments, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
                assert ran.returncode == 0, (line, ran.stderr)
    finally:
        if server is not None:
            server.close()
