"""What a coordinator can be told. A config that exists is valid; a refusal names the cure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from strata.coordinator import timeouts
from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """When a worker counts as dead."""

    heartbeat_s: float = 1.0
    """How often workers are asked to beat."""
    suspicion_s: float = 0.5
    """How long a worker whose connection was reset has to come back."""
    lease_s: float = 5.0
    """A worker silent for this long is dead. Two beats must fit in, so that one may be lost."""
    step_timeout_s: float = 600.0
    """A worker that is TRAINING and makes no step for this long is hung, though it beats. 0: no watchdog."""
    tick_s: float = 0.1
    """How often leases and deadlines are looked at."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "suspicion_s", "lease_s", "tick_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"lease.{name}={getattr(self, name)} must be above 0", field=f"lease.{name}")
        if self.heartbeat_s * 2 > self.lease_s:
            raise ConfigError(
                f"lease.heartbeat_s={self.heartbeat_s} leaves no room for a lost beat in lease.lease_s={self.lease_s}; "
                f"raise lease_s to at least {self.heartbeat_s * 2}",
                field="lease.lease_s",
            )
        if self.suspicion_s > self.lease_s:
            raise ConfigError(
                f"lease.suspicion_s={self.suspicion_s} is longer than lease.lease_s={self.lease_s}, "
                "so a reset connection would never matter; lower it",
                field="lease.suspicion_s",
            )
        if self.step_timeout_s and self.step_timeout_s <= self.lease_s:
            raise ConfigError(
                f"lease.step_timeout_s={self.step_timeout_s} is not above lease.lease_s={self.lease_s}; "
                "raise it, or set it to 0 to switch the watchdog off",
                field="lease.step_timeout_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierConfig:
    timeout_s: float = 300.0
    """How long a barrier waits when its callers do not say."""
    max_timeout_s: float = 86_400.0
    """The longest wait a caller may ask for."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= self.max_timeout_s:
            raise ConfigError(
                f"barrier.timeout_s={self.timeout_s} must be above 0 and at most "
                f"barrier.max_timeout_s={self.max_timeout_s}",
                field="barrier.timeout_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    snapshot_every: int = 10_000
    """Events between two snapshots: what a restart replays at the most."""
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
    """PostgreSQL: a leader that has not renewed its lease for this long is replaced by a standby."""
    poll_s: float = 0.1
    """How often a standby looks whether it may lead."""

    def __post_init__(self) -> None:
        if not self.leader_lease_s >= 0.5:
            raise ConfigError(
                f"leadership.leader_lease_s={self.leader_lease_s} leaves no time to renew it; give at least 0.5",
                field="leadership.leader_lease_s",
            )
        if not 0 < self.poll_s <= self.leader_lease_s:
            raise ConfigError(
                f"leadership.poll_s={self.poll_s} must be above 0 and at most "
                f"leadership.leader_lease_s={self.leader_lease_s}",
                field="leadership.poll_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what callers may ask for, so that no caller can use up the coordinator."""

    max_jobs: int = 1_000
    max_workers_per_job: int = 100_000
    max_datasets_per_job: int = 1_000
    max_shards_per_dataset: int = 1_000_000
    max_shards_per_reply: int = 10_000
    max_shards_per_ack: int = 10_000
    max_workers_per_reply: int = 10_000
    max_open_barriers_per_job: int = 10_000
    max_released_barriers_per_job: int = 10_000
    """Releases remembered in a generation; the oldest are forgotten first."""
    max_open_checkpoints_per_job: int = 16
    max_checkpoints_per_job: int = 100
    """Committed checkpoints remembered; the oldest are forgotten first."""
    max_pending_commands_per_worker: int = 64
    max_series_per_worker: int = 32
    max_points_per_series: int = 256
    max_metadata_bytes: int = 65_536
    """Of one rank's word on a checkpoint, or of a command's arguments."""
    max_checkpoint_bytes: int = 4 * 1024 * 1024
    """Hashes and metadata of one checkpoint, all ranks together."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Of an answer, or of a frame on a bare connection. Readers may send 64 KiB."""
    max_grpc_message_bytes: int = 1024 * 1024
    """Of a request through gRPC, which holds as much of every session and of 64 unary calls while they arrive."""
    max_message_elements: int = 250_000
    """Of the repeated fields of one request, or of one frame: shards of a list, members of a barrier."""
    max_receive_bytes: int = 128 * 1024 * 1024
    """Frames on bare connections that have not been carried out yet, together; beyond this the oldest are dropped."""
    max_unread_bytes: int = 256 * 1024 * 1024
    """Answers that wait for their readers, of all sessions; beyond this the session with most of them is dropped."""
    max_calls_per_s: int = 100_000
    """Calls per second from one session or one peer's unary calls; beyond this they are refused."""
    max_unary_calls: int = 10_000
    """Under way at once, those that wait at a barrier included; one machine may have half of them."""
    max_http_requests_per_s: int = 200
    """Per second from one machine; beyond this they are refused with 429. Health is not counted."""
    max_sessions: int = 10_000
    max_grpc_sessions: int = 1_000
    """Of these, through gRPC; readers may have 64."""
    max_session_backlog: int = 65_536
    """Answers waiting for a session that does not read; beyond this it is dropped."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name}={getattr(self, name)} must be at least 1", field=f"limits.{name}")
        if self.max_receive_bytes < self.max_message_bytes:
            raise ConfigError(
                f"limits.max_receive_bytes={self.max_receive_bytes} is below limits.max_message_bytes="
                f"{self.max_message_bytes}, so the largest frame would never arrive; raise it",
                field="limits.max_receive_bytes",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How bulk data travels between workers."""

    transport: Literal["tcp", "shm", "rdma"] = "tcp"
    device: str = ""
    """The RDMA device, as `mlx5_0`."""
    port: int = 1
    """The port on that device."""

    def __post_init__(self) -> None:
        if self.transport != "tcp":
            raise ConfigError(
                f"network.transport={self.transport!r} is not built yet; use 'tcp', or leave the section out",
                field="network.transport",
            )
        if not 1 <= self.port <= 255:
            raise ConfigError(f"network.port={self.port} is a port of the device, 1 to 255", field="network.port")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who may connect. Loopback and Unix sockets are open by default; every other address needs tokens and TLS."""

    certificate: str = ""
    """The server's certificate chain, a PEM file."""
    key: str = ""
    """Its private key, a PEM file."""
    client_ca: str = ""
    """Authority of client certificates, a PEM file; when given, every client must show one."""
    tokens: str = ""
    """File with a line of ROLE TOKEN for each token; read again when it changes."""
    hosts: tuple[str, ...] = ()
    """Without tokens, HTTP answers to this machine's own names and addresses alone; further names to answer to."""
    insecure: bool = False
    """Serve any address without tokens and TLS. For networks in which everybody may do everything."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("security.certificate and security.key go together; give both", field="security.key")
        if self.client_ca and not self.certificate:
            raise ConfigError(
                "security.client_ca asks for client certificates, which needs TLS; give certificate and key",
                field="security.client_ca",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """`coordinator.yaml`, whole."""

    listen: str = "127.0.0.1:50051"
    """Where gRPC is served: HOST:PORT or unix:PATH. Port 0 picks a free one."""
    http: str = "127.0.0.1:51051"
    """Where HTTP is served: HOST:PORT, or `off`."""
    frames: str = "auto"
    """Where sessions are served without HTTP/2: HOST:PORT or unix:PATH; `auto`: a free port beside gRPC's; or `off`."""
    state: str = ""
    """Path or database URL of the journal; empty: in the user's state directory; `memory`: kept nowhere."""
    standby: bool = False
    """Wait until no other coordinator leads this state, instead of refusing to start."""
    advertise: str = ""
    """Where clients and standbys are told to find this coordinator when it leads; empty: where it listens."""
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    barrier: BarrierConfig = field(default_factory=BarrierConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    leadership: LeadershipConfig = field(default_factory=LeadershipConfig)
    limits: Limits = field(default_factory=Limits)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        timeouts.check(self.lease, self.barrier)
