"""What a training function reports and returns, as the process of a trial sends it."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.errors import CoordinatorUnavailable, InvalidArgument, StaleIncarnation
from strata.identity import Identity
from strata.launch.environment import UNREACHABLE, WorkerSpec
from strata.tune import messages as m
from strata.tune.link import DriverLost
from strata.tune.worker import RunningTrial, _last_words, _leaving_if_lost, _values

ORDER = m.Order(
    trial=3,
    lease=2,
    config={"x": 0.5},
    metrics=("loss", "latency"),
    worker=WorkerSpec(identity=Identity(run="sweep.3", attempt=1), coordinator="", checkpoints="/k"),
)


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def report(self, step: int, values: tuple[float | None, ...]) -> None:
        self.sent.append(m.encode(m.Report(lease=2, number=1, step=step, values=values)))

    def answer(self) -> None:
        return None


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, 2**63, float("nan")])
def test_a_step_that_is_no_integer_or_out_of_range_is_refused_where_it_is_reported(step: Any) -> None:
    """The driver could not read such a message, and would close the connection again and again."""
    link = FakeLink()
    trial = RunningTrial(ORDER, link)  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match=r"step=.* must be an integer from 0 to 2\*\*63 - 1"):
        trial.report(step=step, loss=0.5)
    with pytest.raises(InvalidArgument, match="must be an integer"):
        trial.reported(SimpleNamespace(step=step, saves=False), {"loss": 0.5})  # type: ignore[arg-type]
    assert link.sent == []


def test_steps_and_metrics_of_numpy_are_numbers_and_what_is_none_is_missing() -> None:
    link = FakeLink()
    trial = RunningTrial(ORDER, link)  # type: ignore[arg-type]
    trial.report(step=np.int64(3), loss=np.float32(0.5), latency=10**400)  # type: ignore[arg-type]

    (sent,) = (m.from_trial.decode(each) for each in link.sent)
    assert isinstance(sent, m.Report)
    assert (sent.step, sent.values) == (3, (0.5, None))


@pytest.mark.parametrize(
    ("result", "values"),
    [
        (0.5, (0.5,)),
        (3, (3.0,)),
        (np.float32(0.5), (0.5,)),
        (np.array(0.5), (0.5,)),
        (Decimal("0.5"), (0.5,)),
        ({"loss": np.float32(0.5), "other": 1}, (0.5,)),
        (float("inf"), (None,)),
        (np.zeros(2), None),
        (True, None),
        ("0.5", None),
        ({"other": 1}, None),
        (None, None),
    ],
)
def test_a_returned_number_is_the_result_and_anything_else_leaves_the_last_report(result: Any, values: Any) -> None:
    assert _values(result, ("loss",)) == values


def test_the_last_words_of_a_trial_can_be_sent_whatever_they_contain() -> None:
    reason = _last_words(FileNotFoundError(b"data-\xff".decode(errors="surrogateescape")))

    assert m.from_trial.decode(m.encode(m.Failure(lease=1, number=1, reason=reason)))
    assert reason == "FileNotFoundError: data-\\udcff"
    assert len(_last_words(ValueError("x" * 10_000))) == 2_000


@pytest.mark.parametrize("error", [DriverLost, CoordinatorUnavailable, StaleIncarnation])
def test_a_process_without_its_driver_or_coordinator_is_no_failure_of_the_configuration(
    error: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, _leaving_if_lost():
        raise error("nothing listens there")

    assert ended.value.code == UNREACHABLE
    assert "nothing listens there" in capfd.readouterr().err
