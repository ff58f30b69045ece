"""Checks of Python, the required packages and the extras."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import subprocess
import sys

from strata.doctor.check import Check, Status

DISTRIBUTION = "strata-runtime"
OLDEST_PYTHON = (3, 11, 0)
IMPORT_TIMEOUT_S = 60.0

EXTRAS: dict[str, tuple[tuple[str, str], ...]] = {
    "torch": (("torch", "torch"),),
    "postgres": (("psycopg", "psycopg"),),
    "cloud": (("obstore", "obstore"),),
    "data": (("fsspec", "fsspec"), ("pyarrow", "pyarrow")),
    "iceberg": (
        ("fsspec", "fsspec"),
        ("pyarrow", "pyarrow"),
        ("pyiceberg", "pyiceberg"),
        ("pyroaring", "pyroaring"),
    ),
    "delta": (("deltalake", "deltalake"), ("fsspec", "fsspec"), ("pyarrow", "pyarrow")),
    "lance": (("fsspec", "fsspec"), ("pyarrow", "pyarrow"), ("pylance", "lance")),
    "ray": (("ray", "ray"),),
    "functions": (("cloudpickle", "cloudpickle"),),
    "trainer": (
        ("cloudpickle", "cloudpickle"),
        ("fsspec", "fsspec"),
        ("pyarrow", "pyarrow"),
        ("torch", "torch"),
    ),
    "servers": (("numba", "numba"),),
    "torchrec": (
        ("fbgemm-gpu-cpu", "fbgemm_gpu"),
        ("pyre-extensions", "pyre_extensions"),
        ("tensordict", "tensordict"),
        ("tqdm", "tqdm"),
    ),
    "tune": (("cloudpickle", "cloudpickle"), ("cmaes", "cmaes"), ("optuna", "optuna"), ("scipy", "scipy")),
    "plots": (
        ("cloudpickle", "cloudpickle"),
        ("cmaes", "cmaes"),
        ("matplotlib", "matplotlib"),
        ("optuna", "optuna"),
        ("scipy", "scipy"),
    ),
    "mlflow": (("alembic", "alembic"), ("mlflow-skinny", "mlflow")),
    "wandb": (("wandb", "wandb"),),
    "otel": (
        ("opentelemetry-exporter-otlp-proto-http", "opentelemetry.exporter.otlp.proto.http"),
        ("opentelemetry-sdk", "opentelemetry.sdk"),
    ),
    "k8s": (("kopf", "kopf"), ("kubernetes", "kubernetes")),
    "rdma": (("nixl-cu12", "nixl"),),
}
"""The extras of pyproject.toml: the packages that each installs, and the modules to import."""


def python(version: tuple[int, int, int]) -> Check:
    found = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON[:2]))
        cure = f"use Python {oldest} or newer"
        return Check(name="Python", status=Status.MISSING, detail=found, cure=cure, essential=True)
    return Check(name="Python", status=Status.OK, detail=found, essential=True)


def dependencies(distribution: str = DISTRIBUTION) -> Check:
    """Check that every package that `pip install strata-runtime` installs is present."""
    name = "dependencies"
    try:
        required = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name=name,
            status=Status.MISSING,
            detail=f"{distribution} is not installed",
            cure=f"pip install {distribution}",
            essential=True,
        )
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in required if "extra ==" not in line]
    absent = [one for one in names if _version(one) is None]
    if absent:
        return Check(
            name=name,
            status=Status.MISSING,
            detail=f"{', '.join(absent)} not installed",
            cure=f"pip install --upgrade {distribution}",
            essential=True,
        )
    return Check(name=name, status=Status.OK, detail=f"all {len(names)} installed", essential=True)


def extra(name: str) -> Check:
    """Check that an extra is installed and can be imported.

    The import runs in another process, because a broken native library may crash it.
    """
    label, install = f"extra [{name}]", f"pip install '{DISTRIBUTION}[{name}]'"
    versions = {distribution: _version(distribution) for distribution, _ in EXTRAS[name]}
    absent = [distribution for distribution, version in versions.items() if version is None]
    if absent:
        return Check(name=label, status=Status.MISSING, detail=f"{', '.join(absent)} not installed", cure=install)
    detail = ", ".join(f"{distribution} {version}" for distribution, version in versions.items())
    for _, module in EXTRAS[name]:
        if problem := import_problem(module):
            detail = f"{detail}, but `import {module}` fails: {problem}"
            return Check(name=label, status=Status.WARNING, detail=detail, cure=f"{install} --force-reinstall")
    return Check(name=label, status=Status.OK, detail=detail)


@functools.cache  # several extras install torch or pyarrow
def import_problem(module: str, *, timeout_s: float = IMPORT_TIMEOUT_S) -> str:
    """Return why a module cannot be imported; empty if it can."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"timed out after {timeout_s:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
