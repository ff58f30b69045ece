"""The loader as a torch `DataLoader`. Imported only where torch is installed."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from strata.errors import InvalidArgument
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from strata.data.dataset import Dataset
    from strata.data.runtime.iterator import Pass


class TorchIterable(IterableDataset[Any]):
    """Marks a dataset as an `IterableDataset`, and refuses torch workers, which would read every row several times."""

    begin: Any

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            raise InvalidArgument(
                f"worker {worker.id} of a torch DataLoader iterates over this dataset, and each of its "
                f"{worker.num_workers} processes would read all rows. Use the loader that create_dataloader returned: "
                "its num_workers decode in threads",
                field="num_workers",
            )
        batches: Iterator[Any] = self.begin()
        return batches


@functools.cache
def iterable(kind: type[Dataset]) -> type[Dataset]:
    """Return a subclass that is also an `IterableDataset`."""
    return type(kind.__name__, (TorchIterable, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class Loader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` over whole batches, with the state of a `StatefulDataLoader`.

    The dataset decodes in its own threads and assigns rows to ranks itself. Torch therefore starts no processes, and
    Accelerate's `prepare` returns the loader unchanged instead of sharding it again.
    """

    dataset: Dataset  # type: ignore[assignment]
    has_global_state = True
    """`state_dict()` is the same on all ranks, and any number of ranks can load it."""
    use_stateful_dataloader = True
    """Makes Accelerate's `save_state` save the position, and `load_state` restore it."""
    end_of_dataloader = False
    """Accelerate's gradient accumulation reads this at every batch."""
    remainder = -1
    """Rows of the last batch, summed over ranks, that are not repeated: what `gather_for_metrics` keeps."""

    def __init__(self, dataset: Dataset, *, accelerator: Any = None, pin_memory: bool = False) -> None:
        super().__init__(dataset, batch_size=None, collate_fn=_identity)  # type: ignore[arg-type]
        self._accelerator = accelerator
        self._pins = pin_memory and torch.cuda.is_available()
        self._is_prepared = accelerator is not None

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate reads this before it wraps a loader, and sets it at the end of `prepare`."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._is_prepared = value

    def __iter__(self) -> Any:
        batches = self.dataset.begin()
        if not self._is_prepared and not self._pins:
            return batches
        return _LockedGenerator(self._placed(batches))

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the rows of it delivered so far on all ranks together."""
        return self.dataset.epoch, self.dataset.position

    @property
    def is_last(self) -> bool:
        """Whether the last delivered batch is the last one of its epoch."""
        return self.dataset.position == self.dataset.plan.num_rows

    @property
    def num_batches_left(self) -> int:
        return self.dataset.num_batches_left

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: str = "refuse") -> None:
        self.dataset.load_state_dict(state, on_change=on_change)

    def _placed(self, batches: Pass) -> Generator[Any, None, None]:
        """Yield batches on the accelerator's device, and notify Accelerate of the last one."""
        device, gradients = self._device(), self._gradient_state()
        self.end_of_dataloader, self.remainder = False, -1
        if gradients is not None:
            gradients._add_dataloader(self)
        try:
            for batch in batches:
                if self._pins:
                    batch = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch)
                if device is not None:
                    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
                self.end_of_dataloader = batches.is_last
                if batches.is_last:
                    self.remainder = batches.last_batch_rows if self.dataset.config.order.tail == "pad" else 0
                yield batch
        finally:
            batches.close()
            if gradients is not None:
                gradients._remove_dataloader(self)

    def _device(self) -> Any:
        """Return the device to move batches to, or None to leave them on the CPU."""
        device = getattr(self._accelerator, "device", None)
        if device is None and self._is_prepared and "accelerate" in sys.modules:
            device = sys.modules["accelerate"].PartialState().device
        return None if device is None or torch.device(device).type == "cpu" else device

    def _gradient_state(self) -> Any:
        if not self._is_prepared or "accelerate" not in sys.modules:
            return None
        return sys.modules["accelerate"].state.GradientState()


class _LockedGenerator:
    """A generator that several threads may use; a bare one raises if two threads call it at once."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._lock = renewed(threading.RLock())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._batches)

    def close(self) -> None:
        with self._lock:
            self._batches.close()


def _identity(batch: Any) -> Any:
    return batch
