"""Ten thousand workers on the pure state machines. Not timed, but they must finish within seconds."""

from __future__ import annotations

from collections import Counter

import pytest
from driving import Driver, ended, generations

from strata.coordinator.state.barriers import Released
from strata.coordinator.state.events import GenerationStarted, WorkerLeft
from strata.errors import BarrierBroken

NUM_WORKERS = 10_000
NUM_DEAD = 3_000


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.dataset(NUM_WORKERS)
    registrations = driver.join(*(f"w{num}" for num in range(NUM_WORKERS)))
    assert [r.rank for r in registrations] == list(range(NUM_WORKERS))
    assert {(r.generation, r.world_size) for r in registrations} == {(1, NUM_WORKERS)}
    return driver


def test_3000_of_10000_workers_that_die_in_one_tick_are_one_generation(driver: Driver) -> None:
    living = [f"w{num}" for num in range(NUM_DEAD, NUM_WORKERS)]
    for worker_id in living[:-1]:
        driver.arrive(worker_id)
    driver.after(2)
    for worker_id in living:
        driver.beat(worker_id, step=1, metrics={"loss": 0.5})
    driver.after(2)
    events, notices = driver.after(1.5)
    kinds = Counter(type(event) for event in events)
    assert (kinds[WorkerLeft], kinds[GenerationStarted]) == (NUM_DEAD, 1)
    assert generations(notices) == [2]
    assert driver.workers == living
    assert set(driver.job.shards.dataset("data").owners.tolist()) == {driver.incarnation(w) for w in living}
    (broken,) = ended(notices)
    assert isinstance(broken.outcome, BarrierBroken)
    assert len(broken.outcome.missing) == 32
    assert f"and {NUM_DEAD - 32} more" in broken.outcome.message


def test_a_barrier_of_10000_is_released_only_by_the_last_arrival(driver: Driver) -> None:
    *others, last = driver.workers
    for worker_id in others:
        driver.arrive(worker_id)
    assert not driver.core.has_news
    driver.arrive(last)
    (released,) = ended(driver.settle()[1])
    assert released.outcome == Released(1, NUM_WORKERS)


def test_10000_workers_that_are_replaced_in_one_batch_keep_their_shards(driver: Driver) -> None:
    before = {w: driver.job.shards.dataset("data").owners == driver.incarnation(w) for w in ("w0", "w5000", "w9999")}
    for worker_id in driver.workers:
        driver.register_unsealed(worker_id, instance_id="next", takeover=True)
    assert generations(driver.settle()[1]) == [2]
    for worker_id, mask in before.items():
        assert (driver.job.shards.dataset("data").owners[mask] == driver.incarnation(worker_id)).all()


def test_a_checkpoint_of_10000_ranks_is_committed_by_the_last(driver: Driver) -> None:
    *others, last = driver.workers
    assert not any(driver.notify(worker_id).committed for worker_id in others)
    assert driver.notify(last).committed
