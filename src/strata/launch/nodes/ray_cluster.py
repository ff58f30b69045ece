"""Runs on a Ray cluster: reserve resources for workers, and keep an actor in each reservation.

Every worker has its own actor in a bundle of a placement group (`ray_actor.py`). The minimum number of workers is one
group, which Ray places as a whole, so that two runs never each hold half of a cluster and wait for the other half. Each
further worker is a separate group: it joins when there is room, the run does not wait for it, and an autoscaler sees
the demand. When a node is lost, Ray places its bundles elsewhere as soon as possible, and each gets a new actor, which
joins the run. Everything else is the supervisor's task.

On a cluster of this machine alone, nothing is copied and nothing listens on the network. With other machines, Ray
copies the working directory, the coordinator listens on the network with TLS and tokens of this run, and actors send
the logs.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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

    from strata.launch.nodes.network_coordinator import NetworkCoordinator
    from strata.launch.record.directory import RunDirectory
    from strata.launch.spec import RunSpec

log = logging.getLogger(__name__)
N = TypeVar("N", bound=Nodes)
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
"""Size of the object store of a cluster that we start: we do not use it, and Ray accepts no less."""
SETTLE_S = 10.0
"""How long to wait for one more actor before the run starts with those that have joined."""
CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_FAILED_STARTS = 3
"""Failed starts of actors in a row, before the first success, after which the run fails."""
MAX_REASON = 600
_HERE_SHARE = 0.0001
"""Smallest amount that Ray accepts, of a node's own resource, which places a bundle on that node."""
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback alone
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Settings of a cluster that we start. Anyone who can connect to a Ray cluster can run code on it."""
INSTALL = 'pip install "strata-runtime[ray]"'


# -- pure --------------------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """A machine of the cluster."""

    address: str
    resources: Mapping[str, float]


def reserved(spec: RunSpec) -> dict[str, float]:
    """Return the resources that a worker reserves.

    Raises:
        ConfigError: It reserves nothing, or a fraction of more than one GPU.
    """
    found = {"CPU": spec.cpus_per_worker, "GPU": spec.gpus_per_worker}
    if not any(found.values()):
        raise ConfigError(
            "a worker on Ray must reserve CPUs or GPUs; raise --cpus-per-worker or --gpus-per-worker",
            field="cpus_per_worker",
        )
    if spec.gpus_per_worker > 1 and not spec.gpus_per_worker.is_integer():
        raise ConfigError(
            f"gpus_per_worker={spec.gpus_per_worker:g} is invalid: workers on Ray can share only one GPU; use a "
            "whole number, or less than 1",
            field="gpus_per_worker",
        )
    return {name: amount for name, amount in found.items() if amount}


def num_that_fit(machines: Sequence[Machine], one: Mapping[str, float]) -> int:
    """Return how many workers the machines could run if they were idle."""
    return sum(
        min(math.floor(machine.resources.get(name, 0.0) / amount + 1e-9) for name, amount in one.items())
        for machine in machines
    )


def is_here_only(machines: Sequence[Machine], own: str, spec: RunSpec) -> bool:
    """Return whether the run needs only this machine. A cluster without enough room for all workers may grow."""
    if spec.ships:
        return False
    return all(machine.address == own for machine in machines) and (
        num_that_fit(machines, reserved(spec)) >= spec.workers.at_most
    )


def visible_devices(per_actor: Sequence[str], gpus_per_worker: float) -> list[str]:
    """Return the GPUs that all workers of a machine see, so that local rank 1 uses GPU 1, as under torchrun. Empty:
    each worker sees only its own GPU, as Ray has set it.
    """
    named = [device for devices in per_actor for device in devices.split(",") if device]
    if gpus_per_worker != 1 or len(named) != len(per_actor) or len(set(named)) != len(named):
        return []
    return named


def check_checkpoints(spec: RunSpec, directory: RunDirectory) -> None:
    """
    Raises:
        ConfigError: Checkpoints would be on this machine, where others cannot read them.
    """
    if spec.checkpoints == str(directory.checkpoints):
        raise ConfigError(
            "the workers run on several machines, but the run's directory with its checkpoints is on this one; pass a "
            "location that all of them can reach: --checkpoints s3://bucket/run, or run(…, checkpoints='/shared/run') "
            "for a function",
            field="checkpoints",
        )


# -- the cluster -------------------------------------------------------------------------------------------------------


class RayCluster:
    """The connection to a Ray cluster, for one run."""

    def __init__(self, spec: RunSpec, *, address: str, is_here: bool, is_shipped: bool, num_expected: int) -> None:
        self.address = address
        """Address of this machine in the cluster."""
        self.is_here = is_here
        """No other machine takes part."""
        self.credentials: NetworkCoordinator | None = None
        """Credentials of the agent's own coordinator, if it listens on the network."""
        self._spec = spec
        self._is_shipped = is_shipped
        self._num_expected = num_expected

    @contextlib.asynccontextmanager
    async def nodes(self, directory: RunDirectory, kind: type[N]) -> AsyncIterator[N]:
        """Yield the nodes that have joined, as an object of this kind. Others join later, also as replacements of lost
        ones.
        """
        reservations = _Reservations(directory, self, is_shipped=self._is_shipped, are_shared=kind is not Nodes)
        try:
            yield await reservations.fill(self._num_expected, kind)
        finally:
            await reservations.release()


def check(spec: RunSpec) -> None:
    """Check what can be checked before connecting.

    Raises:
        ConfigError: The spec cannot run on Ray.
    """
    reserved(spec)
    if find_spec("ray") is None:
        raise ConfigError(f"Ray is not installed; {INSTALL}, or use the engine 'local'", field="engine")
    if spec.address.startswith("ray://"):
        raise ConfigError(
            f"address={spec.address!r} is a Ray client address, which workers cannot reach; run this on a node of the "
            "cluster with --address auto, for example: ray job submit -- strata run --engine ray --address auto …",
            field="address",
        )


@contextlib.contextmanager
def connected(directory: RunDirectory) -> Iterator[RayCluster]:
    """Connect to the cluster that the spec names, or start one on this machine for the run.

    Raises:
        ConfigError: Ray is not installed, the cluster does not exist, or it cannot run the spec.
    """
    spec = directory.spec
    check(spec)
    with _signals_kept(), _own_settings(spec):
        ray: Any = import_module("ray")
        is_found = ray.is_initialized()  # by the calling program
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
                ray_actor.at_home(spec, Path())  # refuse a script outside of the directory now
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
    """Set `OWN` for a cluster that we start, unless the user set other values. Ray reads them when it is imported."""
    ours = {} if _address(spec) != "local" else {name: OWN[name] for name in OWN if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _init(ray: Any, spec: RunSpec, **options: Any) -> None:
    """Connect. The user's RAY_* variables apply: address, authentication, TLS."""
    address = _address(spec)
    if address == "local":
        num_cpus = max(os.cpu_count() or 1, math.ceil(spec.workers.at_most * spec.cpus_per_worker))
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        _check_listening(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except OSError as error:
        raise ConfigError(
            f"there is no Ray cluster at address={address!r} ({_shorten(error)}); start one with `ray start --head`, "
            "or leave out --address to start one for this run",
            field="address",
        ) from None


def _check_listening(address: str) -> None:
    """Check that the address accepts connections: Ray itself would try for minutes.

    Raises:
        OSError: It does not.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            pass


def _ship(ray: Any, spec: RunSpec, *, is_found: bool) -> None:
    """Reconnect with the working directory: Ray accepts one only when it connects, before we know the need."""
    if is_found:
        raise ConfigError(
            "this program has already connected to Ray, so the working directory cannot be copied; call ray.shutdown() "
            "first, and set RAY_ADDRESS to the cluster",
            field="ships",
        )
    address = ray.get_runtime_context().gcs_address
    ray.shutdown()
    environment = {"working_dir": spec.directory, "env_vars": dict(spec.variables)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except (ValueError, RuntimeError) as error:  # Ray's errors for a directory that is too large
        raise ConfigError(
            f"cannot copy {spec.directory} to the nodes ({_shorten(error)}); list what is not needed there in "
            ".rayignore or .gitignore, run in a smaller directory, or pass --no-ship if all nodes share a file system",
            field="directory",
        ) from None


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# -- reservations ------------------------------------------------------------------------------------------------------


class _Bundle(NamedTuple):
    group: Any
    number: int
    """Its index in the group."""


class _Reservations:
    """A bundle for each possible worker, with an actor in each, which is replaced when it is lost."""

    def __init__(
        self, directory: RunDirectory, cluster: RayCluster, *, is_shipped: bool, are_shared: bool = False
    ) -> None:
        """`are_shared`: several jobs run on the nodes, so that each worker sees the GPUs of its own actor only."""
        self._are_shared = are_shared
        self._directory = directory
        self._spec = directory.spec
        self._cluster = cluster
        self._is_shipped = is_shipped
        self._groups: list[Any] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._actors: set[Any] = set()
        self._joined: list[RayNode] = []
        """Nodes in the order in which they joined, which is the order of the ranks."""
        self._nodes: Nodes | None = None
        self._num_created = 0
        self._changed = asyncio.Event()
        self._problem: ConfigError | None = None

    async def fill(self, num_expected: int, kind: type[N]) -> N:
        """Reserve resources and wait for the first actors.

        Raises:
            ConfigError: No actor can run on this cluster.
        """
        for bundle in self._reserve():
            self._keepers.append(asyncio.create_task(self._keep(bundle)))
        while len(self._joined) < max(num_expected, self._spec.workers.at_least):
            self._changed.clear()
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._changed.wait()
            except TimeoutError:
                break
            if self._problem is not None:
                raise self._problem
        hosts = list(dict.fromkeys(node.host for node in self._joined))
        self._joined.sort(key=lambda node: hosts.index(node.host))  # consecutive ranks share a machine
        nodes = kind(*self._joined)
        self._nodes = nodes
        return nodes

    async def release(self) -> None:
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
        strategy = "SPREAD" if self._spec.num_servers else "PACK"  # tables may need the memory of several machines
        for num_bundles in [least, *[1] * (most - least)]:
            self._groups.append(placement_group([dict(one) for _ in range(num_bundles)], strategy=strategy))
        return [_Bundle(group, number) for group in self._groups for number in range(len(group.bundle_specs))]

    async def _keep(self, bundle: _Bundle) -> None:
        """Keep an actor in this bundle for the whole run."""
        num_failed = 0
        while True:
            actor = self._create(bundle)
            try:
                node = await self._begin(actor)
            except ConfigError as error:
                num_failed += 1
                self._end(actor)
                self._report(error, num_failed)
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**num_failed, LONGEST_PAUSE_S))
                continue
            num_failed = 0
            self._joined.append(node)
            if self._nodes is not None:
                self._nodes.join(node)
            self._changed.set()
            await node.lost.wait()
            self._joined.remove(node)
            self._end(actor)

    def _create(self, bundle: _Bundle) -> Any:
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=self._spec.cpus_per_worker,
                num_gpus=self._spec.gpus_per_worker,
                max_restarts=0,  # `_keep` replaces it, once the old one is known to be lost
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundle.group, placement_group_bundle_index=bundle.number
                ),
            )
            .remote()
        )
        self._actors.add(actor)
        return actor

    async def _begin(self, actor: Any) -> RayNode:
        """Wait until the actor is placed, and begin with it.

        Raises:
            ConfigError: It cannot run on its machine.
        """
        from ray.exceptions import RayError  # noqa: PLC0415

        network = self._cluster.credentials
        begin = ray_actor.BeginActor(
            spec=self._spec,
            path=str(self._directory.path),
            is_away=not self._cluster.is_here,
            is_shipped=self._is_shipped,
            address=LOOPBACK if self._cluster.is_here else "",
            ca=network.ca if network is not None else b"",
            token=network.token if network is not None else "",
        )
        try:
            data = await answer(actor.begin.remote(encode(begin)))
        except RayError as error:
            raise _cannot_run(error) from None
        assert isinstance(data, bytes)
        ready = decode(data, ActorReady)
        if ready.version != __version__:
            raise ConfigError(
                f"strata is {ready.version} on {ready.address} and {__version__} here; install the same version on "
                f"all nodes",
                field="engine",
            )
        if ready.refusal:
            raise ConfigError(f"{ready.address}: {ready.refusal}")
        self._num_created += 1
        return RayNode(
            actor,
            ready,
            name=f"ray-{self._num_created}" + ("" if self._cluster.is_here else f" ({ready.address})"),
            logs=None if self._cluster.is_here else self._directory,
            devices=self._devices,
        )

    def _devices(self, host: str) -> Sequence[str]:
        if self._are_shared:
            return []
        per_actor = [node.own_devices for node in self._joined if node.host == host]
        return visible_devices(per_actor, self._spec.gpus_per_worker)

    def _report(self, error: ConfigError, num_failed: int) -> None:
        log.warning("an actor on the Ray cluster cannot be used: %s", error.message)
        if self._nodes is None and not self._joined and num_failed >= MAX_FAILED_STARTS:
            self._problem = error
            self._changed.set()

    def _end(self, actor: Any) -> None:
        import ray  # noqa: PLC0415

        self._actors.discard(actor)
        with contextlib.suppress(Exception):  # it has ended, or the cluster has
            ray.kill(actor)


def _cannot_run(error: Exception) -> ConfigError:
    text = str(error)
    if "No module named 'strata'" in text:
        return ConfigError(f"strata is not installed on all nodes of the Ray cluster; {INSTALL} there", field="engine")
    return ConfigError(f"an actor did not start ({_shorten(error)}); see the logs of the Ray cluster", field="engine")


def _shorten(error: Exception) -> str:
    """Return the end of a long Ray error, which has the reason."""
    return printable(" ".join(str(error).split())[-MAX_REASON:], max_chars=MAX_REASON)
