"""The Trainer with two workers on a running Ray cluster."""

from __future__ import annotations

import json
import os
from importlib import util

from strata.bench.contenders.trainer_job import NUM_RANKS
from strata.bench.contenders.trainer_workers import fit

OBJECT_STORE_BYTES = 80 << 20


def start_cluster() -> None:
    """Start a cluster on this machine; it is not part of the measurement."""
    import ray  # noqa: PLC0415

    ray.init(
        "local",
        num_cpus=NUM_RANKS + 1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
    )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def main() -> None:
    start_cluster()
    _, start_s, per_s = fit("ray")
    print(json.dumps({"figures": {"ray_start_s": start_s, "ray_samples_per_s": per_s}}))


if __name__ == "__main__":
    if util.find_spec("ray") is None:
        print(json.dumps({"not_installed": "ray"}))
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        main()
