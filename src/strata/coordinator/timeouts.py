"""One chain of timeouts: heartbeat < lease < barrier < restart, with suspicion as the short cut.

Each link waits for the one before it to have its say. A lease outlasts two heartbeats, so one may be lost. A barrier
outlasts a lease, so that who died is named as dead, and not as late. Whoever restarts a job from outside waits longer
than all of these, because until then the job may still mend itself.

Suspicion stands beside the chain, between the tick and the lease. Silence proves little, so it takes a whole lease to
convict; a connection that was reset is evidence, so its owner gets only the time that a reconnect takes. That may be
less than one heartbeat, and by default is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError

if TYPE_CHECKING:
    from strata.coordinator.config import BarrierConfig, CoordinatorConfig, LeaseConfig

MIN_TICKS_PER_LEASE = 4
"""A pause of half a lease counts as our own standstill, so ticks must come well within that."""


@dataclass(frozen=True, slots=True)
class Link:
    """One span of time, in the order of the chain."""

    name: str
    seconds: float
    setting: str
    """What sets it; empty: it follows from the others."""
    means: str
    follows: str
    """Why it stands where it does."""


@dataclass(frozen=True, slots=True)
class Detection:
    """How long a kind of death goes unnoticed at the most, while the coordinator runs."""

    death: str
    within_s: float | None
    """None: never, the watch is switched off."""
    sum_of: str


def check(lease: LeaseConfig, barrier: BarrierConfig) -> None:
    """
    Raises:
        ConfigError: Two links stand in the wrong order; says which to move, and where to.
    """
    if lease.tick_s * MIN_TICKS_PER_LEASE > lease.lease_s:
        raise ConfigError(
            f"lease.tick_s={lease.tick_s} is too coarse for lease.lease_s={lease.lease_s}: a pause of half a lease is "
            f"taken for a standstill of the coordinator; lower tick_s to {lease.lease_s / MIN_TICKS_PER_LEASE:g}",
            field="lease.tick_s",
        )
    if barrier.timeout_s <= lease.lease_s + lease.tick_s:
        raise ConfigError(
            f"barrier.timeout_s={barrier.timeout_s} does not outlast lease.lease_s={lease.lease_s}, so a barrier would "
            f"give up on a dead worker before it is known to be dead; raise it above {lease.lease_s + lease.tick_s:g}",
            field="barrier.timeout_s",
        )


def restart_s(lease: LeaseConfig, barrier: BarrierConfig) -> float:
    """After this long without progress nobody inside will mend the job any more."""
    return max(barrier.timeout_s, lease.step_timeout_s) + lease.lease_s + lease.tick_s


def chain(config: CoordinatorConfig) -> list[Link]:
    lease, barrier = config.lease, config.barrier
    return [
        Link(
            "tick",
            lease.tick_s,
            "lease.tick_s",
            "leases and deadlines are looked at this often",
            f"at most a {MIN_TICKS_PER_LEASE}th of the lease; every verdict may come one tick late",
        ),
        Link(
            "suspicion",
            lease.suspicion_s,
            "lease.suspicion_s",
            "a worker whose connection was reset has this long to come back",
            "the short cut: a reset is evidence, so this may be under a heartbeat; at most the lease, and above the "
            "clients' longest pause between two attempts to reconnect (0.25 s unless they say otherwise)",
        ),
        Link(
            "heartbeat",
            lease.heartbeat_s,
            "lease.heartbeat_s",
            "workers are asked to say this often that they are alive",
            "at most half the lease",
        ),
        Link(
            "lease",
            lease.lease_s,
            "lease.lease_s",
            "a worker silent for this long is dead: a new generation begins without it",
            f"at least two heartbeats, so that one may be lost; here {lease.lease_s / lease.heartbeat_s:.3g} fit in",
        ),
        Link(
            "barrier",
            barrier.timeout_s,
            "barrier.timeout_s",
            "a barrier whose callers name no time of their own gives up after this, and names the missing",
            "above lease + tick, so that a dead member ends it as dead, and not as late",
        ),
        Link(
            "restart",
            restart_s(lease, barrier),
            "",
            "a launcher, operator or person who sees no progress should not restart the whole job before this",
            "the longer of barrier and lease.step_timeout_s, then one lease and one tick: every verdict inside is in",
        ),
    ]


def detections(config: CoordinatorConfig) -> list[Detection]:
    lease = config.lease
    hung = lease.step_timeout_s
    return [
        Detection("connection closed (process died, kill -9)", lease.suspicion_s + lease.tick_s, "suspicion + tick"),
        Detection("silent (machine gone, network cut, frozen)", lease.lease_s + lease.tick_s, "lease + tick"),
        Detection(
            "hung (beats, says TRAINING, makes no step)",
            hung + lease.heartbeat_s + lease.tick_s if hung else None,
            "lease.step_timeout_s + heartbeat + tick" if hung else "switched off: lease.step_timeout_s is 0",
        ),
        Detection(
            "silent, and the coordinator was restarted meanwhile",
            2 * lease.lease_s + lease.tick_s,
            "lease + a fresh lease after the restart + tick (and the time that it was away)",
        ),
    ]


def explained(config: CoordinatorConfig) -> dict[str, Any]:
    """For `--explain --json`."""
    return {
        "chain": [asdict(link) for link in chain(config)],
        "detection": [asdict(detection) for detection in detections(config)],
    }
