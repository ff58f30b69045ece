"""What the ends of a trial's processes mean for the trial."""

from __future__ import annotations

import pytest

from strata.launch.environment import STOPPED, UNREACHABLE
from strata.launch.protocol import LOST, WorkerExit
from strata.tune import messages as m
from strata.tune.processes import Process, ProcessGroup
from strata.tune.state import events as e
from strata.tune.state.actions import Start

GONE = "RuntimeError: Connection closed by peer"
RESULT = m.Result(lease=1, number=9, values=(0.5,))
PRUNE = m.StopTrial(reason="worst", is_saving=False)
PAUSE = m.StopTrial(reason="worst", is_saving=True)


def ended(*exits: WorkerExit | None, killed: int | None = None, **more: object) -> ProcessGroup:
    processes = {rank: Process(rank, exit=each, is_killed=rank == killed) for rank, each in enumerate(exits)}
    group = ProcessGroup(Start(0, 1, 0, {}, "", 0), 1, processes)
    for name, value in more.items():
        setattr(group, name, value)
    return group


DONE, KILLED, FAILED = WorkerExit(0, 0), WorkerExit(0, LOST), WorkerExit(0, 1, "ValueError: no")


@pytest.mark.parametrize(
    ("group", "outcome"),
    [
        (ended(DONE, DONE, result=RESULT), e.Finished(trial=0, lease=1, values=(0.5,))),
        (ended(DONE, KILLED, killed=1, result=RESULT), e.Finished(trial=0, lease=1, values=(0.5,))),
        (ended(DONE), e.Lost(trial=0, lease=1, reason="it ended without a result")),
        (ended(KILLED), e.Lost(trial=0, lease=1, reason="killed by SIGKILL")),
        (ended(WorkerExit(0, UNREACHABLE)), e.Lost(trial=0, lease=1, reason="exit code 75")),
        (
            ended(WorkerExit(0, UNREACHABLE, "StaleIncarnation: incarnation 2 is out")),
            e.Lost(trial=0, lease=1, reason="exit code 75: StaleIncarnation: incarnation 2 is out"),
        ),
        (ended(KILLED, WorkerExit(1, 1, GONE)), e.Lost(trial=0, lease=1, reason="killed by SIGKILL")),
        (
            ended(WorkerExit(0, LOST, "node b is lost", is_node_lost=True)),
            e.Lost(trial=0, lease=1, reason="killed by SIGKILL: node b is lost", is_blameless=True),
        ),
        (ended(FAILED, KILLED, killed=1), e.Failed(trial=0, lease=1, reason="exit code 1: ValueError: no")),
        (ended(FAILED, failure="ValueError: last words"), e.Failed(trial=0, lease=1, reason="ValueError: last words")),
        (ended(WorkerExit(0, 1, GONE), FAILED), e.Failed(trial=0, lease=1, reason="exit code 1: ValueError: no")),
        (ended(WorkerExit(0, STOPPED), KILLED, killed=1, stop=PRUNE), e.Stopped(trial=0, lease=1)),
        (ended(KILLED, killed=0, stop=PAUSE), e.Stopped(trial=0, lease=1)),
        (ended(WorkerExit(0, STOPPED)), e.Stopped(trial=0, lease=1)),
    ],
)
def test_the_ends_of_all_processes_are_one_event(group: ProcessGroup, outcome: e.Event) -> None:
    assert group.is_over
    assert group.outcome() == outcome


@pytest.mark.parametrize(
    ("group", "follow"),
    [
        (ended(DONE, None), True),
        (ended(FAILED, None), False),
        (ended(KILLED, None), False),
        (ended(WorkerExit(0, STOPPED), None, stop=PRUNE), False),
        (ended(WorkerExit(0, STOPPED), None, stop=PAUSE), True),
        (ended(WorkerExit(0, 1, GONE), None), True),
    ],
)
def test_other_ranks_end_by_themselves_unless_one_has_failed(group: ProcessGroup, follow: bool) -> None:
    assert not group.is_over
    assert group.others_follow is follow
