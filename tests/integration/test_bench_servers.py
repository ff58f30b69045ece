"""The benchmark of parameter servers at a small size: every contender trains and reports its figures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from strata.bench.contenders import servers_ddp_dense, servers_job
from strata.bench.contenders.servers_proxy import HOST, delayed
from strata.bench.servers import BENCHMARK

DEADLINE_S = 280
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)
PROMISED = {
    *("vs_ddp_sparse_400", "vs_ddp_sparse_64", "vs_torchrec_400", "vs_torchrec_64", "vs_ddp_dense"),
    *("gather_over_c", "adagrad_over_c", "delay_kept_fraction", "incremental_bytes_fraction"),
    "memory_over_rows_and_state",
}
"""Names that others read from `--json`."""
SIZE = ["--set", "rows=20000", "--set", "samples=128", "--set", "steps=2"]


def bench(*only: str) -> Any:
    """Return the figures of these contenders."""
    chosen = [word for name in only for word in ("--only", name)]
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", "servers", "--quick", "--json", *SIZE, *chosen],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])["figures"]


def measured(system: str, *units: int) -> set[str]:
    return {
        f"{system}_{each}{suffix}_{figure}"
        for each in units
        for suffix in servers_job.ALLOCATORS
        for figure in ("cpu_us", "samples_per_s")
    }


def test_the_benchmark_has_the_figures_that_others_read() -> None:
    assert {figure.key for figure in BENCHMARK.figures} >= PROMISED


@pytest.mark.slow
def test_the_memory_and_the_changed_rows_of_a_table_are_measured() -> None:
    found = bench("memory")

    assert found.keys() == {
        "memory_over_rows_and_state",
        "counted_over_rows_and_state",
        "incremental_bytes_fraction",
    }
    assert 1.0 < found["counted_over_rows_and_state"] < 1.5
    assert 0.0 < found["incremental_bytes_fraction"] < 1.0


def test_the_kernels_compute_what_c_computes() -> None:
    found = bench("kernels")

    assert {"gather_over_c", "adagrad_over_c", "push_over_c"} < found.keys()
    assert all(value > 0 for value in found.values())


@pytest.mark.slow
def test_training_on_servers_is_compared_with_ddp_under_both_settings_of_malloc() -> None:
    found = bench("strata, Adagrad", "DDP, sparse gradients")

    assert found.keys() > measured("strata_adagrad", 400, 64) | measured("ddp_sparse", 400, 64)
    assert found["vs_ddp_sparse_64_plain"] == pytest.approx(
        found["ddp_sparse_64_plain_cpu_us"] / found["strata_adagrad_64_plain_cpu_us"]
    )
    assert all(value > 0 for value in found.values())


@pytest.mark.slow
def test_dense_gradients_are_measured_with_the_rows_that_fit() -> None:
    found = bench("DDP, dense gradients")

    assert found.keys() == measured("ddp_dense", 400) | {"ddp_dense_rows"}
    assert found["ddp_dense_rows"] == 20_000


@pytest.mark.parametrize(("available_gb", "rows"), [(200, 10_000_000), (16, 5_000_000), (1, 625_000)])
def test_a_smaller_table_has_dense_gradients_if_memory_is_short(available_gb: int, rows: int) -> None:
    size = servers_job.Size(rows=10_000_000, samples=4_096, steps=3)

    assert servers_ddp_dense.rows_that_fit(size, available_gb * 1e9) == rows


@pytest.mark.slow
def test_a_delay_is_injected_and_compared() -> None:
    found = bench("delay")

    assert found["delay_kept_without_prefetch_fraction"] > 0
    assert found["delay_kept_fraction"] > 0


def test_ids_have_the_distribution_of_the_benchmark_on_every_system() -> None:
    size = servers_job.Size(rows=1_000, samples=500, steps=1)
    once, again = (servers_job.batches(size, 2, seed=3) for _ in range(2))

    assert all((a.ids == b.ids).all() for a, b in zip(once, again, strict=True))
    ids = once[0].ids.flatten().tolist()
    assert 0 <= min(ids) <= max(ids) < size.rows
    assert ids.count(0) > 5 * ids.count(servers_job.SPREAD * 49 % size.rows)  # the first and the fiftieth


def test_the_proxy_delays_both_directions() -> None:
    with socket.create_server((HOST, 0)) as listening:

        def echo() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.sendall(accepted.recv(16))

        threading.Thread(target=echo, daemon=True).start()
        with delayed(f"{HOST}:{listening.getsockname()[1]}", 0.05) as address:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as client:
                began_s = time.monotonic()
                client.sendall(b"there and back")
                assert client.recv(16) == b"there and back"
                assert 0.1 <= time.monotonic() - began_s < 20


def test_a_table_that_does_not_fit_is_refused_before_it_is_created() -> None:
    servers_job.require_memory(0)
    with pytest.raises(MemoryError, match="--set rows=1000000"):
        servers_job.require_memory(1e18)


def test_the_cpu_time_of_another_process_is_read() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            before = servers_job.cpu_s([busy.pid, os.getpid()])
            deadline_s = time.monotonic() + 60
            while servers_job.cpu_s([busy.pid, os.getpid()]) < before + 0.05:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        finally:
            busy.kill()
