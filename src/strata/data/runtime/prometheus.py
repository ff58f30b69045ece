"""Loader metrics for Prometheus, for a process that already serves its own metrics.

One collector per registry exports all loaders, because a metric may appear only once in a scrape. Loaders are held
weakly: an unused one disappears from the next scrape. Labels are bounded: states are a fixed set, a worker is its
number, and the number of datasets has a limit.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from strata.data.runtime.metrics import State
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from strata.data.runtime.metrics import LoaderMetrics

    Get = Callable[[], LoaderMetrics]

log = logging.getLogger(__name__)

MAX_DATASETS = 100
"""Limit of one registry; each dataset has about ten series, and ten more per worker."""

_WORKER_COUNTERS = (
    ("rows", "strata_data_rows", "Rows decoded, after the filter."),
    ("batches", "strata_data_batches", "Batches assembled."),
    ("units", "strata_data_units", "Row groups decoded (stripes, Arrow batches, ranges of text)."),
    ("files", "strata_data_files", "Files opened."),
    ("errors", "strata_data_errors", "Row groups that could not be read."),
    ("bytes_read", "strata_data_read_bytes", "Bytes read from disk or network."),
    ("bytes_decoded", "strata_data_decoded_bytes", "Bytes of decoded columns."),
    ("cached_bytes", "strata_data_cached_bytes", "Bytes read that needed no request: cached on this machine."),
    ("shared_units", "strata_data_shared_units", "Row groups taken from the node cache."),
    ("shared_bytes", "strata_data_shared_bytes", "Bytes of these row groups."),
    ("unshared_units", "strata_data_unshared_units", "Row groups that the node cache could not share."),
)
_LOADER_COUNTERS = (
    ("rows", "strata_data_delivered_rows", "Rows delivered to the training loop, including padding."),
    ("batches", "strata_data_delivered_batches", "Batches delivered to the training loop."),
    ("padded_rows", "strata_data_padded_rows", "Rows repeated to fill the last batch."),
    ("dropped_rows", "strata_data_dropped_rows", "Rows left out at the end of an epoch."),
    ("skipped_rows", "strata_data_skipped_rows", "Rows left out because they could not be read."),
    ("skipped_units", "strata_data_skipped_units", "Row groups left out because they could not be read."),
    ("missing_parts", "strata_data_missing_parts", "Parts that delivered samples lack."),
)
_GAUGES = (
    ("buffered_bytes", "strata_data_buffered_bytes", "Bytes decoded and not yet delivered."),
    ("peak_buffered_bytes", "strata_data_peak_buffered_bytes", "Maximum of buffered bytes."),
    ("plan_s", "strata_data_plan_seconds", "Time that planning took."),
    ("plan_skipped_files", "strata_data_plan_skipped_files", "Files left out of the plan: unreadable."),
    (
        "plan_skipped_units",
        "strata_data_plan_skipped_units",
        "Row groups left out of the plan: unreadable.",
    ),
    ("plan_incomplete_rows", "strata_data_plan_incomplete_rows", "Samples left out of the plan: they lack a part."),
    ("first_batch_s", "strata_data_first_batch_seconds", "Time from the start of an epoch to its first batch."),
)


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """The export of one loader's metrics."""

    name: str
    _collector: _Loaders
    _find: Callable[[], Get | None]

    def unregister(self) -> None:
        """End the export; does nothing if another loader has taken the name."""
        self._collector.remove(self)

    def get(self) -> Get | None:
        """Return the function that gets the metrics, or None if the loader is gone."""
        return self._find()


def register(dataset_name: str, get_metrics: Get, registry: CollectorRegistry = REGISTRY) -> Registration:
    """Export the result of `get_metrics` at every scrape, as `dataset=dataset_name`, until its loader is gone.

    A bound method is held weakly and ends with its object; any other function is held until `unregister`. A loader
    with a name that is in use replaces the earlier one, so a loop that makes a loader per epoch has one line in a
    graph. Above the limit, a warning is logged and the loader is not exported.
    """
    with _lock:
        collector = _by_registry.get(registry)
        if collector is None:
            collector = _by_registry[registry] = _Loaders()
            registry.register(collector)
    owned = getattr(get_metrics, "__self__", None) is not None and hasattr(get_metrics, "__func__")
    registration = Registration(
        dataset_name, collector, weakref.WeakMethod(get_metrics) if owned else lambda: get_metrics
    )
    collector.add(registration)
    return registration


class _Loaders(Collector):
    def __init__(self) -> None:
        self._lock = renewed(threading.RLock())  # re-entrant: garbage collection may unregister a loader
        self._by_name: dict[str, Registration] = {}

    def add(self, registration: Registration) -> None:
        name = registration.name
        with self._lock:
            self._by_name = {one.name: one for one in self._by_name.values() if one.get() is not None}
            if name in self._by_name:
                log.info("another loader now exports the metrics of dataset %r", name)
            elif len(self._by_name) >= MAX_DATASETS:
                log.warning(
                    "%d datasets export metrics, which is the limit, so %r does not; unregister others, or give "
                    "consecutive loaders the same name",
                    MAX_DATASETS,
                    name,
                )
                return  # not worth stopping a training run
            self._by_name[name] = registration

    def remove(self, registration: Registration) -> None:
        with self._lock:
            if self._by_name.get(registration.name) is registration:
                del self._by_name[registration.name]

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise the registry would collect at registration

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = [(name, one.get()) for name, one in sorted(self._by_name.items())]
        # Called without the lock: a loader may be closed and unregister itself meanwhile.
        loaders = {name: get() for name, get in found if get is not None}
        if loaders:
            yield from _of_workers(loaders)
            yield from _of_loaders(loaders)


def _of_workers(loaders: Mapping[str, LoaderMetrics]) -> Iterator[Metric]:
    for field, name, words in _WORKER_COUNTERS:
        family = CounterMetricFamily(name, words, labels=("dataset", "worker"))
        for dataset, metrics in loaders.items():
            for worker in metrics.workers:
                family.add_metric((dataset, str(worker.worker)), getattr(worker, field))
        yield family
    seconds = CounterMetricFamily(
        "strata_data_worker_seconds", "Time of workers by state.", labels=("dataset", "worker", "state")
    )
    for dataset, metrics in loaders.items():
        for worker in metrics.workers:
            for state in (state.name.lower() for state in State if state is not State.OFF):
                seconds.add_metric((dataset, str(worker.worker), state), getattr(worker, f"{state}_s"))
    yield seconds


def _of_loaders(loaders: Mapping[str, LoaderMetrics]) -> Iterator[Metric]:
    for field, name, words in _LOADER_COUNTERS:
        counter = CounterMetricFamily(name, words, labels=("dataset",))
        for dataset, metrics in loaders.items():
            counter.add_metric((dataset,), getattr(metrics, field))
        yield counter
    seconds = CounterMetricFamily(
        "strata_data_consumer_seconds",
        "Time of the training loop: waiting for data, or busy.",
        labels=("dataset", "state"),
    )
    for dataset, metrics in loaders.items():
        seconds.add_metric((dataset, "waiting"), metrics.consumer_wait_s)
        seconds.add_metric((dataset, "busy"), metrics.consumer_busy_s)
    yield seconds
    for field, name, words in _GAUGES:
        gauge = GaugeMetricFamily(name, words, labels=("dataset",))
        for dataset, metrics in loaders.items():
            value = getattr(metrics, field)
            if value is not None:  # not measured yet
                gauge.add_metric((dataset,), value)
        yield gauge


_lock = renewed(threading.Lock())
_by_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Loaders] = weakref.WeakKeyDictionary()
