"""Which process this is, as the variables of launchers define it."""

from __future__ import annotations

import pytest

from strata.errors import ConfigError
from strata.identity import LAUNCHERS, TORCHRUN, Identity

TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "night",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_s_variables_give_the_whole_identity() -> None:
    assert Identity.from_environment(TORCH) == Identity(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        attempt=2,
        run="night",
        master_addr="10.0.0.1",
        master_port=29_500,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_understood(launcher: tuple[str, ...]) -> None:
    found = Identity.from_environment(dict(zip(launcher[:4], "5823", strict=True)))
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 2, 3)


def test_without_a_launcher_there_is_no_identity() -> None:
    assert Identity.from_environment({"HOME": "/root", "SLURM_NTASKS": "4"}) is None
    assert Identity.from_environment({"PMI_RANK": "0", "PMI_SIZE": "1"}, launchers=(TORCHRUN,)) is None


def test_variables_beside_the_ranks_fall_back_to_their_defaults() -> None:
    """Kubernetes sets MASTER_PORT=tcp://… for a service called master."""
    found = Identity.from_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "tcp://10.0.0.1:80"})
    assert found == Identity(rank=1, world_size=2, local_world_size=2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "the environment has RANK but not WORLD_SIZE; set both, or fix it"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' in the environment is not a number; fix it"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 in the environment is not below WORLD_SIZE=2; fix it"),
    ],
)
def test_invalid_ranks_raise_an_error_with_the_caller_s_cure(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Identity.from_environment(variables, cure="fix it")


def test_a_session_differs_between_attempts_and_a_worker_id_does_not() -> None:
    first, second = Identity(run="a", rank=3, world_size=4), Identity(run="a", rank=3, world_size=4, attempt=1)
    assert first.session != second.session
    assert first.worker_id == second.worker_id == "rank-3"


def test_strata_run_s_variables_win_over_torchrun_s() -> None:
    found = Identity.from_environment({**TORCH, "STRATA_RUN": "mine", "STRATA_ATTEMPT": "7"})
    assert found is not None
    assert (found.run, found.attempt) == ("mine", 7)
