"""The specification of a run and the environment of its workers."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ConfigError
from strata.identity import Identity
from strata.launch.environment import WorkerSpec, read_environment, worker_environment
from strata.launch.spec import RunSpec, Size

WORKER_SPEC = WorkerSpec(
    identity=Identity(
        run="brave",
        attempt=2,
        rank=3,
        world_size=8,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=4,
        master_addr="10.0.0.1",
        master_port=29_500,
    ),
    coordinator="unix:/run/strata.sock",
    checkpoints="s3://bucket/brave",
    max_restarts=5,
    num_servers=3,
    layout=2,
    servers_before=1,
)


def spec(**changes: object) -> RunSpec:
    return RunSpec(**{"name": "brave", "script": "train.py", "directory": "/job", "checkpoints": "/ckpt", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "size"), [("1", Size(1, 1)), ("4", Size(4, 4)), ("2:8", Size(2, 8))])
def test_a_size_is_a_number_or_two(text: str, size: Size) -> None:
    assert Size.parse(text) == size
    assert str(size) == text


@pytest.mark.parametrize("text", ["", "two", "0", "8:2", "1:2:3", "-1", "1.5", "5000"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="workers"):
        Size.parse(text)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 64, "with space", "-dash"])
def test_a_name_that_is_no_directory_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name="):
        spec(name=name)


@pytest.mark.parametrize("changes", [{"grace_s": -1.0}, {"step_timeout_s": float("nan")}, {"max_restarts": -1}])
def test_an_invalid_setting_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        spec(**changes)


def test_a_spec_is_read_back_as_it_was_written() -> None:
    made = spec(workers=Size(2, 8), arguments=("--lr", "1e-3"), variables={"A": "b"}, preload=("torch",))
    assert msgspec.json.decode(msgspec.json.encode(made), type=RunSpec) == made


def test_a_worker_reads_its_spec_from_its_environment() -> None:
    assert read_environment({**worker_environment(WORKER_SPEC), "HOME": "/root"}) == WORKER_SPEC
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.text(min_size=1, max_size=20))
def test_any_spec_survives_the_environment(rank: int, attempt: int, run: str) -> None:
    worker_spec = WorkerSpec(
        identity=Identity(
            run=run, attempt=attempt, rank=rank, world_size=rank + 1, local_rank=0, local_world_size=1, master_port=1
        ),
        coordinator="",
        checkpoints="",
    )
    assert read_environment(worker_environment(worker_spec)) == worker_spec


def test_torchrun_s_names_are_all_there() -> None:
    """`torch.distributed.run` documents these names."""
    names = (
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        "TORCHELASTIC_RUN_ID",
    )
    assert set(names) <= worker_environment(WORKER_SPEC).keys()


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "STRATA_ATTEMPT"])
def test_an_incomplete_environment_is_refused_with_the_cure(name: str) -> None:
    variables = worker_environment(WORKER_SPEC)
    with pytest.raises(ConfigError, match=f"{name}=.*not a number"):
        read_environment({**variables, name: "x"})
    del variables[name]
    with pytest.raises(ConfigError, match=f"{name} is not set.*strata run"):
        read_environment(variables)


def test_a_session_is_never_that_of_another_attempt() -> None:
    other = replace(WORKER_SPEC.identity, attempt=3)
    assert other.session != WORKER_SPEC.identity.session
    assert other.worker_id == WORKER_SPEC.identity.worker_id == "rank-3"
