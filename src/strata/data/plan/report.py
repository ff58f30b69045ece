"""Reports on a plan for people: a table of its splits, and an explanation of how it differs from a saved state.

A fingerprint shows only that a plan changed. A loader's state therefore contains a summary of the plan as well, small
for any dataset, from which `explain` names the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from strata.printing import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from strata.data.plan.plan import Plan


MAX_SPLITS = 40
_MAX_NAME = 60
MAX_FILES = 256
"""Files that a summary names; the others are only counted."""
_VERSION_DIGITS = 8
_MAX_NAMES = 3
_MAX_CONDITION = 1000


def rows(plan: Plan, *, max_splits: int | None = None) -> list[dict[str, Any]]:
    """Return one entry per split, in the order of the plan; `share` is the fraction of all rows."""
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
            "units": _format_indices(plan.unit_index[plan.split_starts[number] : plan.split_starts[number + 1]]),
            "rows": num_rows[number],
            "bytes": num_bytes[number],
            "share": num_rows[number] / total,
        }
        for number in range(shown)
    ]


def as_table(plan: Plan, *, max_splits: int = MAX_SPLITS) -> Table:
    """Return a table for a terminal. File names are printed literally, never as markup."""
    table = Table(title=_title(plan), caption=_caption(plan), caption_justify="left", title_justify="left")
    for name in ("split", "file", "row groups", "rows", "bytes", "share"):
        table.add_column(name, justify="left" if name in ("file", "row groups") else "right", overflow="fold")
    for row in rows(plan, max_splits=max_splits):
        cells = (str(row["split"]), _name(row["file"]), row["units"], f"{row['rows']:,}")
        table.add_row(*map(Text, cells), Text(size(row["bytes"])), Text(f"{row['share']:.1%}"))
    left = plan.num_splits - max_splits
    if left > 0:
        first = int(plan.split_starts[max_splits])
        num_rows, num_bytes = int(plan.unit_rows[first:].sum()), int(plan.unit_bytes[first:].sum())
        table.add_section()
        share = f"{num_rows / plan.num_rows:.1%}"
        table.add_row("…", f"{left:,} more splits", "", f"{num_rows:,}", size(num_bytes), share)
    return table


def size(num_bytes: int) -> str:
    """Format bytes: 1234567 → 1.2 MiB."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _title(plan: Plan) -> Text:
    return Text(
        f"{plan.num_rows:,} rows in {plan.num_splits:,} splits of {plan.num_units:,} row groups in "
        f"{len(plan.files):,} files"
    )


def _caption(plan: Plan) -> Text:
    pruning = plan.pruning
    lines = []
    if plan.condition_text:
        lines.append(
            f"filter {plan.condition_text[:200]}: "
            f"{pruning.num_files_pruned:,} of {pruning.num_files:,} files not opened, "
            f"{pruning.num_units_pruned:,} of {pruning.num_units:,} row groups pruned, "
            f"{pruning.num_units_counted:,} counted"
        )
    if pruning.num_pages_pruned:
        lines.append(
            f"{pruning.num_units_in_part:,} row groups are read in part: {pruning.num_pages_pruned:,} of "
            f"{pruning.num_pages:,} pages pruned, {size(pruning.bytes_pages_pruned)}"
        )
    if pruning.bytes_total:
        lines.append(f"an epoch reads {size(pruning.bytes_planned)} of {size(pruning.bytes_total)}")
    if pruning.skipped:
        name, reason = pruning.skipped[0]
        lines.append(f"{len(pruning.skipped):,} skipped, the first: {_name(name)}: {printable(reason)[:200]}")
    return Text("\n".join(lines))


def _format_indices(index: npt.NDArray[np.int64]) -> str:
    first, last = int(index[0]), int(index[-1])
    if first == last:
        return str(first)
    left_out = last - first + 1 - len(index)
    return f"{first}–{last}" + (f" without {left_out}" if left_out else "")


def _name(name: str) -> str:
    """Shorten a long name to its end, which is more specific than its start; control characters are escaped."""
    shown = printable(name)
    return shown if len(shown) <= _MAX_NAME else "…" + shown[-(_MAX_NAME - 1) :]


def summary(plan: Plan) -> dict[str, Any]:
    """Return a JSON-compatible summary of a plan for `explain`. Its keys are part of a loader's state."""
    rows = np.bincount(plan.unit_file, weights=plan.unit_rows, minlength=len(plan.files)).astype(np.int64).tolist()
    listed = sorted(zip(plan.files, rows, strict=True), key=lambda each: each[0].file.name)[:MAX_FILES]
    starts = plan.split_starts[:-1]
    return {
        "num_files": len(plan.files),
        "num_units": plan.num_units,
        "num_splits": plan.num_splits,
        "num_rows": plan.num_rows,
        "largest_split_bytes": int(np.add.reduceat(plan.unit_bytes, starts).max()) if len(starts) else 0,
        "condition": plan.condition_text[:_MAX_CONDITION],
        "files": [[file.file.name, file.version[:_VERSION_DIGITS], num_rows] for file, num_rows in listed],
    }


def explain(before: Mapping[str, Any], plan: Plan) -> str:
    """Describe what changed since the summary `before`, which comes from a state and may contain anything."""
    now = summary(plan)
    try:
        reasons = [*_conditions(before, now), *_files(before, now)]
        if not reasons:
            reasons = _splits(before, now)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        reasons = []
    return "; ".join(reasons) or "the state does not show what changed, but it belongs to other data"


def _conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before["condition"] == now["condition"]:
        return []
    return [f"the filter was {_or_none(before['condition'])} and is now {_or_none(now['condition'])}"]


def _or_none(condition: str) -> str:
    return str(condition) if condition else "none"


def _files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    then = {str(name): (str(version), int(rows)) for name, version, rows in before["files"]}
    here = {str(name): (str(version), int(rows)) for name, version, rows in now["files"]}
    if before["num_files"] > len(then) or now["num_files"] > len(here):
        # A truncated list has no information about names beyond its end.
        last = min(max(names, default="") for names, cut in _cuts(before, now, then, here) if cut)
        then = {name: facts for name, facts in then.items() if name <= last}
        here = {name: facts for name, facts in here.items() if name <= last}
    same_filter = before["condition"] == now["condition"]
    rewritten = [name for name in sorted(then.keys() & here.keys()) if then[name][0] != here[name][0]]
    recounted = [
        name
        for name in sorted(then.keys() & here.keys())
        if then[name][0] == here[name][0] and then[name][1] != here[name][1]
    ]
    reasons = []
    # Another filter alone adds and removes files, depending on which rows pass.
    if same_filter:
        reasons += _named("added", sorted(here.keys() - then.keys()))
        reasons += _named("removed", sorted(then.keys() - here.keys()))
        reasons += _named("read with another number of rows", recounted)
    reasons += _named("rewritten", rewritten)
    if same_filter and before["num_files"] != now["num_files"]:
        reasons.append(f"there were {before['num_files']} files, and now there are {now['num_files']}")
    if same_filter and before["num_rows"] != now["num_rows"]:
        reasons.append(f"there were {before['num_rows']} rows, and now there are {now['num_rows']}")
    return reasons


def _cuts(
    before: Mapping[str, Any], now: Mapping[str, Any], then: Mapping[str, Any], here: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], bool]]:
    return [(then, before["num_files"] > len(then)), (here, now["num_files"] > len(here))]


def _named(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return [f"{', '.join(names[:_MAX_NAMES])}{more} {'was' if len(names) == 1 else 'were'} {what}"]


def _splits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Explain a change of the grouping, given the same files and filter."""
    if before["num_units"] != now["num_units"]:
        counts = f"the files had {before['num_units']} row groups and now have {now['num_units']}"
        return [f"{counts}: in text files, split_bytes decides their size"]
    if before["num_splits"] != now["num_splits"] or before["largest_split_bytes"] != now["largest_split_bytes"]:
        was = f"{before['num_splits']} splits of up to {before['largest_split_bytes']} bytes"
        is_now = f"{now['num_splits']} of up to {now['largest_split_bytes']}"
        return [f"the same files had {was} and now have {is_now}: split_bytes, split_rows or columns changed"]
    if before["num_files"] > MAX_FILES:
        return [f"a file after the first {MAX_FILES} (by name) was rewritten"]
    return []
