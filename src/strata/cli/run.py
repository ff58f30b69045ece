"""`strata run`, `resume`, `stop` and `scale`: start a run and control it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strata.printing import counted
from strata.terminal import echo

if TYPE_CHECKING:
    from strata.launch.actions import Finish
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.log import Which
    from strata.launch.run import PageOf

Logs = Annotated[
    str, typer.Option(help="Workers whose output is shown: rank0, all or none. auto: rank0, or none with --quiet.")
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Environment variable for the workers. Repeatable."),
]
Every = Annotated[
    str, typer.Option(help="How often maybe_checkpoint saves, unless the script sets it: 50 (steps), 90s or 10m.")
]
Preload = Annotated[
    list[str] | None, typer.Option(metavar="MODULE", help="Also import this module before forking. Repeatable.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the final result.")]
DashboardAt = Annotated[
    str,
    typer.Option(
        "--dashboard",
        metavar="HOST:PORT",
        help="Address of the dashboard on this machine; port 0 picks a free one. 'off': no dashboard.",
    ),
]
DASHBOARD = "127.0.0.1:0"
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or a unique prefix of it.")]


def run(
    script: Annotated[str, typer.Argument(help="Python file, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="Number of worker processes; 2:8 sets a minimum and a maximum.")
    ] = "1",
    name: Annotated[str, typer.Option(help="Name of the run. Default: a generated name.")] = "",
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as python -m does.")] = False,
    max_restarts: Annotated[
        int, typer.Option(help="Number of times the run restarts after a failure before it gives up.")
    ] = 3,
    checkpoints: Annotated[
        str, typer.Option(help="Directory or URL for checkpoints. Default: inside the run's directory.")
    ] = "",
    every: Every = "",
    storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option",
            metavar="KEY=VALUE",
            help="Object store option for --checkpoints, such as region=eu-west-1. Repeatable. "
            "Pass secrets in the environment.",
        ),
    ] = None,
    env: Env = None,
    grace_s: Annotated[
        float, typer.Option(help="Seconds that workers have to save a last checkpoint when the run is stopped.")
    ] = 30.0,
    step_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Restart if a worker finishes no step for this many seconds; 0 disables it. A value that you set also "
            "limits the time from strata.init() to the first step. Default: 600, counted only after the first step.",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[
        bool, typer.Option(help="Fork workers from a process that has already imported torch; restarts are faster.")
    ] = True,
    preload: Preload = None,
    nnodes: Annotated[
        int,
        typer.Option(
            help="Number of machines. Start the same command on each, with the same --name and --coordinator."
        ),
    ] = 1,
    coordinator: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of a coordinator; list leader and standbys separated by commas. "
            "Default: a coordinator inside this process."
        ),
    ] = "",
    node_address: Annotated[
        str,
        typer.Option(
            help="Address at which the other machines reach this one. "
            "Default: the local address of its connection to the coordinator."
        ),
    ] = "",
    min_wait_s: Annotated[
        float, typer.Option(help="Seconds to wait for capacity for the minimum number of workers.")
    ] = 300.0,
    engine: Annotated[str, typer.Option(help="Where workers run: local, or ray for a Ray cluster.")] = "local",
    address: Annotated[
        str,
        typer.Option(
            help="Address of the Ray cluster: auto or HOST:PORT. Default: a new cluster on this machine for this run."
        ),
    ] = "",
    cpus_per_worker: Annotated[float, typer.Option(help="CPUs that each worker reserves on a Ray cluster.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(help="GPUs that each worker reserves on a Ray cluster.")] = 0.0,
    ship: Annotated[
        bool | None,
        typer.Option(help="Let Ray copy the working directory to its nodes. Default: only if they are other machines."),
    ] = None,
    logs: Logs = "auto",
    log_bytes: Annotated[
        str, typer.Option(help="Maximum size of each worker's log; the oldest lines are removed. 0: no limit.")
    ] = "64MiB",
    dashboard: DashboardAt = DASHBOARD,
    quiet: Quiet = False,
) -> None:
    """Run a training script and restart it after failures.

    A restarted run continues at the exact row and step of its last checkpoint.
    Scripts written for torchrun start unchanged. Logs and checkpoints are kept
    in the run's directory.
    """
    from strata.clock import SystemClock  # noqa: PLC0415 (heavy imports only when the command runs)
    from strata.config import parse_bytes  # noqa: PLC0415
    from strata.dashboard.page import opener  # noqa: PLC0415
    from strata.launch.environment import STORAGE_OPTIONS  # noqa: PLC0415
    from strata.launch.record import directory as run_directory  # noqa: PLC0415
    from strata.launch.spec import RunSpec, Size  # noqa: PLC0415
    from strata.train.startup import EVERY, strategy_of  # noqa: PLC0415

    size = Size.parse(workers)
    variables = environment(env or [])
    if every:
        strategy_of(every)
        variables[EVERY] = every
    if storage_option:
        variables[STORAGE_OPTIONS] = _storage_options(storage_option, checkpoints)
    if nnodes > 1:
        _check_shared(name, checkpoints)
    chosen = name or run_directory.new_name(SystemClock())
    path = run_directory.root() / chosen
    spec = RunSpec(
        name=chosen,
        script=script if module else script_path(script),
        arguments=tuple(arguments or ()),
        is_module=module,
        workers=size,
        directory=str(Path.cwd()),
        checkpoints=run_directory.checkpoints_at(checkpoints, path),
        variables=variables,
        max_restarts=max_restarts,
        grace_s=grace_s,
        step_timeout_s=600.0 if step_timeout_s is None else step_timeout_s,
        is_start_watched=step_timeout_s is not None,
        log_bytes=0 if log_bytes.strip() == "0" else parse_bytes(log_bytes, field="log_bytes"),
        is_warm=warm,
        preload=tuple(preload or ()),
        coordinator=coordinator,
        num_nodes=nnodes,
        node_address=node_address,
        min_wait_s=min_wait_s,
        engine=_engine(engine, address),
        address=address,
        cpus_per_worker=cpus_per_worker,
        gpus_per_worker=gpus_per_worker,
        ships=ship,
    )
    if spec.engine == "ray":
        from strata.launch.nodes.ray_cluster import check  # noqa: PLC0415

        check(spec)
    which, page_of = _which(logs, quiet=quiet), opener(dashboard, quiet=quiet)
    _carry_out(run_directory.create(spec), logs=which, quiet=quiet, page_of=page_of)


def resume(
    name: RunName,
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="New number of workers, such as 4 or 2:8. Default: as before.")
    ] = "",
    logs: Logs = "auto",
    dashboard: DashboardAt = DASHBOARD,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last checkpoint.

    Works after the run was stopped, failed or lost its machine.
    """
    import msgspec  # noqa: PLC0415

    from strata.dashboard.page import opener  # noqa: PLC0415
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import open_run  # noqa: PLC0415
    from strata.launch.spec import Size, not_divisible  # noqa: PLC0415

    page_of = opener(dashboard, quiet=quiet)
    directory, which = open_run(name), _which(logs, quiet=quiet)
    if is_study(directory):
        raise ConfigError(
            f"{directory.name} is a study; continue it with `strata tune --resume {directory.name}`", field="run"
        )
    if workers:
        with directory.lock():  # an agent must not read the spec while it changes
            size, status = Size.parse(workers), directory.status
            if status is not None and status.only_workers and not size.allows(status.only_workers):
                raise ConfigError(not_divisible(size, status.only_workers), field="workers")
            directory.write_spec(msgspec.structs.replace(directory.spec, workers=size))
    _carry_out(directory, logs=which, quiet=quiet, page_of=page_of)


def stop(
    name: RunName,
    now: Annotated[bool, typer.Option("--now", help="Stop without saving a checkpoint.")] = False,
) -> None:
    """Save a checkpoint and stop a run, or all running trials of a study.

    `strata resume` continues the run, `strata tune --resume` the study.
    """
    from strata.launch import control  # noqa: PLC0415

    directory, address = _alive(name)
    control.ask(address, control.Stop(is_now=now))
    if is_study(directory):
        when = " now" if now else " once its running trials have saved"
        echo(f"stopping {directory.name}{when}; `strata tune --resume {directory.name}` continues it")
    else:
        echo(f"stopping {directory.name}" + (" now" if now else " after a checkpoint"))


def scale(
    name: RunName,
    workers: Annotated[
        int | None,
        typer.Argument(
            help="New number of workers, without parameter servers, within the --workers range of the run.",
            show_default=False,
        ),
    ] = None,
    servers: Annotated[
        int | None, typer.Option(metavar="N", help="New number of parameter servers.", show_default=False)
    ] = None,
) -> None:
    """Change the number of workers or servers of a running job.

    Changing the number of workers saves a checkpoint and restarts the run.
    If only the number of servers changes, rows move between servers while the
    workers continue.
    """
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch import control  # noqa: PLC0415

    if workers is None and servers is None:
        raise typer.BadParameter("give a number of workers, --servers N, or both")
    directory, address = _alive(name)
    if is_study(directory):
        raise ConfigError(
            f"{directory.name} is a study; stop it, and continue it with another number of trials at a time: strata "
            f"tune --resume {directory.name} --workers N",
            field="run",
        )
    control.ask(address, control.Scale(workers, servers))
    if workers is None:
        echo(f"{directory.name} moves rows to {counted(servers or 0, 'parameter server')} and continues")
    else:
        beside = "" if servers is None else f" and {counted(servers, 'parameter server')}"
        echo(f"{directory.name} continues with {counted(workers, 'worker')}{beside} after a checkpoint")


def _alive(name: str) -> tuple[RunDirectory, str]:
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import is_alive, open_run  # noqa: PLC0415

    directory = open_run(name)
    status = directory.status
    if status is None or not is_alive(status):
        how = f"tune --resume {directory.name}" if is_study(directory) else f"resume {directory.name}"
        raise ConfigError(f"run {directory.name} is not active; `strata {how}` continues it")
    return directory, status.control


def is_study(directory: RunDirectory) -> bool:
    from strata.tune.journal import JOURNAL  # noqa: PLC0415

    return (directory.path / JOURNAL).exists()


def _which(logs: str, *, quiet: bool) -> Which:
    from strata.launch.record.log import parse_which  # noqa: PLC0415

    which = parse_which(logs)
    return "none" if quiet and which == "auto" else which


def _carry_out(directory: RunDirectory, *, logs: Which, quiet: bool, page_of: PageOf | None) -> None:
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch.record.display import display_for  # noqa: PLC0415
    from strata.launch.run import run as run_it  # noqa: PLC0415

    display = display_for(sys.stderr, SystemClock(), quiet)
    try:
        page = None if page_of is None else page_of(directory)
        finish = run_it(directory, display, logs=logs, page=page)
    finally:
        display.close()
    _print_result(directory, finish, logs)
    raise typer.Exit(finish.exit_code)


def _print_result(directory: RunDirectory, finish: Finish, logs: Which) -> None:
    """Print the cause, the last lines of the failed worker unless just shown, and where logs and checkpoints are."""
    from strata.launch.record.log import NUM_LAST_LINES, last_lines  # noqa: PLC0415

    echo(f"{directory.name} {finish.outcome}: {finish.reason}", err=True)
    failed = directory.first_failure() if finish.outcome == "failed" else None
    is_shown = failed is not None and (logs == "all" or (logs != "none" and failed.rank == 0))
    if failed is not None and not is_shown and (lines := last_lines(failed.path, NUM_LAST_LINES)):
        echo(f"  last lines of {failed.path}:", *(f"    {line}" for line in lines), err=True)
    if finish.outcome != "done":
        echo(f"  continue with: strata resume {directory.name}", err=True)
    echo(f"  logs: {directory.path / 'logs'}", err=True)
    status = directory.status
    location, _, last = status.checkpoint.rpartition("/") if status is not None else ("", "", "")
    echo(f"  checkpoints: {f'{location} (last: {last})' if last else 'none saved'}", err=True)


def _storage_options(given: list[str], checkpoints: str) -> str:
    """Return the options as JSON, for the run's directory.

    Raises:
        ConfigError: An option is secret, unknown or invalid, or `checkpoints` is not an object store.
    """
    import msgspec  # noqa: PLC0415

    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.storage import open_store  # noqa: PLC0415
    from strata.storage.object_options import is_secret  # noqa: PLC0415

    pairs = [text.partition("=") for text in given]
    for key, equals, _ in pairs:  # errors never show a value: it may be a secret
        if not key or not equals:
            raise ConfigError("--storage-option must have the form KEY=VALUE", field="storage_options")
        if is_secret(key):
            raise ConfigError(
                f"--storage-option {key}=… would expose a secret in the process list and in the run's directory; "
                "set it in the environment (AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT_KEY, …) or in a profile "
                "(--storage-option profile=NAME)",
                field="storage_options",
            )
    options = {key: value for key, _, value in pairs}
    if "://" not in checkpoints:
        raise ConfigError(
            "--storage-option needs checkpoints in an object store; add --checkpoints s3://BUCKET/PREFIX",
            field="storage_options",
        )
    open_store(checkpoints, options).close()
    return msgspec.json.encode(options).decode()


def _check_shared(name: str, checkpoints: str) -> None:
    """Check the settings that several machines must share.

    Raises:
        ConfigError: The run's name or the location of its checkpoints is missing.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    if not name:
        raise ConfigError("--nnodes needs a run name, the same on every machine; add --name NAME", field="name")
    if not checkpoints:
        raise ConfigError(
            "--nnodes needs checkpoints that every machine can reach; add --checkpoints s3://BUCKET/PREFIX or a "
            "directory of a shared file system",
            field="checkpoints",
        )


def script_path(text: str, command: str = "run") -> str:
    """Return the absolute path, because `strata resume` may run in another directory.

    Raises:
        ConfigError: It is not a file.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    path = Path(text).absolute()
    if path.is_dir():
        raise ConfigError(
            f"{text} is a directory; name the script in it, such as {Path(text) / 'train.py'}", field="script"
        )
    if not path.is_file():
        raise ConfigError(
            f"file {text} does not exist; to run a module, use strata {command} -m {text}", field="script"
        )
    return str(path)


def _engine(text: str, address: str) -> Literal["local", "ray"]:
    from strata.errors import ConfigError  # noqa: PLC0415

    match text:
        case "ray":
            return "ray"
        case "local" if address:
            raise ConfigError(f"--address {address} names a Ray cluster; add --engine ray", field="address")
        case "local":
            return "local"
    raise ConfigError(f"--engine {text!r} is unknown; use local or ray", field="engine")


def environment(given: list[str]) -> dict[str, str]:
    """Return the variables of `--env`.

    Raises:
        ConfigError: One is not NAME=VALUE.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"--env {text!r} must have the form NAME=VALUE", field="env")
        found[name] = value
    return found
