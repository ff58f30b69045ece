"""Traces: what a recovery and a checkpoint become, and that an endpoint that is dead or missing holds up nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from strata import tracing
from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.format.manifest import CheckpointType
from strata.checkpoint.trace import trace_of
from strata.launch.record.timeline import RunEvent
from strata.launch.record.trace import RecoveryTraces
from strata.tracing import Exporter, Span, is_on


def event(at_s: float, what: str, text: str = "", **more: int) -> RunEvent:
    return RunEvent(at_s=at_s, monotonic_s=at_s, what=what, text=text, **more)  # type: ignore[arg-type]


FAILURE = [
    event(0.0, "started"),
    event(1.0, "first_step", step=1),
    event(10.0, "failed", "rank 1: killed by signal 9"),
    event(10.5, "started", attempt=1),
    event(11.0, "chosen", attempt=1, step=40),
    event(12.0, "restored", attempt=1, step=40),
]
OVER = event(13.0, "first_step", attempt=1, step=41)


def traced(*events: RunEvent) -> list[list[Span]]:
    traces = RecoveryTraces("job")
    traces.changed(1, 0.5)
    traces.changed(2, 10.2)
    traces.changed(2, 10.9)
    return [traces.add(each) for each in events]


def intervals(span: Span) -> list[tuple[str, float, float]]:
    return [(each.name, each.began_s, each.ended_s) for each in span.children]


def test_a_recovery_is_one_trace_with_a_span_up_to_each_moment() -> None:
    *before, [found] = traced(*FAILURE, OVER)
    assert before == [[]] * 6
    assert (found.name, found.began_s, found.ended_s, found.error) == ("recovery", 10.0, 13.0, "")
    assert intervals(found) == [
        ("detect", 10.0, 10.0),
        ("new generation", 10.0, 10.2),
        ("start workers", 10.2, 10.5),
        ("choose checkpoint", 10.5, 11.0),
        ("load", 11.0, 12.0),
        ("first step", 12.0, 13.0),
    ]
    assert found.attributes == {
        "strata.run": "job",
        "strata.cause": "rank 1: killed by signal 9",
        "strata.failed_attempt": 0,
        "strata.rank": 1,
        "strata.attempt": 1,
        "strata.generation": 2,
        "strata.checkpoint.step": 40,
        "strata.first_step": 41,
    }


def test_a_recovery_that_fails_again_or_ends_the_run_is_a_trace_with_an_error() -> None:
    second = [event(12.5, "failed", "rank 0: exit code 1", attempt=1), event(12.6, "started", attempt=2)]
    over = event(14.0, "first_step", attempt=2, step=41)
    found = [each for spans in traced(*FAILURE, *second, over) for each in spans]
    assert [(each.began_s, each.ended_s, bool(each.error)) for each in found] == [
        (10.0, 12.5, True),
        (12.5, 14.0, False),
    ]
    *_, [ended] = traced(*FAILURE[:3], event(10.2, "finished", "failed: no restarts allowed"))
    assert (ended.error, ended.ended_s) == ("training made no step after this failure", 10.2)


def test_every_recovery_is_exported_once() -> None:
    again = [event(20.0, "failed", "rank 0: exit code 1", attempt=1), event(20.5, "started", attempt=2)]
    ends = [event(21.0, "first_step", attempt=2, step=41), event(30.0, "finished", "done")]
    assert [len(each) for each in traced(*FAILURE, OVER, *again, *ends)] == [0] * 6 + [1, 0, 0, 1, 0]


SAVED = CheckpointMetadata(
    id="step-000000000005-0123456789abcdef",
    step=5,
    epoch=1,
    path="/c/step-000000000005-0123456789abcdef",
    size_bytes=10,
    checkpoint_type=CheckpointType.FULL,
    created_at_s=100.0,
    num_ranks=2,
    stall_s=0.5,
    write_s=1.5,
    duration_s=3.0,
)


def test_a_checkpoint_is_one_trace_of_its_stages() -> None:
    found = trace_of(SAVED, ended_s=103.25)
    assert (found.name, found.began_s, found.ended_s) == ("checkpoint", 100.0, 103.25)
    stages = [("stage", 100.0, 100.5), ("write", 100.5, 102.0), ("wait for ranks", 102.0, 103.0)]
    assert intervals(found) == [*stages, ("commit", 103.0, 103.25)]
    alone = trace_of(replace(SAVED, num_ranks=1), ended_s=103.25)
    assert [each.name for each in alone.children] == ["stage", "write", "commit"]


def test_a_failed_save_is_a_trace_with_its_error() -> None:
    unknown = replace(SAVED, stall_s=None, write_s=None, duration_s=None)
    found = trace_of(unknown, ended_s=101.0, error="the disk is full")
    assert (found.error, found.children, found.ended_s) == ("the disk is full", (), 101.0)
    assert trace_of(unknown, ended_s=101.0).children == ()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_an_endpoint_in_the_environment_turns_traces_on(variables: dict[str, str], expected: bool) -> None:
    assert is_on(variables) is expected


def test_without_an_endpoint_nothing_is_imported(tmp_path: Path) -> None:
    code = """
import os, sys
from strata.checkpoint import CheckpointManager
with CheckpointManager("c", saver="thread") as manager:
    manager.save({"x": 1}, step=1).wait()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
import threading
assert "strata-traces" not in [thread.name for thread in threading.enumerate()]
"""
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, timeout=50)


ONE = Span(name="checkpoint", began_s=1.0, ended_s=2.0)


def exporter(send: Callable[[Sequence[Span]], bool]) -> Exporter:
    found = Exporter(connect=lambda: send)
    found._thread.start()
    return found


def test_an_endpoint_that_fails_is_given_up_after_three_exports(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Span] = []

    def refuse(traces: Sequence[Span]) -> bool:
        sent.extend(traces)
        return False

    found = exporter(refuse)
    for _ in range(5):
        found.put(ONE)
        assert found.flush(30)
    found._thread.join(30)
    found.put(ONE)
    assert (len(sent), len(found._waiting)) == (3, 0)
    assert [each.getMessage() for each in caplog.records] == [
        "traces are not exported any more: the endpoint failed 3 times in a row"
    ]


def test_an_endpoint_that_never_answers_delays_the_exit_once_by_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "EXIT_S", 0.01)
    gate = threading.Event()
    found = exporter(lambda _: gate.wait(30))
    for _ in range(2 * tracing.MAX_WAITING):
        found.put(ONE)
    assert len(found._waiting) <= tracing.MAX_WAITING
    found._exit()
    assert found._left_s == 0.0
    found.put(ONE)  # of a save that ends later
    gate.set()
    assert "the last traces were not exported within 0.01 s" in caplog.text


def test_a_missing_package_or_another_protocol_is_one_warning_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*tracing.ENDPOINTS, *tracing.PROTOCOLS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    for name, value in (("OTEL_SERVICE_NAME", "x"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")):
        monkeypatch.setenv(name, value)
        found = Exporter()
        found._thread.start()
        found.put(ONE)
        assert found.flush(30)
    missing, protocol = (each.getMessage() for each in caplog.records)
    assert "pip install 'strata-runtime[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT" in missing
    assert (
        "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported; set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in protocol
    )
