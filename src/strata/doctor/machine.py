"""Checks of processors, memory, ports and devices."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strata.doctor.check import Check, Status
from strata.doctor.disks import BLOCK_BYTES, nearest_existing

if TYPE_CHECKING:
    from collections.abc import Callable

FEW_OPEN_FILES = 4_096
"""A coordinator needs one file descriptor per connected node."""
SMALL_SHARED_MEMORY_BYTES = 1 << 30
"""Loaders pass decoded data through shared memory; containers have 64 MiB by default. Saves do not use it."""


def processors(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> Check:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{usable} of {present} available"
    quota = _cgroup_quota(quota_file)
    if quota is not None and quota < usable:
        return Check(
            name="processors",
            status=Status.WARNING,
            detail=f"{detail}, but the container is limited to {quota:.1f}",
            cure="raise the container's CPU limit or start fewer workers",
        )
    return Check(name="processors", status=Status.OK, detail=detail)


def _cgroup_quota(file: Path) -> float | None:
    """Return the processor limit of the control group; None if there is none."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or `max`
        return None


def open_files(limits: tuple[int, int] | None = None) -> Check:
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    detail = "no limit" if unlimited else f"{soft:,} (may be raised to {hard:,})"
    if unlimited or soft >= FEW_OPEN_FILES:
        return Check(name="open files", status=Status.OK, detail=detail)
    cure = f"before you start a coordinator for many nodes, run: ulimit -n {min(65_536, hard)}"
    return Check(name="open files", status=Status.WARNING, detail=detail, cure=cure)


def shared_memory(path: Path) -> Check:
    try:
        found = os.statvfs(path)
    except OSError as error:
        cure = f"mount a tmpfs at {path}"
        return Check(name="shared memory", status=Status.MISSING, detail=f"{path}: {error.strerror}", cure=cure)
    total_bytes, free_bytes = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    detail = f"{_gib(free_bytes)} of {_gib(total_bytes)} free in {path}"
    if free_bytes < SMALL_SHARED_MEMORY_BYTES:
        cure = f"provide at least {_gib(SMALL_SHARED_MEMORY_BYTES)} (in a container: --shm-size=8g)"
        return Check(name="shared memory", status=Status.WARNING, detail=detail, cure=cure)
    return Check(name="shared memory", status=Status.OK, detail=detail)


def writable_state(directory: Path) -> Check:
    """Check that the coordinator can write its state to a directory or create it."""
    name = "state directory"
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(directory)):
            pass
    except OSError as error:
        return Check(
            name=name,
            status=Status.MISSING,
            detail=f"{directory} is not writable: {error.strerror}",
            cure="keep the state elsewhere: strata coordinator --state PATH",
            essential=True,
        )
    return Check(name=name, status=Status.OK, detail=f"{directory} is writable", essential=True)


def staging_memory(create: Callable[[], int], fallback: Path) -> Check:
    """Check for anonymous memory that two processes share and that is freed with them."""
    name = "staging memory"
    try:
        _try_memory(create())
    except OSError as error:
        return Check(
            name=name,
            status=Status.WARNING,
            detail=f"{error.strerror}; saves are staged in files in {fallback} instead ({_free(fallback)})",
            cure=f"keep enough space free in {fallback} for the state of one rank",
        )
    return Check(name=name, status=Status.OK, detail="memfd; does not use /dev/shm")


def create_anonymous_memory() -> int:
    """Return a file descriptor of anonymous memory.

    Raises:
        OSError: The system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd")
    return os.memfd_create("strata-doctor", os.MFD_CLOEXEC)


def _try_memory(fd: int) -> None:
    try:
        os.ftruncate(fd, BLOCK_BYTES)
        with mmap.mmap(fd, BLOCK_BYTES) as memory:
            memory[:1] = b"x"
    finally:
        os.close(fd)


def _free(directory: Path) -> str:
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return f"unusable: {error.strerror}"
    return f"{_gib(found.f_bavail * found.f_frsize)} free"


def huge_pages(directory: Path) -> Check:
    """Report the mode of 2 MiB pages. They make copying a state faster; nothing depends on them."""
    found = {}
    for kind, file in (("private", "enabled"), ("shared", "shmem_enabled")):
        with contextlib.suppress(OSError, IndexError):
            found[kind] = (directory / file).read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    if not any(found.values()):
        return Check(name="huge pages", status=Status.MISSING, detail="none; staging uses 4 KiB pages")
    detail = ", ".join(f"{kind} memory: {mode}" for kind, mode in found.items() if mode)
    return Check(name="huge pages", status=Status.OK, detail=detail)


def port(number: int, *, flag: str) -> Check:
    name = f"port {number}"
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            detail = "in use, perhaps by a running coordinator" if taken else f"cannot be opened: {error.strerror}"
            cure = f"to use another port: strata coordinator {flag} 127.0.0.1:0"
            return Check(name=name, status=Status.WARNING, detail=detail, cure=cure)
    return Check(name=name, status=Status.OK, detail="free")


def rdma(devices: Path) -> Check:
    found = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not found:
        return Check(name="RDMA", status=Status.MISSING, detail="no device; data is sent over TCP")
    return Check(name="RDMA", status=Status.OK, detail=", ".join(found))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
