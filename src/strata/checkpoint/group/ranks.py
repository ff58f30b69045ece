"""The rank of this process for checkpoints, and the ids of checkpoints, which all ranks compute alike."""

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
_CURE = "start the script with torchrun, which sets them, or pass Ranks(rank=…, size=…, session=…)"


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The rank of this process among those that save together."""

    rank: int = 0
    size: int = 1
    session: str = ""
    """A name that all ranks of one start share, and that no other start has used."""
    timeout_s: float = 600.0
    """How long rank 0 waits for the other ranks once it has written its own part."""

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: The rank is out of range, or several ranks have no session.
        """
        if not 1 <= self.size <= MAX_RANKS:
            raise ConfigError(f"size={self.size} is out of range; use 1 to {MAX_RANKS}", field="size")
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank={self.rank} is out of range for size={self.size}; use 0 to {self.size - 1}", field="rank"
            )
        if self.size > 1 and not 0 < len(self.session) <= _MAX_SESSION_LENGTH:
            raise ConfigError(
                f"{self.size} ranks need a session name of 1 to {_MAX_SESSION_LENGTH} characters that they share and "
                "that is new for every start; Ranks.from_torch() creates one",
                field="session",
            )
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(
                f"timeout_s={self.timeout_s} is invalid; use a number of seconds above 0", field="timeout_s"
            )

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_environment(cls, env: Mapping[str, str], *, timeout_s: float = 600.0) -> Ranks:
        """Read RANK and WORLD_SIZE as torchrun sets them, and STRATA_SESSION or torchrun's run id for the session.

        Raises:
            ConfigError: A variable is missing, or the session would be the same for the next start.
        """
        identity = Identity.from_environment(env, launchers=(TORCHRUN,), cure=_CURE)
        if identity is None:
            raise ConfigError(f"RANK and WORLD_SIZE are not set; {_CURE}", field="rank")
        session = env.get("STRATA_SESSION", "")
        if not session and identity.world_size > 1 and not identity.run:
            raise ConfigError(
                f"TORCHELASTIC_RUN_ID is {env.get('TORCHELASTIC_RUN_ID') or 'not set'!r}, so the next start would have "
                "the same session; pass torchrun a new --rdzv-id for every start, set STRATA_SESSION on all ranks, or "
                "use Ranks.from_torch()",
                field="session",
            )
        return cls.of(identity, session=session, timeout_s=timeout_s)

    @classmethod
    def of(cls, identity: Identity, *, session: str = "", timeout_s: float = 600.0) -> Ranks:
        """Return the ranks of an identity, with its session unless another one is given.

        Raises:
            ConfigError: There are more ranks than can save together.
        """
        return cls(
            rank=identity.rank,
            size=identity.world_size,
            session=session or (identity.session if identity.world_size > 1 else ""),
            timeout_s=timeout_s,
        )

    @classmethod
    def from_torch(cls, *, timeout_s: float = 600.0) -> Ranks:
        """Read the ranks of torch's process group. All ranks must call it; rank 0 creates the session.

        Raises:
            ConfigError: torch has no process group.
        """
        import torch  # noqa: PLC0415 - torch is optional
        from torch import distributed  # noqa: PLC0415

        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "torch has no process group; call torch.distributed.init_process_group() first", field="ranks"
            )
        device = "cuda" if str(distributed.get_backend()) == "nccl" else "cpu"
        session = torch.randint(0, 256, (16,), dtype=torch.uint8, generator=_fresh_generator(torch)).to(device)
        distributed.broadcast(session, src=0)
        return cls(
            rank=distributed.get_rank(),
            size=distributed.get_world_size(),
            session=bytes(session.cpu().tolist()).hex(),
            timeout_s=timeout_s,
        )


def _fresh_generator(torch: Any) -> Any:
    """Return a generator that is independent of the user's seeds and does not disturb them."""
    generator = torch.Generator()
    generator.seed()
    return generator


def new_id(step: int) -> str:
    """Return a new id: the step, for people and for sorting, and a random part, so that no id is used twice."""
    return f"step-{step:012d}-{secrets.token_hex(8)}"


def checkpoint_id(ranks: Ranks, number: int, step: int) -> str:
    """Return the id of a save, the same on all ranks; `number` counts the saves of this step in this start."""
    if ranks.size == 1:
        return new_id(step)
    agreed = f"{ranks.session}\0{number}\0{step}"
    return f"step-{step:012d}-{xxh3_64_hexdigest(agreed.encode())}"
