"""`strata tune`: search for a good configuration of a training script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli.exit_codes import ExitCode
from strata.cli.run import DASHBOARD, DashboardAt, Env, Every, Preload, Quiet, environment, script_path
from strata.cli.runs import duration_s
from strata.printing import counted
from strata.terminal import echo, echo_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.tune.snapshot import StudySnapshot
    from strata.tune.study import Study

_SETTINGS = "Settings of the search"
_SCRIPT = "How the script runs"
_PLACE = "Where trials run"


def tune(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file, or a module with -m.", show_default=False)] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
    ] = None,
    space: Annotated[
        str, typer.Option(metavar="FILE", help="YAML file with the space of configurations.", show_default=False)
    ] = "",
    trials: Annotated[
        int | None, typer.Option(help="Number of trials in all. Default: 100.", show_default=False, min=1)
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the objective in the reports. Repeatable. Default: loss.",
            show_default=False,
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    direction: Annotated[
        list[str] | None,
        typer.Option(
            metavar="min|max",
            help="Look for the smallest or the largest value; one for each --metric. Default: min.",
            show_default=False,
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="How to search: random, grid, sobol, bayesian, tpe, cmaes, nsga2, hyperband, asha, median, bohb, pbt. "
            "Default: random.",
            show_default=False,
            rich_help_panel=_SETTINGS,
        ),
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Option of the mode, such as kind=stop or min_step=100. Repeatable.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="Limit of a reported metric that the best trial must meet: 'memory_gb <= 16'. Repeatable.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    warm_start: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STUDY",
            help="Learn from the finished trials of this study first. Repeatable.",
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed and one worker give the same trials. Default: 0.",
            show_default=False,
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    max_failures: Annotated[
        int | None,
        typer.Option(
            help="Failures of a trial, without progress between them, after which it is given up. Default: 3.",
            show_default=False,
            min=1,
            rich_help_panel=_SETTINGS,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", help="Number of trials that run at the same time. Default: 2.", show_default=False, min=1
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Save and stop after this time: 90m, 12h. --resume continues.", show_default=False
        ),
    ] = "",
    report_timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Kill a trial that reports nothing for this long; it is tried again.",
            show_default=False,
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the study. Default: a generated name.", show_default=False)] = "",
    resume: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Continue this study, with the same script and settings; a larger --trials extends it.",
            show_default=False,
        ),
    ] = "",
    config_as: Annotated[
        str,
        typer.Option(
            metavar="flags|env|file",
            help="Pass a configuration as arguments, as environment variables, or as the path of a JSON file.",
            rich_help_panel=_SCRIPT,
        ),
    ] = "flags",
    config_format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="How a parameter is written; {name}, {NAME} and {na-me} are its name. "
            "Default: '--{name} {value}', '{NAME}' for env, '--config {path}' for file.",
            show_default=False,
            rich_help_panel=_SCRIPT,
        ),
    ] = "",
    switches: Annotated[
        bool,
        typer.Option(
            "--switches",
            help="Pass booleans as --NAME or --no-NAME instead of true or false.",
            rich_help_panel=_SCRIPT,
        ),
    ] = False,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="Run SCRIPT as a module, as python -m does.", rich_help_panel=_SCRIPT),
    ] = False,
    every: Every = "",
    env: Env = None,
    preload: Preload = None,
    workers_per_trial: Annotated[
        int, typer.Option(help="Processes that train one configuration together.", min=1, rich_help_panel=_PLACE)
    ] = 1,
    max_workers_per_trial: Annotated[
        int | None,
        typer.Option(
            help="Give the most promising trial up to this number of workers once others leave them free. Default: no.",
            show_default=False,
            min=1,
            rich_help_panel=_PLACE,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="local|ray",
            help="Where trials run: on this machine, or on the Ray cluster of RAY_ADDRESS.",
            rich_help_panel=_PLACE,
        ),
    ] = "local",
    nnodes: Annotated[
        int,
        typer.Option(
            help="Number of machines. Start the same command on each, with the same --name and --coordinator.",
            min=1,
            rich_help_panel=_PLACE,
        ),
    ] = 1,
    coordinator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of a coordinator, for --nnodes.",
            show_default=False,
            rich_help_panel=_PLACE,
        ),
    ] = "",
    dashboard: DashboardAt = DASHBOARD,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: Quiet = False,
) -> None:
    """Search for a good configuration of a training script.

    Runs the script with many configurations, several at a time, and stops the
    poor ones early. The script reports with ctx.report(step=…, loss=…) of
    strata.init(). A trial that is killed resumes from its last checkpoint.
    Arguments after -- are passed to the script.
    """
    from strata.dashboard.page import opener  # noqa: PLC0415 (heavy imports only when the command runs)
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.train.orchestrator import TrainingOrchestrator  # noqa: PLC0415
    from strata.tune import call as studies  # noqa: PLC0415
    from strata.tune.modes import MODES  # noqa: PLC0415
    from strata.tune.script import ConfigStyle, Script  # noqa: PLC0415
    from strata.tune.space import SearchSpace  # noqa: PLC0415

    timeout_s = duration_s(timeout, "timeout") if timeout else None
    report_timeout_s = duration_s(report_timeout, "report-timeout") if report_timeout else None
    if resume:
        _refuse_with_resume(context)
        _carry_out(
            lambda: studies.resume(
                resume,
                num_trials=trials,
                workers=workers,
                max_workers_per_trial=max_workers_per_trial,
                timeout_s=timeout_s,
                report_timeout_s=report_timeout_s,
                quiet=quiet,
                page_of=opener(dashboard, quiet=quiet, is_study=True),
            ),
            name=resume,
            as_json=as_json,
        )
        return
    if not script:
        raise typer.BadParameter("name the script to tune, or a study to continue: --resume NAME")
    if not space:
        raise typer.BadParameter("name the file with the space of configurations: --space space.yaml")
    if mode and mode not in MODES:
        raise ConfigError(f"--mode {mode!r} is unknown; use {', '.join(MODES)}", field="mode")
    for each in direction or ():
        if each not in ("min", "max"):
            raise ConfigError(f"--direction {each!r} is unknown; use min or max", field="direction")
    configurations = SearchSpace.from_yaml(space)
    style = ConfigStyle(how=config_as, format=config_format, has_switches=switches)  # type: ignore[arg-type] # checked
    style.check(configurations.parameters)
    if nnodes > 1 and not (name and coordinator):
        raise ConfigError(
            "--nnodes needs --name NAME and --coordinator HOST:PORT, the same on every machine", field="nnodes"
        )
    chosen = name or _new_name()
    program = Script(
        path=script if module else script_path(script, "tune"),
        arguments=tuple(arguments or ()),
        is_module=module,
        style=style,
        variables=_variables(env or [], every),
        preload=tuple(preload or ()),
    )
    directions = direction or ["min"]
    _carry_out(
        lambda: TrainingOrchestrator(coordinator or None, hpt_mode=mode or "random").tune(
            program,
            space=configurations,
            num_trials=100 if trials is None else trials,
            metric=metric or ["loss"],
            mode=directions[0] if len(directions) == 1 else directions,
            workers=2 if workers is None else workers,
            workers_per_trial=workers_per_trial,
            max_workers_per_trial=max_workers_per_trial,
            engine=engine,
            nnodes=nnodes,
            timeout=timeout_s,
            report_timeout=report_timeout_s,
            max_failures=3 if max_failures is None else max_failures,
            name=chosen,
            seed=seed or 0,
            constraints=constraint or [],
            warm_start=warm_start or [],
            options=_options(option or []),
            quiet=quiet,
            dashboard=False if coordinator else dashboard,
        ),
        name=chosen,
        as_json=as_json,
    )


_WITH_RESUME = frozenset(
    {
        *("resume", "trials", "workers", "max_workers_per_trial", "timeout", "report_timeout"),
        *("dashboard", "as_json", "quiet"),
    }
)


def _refuse_with_resume(context: typer.Context) -> None:
    """Refuse what a study cannot change when it continues."""
    from strata.errors import ConfigError  # noqa: PLC0415

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _WITH_RESUME and source is not None and source.name == "COMMANDLINE":
            if not context.params.get(parameter.name or ""):
                continue  # an argument that is absent
            what = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
            raise ConfigError(
                f"{what} cannot change when a study continues; leave it out, or start a new study without --resume",
                field="resume",
            )


def _new_name() -> str:
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch.record.directory import new_name  # noqa: PLC0415

    return new_name(SystemClock())


def _variables(env: list[str], every: str) -> dict[str, str]:
    from strata.train.startup import EVERY, strategy_of  # noqa: PLC0415

    found = environment(env)
    if every:
        strategy_of(every)
        found[EVERY] = every
    return found


def _options(given: list[str]) -> dict[str, Any]:
    """Return the options of a mode; a value that is not JSON is text."""
    import json  # noqa: PLC0415

    from strata.errors import ConfigError  # noqa: PLC0415

    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--option {text!r} must have the form KEY=VALUE", field="option")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _carry_out(run: Callable[[], Study], *, name: str, as_json: bool) -> None:
    """Run a study and print its result. Exits with a failure if no trial has finished."""
    from strata.launch.actions import Finish  # noqa: PLC0415
    from strata.tune.snapshot import as_plain, snapshot  # noqa: PLC0415

    try:
        study = run()
    except KeyboardInterrupt:
        echo(f"study {name} was interrupted; continue with: strata tune --resume {name}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    found = snapshot(study.state)
    if as_json:
        echo_json({**as_plain(found), "path": str(study.path)})
    outcome = "done" if found.is_complete else "stopped"
    echo(f"{study.name} {outcome}: {found.reason}", err=True)
    if not found.is_complete:
        echo(f"  continue with: strata tune --resume {study.name}", err=True)
    echo(f"  trials: strata studies show {study.name}", err=True)
    echo(f"  logs: {study.path / 'logs'}", err=True)
    if found.best is not None and not as_json:
        echo(*best_lines(found))
    elif found.best is None and found.is_complete:
        _print_failure(study)
        raise typer.Exit(ExitCode.FAILED)
    if not found.is_complete:
        raise typer.Exit(Finish("stopped", found.reason).exit_code)


def best_lines(study: StudySnapshot) -> list[str]:
    """Return the best trial of a study in words."""
    from strata.tune.timeline import number_in_words, value_in_words  # noqa: PLC0415

    best = study.best
    if best is None:
        return []
    values = ", ".join(f"{name} {number_in_words(value)}" for name, value in best.values.items())
    lines = [f"best: trial {best.number}, {values}"]
    lines += [f"  {name}: {value_in_words(value)}" for name, value in best.config.items()]
    return [*lines, f"  checkpoint: {best.checkpoint or 'none saved'}"]


def _print_failure(study: Study) -> None:
    failed = [each for each in study.trials if each.state == "failed"]
    echo(f"  no trial has finished; {counted(len(failed), 'trial')} failed", err=True)
    if failed:
        echo(f"  trial {failed[-1].number}: {failed[-1].reason}", err=True)
