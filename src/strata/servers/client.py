"""`ServersClient`: a worker's connections to all servers.

A pull asks each server for the keys that it owns; a push sends each server its gradients, and an empty push to those
without any, so that the clocks of all servers advance together. On one machine, keys and rows lie in shared memory.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from strata.coordinator.state.server_figures import ServerFigures
from strata.errors import StrataError
from strata.servers import protocol
from strata.servers.connection import NUM_PULLS, REGION_BYTES, Link, Unacked
from strata.servers.placement import Placement
from strata.transport.bulk import ConnectionLost

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from strata.servers.clocks import Push
    from strata.servers.connection import Own, Part
    from strata.servers.state import Fence
    from strata.servers.table.keys import Keys
    from strata.servers.table.optimizers import Rows


class ServersClient:
    """Pulls and pushes. Use it from one thread."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        fence: Fence,
        widths: Mapping[str, int],
        *,
        tokens: Mapping[str, str] = MappingProxyType({}),
        contexts: Mapping[str, ssl.SSLContext | None] = MappingProxyType({}),
        region_bytes: int = REGION_BYTES,
        num_pulls: int = NUM_PULLS,
        is_half: bool = False,
        is_patient: bool = False,
        saved: tuple[int, int] = (0, 0),
    ) -> None:
        """Connect to all servers and join.

        Args:
            addresses: By the name of the server, in the order of their numbers, like `tokens` and TLS `contexts`.
            widths: By table.
            region_bytes: Shared memory for one message to a server on this machine; 0 for none.
            num_pulls: Pulls that may be in shared memory at a time.
            is_half: Send rows and gradients in half precision to servers on other machines.
            is_patient: Keep the pushes that a lost server has not acknowledged, for `reconnect`.
            saved: The last checkpoint in which this worker took part; see `protocol.Push`.

        Raises:
            ConnectionLost: A server does not answer; the message names it.
            StrataError: A server refuses this worker.
        """
        self._widths = dict(widths)
        self._placement = Placement.of(len(addresses))
        self._links: list[Link] = []
        try:
            for name, address in addresses.items():
                token, context = tokens.get(name, ""), contexts.get(name)
                link = Link(
                    name,
                    address,
                    token=token,
                    context=context,
                    region_bytes=region_bytes,
                    num_pulls=num_pulls,
                    is_half=is_half,
                )
                link.is_patient = is_patient
                self._links.append(link)
            self._fence = fence
            joins = [link.ask(protocol.Join(0, *fence, saved=saved)) for link in self._links]
            self.clock = min(join.result()[0].clock for join in joins)
            for link in self._links:
                link.acked = self.clock
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for link in self._links:
            link.close()

    @property
    def lost(self) -> dict[int, ConnectionLost]:
        """The servers whose connections are lost, by number, and how."""
        return {number: link.lost for number, link in enumerate(self._links) if link.lost is not None}

    def reconnect(
        self, number: int, address: str, *, token: str, context: ssl.SSLContext | None, saved: tuple[int, int]
    ) -> int:
        """Join a lost server again, and repeat what it has not acknowledged; return how many acknowledged pushes of
        this worker it has lost.

        Args:
            saved: The last checkpoint in which this worker took part.

        Raises:
            ConnectionLost: It does not answer.
            StrataError: It refuses this worker.
        """
        return self._links[number].reconnect(address, self._fence, token=token, context=context, saved=saved)

    def pull(self, clock: int, wanted: Mapping[str, Keys]) -> Pulled:
        """Ask for the rows of these keys, which must ascend. `clock`: completed steps of this worker."""
        tables = list(wanted)
        own = {name: self._by_owner(keys) for name, keys in wanted.items()}
        pulled = Pulled({name: (len(keys), self._widths[name]) for name, keys in wanted.items()})
        for number, link in enumerate(self._links):
            positions = {name: own[name][number] for name in tables}
            keys = [wanted[name][positions[name]] for name in tables]
            if any(map(len, keys)):
                shapes = [(len(each), self._widths[name]) for name, each in zip(tables, keys, strict=True)]
                pulled.add(link.pull(clock, tables, keys, shapes), positions, shapes)
        return pulled

    def _by_owner(self, keys: Keys) -> list[Own]:
        """Return the positions of each server's keys; all of them, without a copy, if there is one server."""
        if len(self._links) == 1:
            return [slice(None)]
        owners = self._placement.owners_of(keys)
        return [np.flatnonzero(owners == number) for number in range(len(self._links))]

    def push(
        self,
        clock: int,
        gradients: Mapping[str, Push],
        rates: Mapping[str, float] | None = None,
        *,
        saved: tuple[int, int] = (0, 0),
        copies: ServersClient | None = None,
    ) -> Future[None]:
        """Complete step `clock` with these gradients, whose keys must ascend. All servers get a push.

        Args:
            rates: Learning rates of the tables, if they have changed.
            saved: The last checkpoint in which this worker took part; see `protocol.Push`.
            copies: The servers that keep a copy of each server's rows. They get the same push, and it is kept until
                both have acknowledged it.
        """
        tables = list(gradients)
        own = {name: self._by_owner(push.keys) for name, push in gradients.items()}
        pushed = []
        for number, link in enumerate(self._links):
            parts = [(each, own[name][number]) for name in tables for each in gradients[name]]
            in_order = [rates[name] for name in tables] if rates else []
            links = [link] if copies is None else [link, copies._links[number]]
            push = Unacked(protocol.Push(0, clock, tables, in_order, saved), parts, links)
            for each in links:
                each.push(push)
            pushed.append(push.done)
        return _all_of(pushed)

    def notify(self, kind: Literal["save", "resize", "end", "done"], step: int, payload: bytes = b"") -> Future[None]:
        """Let the servers take part in what all workers do now."""
        buffers = [np.frombuffer(payload, np.uint8)]
        return _all_of([link.ask(protocol.Note(0, kind, step), buffers) for link in self._links])

    def unanswered(self) -> list[str]:
        """Return the names of the servers that owe an answer."""
        return [link.name for link in self._links if link.num_pending]

    def figures(self, timeout_s: float) -> list[ServerFigures]:
        """Return what each server has measured.

        Raises:
            ConnectionLost, StrataError: A server is lost, does not answer in time, or answers with something else.
        """
        asked = [(link.name, link.ask(protocol.Measure(0))) for link in self._links]
        found = []
        for name, answer in asked:
            try:
                (buffer,) = answer.result(timeout_s)[1]
                found.append(msgspec.json.decode(buffer.tobytes(), type=ServerFigures))
            except TimeoutError:
                raise ConnectionLost(f"parameter server {name} has not answered within {timeout_s:g} s") from None
            except (ValueError, msgspec.MsgspecError) as error:
                raise StrataError(f"parameter server {name} has returned malformed figures: {error}") from None
        return found


class Pulled:
    """Rows that are on their way."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._shapes = shapes
        self._parts: list[tuple[Part, Mapping[str, Own], list[tuple[int, int]]]] = []

    def add(self, part: Part, positions: Mapping[str, Own], shapes: list[tuple[int, int]]) -> None:
        self._parts.append((part, positions, shapes))

    def rows(self, timeout_s: float | None = None) -> dict[str, Rows]:
        """Wait for the rows; return them by table, in the order of the keys. Call it once.

        Raises:
            ConnectionLost, StrataError: A server is lost, has not answered in time, or has refused the pull.
        """
        found = {name: np.empty(shape, np.float32) for name, shape in self._shapes.items()}
        for part, positions, shapes in self._parts:
            for (name, own), buffer, shape in zip(positions.items(), part.buffers(timeout_s), shapes, strict=True):
                rows = protocol.rows_in(buffer, *shape)
                if isinstance(own, slice):
                    found[name] = part.lasting(rows)
                else:
                    found[name][own] = rows
        self._parts.clear()
        return found


def _all_of(futures: list[Future[Any]]) -> Future[None]:
    """Return a future that is done when all are, with the first error among them."""
    everything: Future[None] = Future()
    num_left = itertools.count(len(futures) - 1, -1)

    def done(_: Future[Any]) -> None:
        if next(num_left) == 0:
            failed = [each.exception() for each in futures if each.exception() is not None]
            if failed:
                everything.set_exception(failed[0])
            else:
                everything.set_result(None)

    for each in futures:
        each.add_done_callback(done)
    return everything
