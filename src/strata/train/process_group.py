"""Torch's process group: all the time, or in `Meetings` for the moments at which workers need each other.

A process group does not survive the loss of a member. The workers of an asynchronous run therefore form one only to
validate or to end, and destroy it afterwards; in between, a worker can be lost and restarted alone. Before they form
it, they wait for each other at a store that rank 0 keeps. A rank that is lost while it waits comes again; one that is
lost within a meeting takes the others with it.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from strata.errors import StrataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strata.identity import Identity
    from strata.train.context import Context

ARRIVAL_TIMEOUT_S = 6 * 3600.0
"""Time for the slowest worker to arrive: workers of an asynchronous run may differ in speed."""
CONNECT_S = 60.0
"""Time for rank 0 to open its store, also after it was restarted; the next try follows at once."""
POLL_S, MAX_POLL_S = 0.05, 0.5
"""Time between two looks at the store, which grows with the wait."""
MEETING = "meeting"
_MASTER = {"MASTER_ADDR", "MASTER_PORT"}


def device_of(local_rank: int) -> torch.device:
    """Return a process's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Fewer devices than ranks, where each process sees only its own.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def initialize(identity: Identity, *, has_servers: bool, arguments: Mapping[str, Any]) -> None:
    """Initialize torch's process group of the workers: NCCL with CUDA, gloo otherwise. `arguments` go to torch."""
    device = device_of(identity.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    defaults: dict[str, Any] = {"backend": "nccl" if device.type == "cuda" else "gloo"}
    has_rendezvous = arguments.keys() & {"store", "init_method"} or os.environ.keys() >= _MASTER
    if identity.world_size == 1 and not has_rendezvous:  # plain `python`
        store = distributed.HashStore()  # type: ignore[attr-defined]  # torch does not declare the export
        defaults |= {"store": store, "rank": 0, "world_size": 1}
    elif has_servers:  # the environment counts them too
        defaults |= {"rank": identity.rank, "world_size": identity.world_size}
    distributed.init_process_group(**{**defaults, **arguments})


class Meetings:
    """The meetings of one worker. Rank 0 creates its object first: it opens the port of the attempt."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._own: Any = self._open(is_master=True) if ctx.rank == 0 and ctx.world_size > 1 else None

    @contextlib.contextmanager
    def meet(self, name: str, timeout_s: float = ARRIVAL_TIMEOUT_S) -> Iterator[None]:
        """Wait for all workers, and run the body with a process group. `name` is used once in an attempt.

        Raises:
            StrataError: A worker does not arrive in time; the message names it.
        """
        with self._present(name, timeout_s):
            yield
        self._ctx.alone.release(MEETING)  # after an error, it stays: all workers restart

    @contextlib.contextmanager
    def _present(self, name: str, timeout_s: float) -> Iterator[None]:
        if self._ctx.world_size == 1:
            self._ctx.alone.hold(MEETING)
            yield
            return
        with self._ctx.time_use.during("barrier_s"):
            store = self._arrive(name, timeout_s)
        own = distributed.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch does not declare the export
        self._ctx.init_process_group(store=own, rank=self._ctx.rank, world_size=self._ctx.world_size)
        try:
            yield
        finally:
            distributed.destroy_process_group()

    def _arrive(self, name: str, timeout_s: float) -> Any:
        ctx = self._ctx
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        store = self._own
        missing = list(range(ctx.world_size))
        ctx.membership.report("IDLE")  # waiting for a slow worker is not a hang
        while True:
            try:
                store = store or self._open(is_master=False)
                store.set(_arrival(name, ctx.rank), "")
                missing = [rank for rank in missing if not store.check([_arrival(name, rank)])]
            except RuntimeError:  # of torch: rank 0 was lost, and is restarted alone
                if ctx.rank == 0 or time.monotonic() > deadline_s:
                    raise
                store, missing = None, list(range(ctx.world_size))
            if not missing:
                ctx.alone.hold(MEETING)
                return store
            if time.monotonic() > deadline_s:
                raise StrataError(
                    f"worker {', '.join(map(str, missing))} has not arrived for {name!r} within "
                    f"{timeout_s:g} s; its log shows why"
                )
            time.sleep(min(max(POLL_S, (time.monotonic() - began_s) / 100), MAX_POLL_S))

    def _open(self, *, is_master: bool) -> Any:
        identity = self._ctx.identity
        return distributed.TCPStore(  # type: ignore[attr-defined]  # as above
            identity.master_addr,
            identity.master_port,
            self._ctx.world_size,
            is_master,
            timeout=timedelta(seconds=CONNECT_S),
            wait_for_workers=False,
        )


def _arrival(name: str, rank: int) -> str:
    return f"arrived/{name}/{rank}"
