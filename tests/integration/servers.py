"""Coordinators and workers in separate processes, for tests that kill, freeze and restart them.

Every wait is for some output, with a deadline; nothing sleeps. `CommandLine` is `strata coordinator` as a user starts
it; `CoordinatorProcess` is the same server forked from the nursery, in a twentieth of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import pytest

from strata.coordinator.client import ClientConfig
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.transport import frames

HERE = Path(__file__).resolve().parent
STRATA = Path(sys.executable).with_name("strata")
DEADLINE_S = 30.0
"""Deadline for anything that takes milliseconds unless it is broken."""
STACKS_WITHIN_S = 2.0

CALM = {"lease_s": 20.0, "heartbeat_s": 0.2, "suspicion_s": 5.0, "tick_s": 0.02}
"""No worker dies on a busy machine."""
STRICT = {"lease_s": 1.5, "heartbeat_s": 0.2, "suspicion_s": 0.2, "tick_s": 0.02}
"""A silent worker dies soon."""
EAGER_CLIENT = ClientConfig(backoff_s=0.01, max_backoff_s=0.1, call_timeout_s=DEADLINE_S, silence_s=1.0)


PORTS = (10_000, 32_000)
"""Below the ports that the system assigns for `:0`, so that a restarted server finds its port free again."""
_ports = itertools.cycle(random.Random().sample(range(*PORTS), PORTS[1] - PORTS[0]))


def free_port() -> int:
    """Return a port that this process has not used before and that is not bound."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port is taken")


def until(condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Poll a condition; for what cannot be waited for otherwise."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


class Child:
    """The test's end of a process that the nursery forked."""

    def __init__(self, nursery: Nursery, pid: int, lifeline: socket.socket, log: Path) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self._nursery = nursery
        self._lifeline = lifeline
        self._log = log
        self._received = b""

    def send(self, **order: Any) -> None:
        self._lifeline.sendall(json.dumps(order).encode() + b"\n")

    def receive(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the next line of its output."""
        line = self._line(deadline_s)
        assert line, f"process {self.pid} is gone:\n{self._log.read_text()}"
        return json.loads(line)

    def ask(self, **order: Any) -> dict[str, Any]:
        self.send(**order)
        return self.receive()

    def signal(self, number: signal.Signals) -> None:
        assert self.exit_code is None, "it has been reaped; its process id may have been reused"
        os.kill(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def wait_gone(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the exit code, or the negated signal that ended it."""
        if self.exit_code is None:
            while self._line(deadline_s):
                pass
            self._lifeline.close()
            self.exit_code = self._nursery.reap(self.pid)
        return self.exit_code

    def kill(self) -> None:
        """Send SIGKILL, unless it has exited already."""
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
            self.wait_gone()

    def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait_gone()

    def _line(self, deadline_s: float) -> bytes:
        """Return the next line, or nothing once the process is gone."""
        end_s = time.monotonic() + deadline_s
        while b"\n" not in self._received:
            self._lifeline.settimeout(max(end_s - time.monotonic(), 0.001))
            try:
                piece = self._lifeline.recv(65536)
            except TimeoutError:
                raise AssertionError(
                    f"process {self.pid} printed nothing within {deadline_s} s:\n{self._log_with_stacks()}"
                ) from None
            except ConnectionResetError:
                piece = b""
            if not piece:
                return b""
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _log_with_stacks(self) -> str:
        """Return the log, with the stacks of all threads; without them if the process is frozen."""
        if self.exit_code is None:
            self.signal(signal.SIGUSR1)
            with contextlib.suppress(AssertionError):
                until(lambda: "most recent call first" in self._log.read_text(), "stacks", deadline_s=STACKS_WITHIN_S)
        return self._log.read_text()


class Nursery:
    """Forks children that have everything imported; see `nursery.py`. May be used by several threads."""

    def __init__(self, directory: Path, *preloaded: str, **variables: str) -> None:
        """`preloaded`: modules that the children have imported; `variables`: for their environment."""
        self._directory = directory
        self._lock = threading.Lock()
        self._num_children = 0
        self._children: list[Child] = []
        paths = os.pathsep.join((str(HERE), str(HERE.parent / "fault")))
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py"), paths, *preloaded],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == {"ready": True}

    def fork(self, run: str, **arguments: Any) -> Child:
        """Start `module:function` with these arguments in a new process."""
        with self._lock:
            self._num_children += 1
            path = self._directory / f"{self._num_children}.sock"
            log = self._directory / f"{self._num_children}.log"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(1)
                listener.settimeout(DEADLINE_S)
                order = {"run": run, "arguments": arguments, "lifeline": str(path), "log": str(log)}
                pid = self._ask(order)["pid"]
                lifeline, _ = listener.accept()
            path.unlink()
            child = Child(self, pid, lifeline, log)
            self._children.append(child)
            return child

    def reap(self, pid: int) -> int:
        with self._lock:
            return int(self._ask({"reap": pid})["exit_code"])

    def bury(self) -> None:
        """End every child that is still running."""
        for child in self._children:
            child.kill()
        self._children.clear()

    def close(self) -> None:
        self.bury()
        with self._process as process:
            process.communicate(json.dumps({"end": True}) + "\n", timeout=DEADLINE_S)
            assert process.returncode == 0

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class TorchRanks:
    """Runs functions of a test's module on several ranks, in processes forked from one that has imported torch."""

    def __init__(self, nursery: Nursery, module: str) -> None:
        self._nursery = nursery
        self._module = module

    def run(self, function: Callable[..., Any], num_ranks: int, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Return the output of each rank once all have succeeded; `function` also takes a lifeline, a rank and the
        world size.
        """
        run = f"{self._module}:{function.__name__}"
        try:
            children = [
                self._nursery.fork(run, rank=rank, num_ranks=num_ranks, **arguments) for rank in range(num_ranks)
            ]
            answers = [child.receive(deadline_s) for child in children]
            assert [child.wait_gone(deadline_s) for child in children] == [0] * num_ranks
        finally:
            self._nursery.bury()
        return [answer["said"] for answer in answers]


class Forks(Protocol):
    """A nursery, or a place in a network."""

    def fork(self, run: str, **arguments: Any) -> Child: ...


class CoordinatorProcess:
    """A coordinator that keeps its address and its state across restarts."""

    def __init__(self, nursery: Forks, directory: Path, *, run: str = "children:coordinator", **settings: Any) -> None:
        self.state = directory / "coordinator.db"
        self.settings = {"listen": f"127.0.0.1:{free_port()}", "http": "off", "state": str(self.state), **settings}
        self.address: str = self.settings["listen"]
        self._nursery = nursery
        self._run = run
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        assert self._child is not None, "it was not started"
        return self._child

    def start(self, **arguments: Any) -> Child:
        self._child = self._nursery.fork(self._run, settings=self.settings, **arguments)
        assert self.child.receive()["grpc"] == self.address
        return self.child

    def kill(self) -> None:
        self.child.kill()

    def restart(self) -> None:
        """Kill it with SIGKILL and start it again."""
        self.kill()
        self.start()


class Cable:
    """A network path to a coordinator that can be cut: clients connect to `address`."""

    def __init__(self, target: str, *, port: int = 0) -> None:
        self._target = target
        self._port = port
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._joins: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    def __enter__(self) -> Self:
        self.address = shared_loop().run(self._lay())
        return self

    def __exit__(self, *_: object) -> None:
        shared_loop().run(self._remove())

    def cut(self) -> None:
        """Reset every connection; new ones succeed."""
        shared_loop().run(self._cut())

    async def _lay(self) -> str:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self._port)
        return "{}:{}".format(*self._server.sockets[0].getsockname())

    async def _remove(self) -> None:
        assert self._server is not None
        await frames.close_server(self._server)
        await self._cut()

    async def _cut(self) -> None:
        for end in list(self._ends):
            end.transport.abort()
        await asyncio.gather(*self._joins, *self._pumps)

    async def _join(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        join = asyncio.current_task()
        assert join is not None
        self._joins.add(join)
        join.add_done_callback(self._joins.discard)
        self._ends.add(near_out)
        host, _, port = self._target.rpartition(":")
        try:
            far_in, far_out = await asyncio.open_connection(host, int(port))
        except OSError:  # nothing listens there
            near_out.transport.abort()
            self._ends.discard(near_out)
            return
        if near_out.is_closing():  # it was cut in the meantime
            far_out.transport.abort()
        self._ends.add(far_out)
        for source, target in ((near_in, far_out), (far_in, near_out)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(65536):
                target.write(piece)
                await target.drain()
        target.transport.abort()
        self._ends.discard(target)


class CommandLine:
    """`strata coordinator`, or another server command, as a user or a script starts it."""

    def __init__(self, directory: Path, *flags: str, command: str = "coordinator") -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [str(STRATA), command, *flags],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # so that `select` sees all output
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, deadline_s: float = DEADLINE_S) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        assert readable, f"nothing was printed within {deadline_s} s"
        return self._process.stdout.readline().decode()

    def addresses(self) -> dict[str, str]:
        """Return the addresses printed with --json."""
        line = self.line()
        assert line, self.ended()
        return json.loads(line)

    def terminate(self) -> None:
        self._process.terminate()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
        """Return the exit code and the contents of stderr."""
        _, errors = self._process.communicate(timeout=deadline_s)
        return self._process.returncode, errors.decode()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def command_line(directory: Path, *flags: str, command: str = "coordinator") -> Iterator[CommandLine]:
    process = CommandLine(directory, *flags, command=command)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def torch_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchRanks]:
    """Ranks that have imported the test's module and the lazy imports of torch's optimizers."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    nursery = Nursery(tmp_path_factory.mktemp("ranks"), request.module.__name__, "torch._dynamo", **variables)
    yield TorchRanks(nursery, request.module.__name__)
    nursery.close()


@pytest.fixture
def nursery(_nursery: Nursery) -> Iterator[Nursery]:
    """Its children end with the test."""
    yield _nursery
    _nursery.bury()


@pytest.fixture
def coordinator(nursery: Nursery, tmp_path: Path) -> CoordinatorProcess:
    """A running coordinator in a separate process, with leases that hold on a busy machine."""
    process = CoordinatorProcess(nursery, tmp_path, lease=CALM)
    process.start()
    return process


@pytest.fixture
def strict_coordinator(nursery: Nursery, tmp_path: Path) -> CoordinatorProcess:
    """The same, with leases that expire soon."""
    process = CoordinatorProcess(nursery, tmp_path, lease=STRICT)
    process.start()
    return process


@pytest.fixture
def embedded() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator() as coordinator:
        yield coordinator
