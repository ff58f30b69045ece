"""Commands: sent once, repeated until acknowledged, and dropped with the process they were sent to."""

from __future__ import annotations

import pytest
from driving import BAD_IDS, Driver, of

from strata.coordinator.config import Limits
from strata.coordinator.state.commands import MAX_REMEMBERED_REQUESTS
from strata.coordinator.state.events import CommandsAcked, CommandSent
from strata.coordinator.state.job import CommandQueued
from strata.errors import InvalidArgument, LimitExceeded, UnknownWorker


@pytest.fixture
def driver() -> Driver:
    """3 workers, generation 1."""
    driver = Driver()
    driver.join("w0", "w1", "w2")
    return driver


def commands_for(driver: Driver, worker_id: str, acked: int = 0) -> list[tuple[int, str]]:
    """Return the commands in the answer to a heartbeat."""
    return [(c.command_id, c.name) for c in driver.beat(worker_id, acked=acked).commands]


def test_a_command_without_recipients_goes_to_all_3_workers(driver: Driver) -> None:
    assert driver.command() == (1, 3)
    _, notices = driver.settle()
    assert [(n.worker_id, n.command.name) for n in notices if isinstance(n, CommandQueued)] == [
        ("w0", "STOP"),
        ("w1", "STOP"),
        ("w2", "STOP"),
    ]


def test_a_command_to_one_worker_reaches_no_other(driver: Driver) -> None:
    assert driver.command("w1", name="DUMP_STACKS") == (1, 1)
    driver.settle()
    assert commands_for(driver, "w1") == [(1, "DUMP_STACKS")]
    assert commands_for(driver, "w0") == []


def test_a_worker_named_twice_gets_the_command_once(driver: Driver) -> None:
    assert driver.command("w1", "w1", request_id="r") == (1, 1)
    assert driver.command("w1", "w1", request_id="r") == (1, 1)
    driver.settle()
    assert commands_for(driver, "w1") == [(1, "STOP")]


def test_a_command_is_repeated_in_every_beat_until_it_is_acknowledged(driver: Driver) -> None:
    driver.command("w0", name="CHECKPOINT_NOW")
    driver.settle()
    for _ in range(3):
        assert commands_for(driver, "w0") == [(1, "CHECKPOINT_NOW")]
    assert commands_for(driver, "w0", acked=1) == []
    assert commands_for(driver, "w0") == []


def test_an_ack_of_2_covers_1_and_2_but_not_3(driver: Driver) -> None:
    for name in ("REBALANCE", "CHECKPOINT_NOW", "STOP"):
        driver.command("w0", name=name)
    driver.settle()
    assert commands_for(driver, "w0", acked=2) == [(3, "STOP")]
    assert [(a.worker_id, a.command_id) for a in of(CommandsAcked, driver.settle()[0])] == [("w0", 2)]


def test_a_repeated_ack_writes_nothing(driver: Driver) -> None:
    driver.command()
    driver.settle()
    driver.beat("w0", acked=1)
    driver.settle()
    driver.beat("w0", acked=1)
    assert driver.settle() == ([], [])


def test_an_ack_counts_only_for_its_own_worker(driver: Driver) -> None:
    driver.command()
    driver.settle()
    driver.beat("w0", acked=1)
    assert commands_for(driver, "w1") == [(1, "STOP")]


def test_a_command_is_not_delivered_before_it_is_durable(driver: Driver) -> None:
    driver.command("w0")
    assert commands_for(driver, "w0") == []
    _, notices = driver.core.drain()
    assert commands_for(driver, "w0") == []
    driver.core.announce(notices)
    assert commands_for(driver, "w0") == [(1, "STOP")]


def test_a_command_carries_its_reason_and_arguments(driver: Driver) -> None:
    driver.command("w0", reason="maintenance", args={"grace_s": "30"})
    driver.settle()
    (command,) = driver.beat("w0").commands
    assert (command.reason, command.args) == ("maintenance", {"grace_s": "30"})


def test_a_command_survives_a_restart_of_the_coordinator(driver: Driver) -> None:
    driver.command("w0")
    driver.settle()
    driver.core = driver.restarted()
    assert commands_for(driver, "w0") == [(1, "STOP")]
    assert driver.command("w0") == (2, 1)


def test_a_command_is_dropped_with_the_process_it_was_sent_to(driver: Driver) -> None:
    driver.command()
    driver.settle()
    driver.replace("w0")
    driver.leave("w1")
    driver.register("w1")
    assert commands_for(driver, "w0") == []
    assert commands_for(driver, "w1") == []
    assert commands_for(driver, "w2") == [(1, "STOP")]


def test_the_same_request_sends_once(driver: Driver) -> None:
    assert driver.command("w0", "w1", request_id="r-1") == (1, 2)
    assert driver.command("w0", "w1", request_id="r-1") == (1, 2)
    assert len(of(CommandSent, driver.settle()[0])) == 1
    assert driver.command("w0", "w1", request_id="r-2") == (2, 2)


def test_a_request_id_is_remembered_after_a_restart(driver: Driver) -> None:
    driver.command(request_id="r-1")
    driver.settle()
    driver.core = driver.restarted()
    assert driver.command(request_id="r-1") == (1, 3)
    assert not driver.core.has_news


def test_without_a_request_id_2_calls_are_2_commands(driver: Driver) -> None:
    assert [driver.command("w0")[0], driver.command("w0")[0]] == [1, 2]


def test_the_first_of_1001_requests_is_forgotten() -> None:
    driver = Driver()
    driver.register("w0")
    for num in range(MAX_REMEMBERED_REQUESTS + 1):
        driver.command("w0", request_id=f"r-{num}")
        driver.beat("w0", acked=num + 1)
    requests = driver.job.commands.requests
    assert len(requests) == 1_000
    assert "r-0" not in requests
    assert requests["r-1"] == 2


def test_a_third_pending_command_is_refused_with_a_limit_of_2() -> None:
    driver = Driver(limits=Limits(max_pending_commands_per_worker=2))
    driver.join("w0", "w1")
    driver.command("w0")
    driver.command("w0")
    driver.settle()
    with driver.refused(LimitExceeded, "worker_ids"):
        driver.command()
    assert driver.command("w1") == (3, 1)
    driver.beat("w0", acked=1)
    assert driver.command() == (4, 2)


def test_a_command_to_an_unknown_worker_reaches_no_worker(driver: Driver) -> None:
    with driver.refused(UnknownWorker, "worker_ids"):
        driver.command("w0", "w9")


def test_a_job_without_workers_takes_no_commands(driver: Driver) -> None:
    for worker_id in driver.workers:
        driver.leave(worker_id)
    with driver.refused(InvalidArgument, "worker_ids"):
        driver.command()


@pytest.mark.parametrize("bad", BAD_IDS[1:])
def test_a_bad_request_id_is_refused(driver: Driver, bad: str) -> None:
    with driver.refused(InvalidArgument, "request_id"):
        driver.command(request_id=bad)


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_bad_worker_id_is_refused(driver: Driver, bad: str) -> None:
    with driver.refused(InvalidArgument, "worker_ids"):
        driver.command("w0", bad)


def test_a_reason_of_4097_characters_and_too_many_arguments_are_refused() -> None:
    driver = Driver(limits=Limits(max_metadata_bytes=10))
    driver.register("w0")
    with driver.refused(InvalidArgument, "reason"):
        driver.command(reason="r" * 4_097)
    with driver.refused(LimitExceeded, "args"):
        driver.command(args={"k": "v" * 10})


@pytest.mark.parametrize("acked", [-1, 0])
def test_an_ack_of_command_0_changes_nothing(driver: Driver, acked: int) -> None:
    driver.command("w0")
    driver.settle()
    assert commands_for(driver, "w0", acked=acked) == [(1, "STOP")]
    assert driver.settle() == ([], [])


def test_a_notice_names_the_command_that_is_pending_before_it(driver: Driver) -> None:
    for _ in range(2):
        driver.command("w0")
    driver.settle()
    driver.beat("w0", acked=1)
    driver.command("w0", "w1")
    _, notices = driver.settle()
    assert [(n.worker_id, n.previous_id) for n in notices if isinstance(n, CommandQueued)] == [("w0", 2), ("w1", 0)]
