"""Each check of `strata doctor` on a machine that passes and on one that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata import cli
from strata.doctor import Check, Status, disks, examine, is_healthy, machine, software
from strata.storage import files

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_missing_and_essential() -> None:
    check = software.python((3, 10, 12))

    assert (check.status, check.essential) == (Status.MISSING, True)
    assert "3.11" in check.cure


def test_this_python_is_ok() -> None:
    assert software.python(sys.version_info[:3]).status is Status.OK


def test_the_dependencies_of_the_installed_package_are_ok() -> None:
    assert software.dependencies().status is Status.OK


def test_a_missing_required_package_is_essential() -> None:
    check = software.dependencies("strata-that-nobody-installed")

    assert (check.status, check.essential) == (Status.MISSING, True)


def test_every_extra_of_the_project_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert software.EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev"}
    for name, parts in software.EXTRAS.items():
        declared = project["optional-dependencies"][name]
        assert len(parts) == len(declared)
        assert all(line.startswith(part) for (part, _), line in zip(parts, declared, strict=True))


def test_a_missing_extra_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(software.EXTRAS, "ray", (("ray-that-nobody-installed", "ray"),))
    check = software.extra("ray")

    assert (check.status, check.essential) == (Status.MISSING, False)
    assert check.cure == "pip install 'strata-runtime[ray]'"


def test_an_installed_extra_that_cannot_be_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(software.EXTRAS, "ray", (("pytest", "no_such_module_anywhere"),))
    check = software.extra("ray")

    assert check.status is Status.WARNING
    assert "No module named 'no_such_module_anywhere'" in check.detail


def test_an_import_that_crashes_or_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert software.import_problem("dies") == "exit code -6"
    assert software.import_problem("hangs", timeout_s=0.5).startswith("timed out after")
    assert software.import_problem("json") == ""


def test_a_cpu_limit_below_the_visible_processors_is_a_warning(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert machine.processors(quota).status is Status.WARNING
    assert "limited to 0.5" in machine.processors(quota).detail

    quota.write_text("max 100000\n")
    assert machine.processors(quota).status is Status.OK
    assert machine.processors(tmp_path / "absent").status is Status.OK


def test_a_low_limit_of_open_files_is_a_warning_with_a_settable_limit() -> None:
    assert machine.open_files((1_024, 20_000)).cure.endswith("ulimit -n 20000")
    assert machine.open_files((1_024, 1 << 20)).cure.endswith("ulimit -n 65536")
    assert machine.open_files((65_536, 65_536)).status is Status.OK
    assert machine.open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).detail == "no limit"


def test_missing_shared_memory_is_reported(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "absent").status is Status.MISSING


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SMALL_SHARED_MEMORY_BYTES", 1 << 60)

    assert machine.shared_memory(tmp_path).status is Status.WARNING


def test_a_state_directory_is_checked_by_its_nearest_existing_parent_and_not_created(tmp_path: Path) -> None:
    check = machine.writable_state(tmp_path / "a" / "b")

    assert check.status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_state_directory_is_essential() -> None:
    check = machine.writable_state(Path("/proc/strata"))

    assert (check.status, check.essential) == (Status.MISSING, True)
    assert "--state" in check.cure


# -- disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [disks.direct_io, disks.exclusive_create, disks.directory_fsync])
def test_disk_checks_try_the_operation_and_leave_nothing(check: Callable[[str, Path], Check], tmp_path: Path) -> None:
    found = check("the check", tmp_path / "a" / "b")

    assert found.name == "the check"
    assert found.status in (Status.OK, Status.WARNING)
    assert str(tmp_path) in found.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", [disks.direct_io, disks.exclusive_create, disks.directory_fsync])
def test_an_unwritable_directory_is_a_warning(check: Callable[[str, Path], Check]) -> None:
    found = check("the check", Path("/proc/strata"))

    assert found.status is Status.WARNING
    assert found.cure == "make the directory writable and free some disk space"


def test_a_file_system_without_o_direct_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT == os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    check = disks.direct_io("direct I/O", tmp_path)

    assert check.status is Status.WARNING
    assert "does not support O_DIRECT; saves use the page cache instead" in check.detail
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_opens_with_o_direct_but_cannot_write_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disks.direct_io("direct I/O", tmp_path).status is not Status.OK:
        pytest.skip("the file system of the tests has no O_DIRECT")
    real_write = os.pwrite

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if files.is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)

    assert "does not support writes with O_DIRECT" in disks.direct_io("direct I/O", tmp_path).detail


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


def test_without_hard_links_exclusive_renames_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disks.exclusive_create("names", tmp_path).detail == f"works by hard links in {tmp_path}"
    refuse_links(monkeypatch)
    check = disks.exclusive_create("names", tmp_path)

    assert check.status is Status.OK
    assert "works by exclusive renames (no hard links)" in check.detail


def test_without_links_and_exclusive_renames_commits_are_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(temporary: Path, path: Path) -> None:
        raise OSError(errno.EINVAL, "this file system can put nothing exclusively")

    refuse_links(monkeypatch)
    monkeypatch.setattr(files, "_rename_if_absent", refuse)
    check = disks.exclusive_create("names", tmp_path)

    assert (check.status, check.essential) == (Status.MISSING, False)
    assert "checkpoints cannot be committed there" in check.detail
    assert "object store" in check.cure


def test_a_file_system_that_overwrites_names_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "publish_if_absent", lambda temporary, path: temporary.replace(path))
    check = disks.exclusive_create("names", tmp_path)

    assert check.status is Status.MISSING
    assert "two writers may overwrite each other" in check.detail


def test_a_directory_that_cannot_be_flushed_is_a_warning(tmp_path: Path) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    check = disks.directory_fsync("names", tmp_path, sync=refuse)

    assert check.status is Status.WARNING
    assert "may lose the newest checkpoints, but not older ones" in check.detail


def test_a_disk_error_is_not_taken_for_missing_support(tmp_path: Path) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    assert "Input/output error" in disks.directory_fsync("names", tmp_path, sync=fail).detail


# -- memory --------------------------------------------------------------------------------------------------------


def test_without_memfd_the_fallback_directory_and_its_free_space_are_reported(tmp_path: Path) -> None:
    def refuse() -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    check = machine.staging_memory(refuse, tmp_path)

    assert check.status is Status.WARNING
    assert check.detail.startswith(f"Operation not permitted; saves are staged in files in {tmp_path} instead (")
    assert check.detail.endswith("GiB free)")
    assert "unusable" in machine.staging_memory(refuse, tmp_path / "absent").detail


def test_a_system_without_memfd_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)

    with pytest.raises(OSError, match="this system has no memfd"):
        machine.create_anonymous_memory()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has it")
def test_memfd_is_tried_and_closed() -> None:
    fds = []

    def create() -> int:
        fds.append(machine.create_anonymous_memory())
        return fds[0]

    assert machine.staging_memory(create, Path("/absent")).status is Status.OK
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


def test_huge_pages_are_reported_as_configured_in_the_kernel(tmp_path: Path) -> None:
    assert machine.huge_pages(tmp_path).status is Status.MISSING
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert machine.huge_pages(tmp_path).detail == "private memory: madvise"
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert machine.huge_pages(tmp_path).detail == "private memory: madvise, shared memory: never"


# -- ports and devices ---------------------------------------------------------------------------------------------


def test_a_port_in_use_is_a_warning() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        number = server.getsockname()[1]
        taken = machine.port(number, flag="--listen")

    assert (taken.status, taken.cure) == (
        Status.WARNING,
        "to use another port: strata coordinator --listen 127.0.0.1:0",
    )
    assert machine.port(number, flag="--listen").status is Status.OK


def test_rdma_devices_are_listed(tmp_path: Path) -> None:
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()

    assert machine.rdma(tmp_path).detail == "mlx5_0, mlx5_1"
    assert machine.rdma(tmp_path / "absent").status is Status.MISSING


def test_only_a_missing_essential_makes_a_machine_unhealthy() -> None:
    optional = Check(name="a", status=Status.MISSING, detail="")
    shaky = Check(name="b", status=Status.WARNING, detail="", essential=True)
    needed = Check(name="c", status=Status.MISSING, detail="", essential=True)

    assert is_healthy([optional, shaky])
    assert not is_healthy([optional, shaky, needed])


def test_doctor_prints_only_missing_parts_that_are_not_essential_as_optional(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        Check(name="a", status=Status.MISSING, detail="no device"),
        Check(name="b", status=Status.WARNING, detail="slow"),
        Check(name="c", status=Status.OK, detail="fast"),
        Check(name="d", status=Status.MISSING, detail="too old", essential=True),
    ]
    monkeypatch.setattr("strata.cli.doctor.examine", lambda path: checks)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert (ended.value.code, lines[1:]) == (1, ["– a optional: no device", "! b slow", "✓ c fast", "✗ d too old"])


def test_examine_reports_every_check_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "import_problem", lambda module: "")
    names = [check.name for check in examine()]

    assert len(names) == len(set(names))
    assert {"Python", "extra [torch]", "port 50051", "port 51051", "RDMA", "direct I/O, current directory"} <= set(
        names
    )
    assert {
        "staging memory",
        "huge pages",
        "exclusive create, current directory",
        "directory fsync, current directory",
    } <= set(names)


def test_another_checkpoint_directory_can_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "import_problem", lambda module: "")
    checks = {check.name: check for check in examine(tmp_path)}

    assert str(tmp_path) in checks["exclusive create, checkpoints"].detail
    assert str(tmp_path) in checks["direct I/O, checkpoints"].detail
