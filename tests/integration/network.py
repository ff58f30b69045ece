"""A private network for a test, whose nodes can be cut off in one or both directions and whose packets can be delayed
or lost.

It needs root, `ip` and /dev/net/tun. `network_children.py` implements it. It ends with the test's nursery, however that
ends, and is invisible from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Child, Nursery

IN_CI = os.environ.get("CI") == "true"
TUN = Path("/dev/net/tun")


class Node:
    """One machine: processes forked here run in its namespace."""

    def __init__(self, nursery: Nursery, host: str, namespace: str) -> None:
        self.host = host
        self._nursery = nursery
        self._namespace = namespace

    @property
    def prefix(self) -> tuple[str, ...]:
        """The prefix of a command that runs at this node."""
        return ("nsenter", f"--net={self._namespace}")

    def fork(self, run: str, **arguments: Any) -> Child:
        return self._nursery.fork(
            "network_children:inside", namespace=self._namespace, function=run, arguments=arguments
        )


class Network:
    """A network of named nodes."""

    def __init__(self, nursery: Nursery, *names: str) -> None:
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        self._child = nursery.fork("network_children:network", addresses=addresses)
        answer = self._child.receive()
        if "refused" in answer:
            (pytest.fail if IN_CI else pytest.skip)(f"a private network needs root: {answer['refused']}")
        namespaces = answer["namespaces"]
        self.nodes = {name: Node(nursery, host, namespaces[name]) for name, host in addresses.items()}

    def cut(self, one: str, other: str) -> None:
        """Drop all packets between two nodes, silently."""
        self._set([(one, other), (other, one)], loss=1.0)

    def silence(self, source: str, target: str) -> None:
        """Drop all packets from `source` to `target`, but not those in the other direction."""
        self._set([(source, target)], loss=1.0)

    def disturb(self, one: str, other: str, *, delay_s: float, jitter_s: float, loss: float) -> None:
        """Delay and lose packets in both directions."""
        self._set([(one, other), (other, one)], delay_s=delay_s, jitter_s=jitter_s, loss=loss)

    def mend(self, one: str, other: str) -> None:
        self._set([(one, other), (other, one)], loss=0.0, delay_s=0.0, jitter_s=0.0)

    def num_lost(self, source: str, target: str) -> int:
        """Return the number of lost packets."""
        return int(self._set([(source, target)])[0]["num_lost"])

    def num_connects(self, source: str, target: str) -> int:
        """Return how many connections were attempted, whether or not the packets arrived."""
        return int(self._set([(source, target)])[0]["num_connects"])

    def _set(self, ways: list[tuple[str, str]], **settings: float) -> list[dict[str, Any]]:
        return list(self._child.ask(ways=ways, set=settings)["ways"])


@pytest.fixture
def make_network(nursery: Nursery, requires_service: Callable[..., Path]) -> Callable[..., Network]:
    """`make_network("hub", "a", "b")`."""
    requires_service("ip")
    requires_service(TUN, "the kernel needs CONFIG_TUN, and a container --device /dev/net/tun")

    def make(*names: str) -> Network:
        return Network(nursery, *names)

    return make
