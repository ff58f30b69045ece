"""For the Trainer of transformers: it resumes in the right epoch, and at once if it is told so.

The Trainer skips the batches that it has seen with a loader of Accelerate's, which reads our dataset but does not tell
it the epoch: from the second epoch on these would be other rows. A callback can tell. It also keeps the position in the
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
    """`Trainer(…, callbacks=[KeepState()])`, with a `get_train_dataloader` that gives a loader of ours.

    `resume_from_checkpoint` then goes on with the right row, also of checkpoints that were saved without this. With
    `ignore_data_skip=True` it does so without reading what came before.
    """

    def __init__(self) -> None:
        self._dataset: Dataset | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer puts into `trainer_state.json`, the same on every rank."""
        attributes = {} if self._dataset is None else {"position": self._dataset.state_dict()}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """
        Raises:
            InvalidArgument: The loader is none of ours, or the checkpoint does not hold its position.
            PlanChanged: The position belongs to another dataset.
        """
        dataset = getattr(others.get("train_dataloader"), "dataset", None)
        if not isinstance(dataset, Dataset):
            raise InvalidArgument(
                f"KeepState is for loaders of create_dataloader, and this one is over {type(dataset).__name__}; "
                "return ours from get_train_dataloader, or leave out the callback",
                field="callbacks",
            )
        self._dataset = dataset
        # The Trainer wants to find a place for the state of each callback, also in checkpoints that have none.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {}})["attributes"]
        if not state.global_step:  # nothing is resumed
            return
        if not args.ignore_data_skip:
            dataset.set_epoch(int(state.epoch))
            return
        if "position" not in saved:
            raise InvalidArgument(
                "the checkpoint does not hold the position in the data, since it was saved without KeepState; "
                "leave out ignore_data_skip=True, so that the Trainer reads up to where it was",
                field="ignore_data_skip",
            )
        dataset.load_state_dict(saved["position"])
