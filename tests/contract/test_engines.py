"""The engines of the Trainer, under one contract. Ray is in tests/fault/test_run_ray.py, which has a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_contract import EngineContract

from strata.errors import ConfigError
from strata.launch.record.directory import DIRECTORY_VARIABLE
from strata.trainer import engine as engines
from strata.trainer.engine import Engine, Inline, Joined, Launched


class TestInline(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return Inline()


class TestLaunched(EngineContract):
    world_size = 2

    @pytest.fixture
    def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "runs"))
        here = str(Path(__file__).parent)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        return Launched(workers=2, max_restarts=0, logs="none")


def test_the_engine_follows_from_the_arguments_and_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(workers: int | str, engine: str = "local") -> Engine:
        return engines.choose(workers=workers, engine=engine, name="", max_restarts=3, logs="auto")

    assert isinstance(chosen(1), Inline)
    assert chosen(2) == Launched(workers=2)
    assert chosen("1:4") == Launched(workers="1:4")
    assert chosen(1, "ray") == Launched(workers=1, engine="ray")
    with pytest.raises(ConfigError, match="engine='slurm' is unknown"):
        chosen(1, "slurm")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert isinstance(chosen(1), Joined)
