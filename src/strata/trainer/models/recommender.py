"""The base of the reference models: plain modules from an encoded batch to logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from strata.trainer.models.embedding import FieldIds
from strata.trainer.models.fields import FieldSpec, check_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Recommender(nn.Module):
    """A model whose `forward(batch)` returns logits, `[rows]`, for an encoded batch.

    There is no sigmoid: train with `BCEWithLogitsLoss`, which is stable for large logits, and apply `torch.sigmoid` for
    probabilities.
    """

    def __init__(self, fields: Sequence[FieldSpec]) -> None:
        super().__init__()
        check_fields(fields)
        self.fields = tuple(fields)

    def check_ids(self, batch: Mapping[str, Tensor]) -> None:
        """Check that every id of a batch lies within the table of its field.

        The forward pass does not notice most wrong ids, because fields share a table.

        Raises:
            InvalidArgument: The message names the field, the id and the size of its table.
        """
        for module in self.modules():
            if isinstance(module, FieldIds):
                module.check_ids(batch)
