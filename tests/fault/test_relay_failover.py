"""Relays whose coordinator disappears: their health, and how they find its successor."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from servers import CALM, DEADLINE_S, EAGER_CLIENT, CoordinatorProcess, Nursery, free_port, until

from strata.coordinator.client import CoordinatorClient

SERVICE = "strata.v1.Coordinator"
PATIENT = {"backoff_s": 0.01, "max_backoff_s": 0.1, "silence_s": 1.0}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def start_relay(nursery: Nursery, upstream: str) -> str:
    address = f"127.0.0.1:{free_port()}"
    relay = nursery.fork("relay_children:relay", settings={"upstream": upstream, "listen": address, "client": PATIENT})
    assert relay.receive() == {"grpc": address, "upstream": upstream}
    return address


def health_of(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(asked, timeout=DEADLINE_S).status


def wait_health(address: str, status: int, what: str) -> None:
    for service in ("", SERVICE):
        until(lambda service=service: health_of(address, service) == status, what)


def test_the_health_of_a_relay_is_that_of_its_connection_to_the_coordinator(
    nursery: Nursery, coordinator: CoordinatorProcess
) -> None:
    lower = start_relay(nursery, coordinator.address)
    wait_health(lower, SERVING, "a relay that is connected serves")
    coordinator.kill()
    wait_health(lower, NOT_SERVING, "a relay without coordinator does not serve")
    coordinator.start()
    wait_health(lower, SERVING, "a relay serves again when the coordinator is back")


@pytest.mark.parametrize("through", ["one relay", "two relays"])
def test_a_relay_with_two_upstreams_follows_the_leader_and_loses_no_worker(
    nursery: Nursery, tmp_path: Path, through: str
) -> None:
    settings = {"lease": CALM, "leadership": {"poll_s": 0.02}}
    leader = CoordinatorProcess(nursery, tmp_path, **settings)
    standby = CoordinatorProcess(nursery, tmp_path, standby=True, **settings)
    leader.start()
    standby.start()
    address = start_relay(nursery, f"{standby.address},{leader.address}")
    if through == "two relays":
        address = start_relay(nursery, address)
    with CoordinatorClient(address, config=EAGER_CLIENT) as client:
        workers = [client.register_worker(f"w{n}") for n in range(2)]
        client.register_dataset("d", total_samples=100, shard_size=10)
        for worker in workers:
            worker.ack(worker.shards("d")[:1])
        before = client.list_workers()
        leader.kill()
        assert standby.child.receive()["leads"] is True
        for worker in workers:
            worker.ack(worker.shards("d")[:1])
        after = client.list_workers()
        (dataset,) = client.list_datasets()
        assert dataset.num_done == 4
        assert after.generation == before.generation
        assert [(w.worker_id, w.incarnation) for w in after.workers] == [("w0", 1), ("w1", 2)]
        assert [worker.lost for worker in workers] == [None, None]
    wait_health(address, SERVING, "the relay serves under the new leader")
