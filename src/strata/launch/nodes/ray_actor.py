"""A place for a worker on a Ray cluster: the actor that holds it, and what the agent and the actor say to each other.

The actor is a `LocalNode` with a door: it starts a worker on its machine, and tells what becomes of it. All that goes
through the door is bytes of the messages below, which both sides read here; Ray only carries them. A call may be
repeated when a connection breaks, so that each of them may come twice: a worker that was started is not started again,
and news have numbers.

Ray itself is imported by nobody here but the actor, which runs in a process that Ray has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from strata._version import __version__
from strata.errors import ConfigError, StrataError
from strata.launch.environment import WorkerSpec  # noqa: TC001 - msgspec reads the types of messages
from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.local import LocalNode
from strata.launch.processes.base import NOT_STARTED, WorkerExit
from strata.launch.record.directory import RunDirectory
from strata.launch.record.log import LogReader
from strata.launch.spec import RunSpec  # noqa: TC001
from strata.scratch import Scratch
from strata.transport.credentials import CA_VARIABLE, TOKEN_FILE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.launch.processes.base import WorkerOrder

log = logging.getLogger(__name__)
NEWS_S = 20.0
"""How long a call waits for news before it says that there are none."""
LOOK_S = 1.0
"""How often logs are looked at that somebody far away reads."""
MAX_NEWS_BYTES = 1 << 20
"""Of logs, in one answer. A worker that writes more than that in a moment is told of in part, its end always."""
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"

T = TypeVar("T")


# -- what is said ------------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The first word to an actor."""

    spec: RunSpec
    path: str
    """The run's directory, if the actor is on the agent's machine."""
    is_away: bool
    """It is on another machine: logs stay there, and their contents are sent."""
    is_shipped: bool
    """Ray has put a copy of the working directory where the actor runs."""
    address: str = ""
    """Where other nodes reach this one; empty: at its address in the Ray cluster."""
    ca: bytes = b""
    """Whom to believe that it is the coordinator, a PEM; empty: there is no TLS, or the node's environment says it."""
    token: str = ""
    """What to show to it."""


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer."""

    host: str
    """Ray's name of the node."""
    address: str
    version: str
    devices: str = ""
    """The GPUs that Ray has reserved, as CUDA names them."""
    refusal: str = ""
    """Why it cannot be used."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    workers: list[WorkerSpec]
    variables: dict[str, str] = {}


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of other attempts have nothing to do with it."""

    attempt: int
    ranks: list[int]


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int
    rank: int
    number: int


class Exit(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    code: int
    last_words: str
    step: int | None = None


class LogPart(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has written since the last one."""

    attempt: int
    rank: int
    data: bytes


class News(msgspec.Struct, frozen=True, kw_only=True):
    exit: Exit | None = None
    logs: list[LogPart] = []


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


# -- the actor ---------------------------------------------------------------------------------------------------------


class NodeActor:
    """Its methods run in one event loop, in a thread that lives as long as the actor."""

    def __init__(self) -> None:
        self._begun: asyncio.Task[Here] | None = None
        self._node: _Node | None = None
        self._own: _Own | None = None
        self._directory: RunDirectory | None = None
        self._is_away = False
        self._attempts: dict[int, int] = {}
        """By rank: the last that was started."""
        self._logs: dict[tuple[int, int], LogReader] = {}
        self._told: asyncio.Queue[WorkerExit | NodeLost] = asyncio.Queue()
        self._hearing: asyncio.Task[None] | None = None
        self._telling = asyncio.Lock()
        self._number = -1
        self._news = b""

    async def begin(self, message: bytes) -> bytes:
        if self._begun is None:
            self._begun = asyncio.create_task(self._begin(decode(message, Begin)))
        return encode(await self._begun)

    async def _begin(self, begin: Begin) -> Here:
        ray: Any = import_module("ray")  # it is there where this runs
        context = ray.get_runtime_context()
        address = begin.address or ray.util.get_node_ip_address()
        here = Here(
            host=context.get_node_id(),
            address=address,
            version=__version__,
            devices=os.environ.get(DEVICES_VARIABLE, ""),
        )
        try:
            spec = at_home(begin.spec, Path.cwd()) if begin.is_shipped else begin.spec
            self._is_away = begin.is_away
            variables = dict(os.environ)
            if begin.is_away:
                self._own = _Own()
                variables |= self._own.credentials(begin)
            self._directory = RunDirectory(self._own.path if self._own is not None else Path(begin.path), spec)
            self._node = _Node(self._directory, name=here.host, address=address, slots=1, variables=variables)
            await self._node.prepare()
        except (StrataError, OSError) as error:
            return msgspec.structs.replace(here, refusal=str(error))
        self._hearing = asyncio.create_task(self._hear(self._node))
        return here

    async def free_port(self) -> int:
        assert self._node is not None
        return await self._node.free_port()

    async def launch(self, message: bytes) -> None:
        """A worker that cannot be started ends, too, and says why."""
        assert self._node is not None
        assert self._directory is not None
        launch = decode(message, Launch)
        new = [
            worker for worker in launch.workers if self._attempts.get(worker.identity.rank) != worker.identity.attempt
        ]
        self._attempts |= {worker.identity.rank: worker.identity.attempt for worker in new}
        if self._is_away:
            self._logs |= {
                (worker.identity.attempt, worker.identity.rank): LogReader(
                    self._directory.log_path(worker.identity.attempt, worker.identity.rank)
                )
                for worker in new
            }
        self._node.devices = launch.variables
        try:
            await self._node.launch(new)
        except StrataError as error:
            for worker in new:
                self._told.put_nowait(WorkerExit(worker.identity.rank, NOT_STARTED, error.message))

    async def kill(self, message: bytes) -> None:
        kill = decode(message, Kill)
        if self._node is not None:
            self._node.kill([rank for rank in kill.ranks if self._attempts.get(rank) == kill.attempt])

    async def send_signal(self, message: bytes) -> None:
        order = decode(message, Signal)
        if self._node is not None and self._attempts.get(order.rank) == order.attempt:
            self._node.send_signal(order.rank, signal.Signals(order.number))

    async def dump_stacks(self, rank: int) -> None:
        if self._node is not None:
            await self._node.dump_stacks(rank)

    async def news(self, number: int) -> bytes:
        """Waits a while for some. Asked for the same again, it says the same again."""
        async with self._telling:
            if number != self._number:
                self._news = encode(await self._next_news())
                self._number = number
            return self._news

    async def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        if self._node is not None:
            await self._node.close()
        if self._own is not None:
            self._own.remove()

    # -- within ----------------------------------------------------------------------------------------------------

    async def _hear(self, node: _Node) -> None:
        try:
            while True:
                self._told.put_nowait(await node.next_exit())
        except Exception as error:  # who asks for news hears of it, and takes this node for lost
            log.exception("exits cannot be heard")
            self._told.put_nowait(NodeLost(f"{type(error).__name__}: {error}"))

    async def _next_news(self) -> News:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + NEWS_S
        while (left_s := end_s - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s) if self._is_away else left_s):
                    gone = await self._told.get()
                    if isinstance(gone, NodeLost):
                        self._told.put_nowait(gone)  # to be heard again, if the answer is lost on its way
                        raise gone
                    end = Exit(gone.rank, gone.code, gone.last_words, gone.step)
                    return News(exit=end, logs=self._read_logs(gone.rank))
            if logs := self._read_logs():
                return News(logs=logs)
        return News()

    def _read_logs(self, ended: int | None = None) -> list[LogPart]:
        parts = []
        for (attempt, rank), reader in list(self._logs.items()):
            if data := b"".join(reader.blocks()):
                parts.append(LogPart(attempt, rank, _newest(data)))
            if rank == ended:
                del self._logs[attempt, rank]
        return parts


class _Node(LocalNode):
    """Workers see the GPUs of all workers on their machine, as scripts for torchrun expect."""

    devices: Mapping[str, str] = {}

    def _order(self, worker: WorkerSpec) -> WorkerOrder:
        order = super()._order(worker)
        return replace(order, variables={**order.variables, **self.devices})


def _newest(data: bytes) -> bytes:
    """What is new in a log; of that the end if it is too much."""
    left_out = max(len(data) - MAX_NEWS_BYTES, 0)
    return (b"\n[%d bytes are left out here]\n" % left_out if left_out else b"") + data[left_out:]


class _Own:
    """A directory on this machine for logs and secrets, while the actor lives."""

    def __init__(self) -> None:
        self._scratch = Scratch("strata-ray-")
        self.path = self._scratch.path

    def credentials(self, begin: Begin) -> dict[str, str]:
        """Variables that name files with them. Environments can be read by more people than files."""
        found = {}
        for variable, name, content in (
            (CA_VARIABLE, "ca.crt", begin.ca),
            (TOKEN_FILE_VARIABLE, "token", begin.token.encode()),
        ):
            if content:
                fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
                found[variable] = str(self.path / name)
        return found

    def remove(self) -> None:
        self._scratch.remove()


def at_home(spec: RunSpec, copy: Path) -> RunSpec:
    """The spec with the paths of a copy of its working directory.

    Raises:
        ConfigError: The script is outside of it.
    """
    if spec.is_module:
        return msgspec.structs.replace(spec, directory=str(copy))
    try:
        script = Path(spec.script).relative_to(spec.directory)
    except ValueError:
        raise ConfigError(
            f"{spec.script} is not in {spec.directory}, which is what the nodes get; call `strata run` in a directory "
            "that holds the script, or with --no-ship where all nodes have the same file system",
            field="script",
        ) from None
    return msgspec.structs.replace(spec, directory=str(copy), script=str(copy / script))
