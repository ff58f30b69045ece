"""A Ray cluster of several nodes on this machine's loopback, for tests that kill its nodes.

As a program, it is the cluster, and takes commands on stdin; it ends with the test. It needs a separate process, since
Ray decides at import whether it listens on the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Without this, Ray listens on all addresses, whatever the nodes are given."""
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2_000,
    "health_check_failure_threshold": 3,
}
"""Ray notices a lost node within seconds, and reschedules its bundles."""
SETTLE_S = 60.0
SMALL = {"object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}


class RayNodes:
    """Each node has room for as many workers as it has CPUs. The head, to which agents are connected, must not be
    killed.
    """

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        self.address = self._answer()["address"]
        self._raylets: list[int] = []

    def have(self, num_others: int) -> None:
        """Wait until Ray knows exactly this many nodes besides the head."""
        while len(self._raylets) < num_others:
            self._raylets.append(self._ask("add")["raylet"])
        while len(self._raylets) > num_others:
            self._kill(self._raylets[-1])
        self._ask("settle")

    def kill_node_of(self, pid: int) -> bool:
        """Kill the node of a process with SIGKILL, unless it is the head."""
        ancestors = {each.pid for each in psutil.Process(pid).parents()}
        theirs = [raylet for raylet in self._raylets if raylet in ancestors]
        for raylet in theirs:
            self._kill(raylet)
        return bool(theirs)

    def _kill(self, raylet: int) -> None:
        self._raylets.remove(raylet)
        self._ask("kill", raylet=raylet)

    def _ask(self, what: str, **more: Any) -> dict[str, Any]:
        assert self._program.stdin is not None
        print(json.dumps({"what": what, **more}), file=self._program.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Ignore what Ray itself prints."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"the Ray cluster has ended with {self._program.wait()}")


def actor_of(pid: int) -> psutil.Process:
    """Return the actor's process that started a worker."""
    return next(each for each in psutil.Process(pid).parents() if "NodeActor" in " ".join(each.cmdline()))


@contextlib.contextmanager
def ray_nodes(num_cpus: int = 1) -> Iterator[RayNodes]:
    """Start a cluster whose nodes have as many CPUs each."""
    place = tempfile.mkdtemp(prefix="ray-")  # paths of sockets must be short
    (Path(place) / "ray").mkdir()  # Ray records the current cluster here, but does not create the directory
    program = subprocess.Popen(
        [sys.executable, __file__, place, str(num_cpus)],
        env={**os.environ, **LOOPBACK_ONLY, "RAY_TMPDIR": place},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield RayNodes(program)
    finally:
        program.communicate(json.dumps({"what": "end"}) + "\n", timeout=60)
        shutil.rmtree(place, ignore_errors=True)


def _serve(place: Path, num_cpus: int) -> None:
    from ray.cluster_utils import Cluster

    small = {**SMALL, "num_cpus": num_cpus}
    head = {**small, "include_dashboard": False, "temp_dir": str(place), "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "end":  # or the end of the input, which forks of the test's process hold open
            break
        if order["what"] == "add":
            node = cluster.add_node(**small)
            raylet = node.all_processes["raylet"][0].process.pid
            nodes[raylet] = node
            print(json.dumps({"raylet": raylet}), flush=True)
        elif order["what"] == "settle":
            cluster.wait_for_nodes(SETTLE_S)
            print(json.dumps({"settled": True}), flush=True)
        else:
            cluster.remove_node(nodes.pop(order["raylet"]), allow_graceful=False)
            print(json.dumps({"killed": order["raylet"]}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
