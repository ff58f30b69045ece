"""MLflow: the runs of an experiment. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
page = importlib.import_module("dashboard_page")
runs = importlib.import_module("dashboard_runs")

EXPERIMENT = "dashboards"
FIELD = "input[placeholder^='metrics.'], input[placeholder*='earch']"
AT_ONCE = 1_000
"""Values that MLflow accepts in one call."""


def write_runs(storage: str) -> str:
    """Store the runs and return the id of their experiment."""
    mlflow = importlib.import_module("mlflow")
    entities = importlib.import_module("mlflow.entities")
    client = mlflow.MlflowClient(tracking_uri=storage)
    experiment_id = str(client.create_experiment(EXPERIMENT))
    begun_ms = int((time.time() - runs.NUM_POINTS * runs.EVERY_S) * 1e3)
    for run, name in enumerate(runs.RUNS):
        run_id = client.create_run(experiment_id, run_name=name).info.run_id
        values = [
            entities.Metric(metric, runs.value(metric, run, step), begun_ms + step * runs.EVERY_S * 1_000, step)
            for metric in runs.METRICS
            for step in range(runs.NUM_POINTS)
        ]
        for start in range(0, len(values), AT_ONCE):
            client.log_batch(run_id, metrics=values[start : start + AT_ONCE])
        client.set_terminated(run_id)
    return experiment_id


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        storage = f"sqlite:///{directory}/mlflow.db"
        experiment_id = write_runs(storage)
        port = page.free_port()
        url = f"http://{page.HOST}:{port}"
        command = [str(Path(sys.executable).with_name("mlflow")), "server", "--backend-store-uri", storage]
        command += ["--artifacts-destination", directory, "--host", page.HOST, "--port", str(port)]
        with page.serving(command, url=url):
            measured = page.measure(f"{url}/#/experiments/{experiment_id}/runs", names=runs.NAMES, field=FIELD)
    page.report("mlflow_", measured, {"mlflow": metadata.version("mlflow")})


if __name__ == "__main__":
    absent = page.missing("mlflow")
    if absent is None:
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"}
        main()
    else:
        print(json.dumps({"not_installed": absent}))
