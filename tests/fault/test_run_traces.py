"""Traces of a killed run, as a server of OTLP over HTTP receives them."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from servers import DEADLINE_S, STRATA

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from strata import tracing
from strata.tracing import Span

SCRIPT = """
import os, signal
import strata
from strata import tracing

class State:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

with strata.init(every=4) as ctx:
    step = ctx.restore({"state": State()}).step
    while step < 10:
        step += 1
        ctx.report(step=step)
        ctx.maybe_checkpoint({"state": State()})
        ctx.checkpoints.wait()
        if step in (8, 10) and ctx.rank == 0:
            assert tracing._exporters[os.getpid()].flush(60)  # the exit would wait for 2 s
        if step == 7 and ctx.attempt == 0 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths: set[str] = set()
        self.spans: list[tuple[Any, dict[str, Any]]] = []
        """Spans with the attributes of their resource."""


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.add(self.path)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = plain(of_resource.resource.attributes)
            self.server.spans += [(span, resource) for scope in of_resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(DEADLINE_S)


@pytest.mark.timeout(240)
def test_a_killed_run_exports_its_recovery_and_its_checkpoints(collector: Collector, run_directory: Path) -> None:
    (run_directory / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [STRATA, "run", "--workers", "2", "--no-warm", "--name", "traced", "--dashboard", "off", "train.py"],
        cwd=run_directory,
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert collector.paths == {"/v1/traces"}
    assert {(each["service.name"], each.get("strata.run", "traced")) for _, each in collector.spans} == {
        ("strata", "traced")
    }
    roots = [span for span, _ in collector.spans if not span.parent_span_id]
    (recovery,) = [span for span in roots if span.name == "recovery"]
    found = plain(recovery.attributes)
    assert (found["strata.rank"], found["strata.failed_attempt"], found["strata.attempt"]) == (1, 0, 1)
    assert (found["strata.run"], found["strata.checkpoint.step"], found["strata.first_step"]) == ("traced", 4, 5)
    assert "killed" in found["strata.cause"]
    assert set(children(collector, recovery)) == {
        *("detect", "new generation", "start workers", "choose checkpoint", "load", "first step"),
    }
    saved = {plain(span.attributes)["strata.step"]: span for span in roots if span.name == "checkpoint"}
    assert saved.keys() - {4} == {8, 10}  # that of step 4 is lost if its process is killed before it is sent
    for span in saved.values():
        assert children(collector, span) == ["stage", "write", "wait for ranks", "commit"]
    assert recovery.start_time_unix_nano < saved[8].start_time_unix_nano < saved[10].start_time_unix_nano


def test_traces_draw_no_random_numbers_of_the_program(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    for _ in range(2):
        random.seed(7)
        before = random.getstate()
        assert tracing.connected()([Span(name="one", began_s=1.0, ended_s=2.0)])
        assert random.getstate() == before
    first, second = (span.trace_id for span, _ in collector.spans)
    assert first != second


def children(collector: Collector, parent: Any) -> list[str]:
    """Return the names of the spans below a root, which follow each other from its begin to its end."""
    below = [span for span, _ in collector.spans if span.parent_span_id == parent.span_id]
    below.sort(key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
    assert {span.trace_id for span in below} == {parent.trace_id}
    ends = [parent.start_time_unix_nano, *(span.end_time_unix_nano for span in below)]
    for span, end in zip(below, ends[:-1], strict=True):
        assert span.start_time_unix_nano == end or span.end_time_unix_nano == parent.start_time_unix_nano
    assert ends[-1] == parent.end_time_unix_nano
    return [span.name for span in below]
