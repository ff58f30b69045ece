"""A network of a test's own, with nodes that can be cut off, one way or both, and packets that are lost or late.

Needs root, `ip` and /dev/net/tun. `network_children.py` is how it is made; it ends with the test's nursery, however
that ends, and nothing of it can be seen from outside.
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
    """One machine: what is forked here sees the network from here."""

    def __init__(self, nursery: Nursery, host: str, namespace: str) -> None:
        self.host = host
        self._nursery = nursery
        self._namespace = namespace

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of a command that is to run here."""
        return ("nsenter", f"--net={self._namespace}")

    def fork(self, run: str, **arguments: Any) -> Child:
        return self._nursery.fork(
            "network_children:inside", namespace=self._namespace, function=run, arguments=arguments
        )


class Network:
    """Nodes by their names."""

    def __init__(self, nursery: Nursery, *names: str) -> None:
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        self._child = nursery.fork("network_children:network", addresses=addresses)
        heard = self._child.hear()
        if "refused" in heard:
            (pytest.fail if IN_CI else pytest.skip)(f"a network of one's own needs root: {heard['refused']}")
        namespaces = heard["namespaces"]
        self.nodes = {name: Node(nursery, host, namespaces[name]) for name, host in addresses.items()}

    def cut(self, one: str, other: str) -> None:
        """Nothing comes through, and nobody is told."""
        self._set([(one, other), (other, one)], loss=1.0)

    def silence(self, source: str, target: str) -> None:
        """Nothing comes through from the one to the other; the way back is as it was."""
        self._set([(source, target)], loss=1.0)

    def disturb(self, one: str, other: str, *, delay_s: float, jitter_s: float, loss: float) -> None:
        """Both ways."""
        self._set([(one, other), (other, one)], delay_s=delay_s, jitter_s=jitter_s, loss=loss)

    def mend(self, one: str, other: str) -> None:
        self._set([(one, other), (other, one)], loss=0.0, delay_s=0.0, jitter_s=0.0)

    def num_lost(self, source: str, target: str) -> int:
        """Packets."""
        return int(self._set([(source, target)])[0]["num_lost"])

    def num_connects(self, source: str, target: str) -> int:
        """How often a connection was asked for, whether or not that came through."""
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
