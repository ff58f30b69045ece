"""The timeouts and limits of a client."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    connect_timeout_s: float = 10.0
    """Seconds that the first connection may take."""
    call_timeout_s: float = 30.0
    """Seconds that a call waits for its answer, across reconnects. Barriers add their own timeout."""
    backoff_s: float = 0.05
    """The first pause between two attempts to reconnect; pauses grow randomly up to `max_backoff_s`."""
    max_backoff_s: float = 0.25
    """Shorter than the coordinator's suspicion, so that a client reconnects in time."""
    silence_s: float = 3.0
    """With several addresses: a coordinator that owes an answer and is silent for this long is abandoned for the next
    one."""
    frames: bool = True
    """Use bare connections if the coordinator offers them (see docs/wire-protocol.md); they cost a tenth of gRPC's."""
    max_calls_per_frame: int = 4_096
    max_message_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "frames" and not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be greater than 0", field=name)
