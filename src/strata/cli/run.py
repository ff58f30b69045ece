"""`strata run` and its kin: start a script on workers, stop it, change their number, go on with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strata.printing import counted
from strata.terminal import echo

if TYPE_CHECKING:
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.log import Which
    from strata.launch.supervisor import Finish

Logs = Annotated[str, typer.Option(help="Whose output to show: rank0, all or none. auto: rank 0, unless --quiet.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but the end.")]


def run(
    script: Annotated[str, typer.Argument(help="A Python file; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Handed to the script.")] = None,
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="How many processes; 2:8 for a run that may shrink and grow.")
    ] = "1",
    name: Annotated[str, typer.Option(help="What to call the run; made up if left out.")] = "",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    max_restarts: Annotated[int, typer.Option(help="How many failures the run may survive.")] = 3,
    checkpoints: Annotated[
        str, typer.Option(help="A directory or URL for checkpoints; left out, in the run's directory.")
    ] = "",
    every: Annotated[
        str, typer.Option(help="When maybe_checkpoint saves, unless the script says so: 50 (steps), 90s, 10m.")
    ] = "",
    storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option",
            metavar="KEY=VALUE",
            help="For checkpoints in an object store, as region=eu-west-1. Repeatable. Secrets: by environment only.",
        ),
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for the workers; repeat it.")] = None,
    grace_s: Annotated[float, typer.Option(help="What workers have for a last checkpoint when stopped.")] = 30.0,
    step_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Restart if a worker makes no step for so long, also before its first one. 0: never. "
            "Default: 600 after the first step.",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[bool, typer.Option(help="Fork workers from a process that has imported torch.")] = True,
    preload: Annotated[list[str] | None, typer.Option(help="Also import this before forking; repeat it.")] = None,
    nnodes: Annotated[
        int,
        typer.Option(help="How many machines; say the same on each, with one --name, and where the coordinator is."),
    ] = 1,
    coordinator: Annotated[
        str, typer.Option(help="HOST:PORT of a coordinator; leader and standbys with commas. Left out: one inside.")
    ] = "",
    node_address: Annotated[
        str, typer.Option(help="Where the other machines reach this one; left out: as on the way to the coordinator.")
    ] = "",
    min_wait_s: Annotated[
        float, typer.Option(help="How long to wait while there is room for fewer workers than the least.")
    ] = 300.0,
    engine: Annotated[str, typer.Option(help="Where workers are: local, or ray for a Ray cluster.")] = "local",
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster: auto, or HOST:PORT. Left out: one here, for this run.")
    ] = "",
    cpus_per_worker: Annotated[float, typer.Option(help="What a worker reserves on a Ray cluster.")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(help="What a worker reserves on a Ray cluster.")] = 0.0,
    ship: Annotated[
        bool | None,
        typer.Option(help="Whether Ray copies this directory to its nodes; left out: if they are other machines."),
    ] = None,
    logs: Logs = "auto",
    log_bytes: Annotated[
        str, typer.Option(help="How much of each worker's log to keep, the newest, as 64MiB. 0: all of it.")
    ] = "64MiB",
    quiet: Quiet = False,
) -> None:
    """Run a script on several workers, and bring it back to the exact row and step whatever dies.

    Scripts for torchrun start unchanged. Logs and checkpoints are kept in the run's directory.
    """
    from strata.clock import SystemClock  # noqa: PLC0415 - heavy imports only when it runs
    from strata.config import parse_bytes  # noqa: PLC0415
    from strata.launch.environment import STORAGE_OPTIONS  # noqa: PLC0415
    from strata.launch.record import directory as run_directory  # noqa: PLC0415
    from strata.launch.spec import RunSpec, Size  # noqa: PLC0415
    from strata.train.startup import EVERY, strategy_of  # noqa: PLC0415

    size = Size.parse(workers)
    variables = _variables(env or [])
    if every:
        strategy_of(every)
        variables[EVERY] = every
    if storage_option:
        variables[STORAGE_OPTIONS] = _storage_options(storage_option, checkpoints)
    if nnodes > 1:
        _check_shared(name, checkpoints)
    chosen = name or run_directory.new_name(SystemClock())
    place = run_directory.root() / chosen
    spec = RunSpec(
        name=chosen,
        script=script if module else _script(script),
        arguments=tuple(arguments or ()),
        is_module=module,
        workers=size,
        directory=str(Path.cwd()),
        checkpoints=run_directory.checkpoints_at(checkpoints, place),
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
    which = _which(logs, quiet=quiet)
    _carry_out(run_directory.create(spec), logs=which, quiet=quiet)


def resume(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Its name, or the beginning of it.")],
    workers: Annotated[str, typer.Option("--workers", "-w", help="Another number of processes than before.")] = "",
    logs: Logs = "auto",
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped, failed, or lost its machine, from its last checkpoint."""
    import msgspec  # noqa: PLC0415

    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import open_run  # noqa: PLC0415
    from strata.launch.spec import Size, not_divisible  # noqa: PLC0415

    directory, which = open_run(name), _which(logs, quiet=quiet)
    if workers:
        with directory.lock():  # not under the feet of an agent
            size, status = Size.parse(workers), directory.status
            if status is not None and status.only_workers and not size.allows(status.only_workers):
                raise ConfigError(not_divisible(size, status.only_workers), field="workers")
            directory.write_spec(msgspec.structs.replace(directory.spec, workers=size))
    _carry_out(directory, logs=which, quiet=quiet)


def stop(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Its name, or the beginning of it.")],
    now: Annotated[bool, typer.Option("--now", help="Without a last checkpoint.")] = False,
) -> None:
    """Let a run save a checkpoint and stop; `strata resume` goes on with it."""
    from strata.launch import control  # noqa: PLC0415

    directory, address = _alive(name)
    control.ask(address, control.Stop(is_now=now))
    echo(f"{directory.name} is asked to stop" + (" now" if now else " after a checkpoint"))


def scale(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Its name, or the beginning of it.")],
    workers: Annotated[int, typer.Argument(help="How many, within what the run was started with.")],
) -> None:
    """Change the number of workers of a running job, from the next step on."""
    from strata.launch import control  # noqa: PLC0415

    directory, address = _alive(name)
    control.ask(address, control.Scale(workers))
    echo(f"{directory.name} goes on with {counted(workers, 'worker')} after a checkpoint")


def _alive(name: str) -> tuple[RunDirectory, str]:
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import is_alive, open_run  # noqa: PLC0415

    directory = open_run(name)
    status = directory.status
    if status is None or not is_alive(status):
        raise ConfigError(f"{directory.name} does not run; `strata resume {directory.name}` goes on with it")
    return directory, status.control


def _which(logs: str, *, quiet: bool) -> Which:
    from strata.launch.record.log import parse_which  # noqa: PLC0415

    which = parse_which(logs)
    return "none" if quiet and which == "auto" else which


def _carry_out(directory: RunDirectory, *, logs: Which, quiet: bool) -> None:
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.launch.record.view import display_for  # noqa: PLC0415
    from strata.launch.run import run as run_it  # noqa: PLC0415

    display = display_for(sys.stderr, SystemClock(), quiet)
    try:
        finish = run_it(directory, display, logs=logs)
    finally:
        display.close()
    _tell(directory, finish, logs)
    raise typer.Exit(finish.exit_code)


def _tell(directory: RunDirectory, finish: Finish, logs: Which) -> None:
    """The cause first, with the end of its log, unless that was just shown; then where everything is."""
    from strata.launch.record.log import NUM_LAST_LINES, last_lines  # noqa: PLC0415

    echo(f"{directory.name} {finish.outcome}: {finish.reason}", err=True)
    failed = directory.first_failure() if finish.outcome == "failed" else None
    is_shown = failed is not None and (logs == "all" or (logs != "none" and failed.rank == 0))
    if failed is not None and not is_shown and (lines := last_lines(failed.path, NUM_LAST_LINES)):
        echo(f"  the end of {failed.path}:", *(f"    {line}" for line in lines), err=True)
    if finish.outcome != "done":
        echo(f"  go on with it: strata resume {directory.name}", err=True)
    echo(f"  logs: {directory.path / 'logs'}", err=True)
    status = directory.status
    place, _, last = status.checkpoint.rpartition("/") if status is not None else ("", "", "")
    echo(f"  checkpoints: {f'{place} (the last is {last})' if last else 'none was saved'}", err=True)


def _storage_options(given: list[str], checkpoints: str) -> str:
    """As JSON. It is kept in the run's directory, and a command line is seen by everybody on the machine.

    Raises:
        ConfigError: One is secret, unknown or cannot be; or the checkpoints are in a directory.
    """
    import msgspec  # noqa: PLC0415

    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.storage import open_store  # noqa: PLC0415
    from strata.storage.object_options import is_secret  # noqa: PLC0415

    pairs = [text.partition("=") for text in given]
    for key, equals, _ in pairs:  # without their values: any of them may be one
        if not key or not equals:
            raise ConfigError("--storage-option wants KEY=VALUE", field="storage_options")
        if is_secret(key):
            raise ConfigError(
                f"--storage-option {key}=… would show a secret in the list of processes and in the run's directory; "
                "set it in the environment (AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT_KEY, …) or in a profile "
                "(--storage-option profile=NAME)",
                field="storage_options",
            )
    options = {key: value for key, _, value in pairs}
    if "://" not in checkpoints:
        raise ConfigError(
            "--storage-option is for checkpoints in an object store; say --checkpoints s3://BUCKET/PREFIX, too",
            field="storage_options",
        )
    open_store(checkpoints, options).close()
    return msgspec.json.encode(options).decode()


def _check_shared(name: str, checkpoints: str) -> None:
    """What several machines must have in common."""
    from strata.errors import ConfigError  # noqa: PLC0415

    if not name:
        raise ConfigError("nodes find each other by the run's name; give the same --name on each", field="name")
    if not checkpoints:
        raise ConfigError(
            "every node must reach the checkpoints; name a place that all of them have: --checkpoints s3://… or a "
            "directory of a shared file system",
            field="checkpoints",
        )


def _script(text: str) -> str:
    """Absolute: `strata resume` may be called from elsewhere.

    Raises:
        ConfigError: There is no such file.
    """
    from strata.errors import ConfigError  # noqa: PLC0415

    path = Path(text).absolute()
    if not path.is_file():
        raise ConfigError(f"there is no file {text}; for a module, say strata run -m {text}", field="script")
    return str(path)


def _engine(text: str, address: str) -> Literal["local", "ray"]:
    from strata.errors import ConfigError  # noqa: PLC0415

    match text:
        case "ray":
            return "ray"
        case "local" if address:
            raise ConfigError(f"--address {address} is that of a Ray cluster; say --engine ray, too", field="address")
        case "local":
            return "local"
    raise ConfigError(f"--engine {text!r} is neither local nor ray", field="engine")


def _variables(given: list[str]) -> dict[str, str]:
    from strata.errors import ConfigError  # noqa: PLC0415

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"--env {text!r} is not NAME=VALUE", field="env")
        found[name] = value
    return found
