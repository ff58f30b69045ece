"""The loader without torch: iterate over it, ask it for its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.data.dataset import Dataset


class PlainLoader:
    """What `create_dataloader` returns where torch is not installed: the same protocol without its base class."""

    has_global_state = True
    """The same on all ranks, of any number of them."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self.dataset.begin()

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its rows all ranks together have been given."""
        return self.dataset.epoch, self.dataset.position

    @property
    def is_last(self) -> bool:
        """Whether the batch that was delivered last is the last one of its epoch."""
        return self.dataset.position == self.dataset.plan.num_rows

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        self.dataset.load_state_dict(state, on_change=on_change)
