"""A fake of the part of MLflow's documented API that the logger uses: one JSON file, written by each call."""

from __future__ import annotations

import json
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path("mlflow.json")


def Metric(key: str, value: float, timestamp: int, step: int) -> tuple[Any, ...]:  # noqa: N802 - as in MLflow
    return (key, value, timestamp, step)


entities = types.ModuleType("mlflow.entities")
entities.Metric = Metric  # type: ignore[attr-defined]


class MlflowClient:
    def __init__(self) -> None:
        empty: dict[str, list[Any]] = {"experiments": ["Default"], "runs": []}
        self._data = json.loads(FILE.read_text()) if FILE.exists() else empty

    def get_experiment_by_name(self, name: str) -> Any:
        names = self._data["experiments"]
        return SimpleNamespace(experiment_id=str(names.index(name))) if name in names else None

    def create_experiment(self, name: str) -> str:
        self._data["experiments"].append(name)
        self._write()
        return str(len(self._data["experiments"]) - 1)

    def search_runs(
        self, experiment_ids: list[str], filter_string: str, max_results: int, order_by: list[str]
    ) -> list[Any]:
        assert order_by == ["attributes.start_time DESC"]
        found = [
            each
            for each in self._data["runs"]
            if each["experiment"] in experiment_ids and filter_string == f"tags.`strata.run` = '{each['key']}'"
        ]
        return [self._shown(each) for each in found[::-1][:max_results]]

    def create_run(self, experiment_id: str, run_name: str | None, tags: dict[str, str]) -> Any:
        run = {"id": str(len(self._data["runs"])), "experiment": experiment_id, "name": run_name, "points": []}
        self._data["runs"].append(run | {"key": tags["strata.run"], "status": "RUNNING"})
        self._write()
        return self._shown(self._data["runs"][-1])

    def update_run(self, run_id: str, status: str) -> None:
        self._data["runs"][int(run_id)]["status"] = status
        self._write()

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        points = self._data["runs"][int(run_id)]["points"]
        return [SimpleNamespace(step=step, value=value) for name, value, _, step in points if name == key]

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        assert len(metrics) <= 1_000
        self._data["runs"][int(run_id)]["points"] += metrics
        self._write()

    def set_terminated(self, run_id: str, status: str) -> None:
        self.update_run(run_id, status)

    def _shown(self, run: dict[str, Any]) -> Any:
        metrics = {name: value for name, value, _, _ in run["points"]}
        return SimpleNamespace(info=SimpleNamespace(run_id=run["id"]), data=SimpleNamespace(metrics=metrics))

    def _write(self) -> None:
        draft = FILE.with_suffix(".draft")
        draft.write_text(json.dumps(self._data))
        draft.replace(FILE)
