"""The documented metrics and the Grafana dashboard, against what a coordinator with workers serves."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from documents import ROOT
from prometheus_client.parser import text_string_to_metric_families
from servers import DEADLINE_S, EAGER_CLIENT

from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.embedded import EmbeddedCoordinator

DOCUMENT = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "grafana" / "strata.json"
ROW = re.compile(r"^\| `(strata_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
NAME = re.compile(r"\b(strata_\w+)(?:\{([^}]*)\})?")
LABELS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"instance"}
"""The label that Prometheus adds to everything that it scrapes."""
OF_HISTOGRAMS = {"le"}


@dataclass(frozen=True)
class Documented:
    type: str
    labels: frozenset[str]


@pytest.fixture(scope="module")
def documented() -> dict[str, Documented]:
    section = DOCUMENT.read_text(encoding="utf-8").split("## Coordinator metrics")[1].split("\n## ")[0]
    found = ROW.findall(section)
    assert len({name for name, _, _ in found}) == len(found), "a metric is listed twice"
    return {name: Documented(kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in found}


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Any]]:
    """The metrics of a coordinator with three workers, a parameter server, a barrier and a checkpoint."""
    with (
        EmbeddedCoordinator(CoordinatorConfig(state="memory"), http="127.0.0.1:0") as coordinator,
        CoordinatorClient(coordinator.address, config=EAGER_CLIENT) as client,
    ):
        workers = [client.register_worker(f"w{number}", job_id="resnet") for number in range(4)]
        for worker in workers:
            worker.refresh()
        server = {"strata/server": 0.0, "strata/server_rows": 10.0, "strata/server_bytes": 80.0}
        for number, worker in enumerate(workers):
            worker.report(state="TRAINING", step=5 + number, rows_per_s=10.0, **(server if number == 3 else {}))
            worker.heartbeat()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda worker: worker.barrier("sync", step=1), workers))
        for worker in workers:
            worker.notify_checkpoint("c1", step=4, epoch=0, path="/c1")
        workers[3].deregister("done")
        with urllib.request.urlopen(f"{coordinator.http_address}/metrics", timeout=DEADLINE_S) as response:
            text = response.read().decode()
        yield {family.name: family for family in text_string_to_metric_families(text)}


def expressions() -> list[str]:
    """Return the expressions of all panels, and the queries of the variables."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    of_panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    of_variables = [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert len(of_panels) > 20
    return of_panels + of_variables


def test_the_page_lists_exactly_the_metrics_that_a_coordinator_serves(
    documented: dict[str, Documented], served: dict[str, Any]
) -> None:
    assert {name: family.type for name, family in served.items()} == {n: each.type for n, each in documented.items()}


def test_the_page_lists_the_labels_of_every_metric_that_was_measured(
    documented: dict[str, Documented], served: dict[str, Any]
) -> None:
    measured = {
        name: frozenset(label for sample in family.samples for label in sample.labels) - OF_HISTOGRAMS
        for name, family in served.items()
        if family.samples
    }

    assert len(measured) > 30
    assert measured == {name: documented[name].labels for name in measured}


def test_the_progress_of_a_job_is_exported_without_its_servers(served: dict[str, Any]) -> None:
    values = {name: [(s.labels, s.value) for s in family.samples] for name, family in served.items()}
    resnet = {"job": "resnet"}

    assert values["strata_step"] == [(resnet, 5.0)]
    assert values["strata_rows_per_s"] == [(resnet, 30.0)]
    assert values["strata_workers_suspect"] == [(resnet, 0.0)]
    assert values["strata_checkpoint_step"] == [(resnet, 4.0)]
    (time_s,) = values["strata_checkpoint_time_seconds"]
    assert time_s[1] > 1_700_000_000


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_of_the_dashboard_is_one_that_a_coordinator_serves(
    expression: str, served: dict[str, Any], documented: dict[str, Documented]
) -> None:
    names = {f"{name}{suffix}": name for name, family in served.items() for suffix in SUFFIXES[family.type]}
    used = NAME.findall(expression)

    assert used
    for name, matchers in used:
        assert name in names
        labels = documented[names[name]].labels | OF_PROMETHEUS | OF_HISTOGRAMS
        assert set(LABELS.findall(matchers)) <= labels
        grouped = re.findall(r"\bby \(([^)]*)\)", expression)
        assert {label.strip() for group in grouped for label in group.split(",")} <= labels


def test_the_panels_have_titles_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert all(panel["title"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
