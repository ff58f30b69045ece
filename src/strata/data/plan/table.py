"""A plan as people read it: one line per split, and what was left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from strata.printing import printable

if TYPE_CHECKING:
    import numpy.typing as npt

    from strata.data.plan.plan import Plan

MAX_SPLITS = 40
_MAX_NAME = 60


def rows(plan: Plan, *, max_splits: int | None = None) -> list[dict[str, Any]]:
    """One entry per split, in the plan's order; `share` is that of all rows."""
    starts = plan.split_starts[:-1]
    if not len(starts):
        return []
    num_rows = np.add.reduceat(plan.unit_rows, starts).tolist()
    num_bytes = np.add.reduceat(plan.unit_bytes, starts).tolist()
    total = plan.num_rows
    shown = len(starts) if max_splits is None else min(max_splits, len(starts))
    return [
        {
            "split": number,
            "file": plan.files[int(plan.unit_file[plan.split_starts[number]])].file.name,
            "units": _units(plan.unit_index[plan.split_starts[number] : plan.split_starts[number + 1]]),
            "rows": num_rows[number],
            "bytes": num_bytes[number],
            "share": num_rows[number] / total,
        }
        for number in range(shown)
    ]


def table(plan: Plan, *, max_splits: int = MAX_SPLITS) -> Table:
    """For a terminal. Names of files are shown as they are: nothing in them is taken for markup."""
    made = Table(title=_title(plan), caption=_caption(plan), caption_justify="left", title_justify="left")
    for name in ("split", "file", "units", "rows", "bytes", "share"):
        made.add_column(name, justify="left" if name in ("file", "units") else "right", overflow="fold")
    for row in rows(plan, max_splits=max_splits):
        cells = (str(row["split"]), _name(row["file"]), row["units"], f"{row['rows']:,}")
        made.add_row(*map(Text, cells), Text(size(row["bytes"])), Text(f"{row['share']:.1%}"))
    left = plan.num_splits - max_splits
    if left > 0:
        unit = int(plan.split_starts[max_splits])
        num_rows, num_bytes = int(plan.unit_rows[unit:].sum()), int(plan.unit_bytes[unit:].sum())
        made.add_section()
        share = f"{num_rows / plan.num_rows:.1%}"
        made.add_row("…", f"{left:,} more splits", "", f"{num_rows:,}", size(num_bytes), share)
    return made


def size(num_bytes: int) -> str:
    """1234567 → 1.2 MiB."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _title(plan: Plan) -> Text:
    return Text(
        f"{plan.num_rows:,} rows in {plan.num_splits:,} splits of {plan.num_units:,} units of {len(plan.files):,} files"
    )


def _caption(plan: Plan) -> Text:
    pruning = plan.pruning
    lines = []
    if plan.condition_text:
        lines.append(
            f"filter {plan.condition_text[:200]}: "
            f"{pruning.num_files_pruned:,} of {pruning.num_files:,} files not opened, "
            f"{pruning.num_units_pruned:,} of {pruning.num_units:,} units left out, "
            f"{pruning.num_units_counted:,} counted"
        )
    if pruning.num_pages_pruned:
        lines.append(
            f"{pruning.num_units_in_part:,} units are read in part: {pruning.num_pages_pruned:,} of "
            f"{pruning.num_pages:,} pages left out, {size(pruning.bytes_pages_pruned)}"
        )
    if pruning.bytes_total:
        lines.append(f"an epoch reads {size(pruning.bytes_planned)} of {size(pruning.bytes_total)}")
    if pruning.skipped:
        name, reason = pruning.skipped[0]
        lines.append(f"{len(pruning.skipped):,} skipped, the first: {_name(name)}: {printable(reason)[:200]}")
    return Text("\n".join(lines))


def _units(index: npt.NDArray[np.int64]) -> str:
    first, last = int(index[0]), int(index[-1])
    if first == last:
        return str(first)
    left_out = last - first + 1 - len(index)
    return f"{first}–{last}" + (f" without {left_out}" if left_out else "")


def _name(name: str) -> str:
    """The end of a long name says more than its start; what would move the cursor is shown instead of done."""
    shown = printable(name)
    return shown if len(shown) <= _MAX_NAME else "…" + shown[-(_MAX_NAME - 1) :]
