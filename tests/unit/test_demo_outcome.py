"""The demo's checks on made-up step logs and weights: a tampered result must be found."""

from __future__ import annotations

import io
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strata.coordinator.state.server_figures import ServerFigures
from strata.demo import config, view
from strata.demo.config import DemoConfig
from strata.demo.outcome import (
    Kill,
    Outcome,
    Recovery,
    RowsCheck,
    RunFigures,
    Tensor,
    WeightsCheck,
    check_rows,
    different_tensors,
    losses_by_step,
    recovery_of,
    run_figures,
)
from strata.demo.step_log import StepLog, StepLogReader, StepRecord, WorkerSteps
from strata.errors import ConfigError
from strata.launch.record.timeline import RunEvent

NUM_RANKS = 2
NUM_STEPS = 6
"""Steps of an epoch; each has two rows per rank."""
IN_DATA = np.arange(NUM_STEPS * NUM_RANKS * 2)


def record(step: int, rank: int) -> StepRecord:
    """Return the record of a step on a rank."""
    epoch, within = divmod(step - 1, NUM_STEPS)
    first = (within * NUM_RANKS + rank) * 2
    return StepRecord(step, epoch, 1 / step, float(step), np.array([first, first + 1]))


def attempt(number: int, first: int, last: int) -> list[WorkerSteps]:
    """Return the steps from `first` to `last` on all ranks."""
    return [
        WorkerSteps(number, rank, 100 + rank, first - 1, 0.5, [record(step, rank) for step in range(first, last + 1)])
        for rank in range(NUM_RANKS)
    ]


def checked(entries: list[WorkerSteps], in_data: Any = IN_DATA) -> RowsCheck:
    return check_rows(entries, in_data, num_epochs=2)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_row_of_an_undisturbed_run_is_exact() -> None:
    found = checked(attempt(0, 1, 12))

    assert found.is_good
    assert (found.num_exact, found.num_rows, found.num_rolled_back) == (24, 24, 0)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=4))
def test_rolled_back_rows_do_not_count(kills: list[tuple[int, int]]) -> None:
    """Each attempt restores a step that the previous one had reached and is killed at a later step."""
    entries: list[WorkerSteps] = []
    reached = num_noted = 0
    for number, (restored, more) in enumerate(kills):
        first = min(restored, reached) + 1
        reached = min(first - 1 + more, 11)
        entries += attempt(number, first, reached)
        num_noted += max(reached - first + 1, 0)
    first = min(kills[-1][0], reached) + 1 if kills else 1
    entries += attempt(len(kills), first, 12)
    num_noted += 12 - first + 1

    found = checked(entries)

    assert found.is_good
    assert found.num_rolled_back == (num_noted - 12) * NUM_RANKS * 2


def test_a_lost_row_is_found() -> None:
    entries = attempt(0, 1, 12)
    lost = entries[1].trained[4]
    entries[1].trained[4] = StepRecord(lost.step, lost.epoch, lost.loss, lost.at_s, lost.rows[:1])

    found = checked(entries)

    assert not found.is_good
    assert (found.num_exact, found.num_lost, found.num_again) == (23, 1, 0)
    assert "1 lost" in view.describe_rows(found)


def test_a_repeated_row_is_found() -> None:
    entries = attempt(0, 1, 12)
    twice = entries[0].trained[7]
    entries[0].trained[7] = StepRecord(twice.step, twice.epoch, 0, 0, np.append(twice.rows, twice.rows[0]))

    found = checked(entries)

    assert not found.is_good
    assert (found.num_lost, found.num_again) == (0, 1)


def test_a_swapped_row_counts_as_lost_and_repeated() -> None:
    entries = attempt(0, 1, 12)
    entries[0].trained[2].rows[0] = entries[0].trained[2].rows[1]

    found = checked(entries)

    assert (found.num_exact, found.num_lost, found.num_again) == (22, 1, 1)


def test_a_restart_at_the_wrong_row_is_found() -> None:
    entries = attempt(0, 1, 5)
    for entry in attempt(1, 4, 12):  # the model resumes at step 3, the data at step 5
        shifted = [
            StepRecord(r.step, r.epoch, 0, 0, record(min(r.step + 2, 12), entry.rank).rows) for r in entry.trained
        ]
        entries.append(WorkerSteps(1, entry.rank, 7, 3, 0, shifted))

    assert not checked(entries).is_good


def test_a_rank_missing_from_the_last_attempt_is_found() -> None:
    assert not checked([*attempt(0, 1, 5), attempt(1, 4, 12)[0]]).is_good


def test_a_row_that_is_not_in_the_data_is_found() -> None:
    found = checked(attempt(0, 1, 12), in_data=IN_DATA[:-1])

    assert not found.is_good
    assert found.num_unknown == 2  # once in each epoch


def test_an_extra_epoch_and_a_missing_epoch_are_found() -> None:
    assert not checked(attempt(0, 1, 18)).is_good
    assert checked(attempt(0, 1, 6)).num_lost == 24


def test_an_empty_step_log_is_not_good() -> None:
    assert not checked([]).is_good
    assert not checked([], in_data=np.array([], np.int64)).is_good


# -- weights -----------------------------------------------------------------------------------------------------------


def tensor(*numbers: float, shape: tuple[int, ...] | None = None, dtype: str = "F32") -> Tensor:
    data = np.array(numbers, np.float32).view(np.uint8)
    return Tensor(dtype=dtype, shape=shape or (len(numbers),), data=data)


def test_weights_that_differ_in_one_bit_are_found() -> None:
    one = {"a": tensor(1.0, 2.0), "b": tensor(0.0)}

    assert different_tensors(one, {"a": tensor(1.0, 2.0), "b": tensor(0.0)}) == ()
    assert different_tensors(one, {"a": tensor(1.0, np.nextafter(np.float32(2), 3)), "b": tensor(0.0)}) == ("a",)
    assert different_tensors(one, {"a": tensor(1.0, 2.0), "b": tensor(-0.0)}) == ("b",)


def test_weights_of_another_shape_or_in_one_run_only_are_found() -> None:
    one = {"a": tensor(1.0, 2.0)}

    assert different_tensors(one, {"a": tensor(1.0, 2.0, shape=(2, 1))}) == ("a",)
    assert different_tensors(one, {"a": tensor(1.0, 2.0, dtype="I32")}) == ("a",)
    assert different_tensors(one, {}) == different_tensors({}, one) == ("a",)


def test_weights_of_different_steps_and_missing_weights_are_not_good() -> None:
    assert not WeightsCheck(steps=(5, 4), num_tensors=1, num_elements=1, different=()).is_good
    assert not WeightsCheck(steps=(5, 5), num_tensors=0, num_elements=0, different=()).is_good


# -- the step log ------------------------------------------------------------------------------------------------------


def test_a_step_log_is_read_while_it_grows_and_an_incomplete_record_is_ignored(tmp_path: Path) -> None:
    place: Any = SimpleNamespace(attempt=1, rank=0)
    reader = StepLogReader(tmp_path / "steps")
    reader.look()
    assert reader.entries == {}

    step_log = StepLog(str(tmp_path / "steps"), place, 40)
    step_log.trained(41, 0, 0.5, np.array([3, 1, 2]))
    save: Any = SimpleNamespace(step=41, epoch=0, stall_s=0.004)
    step_log.saved(save)
    step_log.saved(None)
    reader.look()
    entry = reader.entries[1, 0]
    assert (entry.pid, entry.restored_step) == (os.getpid(), 40)
    assert [(one.step, one.loss, one.rows.tolist()) for one in entry.trained] == [(41, 0.5, [3, 1, 2])]
    assert [save.stall_s for save in entry.saved] == [0.004]

    (path,) = (tmp_path / "steps").iterdir()
    whole = path.stat().st_size
    step_log.trained(42, 0, 0.4, np.array([4, 5]))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    reader.look()
    assert len(entry.trained) == 1
    with path.open("r+b") as file:
        file.seek(len(data) - 1)
        file.write(data[-1:])
    reader.look()
    assert [one.step for one in entry.trained] == [41, 42]
    assert len(data) > whole
    reader.close()


# -- figures -----------------------------------------------------------------------------------------------------------


def event(what: str, at_s: float, number: int = 0) -> RunEvent:
    return RunEvent(at_s=0, monotonic_s=at_s, what=what, attempt=number)


def test_a_recovery_reports_the_phases_reached_so_far() -> None:
    kill = Kill(attempt=0, rank=1, name="rank 1", pid=101, step=5, at_s=10.0)
    before = attempt(0, 1, 5)
    assert recovery_of(kill, [event("started", 1.0)], before) == Recovery(rank=1, name="rank 1", pid=101, step=5)

    events = [event("started", 1.0), event("failed", 10.004), event("started", 10.05, 1)]
    begun = recovery_of(kill, events, before)
    assert begun.detected_ms == pytest.approx(4)
    assert begun.started_ms == pytest.approx(50)
    assert begun.restored_ms is None

    again = [WorkerSteps(1, rank, 200, 3, 10.2 + rank / 10) for rank in range(2)]
    restored = recovery_of(kill, events, [*before, *again])
    assert restored.restored_ms == pytest.approx(300)
    assert (restored.restored_step, restored.num_steps_again) == (3, 2)
    assert not restored.is_complete

    for rank, entry in enumerate(again):
        entry.trained.append(StepRecord(4, 0, 0.1, 10.4 + rank / 10, np.array([], np.int64)))
    assert recovery_of(kill, events, [*before, *again]).first_step_ms == pytest.approx(500)


def test_a_repeated_step_has_the_loss_of_its_last_attempt() -> None:
    first, again = attempt(0, 1, 3), attempt(1, 3, 3)
    again[0].trained[0] = StepRecord(3, 0, 9.0, 0, np.array([], np.int64))

    assert losses_by_step([*again, *first]) == [1.0, 0.5, pytest.approx((9.0 + 1 / 3) / 2)]
    assert run_figures([*first, *again], duration_s=2.0).num_steps == 3


# -- config ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(1, 10), st.integers(0, 10**6), st.integers(0, 10**6))
def test_kills_are_spread_over_the_middle_of_the_run(num_workers: int, num_kills: int, more: int, seed: int) -> None:
    min_rows = 10 * num_kills * num_workers * config.BATCH_SIZE
    chosen = DemoConfig(num_workers=num_workers, num_rows=min_rows + more, num_kills=num_kills, seed=seed)

    steps = [kill.step for kill in chosen.kills]
    assert steps == sorted(set(steps))
    assert chosen.num_steps * 0.25 < steps[0]
    assert steps[-1] < chosen.num_steps * 0.9
    assert all(0 <= kill.rank < num_workers for kill in chosen.kills)
    assert chosen.kills == chosen.kills


def test_an_invalid_config_is_refused_with_the_cure(tmp_path: Path) -> None:
    for wrong, cure in (
        ({"num_workers": 0}, "--workers 0 is out of range; use 1 to"),
        ({"num_kills": 0}, "--kills 0 is out of range; use 1 to"),
        ({"num_rows": 10}, "--rows 10 is out of range; .* use 5120 to"),
        ({"keep": tmp_path}, "give a new or empty directory"),
    ):
        (tmp_path / "something").touch()
        with pytest.raises(ConfigError, match=cure):
            DemoConfig(**wrong)  # type: ignore[arg-type]


def test_without_torch_the_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())

    with pytest.raises(ConfigError, match=r'needs torch, .*pip install "strata-runtime\[torch,data\]"'):
        config.check_installed()


# -- view --------------------------------------------------------------------------------------------------------------


def outcome(**changed: Any) -> Outcome:
    figures = RunFigures(
        duration_s=12.3,
        num_steps=782,
        first_loss=0.68,
        last_loss=0.38,
        num_checkpoints=30,
        median_stall_ms=2.0,
        longest_stall_ms=500.0,
    )
    back = Recovery(
        rank=1,
        name="rank 1",
        pid=4_000_000,
        step=496,
        detected_ms=4,
        started_ms=60,
        restored_ms=400,
        first_step_ms=12_345,
        restored_step=494,
        num_steps_again=2,
    )
    usual: dict[str, Any] = {
        "num_workers": 2,
        "num_rows": 24,
        "num_epochs": 2,
        "seed": 0,
        "undisturbed": figures,
        "killed": figures,
        "recoveries": (back,),
        "num_kills_planned": 1,
        "rows": checked(attempt(0, 1, 12)),
        "rows_undisturbed": checked(attempt(0, 1, 12)),
        "weights": WeightsCheck(steps=(12, 12), num_tensors=32, num_elements=203_051, different=()),
        "duration_s": 30.0,
    }
    return Outcome(**{**usual, **changed})


def shown(what: Any, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rows": checked(attempt(0, 1, 11))}, "4 lost"),
        ({"rows_undisturbed": checked(attempt(0, 1, 11))}, "undisturbed"),
        (
            {"weights": WeightsCheck(steps=(9, 9), num_tensors=4, num_elements=4, different=("a", "b", "c", "d"))},
            "4 of 4 tensors differ: a, b, c, …",
        ),
        (
            {"weights": WeightsCheck(steps=(9, 8), num_tensors=4, num_elements=4, different=())},
            "different steps: 9 and 8",
        ),
        ({"recoveries": ()}, "1 of 1 kills had no effect"),
        ({"recoveries": (Recovery(rank=0, name="rank 0", pid=1, step=2),)}, "did not continue"),
    ],
)
def test_a_failed_check_is_shown_and_fails_the_demo(changed: dict[str, Any], expected: str) -> None:
    made = outcome(**changed)

    assert not made.is_good
    assert not made.as_plain()["is_good"]
    assert "✗" in shown(view.summary(made), 120)
    assert expected in shown(view.summary(made), 120)
    assert "The demo failed" in shown(view.story(made))


@pytest.mark.parametrize("width", [80, 120])
def test_the_output_fits_the_terminal(width: int) -> None:
    made = outcome()
    facts = view.RunFacts(
        workers=[
            view.WorkerFacts("rank 0", 700, 0.4321, "training"),
            view.WorkerFacts("rank 1", 0, None, "killed"),
            view.WorkerFacts("rank 2", 0, None, "starting"),
        ],
        num_steps=782,
        losses=[1 / step for step in range(1, 700)],
        saved_step=676,
        recoveries=made.recoveries,
        elapsed_s=12.0,
    )
    arguments = shlex.split("strata run --name undisturbed -w 2 --every 26 train.py --data clicks --step-log steps/x")
    text = "".join(
        shown(each, width)
        for each in (
            view.title(2, 1, 0),
            view.live(facts, width),
            view.command(arguments, width),
            view.run_line(made.killed),
            view.summary(made),
            view.story(made),
        )
    )

    assert made.is_good
    assert "✗" not in text
    assert "+12,345 ms" in text
    assert max(map(len, text.splitlines())) <= width
    assert "--data clicks" in text, "an option stays with its value"


def test_with_servers_the_output_names_them_and_what_they_hold() -> None:
    figures = ServerFigures(rows=4_000, bytes=900_000, evicted=0, pulls_per_s=310.0, pushes_per_s=155.0, staleness=0)
    made = outcome(num_servers=2, servers=figures.as_plain())
    back = replace(made.recoveries[0], rank=3, name="server 1")
    facts = view.RunFacts(
        workers=[
            *(view.WorkerFacts(f"rank {rank}", 100, 0.5, "training") for rank in (0, 1)),
            view.WorkerFacts("server 0", None, None, "serving"),
            view.WorkerFacts("server 1", None, None, "killed"),
        ],
        num_steps=782,
        losses=[0.7, 0.5],
        saved_step=90,
        recoveries=[back],
        elapsed_s=12.0,
        servers=figures,
    )
    drawn = shown(view.live(facts, 80), 80)

    assert "2 workers and 2 parameter servers, kill a server" in shown(view.title(2, 1, 2), 120)
    assert "kill -9 server 1 (pid 4000000) after step 496" in drawn
    assert "4,000 rows, 878.9 KiB, 310.0 pulls/s" in drawn
    assert view.progress_line(facts).strip() == "step 100 of 782, loss 0.500"
    assert "2 held 4,000 rows, 878.9 KiB" in shown(view.summary(made), 120)
    assert "A parameter server was killed without warning" in shown(view.story(made), 400)


def test_the_recovery_from_the_kill_of_a_server_is_timed_by_the_events_of_the_run() -> None:
    kill = Kill(attempt=0, rank=3, name="server 1", pid=101, step=5, at_s=10.0)
    events = [
        RunEvent(at_s=0.0, monotonic_s=at_s, what=what, text="server 1: killed by SIGKILL", attempt=attempt, step=step)
        for what, at_s, attempt, step in (
            ("failed", 10.1, 0, None),
            ("started", 10.3, 1, None),
            ("restored", 12.0, 1, 4),
            ("first_step", 12.5, 1, 5),
        )
    ]
    found = recovery_of(kill, events, [WorkerSteps(1, 0, 102, 4, 12.4)])

    assert (found.name, found.restored_step) == ("server 1", 4)
    assert [found.detected_ms, found.started_ms] == pytest.approx([100.0, 300.0])
    assert [found.restored_ms, found.first_step_ms] == pytest.approx([2_000.0, 2_500.0])


def test_with_servers_only_servers_are_killed() -> None:
    chosen = DemoConfig(num_workers=3, num_servers=2, num_kills=10, num_rows=200_000)

    assert {chosen.name_of(kill.rank) for kill in chosen.kills} == {"server 0", "server 1"}


def test_the_sparkline_falls_with_the_numbers() -> None:
    assert view.sparkline([8.0, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert view.sparkline([8.0, 8, 1, 1], 2) == "█▁"
    assert view.sparkline([3.0, 3.0], 5) == "▁▁"
