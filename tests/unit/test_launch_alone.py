"""The supervisor's decisions about workers that restart alone, without processes."""

from __future__ import annotations

import itertools
import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.launch.actions import Action, Finish, Note, StartAttempt, StartWorker
from strata.launch.failures import LONGEST_PAUSE_S, MAX_ALIKE
from strata.launch.protocol import KillWorkers, WorkerExit
from strata.launch.spec import Size
from strata.launch.supervisor import Phase, Supervisor

KILLED = -signal.SIGKILL


def supervisor(workers: int = 2, *, max_restarts: int = 3) -> Supervisor:
    return Supervisor(Size(workers, workers), max_restarts, grace_s=30.0)


def orders_of(found: list[Action]) -> list[Action]:
    """Return the actions without the notes."""
    return [order for order in found if not isinstance(order, Note)]


def lost(rank: int, code: int = KILLED, message: str = "", step: int | None = None) -> WorkerExit:
    """Return the exit of a worker that shares no collective with the others."""
    return WorkerExit(rank, code, message, step=step, is_alone=True)


def test_a_worker_without_a_collective_restarts_alone_and_the_others_continue() -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    run.advanced(7, 1)
    found = run.exited(lost(1), now_s=1.0)
    assert found == [
        Note("failed", "rank 1: killed by SIGKILL", 0, 1),
        Note("restarted", "rank 1 alone; the others continue", 0, 1),
        StartWorker(0, 1, 1),
    ]
    assert run.running == {0, 1, 2}
    assert (run.phase, run.attempt, run.num_restarts) == (Phase.RUNNING, 0, 1)
    run.advanced(9, 1)
    assert orders_of(run.exited(lost(1), now_s=2.0)) == [StartWorker(0, 1, 2)]
    for rank in range(3):
        found = run.exited(WorkerExit(rank, 0), now_s=3.0)
    assert found == [Finish("done", "3 workers are done")]


def test_a_worker_that_fails_alone_without_a_step_is_started_later_and_later() -> None:
    run = supervisor(max_restarts=20)
    run.begin(now_s=0.0)
    run.advanced(1, 0)
    now_s, pauses_s = 100.0, []
    for incarnation in range(1, 6):
        assert orders_of(run.exited(lost(1), now_s=now_s)) == []
        began_s = now_s
        while not (found := run.tick(now_s=now_s)):
            now_s += 0.05
        assert orders_of(found) == [StartWorker(0, 1, incarnation)]
        pauses_s.append(now_s - began_s)
    assert all(later > sooner for sooner, later in itertools.pairwise(pauses_s[1:]))


def test_a_worker_that_dies_in_a_collective_while_another_restarts_ends_the_attempt() -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    assert orders_of(run.exited(lost(1), now_s=1.0)) == []  # it waits, because it made no step
    assert orders_of(run.exited(WorkerExit(0, KILLED), now_s=1.0)) == [KillWorkers(0, (2,))]
    assert orders_of(run.tick(now_s=50.0)) == []
    assert run.exited(WorkerExit(2, KILLED), now_s=51.0)[0].what == "waiting"  # type: ignore[union-attr]


def test_restarts_alone_count_like_all_others() -> None:
    run = supervisor(max_restarts=2)
    run.begin(now_s=0.0)
    for incarnation in (1, 2):
        run.advanced(incarnation, 1)
        assert orders_of(run.exited(lost(1), now_s=0.0)) == [StartWorker(0, 1, incarnation)]
    run.advanced(3, 1)
    assert orders_of(run.exited(lost(1), now_s=0.0)) == [KillWorkers(0, (0,))]
    found = run.exited(WorkerExit(0, KILLED), now_s=0.0)
    assert found == [Finish("failed", "rank 1: killed by SIGKILL (all 2 restarts used)")]


def test_a_worker_that_fails_alone_on_its_own_input_ends_the_run() -> None:
    run = supervisor(max_restarts=100)
    run.begin(now_s=0.0)
    for number in range(MAX_ALIKE - 1):
        run.advanced(10 * number, 0)  # the other worker continues
        run.advanced(7, 1)
        failed = lost(1, 1, "ValueError: row 8", step=7)
        assert orders_of(run.exited(failed, now_s=0.0)) == [StartWorker(0, 1, number + 1)]
    run.advanced(7, 1)
    assert orders_of(run.exited(lost(1, 1, "ValueError: row 8", step=7), now_s=0.0)) == [KillWorkers(0, (0,))]
    (end,) = run.exited(WorkerExit(0, KILLED), now_s=0.0)
    assert end == Finish("failed", "rank 1: exit code 1: ValueError: row 8 (3 times in a row at the same step)")


def test_a_hung_worker_and_one_whose_peer_was_lost_do_not_restart_alone() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.hung([1], 900.0)
    assert orders_of(run.exited(lost(1), now_s=0.0)) == [KillWorkers(0, (0,))]
    run = supervisor()
    run.begin(now_s=0.0)
    assert orders_of(run.exited(lost(1, 1, "Connection closed by peer"), now_s=0.0)) == [KillWorkers(0, (0,))]


def test_a_stop_while_a_worker_is_away_kills_the_others_because_they_cannot_save() -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    run.exited(lost(1), now_s=0.0)
    assert orders_of(run.stop("Ctrl-C", now_s=0.01)) == [KillWorkers(0, (0, 2))]
    run.exited(WorkerExit(0, KILLED), now_s=0.02)
    (end,) = run.exited(WorkerExit(2, KILLED), now_s=0.02)
    assert isinstance(end, Finish)
    assert end.outcome == "stopped"


class Processes:
    """Carries out what the supervisor decides, and checks that every rank has at most one process."""

    def __init__(self) -> None:
        self.run = supervisor(4, max_restarts=1_000)
        self.now_s = 0.0
        self.alive: set[int] = set()
        self._incarnations: dict[int, int] = {}
        self.carry_out(self.run.begin(now_s=0.0))

    def carry_out(self, found: list[Action]) -> None:
        for action in found:
            if isinstance(action, StartWorker):
                assert action.rank not in self.alive
                assert action.incarnation == self._incarnations.get(action.rank, 0) + 1
                assert action.attempt == self.run.attempt
                self._incarnations[action.rank] = action.incarnation
                self.alive.add(action.rank)
            elif isinstance(action, StartAttempt):
                assert not self.alive
                self._incarnations.clear()
                self.alive.update(range(action.world_size))
            elif isinstance(action, KillWorkers):
                for rank in action.ranks:
                    self.end(WorkerExit(rank, KILLED))

    def end(self, event: WorkerExit) -> None:
        if event.rank in self.alive:
            self.alive.discard(event.rank)
            self.carry_out(self.run.exited(event, now_s=self.now_s))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["alone", "together", "done", "tick", "step"]))))
@settings(deadline=None)
def test_every_rank_has_one_process_whatever_restarts_alone(events: list[tuple[int, str]]) -> None:
    """The supervisor starts no rank that runs, and no rank is lost: it runs, is about to be started, or has exited."""
    processes = Processes()
    run = processes.run
    ends = {"alone": lost, "together": lambda rank: WorkerExit(rank, KILLED), "done": lambda rank: WorkerExit(rank, 0)}
    for rank, what in events:
        processes.now_s += LONGEST_PAUSE_S if what == "tick" else 0.06
        if what == "tick":
            processes.carry_out(run.tick(now_s=processes.now_s))
        elif what == "step":
            run.advanced(int(processes.now_s), rank)
        else:
            processes.end(ends[what](rank))
        if run.phase is Phase.OVER:
            assert what == "done"
            return
        assert run.running == processes.alive
        if run.phase is Phase.RUNNING:
            assert run.running | run._away.keys() | run._exits.keys() == {0, 1, 2, 3}
