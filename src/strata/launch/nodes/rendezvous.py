"""Agents of several machines find each other and exchange messages, as members of a job at the coordinator.

The job is called `NAME.nodes`, after the run. The member that joined first leads. Messages are commands of the
coordinator: durable once sent, in order, and carried by the connection that each agent has anyway. A member that dies
loses its lease, as any worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import tenacity

from strata.errors import ConfigError, CoordinatorError, PermissionRefused, StrataError, UnknownWorker
from strata.launch.protocol import AnyMessage
from strata.transport.addresses import Address, parse_addresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from strata.coordinator.client import AsyncCoordinatorClient, AsyncWorker

log = logging.getLogger(__name__)
POLL_S = 1.0
"""Longest interval between two looks at the members, without a notice."""
RETRY_S = 1.0
"""Pause before a message is sent again."""
LEAVE_S = 10.0
"""Time for the others to leave after they have learned that the run is over."""
DISMISS_S = 60.0
DISMISS_LEASES = 3
"""Seconds, and leases, for which to try to reach the others at the end of a run: the coordinator may be down for a
while, and an agent that does not learn of the end continues the run.
"""
_FROM, _TEXT = "from", "text"
_DECODER = msgspec.json.Decoder(AnyMessage)


@dataclass(frozen=True, slots=True)
class Member:
    id: str
    """NAME@ADDRESS, new each time that a node joins."""
    slots: int

    @property
    def name(self) -> str:
        return self.id.partition("@")[0]

    @property
    def address(self) -> str:
        return self.id.partition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can reach it."""
        return Address(self.address, 0).is_local


class Received(NamedTuple):
    """A message or, without one, a change of the members."""

    sender: str = ""
    message: AnyMessage | None = None


class AgentGroup:
    """The agents of a run, as one of them sees them. `is_out` is true once the coordinator has removed this one."""

    def __init__(self, client: AsyncCoordinatorClient, worker: AsyncWorker, me: Member) -> None:
        self.me = me
        self.members: list[Member] = []
        """The leader first."""
        self._client = client
        self._worker = worker
        self._put_back: list[Received] = []
        self._refusal: PermissionRefused | None = None

    @property
    def leader(self) -> Member | None:
        """The leader, or None if there are no members, not even this one."""
        return self.members[0] if self.members else None

    @property
    def is_leader(self) -> bool:
        return self.leader is not None and self.leader.id == self.me.id

    @property
    def others(self) -> list[Member]:
        return [member for member in self.members if member.id != self.me.id]

    @property
    def lease_s(self) -> float:
        """The coordinator's lease: a member that is silent for longer is removed."""
        return self._worker.lease_s

    @property
    def is_out(self) -> bool:
        return self._worker.lost is not None

    async def refresh(self) -> None:
        """Fetch the members from the coordinator.

        Raises:
            CoordinatorError: The coordinator cannot be reached.
        """
        found = await self._client.list_workers(job_id=self._worker.job_id)
        by_age = sorted(found.workers, key=lambda worker: worker.incarnation)
        self.members = [Member(worker.worker_id, int(worker.capacity)) for worker in by_age]

    async def send(self, to: Sequence[str], message: AnyMessage) -> None:
        """Send a message to members; ignore those that have left.

        Raises:
            CoordinatorError: The coordinator did not accept it.
            PermissionRefused: It never will.
        """
        args = {_FROM: self.me.id, _TEXT: msgspec.json.encode(message).decode()}
        try:
            for each in to:
                with contextlib.suppress(UnknownWorker):
                    await self._client.send_command("MESSAGE", job_id=self._worker.job_id, worker_ids=[each], args=args)
        except PermissionRefused as error:
            self._refusal = PermissionRefused(
                f"{error.message}: agents on several machines send each other commands, so each needs a token with the "
                "role admin; set STRATA_TOKEN_FILE"
            )
            raise self._refusal from error

    async def receive(self) -> list[Received]:
        """Wait up to `POLL_S` for something, return what has come and update `members`. Messages come first, so that
        the last message of a member is handled before its departure.

        Raises:
            PermissionRefused: This member has tried to send and may not, so it is of no use to the others.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._put_back:
            received, self._put_back = self._put_back, []
            return received
        await self._worker.wait_changed(POLL_S)
        received = [found for command in self._worker.take_commands() if (found := _decode(command.args)) is not None]
        before = [member.id for member in self.members]
        try:
            await self.refresh()
        except CoordinatorError as error:  # keep the members that we know
            log.debug("cannot fetch the members: %s", error)
        if [member.id for member in self.members] != before:
            received.append(Received())
        return received

    def put_back(self, received: Sequence[Received]) -> None:
        """Receive this again: it was meant for the next role of this member."""
        self._put_back += received

    async def dismiss(self, message: AnyMessage) -> list[Member]:
        """Send a last message to all others, even those that join meanwhile, and wait for a while until they have left.
        Return those that it could not be sent to.
        """
        reached: set[str] = set()
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(DISMISS_S, DISMISS_LEASES * self.lease_s)) as limit:
                while self.others:
                    new = [member.id for member in self.others if member.id not in reached]
                    try:
                        await self.send(new, message)
                    except PermissionRefused:
                        break
                    except StrataError as error:
                        log.warning("cannot reach the other agents, retrying: %s", error)
                    else:
                        reached.update(new)
                        if new:
                            limit.reschedule(clock() + LEAVE_S)
                    await self.receive()
        return [member for member in self.others if member.id not in reached]


class Outbox:
    """Send messages in order, each until the coordinator has accepted it. A message that it refuses is dropped;
    `AgentGroup.receive` raises the refusal.
    """

    def __init__(self, group: AgentGroup) -> None:
        self._group = group
        self._waiting: asyncio.Queue[tuple[str, AnyMessage]] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_all(), name="messages")

    def send(self, to: str, message: AnyMessage) -> None:
        self._waiting.put_nowait((to, message))

    async def close(self) -> None:
        """Drop what is not sent yet."""
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)

    async def _send_all(self) -> None:
        while True:
            to, message = await self._waiting.get()
            again = tenacity.retry_if_exception(
                lambda error: isinstance(error, StrataError) and not isinstance(error, PermissionRefused)
            )
            with contextlib.suppress(PermissionRefused):
                async for attempt in tenacity.AsyncRetrying(retry=again, wait=tenacity.wait_fixed(RETRY_S)):
                    with attempt:
                        await self._send(to, message)

    async def _send(self, to: str, message: AnyMessage) -> None:
        try:
            await self._group.send([to], message)
        except PermissionRefused:
            raise
        except StrataError as error:
            log.warning("cannot send a message to %s, retrying: %s", to, error)
            raise


@contextlib.asynccontextmanager
async def join_group(
    client: AsyncCoordinatorClient, run: str, *, address: str, slots: int
) -> AsyncIterator[AgentGroup]:
    me = Member(f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}@{address}", slots)
    worker = await client.register_worker(me.id, job_id=f"{run}.nodes", capacity=float(slots))
    group = AgentGroup(client, worker, me)
    await group.refresh()
    try:
        yield group
    finally:
        with contextlib.suppress(StrataError):
            await worker.deregister("the run is over")
            if not group.others:
                await client.drop_job(f"{run}.nodes", reason="the run is over")


def own_address(coordinator: str) -> str:
    """Return the address that this machine uses to reach the coordinator. Nothing is sent.

    Raises:
        ConfigError: The coordinator's host is unknown here.
    """
    first = parse_addresses(coordinator, field="coordinator")[0]
    if first.path:  # a socket in the file system: all nodes are on this machine
        return "127.0.0.1"
    try:
        family = socket.getaddrinfo(first.host, first.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
            probe.connect(family[4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"cannot resolve the coordinator's host {first.host!r} ({error.strerror or error}); pass --coordinator "
            "HOST:PORT with a host that this machine can resolve",
            field="coordinator",
        ) from error


def check_reachable(group: AgentGroup) -> None:
    """Check that all nodes use loopback addresses, on one machine, or none does.

    Raises:
        ConfigError: Another node cannot reach this one, or the other way round.
    """
    for other in group.others:
        if other.is_loopback != group.me.is_loopback:
            raise ConfigError(
                f"this node has address {group.me.address} and node {other.name} has {other.address}; other machines "
                "cannot reach a loopback address. Pass --coordinator on every node with an address that all of them "
                "can reach, not localhost, or set --node-address",
                field="coordinator",
            )


def _decode(args: dict[str, str]) -> Received | None:
    try:
        return Received(args[_FROM], _DECODER.decode(args[_TEXT]))
    except (KeyError, msgspec.DecodeError) as error:
        log.warning("ignoring an invalid message: %s", error)
        return None
