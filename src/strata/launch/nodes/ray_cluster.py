"""Runs on a Ray cluster: where its workers get a place, and how they reach the agent.

Every worker has an actor of its own in a bundle of a placement group (`ray_actor.py`). The least number of
workers is one group, which Ray places as a whole: two runs that each hold half of a cluster and wait for the other half
cannot be. Each worker beyond the least is a group by itself: it comes when there is room, a run need not wait for it,
and an autoscaler sees that it is wanted. When a node is lost, Ray finds other places for its bundles as soon as there
are some, and each gets a new actor, which joins the run. Everything else is the supervisor's.

On a cluster of this machine alone nothing is copied and nothing listens. With other machines, Ray ships the working
directory, the coordinator listens on the network with TLS and tokens of this run, and the logs come back as news.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from strata._version import __version__
from strata.errors import ConfigError
from strata.launch.nodes import ray_actor
from strata.launch.nodes.base import Nodes
from strata.launch.nodes.ray import RayNode, answer
from strata.launch.nodes.ray_actor import ActorReady, NodeActor
from strata.launch.protocol import decode, encode
from strata.printing import printable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from strata.launch.nodes.reach import Reached
    from strata.launch.record.directory import RunDirectory
    from strata.launch.spec import RunSpec

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
"""Of a cluster that is ours: nothing goes through it, and less Ray does not take."""
SETTLE_S = 10.0
"""How long to wait for one more place before the run starts with those that are there."""
KNOCK_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_FAILED_STARTS = 3
"""Of actors, in a row and before the first has come; then it will not get better."""
MAX_REASON = 600
_HERE_SHARE = 0.0001
"""The least that Ray counts: of a node's name, to say where a bundle goes."""
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on a laptop: it listens on the loopback alone
    "RAY_USAGE_STATS_ENABLED": "0",  # there is nothing to report
}
"""Settings of a cluster that is ours. Whoever reaches a Ray cluster can run anything on it."""
INSTALL = 'pip install "strata-runtime[ray]"'


# -- pure --------------------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """A node of the cluster."""

    address: str
    resources: Mapping[str, float]


def reserved(spec: RunSpec) -> dict[str, float]:
    """What a worker reserves.

    Raises:
        ConfigError: Nothing, or a part of several GPUs.
    """
    found = {"CPU": spec.cpus_per_worker, "GPU": spec.gpus_per_worker}
    if not any(found.values()):
        raise ConfigError(
            "a worker on Ray must reserve something; raise --cpus-per-worker or --gpus-per-worker",
            field="cpus_per_worker",
        )
    if spec.gpus_per_worker > 1 and not spec.gpus_per_worker.is_integer():
        raise ConfigError(
            f"gpus_per_worker={spec.gpus_per_worker:g}: Ray shares out single GPUs; say a whole number, or below 1",
            field="gpus_per_worker",
        )
    return {name: amount for name, amount in found.items() if amount}


def num_that_fit(machines: Sequence[Machine], one: Mapping[str, float]) -> int:
    """How many workers the machines could take, if they did nothing else."""
    return sum(
        min(math.floor(machine.resources.get(name, 0.0) / amount + 1e-9) for name, amount in one.items())
        for machine in machines
    )


def is_here_only(machines: Sequence[Machine], own: str, spec: RunSpec) -> bool:
    """Whether the run needs this machine alone. A cluster in which the workers do not fit is about to grow."""
    if spec.ships:
        return False
    return all(machine.address == own for machine in machines) and (
        num_that_fit(machines, reserved(spec)) >= spec.workers.at_most
    )


def visible_devices(per_place: Sequence[str], gpus_per_worker: float) -> list[str]:
    """What all workers of a machine see, so that the one of local rank 1 finds its GPU as number 1, as torchrun has it.
    Empty: each sees its own alone, as Ray has set it.
    """
    named = [device for devices in per_place for device in devices.split(",") if device]
    if gpus_per_worker != 1 or len(named) != len(per_place) or len(set(named)) != len(named):
        return []
    return named


def check_checkpoints(spec: RunSpec, directory: RunDirectory) -> None:
    """
    Raises:
        ConfigError: They would be on this machine, and others could not read them.
    """
    if spec.checkpoints == str(directory.checkpoints):
        raise ConfigError(
            "the workers are on several machines, and checkpoints in the run's directory are on this one; name a place "
            "that all of them reach, as in --checkpoints s3://bucket/run, or run(…, checkpoints='/shared/run') for a "
            "function",
            field="checkpoints",
        )


# -- the cluster -------------------------------------------------------------------------------------------------------


class RayCluster:
    """The connection to it, for one run."""

    def __init__(self, spec: RunSpec, *, address: str, is_here: bool, is_shipped: bool, num_expected: int) -> None:
        self.address = address
        """Of this machine, as the others see it."""
        self.is_here = is_here
        """No other machine takes part."""
        self.credentials: Reached | None = None
        """Of the agent's own coordinator, where it is on the network."""
        self._spec = spec
        self._is_shipped = is_shipped
        self._num_expected = num_expected

    @contextlib.asynccontextmanager
    async def nodes(self, directory: RunDirectory) -> AsyncIterator[Nodes]:
        """With those that have come so far; others join, also in the place of those that are lost."""
        places = _Places(directory, self, is_shipped=self._is_shipped)
        try:
            yield await places.filled(self._num_expected)
        finally:
            await places.give_back()


def check(spec: RunSpec) -> None:
    """What can be known before there is a cluster.

    Raises:
        ConfigError: It cannot run.
    """
    reserved(spec)
    if find_spec("ray") is None:
        raise ConfigError(f"Ray is not installed; {INSTALL}, or take the engine 'local'", field="engine")
    if spec.address.startswith("ray://"):
        raise ConfigError(
            f"address={spec.address!r} is that of a Ray client, which no worker can reach; run this on a node of the "
            "cluster with --address auto, as in: ray job submit -- strata run --engine ray --address auto …",
            field="address",
        )


@contextlib.contextmanager
def connected(directory: RunDirectory) -> Iterator[RayCluster]:
    """The cluster that the spec names. If it names none, one is started on this machine, and ends with the run.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or it cannot run this.
    """
    spec = directory.spec
    check(spec)
    with _signals_kept(), _own_settings(spec):
        ray: Any = import_module("ray")
        is_found = ray.is_initialized()  # by the program that we run in
        if not is_found:
            _init(ray, spec)
        try:
            machines = [Machine(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
            own = ray.util.get_node_ip_address()
            is_here = is_here_only(machines, own, spec)
            is_shipped = not is_here and spec.ships is not False
            if not is_here:
                check_checkpoints(spec, directory)
            if is_shipped:
                ray_actor.at_home(spec, Path())  # a script elsewhere is better refused now
                _ship(ray, spec, is_found=is_found)
            yield RayCluster(
                spec,
                address=own,
                is_here=is_here,
                is_shipped=is_shipped,
                num_expected=min(num_that_fit(machines, reserved(spec)), spec.workers.at_most),
            )
        finally:
            if not is_found:
                ray.shutdown()


def _address(spec: RunSpec) -> str:
    return spec.address or os.environ.get("RAY_ADDRESS", "") or "local"


@contextlib.contextmanager
def _own_settings(spec: RunSpec) -> Iterator[None]:
    """Of a cluster that we start, unless the user has said otherwise. Ray reads them when it is imported."""
    ours = {} if _address(spec) != "local" else {name: OWN[name] for name in OWN if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _init(ray: Any, spec: RunSpec, **options: Any) -> None:
    """What the user has set in RAY_* variables stays in force: address, authentication, TLS."""
    address = _address(spec)
    if address == "local":
        num_cpus = max(os.cpu_count() or 1, math.ceil(spec.workers.at_most * spec.cpus_per_worker))
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except OSError as error:
        raise ConfigError(
            f"there is no Ray cluster at address={address!r} ({_in_short(error)}); start one with `ray start --head`, "
            "or leave out --address to have one for this run",
            field="address",
        ) from None


def _knock(address: str) -> None:
    """Ray tries for minutes where nobody is.

    Raises:
        OSError: Nobody is there.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S):
            pass


def _ship(ray: Any, spec: RunSpec, *, is_found: bool) -> None:
    """Ray takes a working directory along only when it connects, and we know only then whether there is a need."""
    if is_found:
        raise ConfigError(
            "this program has connected to Ray before, so the working directory cannot be shipped; call ray.shutdown() "
            "first, and name the cluster in RAY_ADDRESS",
            field="ships",
        )
    address = ray.get_runtime_context().gcs_address
    ray.shutdown()
    environment = {"working_dir": spec.directory, "env_vars": dict(spec.variables)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except (ValueError, RuntimeError) as error:  # so Ray says that it is too large
        raise ConfigError(
            f"{spec.directory} cannot be shipped to the nodes ({_in_short(error)}); name what is not needed there in "
            ".rayignore or .gitignore, run in a smaller directory, or say --no-ship where all nodes have the same "
            "file system",
            field="directory",
        ) from None


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler of its own and leaves it behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# -- places ------------------------------------------------------------------------------------------------------------


class _Bundle(NamedTuple):
    group: Any
    number: int
    """Of the group's."""


class _Places:
    """A bundle for each worker that may be, and an actor in each, again and again."""

    def __init__(self, directory: RunDirectory, cluster: RayCluster, *, is_shipped: bool) -> None:
        self._directory = directory
        self._spec = directory.spec
        self._cluster = cluster
        self._is_shipped = is_shipped
        self._groups: list[Any] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._actors: set[Any] = set()
        self._here: list[RayNode] = []
        """In the order in which they came, which is that of the ranks."""
        self._nodes: Nodes | None = None
        self._num_made = 0
        self._changed = asyncio.Event()
        self._problem: ConfigError | None = None

    async def filled(self, num_expected: int) -> Nodes:
        """
        Raises:
            ConfigError: No actor can run on this cluster.
        """
        for bundle in self._reserve():
            self._keepers.append(asyncio.create_task(self._keep(bundle)))
        while len(self._here) < max(num_expected, self._spec.workers.at_least):
            self._changed.clear()
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._changed.wait()
            except TimeoutError:
                break
            if self._problem is not None:
                raise self._problem
        hosts = list(dict.fromkeys(node.host for node in self._here))
        self._here.sort(key=lambda node: hosts.index(node.host))  # neighbours in rank are neighbours
        self._nodes = Nodes(*self._here)
        return self._nodes

    async def give_back(self) -> None:
        from ray.util.placement_group import remove_placement_group  # noqa: PLC0415

        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for actor in list(self._actors):
            self._end(actor)
        for group in self._groups:
            with contextlib.suppress(Exception):  # the cluster may be gone, and its groups with it
                remove_placement_group(group)

    def _reserve(self) -> list[_Bundle]:
        from ray.util.placement_group import placement_group  # noqa: PLC0415

        one = reserved(self._spec)
        if self._cluster.is_here:
            one[f"node:{self._cluster.address}"] = _HERE_SHARE
        least, most = self._spec.workers.at_least, self._spec.workers.at_most
        for num_bundles in [least, *[1] * (most - least)]:
            self._groups.append(placement_group([dict(one) for _ in range(num_bundles)], strategy="PACK"))
        return [_Bundle(group, number) for group in self._groups for number in range(len(group.bundle_specs))]

    async def _keep(self, bundle: _Bundle) -> None:
        """Sees to it that there is a node in this bundle, as long as the run goes on."""
        num_failed = 0
        while True:
            actor = self._make(bundle)
            try:
                node = await self._begun(actor)
            except ConfigError as error:
                num_failed += 1
                self._end(actor)
                self._report(error, num_failed)
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**num_failed, LONGEST_PAUSE_S))
                continue
            num_failed = 0
            self._here.append(node)
            if self._nodes is not None:
                self._nodes.join(node)
            self._changed.set()
            await node.lost.wait()
            self._here.remove(node)
            self._end(actor)

    def _make(self, bundle: _Bundle) -> Any:
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=self._spec.cpus_per_worker,
                num_gpus=self._spec.gpus_per_worker,
                max_restarts=0,  # a new one is made here, when it is known what became of the old one
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundle.group, placement_group_bundle_index=bundle.number
                ),
            )
            .remote()
        )
        self._actors.add(actor)
        return actor

    async def _begun(self, actor: Any) -> RayNode:
        """Waits as long as there is no room for it.

        Raises:
            ConfigError: It cannot run where it is.
        """
        from ray.exceptions import RayError  # noqa: PLC0415

        reached = self._cluster.credentials
        begin = ray_actor.BeginActor(
            spec=self._spec,
            path=str(self._directory.path),
            is_away=not self._cluster.is_here,
            is_shipped=self._is_shipped,
            address=LOOPBACK if self._cluster.is_here else "",
            ca=reached.ca if reached is not None else b"",
            token=reached.token if reached is not None else "",
        )
        try:
            data = await answer(actor.begin.remote(encode(begin)))
        except RayError as error:
            raise _cannot_run(error) from None
        assert isinstance(data, bytes)
        here = decode(data, ActorReady)
        if here.version != __version__:
            raise ConfigError(
                f"strata is {here.version} at {here.address} and {__version__} here; install the same on all nodes",
                field="engine",
            )
        if here.refusal:
            raise ConfigError(f"{here.address}: {here.refusal}")
        self._num_made += 1
        return RayNode(
            actor,
            here,
            name=f"ray-{self._num_made}" + ("" if self._cluster.is_here else f" ({here.address})"),
            logs=None if self._cluster.is_here else self._directory,
            devices=self._devices,
        )

    def _devices(self, host: str) -> Sequence[str]:
        per_place = [node.own_devices for node in self._here if node.host == host]
        return visible_devices(per_place, self._spec.gpus_per_worker)

    def _report(self, error: ConfigError, num_failed: int) -> None:
        log.warning("a place on the Ray cluster cannot be used: %s", error.message)
        if self._nodes is None and not self._here and num_failed >= MAX_FAILED_STARTS:
            self._problem = error
            self._changed.set()

    def _end(self, actor: Any) -> None:
        import ray  # noqa: PLC0415

        self._actors.discard(actor)
        with contextlib.suppress(Exception):  # it has ended, or its cluster has
            ray.kill(actor)


def _cannot_run(error: Exception) -> ConfigError:
    text = str(error)
    if "No module named 'strata'" in text:
        return ConfigError(f"strata is not installed on all nodes of the Ray cluster; {INSTALL} there", field="engine")
    return ConfigError(f"an actor did not start ({_in_short(error)})", field="engine")


def _in_short(error: Exception) -> str:
    """Ray's errors are pages; the end says why."""
    return printable(" ".join(str(error).split())[-MAX_REASON:], max_chars=MAX_REASON)
