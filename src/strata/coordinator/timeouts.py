"""The chain of timeouts: heartbeat < lease < barrier < restart, with suspicion as the shortcut.

Each timeout leaves time for the one before it. A lease is longer than two heartbeats, so that one may be lost. A
barrier waits longer than a lease, so that a dead member is reported as dead and not as late. An external supervisor
waits longer than all of these before it restarts a job, because until then the job may still recover.

Suspicion lies between the tick and the lease. Silence is weak evidence, so a whole lease must pass; a reset connection
is strong evidence, so the worker only gets the time to reconnect. That may be less than one heartbeat, and is by
default.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata.coordinator.config import BarrierConfig, CoordinatorConfig, LeaseConfig

MIN_TICKS_PER_LEASE = 4
"""A pause of half a lease is taken for a pause of the coordinator itself, so ticks must be much closer together."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """One timeout of the chain."""

    name: str
    seconds: float
    setting: str
    """The setting that controls it; empty if it follows from the others."""
    means: str
    follows: str
    """Why it has this place in the chain."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The longest time that a kind of failure goes undetected while the coordinator runs."""

    death: str
    within_s: float | None
    """None if the watchdog for it is disabled."""
    sum_of: str


def check(lease: LeaseConfig, barrier: BarrierConfig) -> None:
    """Check the order of the timeouts.

    Raises:
        ConfigError: Two timeouts are in the wrong order; the message names the setting to change.
    """
    if lease.tick_s * MIN_TICKS_PER_LEASE > lease.lease_s:
        raise ConfigError(
            f"lease.tick_s={lease.tick_s} is too coarse for lease.lease_s={lease.lease_s}: a pause of half a lease is "
            f"taken for a pause of the coordinator itself;  lower tick_s to {lease.lease_s / MIN_TICKS_PER_LEASE:g}",
            field="lease.tick_s",
        )
    if barrier.timeout_s <= lease.lease_s + lease.tick_s:
        raise ConfigError(
            f"barrier.timeout_s={barrier.timeout_s} does not exceed lease.lease_s={lease.lease_s}, so a barrier would "
            f"time out before a dead worker is declared dead;  raise it above {lease.lease_s + lease.tick_s:g}",
            field="barrier.timeout_s",
        )


def restart_s(lease: LeaseConfig, barrier: BarrierConfig) -> float:
    """Return the time without progress after which the job will not recover by itself."""
    return max(barrier.timeout_s, lease.step_timeout_s) + lease.lease_s + lease.tick_s


def chain(config: CoordinatorConfig) -> list[Timeout]:
    lease, barrier = config.lease, config.barrier
    return [
        Timeout(
            "tick",
            lease.tick_s,
            "lease.tick_s",
            "how often the coordinator checks leases and deadlines",
            f"at most 1/{MIN_TICKS_PER_LEASE} of the lease; every decision may be one tick late",
        ),
        Timeout(
            "suspicion",
            lease.suspicion_s,
            "lease.suspicion_s",
            "how long a worker has to reconnect after its connection is reset",
            "a reset is strong evidence, so this may be shorter than a heartbeat; at most the lease, and longer than "
            "the clients' longest pause between two attempts to reconnect (0.25 s by default)",
        ),
        Timeout(
            "heartbeat",
            lease.heartbeat_s,
            "lease.heartbeat_s",
            "how often workers send heartbeats",
            "at most half the lease",
        ),
        Timeout(
            "lease",
            lease.lease_s,
            "lease.lease_s",
            "a worker that is silent for this long is dead, and a new generation starts without it",
            f"at least two heartbeats, so that one may be lost; this lease has {lease.lease_s / lease.heartbeat_s:.3g}",
        ),
        Timeout(
            "barrier",
            barrier.timeout_s,
            "barrier.timeout_s",
            "how long a barrier waits if its callers set no timeout; then it names the missing workers",
            "longer than lease + tick, so that a dead member is reported as dead and not as late",
        ),
        Timeout(
            "restart",
            restart_s(lease, barrier),
            "",
            "how long an external supervisor should see no progress before it restarts the whole job",
            "the longer of barrier and lease.step_timeout_s, plus a lease and a tick: after every other timeout",
        ),
    ]


def detections(config: CoordinatorConfig) -> list[Detection]:
    lease = config.lease
    hung = lease.step_timeout_s
    return [
        Detection(
            "connection closed (the process exited or was killed)", lease.suspicion_s + lease.tick_s, "suspicion + tick"
        ),
        Detection("silent (machine or network lost, process frozen)", lease.lease_s + lease.tick_s, "lease + tick"),
        Detection(
            "hung (heartbeats with state TRAINING, but no step)",
            hung + lease.heartbeat_s + lease.tick_s if hung else None,
            "lease.step_timeout_s + heartbeat + tick" if hung else "disabled: lease.step_timeout_s is 0",
        ),
        Detection(
            "silent, and the coordinator restarts meanwhile",
            2 * lease.lease_s + lease.tick_s,
            "lease + a fresh lease after the restart + tick (plus the coordinator's downtime)",
        ),
    ]


def explained(config: CoordinatorConfig) -> dict[str, Any]:
    """Return the chain and the detection times, for `--explain --json`."""
    return {
        "chain": [asdict(link) for link in chain(config)],
        "detection": [asdict(detection) for detection in detections(config)],
    }
