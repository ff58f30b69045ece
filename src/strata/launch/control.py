"""Requests to a running agent, to stop, to scale, for the stacks of a worker, or for a trial of a study: by signals, or
as one JSON line each way over a Unix socket.

The socket is in a directory that only the agent's user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from strata.errors import ConfigError, StrataError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MAX_LINE_BYTES = 4096
MAX_REASON = 200
TIMEOUT_S = 10.0
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
"""SIGHUP comes when the terminal is closed."""


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="do", forbid_unknown_fields=True):
    is_now: bool = False


class Scale(msgspec.Struct, frozen=True, tag="scale", tag_field="do", forbid_unknown_fields=True):
    workers: int | None = None
    """Without the parameter servers; None: as many as before."""
    servers: int | None = None


class Stacks(msgspec.Struct, frozen=True, tag="stacks", tag_field="do", forbid_unknown_fields=True):
    """Write the stacks of a worker's threads to its log; the worker continues."""

    rank: int
    """The rank that the launcher gave it."""


TrialOrder = Literal["stop", "requeue"]


class OrderTrial(msgspec.Struct, frozen=True, tag="trial", tag_field="do", forbid_unknown_fields=True):
    """Of a study: stop a trial for good, or let it save and start again from its checkpoint."""

    trial: int
    order: TrialOrder
    reason: str = ""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: str = ""


Request = Stop | Scale | Stacks | OrderTrial


class Controlled(Protocol):
    """What an agent must provide for requests."""

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        """Let the workers save, then end; with `is_now`, end at once. Asking again without it changes nothing."""
        ...

    def scale(self, workers: int | None, servers: int | None = None) -> None: ...

    def dump_stacks(self, rank: int) -> None: ...


@runtime_checkable
class HasTrials(Protocol):
    """What the agent of a study provides as well."""

    def order_trial(self, trial: int, order: TrialOrder, reason: str) -> None: ...


@contextlib.asynccontextmanager
async def serve(agent: Controlled, path: Path) -> AsyncIterator[None]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                line = await reader.readline()
                writer.write(msgspec.json.encode(_carry_out(agent, line)) + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # the client is gone, or its request is too long
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, path, limit=MAX_LINE_BYTES)
    async with server:
        yield


def _carry_out(agent: Controlled, line: bytes) -> Answer:
    try:
        match msgspec.json.decode(line, type=Request):
            case Stop(is_now):
                agent.stop("strata stop", is_now=is_now)
            case Scale(workers, servers):
                agent.scale(workers, servers)
            case Stacks(rank):
                agent.dump_stacks(rank)
            case OrderTrial(trial, order, reason):
                if not isinstance(agent, HasTrials):
                    raise ConfigError("a run has no trials; only studies do")
                agent.order_trial(trial, order, reason[:MAX_REASON])
    except (msgspec.DecodeError, StrataError) as error:
        return Answer(str(error))
    return Answer()


def ask(path: str, request: Request) -> None:
    """Send a request to the agent at this socket.

    Raises:
        ConfigError: The agent refuses, or does not run.
    """
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(TIMEOUT_S)
            link.connect(os.fspath(path))
            link.sendall(msgspec.json.encode(request) + b"\n")
            with link.makefile("rb") as lines:
                answer = msgspec.json.decode(lines.readline(MAX_LINE_BYTES), type=Answer)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"the run's agent does not answer ({error}); check with `strata ps` whether it still runs"
        ) from error
    if answer.error:
        raise ConfigError(answer.error)


@contextlib.contextmanager
def handle_signals(agent: Controlled) -> Iterator[None]:
    """Stop the run on a signal: the first lets the workers save, the second kills them. Only the main thread can handle
    signals; in other threads this does nothing. Restore the previous handlers afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    received: list[str] = []

    def stop(reason: str) -> None:
        received.append(reason)
        agent.stop(reason, is_now=len(received) > 1)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, reason in SIGNALS.items():
        if before[number] is not signal.SIG_IGN or number == signal.SIGINT:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, stop, reason)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)
