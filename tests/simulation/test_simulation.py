"""Hundreds of simulations with faults; and proof that they detect bugs."""

from __future__ import annotations

import pytest
from mutations import MUTATIONS
from run import command
from simulation import simulate

from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.state.core import Core
from strata.errors import StaleIncarnation

NUM_CHUNKS = 16
CHUNK = 15
MAX_SEEDS_TO_FIND = 400
"""The rarest bug shows in about one simulation of seventy."""


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_no_simulation_violates_a_guarantee(chunk: int) -> None:
    outcomes = [simulate(seed) for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
    for outcome in outcomes:
        assert outcome.violation is None, f"{outcome.violation}\n\n    {command(outcome.seed)}\n"
    assert sum(outcome.num_faults for outcome in outcomes) > CHUNK
    assert sum(outcome.num_generations for outcome in outcomes) > CHUNK


def test_a_seed_gives_the_same_trace_every_time() -> None:
    assert [simulate(seed) for seed in range(5)] == [simulate(seed) for seed in range(5)]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_the_simulation_detects_the_mutation(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    found = next((seed for seed in range(MAX_SEEDS_TO_FIND) if simulate(seed).violation), None)
    assert found is not None, f"{MAX_SEEDS_TO_FIND} seeds did not find it"


def test_only_the_last_of_two_processes_with_one_id_in_a_batch_is_registered() -> None:
    """Found by seed 5204: the first process got its successor's rank, and then its successor's shards."""
    core = Core(CoordinatorConfig())
    answers = []
    for number, instance_id in enumerate(("first", "second"), start=1):
        with core.job_or_new("sim") as job:
            answers.append(
                job.register_worker(
                    "w",
                    instance_id=instance_id,
                    capacity=1.0,
                    hostname="",
                    takeover=True,
                    now_s=0.0,
                    nonce=number,
                )
            )
    core.drain()
    with pytest.raises(StaleIncarnation, match="another process uses its id"):
        answers[0]()
    assert (answers[1]().incarnation, answers[1]().generation) == (2, 1)


def test_a_client_that_keeps_a_page_of_an_older_generation_is_detected() -> None:
    """The membership changes between the page and the refresh: the shard belongs to another worker in the adopted
    generation.
    """
    assert any(simulate(seed, refetch=False).violation for seed in range(995, 1_030))
