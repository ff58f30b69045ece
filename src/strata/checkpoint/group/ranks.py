"""Which of several processes this one is, and the names that all of them work out alike."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from xxhash import xxh3_64_hexdigest

from strata.checkpoint.format.part import MAX_RANKS
from strata.errors import ConfigError
from strata.identity import TORCHRUN, Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_SESSION_LENGTH = 1_000
_CURE = "start with torchrun, which sets them, or pass Ranks(rank=…, size=…, session=…)"


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Which of how many this process is."""

    rank: int = 0
    size: int = 1
    session: str = ""
    """What all ranks of one start have in common, and no other start ever had."""
    timeout_s: float = 600.0
    """How long rank 0 waits for the others once it has written its own part."""

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: There is no such rank, or no session for several.
        """
        if not 1 <= self.size <= MAX_RANKS:
            raise ConfigError(f"size={self.size} ranks cannot save together; 1 to {MAX_RANKS} can", field="size")
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank={self.rank} is not one of {self.size}; they are 0 to {self.size - 1}", field="rank"
            )
        if self.size > 1 and not 0 < len(self.session) <= _MAX_SESSION_LENGTH:
            raise ConfigError(
                f"{self.size} ranks need a session of 1 to {_MAX_SESSION_LENGTH} characters that all of them share and "
                "every start has anew; Ranks.from_torch() makes one",
                field="session",
            )
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s={self.timeout_s} must be a time above 0", field="timeout_s")

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_environment(cls, env: Mapping[str, str], *, timeout_s: float = 600.0) -> Ranks:
        """As torchrun sets it: RANK, WORLD_SIZE, and a session from its run's id. STRATA_SESSION names one instead.

        Raises:
            ConfigError: Something is missing, or would be the same for the next start.
        """
        identity = Identity.from_environment(env, launchers=(TORCHRUN,), cure=_CURE)
        if identity is None:
            raise ConfigError(f"RANK and WORLD_SIZE are not set; {_CURE}", field="rank")
        session = env.get("STRATA_SESSION", "")
        if not session and identity.world_size > 1 and not identity.run:
            raise ConfigError(
                f"TORCHELASTIC_RUN_ID is {env.get('TORCHELASTIC_RUN_ID') or 'not set'!r}, so the next start would have "
                "the same session; give torchrun a new --rdzv-id for every start, set STRATA_SESSION on all ranks, or "
                "use Ranks.from_torch()",
                field="session",
            )
        return cls.of(identity, session=session, timeout_s=timeout_s)

    @classmethod
    def of(cls, identity: Identity, *, session: str = "", timeout_s: float = 600.0) -> Ranks:
        """Return the ranks of an identity, with its session unless another one is given.

        Raises:
            ConfigError: More ranks than can save together.
        """
        return cls(
            rank=identity.rank,
            size=identity.world_size,
            session=session or (identity.session if identity.world_size > 1 else ""),
            timeout_s=timeout_s,
        )

    @classmethod
    def from_torch(cls, *, timeout_s: float = 600.0) -> Ranks:
        """Of the process group that torch has; all ranks must call it, rank 0 makes the session.

        Raises:
            ConfigError: There is no process group.
        """
        import torch  # noqa: PLC0415 - whoever calls this has torch
        from torch import distributed  # noqa: PLC0415

        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "torch has no process group; call torch.distributed.init_process_group() first", field="ranks"
            )
        device = "cuda" if str(distributed.get_backend()) == "nccl" else "cpu"
        session = torch.randint(0, 256, (16,), dtype=torch.uint8, generator=_fresh(torch)).to(device)
        distributed.broadcast(session, src=0)
        return cls(
            rank=distributed.get_rank(),
            size=distributed.get_world_size(),
            session=bytes(session.cpu().tolist()).hex(),
            timeout_s=timeout_s,
        )


def _fresh(torch: Any) -> Any:
    """Random numbers that no seed of the user's repeats, and that disturb none of theirs."""
    generator = torch.Generator()
    generator.seed()
    return generator


def checkpoint_id(ranks: Ranks, number: int, step: int) -> str:
    """The same on all ranks without a word: `number` counts the saves of this start. Alone, nobody need find it."""
    if ranks.size == 1:
        return f"step-{step:012d}-{secrets.token_hex(8)}"
    agreed = f"{ranks.session}\0{number}\0{step}"
    return f"step-{step:012d}-{xxh3_64_hexdigest(agreed.encode())}"
