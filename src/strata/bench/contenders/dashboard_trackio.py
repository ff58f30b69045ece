"""trackio: the page of a project. Runs in the peers' environment without Strata."""

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

PROJECT = "dashboards"
FIELD = "input[type='search'], input[placeholder*='ilter'], input[placeholder*='earch'], input[type='text']"
SHOW = """
import sys, trackio
trackio.show(project=sys.argv[1], host=sys.argv[2], server_port=int(sys.argv[3]), open_browser=False, block_thread=True)
"""


def write_runs() -> None:
    trackio = importlib.import_module("trackio.sqlite_storage")
    for run, name in enumerate(runs.RUNS):
        points = [{metric: runs.value(metric, run, step) for metric in runs.METRICS} for step in range(runs.NUM_POINTS)]
        trackio.SQLiteStorage.bulk_log(PROJECT, name, points, list(range(runs.NUM_POINTS)))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        os.environ |= {"TRACKIO_DIR": directory, "HF_HUB_OFFLINE": "1", "HF_HOME": directory}
        write_runs()
        port = page.free_port()
        url = f"http://{page.HOST}:{port}/"
        with page.serving([sys.executable, "-c", SHOW, PROJECT, page.HOST, str(port)], url=url):
            measured = page.measure(f"{url}?project={PROJECT}", names=runs.NAMES, field=FIELD)
    page.report("trackio_", measured, {"trackio": metadata.version("trackio")})


if __name__ == "__main__":
    absent = page.missing("trackio")
    if absent is None:
        main()
    else:
        print(json.dumps({"not_installed": absent}))
