"""The numbers of loaders as Prometheus reads them, for a process that already serves metrics of its own.

One collector per registry speaks for all loaders, since a metric may appear only once in a scrape. Loaders are held
weakly: one that nobody uses any more is gone from the next scrape, and is not kept alive by it. Labels are bounded:
states and reasons are fixed sets, a worker is its number, and the number of datasets has a limit.
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
"""In one registry: every one is about ten series, and ten more per worker."""

_WORKER_COUNTERS = (
    ("rows", "strata_data_rows", "Rows decoded, after the filter."),
    ("batches", "strata_data_batches", "Batches assembled."),
    ("units", "strata_data_units", "Units decoded: row groups, stripes, ranges of text."),
    ("files", "strata_data_files", "Files opened."),
    ("errors", "strata_data_errors", "Units that could not be read."),
    ("bytes_read", "strata_data_read_bytes", "Bytes asked of the disk or the network."),
    ("bytes_decoded", "strata_data_decoded_bytes", "Bytes of decoded columns."),
)
_LOADER_COUNTERS = (
    ("rows", "strata_data_delivered_rows", "Rows handed to the training loop, padding included."),
    ("batches", "strata_data_delivered_batches", "Batches handed to the training loop."),
    ("padded_rows", "strata_data_padded_rows", "Rows repeated to fill the last batch."),
    ("dropped_rows", "strata_data_dropped_rows", "Rows left out at the end of an epoch."),
    ("skipped_rows", "strata_data_skipped_rows", "Rows left out because they could not be read."),
    ("skipped_units", "strata_data_skipped_units", "Units left out because they could not be read."),
)
_GAUGES = (
    ("buffered_bytes", "strata_data_buffered_bytes", "Decoded and not yet handed over."),
    ("peak_buffered_bytes", "strata_data_peak_buffered_bytes", "The most that was ever buffered."),
    ("plan_s", "strata_data_plan_seconds", "What planning took."),
    ("plan_skipped_files", "strata_data_plan_skipped_files", "Files left out of the plan: they could not be read."),
    ("plan_skipped_units", "strata_data_plan_skipped_units", "Units left out of the plan: they could not be read."),
    ("first_batch_s", "strata_data_first_batch_seconds", "From an epoch's beginning to its first batch."),
)


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """That a loader's numbers are exported."""

    name: str
    _collector: _Loaders
    _find: Callable[[], Get | None]

    def unregister(self) -> None:
        """Does nothing if another loader has taken the name, or this was called before."""
        self._collector.remove(self)

    def get(self) -> Get | None:
        """None: the loader is gone."""
        return self._find()


def register(dataset_name: str, get_metrics: Get, registry: CollectorRegistry = REGISTRY) -> Registration:
    """Exports what `get_metrics` gives at every scrape, as `dataset=dataset_name`, until its loader is gone.

    A bound method is held weakly, and ends with the object that it belongs to; anything else is held until
    `unregister`. A loader that takes a name which is taken replaces the one before: a loop that makes a loader per
    epoch has one line in a graph. When there are too many, a warning says that this one is not exported.
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
        self._lock = renewed(threading.RLock())  # what is collected as garbage while it is held may unregister itself
        self._by_name: dict[str, Registration] = {}

    def add(self, registration: Registration) -> None:
        name = registration.name
        with self._lock:
            self._by_name = {one.name: one for one in self._by_name.values() if one.get() is not None}
            if name in self._by_name:
                log.info("the metrics of dataset %r are now those of another loader", name)
            elif len(self._by_name) >= MAX_DATASETS:
                log.warning(
                    "%d datasets export metrics, so %r does not; unregister others, or give loaders that follow one "
                    "another the same name",
                    MAX_DATASETS,
                    name,
                )
                return  # no reason to stop a training
            self._by_name[name] = registration

    def remove(self, registration: Registration) -> None:
        with self._lock:
            if self._by_name.get(registration.name) is registration:
                del self._by_name[registration.name]

    def describe(self) -> Iterable[Metric]:
        return ()  # else the registry would collect once at registration

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = [(name, one.get()) for name, one in sorted(self._by_name.items())]
        # Asked outside of the lock: a loader may be taken down, and unregister itself, meanwhile.
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
        "strata_data_worker_seconds", "What workers spent their time on.", labels=("dataset", "worker", "state")
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
        "Whether the training loop waited for data, or was busy.",
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
            if value is not None:  # what was not measured is absent
                gauge.add_metric((dataset,), value)
        yield gauge


_lock = renewed(threading.Lock())
_by_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Loaders] = weakref.WeakKeyDictionary()
