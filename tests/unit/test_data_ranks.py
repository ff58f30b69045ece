"""Detection of rank and world size. Libraries are replaced by fakes with the same functions."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from strata.data import ranks as r
from strata.data.ranks import find_ranks, share
from strata.errors import ConfigError, InvalidArgument
from strata.identity import Identity

LIBRARIES = ("torch.distributed", "deepspeed.comm", "horovod.torch", "horovod.tensorflow", "horovod.keras")
ALONE: dict[str, str] = {}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def _nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, name: str, rank: int, num_ranks: int, *, initialised: bool = True) -> Any:
    """Install a fake module of this name that knows its rank."""
    module: Any = ModuleType(name)
    module.is_available = lambda: True
    module.is_initialized = lambda: initialised
    module.rank = module.get_rank = lambda: rank
    module.size = module.get_world_size = lambda: num_ranks
    monkeypatch.setitem(sys.modules, name, module)
    return module


def facts(found: Identity) -> tuple[int, int, str, Any]:
    return found.rank, found.world_size, found.found_in, found.device


def accelerator(rank: int, num_ranks: int) -> Any:
    return SimpleNamespace(process_index=rank, num_processes=num_ranks, device="cuda:1")


def test_without_any_other_source_there_is_one_rank() -> None:
    assert facts(find_ranks(environment=ALONE)) == (0, 1, "the defaults of a single process", None)


def test_explicit_arguments_override_everything_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(monkeypatch, "torch.distributed", 1, 8)
    found = find_ranks(rank=0, num_ranks=2, accelerator=accelerator(1, 8), environment={"RANK": "nonsense"})

    assert facts(found) == (0, 2, "rank= and num_ranks=", "cuda:1")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"rank": 1}, "num_ranks", "rank= is given without num_ranks=; pass both"),
        ({"num_ranks": 2}, "rank", "num_ranks= is given without rank=; pass both"),
        ({"rank": 2, "num_ranks": 2}, "rank", "rank=2 must be from 0 to 1 with 2 ranks"),
        ({"rank": -1, "num_ranks": 2}, "rank", "rank=-1 must be from 0 to 1"),
        ({"rank": 0, "num_ranks": 0}, "num_ranks", "num_ranks=0 must be at least 1"),
        ({"rank": "0", "num_ranks": 2}, "rank", "rank='0' and num_ranks=2 must be whole numbers"),
        (
            {"accelerator": object()},
            "accelerator",
            "object without process_index",
        ),
    ],
)
def test_an_invalid_rank_is_refused(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        find_ranks(**given, environment=ALONE)
    assert caught.value.field == field


def test_the_accelerator_provides_rank_and_device() -> None:
    found = find_ranks(accelerator=accelerator(2, 3), environment=ALONE)
    assert facts(found) == (2, 3, "the accelerator", "cuda:1")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed", "torch.distributed"),
        ("deepspeed.comm", "DeepSpeed"),
        ("horovod.torch", "horovod.torch"),
        ("horovod.tensorflow", "horovod.tensorflow"),
        ("horovod.keras", "horovod.keras"),
    ],
)
def test_an_initialised_library_provides_the_rank(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    put(monkeypatch, module, 1, 3)
    assert facts(find_ranks(environment=ALONE)) == (1, 3, name, None)

    put(monkeypatch, module, 1, 3, initialised=False)
    assert find_ranks(environment=ALONE).world_size == 1


@pytest.mark.parametrize(
    ("rank_name", "size_name"),
    [
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ],
)
def test_launchers_set_the_rank_in_the_environment(rank_name: str, size_name: str) -> None:
    found = find_ranks(environment={rank_name: "1", size_name: "2"})

    assert facts(found)[:2] == (1, 2)
    assert found.found_in == f"the environment ({rank_name} and {size_name})"


def test_the_first_source_wins_and_a_warning_names_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(monkeypatch, "horovod.torch", 0, 5)
    put(monkeypatch, "torch.distributed", 1, 2)

    assert find_ranks(environment=TORCHRUN).found_in == "torch.distributed"
    end = "using the first"
    assert [record.getMessage() for record in caplog.records] == [
        f"torch.distributed has rank 1 of 2, but horovod.torch has rank 0 of 5; {end}",
        f"torch.distributed has rank 1 of 2, but the environment (RANK and WORLD_SIZE) has rank 3 of 4; {end}",
    ]
    assert find_ranks(accelerator=accelerator(0, 1), environment=TORCHRUN).found_in == "the accelerator"
    put(monkeypatch, "deepspeed.comm", 0, 5)
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert find_ranks(environment=TORCHRUN).found_in == "DeepSpeed"


def test_sources_that_agree_are_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    put(monkeypatch, "torch.distributed", 3, 4)
    put(monkeypatch, "deepspeed.comm", 3, 4)
    find_ranks(accelerator=accelerator(3, 4), environment=TORCHRUN)

    assert caplog.records == []


def test_torchrun_under_slurm_is_not_a_disagreement(caplog: pytest.LogCaptureFixture) -> None:
    """Slurm starts one task per machine, torchrun one rank per device."""
    found = find_ranks(environment={**TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})

    assert (found.rank, found.world_size) == (3, 4)
    assert caplog.records == []


@pytest.mark.parametrize("half", [{"SLURM_NTASKS": "4"}, {"SLURM_PROCID": "0"}])
def test_a_shell_in_a_slurm_allocation_is_one_rank(half: dict[str, str]) -> None:
    assert find_ranks(environment=half).world_size == 1


@pytest.mark.parametrize(
    ("environment", "field", "message"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK", "RANK='first' in the environment is not a number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE", "WORLD_SIZE='' in the environment is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "²"}, "WORLD_SIZE", "is not a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK", "is not a number"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK", "PMI_RANK=2 in the environment is not below PMI_SIZE=2"),
        ({"RANK": "0"}, "WORLD_SIZE", "the environment has RANK but not WORLD_SIZE; set both"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "but not OMPI_COMM_WORLD_RANK"),
    ],
)
def test_an_error_about_a_malformed_environment_names_the_variable(
    environment: dict[str, str], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_ranks(environment=environment)
    assert caught.value.field == field


def test_a_malformed_environment_is_only_a_warning_if_another_source_has_the_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = find_ranks(accelerator=accelerator(1, 2), environment={"RANK": "first", "WORLD_SIZE": "2"})

    assert (found.rank, found.world_size) == (1, 2)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "using the rank from the accelerator and ignoring the environment: RANK='first'" in record.getMessage()


def test_finding_the_rank_imports_no_library() -> None:
    code = (
        "import sys; from strata.data.ranks import find_ranks, share; share(find_ranks(environment={}), bytes); "
        "print({'torch', 'numpy', 'accelerate', 'deepspeed', 'horovod'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert found.stdout.strip() == "set()"


# -- sharing: several real ranks are in tests/integration/test_data_sharing.py -----------------------------------------


def test_without_a_process_group_every_rank_produces() -> None:
    assert share(Identity(rank=1, world_size=2), lambda: b"own") == b"own"


def test_a_process_group_of_another_size_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "torch.distributed", 1, 8)  # has no `broadcast`

    assert share(Identity(rank=1, world_size=2), lambda: b"own") == b"own"


@pytest.mark.parametrize(
    ("config", "own_device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu"),
        ("cuda:nccl", "cuda", "the accelerator's"),
        ("cuda:nccl", "cpu", "cuda"),
    ],
)
def test_tensors_are_sent_from_where_the_group_can_send(config: str, own_device: str, expected: str) -> None:
    device = SimpleNamespace(type=own_device)
    found = r._device(SimpleNamespace(get_backend_config=lambda: config), Identity(world_size=2, device=device))

    assert found is device if expected == "the accelerator's" else found == expected
