"""A real PostgreSQL server for the tests, from Debian's binaries, on a free loopback port and in a temporary directory.

PostgreSQL refuses to run as root, so root runs it as the user that Debian's package creates.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from s3 import END
from servers import DEADLINE_S, free_port, until

BINARIES = Path("/usr/lib/postgresql")
USER = "strata"
REPLICA = "replica"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_connections": "100",
    "autovacuum": "off",
    "dynamic_shared_memory_type": "mmap",  # in its own directory, so that a killed server leaves nothing in /dev/shm
    "log_min_messages": "warning",
}


class PostgresServer:
    def __init__(self, binaries: Path) -> None:
        self.binaries = binaries
        self._directory = Path(tempfile.mkdtemp(prefix="strata-postgres-"))
        self._data = self._directory / "data"
        self._numbers = itertools.count(1)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def start(self) -> None:
        if os.getuid() == 0:
            shutil.chown(self._directory, "postgres", "postgres")
        self._fill()
        settings = {**SETTINGS, "port": str(self.port)}
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{key} = '{value}'\n" for key, value in settings.items())
        # The server ends with the tests, however they end: its keeper reads a line, or sees its input close.
        script = f"read -r end; '{self.binaries}/pg_ctl' -D data -m immediate stop; rm -rf '{self._directory}'"
        self._keeper = subprocess.Popen(
            [*_unprivileged(), "/bin/sh", "-c", script],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._control("start")

    def _fill(self) -> None:
        self._run("initdb", "-D", str(self._data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N")

    def restart(self, mode: str = "fast") -> None:
        """Restart the server; `immediate` is a crash, after which it recovers from its log."""
        self._control("restart", "-m", mode)

    def stop(self, mode: str = "fast") -> None:
        self._control("stop", "-m", mode)

    def go_on(self) -> None:
        self._control("start")

    def kill(self) -> None:
        """Kill the server with SIGKILL; its other processes exit by themselves."""
        pid, *_ = (self._data / "postmaster.pid").read_text().split()
        os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        if self._keeper is not None:
            with self._keeper as keeper:
                keeper.communicate(END, timeout=DEADLINE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def new_state(self) -> str:
        """Create an empty database; return its URL."""
        name = f"state_{next(self._numbers)}"
        self.sql(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{name}"

    def sql(self, statement: str, state: str = "") -> list[tuple[object, ...]]:
        database = state.rpartition("/")[2] or "postgres"
        where = f"host=127.0.0.1 port={self.port} user={USER} dbname={database}"
        with psycopg.connect(where, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def cut(self, state: str) -> int:
        """Terminate every connection to this state's database; return how many there were."""
        database = state.rpartition("/")[2]
        return len(self.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"))

    def _control(self, *order: str) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-l", str(self._directory / "log"), "-w", "-t", "20", *order)

    def _run(self, program: str, *arguments: str) -> None:
        # Into a file: the server inherits the descriptor, and would keep a pipe open forever.
        with (self._directory / "output").open("ab") as output:
            done = subprocess.run(
                [*_unprivileged(), str(self.binaries / program), *arguments],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE_S,
                check=False,
            )
        assert done.returncode == 0, f"{program} {arguments} ended with {done.returncode}: {self._logs()}"

    def _logs(self) -> str:
        files = (self._directory / "output", self._directory / "log")
        return "\n".join(file.read_text() for file in files if file.exists())


class PostgresReplica(PostgresServer):
    """A synchronous replica: it has every transaction before the primary acknowledges it."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(primary.binaries)
        self._primary = primary

    def start(self) -> None:
        super().start()
        # Not in the copied configuration file: as the primary, this server must not wait for a replica.
        self._primary.sql(f"ALTER SYSTEM SET synchronous_standby_names = '{REPLICA}'")
        self._primary.sql("SELECT pg_reload_conf()")
        look = f"SELECT sync_state FROM pg_stat_replication WHERE application_name = '{REPLICA}'"
        until(lambda: self._primary.sql(look) == [("sync",)], "the replica is synchronous")

    def promote(self) -> None:
        self._control("promote")

    def _fill(self) -> None:
        where = f"host=127.0.0.1 port={self._primary.port} user={USER} application_name={REPLICA}"
        self._run("pg_basebackup", "-D", str(self._data), "-d", where, "-R", "-c", "fast", "--no-sync")


def _unprivileged() -> list[str]:
    """Return the prefix of a command that must not run as root.

    Python's `user=` would use fork() instead of vfork(), and while gRPC's threads are active, its fork handlers
    occasionally crash the child before it executes the command.
    """
    if os.getuid() != 0:
        return []
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]


def _binaries(requires_service: Callable[..., Path]) -> Path:
    found = sorted(BINARIES.glob("*/bin/initdb"))
    return requires_service(found[-1] if found else BINARIES / "*/bin/initdb").parent


@pytest.fixture(scope="session")
def postgres(requires_service: Callable[..., Path]) -> Iterator[PostgresServer]:
    server = PostgresServer(_binaries(requires_service))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def replicated_postgres(requires_service: Callable[..., Path]) -> Iterator[tuple[PostgresServer, PostgresReplica]]:
    """Start a primary and the replica that can take its place."""
    primary = PostgresServer(_binaries(requires_service))
    replica = PostgresReplica(primary)
    try:
        primary.start()
        replica.start()
        yield primary, replica
    finally:
        replica.close()
        primary.close()
