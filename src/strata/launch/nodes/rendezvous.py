"""How the agents of several machines find each other and speak: as members of a job of their own at the coordinator.

The job is called after the run, `NAME.nodes`. Who has been in it for longest leads. Messages are commands of the
coordinator: durable when they are sent, in order, and carried by the connection that each agent has anyway. A member
that dies loses its lease, as any worker does, and is no member then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import tenacity

from strata.errors import ConfigError, CoordinatorError, PermissionRefused, StrataError, UnknownWorker
from strata.launch.environment import WorkerSpec  # noqa: TC001 - msgspec looks at it
from strata.launch.processes.base import WorkerExit  # noqa: TC001
from strata.transport.addresses import Address, parse_addresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from strata.coordinator.client import AsyncCoordinatorClient, AsyncWorker

log = logging.getLogger(__name__)
POLL_S = 1.0
"""How often members are looked at, although nothing was heard."""
AGAIN_S = 1.0
"""Between two tries to send a message."""
LEFT_S = 10.0
"""What the others have to leave, when they know that a run is over."""
TELL_S = 60.0
TELL_LEASES = 3
"""Until they are told it is tried for so long, and for so many leases: the coordinator may be away for a while, and who
is not told by somebody that is still a member goes on with the run.
"""
_FROM, _TEXT = "from", "text"


# -- what is said ------------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Launch(Message, frozen=True):
    """From the leader: start these workers."""

    worker: WorkerSpec
    """What they have in common."""
    ranks: tuple[tuple[int, int], ...]
    """Rank and local rank of each."""


class Kill(Message, frozen=True):
    attempt: int
    ranks: tuple[int, ...]


class SendSignal(Message, frozen=True):
    attempt: int
    rank: int
    number: int


class Dump(Message, frozen=True):
    """Write down where a worker stands."""

    attempt: int
    rank: int


class Release(Message, frozen=True):
    """To a node that wanted to leave: nobody of the run is there any more, and nobody will come."""


class Over(Message, frozen=True):
    """The run has ended."""

    outcome: Literal["done", "stopped", "failed"]
    reason: str


class Ended(Message, frozen=True):
    """To the leader: workers have."""

    attempt: int
    exits: tuple[WorkerExit, ...]


class Leaving(Message, frozen=True):
    """To the leader: this node is to be without workers soon."""

    reason: str


AnyMessage = Launch | Kill | SendSignal | Dump | Release | Over | Ended | Leaving
_DECODER = msgspec.json.Decoder(AnyMessage)


# -- who is there ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    id: str
    """NAME@ADDRESS; another one each time that a node joins."""
    slots: int

    @property
    def name(self) -> str:
        return self.id.partition("@")[0]

    @property
    def address(self) -> str:
        return self.id.partition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Nobody on another machine reaches it."""
        return Address(self.address, 0).is_local


class Heard(NamedTuple):
    """A message, or, without one, that members have come or gone."""

    sender: str = ""
    message: AnyMessage | None = None


class Meeting:
    """One agent's side of it. `is_out` is set when the coordinator no longer counts it in."""

    def __init__(self, client: AsyncCoordinatorClient, worker: AsyncWorker, me: Member) -> None:
        self.me = me
        self.members: list[Member] = []
        """The leader first."""
        self._client = client
        self._worker = worker
        self._put_back: list[Heard] = []
        self._refusal: PermissionRefused | None = None

    @property
    def leader(self) -> Member | None:
        """None if nobody is there, not even this one."""
        return self.members[0] if self.members else None

    @property
    def is_leader(self) -> bool:
        return self.leader is not None and self.leader.id == self.me.id

    @property
    def others(self) -> list[Member]:
        return [member for member in self.members if member.id != self.me.id]

    @property
    def lease_s(self) -> float:
        """As the coordinator has it: a member that is silent for so long is no member."""
        return self._worker.lease_s

    @property
    def is_out(self) -> bool:
        return self._worker.lost is not None

    async def look(self) -> None:
        """Finds out who is there.

        Raises:
            CoordinatorError: The coordinator does not say.
        """
        found = await self._client.list_workers(job_id=self._worker.job_id)
        by_age = sorted(found.workers, key=lambda worker: worker.incarnation)
        self.members = [Member(worker.worker_id, int(worker.capacity)) for worker in by_age]

    async def send(self, to: Sequence[str], message: AnyMessage) -> None:
        """To members that are gone meanwhile nothing is said.

        Raises:
            CoordinatorError: The coordinator did not take it.
            PermissionRefused: It never will.
        """
        args = {_FROM: self.me.id, _TEXT: msgspec.json.encode(message).decode()}
        try:
            for each in to:
                with contextlib.suppress(UnknownWorker):
                    await self._client.send_command("MESSAGE", job_id=self._worker.job_id, worker_ids=[each], args=args)
        except PermissionRefused as error:
            self._refusal = PermissionRefused(
                f"{error.message}: agents of several machines command each other, so each of them needs a token of the "
                "role admin (STRATA_TOKEN_FILE)"
            )
            raise self._refusal from error

    async def hear(self) -> list[Heard]:
        """What has come: messages first, so that the last words of a member are heard before it is missed. Waits a
        moment if there is nothing; afterwards `members` are those of now.

        Raises:
            PermissionRefused: This member may not speak, which it has tried: then it is of no use to the others.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._put_back:
            heard, self._put_back = self._put_back, []
            return heard
        await self._worker.wait_changed(POLL_S)
        heard = [found for command in self._worker.take_commands() if (found := _decoded(command.args)) is not None]
        before = [member.id for member in self.members]
        try:
            await self.look()
        except CoordinatorError as error:  # it is away; whoever is there stays so
            log.debug("members are not known: %s", error)
        if [member.id for member in self.members] != before:
            heard.append(Heard())
        return heard

    def put_back(self, heard: Sequence[Heard]) -> None:
        """To be heard again: it was for whoever this member is next."""
        self._put_back += heard

    async def dismiss(self, message: AnyMessage) -> list[Member]:
        """Says a last thing to all others, also to those who join meanwhile, and waits until they have left, or long
        enough. Those who could not be told.
        """
        told: set[str] = set()
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(TELL_S, TELL_LEASES * self.lease_s)) as limit:
                while self.others:
                    new = [member.id for member in self.others if member.id not in told]
                    try:
                        await self.send(new, message)
                    except PermissionRefused:
                        break
                    except StrataError as error:
                        log.warning("others could not be told, and are told again: %s", error)
                    else:
                        told.update(new)
                        if new:
                            limit.reschedule(clock() + LEFT_S)
                    await self.hear()
        return [member for member in self.others if member.id not in told]


class Outbox:
    """Sends one message after another, each until the coordinator has it: it may be away for a while. One that it
    refuses is given up; `Meeting.hear` says why.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._waiting: asyncio.Queue[tuple[str, AnyMessage]] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_all(), name="messages")

    def say(self, to: str, message: AnyMessage) -> None:
        self._waiting.put_nowait((to, message))

    async def close(self) -> None:
        """What is not sent by now is not said."""
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)

    async def _send_all(self) -> None:
        while True:
            to, message = await self._waiting.get()
            again = tenacity.retry_if_exception(
                lambda error: isinstance(error, StrataError) and not isinstance(error, PermissionRefused)
            )
            with contextlib.suppress(PermissionRefused):
                async for attempt in tenacity.AsyncRetrying(retry=again, wait=tenacity.wait_fixed(AGAIN_S)):
                    with attempt:
                        await self._send(to, message)

    async def _send(self, to: str, message: AnyMessage) -> None:
        try:
            await self._meeting.send([to], message)
        except PermissionRefused:
            raise
        except StrataError as error:
            log.warning("%s could not be told, and is told again: %s", to, error)
            raise


@contextlib.asynccontextmanager
async def joined(client: AsyncCoordinatorClient, run: str, *, address: str, slots: int) -> AsyncIterator[Meeting]:
    me = Member(f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}@{address}", slots)
    worker = await client.register_worker(me.id, job_id=f"{run}.nodes", capacity=float(slots))
    meeting = Meeting(client, worker, me)
    await meeting.look()
    try:
        yield meeting
    finally:
        with contextlib.suppress(StrataError):
            await worker.deregister("it is over")
            if not meeting.others:
                await client.drop_job(f"{run}.nodes", reason="the run is over")


def own_address(coordinator: str) -> str:
    """Of this machine, as seen on the way to the coordinator. Nothing is sent.

    Raises:
        ConfigError: There is no such way.
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
            f"the coordinator's host {first.host!r} is not found from here ({error.strerror or error}); name one with "
            "--coordinator HOST:PORT that this machine knows",
            field="coordinator",
        ) from error


def check_reach(here: Meeting) -> None:
    """The loopback leads from every machine to itself: either all nodes are there, on one machine, or none is.

    Raises:
        ConfigError: Another node cannot reach this one, or the other way round.
    """
    for other in here.others:
        if other.is_loopback != here.me.is_loopback:
            raise ConfigError(
                f"this node is at {here.me.address} and node {other.name} at {other.address}: from another machine a "
                "loopback address is not reached; name the coordinator on each of them by an address that all of them "
                "reach, not localhost, or say where the others reach a machine with --node-address",
                field="coordinator",
            )


def _decoded(args: dict[str, str]) -> Heard | None:
    try:
        return Heard(args[_FROM], _DECODER.decode(args[_TEXT]))
    except (KeyError, msgspec.DecodeError) as error:
        log.warning("a message that nobody understands was left out: %s", error)
        return None
