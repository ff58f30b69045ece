"""Our own part of a checkpoint, beside the script's: step and epoch, positions of loaders, random generators. With it,
training resumes exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.train import rng

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.train.loaders import Loaders

OURS = "strata"
"""Name of our own part."""


def own_state(loaders: Loaders, *, step: int, epoch: int, world_size: int) -> dict[str, Any]:
    """Return our part for a checkpoint of this step."""
    return {
        "step": step,
        "epoch": epoch,
        "world_size": world_size,
        **loaders.state_dict(),
        "generators": rng.take(),
    }


def put_generators(state: Mapping[str, Any], rank: int) -> None:
    """Restore the random generators. A rank that the checkpoint does not have derives its own."""
    if rank < int(state["world_size"]):
        rng.put(state["generators"])
    else:
        rng.derive(state["generators"], rank)


class OwnState:
    """Receives our part while a checkpoint is read. The context applies it once everything was read."""

    def __init__(self) -> None:
        self.state: Mapping[str, Any] = {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state
