"""How patient a client is."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    connect_timeout_s: float = 10.0
    """How long the first connection may take."""
    call_timeout_s: float = 30.0
    """How long a call waits for its answer, reconnecting as often as it takes. Barriers add their own time."""
    backoff_s: float = 0.05
    """The first pause between two attempts to reconnect; pauses grow, with chance in them, up to the next."""
    max_backoff_s: float = 0.25
    """Below the coordinator's suspicion, so that a client that lost its connection is back in time."""
    silence_s: float = 3.0
    """With several addresses: who owes an answer and says nothing at all for this long is left for the next."""
    frames: bool = True
    """Bare connections where the coordinator offers them (see docs/wire-protocol.md); they cost a tenth of gRPC's."""
    max_calls_per_frame: int = 4_096
    max_message_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "frames" and not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0", field=name)
