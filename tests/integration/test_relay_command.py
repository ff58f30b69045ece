"""`strata relay` and `strata coordinator` as processes: authentication, roles and startup order."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import DEADLINE_S, EAGER_CLIENT, STRATA, command_line, free_port

from strata.coordinator.client import ClientConfig, CoordinatorClient
from strata.errors import CoordinatorUnavailable, PermissionRefused, Unauthenticated
from strata.transport.credentials import ClientSecurity


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("STRATA_TOKEN", "STRATA_TLS"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def upstream_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certs(tmp_path_factory.mktemp("upstream") / "certs")


@pytest.fixture(scope="module")
def node_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the relay's certificates and tokens, from another CA than the coordinator's."""
    return make_certs(tmp_path_factory.mktemp("node") / "certs")


def make_certs(directory: Path) -> Path:
    made = subprocess.run([STRATA, "certs", directory], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    return directory


def secured(certs: Path) -> tuple[str, ...]:
    return (f"--tls-cert={certs}/server.crt", f"--tls-key={certs}/server.key", f"--tokens={certs}/tokens")


def as_role(certs: Path, role: str) -> ClientSecurity:
    return ClientSecurity(ca=f"{certs}/ca.crt", token_file=f"{certs}/{role}.token")


def by_name(address: str) -> str:
    return f"localhost:{address.rpartition(':')[2]}"


@pytest.fixture(scope="module")
def coordinator(upstream_certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--listen=0.0.0.0:0", "--http=off", "--state=memory", "--json", *secured(upstream_certs))
    with command_line(tmp_path_factory.mktemp("coordinator"), *flags) as process:
        yield by_name(process.addresses()["grpc"])


@contextmanager
def relay(tmp_path: Path, upstream: str, upstream_certs: Path, node_certs: Path, role: str) -> Iterator[str]:
    """Start a relay whose token for the coordinator has this role."""
    flags = ("--listen=0.0.0.0:0", f"--upstream={upstream}", f"--upstream-ca={upstream_certs}/ca.crt", "--json")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STRATA_TOKEN_FILE", f"{upstream_certs}/{role}.token")
        process = command_line(tmp_path, *flags, *secured(node_certs), command="relay")
        with process as serving:
            address = by_name(serving.addresses()["grpc"])
            environment.undo()
            yield address


def test_a_relay_uses_separate_certificates_and_tokens_on_each_side(
    tmp_path: Path, coordinator: str, upstream_certs: Path, node_certs: Path
) -> None:
    with relay(tmp_path, coordinator, upstream_certs, node_certs, "worker") as address:
        with CoordinatorClient(address, config=EAGER_CLIENT, security=as_role(node_certs, "worker")) as client:
            worker = client.register_worker("a", job_id="both")
            worker.barrier("sync", timeout_s=DEADLINE_S)
            worker.deregister()
        with CoordinatorClient(coordinator, security=as_role(upstream_certs, "reader")) as direct:
            assert "both" in [job.job_id for job in direct.list_jobs()]
        mixed = ClientSecurity(ca=f"{node_certs}/ca.crt", token_file=f"{upstream_certs}/admin.token")
        with pytest.raises(Unauthenticated), CoordinatorClient(address, security=mixed):
            pass
        believed = ClientSecurity(ca=f"{upstream_certs}/ca.crt", token_file=f"{node_certs}/worker.token")
        with (
            pytest.raises(CoordinatorUnavailable, match="is not trusted"),
            CoordinatorClient(address, security=believed),
        ):
            pass


@pytest.mark.parametrize(
    ("relays_role", "callers_role", "message"),
    [
        ("worker", "worker", "requires the role admin; this token has worker; use another token$"),
        ("admin", "worker", "requires the role admin; this token has worker; use another token$"),
        ("worker", "admin", "this concerns the relay's own token, which is checked in addition to yours"),
        ("admin", "admin", ""),
    ],
)
def test_a_command_through_a_relay_needs_the_role_admin_on_both_sides(
    tmp_path: Path,
    coordinator: str,
    upstream_certs: Path,
    node_certs: Path,
    relays_role: str,
    callers_role: str,
    message: str,
) -> None:
    job_id = f"{callers_role}-through-{relays_role}"
    with (
        relay(tmp_path, coordinator, upstream_certs, node_certs, relays_role) as address,
        CoordinatorClient(address, config=EAGER_CLIENT, security=as_role(node_certs, callers_role)) as client,
    ):
        worker = client.register_worker("a", job_id=job_id)
        if message:
            with pytest.raises(PermissionRefused, match=f"SendCommand .*{message}"):
                client.send_command("MESSAGE", job_id=job_id)
            with pytest.raises(PermissionRefused, match=f"DropJob .*{message}"):
                client.drop_job(job_id, force=True)
        else:
            assert client.send_command("MESSAGE", job_id=job_id) == 1
            assert client.drop_job(job_id, force=True)
        assert worker.lost is None or not message


# -- starting ------------------------------------------------------------------------------------------------------


def test_a_relay_without_a_coordinator_exits_with_code_3() -> None:
    absent = f"127.0.0.1:{free_port()}"
    gave_up = subprocess.run(
        [STRATA, "relay", f"--upstream={absent}", "--listen=127.0.0.1:0", "--timeout-s=0.5"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert (gave_up.returncode, gave_up.stdout) == (3, "")
    assert f"the coordinator at {absent} did not answer within 0.5 s" in gave_up.stderr


def test_a_relay_started_first_waits_for_the_coordinator(tmp_path: Path) -> None:
    upstream = f"127.0.0.1:{free_port()}"
    flags = (f"--upstream={upstream}", "--listen=127.0.0.1:0", f"--timeout-s={DEADLINE_S}", "--json")
    with (
        command_line(tmp_path, *flags, command="relay") as early,
        command_line(tmp_path, f"--listen={upstream}", "--http=off", "--state=memory", "--json") as late,
    ):
        assert late.addresses()["grpc"] == upstream
        address = json.loads(early.line())["grpc"]
        with CoordinatorClient(address, config=ClientConfig(call_timeout_s=DEADLINE_S)) as client:
            assert client.register_worker("a").world_size == 1
