"""TensorBoard, which shows event files: its default page. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
page = importlib.import_module("dashboard_page")
runs = importlib.import_module("dashboard_runs")

FIELD = "input[placeholder^='Filter runs']"


def write_runs(directory: str) -> None:
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    protos = importlib.import_module("tensorboard.compat.proto")
    event, summary = (importlib.import_module(f"{protos.__name__}.{name}_pb2") for name in ("event", "summary"))
    begun_s = time.time() - runs.NUM_POINTS * runs.EVERY_S
    for run, name in enumerate(runs.RUNS):
        file = writer.EventFileWriter(f"{directory}/{name}")
        for step in range(runs.NUM_POINTS):
            values = [
                summary.Summary.Value(tag=metric, simple_value=runs.value(metric, run, step)) for metric in runs.METRICS
            ]
            at_s = begun_s + step * runs.EVERY_S
            file.add_event(event.Event(wall_time=at_s, step=step, summary=summary.Summary(value=values)))
        file.close()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        write_runs(directory)
        port = page.free_port()
        url = f"http://{page.HOST}:{port}"
        command = [str(Path(sys.executable).with_name("tensorboard")), "--logdir", directory, "--port", str(port)]
        with page.serving([*command, "--host", page.HOST], url=f"{url}/data/runs", has=runs.RUNS[-1]):
            measured = page.measure(url, names=runs.NAMES, field=FIELD)
    page.report("tensorboard_", measured, {"tensorboard": metadata.version("tensorboard")})


if __name__ == "__main__":
    absent = page.missing("tensorboard")
    if absent is None:
        main()
    else:
        print(json.dumps({"not_installed": absent}))
