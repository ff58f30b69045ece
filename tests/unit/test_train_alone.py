"""What a process declares about its restart survives its death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from strata.launch.environment import ALONE, take_alone
from strata.train.agreement import Agreement, Due
from strata.train.alone import Alone


def test_a_process_that_declares_nothing_restarts_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alone"
    Alone({ALONE: str(path)}).hold("saving")
    assert not take_alone(path)
    Alone({}).begin()  # without an agent


def test_a_process_may_restart_alone_unless_the_others_rely_on_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alone"

    def declared(*steps: str) -> bool:
        alone = Alone({ALONE: str(path)})
        alone.begin()
        for step in steps:
            act, _, reason = step.partition(" ")
            (alone.hold if act == "hold" else alone.release)(reason)
        return take_alone(path)

    assert declared()
    assert not declared("hold saving")
    assert not declared("hold saving", "hold meeting", "release saving")
    assert declared("hold saving", "hold meeting", "release saving", "release meeting")
    assert not take_alone(path), "it is taken once"


def test_a_reason_from_before_the_beginning_counts(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alone"
    alone = Alone({ALONE: str(path)})
    alone.hold("agreeing")
    alone.begin()
    assert not take_alone(path)


def test_a_killed_process_leaves_its_last_declaration(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alone"
    pid = os.fork()
    if not pid:
        alone = Alone({ALONE: str(path)})
        alone.begin()
        alone.hold("saving")
        alone.release("saving")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert take_alone(path)


def test_the_others_rely_on_a_rank_from_its_limit_until_the_agreed_step() -> None:
    calls: list[str] = []
    agreement = Agreement(4, on_limit=lambda: calls.append("limit"))
    agreement.when_idle(lambda: calls.append("idle"))
    assert agreement.set_limit() == 5
    agreement.when_idle(lambda: calls.append("too early"))
    agreement.agree(Due("checkpoint", 6, "time"))
    assert agreement.take_due(5, timeout_s=0.0) == []
    agreement.when_idle(lambda: calls.append("too early"))
    assert len(agreement.take_due(6, timeout_s=0.0)) == 1
    agreement.when_idle(lambda: calls.append("idle"))
    assert calls == ["idle", "limit", "idle"]
