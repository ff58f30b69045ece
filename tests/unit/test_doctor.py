"""Each check of `strata doctor`, shown a machine that has what it looks for and one that has not."""

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

from strata.doctor import Check, Status, disks, examine, is_healthy, machine, software
from strata.storage import files

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_missing_and_essential() -> None:
    check = software.python((3, 10, 12))

    assert (check.status, check.essential) == (Status.MISSING, True)
    assert "3.11" in check.cure


def test_this_python_is_fine() -> None:
    assert software.python(sys.version_info[:3]).status is Status.OK


def test_the_dependencies_of_the_installed_package_are_there() -> None:
    assert software.dependencies().status is Status.OK


def test_a_package_that_is_not_installed_is_essential() -> None:
    check = software.dependencies("strata-that-nobody-installed")

    assert (check.status, check.essential) == (Status.MISSING, True)


def test_every_extra_of_the_project_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert software.EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev"}
    for name, parts in software.EXTRAS.items():
        declared = project["optional-dependencies"][name]
        assert len(parts) == len(declared)
        assert all(line.startswith(part) for (part, _), line in zip(parts, declared, strict=True))


def test_an_extra_that_is_absent_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(software.EXTRAS, "ray", (("ray-that-nobody-installed", "ray"),))
    check = software.extra("ray")

    assert (check.status, check.essential) == (Status.MISSING, False)
    assert check.cure == "pip install 'strata-runtime[ray]'"


def test_an_extra_that_is_installed_but_does_not_import_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(software.EXTRAS, "ray", (("pytest", "no_such_module_anywhere"),))
    check = software.extra("ray")

    assert check.status is Status.WARNING
    assert "No module named 'no_such_module_anywhere'" in check.detail


def test_an_import_that_kills_its_process_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert software.import_problem("dies") == "exit code -6"
    assert software.import_problem("hangs", timeout_s=0.5).startswith("not done after")
    assert software.import_problem("json") == ""


def test_a_container_with_fewer_processors_than_it_sees_is_a_warning(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert machine.processors(quota).status is Status.WARNING
    assert "only 0.5" in machine.processors(quota).detail

    quota.write_text("max 100000\n")
    assert machine.processors(quota).status is Status.OK
    assert machine.processors(tmp_path / "absent").status is Status.OK


def test_few_open_files_are_a_warning_with_a_limit_that_can_be_set() -> None:
    assert machine.open_files((1_024, 20_000)).cure.endswith("ulimit -n 20000")
    assert machine.open_files((1_024, 1 << 20)).cure.endswith("ulimit -n 65536")
    assert machine.open_files((65_536, 65_536)).status is Status.OK
    assert machine.open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).detail == "no limit"


def test_shared_memory_that_is_absent_is_missing(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "absent").status is Status.MISSING


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SMALL_SHARED_MEMORY_BYTES", 1 << 60)

    assert machine.shared_memory(tmp_path).status is Status.WARNING


def test_a_state_directory_is_judged_by_its_nearest_existing_parent_and_not_made(tmp_path: Path) -> None:
    check = machine.writable_state(tmp_path / "a" / "b")

    assert check.status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_state_directory_that_cannot_be_written_is_essential() -> None:
    check = machine.writable_state(Path("/proc/strata"))

    assert (check.status, check.essential) == (Status.MISSING, True)
    assert "--state" in check.cure


# -- disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [disks.direct_io, disks.exclusive_names, disks.flushed_names])
def test_what_a_disk_can_do_is_really_tried_and_leaves_nothing(
    check: Callable[[str, Path], Check], tmp_path: Path
) -> None:
    found = check("the check", tmp_path / "a" / "b")

    assert found.name == "the check"
    assert found.status in (Status.OK, Status.WARNING)
    assert str(tmp_path) in found.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", [disks.direct_io, disks.exclusive_names, disks.flushed_names])
def test_a_directory_that_cannot_be_written_is_a_warning(check: Callable[[str, Path], Check]) -> None:
    found = check("the check", Path("/proc/strata"))

    assert found.status is Status.WARNING
    assert found.cure == "make the directory writable, with room on the disk"


def test_a_file_system_that_refuses_to_open_directly_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT == os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    check = disks.direct_io("direct I/O", tmp_path)

    assert check.status is Status.WARNING
    assert "refuses O_DIRECT; saves go through the page cache instead" in check.detail
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_opens_directly_and_then_cannot_write_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disks.direct_io("direct I/O", tmp_path).status is not Status.OK:
        pytest.skip("the file system of the tests refuses O_DIRECT itself")
    real_write = os.pwrite

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if files.is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)

    assert "refuses writes with O_DIRECT" in disks.direct_io("direct I/O", tmp_path).detail


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


def test_without_hard_links_commits_are_renames_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disks.exclusive_names("names", tmp_path).detail == f"hard links in {tmp_path}"
    refuse_links(monkeypatch)
    check = disks.exclusive_names("names", tmp_path)

    assert check.status is Status.OK
    assert "committed by exclusive renames instead" in check.detail


def test_without_links_and_exclusive_renames_nothing_can_be_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(temporary: Path, path: Path) -> None:
        raise OSError(errno.EINVAL, "this file system can put nothing exclusively")

    refuse_links(monkeypatch)
    monkeypatch.setattr(files, "_rename_if_absent", refuse)
    check = disks.exclusive_names("names", tmp_path)

    assert (check.status, check.essential) == (Status.MISSING, False)
    assert "no checkpoint can be committed there" in check.detail
    assert "object store" in check.cure


def test_a_file_system_that_gives_one_name_twice_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "publish_if_absent", lambda temporary, path: temporary.replace(path))
    check = disks.exclusive_names("names", tmp_path)

    assert check.status is Status.MISSING
    assert "two writers may overwrite each other" in check.detail


def test_a_directory_that_cannot_be_flushed_is_a_warning_that_says_what_may_be_lost(tmp_path: Path) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    check = disks.flushed_names("names", tmp_path, sync=refuse)

    assert check.status is Status.WARNING
    assert "the newest checkpoints may be gone, those before them are not" in check.detail


def test_a_disk_that_is_broken_is_not_taken_for_one_that_cannot(tmp_path: Path) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    assert "Input/output error" in disks.flushed_names("names", tmp_path, sync=fail).detail


# -- memory --------------------------------------------------------------------------------------------------------


def test_without_memfd_the_place_of_the_files_and_its_room_are_told(tmp_path: Path) -> None:
    def refuse() -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    check = machine.staging_memory(refuse, tmp_path)

    assert check.status is Status.WARNING
    assert check.detail.startswith(f"Operation not permitted; states are staged in files in {tmp_path} instead, ")
    assert check.detail.endswith("GiB free")
    assert "cannot be used" in machine.staging_memory(refuse, tmp_path / "absent").detail


def test_a_system_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)

    with pytest.raises(OSError, match="this system has no memfd"):
        machine.nameless_memory()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has it")
def test_memfd_is_really_tried_and_closed() -> None:
    fds = []

    def create() -> int:
        fds.append(machine.nameless_memory())
        return fds[0]

    assert machine.staging_memory(create, Path("/absent")).status is Status.OK
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


def test_huge_pages_are_told_as_the_kernel_has_them(tmp_path: Path) -> None:
    assert machine.huge_pages(tmp_path).status is Status.MISSING
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert machine.huge_pages(tmp_path).detail == "private memory: madvise"
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert machine.huge_pages(tmp_path).detail == "private memory: madvise, shared memory: never"


# -- ports and devices ---------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_a_warning_and_a_free_one_is_not() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        number = server.getsockname()[1]
        taken = machine.port(number, flag="--listen")

    assert (taken.status, taken.cure) == (
        Status.WARNING,
        "if not: strata coordinator --listen 127.0.0.1:0 picks another",
    )
    assert machine.port(number, flag="--listen").status is Status.OK


def test_rdma_devices_are_named(tmp_path: Path) -> None:
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()

    assert machine.rdma(tmp_path).detail == "mlx5_0, mlx5_1"
    assert machine.rdma(tmp_path / "absent").status is Status.MISSING


def test_only_what_is_essential_and_missing_makes_a_machine_unhealthy() -> None:
    optional = Check(name="a", status=Status.MISSING, detail="")
    shaky = Check(name="b", status=Status.WARNING, detail="", essential=True)
    needed = Check(name="c", status=Status.MISSING, detail="", essential=True)

    assert is_healthy([optional, shaky])
    assert not is_healthy([optional, shaky, needed])


def test_the_whole_examination_names_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "import_problem", lambda module: "")
    names = [check.name for check in examine()]

    assert len(names) == len(set(names))
    assert {"Python", "extra [torch]", "port 50051", "port 51051", "RDMA", "direct I/O, here"} <= set(names)
    assert {"staging memory", "huge pages", "exclusive names, here", "flushed names, here"} <= set(names)


def test_another_place_for_checkpoints_can_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "import_problem", lambda module: "")
    checks = {check.name: check for check in examine(tmp_path)}

    assert str(tmp_path) in checks["exclusive names, there"].detail
    assert str(tmp_path) in checks["direct I/O, there"].detail
