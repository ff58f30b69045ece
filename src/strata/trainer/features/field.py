"""What a model knows about its inputs: one `Field` per feature, with the sizes of the layers that it needs.

This module imports only the standard library and our errors, so a model can be built where pyarrow is not installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from strata.errors import InvalidArgument

Kind: TypeAlias = Literal["sparse", "dense", "varlen"]
Combiner: TypeAlias = Literal["mean", "sum", "max"]

MISSING: Final = 0
"""The id of a missing value, and of padding: the row to mask (`padding_idx=0`)."""
UNKNOWN: Final = 1
"""The id of a value that the vocabulary does not contain."""
FIRST_ID: Final = 2
"""The id of the first known value or hash bucket."""

MIN_AUTO_DIM: Final = 4
MAX_AUTO_DIM: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One feature as a model sees it.

    A sparse field is one column of the matrix `sparse`, a dense field `width` columns of `dense`, in the order of the
    fields. A varlen field is a matrix of its own name.
    """

    name: str
    kind: Kind
    num_ids: int = 0
    """Rows that the embedding table needs, ids 0 (missing) and 1 (unknown) included; 0 for a dense field."""
    width: int = 0
    """Columns of a dense field in the matrix `dense`; 0 for the others."""
    embedding_dim: int = 0
    """Width of the embedding table; 0 for a dense field."""
    max_length: int = 0
    """Columns of a varlen field's matrix; 0 for the others."""
    combiner: Combiner | None = None
    """How a varlen field's embeddings become one vector, over the ids that are not 0; None for the others."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidArgument(
                f"kind={self.kind!r} is unknown; use one of {', '.join(get_args(Kind))}", field="kind"
            )
        is_dense, is_varlen = self.kind == "dense", self.kind == "varlen"
        for name, is_used, minimum in (
            ("num_ids", not is_dense, FIRST_ID),
            ("embedding_dim", not is_dense, 1),
            ("width", is_dense, 1),
            ("max_length", is_varlen, 1),
        ):
            value = getattr(self, name)
            if (value < minimum) if is_used else (value != 0):
                wanted = f"at least {minimum}" if is_used else "0"
                raise InvalidArgument(
                    f"{name}={value} of field {self.name!r} must be {wanted} for kind={self.kind!r}", field=name
                )
        if self.combiner not in (get_args(Combiner) if is_varlen else (None,)):
            raise InvalidArgument(
                f"combiner={self.combiner!r} of field {self.name!r} must be "
                f"{'one of ' + ', '.join(get_args(Combiner)) if is_varlen else 'None'} for kind={self.kind!r}",
                field="combiner",
            )


def auto_embedding_dim(num_ids: int) -> int:
    """Return the width of an embedding table with `embedding_dim="auto"`: 6 × num_ids^¼, as a multiple of 4.

    The fourth root follows common practice: a vocabulary that grows 16-fold doubles its width. The result is clipped to
    4…128, since wider tables rarely pay for their memory traffic.
    """
    return max(MIN_AUTO_DIM, min(MAX_AUTO_DIM, 4 * round(1.5 * math.sqrt(math.sqrt(num_ids)))))
