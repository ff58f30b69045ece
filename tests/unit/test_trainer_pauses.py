"""Between two passes of a stream, all workers do what rank 0 has decided."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from strata.clock import ManualClock
from strata.data.stream import Look
from strata.trainer import stream
from strata.trainer.stream import Pauses


class Stopped(Exception):
    pass


class World:
    """A context, a loop and a loader that has no files until `arrives`, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, arrives: float = 1e9, rank: int = 0) -> None:
        self.clock = ManualClock()
        self.arrives, self.rank = arrives, rank
        self.began_s = self.clock.monotonic_s()
        self.wishes: list[str] = []
        """What another rank wishes, if this is not rank 0."""
        self.step, self.epoch, self.is_saved, self.reason, self.is_due = 7, 1, False, "", False
        self.did: list[str] = []
        self.checkpoints = SimpleNamespace(should_save=lambda _: self.is_due)
        self.is_interrupted, self.may_lose_ranks, self.is_begun = False, False, False
        self.history = SimpleNamespace(stop_reason="")
        self.parts = SimpleNamespace(loader=self, history=self.history)
        monkeypatch.setattr(stream.time, "sleep", self.clock.advance)

    def look(self, wish: Any) -> Look:
        return self.find(wish)

    def begin(self, find: Any) -> Look:
        return find() if self.rank == 0 else Look(files=("of rank 0",))

    @contextlib.contextmanager
    def together(self, name: str, *, timeout_s: float) -> Iterator[None]:
        self.did.append(f"meet for {name} within {timeout_s} s")
        yield
        self.did.append("part")

    def will_end(self) -> None:
        self.did.append("will end")

    def find(self, wish: Any) -> Look:
        has_files = self.clock.monotonic_s() - self.began_s >= self.arrives
        wanted = wish(has_files) if self.rank == 0 else (self.wishes.pop(0) if self.wishes else "")
        return Look(wish=wanted) if wanted else Look(files=("a",) if has_files else ())

    def stop_reason(self) -> str:
        return self.reason

    def idle(self) -> None:
        self.did.append("idle")

    def save(self) -> None:
        self.did.append("save")
        self.is_saved = True

    def stop(self, reason: str) -> None:
        self.did.append(f"stop: {reason}")
        raise Stopped

    def end_if_interrupted(self) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt

    def wait(self, idle_timeout_s: float | None = None) -> bool:
        found: Any = self
        return Pauses(found, idle_timeout_s, clock=self.clock).wait_for_files(found)


def test_a_stream_waits_for_files_and_reports_that_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, arrives=3.0)
    assert world.wait(idle_timeout_s=3.0)
    assert world.did == ["idle"] * 3


def test_a_stream_ends_after_the_idle_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert not world.wait(idle_timeout_s=5.0)
    assert world.history.stop_reason == "no new file for 5 s"


def test_a_save_that_is_due_is_made_once_while_a_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, arrives=4.0)
    world.is_due = True
    assert world.wait()
    assert world.did.count("save") == 1


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_stop_saves_what_is_not_saved(monkeypatch: pytest.MonkeyPatch, is_saved: bool) -> None:
    world = World(monkeypatch)
    world.is_saved, world.reason = is_saved, "strata stop"
    with pytest.raises(Stopped):
        world.wait()
    assert world.did == ([] if is_saved else ["save"]) + ["stop: strata stop"]


def test_other_ranks_follow_rank_0_and_not_their_own_view(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, rank=1)
    world.is_due = True
    world.wishes = ["", "save it is due", "stop strata stop"]
    with pytest.raises(Stopped):
        world.wait(idle_timeout_s=0.5)
    assert world.did == ["idle", "save", "idle", "stop: strata stop"]


def test_ctrl_c_interrupts_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        world.wait()


def test_workers_that_restart_alone_meet_once_there_are_files_and_save_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, arrives=2.0)
    world.may_lose_ranks = True
    assert world.wait()
    assert world.did == ["idle", "idle", "meet for pass 1 within inf s", "save", "part"]
    other = World(monkeypatch, rank=1)
    other.may_lose_ranks = True
    assert other.wait()
    assert other.did == ["meet for pass 1 within inf s", "save", "part"]


def test_a_worker_that_was_restarted_within_a_pass_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, arrives=0.0)
    world.may_lose_ranks = world.is_begun = True
    assert world.wait()
    assert world.did == []


def test_once_workers_know_of_the_end_none_is_restarted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.may_lose_ranks = world.is_saved = True
    assert not world.wait(idle_timeout_s=2.0)
    assert world.did == ["idle", "idle", "meet for pass 1 within inf s", "will end", "part"]
