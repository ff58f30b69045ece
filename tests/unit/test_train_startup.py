"""The identity of a process and its save strategy, from its environment."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from strata.checkpoint import Adaptive, AnyOf, EverySeconds, EverySteps, Manual
from strata.errors import ConfigError
from strata.identity import Identity
from strata.launch.environment import JOINED, WorkerSpec, worker_environment
from strata.train.schedule import decides_by_steps
from strata.train.startup import _check_is_the_rank, _spec_without_agent, _stop_when_asked, init, strategy_of


@pytest.mark.parametrize(
    ("every", "strategy"),
    [
        (None, Adaptive()),
        (50, EverySteps(50)),
        ("50", EverySteps(50)),
        (" 90s ", EverySeconds(90.0)),
        ("1.5m", EverySeconds(90.0)),
        ("2h", EverySeconds(7200.0)),
        (Manual(), Manual()),
    ],
)
def test_the_save_interval_is_steps_or_a_time(every: object, strategy: object) -> None:
    assert strategy_of(every) == strategy  # type: ignore[arg-type]


@pytest.mark.parametrize("every", ["", "often", "5 days", "-3", "1e3", "0", "²", 0, -3, 1.5, True, [5], Manual])
def test_anything_else_is_refused(every: object) -> None:
    with pytest.raises(ConfigError, match=r"neither a number of steps nor a time"):
        strategy_of(every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "alike"),
    [
        (EverySteps(5), True),
        (Manual(), True),
        (AnyOf(EverySteps(5), EverySteps(7)), True),
        (AnyOf(EverySteps(5), EverySeconds(7)), False),
        (EverySeconds(5), False),
        (Adaptive(), False),
    ],
)
def test_only_steps_are_counted_alike_on_all_ranks(strategy: object, alike: bool) -> None:
    assert decides_by_steps(strategy) is alike  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "cure"), [("evry", "did you mean every="), ("keep_cont", "did you mean keep_count="), ("q", "see docs/")]
)
def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant(name: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=rf"strata.init\(\) has no argument {name}=; {cure}"):
        init(**{name: 3})


def test_a_process_without_a_launcher_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--lr", "1"])
    worker_spec = _spec_without_agent({"HOME": "/root"})
    assert (
        worker_spec.identity.rank,
        worker_spec.identity.world_size,
        worker_spec.identity.run,
        worker_spec.coordinator,
    ) == (
        0,
        1,
        "train",
        "",
    )
    assert worker_spec.checkpoints == "checkpoints/train"


@pytest.mark.parametrize(("program", "name"), [("-c", "c"), ("", "run"), ("my job (1).py", "my-job--1-"), ("…", "run")])
def test_any_program_has_a_name_that_a_job_can_have(monkeypatch: pytest.MonkeyPatch, program: str, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert _spec_without_agent({}).identity.run == name


def test_under_torchrun_it_is_one_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    worker_spec = _spec_without_agent(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "night",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
        }
    )
    assert (
        worker_spec.identity.rank,
        worker_spec.identity.world_size,
        worker_spec.identity.local_rank,
        worker_spec.identity.local_world_size,
    ) == (3, 4, 1, 2)
    assert worker_spec.identity.session == "night/2/10.0.0.1:29500"


WORKER_SPEC = WorkerSpec(
    identity=Identity(run="job", attempt=0, rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1),
    coordinator="unix:/nowhere",
    checkpoints="ckpt",
)


def test_a_process_joins_once_and_its_children_do_not() -> None:
    variables = worker_environment(WORKER_SPEC)
    _check_is_the_rank(variables)
    with pytest.raises(ConfigError, match="was already called in this process"):
        _check_is_the_rank({**variables, JOINED: str(os.getpid())})
    with pytest.raises(ConfigError, match="process 1 is already rank 1 of run 'job'"):
        _check_is_the_rank({**variables, JOINED: "1"})


class Asked:
    """A fake membership that records requests."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def ask_stop(self, reason: str) -> None:
        self.reasons.append(reason)


def test_sigterm_requests_a_stop_in_the_rank_and_ends_its_forked_children() -> None:
    before, asked = signal.getsignal(signal.SIGTERM), Asked()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _stop_when_asked(asked)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)
        assert asked.reasons == ["SIGTERM"]
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(7)  # it went on
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
