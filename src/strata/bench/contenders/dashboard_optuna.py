"""optuna-dashboard: its list of studies, one per run. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
page = importlib.import_module("dashboard_page")
runs = importlib.import_module("dashboard_runs")

FIELD = "input[type='search'], input[placeholder*='earch'], input[type='text']"


def write_runs(storage: str) -> None:
    """Store a study per run, with a trial per metric, whose intermediate values are the points."""
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for run, name in enumerate(runs.RUNS):
        study = optuna.create_study(storage=storage, study_name=name)
        for metric in runs.METRICS:
            values = {step: runs.value(metric, run, step) for step in range(runs.NUM_POINTS)}
            study.add_trial(
                optuna.trial.create_trial(
                    value=values[runs.NUM_POINTS - 1], intermediate_values=values, user_attrs={"metric": metric}
                )
            )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        storage = f"sqlite:///{directory}/studies.db"
        write_runs(storage)
        port = page.free_port()
        url = f"http://{page.HOST}:{port}/dashboard/"
        command = [str(Path(sys.executable).with_name("optuna-dashboard")), storage, "--port", str(port)]
        home = {**os.environ, "HOME": directory}  # gunicorn writes there
        with page.serving([*command, "--host", page.HOST], url=url, env=home):
            measured = page.measure(url, names=runs.NAMES, field=FIELD)
    page.report("optuna_", measured, {"optuna-dashboard": metadata.version("optuna-dashboard")})


if __name__ == "__main__":
    absent = page.missing("optuna_dashboard")
    if absent is None:
        main()
    else:
        print(json.dumps({"not_installed": absent}))
