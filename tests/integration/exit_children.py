"""Documented objects that a script leaves open, and the ways in which a script can end; `test_exits.py` runs them.

This program has imported everything they need, and forks a process for every case. The child returns to the last line
of this file and exits like any script, through the whole shutdown of the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import strata
import strata.coordinator.embedded
import strata.train.startup
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.identity import Identity
from strata.launch.environment import NOTE, WorkerSpec, worker_environment

DEADLINE_S = 25
"""Deadline for processes that exit by themselves; one that hangs prints its stacks and is killed."""
STATE = {"weights": np.ones(8)}


# -- forms -------------------------------------------------------------------------------------------------------------
# Each returns the object that the script keeps open, and a call that uses it.


def bare_context() -> tuple[Any, Callable[[], object]]:
    ctx = strata.init(checkpoints="ck", every=2)
    ctx.report(step=1, loss=0.1)
    return ctx, lambda: ctx.report(step=2)


def saving_context() -> tuple[Any, Callable[[], object]]:
    ctx = strata.init(checkpoints="ck", every=1)
    ctx.maybe_checkpoint(STATE)
    return ctx, lambda: ctx.report(step=2)


def dropped_context() -> tuple[Any, Callable[[], object]]:
    strata.init(checkpoints="ck", every=2).checkpoint(STATE, step=1)
    return None, lambda: None


def context_again() -> tuple[Any, Callable[[], object]]:
    with strata.init(checkpoints="ck") as first:
        first.report(step=1)
    return bare_context()


def torchrun_context() -> tuple[Any, Callable[[], object]]:
    os.environ.update(RANK="1", WORLD_SIZE="2")
    return bare_context()


def worker() -> tuple[Any, Callable[[], object]]:
    """A worker as `strata run` starts it."""
    server = EmbeddedCoordinator().start()
    place = WorkerSpec(
        identity=Identity(
            run="exits", attempt=0, rank=0, world_size=1, local_rank=0, local_world_size=1, master_port=0
        ),
        coordinator=server.address,
        checkpoints="ck",
    )
    os.environ.update(worker_environment(place))
    ctx, use = bare_context()
    return (ctx, server), use


def orphan() -> tuple[Any, Callable[[], object]]:
    """A worker whose coordinator is gone."""
    (ctx, server), use = worker()
    server.stop()
    return ctx, use


def registry() -> tuple[Any, Callable[[], object]]:
    found = strata.DatasetRegistry()
    found.register_worker("w")
    found.register_dataset("d", total_samples=10, shard_size=5)
    return found, lambda: found.get_assigned_shards("w")


def client() -> tuple[Any, Callable[[], object]]:
    found = strata.CoordinatorClient(EmbeddedCoordinator().start().address)
    found.connect()
    found.register_worker("w")
    return found, found.list_jobs


def async_client() -> tuple[Any, Callable[[], object]]:
    """A client that is not closed when its event loop ends."""
    server = EmbeddedCoordinator().start()

    async def connect() -> strata.AsyncCoordinatorClient:
        found = strata.AsyncCoordinatorClient(server.address)
        await found.connect()
        await found.register_worker("w")
        return found

    return (asyncio.run(connect()), server), lambda: None


def orchestrator() -> tuple[Any, Callable[[], object]]:
    found = strata.TrainingOrchestrator()
    found.register_worker("w")
    found.save(STATE, step=1)
    return found, found.heartbeat


def coordinator() -> tuple[Any, Callable[[], object]]:
    found = EmbeddedCoordinator().start()
    return found, lambda: None


def manager(**arguments: Any) -> tuple[Any, Callable[[], object]]:
    found = strata.CheckpointManager("ck", **arguments)
    found.save(STATE, step=1)
    return found, found.list


def thread_manager() -> tuple[Any, Callable[[], object]]:
    return manager(saver="thread")


def async_manager() -> tuple[Any, Callable[[], object]]:
    found = strata.AsyncCheckpointManager("ck")

    async def save() -> None:
        await found.save(STATE, step=1)

    asyncio.run(save())
    return found, lambda: None


def loader(**arguments: Any) -> tuple[Any, Callable[[], object]]:
    if not Path("rows.parquet").exists():
        pq.write_table(pa.table({"id": np.arange(1_000)}), "rows.parquet", row_group_size=10)
    loader, _ = strata.StructuredDataset.create_dataloader(
        "rows.parquet", batch_size=10, output_format="numpy", **arguments
    )
    batches = iter(loader)
    next(batches)
    return (loader, batches), loader.state_dict


def map_loader() -> tuple[Any, Callable[[], object]]:
    ctx, use = bare_context()
    batches = iter(ctx.dataloader(range(100), batch_size=10, num_workers=1))
    next(batches)
    return (ctx, batches), use


# -- endings -----------------------------------------------------------------------------------------------------------


def falls_off(use: Callable[[], object]) -> None:
    use()


def raises(use: Callable[[], object]) -> None:
    raise RuntimeError("the script's own")


def exits(use: Callable[[], object]) -> None:
    sys.exit(3)


def is_interrupted(use: Callable[[], object]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(DEADLINE_S)


def is_terminated(use: Callable[[], object]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(DEADLINE_S)


def leaves_daemons(use: Callable[[], object]) -> None:
    """Leave threads that use the object while the interpreter exits."""

    def work() -> None:
        while True:
            with contextlib.suppress(strata.StrataError):  # the process is ending
                use()
            time.sleep(0.001)

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    use()


ENDINGS: dict[str, tuple[Callable[[Callable[[], object]], None], int]] = {
    "falls off": (falls_off, 0),
    "raises": (raises, 1),
    "exits": (exits, 3),
    "is interrupted": (is_interrupted, -signal.SIGINT),
    "is terminated": (is_terminated, -signal.SIGTERM),
    "leaves daemons": (leaves_daemons, 0),
}
"""The action that ends the script, and its exit code."""


# -- forks -------------------------------------------------------------------------------------------------------------


def process(make: Callable[[], Any], how: str = "fork") -> int:
    child: Any = multiprocessing.get_context(how).Process(target=make)  # type: ignore[attr-defined]
    child.start()
    child.join(DEADLINE_S)
    code = child.exitcode
    if code is None:
        child.kill()
        raise TimeoutError("a forked process does not end")
    return code


def end_by_deadline(seconds: int = DEADLINE_S) -> None:
    """Print the stacks and kill the process at a deadline; faulthandler's own timer hangs in forked children."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(seconds)


# -- one case ----------------------------------------------------------------------------------------------------------


def begin(case: str, directory: str) -> None:
    """Give the child its own directory and temporary files, and a deadline."""
    Path(directory).mkdir()
    os.chdir(directory)
    Path("tmp").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(Path("tmp").resolve())
    out = os.open("output", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    end_by_deadline()


def run_all(cases: list[str]) -> str:
    """Fork a child for every case, all at once; return the case in each child, and never in the parent."""
    if any("loader" in case for case in cases):
        import torch.utils.data  # noqa: F401 - once, and not in every child
    gc.freeze()  # each child would go through all that is imported when it exits
    children = {}
    for number, case in enumerate(cases):
        pid = os.fork()
        if pid == 0:
            begin(case, f"case-{number}")
            return case
        children[pid] = number
    codes = [0] * len(cases)
    for pid, number in children.items():
        codes[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = []
    for number, code in enumerate(codes):
        place = Path(f"case-{number}")
        left = sorted(path.name for path in (place / "tmp").iterdir() if path.name.startswith(("strata", ".strata")))
        lines = (place / "output").read_text().splitlines(keepends=True)
        output = "".join(line for line in lines if not line.startswith(NOTE))
        found.append({"code": code, "output": output, "left": left})
    print(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    name = run_all(json.loads(sys.argv[1]))
    form, ending = name.split(": ")
    if ending in ("fork", "spawn"):
        sys.exit(process(globals()[form], ending))
    else:
        held, use = globals()[form]()
        ENDINGS[ending][0](use)
