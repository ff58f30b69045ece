"""Functions that the nursery's children run in a private network: the network itself, and the processes in it.

The network is one process. It creates a namespace with one `tun` interface for every node and forwards packets between
them, so it can drop and delay packets in one or both directions, under the kernel's own TCP. The network disappears
when that process and those inside it have exited. Traffic control could do the same, but not every kernel has its
`netem` module.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import importlib
import itertools
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.coordinator.client import ClientConfig, CoordinatorClient, Worker
from strata.errors import (
    CoordinatorUnavailable,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    UnknownWorker,
)

if TYPE_CHECKING:
    from nursery import Lifeline

    from strata.coordinator.state.shards import Shard

_CLONE_NEWNET = 0x4000_0000
_TUNSETIFF = 0x4004_54CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_BYTES = 65_536
_TCP, _SYN, _ACK = 6, 0x02, 0x10

NUM_AT_ONCE = 4
"""Concurrent acks of a worker."""


# -- the network -------------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """The path from one node to another."""

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    last_due_s: float = 0.0
    num_passed: int = 0
    num_lost: int = 0
    num_connects: int = 0
    """SYN packets, delivered or lost; a retransmission counts again."""


class Wire:
    def __init__(self, addresses: dict[str, str]) -> None:
        self.namespaces: dict[str, str] = {}
        self._ways: defaultdict[tuple[str, str], Way] = defaultdict(Way)
        self._names = {bytes(map(int, address.split("."))): name for name, address in addresses.items()}
        self._ports: dict[str, int] = {}
        self._under_way: list[tuple[float, int, str, bytes]] = []
        """Due time, sequence number, target, packet."""
        self._numbers = itertools.count()
        self._rng = random.Random(5)
        for name, address in addresses.items():
            self._add(name, address)

    def _add(self, name: str, address: str) -> None:
        _system_call("unshare", _CLONE_NEWNET)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", b"strata0", _IFF_TUN | _IFF_NO_PI))
        for arguments in ("link set lo up", f"address add {address}/24 dev strata0", "link set strata0 up"):
            subprocess.run(["ip", *arguments.split()], check=True)
        self.namespaces[name] = f"/proc/{os.getpid()}/fd/{namespace}"
        self._ports[name] = port

    def serve(self, lifeline: Lifeline) -> None:
        """Forward packets until the test closes the connection.

        Orders are `{"ways": [[FROM, TO], …], "set": {…}}`; the answer is the state of each of these ways.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(lifeline, selectors.EVENT_READ, None)
            for name, port in self._ports.items():
                selector.register(port, selectors.EVENT_READ, name)
            while True:
                for key, _ in selector.select(self._pause_s()):
                    if key.data is not None:
                        self._take(key.data)
                    elif (order := lifeline.receive()) is None:
                        return
                    else:
                        lifeline.send(ways=[vars(self._ordered(way, order["set"])) for way in order["ways"]])
                self._deliver()

    def _ordered(self, names: list[str], settings: dict[str, float]) -> Way:
        way = self._ways[names[0], names[1]]
        for key, value in settings.items():
            setattr(way, key, value)
        return way

    def _pause_s(self) -> float | None:
        return max(self._under_way[0][0] - time.monotonic(), 0.0) if self._under_way else None

    def _take(self, source: str) -> None:
        with contextlib.suppress(BlockingIOError):
            while packet := os.read(self._ports[source], _MAX_PACKET_BYTES):
                target = self._names.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is not None:
                    self._send(self._ways[source, target], target, packet)

    def _send(self, way: Way, target: str, packet: bytes) -> None:
        way.num_connects += _is_connect(packet)
        if self._rng.random() < way.loss:
            way.num_lost += 1
            return
        way.num_passed += 1
        delay_s = way.delay_s + self._rng.uniform(-1, 1) * way.jitter_s
        # Packets stay in order: jitter is not reordering.
        way.last_due_s = max(way.last_due_s, time.monotonic() + delay_s)
        heapq.heappush(self._under_way, (way.last_due_s, next(self._numbers), target, packet))

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(BlockingIOError):  # its queue is full, so the packet is dropped, as by a switch
                os.write(self._ports[target], packet)


def _is_connect(packet: bytes) -> bool:
    flags = (packet[0] & 0x0F) * 4 + 13
    return packet[9] == _TCP and packet[flags] & (_SYN | _ACK) == _SYN


def network(lifeline: Lifeline, *, addresses: dict[str, str]) -> None:
    """Run the network; report the namespace of each node, as a file for `setns`, or that permission is missing."""
    try:
        wire = Wire(addresses)
    except PermissionError as error:
        lifeline.send(refused=str(error))
        return
    lifeline.send(namespaces=wire.namespaces)
    wire.serve(lifeline)


def inside(lifeline: Lifeline, *, namespace: str, function: str, arguments: dict[str, Any]) -> None:
    """Run another function of the nursery at a node of the network."""
    file = os.open(namespace, os.O_RDONLY)
    _system_call("setns", file, _CLONE_NEWNET)
    os.close(file)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(lifeline, **arguments)


def _system_call(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python's `os` lacks before 3.12."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# -- a worker that is always busy --------------------------------------------------------------------------------------


class Acking:
    """Acks shards, several at a time, while this worker is a member, and records which acks were answered."""

    def __init__(self, worker: Worker, dataset_id: str) -> None:
        self.acked: list[int] = []
        self.kinds: set[str] = set()
        """The kinds of errors."""
        self._worker = worker
        self._dataset_id = dataset_id
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the pending acks have been answered."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            while self._worker.lost is None and not self._stopping.is_set():
                try:
                    list(pool.map(self._ack, self._worker.shards(self._dataset_id)))
                except (CoordinatorUnavailable, StaleGeneration, StaleIncarnation, UnknownWorker) as error:
                    self.kinds.add(type(error).__name__)

    def _ack(self, shard: Shard) -> None:
        if not self._stopping.is_set() and self._worker.lost is None:
            self._worker.ack([shard])
            self.acked.append(shard.index)


def worker(lifeline: Lifeline, *, address: str, worker_id: str, dataset_id: str, config: dict[str, float]) -> None:
    """Run a worker that acks shards all the time, and execute the test's orders."""
    with CoordinatorClient(address, config=ClientConfig(**config)) as client:
        member = client.register_worker(worker_id)
        lifeline.send(incarnation=member.incarnation, generation=member.generation)
        acking: Acking | None = None
        while (order := lifeline.receive()) is not None:
            match order["do"]:
                case "start":
                    acking = Acking(member, dataset_id)
                    lifeline.send()
                case "stop":
                    assert acking is not None
                    acking.stop()
                    lifeline.send(acked=acking.acked, kinds=sorted(acking.kinds))
                case "look":
                    lifeline.send(
                        num_acked=len(acking.acked) if acking else 0,
                        lost=type(member.lost).__name__ if member.lost else "",
                        why=member.lost.message if member.lost else "",
                        generation=member.latest_generation,
                        num_connections=client.num_connections,
                    )
                case "members":
                    members = client.list_workers()
                    lifeline.send(
                        generation=members.generation,
                        reason=members.reason,
                        silent_s={w.worker_id: w.silent_s for w in members.workers},
                    )
                case "register":
                    client.register_dataset(dataset_id, total_samples=order["num_shards"], shard_size=1)
                    lifeline.send()
                case "barrier":
                    lifeline.send(kind=_kind_of_barrier(member, order["name"], order["timeout_s"]))


def _kind_of_barrier(member: Worker, name: str, timeout_s: float) -> str:
    try:
        member.refresh()
        member.barrier(name, timeout_s=timeout_s)
    except StrataError as error:
        return type(error).__name__
    return ""
