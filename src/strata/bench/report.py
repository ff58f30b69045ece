"""The report of a benchmark: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from strata.bench.frame import Spread, aggregate, ratios
from strata.bench.machine import describe_machine, describe_versions
from strata.printing import counted
from strata.terminal import Console

if TYPE_CHECKING:
    from strata.bench.frame import Benchmark, Figure, Outcome


def show(benchmark: Benchmark, outcome: Outcome, *, as_json: bool) -> None:
    """Print tables to stdout and failures to stderr; with `as_json`, print only one line of JSON to stdout."""
    err = Console(stderr=True)
    out = err if as_json else Console()
    comparisons = comparison_table(benchmark, outcome)
    if comparisons.row_count:
        out.print(comparisons)
    if outcome.samples:
        out.print(figure_table(benchmark, outcome))
    for note in (*benchmark.notes, *(f"{absent.contender}: {absent.note}" for absent in outcome.absent)):
        out.print(Text(f"· {note}", style="dim"))
    for failure in outcome.failures:
        err.print(Text(f"{failure.contender}, round {failure.round + 1}: {failure.reason}", style="bold red"))
        if failure.stderr_tail:
            err.print(Text(failure.stderr_tail))
    if as_json:
        print(json.dumps(as_object(outcome), sort_keys=True), flush=True)


def as_object(outcome: Outcome) -> dict[str, Any]:
    """Return `{"figures", "machine", "versions"}`; a figure without spread is a number."""
    return {
        "figures": {key: _plain(found) for key, found in aggregate(outcome.samples).items()},
        "machine": describe_machine(),
        "versions": {**outcome.versions, **describe_versions()},
    }


def comparison_table(benchmark: Benchmark, outcome: Outcome) -> Table:
    """Return a table of Strata against each measured peer; the ratio comes first, as it depends less on the machine."""
    table = Table(title=f"{benchmark.title}: compared with peers", title_justify="left")
    table.add_column("better by", justify="right")
    for column in ("figure", "Strata", "peer"):
        table.add_column(column)
    found = aggregate(outcome.samples)
    by_key = {figure.key: figure for figure in benchmark.figures}
    for figure in benchmark.figures:
        for peer in figure.peers:
            ratio = ratios(figure, peer, outcome.samples)
            if ratio is None:
                continue
            table.add_row(
                _times(ratio),
                figure.title,
                _with_unit(found[figure.key], figure),
                f"{by_key[peer].title}: {_with_unit(found[peer], by_key[peer])}",
            )
    return table


def figure_table(benchmark: Benchmark, outcome: Outcome) -> Table:
    rounds = 1 + max((sample.round for sample in outcome.samples), default=-1)
    table = Table(title=f"{benchmark.title}: median of {counted(rounds, 'round')}", title_justify="left")
    table.add_column("figure")
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("min–max", no_wrap=True)
    found = aggregate(outcome.samples)
    for figure in benchmark.figures:
        if spread := found.get(figure.key):
            what = Text.assemble(figure.title, " ", (figure.key, "dim"))
            table.add_row(what, number(spread.median), figure.unit, _range(spread))
    return table


def number(value: float) -> str:
    """Return a number with three or four significant digits: 0.0123, 1.234, 123.5, 12,346."""
    if value == 0 or abs(value) >= 1_000:
        return f"{value:,.0f}"
    if abs(value) < 1:
        return f"{value:.3g}"
    digits_before = len(str(int(abs(value))))
    return f"{value:.{4 - digits_before}f}"


def _times(ratio: Spread) -> str:
    wide = _range(ratio)
    return f"{number(ratio.median)} ×" + (f" ({wide})" if wide else "")


def _range(spread: Spread) -> str:
    return "" if spread.min == spread.max else f"{number(spread.min)}–{number(spread.max)}"


def _with_unit(spread: Spread, figure: Figure) -> str:
    return f"{number(spread.median)} {figure.unit}".rstrip()


def _plain(spread: Spread) -> float | dict[str, float]:
    if spread.min == spread.max:
        return spread.median
    return {"median": spread.median, "min": spread.min, "max": spread.max}
