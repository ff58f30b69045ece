"""What one rank has written, told to whoever commits: the files, and where each tensor or slice of one lies in them.

A part is an object of its own beside the data (`part-00003.json`), so that it outlives its writer and no message is ever
too large for it. It is read with the same distrust as a manifest.
"""

from __future__ import annotations

from typing import Any

import msgspec

from strata.checkpoint.manifest import DataFile, TensorEntry


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    """Its id."""
    rank: int
    files: tuple[DataFile, ...]
    tensors: tuple[TensorEntry, ...]
    """What this rank has written: `shape` is that of the whole tensor, the slices count the files above."""
    sharded: tuple[str, ...] = ()
    """Of these, the tensors that other ranks hold other slices of. All else the rank holds whole."""
    structure: Any
    """Of the rank's whole state, see `tree.py`; also of tensors that another rank writes for all."""
    full_bytes: int
    """Of the rank's share of the state."""
    written_bytes: int


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"
