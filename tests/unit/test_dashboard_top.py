"""What `strata top` draws from an overview."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from strata.coordinator.http.models import Page
from strata.dashboard import top
from strata.dashboard.http import models as m
from strata.errors import CoordinatorError
from strata.terminal import Console

HOSTILE = "\x1b[2J\u202e\rFORGED[b]"


def value(mean: float, low: float, high: float, unit: str = "") -> dict[str, Any]:
    return {"min": low, "mean": mean, "max": high, "unit": unit}


def job(job_id: str = "mnist", **changed: Any) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "state": "training",
        "num_workers": 4,
        "num_servers": 2,
        "num_suspects": 1,
        "workers_by_state": {"RECOVERING": 1, "TRAINING": 3},
        "step": 1_200,
        "epoch": 2,
        "steps_per_s": 45.25,
        "rows_per_s": 11_600.0,
        "checkpoint_step": 1_150,
        "checkpoint_age_s": 3.0,
        "values": {
            "metric:loss": value(0.25, 0.2, 0.3),
            "metric:wait_ms": value(1, 1, 1, "ms"),
            "step": value(1, 1, 1),
        },
        "num_values": 3,
        **changed,
    }


def overview(*jobs: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "version": "9.9",
        "a_later_field": 1,
        "requests_per_s": 120.0,
        "barrier_p50_s": 0.0012,
        "barrier_p99_s": 2.5,
        "num_sessions": 5,
        "num_workers": 4,
        "health": {
            "level": "warning",
            "line": "rank 3 silent for 4 s; and 1 more",
            "findings": [
                {"level": "warning", "line": "rank 3 silent for 4 s"},
                {"level": "warning", "line": "rank 1 makes no steps"},
            ],
            "num_findings": 2,
        },
        "jobs": {"items": list(jobs), "total": len(jobs)},
        **changed,
    }


def drawn(answer: dict[str, Any], *, width: int = 120, height: int = 40, **view: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    given = {"title": "run mnist", "address": "http://127.0.0.1:1", **view}
    console.print(top.render(top.TopView(overview=top.parse(answer), **given)))
    return out.getvalue()


@pytest.mark.parametrize(
    ("struct", "model"),
    [
        (top.TopOverview, m.Overview),
        (top.TopJobs, Page[m.OverviewJob]),
        (top.TopJob, m.OverviewJob),
        (top.TopValue, m.SeriesValue),
        (top.TopHealth, m.HealthState),
        (top.TopFinding, m.HealthFinding),
    ],
)
def test_every_field_that_is_drawn_is_one_of_the_api_and_is_null_where_it_may_be(
    struct: type[msgspec.Struct], model: type[BaseModel]
) -> None:
    for field in msgspec.structs.fields(struct):
        of_api = model.model_fields[field.name].annotation
        assert (type(None) in getattr(field.type, "__args__", ())) == (type(None) in getattr(of_api, "__args__", ())), (
            field.name
        )


def test_the_overview_has_jobs_rates_workers_checkpoint_health_and_values() -> None:
    shown = drawn(overview(job()), width=160)

    for text in (
        "run mnist · http://127.0.0.1:1",
        "rank 3 silent for 4 s; and 1 more",
        "rank 1 makes no steps",
        "120 requests/s · 5 sessions · 4 workers · barrier p50 1.2 ms, p99 2.5 s",
        "3 training, 1 recovering, 2 servers, 1 disconnected",
        "3 s ago, step 1150",
    ):
        assert text in shown
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("mnist"))
    assert row[:6] == ["mnist", "training", "1200", "2", "45.2", "11,600"]
    assert ["loss", "0.25", "0.2", "0.3"] in [line.split() for line in shown.splitlines()]
    assert ["wait_ms", "1", "1", "1", "ms"] in [line.split() for line in shown.splitlines()]
    assert "no answer" not in shown


def test_what_was_not_measured_is_a_dash() -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ("step", "epoch", "steps_per_s", "rows_per_s", "checkpoint_step", "checkpoint_age_s")
    )
    shown = drawn(
        overview(
            job(**unknown, values={}, workers_by_state={}, num_servers=0, num_suspects=0),
            barrier_p50_s=None,
            barrier_p99_s=None,
        ),
        width=160,
    )

    (row,) = (line.split() for line in shown.splitlines() if line.startswith("mnist"))
    assert row == ["mnist", "training", "–", "–", "–", "–", "–", "none"]
    assert "barrier p50, p99 –" in shown
    assert "None" not in shown


def test_several_jobs_share_the_table_of_values_with_their_names() -> None:
    shown = drawn(overview(job("one"), job("two")))

    assert ["two", "loss", "0.25", "0.2", "0.3"] in [line.split() for line in shown.splitlines()]


@pytest.mark.parametrize("width", [20, 34, 46, 60, 80, 120])
@pytest.mark.parametrize("height", [6, 24, 60])
def test_no_line_is_wider_than_the_terminal_and_job_state_and_step_stay(width: int, height: int) -> None:
    shown = drawn(overview(job("a-rather-long-name-of-a-job")), width=width, height=height)

    assert max(map(len, shown.splitlines())) <= width
    if width >= 34:
        header = next(line for line in shown.splitlines() if line.startswith("job"))
        assert header.split()[:3] == ["job", "state", "step"]
        assert "1200" in shown


def test_many_jobs_leave_a_low_terminal_room_for_values_and_are_counted() -> None:
    jobs = [job(f"job-{number}") for number in range(40)]
    shown = drawn(overview(*jobs), height=24).splitlines()

    assert any(line.startswith("… ") and line.endswith(" more jobs") for line in shown)
    assert any("loss" in line for line in shown)
    assert len(shown) <= 24


def test_a_lost_coordinator_is_named_above_the_last_values() -> None:
    shown = drawn(overview(job()), problem="no coordinator answers at http://x", age_s=12.4)

    assert "for 12 s, trying again: no coordinator answers at http://x" in shown
    assert "1200" in shown


def test_hostile_text_stays_text() -> None:
    hostile = job(
        HOSTILE,
        state=HOSTILE,
        workers_by_state={HOSTILE: 4},
        values={f"metric:{HOSTILE}": value(1, 1, 1, HOSTILE)},
    )
    health = {"level": HOSTILE, "line": HOSTILE, "findings": [], "num_findings": 1}
    shown = drawn(
        overview(hostile, job("other"), health=health), width=400, title=HOSTILE, address=HOSTILE, problem=HOSTILE
    )

    assert [c for c in shown if not c.isprintable() and c != "\n"] == []
    assert shown.count("FORGED") == shown.count("FORGED[b]") >= 7
    assert not any(line.strip().startswith("FORGED") for line in shown.splitlines())


@pytest.mark.parametrize("answer", [[], {}, {"version": "1"}, "x", None, overview({"job_id": 1})])
def test_an_answer_that_is_no_overview_is_refused_with_the_cure(answer: Any) -> None:
    with pytest.raises(CoordinatorError, match=r"is not an overview .*; check that the address"):
        top.parse(answer)


@pytest.mark.parametrize(
    ("given", "words"), [(None, "–"), (0.0, "0.00"), (3.456, "3.46"), (45.25, "45.2"), (11_600.4, "11,600")]
)
def test_rates_have_three_digits(given: float | None, words: str) -> None:
    assert top.rate(given) == words


@pytest.mark.parametrize(("given", "words"), [(0.0008, "0.8 ms"), (0.12, "120 ms"), (2.5, "2.5 s")])
def test_short_times_have_a_unit(given: float, words: str) -> None:
    assert top.short_time(given) == words
