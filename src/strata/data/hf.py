"""A callback for the transformers Trainer, so that it resumes in the right epoch and at the right row.

The Trainer skips the batches that it has seen with a loader of Accelerate, which reads our dataset without setting its
epoch: from the second epoch on it would skip other rows. The callback sets the epoch. It also saves the position in the
checkpoint, so that nothing has to be skipped.

Imported only where transformers is installed.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from strata.data.dataset import Dataset
from strata.errors import InvalidArgument


class KeepState(TrainerCallback, ExportableState):
    """Use as `Trainer(…, callbacks=[KeepState()])` with a `get_train_dataloader` that returns a Strata loader.

    `resume_from_checkpoint` then resumes at the right row, also from checkpoints that were saved without the callback.
    With `ignore_data_skip=True` it does so without reading the rows before.
    """

    def __init__(self) -> None:
        self._dataset: Dataset | None = None

    def state(self) -> dict[str, Any]:
        """Return what the Trainer writes to `trainer_state.json`, the same on every rank."""
        attributes = {} if self._dataset is None else {"position": self._dataset.state_dict()}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Set the epoch or the position of the dataset when the Trainer resumes.

        Raises:
            InvalidArgument: The loader is not a Strata loader, or the checkpoint does not contain its position.
            PlanChanged: The position belongs to another dataset.
        """
        dataset = getattr(others.get("train_dataloader"), "dataset", None)
        if not isinstance(dataset, Dataset):
            raise InvalidArgument(
                f"KeepState needs a loader from create_dataloader, but this one reads {type(dataset).__name__}; "
                "return a Strata loader from get_train_dataloader, or remove the callback",
                field="callbacks",
            )
        self._dataset = dataset
        # The Trainer expects an entry for each callback, also in checkpoints that have none.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {}})["attributes"]
        if not state.global_step:  # a fresh run
            return
        if not args.ignore_data_skip:
            dataset.set_epoch(int(state.epoch))
            return
        if "position" not in saved:
            raise InvalidArgument(
                "the checkpoint does not contain the position in the data, because it was saved without KeepState; "
                "remove ignore_data_skip=True, so that the Trainer skips the rows it has seen",
                field="ignore_data_skip",
            )
        dataset.load_state_dict(saved["position"])
