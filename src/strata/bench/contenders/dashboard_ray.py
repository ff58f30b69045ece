"""Ray's dashboard: its list of jobs, without metrics. Runs in the peers' environment without Strata."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
page = importlib.import_module("dashboard_page")
runs = importlib.import_module("dashboard_runs")

FIELD = "label:has-text('Submission ID') + div input"
AUTH_VARIABLE = "RAY_AUTH_TOKEN"
NUM_CPUS = 2
OBJECT_STORE_BYTES = 80 << 20
COOKIE = "ray-authentication-token"
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


def write_runs(url: str) -> None:
    """Submit a job per run, one after the other, and wait until it is over."""
    jobs = importlib.import_module("ray.job_submission")
    client = jobs.JobSubmissionClient(url)
    for name in runs.RUNS:
        client.submit_job(entrypoint="true", submission_id=name)
        page.wait_until(lambda name=name: client.get_job_status(name) in OVER, f"job {name} is over")


def main() -> None:
    ray = importlib.import_module("ray")
    port = page.free_port()
    url = f"http://{page.HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as directory:
        ray.init(
            "local",
            num_cpus=NUM_CPUS,
            include_dashboard=True,
            dashboard_host=page.HOST,
            dashboard_port=port,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            _node_ip_address=page.HOST,
            _temp_dir=directory,
        )
        try:
            page.wait_until(lambda: page.answers(url, ""), "Ray's dashboard answers")
            write_runs(url)
            cookies = {COOKIE: os.environ[AUTH_VARIABLE]}  # as after a login
            measured = page.measure(f"{url}/#/jobs", names=runs.NAMES, field=FIELD, cookies=cookies)
        finally:
            ray.shutdown()
    page.report("ray_", measured, {"ray": metadata.version("ray")})


if __name__ == "__main__":
    absent = page.missing("ray")
    if absent is None:
        # A token of this cluster's own, so that no other program can submit jobs to it.
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", AUTH_VARIABLE: secrets.token_hex(32)}
        main()
    else:
        print(json.dumps({"not_installed": absent}))
