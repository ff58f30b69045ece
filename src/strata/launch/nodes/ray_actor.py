"""The Ray actor that runs one worker, and the messages between it and the agent.

The actor is a `LocalNode` behind a remote interface: it carries out the orders of `strata.launch.protocol` and returns
reports. Ray only transports the bytes of these messages. Ray may repeat a call when a connection breaks, so every call
is idempotent: a worker is not started twice, and reports are numbered.

This module does not import Ray. Only the actor does, in a process that Ray has started.
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
from typing import TYPE_CHECKING, Any

import msgspec

from strata._version import __version__
from strata.errors import ConfigError, StrataError
from strata.launch.nodes.base import NodeLost
from strata.launch.nodes.local import LocalNode
from strata.launch.protocol import (
    NOT_STARTED,
    DumpStacks,
    KillWorkers,
    SignalWorker,
    StartWorkers,
    WorkerExit,
    WorkerOrder,
    decode,
    encode,
)
from strata.launch.record.directory import RunDirectory
from strata.launch.record.log import LogReader
from strata.launch.spec import RunSpec  # noqa: TC001 - msgspec reads the types of messages
from strata.scratch import Scratch
from strata.transport.credentials import CA_VARIABLE, TOKEN_FILE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.launch.environment import WorkerSpec
    from strata.launch.processes.base import ProcessSpec

log = logging.getLogger(__name__)
NEWS_TIMEOUT_S = 20.0
"""How long a call waits for news before it returns without."""
LOG_INTERVAL_S = 1.0
"""Interval between two reads of logs that the agent's machine cannot read."""
MAX_NEWS_BYTES = 1 << 20
"""Log bytes in one report. Of a worker that writes more at once, only the end is sent."""
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDERS = msgspec.msgpack.Decoder(WorkerOrder)


class BeginActor(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to an actor."""

    spec: RunSpec
    path: str
    """The run's directory, if the actor is on the agent's machine."""
    is_away: bool
    """The actor is on another machine: logs stay there, and their contents are sent."""
    is_shipped: bool
    """Ray has copied the working directory to the actor's current directory."""
    address: str = ""
    """Address at which other nodes reach this one; empty: its address in the Ray cluster."""
    ca: bytes = b""
    """CA certificate of the coordinator, as PEM; empty: no TLS, or the node's environment names one."""
    token: str = ""
    """Token for the coordinator."""


class ActorReady(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `BeginActor`."""

    host: str
    """Ray's id of the machine."""
    address: str
    version: str
    devices: str = ""
    """GPUs that Ray has reserved, in CUDA's notation."""
    refusal: str = ""
    """Why the actor cannot be used."""


class LogPart(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has written since the last part."""

    attempt: int
    rank: int
    data: bytes


class News(msgspec.Struct, frozen=True, kw_only=True):
    """A report of the actor."""

    exit: WorkerExit | None = None
    logs: list[LogPart] = []


class NodeActor:
    """The actor. Its methods run in one event loop, in a thread that lives as long as the actor."""

    def __init__(self) -> None:
        self._beginning: asyncio.Task[ActorReady] | None = None
        self._node: _Node | None = None
        self._scratch: _Scratch | None = None
        self._directory: RunDirectory | None = None
        self._is_away = False
        self._attempts: dict[int, int] = {}
        """Last attempt of each rank that was started."""
        self._incarnations: dict[int, int] = {}
        """Last incarnation of each rank in that attempt: above 0 if it was restarted alone."""
        self._logs: dict[tuple[int, int], LogReader] = {}
        """By attempt and rank, of the workers that were started last: one that is restarted alone continues its log."""
        self._exits: asyncio.Queue[WorkerExit | NodeLost] = asyncio.Queue()
        self._collecting: asyncio.Task[None] | None = None
        self._reporting = asyncio.Lock()
        self._number = -1
        self._news = b""

    async def begin(self, message: bytes) -> bytes:
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._begin(decode(message, BeginActor)))
        return encode(await self._beginning)

    async def _begin(self, begin: BeginActor) -> ActorReady:
        ray: Any = import_module("ray")  # installed wherever this runs
        context = ray.get_runtime_context()
        address = begin.address or ray.util.get_node_ip_address()
        ready = ActorReady(
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
                self._scratch = _Scratch()
                variables |= self._scratch.credentials(begin)
            self._directory = RunDirectory(self._scratch.path if self._scratch is not None else Path(begin.path), spec)
            self._node = _Node(self._directory, name=ready.host, address=address, slots=1, variables=variables)
            await self._node.prepare()
        except (StrataError, OSError) as error:
            return msgspec.structs.replace(ready, refusal=str(error))
        self._collecting = asyncio.create_task(self._collect(self._node))
        return ready

    async def free_port(self) -> int:
        assert self._node is not None
        return await self._node.free_port()

    async def obey(self, message: bytes) -> None:
        """Carry out an order, unless it is for workers of another attempt."""
        node, order = self._node, _ORDERS.decode(message)
        if isinstance(order, StartWorkers):
            await self._launch(order)
            return
        if node is None:
            return
        match order:
            case KillWorkers(attempt, ranks):
                node.kill([rank for rank in ranks if self._attempts.get(rank) == attempt])
            case SignalWorker(attempt, rank, number) if self._attempts.get(rank) == attempt:
                node.send_signal(rank, signal.Signals(number))
            case DumpStacks(attempt, ranks):
                for rank in ranks:
                    if self._attempts.get(rank) == attempt:
                        await node.dump_stacks(rank)

    async def _launch(self, order: StartWorkers) -> None:
        """Start workers. One that cannot be started ends with the reason."""
        assert self._node is not None
        assert self._directory is not None
        attempt, incarnation = order.attempt, order.worker.identity.incarnation
        started = {rank: (self._attempts[rank], self._incarnations[rank]) for rank in self._attempts}
        new = [each for each in order.workers() if started.get(each.identity.rank, (-1, 0)) < (attempt, incarnation)]
        if not new:
            return
        ranks = [worker.identity.rank for worker in new]
        self._attempts |= dict.fromkeys(ranks, attempt)
        self._incarnations |= dict.fromkeys(ranks, incarnation)
        if self._is_away:
            self._logs = {
                (attempt, rank): self._logs.get((attempt, rank)) or LogReader(self._directory.log_path(attempt, rank))
                for rank in ranks
            }
        self._node.devices = order.variables
        try:
            await self._node.launch(new)
        except StrataError as error:
            for rank in ranks:
                self._exits.put_nowait(WorkerExit(rank, NOT_STARTED, error.message))

    async def news(self, number: int) -> bytes:
        """Wait a while for news. Asked for the same number again, return the same report again."""
        async with self._reporting:
            if number != self._number:
                self._news = encode(await self._next_news())
                self._number = number
            return self._news

    async def close(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
        if self._node is not None:
            await self._node.close()
        if self._scratch is not None:
            self._scratch.remove()

    async def _collect(self, node: _Node) -> None:
        try:
            while True:
                self._exits.put_nowait(await node.next_exit())
        except Exception as error:  # the next call for news raises it, and the agent takes this node for lost
            log.exception("cannot receive exits")
            self._exits.put_nowait(NodeLost(f"{type(error).__name__}: {error}"))

    async def _next_news(self) -> News:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + NEWS_TIMEOUT_S
        while (left_s := end_s - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOG_INTERVAL_S, left_s) if self._is_away else left_s):
                    event = await self._exits.get()
                    if isinstance(event, NodeLost):
                        self._exits.put_nowait(event)  # raise it again, in case the answer is lost on its way
                        raise event
                    return News(exit=replace(event, log_end=()), logs=self._read_logs())
            if logs := self._read_logs():
                return News(logs=logs)
        return News()

    def _read_logs(self) -> list[LogPart]:
        parts = []
        for (attempt, rank), reader in self._logs.items():
            if data := b"".join(reader.blocks()):
                parts.append(LogPart(attempt, rank, _newest(data)))
        return parts


class _Node(LocalNode):
    """A node whose workers see the GPUs of all workers on their machine, as scripts for torchrun expect."""

    devices: Mapping[str, str] = {}

    def _process_spec(self, worker: WorkerSpec) -> ProcessSpec:
        spec = super()._process_spec(worker)
        return replace(spec, variables={**spec.variables, **self.devices})


def _newest(data: bytes) -> bytes:
    """Return what is new in a log, or only its end if that is too large."""
    left_out = max(len(data) - MAX_NEWS_BYTES, 0)
    return (b"\n[%d bytes omitted]\n" % left_out if left_out else b"") + data[left_out:]


class _Scratch:
    """A directory on this machine for logs and secrets, for the life of the actor."""

    def __init__(self) -> None:
        self._scratch = Scratch("strata-ray-")
        self.path = self._scratch.path

    def credentials(self, begin: BeginActor) -> dict[str, str]:
        """Write credentials to files and return the variables that name them: environments are less private."""
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
    """Return the spec with the paths of a copy of its working directory.

    Raises:
        ConfigError: The script is outside of it.
    """
    if spec.is_module:
        return msgspec.structs.replace(spec, directory=str(copy))
    try:
        script = Path(spec.script).relative_to(spec.directory)
    except ValueError:
        raise ConfigError(
            f"{spec.script} is not in {spec.directory}, the directory that is copied to the nodes; call `strata run` "
            "in a directory that contains the script, or with --no-ship if all nodes share a file system",
            field="script",
        ) from None
    return msgspec.structs.replace(spec, directory=str(copy), script=str(copy / script))
