"""The chain of timeouts: what is rejected, and what follows from what."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from strata.coordinator import timeouts
from strata.coordinator.client import ClientConfig
from strata.coordinator.config import BarrierConfig, CoordinatorConfig, LeaseConfig
from strata.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "timeouts.md"


def seconds(config: CoordinatorConfig) -> dict[str, float]:
    return {link.name: link.seconds for link in timeouts.chain(config)}


def within(config: CoordinatorConfig) -> list[float | None]:
    return [found.within_s for found in timeouts.detections(config)]


def test_by_default_the_chain_rises_from_tick_to_restart() -> None:
    chain = seconds(CoordinatorConfig())

    assert list(chain) == ["tick", "suspicion", "heartbeat", "lease", "barrier", "restart"]
    assert all(one < next_one for one, next_one in itertools.pairwise(chain.values()))


def test_a_client_reconnects_well_within_suspicion() -> None:
    assert ClientConfig().max_backoff_s < LeaseConfig().suspicion_s


@pytest.mark.parametrize("timeout_s", [1.0, 5.0, 5.1])
def test_a_barrier_shorter_than_the_lease_is_refused_with_the_minimum(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=r"raise it above 5\.1") as refused:
        CoordinatorConfig(barrier=BarrierConfig(timeout_s=timeout_s))
    assert refused.value.field == "barrier.timeout_s"


def test_a_barrier_just_above_the_lease_is_accepted() -> None:
    assert seconds(CoordinatorConfig(barrier=BarrierConfig(timeout_s=5.2)))["barrier"] == 5.2


def test_a_tick_near_half_a_lease_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lower tick_s to 1\.25") as refused:
        CoordinatorConfig(lease=LeaseConfig(tick_s=1.3))
    assert refused.value.field == "lease.tick_s"


def test_a_restart_waits_for_the_longest_internal_timeout() -> None:
    lease, hung_off = LeaseConfig(step_timeout_s=1_000.0), LeaseConfig(step_timeout_s=0.0)

    assert timeouts.restart_s(lease, BarrierConfig()) == pytest.approx(1_005.1)
    assert timeouts.restart_s(hung_off, BarrierConfig()) == pytest.approx(305.1)


@pytest.mark.parametrize("lease", [LeaseConfig(), LeaseConfig(step_timeout_s=6.0), LeaseConfig(lease_s=200.0)])
def test_nothing_is_detected_later_than_a_restart(lease: LeaseConfig) -> None:
    config = CoordinatorConfig(lease=lease)

    assert max(found for found in within(config) if found) <= seconds(config)["restart"]


def test_detection_times_are_sums_of_the_chain() -> None:
    assert within(CoordinatorConfig()) == pytest.approx([0.6, 5.1, 601.1, 10.1])


def test_a_hung_worker_is_never_detected_without_a_watchdog() -> None:
    assert within(CoordinatorConfig(lease=LeaseConfig(step_timeout_s=0.0)))[2] is None


def test_the_page_names_each_link_with_its_default_and_each_detection() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    config = CoordinatorConfig()

    for link in timeouts.chain(config):
        assert f"| {link.name} | {link.seconds:g} s | {f'`{link.setting}`' if link.setting else 'follows'} |" in text
    for found in timeouts.detections(config):
        assert f"| {found.within_s:g} s |" in text
