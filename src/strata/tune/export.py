"""Tables of trials, and files of them: CSV and Parquet with one row per trial, JSON with all reports."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from strata.errors import ConfigError
from strata.tune.packages import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.tune.state.trial import Trial
    from strata.tune.study import Study


def rows(study: Study) -> list[dict[str, Any]]:
    """Return one row per trial, all with the same columns; what a trial does not have is None."""
    found = [_row(study, trial) for trial in study.trials]
    parameters = [f"config.{name}" for name in study.space.parameters]
    columns = ["number", "state", *study.reported, *parameters, "step", "duration_s", "reason", "checkpoint"]
    return [{name: row.get(name) for name in columns} for row in found]


def _row(study: Study, trial: Trial) -> dict[str, Any]:
    has_ended = trial.started_s is not None and trial.ended_s is not None
    return {
        "number": trial.number,
        "state": trial.state,
        **study.values_of(trial),
        **{f"config.{name}": value for name, value in trial.config.items()},
        "step": trial.step,
        "duration_s": trial.ended_s - trial.started_s if has_ended else None,  # type: ignore[operator]
        "reason": trial.reason,
        "checkpoint": trial.checkpoint,
    }


def export(study: Study, path: str | os.PathLike[str]) -> Path:
    """Write a study to a file; replace the file at once if it exists.

    Raises:
        ConfigError: The suffix is unknown, or a package is missing.
    """
    target = Path(path)
    write = _BY_SUFFIX.get(target.suffix.lower())
    if write is None:
        raise ConfigError(
            f"export({os.fspath(path)!r}): {target.suffix or 'no suffix'} is unknown; use {', '.join(_BY_SUFFIX)}",
            field="path",
        )
    partial = target.with_name(f".{target.name}.partial")
    try:
        write(study, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _write_csv(study: Study, path: Path) -> None:
    table = rows(study)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table[0] if table else ["number", "state"])
        writer.writerows(row.values() for row in table)


def _write_json(study: Study, path: Path) -> None:
    content: Mapping[str, Any] = {
        "name": study.name,
        "metrics": study.metrics,
        "directions": study.directions,
        "constraints": study.constraints,
        "space": study.space.to_dict(),
        "trials": [
            {
                **_row(study, trial),
                "config": trial.config,
                "reports": [{"step": step, **_named(study, values)} for step, values in trial.series.points],
            }
            for trial in study.trials
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))


def _named(study: Study, values: Any) -> dict[str, Any]:
    return dict(zip(study.reported, values, strict=True))


def _write_parquet(study: Study, path: Path) -> None:
    pyarrow = require("pyarrow", "export to Parquet", "pip install pyarrow, or use .csv or .json")
    parquet = require("pyarrow.parquet", "export to Parquet", "pip install pyarrow")
    table = rows(study)
    columns = {name: _column([row[name] for row in table]) for name in (table[0] if table else ())}
    parquet.write_table(pyarrow.table(columns), path)


def _column(values: list[Any]) -> list[Any]:
    """Return values of one type: a choice between text and numbers becomes text."""
    kinds = {type(each) for each in values if each is not None}
    if len(kinds) <= 1 or kinds <= {int, float}:
        return values
    return [None if each is None else str(each) for each in values]


_BY_SUFFIX: dict[str, Callable[[Study, Path], None]] = {
    ".csv": _write_csv,
    ".json": _write_json,
    ".parquet": _write_parquet,
}
