"""`strata status`: the jobs of a coordinator with their workers and datasets."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from strata.terminal import Console, echo_json

if TYPE_CHECKING:
    from strata.coordinator.state.views import DatasetInfo, JobInfo, MembershipInfo, WorkerInfo


DEFAULT_ADDRESS = "localhost:50051"
NO_ACTIVE_RUN = "no run is active on this machine; `strata ps` lists its runs"


def status(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Name of a run on this machine. Default: the active run.", show_default=False
        ),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Address of a coordinator: HOST:PORT or unix:PATH. "
            f"Default: the coordinator of the run, or {DEFAULT_ADDRESS}."
        ),
    ] = "",
    job: Annotated[str | None, typer.Option(help="Show only this job.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)] = 5.0,
    token_file: Annotated[
        str, typer.Option(help="File that contains the token. Default: STRATA_TOKEN or STRATA_TOKEN_FILE.")
    ] = "",
    tls_ca: Annotated[
        str, typer.Option(help="CA certificate (PEM) of the coordinator; enables TLS. Default: STRATA_TLS_CA.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the jobs, workers and datasets of a coordinator.

    Without arguments, asks the coordinator of the run that is active on this
    machine.
    """
    from strata.cli.runs import choose_run  # noqa: PLC0415
    from strata.coordinator.client import ClientConfig, CoordinatorClient  # noqa: PLC0415 (imports grpc)
    from strata.errors import ConfigError, CoordinatorUnavailable  # noqa: PLC0415
    from strata.launch.record.directory import UNDER_WAY, state_now  # noqa: PLC0415
    from strata.transport.credentials import ClientSecurity  # noqa: PLC0415

    run = choose_run(name, is_elsewhere=bool(address))
    if run is not None:
        run_status = run.status
        if run_status is None or state_now(run_status) not in UNDER_WAY:
            raise ConfigError(
                f"run {run.name} is not active ({state_now(run_status)}); `strata events {run.name}` prints its "
                f"history and `strata logs {run.name}` the output of its workers",
                field="run",
            )
        address = run_status.coordinator or run.spec.coordinator
    security = ClientSecurity(token_file=token_file, ca=tls_ca)
    config = ClientConfig(connect_timeout_s=timeout_s, call_timeout_s=timeout_s)
    try:
        with CoordinatorClient(address or DEFAULT_ADDRESS, config=config, security=security) as client:
            found = [
                (j, client.list_workers(job_id=j.job_id), client.list_datasets(job_id=j.job_id))
                for j in client.list_jobs()
                if job in (None, j.job_id)
            ]
    except CoordinatorUnavailable as error:
        if address:
            raise
        raise CoordinatorUnavailable(f"{NO_ACTIVE_RUN}. {DEFAULT_ADDRESS}: {error.message}") from error
    address = address or DEFAULT_ADDRESS
    if as_json:
        objects = [
            {
                **asdict(j),
                "reason": m.reason,
                "workers": [_plain(w) for w in m.workers],
                "datasets": [asdict(d) for d in ds],
            }
            for j, m, ds in found
        ]
        echo_json({"jobs": objects})
        return
    console = Console(highlight=False)
    if not found:
        console.print(f"no jobs at {escape(address)}" if job is None else f"no job {escape(job)} at {escape(address)}")
    for j, members, datasets in found:
        _print_job(console, j, members, datasets)


def _plain(worker: "WorkerInfo") -> dict[str, Any]:
    """Return the JSON object of a worker; that of a parameter server has its number and what it has measured."""
    from strata.coordinator.state.server_figures import figures_of, number_of  # noqa: PLC0415

    figures = figures_of(worker.metrics)
    roles = {"server": number_of(worker.metrics), "figures": None if figures is None else figures.as_plain()}
    return {**asdict(worker), **roles}


def _print_job(console: Console, job: "JobInfo", members: "MembershipInfo", datasets: "list[DatasetInfo]") -> None:
    from strata.coordinator.state.server_figures import number_of  # noqa: PLC0415
    from strata.launch.environment import METRICS  # noqa: PLC0415
    from strata.launch.record.view import WorkerView, server_table  # noqa: PLC0415

    servers = [w for w in members.workers if number_of(w.metrics) is not None]
    table = Table(title=f"job {escape(job.job_id)}, generation {job.generation}", title_justify="left")
    for heading in ("rank", "worker", "state", "step", "last heartbeat", "metrics"):
        table.add_column(heading, justify="right" if heading in ("rank", "step", "last heartbeat") else "left")
    for w in members.workers:
        if w in servers:
            continue
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in w.metrics.items() if not METRICS.is_ours(name))
        table.add_row(str(w.rank), escape(w.worker_id), w.state, str(w.step), _heartbeat(w), escape(metrics))
    console.print(table)
    if servers:
        console.print(server_table([WorkerView.of(w.rank, w) for w in servers], max_shown=len(servers)))
    console.print(f"last change: {escape(members.reason)}", soft_wrap=True)
    for d in datasets:
        console.print(f"dataset {escape(d.dataset_id)}: epoch {d.epoch}, {d.num_done} of {d.num_shards} shards done")
    if job.checkpoint_step:
        console.print(f"checkpoint at step {job.checkpoint_step}")


def _heartbeat(worker: "WorkerInfo") -> str:
    ago = f"{worker.silent_s:.1f} s ago"
    return f"[red]{ago}, connection lost[/red]" if worker.suspect else ago
