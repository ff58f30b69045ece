"""The fields of an encoded batch, and which columns of the batch belong to them.

`FieldSpec` is what a model needs to know of a field. `strata.trainer.features.Field` has these attributes, and so may
any other class: models therefore work without the feature columns, and without pyarrow. A `Layout` locates the fields
of a model, or of one part of a model, in an encoded batch:

- `sparse`: int64 `[rows, sparse fields]`
- `dense`: float32 `[rows, sum of widths]`
- one int64 matrix `[rows, max_length]` per varlen field, by its name, padded with 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from strata.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("sparse", "dense", "varlen")
COMBINERS = ("mean", "sum", "max")
SPARSE, DENSE = "sparse", "dense"
"""The keys of an encoded batch that hold several fields."""
PADDING = 0
"""The id of a missing value. In a varlen field it also fills the row up, and contributes nothing."""


class FieldSpec(Protocol):
    """Describes one field of an encoded batch."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str:
        """One of "sparse", "dense" and "varlen"."""

    @property
    def num_ids(self) -> int:
        """Ids of a sparse or varlen field, from 0 to `num_ids` - 1, including the one for missing values."""

    @property
    def width(self) -> int:
        """Columns of a dense field."""

    @property
    def embedding_dim(self) -> int:
        """The field's own embedding dimension, which a model uses with `embedding_dim=None`."""

    @property
    def max_length(self) -> int:
        """Columns of a varlen field."""

    @property
    def combiner(self) -> str | None:
        """How the vectors of a varlen field become one: "mean", "sum" or "max"; None for other fields."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Locates chosen fields in an encoded batch."""

    sparse: tuple[FieldSpec, ...]
    varlen: tuple[FieldSpec, ...]
    dense: tuple[FieldSpec, ...]
    sparse_columns: tuple[int, ...]
    """The columns of `batch["sparse"]` that belong to the chosen sparse fields, in their order."""
    dense_columns: tuple[int, ...]
    num_sparse_columns: int
    """Columns of `batch["sparse"]` when it holds every field, chosen or not."""
    num_dense_columns: int

    @classmethod
    def of(cls, fields: Sequence[FieldSpec], names: Sequence[str] | None = None) -> Self:
        """Locate the named fields, or all, in the encoded batch of `fields`.

        Raises:
            InvalidArgument: A field is invalid, a name repeats, or a name is unknown.
        """
        check_fields(fields)
        chosen = {field.name for field in fields} if names is None else set(names)
        if unknown := sorted(chosen - {field.name for field in fields}):
            raise InvalidArgument(
                f"no field is named {unknown[0]!r}; the fields are {', '.join(field.name for field in fields)}",
                field="fields",
            )
        all_sparse = [field for field in fields if field.kind == "sparse"]
        owners = [field for field in fields if field.kind == "dense" for _ in range(field.width)]
        return cls(
            sparse=tuple(field for field in all_sparse if field.name in chosen),
            varlen=tuple(field for field in fields if field.kind == "varlen" and field.name in chosen),
            dense=tuple(field for field in fields if field.kind == "dense" and field.name in chosen),
            sparse_columns=tuple(at for at, field in enumerate(all_sparse) if field.name in chosen),
            dense_columns=tuple(at for at, field in enumerate(owners) if field.name in chosen),
            num_sparse_columns=len(all_sparse),
            num_dense_columns=len(owners),
        )

    @property
    def embedded(self) -> tuple[FieldSpec, ...]:
        """The fields that have ids: the sparse ones, then the varlen ones."""
        return self.sparse + self.varlen

    @property
    def dense_width(self) -> int:
        return len(self.dense_columns)


def check_fields(fields: Sequence[FieldSpec]) -> None:
    """Check that a model can be built from these fields.

    Raises:
        InvalidArgument: There is none, or a field is invalid; the message names the field.
    """
    if not fields:
        raise InvalidArgument(
            "fields is empty; pass the fields of fitted features: Model(features.fields)", field="fields"
        )
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            raise InvalidArgument(f"two fields are named {field.name!r}; give each its own name", field="fields")
        seen.add(field.name)
        _check_field(field)


def _check_field(field: FieldSpec) -> None:
    if field.kind not in KINDS:
        raise InvalidArgument(
            f"field {field.name!r} has kind={field.kind!r}; use one of {', '.join(map(repr, KINDS))}", field="fields"
        )
    counts = {"sparse": ("num_ids",), "dense": ("width",), "varlen": ("num_ids", "max_length")}[field.kind]
    for name in counts:
        if getattr(field, name) < 1:
            raise InvalidArgument(
                f"field {field.name!r} has {name}={getattr(field, name)}, which must be 1 or more", field="fields"
            )
    if field.kind == "varlen" and field.combiner not in COMBINERS:
        raise InvalidArgument(
            f"field {field.name!r} has combiner={field.combiner!r}; use one of {', '.join(map(repr, COMBINERS))}",
            field="fields",
        )
    if field.kind == "varlen" and field.name in (SPARSE, DENSE):
        raise InvalidArgument(
            f"a varlen field cannot be named {field.name!r}, the key of other fields in a batch; rename it",
            field="fields",
        )


def one_dimension(layout: Layout, embedding_dim: int | None, *, model: str) -> int:
    """Return the embedding dimension that all fields of a model share.

    Raises:
        InvalidArgument: The fields' own dimensions differ, or the dimension is not positive.
    """
    if embedding_dim is not None:
        return _positive(embedding_dim)
    dims = {field.embedding_dim for field in layout.embedded}
    if len(dims) != 1:
        raise InvalidArgument(
            f"{model} multiplies the vectors of fields with one another, so all need one dimension, but the fields "
            f"have {sorted(dims)}; pass embedding_dim=16 or another number",
            field="embedding_dim",
        )
    return _positive(dims.pop())


def names_by_dimension(layout: Layout, embedding_dim: int | None) -> dict[int, list[str]]:
    """Return the names of sparse and varlen fields by their embedding dimension, in the order of the fields.

    Raises:
        InvalidArgument: A dimension is not positive.
    """
    names: dict[int, list[str]] = {}
    for field in layout.embedded:
        dim = _positive(field.embedding_dim if embedding_dim is None else embedding_dim)
        names.setdefault(dim, []).append(field.name)
    return names


def _positive(dim: int) -> int:
    if dim < 1:
        raise InvalidArgument(f"embedding_dim={dim} must be 1 or more", field="embedding_dim")
    return dim
