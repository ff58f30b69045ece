"""This machine as a node: worker specs become processes with this machine's environment, script and logs.

The agent that leads uses it for its own machine, an agent on another machine or an actor on a cluster for theirs.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from strata.identity import process_name
from strata.launch.environment import ALONE, LAST_STEP, STOPPED, take_alone, take_last_step, worker_environment
from strata.launch.processes import stacks
from strata.launch.processes.base import ProcessSpec
from strata.launch.processes.imports import preloads
from strata.launch.processes.local import LocalWorkers
from strata.launch.record.log import NUM_LAST_LINES, cause, last_lines
from strata.launch.spec import ANY_NUMBER
from strata.printing import log_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from strata.identity import Identity
    from strata.launch.environment import WorkerSpec
    from strata.launch.processes.base import Workers
    from strata.launch.protocol import WorkerExit
    from strata.launch.record.directory import RunDirectory

MAX_LINE_CHARS = 200
"""Characters of a log line that are sent to other machines."""
WITHOUT_CAUSE = (0, STOPPED, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of workers whose logs do not show the cause."""


class LocalNode:
    """A `Node` on this machine, for the run of a directory."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        name: str = "",
        address: str = "127.0.0.1",
        slots: int = ANY_NUMBER,
        workers: Workers | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        spec = directory.spec
        self.name = name or socket.gethostname()
        self.host = self.address = address
        self.slots = slots
        self._directory = directory
        self._variables = {**(os.environ if variables is None else variables), **spec.variables}
        self._workers = workers or LocalWorkers(
            preload=[*preloads(spec.script, is_module=spec.is_module, directory=spec.directory), *spec.preload],
            is_warm=spec.is_warm,
            variables=self._variables,
        )
        self._attempts: dict[int, int] = {}
        """Attempt of each rank, which names its log."""

    async def prepare(self) -> None:
        """Begin to import what the script needs, without waiting for it."""
        await self._workers.prepare()

    async def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0) if self.address != "127.0.0.1" else (self.address, 0))
            return int(probe.getsockname()[1])

    async def launch(self, workers: Sequence[WorkerSpec]) -> None:
        self._attempts |= {worker.identity.rank: worker.identity.attempt for worker in workers}
        await self._workers.start([self._process_spec(worker) for worker in workers])

    async def next_exit(self) -> WorkerExit:
        event = await self._workers.next_exit()
        log = self._directory.log_path(self._attempts[event.rank], event.rank)
        step = take_last_step(_step_file(log))
        is_alone = take_alone(_alone_file(log))
        if event.code in WITHOUT_CAUSE:
            return replace(event, log_end=(), step=step, is_alone=is_alone)
        lines = [*last_lines(log), *map(log_line, event.log_end)]
        log_end = tuple(line[:MAX_LINE_CHARS] for line in lines[-NUM_LAST_LINES:])
        return replace(event, last_words=cause(lines), log_end=log_end, step=step, is_alone=is_alone)

    def kill(self, ranks: Iterable[int]) -> None:
        self._workers.kill(ranks)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self._workers.send_signal(rank, number)

    async def dump_stacks(self, rank: int) -> None:
        pid = self._workers.pid_of(rank)
        if pid is not None:
            await stacks.dump(pid, self._directory.log_path(self._attempts[rank], rank))

    async def close(self) -> None:
        await self._workers.close()

    def _process_spec(self, worker: WorkerSpec) -> ProcessSpec:
        spec, identity = self._directory.spec, worker.identity
        num_servers = worker.num_servers or spec.num_servers
        log = self._directory.log_path(identity.attempt, identity.rank)
        return ProcessSpec(
            rank=identity.rank,
            script=spec.script,
            arguments=spec.arguments,
            is_module=spec.is_module,
            directory=spec.directory,
            variables={
                **_share_cores(identity.local_world_size + num_servers),
                **(_interface_of(self.address) if identity.num_nodes > 1 else {}),
                **self._variables,
                **worker_environment(worker),
                LAST_STEP: str(_step_file(log)),
                ALONE: str(_alone_file(log)),
            },
            log=log,
            log_bytes=spec.log_bytes,
            title=f"strata: {identity.run} {_title(identity, num_servers)}: {printable(spec.command)}",
        )


def _title(identity: Identity, num_servers: int) -> str:
    """Return `rank 0 of 2`, without the servers; or `server 0`."""
    name = process_name(identity.rank, world_size=identity.world_size, num_servers=num_servers)
    return name if name.startswith("server") else f"{name} of {identity.world_size - num_servers}"


def _step_file(log: Path) -> Path:
    return log.with_suffix(".step").absolute()


def _alone_file(log: Path) -> Path:
    return log.with_suffix(".alone").absolute()


def _interface_of(address: str) -> dict[str, str]:
    """Name the network interface for gloo, which otherwise takes the one that the hostname resolves to: often the
    loopback, where other machines cannot reach it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _share_cores(num_processes: int) -> dict[str, str]:
    """Limit each of several processes to one OpenMP thread, as torchrun does, so that they do not compete for cores."""
    return {"OMP_NUM_THREADS": "1"} if num_processes > 1 else {}
