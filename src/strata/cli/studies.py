"""`strata studies`: list the studies of tuning on this machine, show one, compare several.

These commands read only the journals of the studies, so they work while a study runs, after its end and after a kill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from strata.cli.runs import STATE_COLORS, age, console, recent
from strata.cli.tune import best_lines
from strata.printing import counted, printable
from strata.terminal import echo, echo_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.launch.record.directory import RunDirectory
    from strata.tune.snapshot import StudySnapshot, TrialSnapshot
    from strata.tune.state.study import StudyState

NUM_SHOWN = 20
"""Trials that `strata studies show` lists without `--all`."""
MAX_REASON = 100
MAX_COMPARED = 8
NUM_ENDED = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""Numbers of ended trials after which the best values of studies are compared."""
_ORDER = ("finished", "running", "paused", "queued", "pruned", "failed")
_TRIAL_COLORS = {"running": "green", "failed": "red", "pruned": "dim", "paused": "yellow"}

app = typer.Typer(help="List, show and compare the studies of tuning.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of the study, or a unique prefix of it.")]


# -- the list ----------------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def studies(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="List all studies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the studies of tuning on this machine, newest first.

    Lists active studies and the last ten that ended; --all lists all.
    `strata rm` deletes studies with their logs and checkpoints.
    """
    if context.invoked_subcommand is not None:
        return
    from strata.cli.run import is_study  # noqa: PLC0415
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.errors import StrataError  # noqa: PLC0415
    from strata.launch.record.directory import all_runs, root, state_now  # noqa: PLC0415

    runs = all_runs()
    found = {each.name: each for each in runs.found if is_study(each)}
    states = [{"name": each.name, "state": state_now(each.status)} for each in found.values()]
    listed = states if all_ else recent(states)
    unreadable = dict(runs.unreadable)
    rows: list[dict[str, Any]] = []
    for each in listed:
        try:
            rows.append(_row(found[each["name"]]))
        except StrataError as error:  # a damaged study does not hide the others
            unreadable[each["name"]] = error.message
    if as_json:
        for row in rows:
            echo_json(row)
    elif rows:
        console().print(_list(rows, now_s=SystemClock().wall_s()))
        if len(listed) < len(states):
            echo(f"{counted(len(states) - len(listed), 'older study', 'older studies')} not shown; --all lists all")
    elif not unreadable:
        echo(f"no studies in {printable(str(root()))}; strata tune starts one")
    for why in unreadable.values():
        echo(f"skipped: {printable(why)}", err=True)


def _row(run: RunDirectory) -> dict[str, Any]:
    """Return the JSON object of a study."""
    from strata.tune.snapshot import as_plain  # noqa: PLC0415

    found, _, is_running = _read(run)
    return _described(run, as_plain(found), is_running=is_running)


def _described(run: RunDirectory, plain: dict[str, Any], *, is_running: bool) -> dict[str, Any]:
    from strata.launch.record.directory import state_now  # noqa: PLC0415

    status = run.status
    return {
        **plain,
        "state": state_now(status),
        "pid": status.pid if status is not None and is_running else None,
        "path": str(run.path),
        "command": run.spec.command,
        "created_at_s": run.created_at_s,
    }


def _read(run: RunDirectory) -> tuple[StudySnapshot, StudyState, bool]:
    """Return what the journal of a study leads to, and whether it runs."""
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch.record.directory import UNDER_WAY, state_now  # noqa: PLC0415
    from strata.tune.snapshot import snapshot  # noqa: PLC0415
    from strata.tune.study import Study  # noqa: PLC0415

    is_running = state_now(run.status) in UNDER_WAY
    state = Study.load(run.path).state
    return snapshot(state, now_s=SystemClock().wall_s() if is_running else None), state, is_running


def _list(rows: Sequence[dict[str, Any]], *, now_s: float) -> Table:
    table = _table(("name", "state", "mode", "trials", "running", "failed", "best", "age", "script"))
    for row in rows:
        counts = row["counts"]
        num_ended = counts["finished"] + counts["pruned"] + counts["failed"]
        table.add_row(
            Text(printable(row["name"])),
            Text(row["state"], style=STATE_COLORS.get(row["state"], "")),
            Text(printable(row["mode"])),
            Text(f"{num_ended} of {row['num_trials']}"),
            Text(str(counts["running"]) if row["pid"] is not None else "0"),
            Text(str(counts["failed"]), style="red" if counts["failed"] else ""),
            Text(_best(row)),
            Text(age(now_s - row["created_at_s"])),
            Text(printable(row["command"])),
        )
    return table


def _best(row: dict[str, Any]) -> str:
    from strata.tune.timeline import number_in_words  # noqa: PLC0415

    metric = row["metrics"][0]
    return "" if row["best"] is None else f"{printable(metric)} {number_in_words(row['best']['values'][metric])}"


def _table(headings: Sequence[str], left: Sequence[str] = ("name", "state", "mode", "best", "script")) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        is_text = heading in left
        is_last = heading == headings[-1]
        table.add_column(
            Text(printable(heading)),
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis" if is_last else "fold",
        )
    return table


# -- one study ---------------------------------------------------------------------------------------------------------


@app.command()
def show(
    name: StudyName,
    all_: Annotated[bool, typer.Option("--all", "-a", help="List all trials.")] = False,
    series: Annotated[bool, typer.Option("--series", help="With --json: add the reports of every trial.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the trials of a study, the best first, and its best configuration."""
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import open_run  # noqa: PLC0415
    from strata.tune.snapshot import as_plain, trial_snapshots  # noqa: PLC0415
    from strata.tune.snapshot import series as series_of  # noqa: PLC0415

    if series and not as_json:
        raise ConfigError("--series needs --json; add it", field="series")
    run = open_run(name)
    study, state, is_running = _read(run)
    trials = trial_snapshots(state)
    if as_json:
        found: dict[str, Any] = {
            "study": _described(run, as_plain(study), is_running=is_running),
            "trials": [as_plain(each) for each in trials],
        }
        if series:
            found["series"] = [as_plain(series_of(state, each.number)) for each in trials]
        echo_json(found)
        return
    _print_head(run, study)
    ordered = in_order(trials, study)
    shown = ordered if all_ else ordered[:NUM_SHOWN]
    if shown:
        console().print(_trials(shown, study))
    if len(shown) < len(ordered):
        echo(f"{counted(len(ordered) - len(shown), 'more trial')}; --all lists all")


def in_order(trials: Sequence[TrialSnapshot], study: StudySnapshot) -> list[TrialSnapshot]:
    """Return finished trials first, the best of each state first."""
    sign = 1 if study.directions[0] == "min" else -1

    def key(trial: TrialSnapshot) -> tuple[int, bool, float, int]:
        value = trial.values.get(study.metrics[0])
        return _ORDER.index(trial.state), value is None, sign * (value or 0.0), trial.number

    return sorted(trials, key=key)


def _print_head(run: RunDirectory, study: StudySnapshot) -> None:
    from strata.launch.record.directory import state_now  # noqa: PLC0415
    from strata.launch.record.timeline import hours  # noqa: PLC0415

    aims = ", ".join(f"{direction} {name}" for name, direction in zip(study.metrics, study.directions, strict=True))
    why = f" ({study.reason})" if study.reason else ""
    counts = ", ".join(f"{number} {state}" for state, number in study.counts.items() if number)
    echo(
        f"study {study.name}: {state_now(run.status)}{why}",
        f"  mode: {study.mode}, {aims}, seed {study.seed}",
        f"  trials: {counts or 'none'}, of {study.num_trials}",
        f"  active for {hours(study.active_s)}"
        + ("" if study.left_s is None else f", about {hours(study.left_s)} left"),
        f"  command: {run.spec.command}",
        f"  directory: {run.path}",
        *best_lines(study),
    )


def _trials(trials: Sequence[TrialSnapshot], study: StudySnapshot) -> Table:
    from strata.launch.record.timeline import hours  # noqa: PLC0415
    from strata.tune.timeline import config_in_words, number_in_words  # noqa: PLC0415

    has_reasons = any(each.state == "failed" for each in trials)
    headings = ("trial", "state", *study.metrics, "step", "time", "configuration", *(["reason"] if has_reasons else []))
    table = _table(headings, left=("state", "configuration", "reason"))
    for trial in trials:
        reason = " ".join(trial.reason.split()) if trial.state == "failed" else ""
        table.add_row(
            Text(str(trial.number)),
            Text(trial.state, style=_TRIAL_COLORS.get(trial.state, "")),
            *(Text(number_in_words(trial.values[each]) if trial.values else "") for each in study.metrics),
            Text("" if trial.step is None else str(trial.step)),
            Text("" if trial.duration_s is None else hours(trial.duration_s)),
            Text(config_in_words(trial.config)),
            *([Text(printable(reason, max_chars=MAX_REASON))] if has_reasons else []),
        )
    return table


# -- several studies ---------------------------------------------------------------------------------------------------


@app.command()
def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="STUDY...", help="Names of studies, or unique prefixes of them.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare studies: their best values, after how many trials, and their best configurations.

    All of them must have the same first metric and direction.
    """
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import open_run  # noqa: PLC0415
    from strata.tune.snapshot import as_plain, history  # noqa: PLC0415

    if not 2 <= len(names) <= MAX_COMPARED:
        raise ConfigError(f"compare takes 2 to {MAX_COMPARED} studies, not {len(names)}", field="names")
    runs = [open_run(each) for each in names]
    read = [_read(each) for each in runs]
    aims = {run.name: (study.metrics[0], study.directions[0]) for run, (study, *_) in zip(runs, read, strict=True)}
    if len(set(aims.values())) > 1:
        listed = ", ".join(f"{name}: {direction} {metric}" for name, (metric, direction) in aims.items())
        raise ConfigError(
            f"these studies have different objectives ({listed}); compare some with the same", field="names"
        )
    histories = [history(state) for _, state, _ in read]
    if as_json:
        rows = [
            _described(run, as_plain(study), is_running=is_running) | {"history": past}
            for run, (study, _, is_running), past in zip(runs, read, histories, strict=True)
        ]
        echo_json({"studies": rows, "better": better([study for study, *_ in read])})
        return
    console().print(_comparison(runs, [study for study, *_ in read], histories))


def better(studies: Sequence[StudySnapshot]) -> str | None:
    """Return the name of the study with the best value; None if there is no such study, or several."""
    sign = 1 if studies[0].directions[0] == "min" else -1
    values = sorted((sign * value, each.name) for each in studies if (value := _best_value(each)) is not None)
    is_tied = len(values) > 1 and values[0][0] == values[1][0]
    return None if not values or is_tied else values[0][1]


def _best_value(study: StudySnapshot) -> float | None:
    return None if study.best is None else study.best.values[study.metrics[0]]


def _comparison(
    runs: Sequence[RunDirectory], studies: Sequence[StudySnapshot], histories: Sequence[list[tuple[int, float]]]
) -> Table:
    from strata.launch.record.directory import state_now  # noqa: PLC0415
    from strata.launch.record.timeline import hours  # noqa: PLC0415
    from strata.tune.snapshot import best_after  # noqa: PLC0415
    from strata.tune.timeline import number_in_words, value_in_words  # noqa: PLC0415

    metric, best = studies[0].metrics[0], better(studies)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="dim", no_wrap=True)
    for each in studies:
        table.add_column(Text(printable(each.name)), justify="right", overflow="fold")

    def add(label: str, cell: Callable[[StudySnapshot], str]) -> None:
        table.add_row(Text(printable(label)), *(Text(printable(cell(each))) for each in studies))

    states = {run.name: state_now(run.status) for run in runs}
    add("state", lambda study: states[study.name])
    add("mode", lambda study: study.mode)
    add("trials", lambda study: str(study.num_trials))
    for state in ("finished", "pruned", "failed"):
        add(state, lambda study, state=state: str(study.counts[state]))  # type: ignore[misc]
    add("active", lambda study: hours(study.active_s))
    table.add_row(
        Text(f"best {printable(metric)}"),
        *(
            Text(
                "" if (value := _best_value(each)) is None else number_in_words(value), _if(each.name == best, "green")
            )
            for each in studies
        ),
    )
    num_ended = [sum(each.counts[state] for state in ("finished", "pruned", "failed")) for each in studies]
    for number in NUM_ENDED:
        values = [
            best_after(past, number) if number <= ended else None
            for past, ended in zip(histories, num_ended, strict=True)
        ]
        if any(value is not None for value in values):
            cells = (Text("" if value is None else number_in_words(value)) for value in values)
            table.add_row(Text(f"… after {counted(number, 'trial')}"), *cells)
    names = dict.fromkeys(name for each in studies if each.best is not None for name in each.best.config)
    for name in names:
        add(name, lambda study, name=name: _setting(study, name, value_in_words))  # type: ignore[misc]
    return table


def _setting(study: StudySnapshot, name: str, in_words: Callable[[Any], str]) -> str:
    config = {} if study.best is None else study.best.config
    return in_words(config[name]) if name in config else ""


def _if(is_so: bool, style: str) -> str:
    return style if is_so else ""
