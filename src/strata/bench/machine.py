"""The machine and the package versions of a report. No host names and no paths, so that a report can be published."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

from strata import __version__

PACKAGES = ("grpcio", "numpy", "obstore", "optuna", "protobuf", "pyarrow", "ray", "sqlalchemy", "torch", "xxhash")
"""Packages whose version may explain a figure; only installed ones are reported."""


def describe_machine() -> dict[str, str | int | float]:
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": psutil.cpu_count(logical=False) or 0,
        "threads": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "kernel": platform.release(),
        "filesystem": filesystem(Path.cwd()),
    }


def describe_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "strata": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_model(cpuinfo: Path) -> str:
    """Return the name of the processor; the architecture if the kernel does not know the name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def filesystem(path: Path) -> str:
    """Return the type of the file system that holds a directory."""
    holding = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(holding, key=lambda part: len(part.mountpoint)).fstype if holding else "unknown"
