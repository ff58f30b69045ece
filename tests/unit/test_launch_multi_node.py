"""A node of a run on several machines, before it knows whether it leads or follows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.errors import ConfigError
from strata.launch.multi_node import NodeAgent
from strata.launch.record.directory import RunDirectory
from strata.launch.spec import RunSpec, Size


def test_a_node_without_a_role_does_not_promise_another_number_of_workers(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = RunSpec(
            name="job",
            script="/train.py",
            directory="/",
            checkpoints="/k",
            workers=Size(2, 4),
            num_nodes=2,
            coordinator="127.0.0.1:1",
        )
        display: Any = SimpleNamespace()
        agent = NodeAgent(RunDirectory(tmp_path, spec), display, tmp_path / "door")
        with pytest.raises(ConfigError, match="ask for 3 workers again in a moment"):
            agent.scale(3)

    asyncio.run(scene())
