"""Traces of finished events, such as a recovery: exported by OTLP over HTTP if an endpoint is configured.

Spans are plain values that are built after the fact, with the times that were measured. Without an endpoint in the
environment, `export` returns at once and nothing is imported. With one, a thread builds the spans of the OpenTelemetry
SDK and sends them; the caller never waits for it, and the exit of the process only for a bounded time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.identity import RUN
from strata.lifecycle import at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
TIMEOUT_S = 5.0
"""Of one export, unless the environment has another one."""
MAX_WAITING = 256
"""Traces in the queue; older ones are dropped for newer ones."""
MAX_FAILURES = 3
"""Failed exports in a row after which this process exports no more."""
EXIT_S = 2.0
"""Longest time that the exit of a process waits for its last traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished span. Times are wall times."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    error: str = ""
    children: tuple[Span, ...] = ()


def is_on(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether an endpoint is configured, and the SDK not disabled."""
    return any(variables.get(name) for name in ENDPOINTS) and variables.get("OTEL_SDK_DISABLED", "").lower() != "true"


class Exporter:
    """Sends traces on a thread of its own."""

    def __init__(self, connect: Callable[[], Callable[[Sequence[Span]], bool]] | None = None) -> None:
        """`connect` returns a function that sends traces and returns whether they arrived."""
        self._connect = connect or connected
        self._changed = threading.Condition()
        self._waiting: deque[Span] = deque(maxlen=MAX_WAITING)
        self._is_sending = False
        self._is_over = False
        self._left_s: float | None = None
        """Once the process exits: how long it may still wait."""
        self._thread = threading.Thread(target=self._run, name="strata-traces", daemon=True)

    def begin(self) -> None:
        """
        Raises:
            RuntimeError: No thread can be started. Traces are dropped.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self._is_over = True
            raise
        at_exit(self._exit)

    def put(self, span: Span) -> None:
        with self._changed:
            if self._is_over:
                return
            self._waiting.append(span)
            self._changed.notify_all()
        if self._left_s is not None:  # a save that ends while the process exits
            self._exit()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every trace is sent, or given up; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_over or not (self._waiting or self._is_sending), max(timeout_s, 0.0)
            )

    def _exit(self) -> None:
        left_s = EXIT_S if self._left_s is None else self._left_s
        began_s = time.monotonic()
        if not self.flush(left_s):
            log.warning("the last traces were not exported within %g s", EXIT_S)
        self._left_s = max(left_s - (time.monotonic() - began_s), 0.0)

    def _run(self) -> None:
        try:
            self._send_all(self._connect())
        except Exception as error:  # noqa: BLE001 - a thread boundary: traces never end a run
            log.warning("traces are not exported: %s: %s", type(error).__name__, error)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _send_all(self, send: Callable[[Sequence[Span]], bool]) -> None:
        num_failures = 0
        while num_failures < MAX_FAILURES:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                taken = list(self._waiting)
                self._waiting.clear()
                self._is_sending = True
            has_arrived = send(taken)
            num_failures = 0 if has_arrived else num_failures + 1
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
        log.warning("traces are not exported any more: the endpoint failed %d times in a row", MAX_FAILURES)


_exporters: dict[int, Exporter] = {}
"""By process: a fork has no threads of its parent."""
_starting = threading.Lock()


def export(span: Span) -> None:
    """Export a trace, if an endpoint is configured. Returns at once."""
    if not is_on():
        return
    exporter = _exporters.get(os.getpid())
    if exporter is None:
        with _starting:
            exporter = _exporters.get(os.getpid())
            if exporter is None:
                exporter = _exporters[os.getpid()] = Exporter()
                with contextlib.suppress(RuntimeError):  # the interpreter is exiting, so no thread can be started
                    exporter.begin()
    exporter.put(span)


def connected() -> Callable[[Sequence[Span]], bool]:
    """Return a function that sends traces with the OpenTelemetry SDK.

    Raises:
        ImportError: It is not installed.
        ValueError: The environment asks for another protocol.
    """
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), HTTP)
    if protocol != HTTP:
        raise ValueError(f"{PROTOCOLS[1]}={protocol} is not supported; set {PROTOCOLS[1]}={HTTP}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'strata-runtime[otel]', or unset {ENDPOINTS[1]}") from None
    has_timeout = any(os.environ.get(name) for name in TIMEOUTS)
    exporter = OTLPSpanExporter(timeout=None if has_timeout else TIMEOUT_S)
    _keep_off_random_numbers()

    def send(traces: Sequence[Span]) -> bool:
        return exporter.export(_of_sdk(traces)) is SpanExportResult.SUCCESS

    return send


def _keep_off_random_numbers() -> None:
    """Give the exporter a random generator of its own.

    It draws a pause before every export. Random numbers of the training program, which checkpoints save and restore,
    must not depend on when a trace is sent.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("opentelemetry.exporter.otlp.") and getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[attr-defined]  # noqa: S311 - not a secret


def _of_sdk(traces: Sequence[Span]) -> Sequence[Any]:
    """Return the spans of the SDK. Its sampler, resource and limits come from the environment, as everywhere."""
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415

    class Ids(RandomIdGenerator):
        """Those of the SDK are drawn from the generator of the program; one that is seeded would repeat them."""

        def generate_span_id(self) -> int:
            return secrets.randbelow(2**64 - 1) + 1

        def generate_trace_id(self) -> int:
            return secrets.randbelow(2**128 - 1) + 1

    found = InMemorySpanExporter()
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False, id_generator=Ids())
    provider.add_span_processor(SimpleSpanProcessor(found))
    for each in traces:
        _add(each, provider.get_tracer("strata"), parent=None)
    return found.get_finished_spans()


def _resource() -> Any:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    own = {"strata.run": os.environ.get(RUN, "")}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        own["service.name"] = "strata"
    return Resource.create({name: value for name, value in own.items() if value})


def _add(span: Span, tracer: Any, parent: Any) -> None:
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace import Status, StatusCode, set_span_in_context  # noqa: PLC0415

    context = Context() if parent is None else set_span_in_context(parent, Context())
    found = tracer.start_span(span.name, context, attributes=dict(span.attributes), start_time=_ns(span.began_s))
    for child in span.children:
        _add(child, tracer, found)
    if span.error:
        found.set_status(Status(StatusCode.ERROR, span.error))
    found.end(_ns(max(span.ended_s, span.began_s)))


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)
