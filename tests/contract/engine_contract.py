"""What every engine of the Trainer guarantees. An implementation supplies `engine` and `world_size`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint import CheckpointManager
from strata.errors import StrataError
from strata.trainer.engine import Engine, Saving, Session


def describe(session: Session, *arguments: Any) -> dict[str, Any]:
    """Return what the work sees."""
    ctx = session.context
    return {"rank": ctx.rank, "world_size": ctx.world_size, "arguments": arguments, "place": ctx.checkpoints.place}


def count_and_save(session: Session, steps: int) -> tuple[int, int]:
    """Restore, make some steps, save each; return the first and the last step of this call."""
    ctx = session.context
    state = {"sum": np.zeros(1)}
    first = ctx.restore({"state": _Holder(state)}).step
    for _ in range(steps):
        state["sum"] += 1
        ctx.report(step=ctx.step + 1)
        ctx.maybe_checkpoint({"state": _Holder(state)})
    ctx.checkpoints.wait()
    return first, ctx.step


class _Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state["sum"][:] = state["sum"]


def fail(session: Session) -> None:
    raise ValueError(f"row 7 is bad on rank {session.context.rank}")


class EngineContract:
    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError

    world_size = 1

    @pytest.mark.timeout(120)
    def test_the_result_of_rank_0_is_returned(self, engine: Engine, tmp_path: Path) -> None:
        place = str(tmp_path / "saved")

        found = engine.run(describe, ("a", {"b": 2}), Saving(checkpoints=place))

        assert found == {
            "rank": 0,
            "world_size": self.world_size,
            "arguments": ("a", {"b": 2}),
            "place": found["place"],
        }
        assert found["place"].rstrip("/").endswith("saved")

    @pytest.mark.timeout(120)
    def test_a_second_run_continues_from_the_checkpoints_of_the_first(self, engine: Engine, tmp_path: Path) -> None:
        saving = Saving(checkpoints=str(tmp_path / "saved"), every=1)

        assert engine.run(count_and_save, (3,), saving) == (0, 3)
        assert engine.run(count_and_save, (2,), saving) == (3, 5)
        with CheckpointManager(tmp_path / "saved") as manager:
            assert manager.load()["state"]["sum"].tolist() == [5.0]

    @pytest.mark.timeout(120)
    def test_an_error_of_the_work_reaches_the_caller_with_its_message(self, engine: Engine, tmp_path: Path) -> None:
        with pytest.raises((ValueError, StrataError)) as caught:
            engine.run(fail, (), Saving(checkpoints=str(tmp_path / "saved")))

        assert "row 7 is bad on rank" in str(caught.value)
