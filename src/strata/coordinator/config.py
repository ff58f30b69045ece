"""The settings of a coordinator. A config that exists is valid; an error says how to fix it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from strata.coordinator import timeouts
from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """When a worker is declared dead."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a worker."""
    suspicion_s: float = 0.5
    """Seconds that a worker has to reconnect after its connection was reset."""
    lease_s: float = 5.0
    """A worker that is silent for this long is dead. Must be at least two heartbeats, so that one may be lost."""
    step_timeout_s: float = 600.0
    """A worker in state TRAINING that makes no step for this long is hung, even if it sends heartbeats. 0 disables the
    watchdog."""
    tick_s: float = 0.1
    """Seconds between two checks of leases and deadlines."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "suspicion_s", "lease_s", "tick_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"lease.{name}={getattr(self, name)} must be greater than 0", field=f"lease.{name}")
        if self.heartbeat_s * 2 > self.lease_s:
            raise ConfigError(
                f"lease.lease_s={self.lease_s} is shorter than two heartbeats (lease.heartbeat_s={self.heartbeat_s}); "
                f"raise lease_s to at least {self.heartbeat_s * 2}",
                field="lease.lease_s",
            )
        if self.suspicion_s > self.lease_s:
            raise ConfigError(
                f"lease.suspicion_s={self.suspicion_s} is longer than lease.lease_s={self.lease_s}, "
                "so a reset connection would have no effect; lower it",
                field="lease.suspicion_s",
            )
        if self.step_timeout_s and self.step_timeout_s <= self.lease_s:
            raise ConfigError(
                f"lease.step_timeout_s={self.step_timeout_s} is not greater than lease.lease_s={self.lease_s};  "
                "raise it, or set it to 0 to disable the watchdog",
                field="lease.step_timeout_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierConfig:
    timeout_s: float = 300.0
    """Seconds that a barrier waits if its callers set no timeout."""
    max_timeout_s: float = 86_400.0
    """The longest timeout that a caller may set."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= self.max_timeout_s:
            raise ConfigError(
                f"barrier.timeout_s={self.timeout_s} must be greater than 0 and at most "
                f"barrier.max_timeout_s={self.max_timeout_s}",
                field="barrier.timeout_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    snapshot_every: int = 10_000
    """Events between two snapshots: the maximum that a restart replays."""
    history_events: int = 10_000
    """Events kept behind the newest snapshot, for `strata journal replay`."""

    def __post_init__(self) -> None:
        if self.snapshot_every < 1:
            raise ConfigError("journal.snapshot_every must be at least 1", field="journal.snapshot_every")
        if self.history_events < 0:
            raise ConfigError("journal.history_events must not be negative", field="journal.history_events")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipConfig:
    """Which of several coordinators on one state leads."""

    leader_lease_s: float = 5.0
    """PostgreSQL: a standby replaces a leader that has not renewed its lease for this long."""
    poll_s: float = 0.1
    """Seconds between two attempts of a standby to lead."""

    def __post_init__(self) -> None:
        if not self.leader_lease_s >= 0.5:
            raise ConfigError(
                f"leadership.leader_lease_s={self.leader_lease_s} leaves no time to renew it; set it to 0.5 or more",
                field="leadership.leader_lease_s",
            )
        if not 0 < self.poll_s <= self.leader_lease_s:
            raise ConfigError(
                f"leadership.poll_s={self.poll_s} must be greater than 0 and at most "
                f"leadership.leader_lease_s={self.leader_lease_s}",
                field="leadership.poll_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what callers may request, so that no caller can exhaust the coordinator."""

    max_jobs: int = 1_000
    max_workers_per_job: int = 100_000
    max_datasets_per_job: int = 1_000
    max_shards_per_dataset: int = 1_000_000
    max_shards_per_reply: int = 10_000
    max_shards_per_ack: int = 10_000
    max_workers_per_reply: int = 10_000
    max_open_barriers_per_job: int = 10_000
    max_released_barriers_per_job: int = 10_000
    """Releases remembered per generation; the oldest are dropped first."""
    max_open_checkpoints_per_job: int = 16
    max_checkpoints_per_job: int = 100
    """Committed checkpoints remembered; the oldest are dropped first."""
    max_pending_commands_per_worker: int = 64
    max_series_per_worker: int = 32
    max_points_per_series: int = 256
    max_metadata_bytes: int = 65_536
    """Size of one rank's metadata for a checkpoint, or of the arguments of a command."""
    max_checkpoint_bytes: int = 4 * 1024 * 1024
    """Hashes and metadata of one checkpoint, over all ranks."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Size of an answer, or of a frame on a bare connection. Readers may send 64 KiB."""
    max_grpc_message_bytes: int = 1024 * 1024
    """Size of a request through gRPC, which buffers this much for every session and for 64 unary calls."""
    max_message_elements: int = 250_000
    """Elements in the repeated fields of one request or frame, such as shards or barrier members."""
    max_receive_bytes: int = 128 * 1024 * 1024
    """Total size of frames on bare connections that are not processed yet; beyond this, the oldest are dropped."""
    max_unread_bytes: int = 256 * 1024 * 1024
    """Total size of answers that clients have not read; beyond this, the session with the most is dropped."""
    max_calls_per_s: int = 100_000
    """Calls per second of one session, or of the unary calls of one machine; further calls are refused."""
    max_unary_calls: int = 10_000
    """Unary calls in progress, including those that wait at a barrier; one machine may have half of them."""
    max_http_requests_per_s: int = 200
    """HTTP requests per second from one machine; further requests get status 429. Health checks are not counted."""
    max_sessions: int = 10_000
    max_grpc_sessions: int = 1_000
    """How many of these may use gRPC; readers may have 64."""
    max_session_backlog: int = 65_536
    """Unread answers of one session; beyond this it is dropped."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name}={getattr(self, name)} must be at least 1", field=f"limits.{name}")
        if self.max_receive_bytes < self.max_message_bytes:
            raise ConfigError(
                f"limits.max_receive_bytes={self.max_receive_bytes} is below limits.max_message_bytes="
                f"{self.max_message_bytes}, so the largest frame could not be received; raise it",
                field="limits.max_receive_bytes",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How bulk data travels between workers."""

    transport: Literal["tcp", "shm", "rdma"] = "tcp"
    device: str = ""
    """The RDMA device, such as `mlx5_0`."""
    port: int = 1
    """The port of the device."""

    def __post_init__(self) -> None:
        if self.transport != "tcp":
            raise ConfigError(
                f"network.transport={self.transport!r} is not available yet; use 'tcp', or omit the section",
                field="network.transport",
            )
        if not 1 <= self.port <= 255:
            raise ConfigError(
                f"network.port={self.port} must be a port of the device, between 1 and 255", field="network.port"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who may connect. Loopback and Unix sockets are open by default; every other address requires tokens and TLS."""

    certificate: str = ""
    """The certificate chain of the server, a PEM file."""
    key: str = ""
    """The private key of the server, a PEM file."""
    client_ca: str = ""
    """The certificate authority for client certificates, a PEM file. If set, every client must present a
    certificate."""
    tokens: str = ""
    """A file with a line `ROLE TOKEN` per token; reloaded when it changes."""
    hosts: tuple[str, ...] = ()
    """Further host names that HTTP accepts. Without tokens, it accepts only the names and addresses of this machine."""
    insecure: bool = False
    """Serve any address without tokens and TLS. Only for networks in which every machine is trusted."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("security.certificate and security.key belong together; set both", field="security.key")
        if self.client_ca and not self.certificate:
            raise ConfigError(
                "security.client_ca requires TLS; set security.certificate and security.key",
                field="security.client_ca",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """All settings of `coordinator.yaml`."""

    listen: str = "127.0.0.1:50051"
    """The gRPC address: HOST:PORT or unix:PATH. Port 0 picks a free port."""
    http: str = "127.0.0.1:51051"
    """The HTTP address: HOST:PORT, or `off`."""
    frames: str = "auto"
    """The address for sessions without HTTP/2: HOST:PORT or unix:PATH; `auto` for a free port beside gRPC's; or
    `off`."""
    state: str = ""
    """Path or database URL of the journal; empty for a file in the user's state directory; `memory` to store
    nothing."""
    standby: bool = False
    """Wait until no other coordinator leads this state, instead of refusing to start."""
    advertise: str = ""
    """The address that clients and standbys are given for this coordinator when it leads; empty for `listen`."""
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    barrier: BarrierConfig = field(default_factory=BarrierConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    leadership: LeadershipConfig = field(default_factory=LeadershipConfig)
    limits: Limits = field(default_factory=Limits)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        timeouts.check(self.lease, self.barrier)
