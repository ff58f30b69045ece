"""MLflow: metrics of a run in the tracking store that MLflow itself is configured for."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError
from strata.train.loggers.background import BackgroundLogger, Written, begins_anew

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.train.loggers.background import Report

TAG = "strata.run"
"""The tag of an MLflow run by which a restarted process finds it."""
EXPERIMENT = "Default"
MAX_METRICS = 1_000
"""Of one call, a limit of MLflow."""


class MLflowLogger(BackgroundLogger):
    """Writes to the store of `MLFLOW_TRACKING_URI`, in the experiment of `MLFLOW_EXPERIMENT_NAME`."""

    def __init__(self, *, run: str, key: str, attempt: int) -> None:
        """`run`: name of the run in MLflow. `key`: the same in all processes of the run, and in no other."""
        try:
            mlflow = importlib.import_module("mlflow")
        except ImportError as error:
            raise ConfigError(
                f"loggers=['mlflow'] needs a package that cannot be imported ({error}); "
                "pip install 'strata-runtime[mlflow]'",
                field="loggers",
            ) from None
        super().__init__(_MLflowSink(mlflow, run=run, key=key, attempt=attempt))


class _MLflowSink:
    def __init__(self, mlflow: Any, *, run: str, key: str, attempt: int) -> None:
        self._mlflow = mlflow
        self._run = run
        self._key = key
        self._attempt = attempt
        self._client: Any = None
        self._id = ""
        self._written = Written()
        self._last_steps: dict[str, int] = {}
        """Last step of each metric that earlier processes of the run have written: a kill may leave half a step."""

    def open(self, step: int) -> None:
        self._client = self._mlflow.MlflowClient()
        experiment = self._experiment()
        given = os.environ.get("MLFLOW_RUN_ID", "")
        found = self._client.get_run(given) if given else self._newest(experiment)
        first_step = None if found is None else self._read_steps(found)
        if found is None or (not given and begins_anew(step, first_step=first_step, attempt=self._attempt)):
            self._last_steps = {}
            found = self._client.create_run(experiment, run_name=self._run or None, tags={TAG: self._key})
        else:
            self._client.update_run(found.info.run_id, status="RUNNING")
        self._id = found.info.run_id

    def _experiment(self) -> str:
        given = os.environ.get("MLFLOW_EXPERIMENT_ID", "")
        if given:
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "") or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _newest(self, experiment: str) -> Any:
        found = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{TAG}` = '{self._key}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        return found[0] if found else None

    def _read_steps(self, found: Any) -> int | None:
        """Read which steps the run has; return the first one."""
        first: int | None = None
        for name in found.data.metrics:
            steps = [metric.step for metric in self._client.get_metric_history(found.info.run_id, name)]
            if steps:
                self._last_steps[name] = max(steps)
                first = min(steps) if first is None else min(first, *steps)
        return first

    def write(self, reports: Sequence[Report]) -> None:
        metric = self._mlflow.entities.Metric
        metrics = [
            metric(name, float(value), int(each.at_s * 1_000), each.step)
            for each in self._written.new(reports)
            for name, value in each.metrics.items()
            if each.step > self._last_steps.get(name, -1)
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MAX_METRICS])

    def close(self, *, is_failing: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if is_failing else "FINISHED")
