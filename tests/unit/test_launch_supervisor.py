"""The supervisor's decisions, without processes."""

from __future__ import annotations

import itertools
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ConfigError
from strata.launch.actions import Action, AddServers, AskToStop, Finish, MoveRows, Note, StartAttempt
from strata.launch.environment import STOPPED
from strata.launch.failures import LONGEST_PAUSE_S, MAX_ALIKE
from strata.launch.protocol import DumpStacks, KillWorkers, WorkerExit
from strata.launch.spec import Size
from strata.launch.supervisor import KILL_AGAIN_S, Phase, Supervisor
from strata.transport.bulk import ConnectionLost

KILLED = -signal.SIGKILL


def supervisor(at_least: int = 2, at_most: int | None = None, *, max_restarts: int = 3) -> Supervisor:
    return Supervisor(Size(at_least, at_most or at_least), max_restarts, grace_s=30.0)


def orders_of(found: list[Action]) -> list[Action]:
    """Return the actions without the notes."""
    return [order for order in found if not isinstance(order, Note)]


def fail(run: Supervisor, rank: int = 0, code: int = KILLED, message: str = "", now_s: float = 0.0) -> list[Action]:
    """Let one worker fail and the others be killed; return the actions that follow."""
    found = orders_of(run.exited(WorkerExit(rank, code, message), now_s=now_s))
    if run.running:
        assert found == [KillWorkers(run.attempt, tuple(sorted(run.running)))]
        found = []
    for other in sorted(run.running):
        found += orders_of(run.exited(WorkerExit(other, KILLED, is_killed=True), now_s=now_s))
    return found


def test_a_run_is_done_when_all_workers_are() -> None:
    run = supervisor(3)
    assert orders_of(run.begin(now_s=0.0)) == [StartAttempt(0, 3)]
    assert run.exited(WorkerExit(1, 0), now_s=1.0) == []
    assert run.exited(WorkerExit(0, 0), now_s=1.0) == []
    assert run.exited(WorkerExit(2, 0), now_s=2.0) == [Finish("done", "3 workers are done")]
    assert run.phase is Phase.OVER


def test_when_one_fails_the_others_are_ended_and_the_first_is_the_cause() -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    run.advanced(7)
    found = run.exited(WorkerExit(1, 1, "ValueError: bad row"), now_s=1.0)
    assert found == [Note("failed", "rank 1: exit code 1: ValueError: bad row", 0, 1), KillWorkers(0, (0, 2))]
    assert run.exited(WorkerExit(0, KILLED), now_s=1.0) == []
    assert orders_of(run.exited(WorkerExit(2, 1, "ConnectionReset"), now_s=1.0)) == [StartAttempt(1, 3)]
    assert run.cause is None


def test_an_attempt_that_made_a_step_is_followed_at_once() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    for attempt in range(3):
        run.advanced(attempt)
        assert fail(run) == [StartAttempt(attempt + 1, 2)]


def test_attempts_without_a_step_are_followed_later_and_later() -> None:
    run = supervisor(max_restarts=20)
    run.begin(now_s=0.0)
    pauses_s = []
    now_s = 100.0
    for attempt in range(12):
        assert fail(run, now_s=now_s) == []
        assert run.phase is Phase.WAITING
        low = now_s
        while not (found := run.tick(now_s=now_s)):
            now_s += 0.05
        assert orders_of(found) == [StartAttempt(attempt + 1, 2)]
        pauses_s.append(now_s - low)
    assert pauses_s[0] <= 0.2
    assert all(later >= sooner - 0.06 for sooner, later in itertools.pairwise(pauses_s))
    assert LONGEST_PAUSE_S - 0.1 <= pauses_s[-1] <= LONGEST_PAUSE_S + 0.1
    run.advanced(5)
    assert fail(run, now_s=now_s) == [StartAttempt(13, 2)]


def test_no_more_restarts_than_are_allowed() -> None:
    run = supervisor(max_restarts=2)
    run.begin(now_s=0.0)
    for _ in range(2):
        run.advanced(1)
        assert isinstance(fail(run)[0], StartAttempt)
    run.advanced(9)
    assert fail(run) == [Finish("failed", "rank 0: killed by SIGKILL (all 2 restarts used)")]
    assert run.tick(now_s=1e9) == []
    assert supervisor(max_restarts=0).begin(now_s=0.0)


def test_a_worker_that_fails_on_its_own_input_stops_the_run_with_the_reason() -> None:
    run = supervisor(max_restarts=100)
    run.begin(now_s=0.0)
    for _ in range(MAX_ALIKE - 1):
        run.advanced(7)
        assert isinstance(fail(run, 1, 1, "ValueError: row 7 is bad")[0], StartAttempt)
    run.advanced(7)
    assert fail(run, 1, 1, "ValueError: row 7 is bad") == [
        Finish("failed", "rank 1: exit code 1: ValueError: row 7 is bad (3 times in a row at the same step)")
    ]


def test_a_place_is_known_as_exactly_as_steps_are_seen() -> None:
    """If a step takes a millisecond, only about every hundredth is reported."""
    run = supervisor(max_restarts=100)
    run.begin(now_s=0.0)
    found: list[Action] = []
    for seen in ([100, 220, 340], [180, 290], [120, 260, 350]):
        for step in seen:
            run.advanced(step)
        found = fail(run, 1, 1, "ValueError: row 36000 is bad")
    assert isinstance(found[0], Finish)


@pytest.mark.parametrize("changing", ["rank", "message", "step", "saved", "killed"])
def test_failures_that_differ_are_not_the_input(changing: str) -> None:
    run = supervisor(max_restarts=100)
    run.begin(now_s=0.0)
    for number in range(10):
        run.advanced(10 * number if changing == "step" else 7)
        run.saved(number if changing == "saved" else 5)
        found = fail(
            run,
            rank=number % 2 if changing == "rank" else 0,
            code=KILLED if changing == "killed" else 1,
            message=f"error {number}" if changing == "message" else "error",
        )
        assert isinstance(found[0], StartAttempt)


def test_a_hung_worker_prints_its_stacks_and_is_killed_and_named() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.advanced(3)
    assert orders_of(run.hung([1], 61.0)) == [DumpStacks(0, (1,)), KillWorkers(0, (1,))]
    assert run.hung([1], 62.0) == []
    found = run.exited(WorkerExit(1, KILLED, "whatever"), now_s=1.0)
    assert found == [Note("failed", "rank 1: killed by SIGKILL: no step for 61 s", 0, 1), KillWorkers(0, (0,))]


def test_workers_that_wait_for_a_hung_one_print_their_stacks_too() -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    found = run.hung([2, 0], 61.0)
    assert found[0] == Note("hung", "no step for 61 s on ranks 0, 2; see the stacks in the logs", 0)
    assert orders_of(found) == [DumpStacks(0, (0, 2)), KillWorkers(0, (0, 2))]


@pytest.mark.parametrize("why", ["failed", "hung", "stopped"])
def test_a_killed_worker_that_does_not_exit_is_killed_again(why: str) -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    if why == "failed":
        run.exited(WorkerExit(0, 1, "ValueError: bad row"), now_s=1.0)
    elif why == "hung":
        run.hung([1, 2], 61.0)
    else:
        run.stop("strata stop", now_s=1.0, is_now=True)
        run.exited(WorkerExit(0, KILLED), now_s=1.0)
    run.exited(WorkerExit(1, KILLED), now_s=1.0)
    for began_s in (1.0, 1.0 + KILL_AGAIN_S):
        assert run.tick(now_s=began_s) == []
        assert run.tick(now_s=began_s + KILL_AGAIN_S - 0.1) == []
        note, *orders = run.tick(now_s=began_s + KILL_AGAIN_S)
        left = (2,) if why != "hung" else (0, 2)
        assert orders == [KillWorkers(0, left)]
        assert isinstance(note, Note)
        assert " did not exit within 30 s of being killed; killing again" in note.text


def test_asked_to_stop_workers_save_first_and_a_repeated_request_does_not_kill_them() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    assert orders_of(run.stop("strata stop", now_s=0.0)) == [AskToStop("strata stop")]
    assert run.stop("strata stop", now_s=1.0) == []
    run.exited(WorkerExit(0, STOPPED), now_s=2.0)
    assert run.stop("strata stop", now_s=2.0) == []
    assert run.exited(WorkerExit(1, STOPPED), now_s=2.0) == [Finish("stopped", "strata stop; the workers have saved")]


def test_workers_that_are_saving_can_be_stopped_at_once() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    assert orders_of(run.stop("Ctrl-C", now_s=0.0)) == [AskToStop("Ctrl-C")]
    assert run.tick(now_s=29.0) == []
    assert orders_of(run.stop("Ctrl-C", now_s=1.0, is_now=True)) == [KillWorkers(0, (0, 1))]
    run.exited(WorkerExit(0, KILLED), now_s=1.0)
    assert orders_of(run.exited(WorkerExit(1, KILLED), now_s=1.0)) == [
        Finish("stopped", "Ctrl-C; 2 of 2 workers had to be killed")
    ]


def test_one_worker_is_not_several() -> None:
    run = supervisor(1, 2)
    run.begin(now_s=0.0)
    found = run.scale(1, now_s=1.0)
    assert AskToStop("scaling to 1 worker") in found
    assert Note("scaling", "from 2 to 1 worker; saving a checkpoint first", attempt=0) in found


def test_workers_that_have_saved_end_the_run() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.stop("SIGTERM", now_s=0.0)
    run.exited(WorkerExit(0, STOPPED), now_s=1.0)
    assert run.exited(WorkerExit(1, STOPPED), now_s=1.0) == [Finish("stopped", "SIGTERM; the workers have saved")]


def test_workers_that_do_not_stop_in_time_are_killed() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.stop("SIGTERM", now_s=10.0)
    run.exited(WorkerExit(0, STOPPED), now_s=11.0)
    assert run.tick(now_s=39.9) == []
    assert orders_of(run.tick(now_s=40.0)) == [KillWorkers(0, (1,))]
    assert run.tick(now_s=41.0) == []


def test_scripts_that_only_know_signals_all_get_their_grace() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.stop("SIGTERM", now_s=0.0)
    assert run.exited(WorkerExit(0, -signal.SIGTERM), now_s=1.0) == []
    assert run.exited(WorkerExit(1, -signal.SIGTERM), now_s=9.0) == [
        Finish("stopped", "SIGTERM; the workers exited without saving a checkpoint")
    ]


def test_a_script_without_a_context_that_exits_with_0_on_a_signal_is_stopped_not_done() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.stop("SIGTERM", now_s=0.0)
    run.signalled([0, 1])
    run.exited(WorkerExit(0, 0), now_s=1.0)
    assert run.exited(WorkerExit(1, 0), now_s=1.0) == [Finish("stopped", "SIGTERM; the workers exited on request")]


def test_a_script_without_a_context_that_exits_with_0_on_a_signal_restarts_with_the_new_size() -> None:
    run = supervisor(1, 2)
    run.begin(now_s=0.0)
    run.scale(1, now_s=0.0)
    run.exited(WorkerExit(0, 0), now_s=0.1)  # before it received the request
    run.signalled([0, 1])
    assert orders_of(run.exited(WorkerExit(1, 0), now_s=1.0)) == [StartAttempt(1, 1)]
    assert run.exited(WorkerExit(0, 0), now_s=2.0) == [Finish("done", "1 worker is done")]


def test_a_stop_between_two_attempts_ends_the_run() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    fail(run)
    assert run.phase is Phase.WAITING
    assert run.stop("Ctrl-C", now_s=0.0) == [Finish("stopped", "Ctrl-C")]
    assert run.stop("Ctrl-C", now_s=0.0) == []


def test_a_stop_while_workers_are_being_killed_starts_no_attempt() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.advanced(1)
    run.exited(WorkerExit(0, KILLED), now_s=0.0)
    assert orders_of(run.stop("Ctrl-C", now_s=0.0)) == [KillWorkers(0, (1,))]
    assert isinstance(run.exited(WorkerExit(1, KILLED), now_s=0.0)[-1], Finish)


def test_scaling_lets_workers_save_and_restarts_with_another_number() -> None:
    run = supervisor(1, 8)
    assert orders_of(run.begin(now_s=0.0)) == [StartAttempt(0, 8)]
    assert orders_of(run.scale(2, now_s=0.0)) == [AskToStop("scaling to 2 workers")]
    found: list[Action] = []
    for rank in range(8):
        found += run.exited(WorkerExit(rank, STOPPED), now_s=1.0)
    assert orders_of(found) == [StartAttempt(1, 2)]
    assert run.num_restarts == 0


def with_servers(num_workers: int, num_servers: int) -> Supervisor:
    """Return a run that trains."""
    size = Size(num_workers, num_workers).plus(num_servers)
    run = Supervisor(size, 3, grace_s=30.0, num_servers=num_servers)
    run.begin(now_s=0.0)
    run.advanced(1)
    return run


def test_servers_are_added_to_a_running_attempt_and_the_workers_stay() -> None:
    run = with_servers(2, 1)

    assert orders_of(run.scale(servers=3, now_s=1.0)) == [AddServers(0, (3, 4), 1, 1)]
    assert (run.world_size, run.running, run.size) == (5, {0, 1, 2, 3, 4}, Size(5, 5))
    with pytest.raises(ConfigError, match="rows are still moving to 3 servers"):
        run.scale(servers=2, now_s=1.0)
    assert run.resized(70) == [Note("scaling", "2 workers and 3 servers; 70 rows have moved", attempt=0)]
    run.advanced(9)
    assert fail(run) == [StartAttempt(1, 5)]


def test_servers_that_are_removed_exit_without_ending_the_attempt() -> None:
    run = with_servers(2, 3)

    assert orders_of(run.scale(servers=1, now_s=1.0)) == [MoveRows(1, 1)]
    assert run.exited(WorkerExit(4, 0), now_s=2.0) == []
    run.resized(70)
    assert run.exited(WorkerExit(3, 0), now_s=2.0) == []
    assert (run.phase, run.running, run.world_size) == (Phase.RUNNING, {0, 1, 2}, 3)
    assert [order for rank in range(3) for order in run.exited(WorkerExit(rank, 0), now_s=3.0)] == [
        Finish("done", "2 workers are done")
    ]


def test_an_attempt_that_fails_while_rows_move_restarts_with_the_old_number_of_servers() -> None:
    run = with_servers(2, 1)
    run.scale(servers=2, now_s=1.0)

    first = run.exited(WorkerExit(3, KILLED, is_alone=True), now_s=1.0)
    assert orders_of(first) == [KillWorkers(0, (0, 1, 2))]
    found = [order for rank in range(3) for order in run.exited(WorkerExit(rank, KILLED), now_s=1.0)]

    assert Note("scaling", "rows have not moved to 2 parameter servers; continuing with 1", attempt=0) in found
    assert orders_of(found) == [StartAttempt(1, 3)]
    assert (run.num_servers, run.size, run.wanted, run.resizing) == (1, Size(3, 3), 3, None)


def test_another_number_of_workers_and_servers_is_a_restart_with_both() -> None:
    run = Supervisor(Size(2, 5), 3, grace_s=30.0, num_servers=1)
    run.begin(now_s=0.0)
    run.advanced(1)

    assert orders_of(run.scale(2, 3, now_s=1.0)) == [AskToStop("scaling to 2 workers and 3 servers")]
    found = [order for rank in range(5) for order in run.exited(WorkerExit(rank, STOPPED), now_s=2.0)]
    assert orders_of(found) == [StartAttempt(1, 5)]
    assert (run.num_servers, run.size) == (3, Size(4, 7))


def test_the_number_of_workers_does_not_count_servers() -> None:
    run = Supervisor(Size(2, 5), 3, grace_s=30.0, num_servers=1)
    run.begin(now_s=0.0)
    with pytest.raises(ConfigError, match="5 workers are outside 1:4"):
        run.scale(5, now_s=0.0)

    found = run.scale(3, now_s=1.0)
    assert Note("scaling", "from 4 to 3 workers and 1 server; saving a checkpoint first", attempt=0) in found


@pytest.mark.parametrize(
    ("num_servers", "servers", "reason"),
    [(0, 2, "the run has no parameter servers"), (1, 0, "servers=0 is less than 1")],
)
def test_a_number_of_servers_that_cannot_be_is_refused(num_servers: int, servers: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_servers(2, num_servers).scale(servers=servers, now_s=1.0)


def test_scaling_back_before_the_workers_have_saved_restarts_too() -> None:
    run = supervisor(1, 3)
    run.begin(now_s=0.0)
    run.scale(2, now_s=0.0)
    assert run.scale(3, now_s=0.1) == []
    found = [order for rank in range(3) for order in run.exited(WorkerExit(rank, STOPPED), now_s=1.0)]
    assert orders_of(found) == [StartAttempt(1, 3)]


def test_workers_that_are_done_before_they_can_scale_are_done() -> None:
    run = supervisor(1, 2)
    run.begin(now_s=0.0)
    run.scale(1, now_s=0.0)
    run.exited(WorkerExit(0, 0), now_s=1.0)
    assert isinstance(run.exited(WorkerExit(1, 0), now_s=1.0)[-1], Finish)


def test_a_worker_that_dies_while_scaling_is_a_failure_and_the_new_size_holds() -> None:
    run = supervisor(1, 4)
    run.begin(now_s=0.0)
    run.advanced(3)
    run.scale(2, now_s=0.0)
    assert fail(run) == [StartAttempt(1, 2)]
    assert run.num_restarts == 1


def test_workers_that_are_done_when_asked_to_stop_are_done() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.stop("Ctrl-C", now_s=0.0)
    run.exited(WorkerExit(0, 0), now_s=1.0)
    assert run.exited(WorkerExit(1, 0), now_s=1.0) == [Finish("done", "2 workers are done")]


def test_workers_that_save_too_slowly_for_scaling_are_no_failure() -> None:
    run = supervisor(1, 4)
    run.begin(now_s=0.0)
    run.scale(2, now_s=0.0)
    assert orders_of(run.tick(now_s=30.0)) == [KillWorkers(0, (0, 1, 2, 3))]
    found = [order for rank in range(4) for order in run.exited(WorkerExit(rank, KILLED), now_s=31.0)]
    assert orders_of(found) == [StartAttempt(1, 2)]
    assert run.num_restarts == 0


def test_a_stop_that_failed_reports_the_failure() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.stop("SIGTERM", now_s=0.0)
    run.exited(WorkerExit(0, 1, "OSError: disk full"), now_s=1.0)
    found = run.exited(WorkerExit(1, KILLED), now_s=1.0)
    assert found == [Finish("stopped", "SIGTERM; no checkpoint was saved: rank 0: exit code 1: OSError: disk full")]
    assert found[0].exit_code == 143


def test_a_worker_that_died_because_of_another_is_not_the_cause_even_if_reported_first() -> None:
    run = supervisor(3)
    run.begin(now_s=0.0)
    run.advanced(7)
    run.exited(WorkerExit(0, 1, "RuntimeError: Connection closed by peer [10.0.0.2]:29844"), now_s=1.0)
    run.exited(WorkerExit(2, KILLED, is_killed=True), now_s=1.0)
    found = run.exited(WorkerExit(1, 1, "ValueError: bad row"), now_s=1.0)
    assert found[0] == Note("cause", "rank 1: exit code 1: ValueError: bad row", 0, 1)
    assert orders_of(found) == [StartAttempt(1, 3)]


def test_a_server_that_was_killed_is_the_cause_even_if_its_workers_are_reported_first() -> None:
    run = supervisor(4)
    run.begin(now_s=0.0)
    run.num_servers = 2
    run.advanced(7)
    lost = f"{ConnectionLost.__module__}.{ConnectionLost.__qualname__}: parameter server server-1 is lost"
    run.exited(WorkerExit(0, 1, lost), now_s=1.0)
    for rank in (1, 2):
        run.exited(WorkerExit(rank, KILLED, is_killed=True), now_s=1.0)
    found = run.exited(WorkerExit(3, KILLED), now_s=1.0)
    assert found[0] == Note("cause", "server 1: killed by SIGKILL", 0, 3)


def test_a_worker_that_was_killed_because_it_hung_is_the_cause_even_if_reported_last() -> None:
    run = supervisor(2)
    run.begin(now_s=0.0)
    run.advanced(7)
    run.hung([1], silent_s=60.0)
    run.exited(WorkerExit(0, 1, "RuntimeError: Connection closed by peer [10.0.0.2]:29844"), now_s=1.0)
    found = run.exited(WorkerExit(1, KILLED, is_killed=True), now_s=1.0)
    assert found[0] == Note("cause", "rank 1: killed by SIGKILL: no step for 60 s", 0, 1)


# -- room --------------------------------------------------------------------------------------------------------------


def test_as_many_workers_start_as_can_be_placed() -> None:
    run = supervisor(2, 8)
    run.room = 5
    assert orders_of(run.begin(now_s=0.0)) == [StartAttempt(0, 5)]


def test_below_the_minimum_a_run_waits_for_room_and_reports_it() -> None:
    run = supervisor(2, 8)
    run.room = 1
    (note,) = run.begin(now_s=0.0)
    assert note == Note("waiting", "only 1 of at least 2 workers can be placed; waiting up to 300 s for more", -1)
    assert orders_of(run.room_changed(1, "still", now_s=10.0)) == []
    assert run.tick(now_s=299.0) == []
    assert orders_of(run.room_changed(3, "node b has joined", now_s=299.5)) == [StartAttempt(0, 3)]


def test_a_run_that_waits_in_vain_fails() -> None:
    run = supervisor(2, 8)
    run.room = 0
    run.begin(now_s=0.0)
    (found,) = run.tick(now_s=300.0)
    assert found == Finish(
        "failed", "only 0 of at least 2 workers can be placed, and no more became available in 300 s"
    )


def test_a_stop_while_waiting_for_room_ends_the_run() -> None:
    run = supervisor(2)
    run.room = 0
    run.begin(now_s=0.0)
    assert run.stop("Ctrl-C", now_s=1.0) == [Finish("stopped", "Ctrl-C")]


def test_more_room_is_used_at_once_up_to_the_wanted_number() -> None:
    run = supervisor(2, 4)
    run.room = 2
    run.begin(now_s=0.0)
    assert orders_of(run.room_changed(6, "node b has joined", now_s=1.0)) == [AskToStop("node b has joined")]
    found = [order for rank in range(2) for order in run.exited(WorkerExit(rank, STOPPED), now_s=2.0)]
    assert orders_of(found) == [StartAttempt(1, 4)]
    assert run.room_changed(8, "node c has joined", now_s=3.0) == [Note("nodes", "node c has joined", 1)]


def test_announced_loss_of_room_lets_workers_save_first() -> None:
    run = supervisor(2, 4)
    run.room = 4
    run.begin(now_s=0.0)
    assert orders_of(run.room_changed(2, "node b is leaving", now_s=1.0)) == [AskToStop("node b is leaving")]
    found = [order for rank in range(4) for order in run.exited(WorkerExit(rank, STOPPED), now_s=2.0)]
    assert orders_of(found) == [StartAttempt(1, 2)]
    assert run.num_restarts == 0


def test_workers_of_a_leaving_node_move_even_if_their_number_stays() -> None:
    run = supervisor(2, 4)
    run.room = 8
    run.begin(now_s=0.0)
    assert orders_of(run.room_changed(6, "node c, without workers, is leaving", now_s=1.0)) == []
    found = run.room_changed(4, "node b is leaving", now_s=1.0, must_move=True)
    assert found[1] == Note(
        "scaling", "node b is leaving: moving 4 workers to other nodes; saving a checkpoint first", 0
    )
    assert orders_of(found) == [AskToStop("node b is leaving")]
    found = [order for rank in range(4) for order in run.exited(WorkerExit(rank, STOPPED), now_s=2.0)]
    assert orders_of(found) == [StartAttempt(1, 4)]
    assert run.num_restarts == 0


def test_a_lost_node_is_one_failure_and_the_run_continues_with_the_remaining_room() -> None:
    run = supervisor(2, 4)
    run.room = 4
    run.begin(now_s=0.0)
    run.advanced(3)
    assert orders_of(run.exited(WorkerExit(2, KILLED, "node b is lost"), now_s=1.0)) == [KillWorkers(0, (0, 1, 3))]
    run.exited(WorkerExit(3, KILLED, "node b is lost"), now_s=1.0)
    assert orders_of(run.room_changed(2, "node b is lost", now_s=1.0)) == []
    run.exited(WorkerExit(0, KILLED), now_s=1.0)
    assert orders_of(run.exited(WorkerExit(1, KILLED), now_s=1.0)) == [StartAttempt(1, 2)]
    assert run.num_restarts == 1


@pytest.mark.parametrize("workers", [0, 1, 9])
def test_a_size_outside_of_the_bounds_is_refused(workers: int) -> None:
    run = supervisor(2, 8)
    run.begin(now_s=0.0)
    with pytest.raises(ConfigError, match=r"outside 2:8.*resume it with --workers"):
        run.scale(workers, now_s=0.0)


def test_exits_of_an_earlier_attempt_are_ignored() -> None:
    run = supervisor()
    run.begin(now_s=0.0)
    run.advanced(1)
    fail(run)
    run.exited(WorkerExit(0, 0), now_s=0.0)
    assert run.exited(WorkerExit(0, 0), now_s=0.0) == []
    assert run.exited(WorkerExit(5, 1), now_s=0.0) == []


class Machine:
    """Simulated processes; a killed one exits some time later."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.doomed: set[int] = set()
        self.num_finished = 0
        self.num_started = 0

    def obey(self, found: list[Action]) -> None:
        for order in found:
            match order:
                case StartAttempt(attempt, world_size):
                    assert not self.alive
                    assert attempt == self.num_started
                    self.num_started += 1
                    self.alive.update(range(world_size))
                case KillWorkers(0, ranks):
                    assert set(ranks) <= self.alive
                    self.doomed |= set(ranks)
                case Finish():
                    self.num_finished += 1
                    assert not self.alive
                case _:
                    pass

    def one_exits(self, data: st.DataObject) -> WorkerExit:
        rank = data.draw(st.sampled_from(sorted(self.doomed or self.alive)))
        code = KILLED if rank in self.doomed else data.draw(st.sampled_from([0, STOPPED, 1, -signal.SIGSEGV]))
        self.alive.discard(rank)
        self.doomed.discard(rank)
        return WorkerExit(rank, code)


@settings(max_examples=200)
@given(st.data())
def test_whatever_happens_every_attempt_ends_before_the_next_and_the_run_ends_once(data: st.DataObject) -> None:
    run = Supervisor(Size(1, data.draw(st.integers(1, 4))), data.draw(st.integers(0, 4)), grace_s=5.0)
    machine = Machine()
    now_s = 0.0
    machine.obey(run.begin(now_s=0.0))
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.sampled_from([0.0, 0.1, 6.0]))
        match data.draw(st.sampled_from(["exit", "exit", "exit", "hung", "stop", "scale", "tick", "step"])):
            case "exit" if machine.alive:
                machine.obey(run.exited(machine.one_exits(data), now_s=now_s))
            case "hung" if machine.alive:
                machine.obey(run.hung([min(machine.alive)], 10.0))
            case "stop":
                machine.obey(run.stop("asked", now_s=now_s, is_now=data.draw(st.booleans())))
            case "scale":
                machine.obey(run.scale(data.draw(st.integers(1, run.size.at_most)), now_s=now_s))
            case "step":
                run.advanced(data.draw(st.integers(0, 50)))
            case _:
                machine.obey(run.tick(now_s=now_s))
        assert run.running == machine.alive
        if not run.is_waiting:  # an agent does not tick then
            assert run.tick(now_s=now_s + 1e6) == []
    assert machine.num_finished == (run.phase is Phase.OVER)
    assert run.num_restarts <= run.max_restarts


# -- loaders whose state is each rank's own ----------------------------------------------------------------------------


def test_another_number_of_workers_is_refused_while_a_loader_is_per_rank() -> None:
    run = supervisor(1, 4)
    run.wanted = 2
    run.begin(now_s=0.0)
    run.only = 2
    with pytest.raises(
        ConfigError, match=r"3 workers cannot resume from a checkpoint of 2 workers.*ctx\.dataloader\(dataset"
    ):
        run.scale(3, now_s=1.0)
    assert (run.phase, run.wanted) == (Phase.RUNNING, 2)
    assert run.scale(2, now_s=1.0) == []
    assert run.room_changed(8, "a node came", now_s=1.0) == [Note("nodes", "a node came", 0)]


def test_with_less_room_than_they_need_workers_save_and_wait_for_more() -> None:
    run = supervisor(1, 4)
    run.begin(now_s=0.0)
    run.only = 4
    assert orders_of(run.room_changed(3, "a node left", now_s=1.0)) == [AskToStop("a node left")]
    found: list[Action] = []
    for rank in range(4):
        found += run.exited(WorkerExit(rank, STOPPED), now_s=2.0)
    assert run.phase is Phase.SHORT
    assert "only 3 of at least 4 workers can be placed (the state of an attached loader" in found[-1].text  # type: ignore[union-attr]
    assert orders_of(run.room_changed(4, "a node came", now_s=3.0)) == [StartAttempt(1, 4)]


def test_after_a_node_is_lost_as_many_workers_as_before_are_waited_for() -> None:
    run = supervisor(1, 4)
    run.begin(now_s=0.0)
    run.only = 4
    run.advanced(3)
    run.room = 2
    assert fail(run) == []
    assert run.phase is Phase.SHORT


def test_a_request_that_came_before_it_was_known_is_not_followed() -> None:
    run = supervisor(1, 4)
    run.wanted = 2
    run.begin(now_s=0.0)
    assert orders_of(run.scale(3, now_s=1.0)) == [AskToStop("scaling to 3 workers")]
    run.only = 2
    run.exited(WorkerExit(0, STOPPED), now_s=2.0)
    note, start = run.exited(WorkerExit(1, STOPPED), now_s=2.0)
    assert start == StartAttempt(1, 2)
    assert "with 2 workers, not 3: the state of an attached loader" in note.text  # type: ignore[union-attr]


def test_a_resume_with_an_impossible_world_size_fails_before_it_starts() -> None:
    run = supervisor(3)
    run.only = 2
    (finish,) = run.begin(now_s=0.0)
    assert isinstance(finish, Finish)
    assert finish.outcome == "failed"
    assert "3 workers cannot resume from a checkpoint of 2 workers" in finish.reason
    run = supervisor(1, 4)
    run.only = 2
    assert orders_of(run.begin(now_s=0.0)) == [StartAttempt(0, 2)]


def test_a_parameter_server_is_named_as_such_in_all_messages() -> None:
    run = supervisor(4)
    run.num_servers = 2
    begun = run.begin(now_s=0.0)
    assert isinstance(begun[0], Note)
    assert begun[0].text == "attempt 0 with 2 workers and 2 servers"
    hung = run.hung([0, 1, 3], 60.0)
    assert isinstance(hung[0], Note)
    assert hung[0].text.startswith("no step for 60 s on ranks 0, 1, server 1;")
    failed = run.exited(WorkerExit(2, KILLED), now_s=1.0)
    assert failed[0] == Note("failed", "server 0: killed by SIGKILL", 0, 2)
