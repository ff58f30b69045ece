"""The table that `print(features)` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from strata.printing import counted, printable
from strata.trainer.features.encoding import DenseColumn, VarLenColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.trainer.features.encoding import Column

_HEADER: Final = ("name", "kind", "ids", "dim", "unknown", "missing", "min", "mean", "max")
_MAX_NAME_CHARS: Final = 40


def table(columns: Sequence[Column], num_rows: int) -> str:
    """Return one line per feature; shares of unknown values and of missing rows in percent."""
    lines = [_HEADER, *(_line(column, num_rows) for column in columns)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADER))]
    shown = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    return "\n".join([f"{counted(len(columns), 'feature')}, fitted on {counted(num_rows, 'row')}", *shown])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Align texts to the left and numbers to the right."""
    return [
        text.ljust(width) if place < 2 else text.rjust(width)
        for place, (text, width) in enumerate(zip(line, widths, strict=True))
    ]


def _line(column: Column, num_rows: int) -> tuple[str, ...]:
    name = printable(column.name, max_chars=_MAX_NAME_CHARS)
    if isinstance(column, DenseColumn):
        kind = f"dense × {column.width}" if column.width > 1 else "dense"
        missing = _share(column.num_missing, num_rows * column.width)
        return (name, kind, "", "", "", missing, *(f"{x:.6g}" for x in (column.min, column.mean, column.max)))
    sparse = column.elements if isinstance(column, VarLenColumn) else column
    field = column.field
    kind = f"varlen × {field.max_length}" if field.kind == "varlen" else "sparse"
    unknown, missing = _share(sparse.num_unknown, sparse.num_values), _share(sparse.num_missing, num_rows)
    return (name, kind, f"{field.num_ids:,}", str(field.embedding_dim), unknown, missing, "", "", "")


def _share(part: int, whole: int) -> str:
    """Return a percentage that shows 0 % only for none."""
    if not part:
        return "0 %"
    share = 100 * part / whole
    return f"{share:.3g} %" if share >= 0.001 else "< 0.001 %"
