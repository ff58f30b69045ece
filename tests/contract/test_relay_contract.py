"""The coordinator's contract through relays: workers cannot distinguish them from the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_coordinator_contract as direct
from coordinator_contract import CONFIG, DEADLINE_S, MAX_MESSAGE_BYTES, REFUSALS, Refused, World

from strata.coordinator.client import ClientConfig
from strata.coordinator.client._sync import shared_loop
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.relay.relay import RelayConfig, RelayServer


@contextlib.contextmanager
def relay(upstream: str, path: Path) -> Iterator[str]:
    """Relays run in this process, on the loop of the coordinator: the wire is real, the processes are not."""
    config = RelayConfig(
        upstream=upstream,
        listen=f"unix:{path}",
        limits=CONFIG.limits,
        client=ClientConfig(max_message_bytes=MAX_MESSAGE_BYTES, call_timeout_s=DEADLINE_S),
    )
    server = shared_loop().run(_started(config))
    try:
        yield f"unix:{path}"
    finally:
        shared_loop().run(server.stop())


async def _started(config: RelayConfig) -> RelayServer:
    server = RelayServer(config)
    await server.start()
    return server


class ThroughRelays(direct.TestDirect):
    def test_a_bad_call_is_refused_with_its_reason_and_changes_nothing(self, world: World) -> None:
        """Make all calls in one world, since none of them changes it; a separate world for each would take minutes."""
        requests = [(refusal, refusal.request(world)) for refusal in REFUSALS]
        before = world.everything()
        for refusal, request in requests:
            with pytest.raises(Refused) as refused:
                world.call(refusal.method, request)
            found = (refused.value.code, refused.value.kind, refused.value.field)
            assert found == (refusal.code, refusal.kind, refusal.field), refusal.name
            assert len(refused.value.message) > 20
        assert world.everything() == before


class TestOneRelay(ThroughRelays):
    @pytest.fixture
    def address(self, coordinator: EmbeddedCoordinator) -> Iterator[str]:
        directory = Path(coordinator.address.removeprefix("unix:")).parent
        with relay(coordinator.address, directory / "relay") as address:
            yield address


class TestTwoRelays(ThroughRelays):
    @pytest.fixture
    def address(self, coordinator: EmbeddedCoordinator) -> Iterator[str]:
        directory = Path(coordinator.address.removeprefix("unix:")).parent
        with relay(coordinator.address, directory / "upper") as upper, relay(upper, directory / "lower") as lower:
            yield lower
