"""Server processes for benchmarks: pinned to one core, called from another, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from strata.errors import StrataError
from strata.transport.certificates import write_set
from strata.transport.credentials import ClientSecurity
from strata.transport.tokens import write_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import psutil

SERVER_CORE = 0
CLIENT_CORE = 1
START_S = 30.0
STOP_S = 10.0
HOST = "127.0.0.1"


def pin(core: int) -> None:
    """Pin this process to one core, if there is more than one."""
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {core})


def pin_off_server() -> None:
    """Keep this process off the server's core, if there is another."""
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {SERVER_CORE} or {SERVER_CORE})


@contextlib.contextmanager
def running(
    command: Sequence[str], *, on_server_core: bool | None = True, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """Run a process for the duration of the block: on the server's core, on the others, or on all (None)."""

    def choose_cores() -> None:
        if on_server_core:
            pin(SERVER_CORE)
        elif on_server_core is not None:
            pin_off_server()

    process = subprocess.Popen(
        command,
        stdout=stdout,
        text=True,
        preexec_fn=choose_cores,  # noqa: PLW1509 (this process has no threads yet)
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def announced(
    arguments: Sequence[str], *, on_server_core: bool | None = True
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """Run a Python server that prints a JSON object with its addresses when it is ready; yield it and the process."""
    with running([sys.executable, *arguments], on_server_core=on_server_core) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise StrataError(f"the server {' '.join(arguments)} exited with code {process.wait()} during startup")
        yield json.loads(line), process


@contextlib.contextmanager
def serving(arguments: Sequence[str], *, on_server_core: bool = True) -> Iterator[tuple[str, int]]:
    """Run a Python server that prints `{"grpc": ADDRESS}` when it is ready; yield its address and pid."""
    with announced(arguments, on_server_core=on_server_core) as (addresses, process):
        yield addresses["grpc"], process.pid


@contextlib.contextmanager
def coordinator(directory: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """Run a coordinator with its journal in a directory; yield its address and pid."""
    with serving([*_coordinator(directory), "--http", "off", *flags]) as served:
        yield served


@contextlib.contextmanager
def coordinator_with_page(directory: Path, *, on_server_core: bool | None = True) -> Iterator[tuple[str, str, int]]:
    """Run a coordinator with its dashboard; yield its address, its URL and its pid."""
    arguments = [*_coordinator(directory), "--http", f"{HOST}:0"]
    with announced(arguments, on_server_core=on_server_core) as (addresses, process):
        yield addresses["grpc"], addresses["http"], process.pid


def journal_in(directory: Path) -> Path:
    return directory / "state.db"


def _coordinator(directory: Path) -> list[str]:
    state = str(journal_in(directory))
    return ["-m", "strata.cli", "coordinator", "--listen", f"{HOST}:0", "--json", "--state", state]


def secured(directory: Path) -> tuple[list[str], ClientSecurity]:
    """Write certificates and tokens to a directory; return flags for a coordinator and credentials for its clients."""
    write_set(directory, hosts=(), now=datetime.now(UTC), days=1)
    write_tokens(directory)
    flags = ["--tls-cert", f"{directory}/server.crt", "--tls-key", f"{directory}/server.key"]
    flags += ["--tokens", f"{directory}/tokens"]
    return flags, ClientSecurity(ca=f"{directory}/ca.crt", token_file=f"{directory}/worker.token")


@contextlib.contextmanager
def relays(upstream: str, count: int) -> Iterator[tuple[list[str], list[int]]]:
    """Run `count` relays in one process per core other than the server's; yield their addresses and the pids."""
    num_processes = min(max(len(os.sched_getaffinity(0)) - 1, 1), count)
    shares = [len(range(number, count, num_processes)) for number in range(num_processes)]
    with contextlib.ExitStack() as stack:
        # Not next to the journal: the path of a socket must be short.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-bench-"))
        addresses: list[str] = []
        pids: list[int] = []
        for number, share in enumerate(shares):
            arguments = ["-m", "strata.bench.relay_host", upstream, f"{directory}/{number}", str(share)]
            served, pid = stack.enter_context(serving(arguments, on_server_core=False))
            addresses += served.split(",")
            pids.append(pid)
        yield addresses, pids


def free_port() -> int:
    """Return a port that is free now; a server fails to start if another process takes it meanwhile."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until_it_listens(process: subprocess.Popen[str], port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise StrataError(f"{process.args!r} exited with code {process.returncode} before it listened")
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
            return
        time.sleep(0.02)
    raise StrataError(f"{process.args!r} did not listen on port {port} within {START_S:g} s")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
