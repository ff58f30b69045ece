"""Ranks that the nursery forks: each has a manager, saves and waits on command, and is killed."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import strata
from strata.checkpoint import Ranks, Shard
from strata.checkpoint.saver.client import ProcessSaver
from strata.coordinator.client import ClientConfig, CoordinatorClient
from strata.errors import StrataError
from strata.launch.commit import CoordinatorCommit

if TYPE_CHECKING:
    from nursery import Lifeline

ROWS, COLUMNS = 3_000, 64


def table_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=(ROWS, COLUMNS)).astype(np.float32)


def state_of(rank: int, size: int, step: int) -> dict[str, Any]:
    start, end = ROWS * rank // size, ROWS * (rank + 1) // size
    rows = Shard(table_of(step)[start:end], shape=(ROWS, COLUMNS), start=(start, 0))
    return {"emb": rows, "model": {"w": np.full(1_000, step)}, "own": np.array([step, rank])}


def is_state(loaded: dict[str, Any], rank: int, step: int) -> bool:
    own = loaded["own"].tolist()
    return np.array_equal(loaded["emb"], table_of(step)) and own == [step, rank] and loaded["model"]["w"][9] == step


def rank_of(lifeline: Lifeline, *, place: str, rank: int, address: str = "") -> None:
    """Execute `{"do": NAME, "arguments": {…}}` and report the result or the error."""
    with contextlib.ExitStack() as stack:
        process = _Process(place, rank, stack)
        if address:
            process.join(address)
        lifeline.send(is_there=True)
        while (order := lifeline.receive()) is not None:
            began_s = time.monotonic()
            try:
                lifeline.send(error="", **getattr(process, order["do"])(**order.get("arguments", {})))
            except StrataError as error:
                lifeline.send(
                    error=type(error).__name__,
                    message=error.message,
                    missing=error.missing,
                    took_s=time.monotonic() - began_s,
                )


class _Process:
    def __init__(self, place: str, rank: int, stack: contextlib.ExitStack) -> None:
        self._place = place
        self._rank = rank
        self._stack = stack
        self._commit: CoordinatorCommit | None = None

    def join(self, address: str) -> None:
        config = ClientConfig(backoff_s=0.01, max_backoff_s=0.1, silence_s=1.0)
        client = self._stack.enter_context(CoordinatorClient(address, config=config))
        self._worker = client.register_worker(f"w{self._rank}")

    def open(self, size: int, session: str, timeout_s: float, has_coordinator: bool = False) -> dict[str, Any]:
        """Open a manager for a new session."""
        if has_coordinator:
            self._worker.wait_for_workers(size)
            self._commit = CoordinatorCommit(self._worker)
        self._ranks = Ranks(rank=self._rank, size=size, session=session, timeout_s=timeout_s)
        self._manager = strata.CheckpointManager(
            self._place, saver="process", ranks=self._ranks, commit=self._commit, keep_count=5
        )
        self._manager.prepare(state_of(self._rank, size, 0))
        saver = self._manager._saver
        assert isinstance(saver, ProcessSaver)
        return {"saver": saver.pid}

    def save(self, step: int, is_bad: bool = False) -> dict[str, Any]:
        state = state_of(self._rank, self._ranks.size, step)
        self._save = self._manager.save({**state, "bad": object()} if is_bad else state, step=step)
        return {"id": self._save.id}

    def wait(self) -> dict[str, Any]:
        """Wait until the save is committed, rank 0 has cleaned up, and stopping the idle saver would delay no rank."""
        saved = self._save.wait(120.0)
        self._manager.wait()
        self._manager._saver.claim()
        return {"id": saved.id, "num_ranks": saved.num_ranks}

    def look(self) -> dict[str, Any]:
        """Check that every listed checkpoint is intact; return their steps and the newest step."""
        listed = self._manager.list()
        for one in listed:
            self._manager.verify(id=one.id)
            assert is_state(self._manager.load(id=one.id), self._rank, one.step)
        newest = self._manager.latest()
        return {"steps": [one.step for one in listed], "newest": newest.step if newest is not None else None}

    def load(self) -> dict[str, Any]:
        """Load the checkpoint that all ranks agree on; return its step."""
        loaded = self._manager.load()
        step = int(loaded["own"][0])
        assert is_state(loaded, self._rank, step)
        return {"step": step}
