"""Scans over many tensors, each request for a while: what is known stays known, and the next request continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.errors import CheckpointInvalid, ReadTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.checkpoint.format.manifest import TensorEntry
    from strata.dashboard.explorer.limits import Budget


@dataclass(slots=True)
class Scan:
    """How far a scan over many tensors has come."""

    num_needed: int = 0
    """Tensors whose answer needs data."""
    num_done: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    """Tensor → why it was skipped."""

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_needed


def scan_tensors(
    problems: dict[tuple[str, str], str],
    question: str,
    needed: Sequence[TensorEntry],
    answer: Callable[[TensorEntry], object],
    is_known: Callable[[TensorEntry], bool],
    budget: Budget,
    *,
    num_sides: int = 1,
) -> Scan:
    """Answer a question for each tensor until the scan's time is over; keep reasons why one has no answer.

    At least one is answered, so that repeated requests complete even if each waited for a thread for long.
    """
    is_first = True
    for tensor in needed:
        if is_known(tensor) or (question, tensor.name) in problems:
            continue
        if not is_first and budget.is_scan_over():
            break
        is_too_large = num_sides * tensor.num_bytes > budget.config.max_read_bytes
        if not is_first and not is_too_large and not budget.can_charge((num_sides + 1) * tensor.num_bytes):
            break
        try:
            answer(tensor)
        except CheckpointInvalid as error:
            problems[question, tensor.name] = error.message
        except ReadTooLarge as error:
            if not is_first and not is_too_large:
                break  # it may fit into the next request
            problems[question, tensor.name] = error.message
        is_first = False
    skipped = {tensor.name: problems[question, tensor.name] for tensor in needed if (question, tensor.name) in problems}
    num_done = sum(1 for tensor in needed if tensor.name in skipped or is_known(tensor))
    return Scan(len(needed), num_done, skipped)
