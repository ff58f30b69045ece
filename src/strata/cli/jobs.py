"""`strata jobs`: list and delete the jobs of a coordinator."""

from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from strata.printing import counted
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.coordinator.client import CoordinatorClient

app = typer.Typer(help="List and drop the jobs of a coordinator.", no_args_is_help=True)

Address = Annotated[str, typer.Option(help="Address of the coordinator: HOST:PORT or unix:PATH.")]
TimeoutS = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)]
TokenFile = Annotated[
    str, typer.Option(help="File that contains the token. Default: STRATA_TOKEN or STRATA_TOKEN_FILE.")
]
TlsCa = Annotated[
    str, typer.Option(help="CA certificate (PEM) of the coordinator; enables TLS. Default: STRATA_TLS_CA.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def root() -> None:
    """List and drop the jobs of a coordinator."""


@app.command()
def ls(
    address: Address = "localhost:50051",
    timeout_s: TimeoutS = 5.0,
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
    as_json: AsJson = False,
) -> None:
    """List the jobs, oldest first."""
    with _connected(address, timeout_s, token_file, tls_ca) as client:
        jobs = client.list_jobs()
    if as_json:
        echo_json({"jobs": [asdict(job) for job in jobs]})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("job")
    for heading in ("generation", "workers", "datasets", "checkpoint step"):
        table.add_column(heading, justify="right")
    for job in jobs:
        numbers = (job.generation, job.num_workers, job.num_datasets, job.checkpoint_step)
        table.add_row(escape(job.job_id), *map(str, numbers))
    console = Console(highlight=False)
    console.print(table if jobs else f"no jobs at {escape(address)}")


@app.command()
def drop(
    job: Annotated[str, typer.Argument(help="Job to drop.")],
    force: Annotated[
        bool, typer.Option("--force", help="Drop the job even if it has workers; they are evicted.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Reason to record in the event history.")] = "",
    address: Address = "localhost:50051",
    timeout_s: TimeoutS = 5.0,
    token_file: TokenFile = "",
    tls_ca: TlsCa = "",
) -> None:
    """Remove a job from the coordinator's state.

    Removes its datasets with their progress, its commands and its checkpoint
    records; checkpoint files and the event history stay. If the coordinator uses
    tokens, this needs one with the role admin.
    """
    from strata.errors import UnknownJob  # noqa: PLC0415

    with _connected(address, timeout_s, token_file, tls_ca) as client:
        found = next((one for one in client.list_jobs() if one.job_id == job), None)
        if found is None:
            raise UnknownJob(f"the coordinator at {address} has no job {job!r}; `strata jobs ls` lists its jobs")
        client.drop_job(job, force=force, generation=found.generation, reason=reason)
    workers = f"; {counted(found.num_workers, 'worker')} evicted" if found.num_workers else ""
    echo(f"dropped job {job}{workers}")


@contextmanager
def _connected(address: str, timeout_s: float, token_file: str, tls_ca: str) -> "Iterator[CoordinatorClient]":
    from strata.coordinator.client import ClientConfig, CoordinatorClient  # noqa: PLC0415 (imports grpc)
    from strata.transport.credentials import ClientSecurity  # noqa: PLC0415

    security = ClientSecurity(token_file=token_file, ca=tls_ca)
    config = ClientConfig(connect_timeout_s=timeout_s, call_timeout_s=timeout_s)
    with CoordinatorClient(address, config=config, security=security) as client:
        yield client
