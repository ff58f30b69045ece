"""`strata checkpoints` on real directories."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from strata import cli
from strata.checkpoint import CheckpointManager, catalog
from strata.checkpoint.format import manifest as m
from strata.checkpoint.load import statistics
from strata.checkpoint.tools import diff, export, inspect
from strata.checkpoint.tools.diff import Side
from strata.cli.exit_codes import ExitCode
from strata.errors import CheckpointCorrupt, InvalidArgument, NoCheckpoint
from strata.launch.record import directory as run_directory
from strata.launch.spec import RunSpec
from strata.storage import Watch
from strata.storage.memory import MemoryStore

HOSTILE = "[red]x[/red]\u001b[31m"
DATA = "rank-00000.safetensors"
TIMES = ("stall_s", "write_s", "duration_s")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def checkpoints(*args: str | Path, answer: str = "") -> Done:
    """Run `strata checkpoints` in this process, so that torch is imported only once."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "stdin", io.StringIO(answer))
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoints", *map(str, args)])
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def as_json(*args: str | Path) -> Any:
    done = checkpoints(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def manager_of(place: Path) -> CheckpointManager:
    """Return a manager without a saver process, which takes a second to start, and without background statistics."""
    return CheckpointManager(str(place), saver="thread", statistics=False)


def state_of(number: int) -> dict[str, Any]:
    return {
        "model": {"w": np.full((4, 3), number, np.float32), "same": np.arange(5)},
        "optimizer": {"m": np.zeros(2)},
        "lr": 0.1,
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 1 and 2."""
    with manager_of(tmp_path / "checkpoints") as manager:
        for step in (1, 2):
            manager.save(state_of(step), step=step, epoch=step * 10, metadata={"loss": 0.5 / step}).wait()
    return tmp_path / "checkpoints"


def directory_of(place: Path, step: int) -> Path:
    (found,) = place.glob(f"step-{step:012d}-*")
    return found


def spoil(place: Path, step: int) -> str:
    """Flip a bit of the last tensor and return the id."""
    directory = directory_of(place, step)
    path = directory / DATA
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return directory.name


def given_up(directory: Path, *, hours: float) -> None:
    at_s = time.time() - hours * 3_600
    for path in directory.iterdir():
        os.utime(path, (at_s, at_s))


# -- ls, show ------------------------------------------------------------------------------------------------------


def test_ls_lists_the_newest_checkpoint_last(place: Path) -> None:
    listed = checkpoints("ls", place)
    heading, one, two = listed.stdout.splitlines()

    assert heading.split() == ["id", "step", "epoch", "type", "base", "size", "tensors", "took", "age", "metadata"]
    assert one.split()[:7] == [directory_of(place, 1).name, "1", "10", "FULL", "–", "4.1", "KiB"]
    assert two.split()[:5] == [directory_of(place, 2).name, "2", "20", "FULL", "–"]
    assert two.rstrip().endswith('{"loss": 0.25}')
    assert (listed.returncode, listed.stderr) == (0, "")


def test_ls_and_show_print_how_long_a_save_took_and_blocked_training(place: Path) -> None:
    listed = as_json("ls", place)["checkpoints"][0]
    assert 0 <= listed["stall_s"] + listed["write_s"] <= listed["duration_s"] + 1e-5 < 60
    took = f"{listed['duration_s']:.3g}s"
    assert checkpoints("ls", place).stdout.splitlines()[1].split()[8] == took
    shown = checkpoints("show", place, "--step", "1").stdout
    assert f"took      {took}; training was blocked for {listed['stall_s']:.3g}s of it\n" in shown


def test_a_checkpoint_of_an_earlier_version_has_no_duration(place: Path) -> None:
    path = directory_of(place, 1) / m.FILE_NAME
    unset = m.msgspec.structs.replace(m.decode(path.read_bytes(), file=""), **dict.fromkeys(TIMES, m.UNSET))
    path.write_bytes(m.encode(unset))
    assert b"duration_s" not in path.read_bytes()
    assert checkpoints("ls", place).stdout.splitlines()[1].split()[8] == "–"
    assert as_json("ls", place)["checkpoints"][0]["duration_s"] is None
    assert "took" not in checkpoints("show", place, "--step", "1").stdout


def test_ls_and_show_print_the_base_and_size_of_an_incremental_checkpoint(place: Path) -> None:
    base = m.decode((directory_of(place, 1) / m.FILE_NAME).read_bytes(), file="")
    files = tuple(m.msgspec.structs.replace(file, path=f"{base.id}/{file.path}") for file in base.files)
    for step, parent in ((7, base.id), (8, "gone")):
        name = f"step-{step:012d}-{step:016x}"
        delta = m.msgspec.structs.replace(base, id=name, step=step, parent=parent, files=files)
        delta = m.msgspec.structs.replace(delta, type=m.CheckpointType.INCREMENTAL, written_bytes=300)
        delta = m.msgspec.structs.replace(delta, full_bytes=5 << 20)
        (place / name).mkdir()
        (place / name / m.FILE_NAME).write_bytes(m.encode(delta))
    rows = [line.split() for line in checkpoints("ls", place).stdout.splitlines()]

    assert rows[3][3:11] == ["INCREMENTAL", "step", "1", "300", "B", "of", "5.0", "MiB"]
    assert rows[4][3:6] == ["INCREMENTAL", "gone", "300"]
    listed = as_json("ls", place)["checkpoints"][2]
    assert (listed["parent"], listed["size_bytes"], listed["full_bytes"]) == (base.id, 300, 5 << 20)
    output = checkpoints("show", place, "--step", "7").stdout
    assert f"base      {base.id}\nsize      300 B of 5.0 MiB in 1 file, 3 tensors\n" in output


def test_ls_prints_json(place: Path) -> None:
    listed = as_json("ls", place)

    assert [(c["step"], c["epoch"], c["num_tensors"]) for c in listed["checkpoints"]] == [(1, 10, 3), (2, 20, 3)]
    assert listed["checkpoints"][1]["metadata"] == {"loss": 0.25}
    assert listed["passed_over"] == {}


def test_ls_lists_skipped_checkpoints_with_the_reason(place: Path) -> None:
    directory = directory_of(place, 2)
    (directory / m.FILE_NAME).write_text("{")
    listed = checkpoints("ls", place)

    assert f"skipped: {directory.name}: " in listed.stdout
    assert "is not a manifest" in listed.stdout
    assert (listed.returncode, listed.stderr) == (0, ""), "printed once, not also logged"


def test_an_empty_directory_is_an_error_only_for_commands_that_need_a_checkpoint(tmp_path: Path) -> None:
    listed = checkpoints("ls", tmp_path)
    assert (listed.returncode, listed.stdout) == (0, f"no checkpoints in {tmp_path}\n")
    assert as_json("ls", tmp_path) == {"checkpoints": [], "passed_over": {}}
    for command in (
        ["show"],
        ["verify"],
        ["verify", "--all"],
        ["rm", "--yes", "--step=1"],
        ["export", "--output=x.pt"],
    ):
        refused = checkpoints(command[0], tmp_path, *command[1:])
        assert (refused.returncode, refused.stdout) == (ExitCode.FAILED, "")
        assert "no checkpoint" in refused.stderr
    assert checkpoints("repair", tmp_path).stdout == "nothing to repair\n"


def test_a_missing_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for name, message in (
        (tmp_path / "absent", f"directory {tmp_path / 'absent'} does not exist"),
        ("./absent", "directory ./absent does not exist"),
        ("absent", "directory absent does not exist, and no such run: 'absent'"),
        ("file", "directory file does not exist"),
    ):
        for command in (["ls"], ["ls", "--json"], ["show"], ["verify"], ["diff", "1", "2"], ["compact", "--step=1"]):
            refused = checkpoints(command[0], name, *command[1:])
            assert (refused.returncode, refused.stdout) == (ExitCode.USAGE, "")
            assert message in " ".join(refused.stderr.split())


def test_the_name_of_a_run_locates_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    run = run_directory.create(
        RunSpec(name="swift-otter", script="x.py", directory=".", checkpoints=str(tmp_path / "far"))
    )
    refused = checkpoints("ls", run.name)
    assert refused.returncode == ExitCode.USAGE
    assert "run swift-otter has no checkpoints" in refused.stderr
    with manager_of(tmp_path / "far") as manager:
        manager.save({"w": np.ones(3)}, step=5).wait()
    assert [one["step"] for one in as_json("ls", "swift-otter")["checkpoints"]] == [5]
    assert as_json("show", "swift")["step"] == 5, "a prefix of its name is enough"
    (tmp_path / "swift-otter").mkdir()
    assert as_json("ls", "swift-otter")["checkpoints"] == [], "a directory takes precedence"


def test_show_prints_the_tensors_without_reading_the_data(place: Path) -> None:
    (directory_of(place, 2) / DATA).unlink()
    result = checkpoints("show", place)
    rows = [line.split() for line in result.stdout.splitlines()]

    assert ["model.w", "4×3", "F32", "48", DATA] in rows
    assert ["step", "2,", "epoch", "20"] in rows
    described = as_json("show", place, "--step", "1")
    assert described["id"] == directory_of(place, 1).name
    assert {t["name"]: t["shape"] for t in described["tensors"]} == {
        "model.w": [4, 3],
        "model.same": [5],
        "optimizer.m": [2],
    }


def test_show_prints_stored_statistics_without_reading_the_data(place: Path) -> None:
    directory = directory_of(place, 2)
    with manager_of(place) as manager:
        manifest = catalog.Catalog(manager._store).find()
        found = statistics.compute(manager._store, manifest, watch=Watch())
        statistics.write(manager._store, manifest.id, found)
    (directory / DATA).unlink()
    rows = [line.split() for line in checkpoints("show", place).stdout.splitlines()]

    headings = ["tensor", "shape", "dtype", "bytes", "min", "max", "mean", "norm", "nan", "inf", "file"]
    assert headings in rows
    assert ["model.w", "4×3", "F32", "48", "2", "2", "2", "6.9282", "0", "0", DATA] in rows
    assert ["model.same", "5", "I64", "40", "0", "4", "2", "5.47723", "0", "0", DATA] in rows
    stored = {tensor["name"]: tensor["statistics"] for tensor in as_json("show", place)["tensors"]}
    assert stored["model.same"]["max"] == 4
    assert stored["optimizer.m"]["norm"] == 0


def test_show_reports_missing_statistics_and_computes_them_on_request(place: Path) -> None:
    (directory_of(place, 2) / "statistics.json").unlink(missing_ok=True)
    result = checkpoints("show", place)
    assert "no statistics stored; --statistics computes them from the data" in result.stdout
    assert [tensor["statistics"] for tensor in as_json("show", place)["tensors"]] == [None] * 3
    rows = [line.split() for line in checkpoints("show", place, "--statistics").stdout.splitlines()]
    assert ["model.w", "4×3", "F32", "48", "2", "2", "2", "6.9282", "0", "0", DATA] in rows
    assert not (directory_of(place, 2) / "statistics.json").exists(), "show writes nothing"
    spoil(place, 2)
    assert checkpoints("show", place, "--statistics").returncode == ExitCode.STATE_DAMAGED


def test_invalid_statistics_are_ignored(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory_of(place, 2) / "statistics.json").write_text('{"strata_statistics": 1, "checkpoint": "other"}')
    result = checkpoints("show", place)

    assert (result.returncode, "no statistics stored" in result.stdout) == (0, True)
    assert "statistics.json is malformed" in caplog.text


def test_show_refuses_two_selections_and_a_missing_step(place: Path) -> None:
    assert checkpoints("show", place, "--step", "1", "--id", "x").returncode == ExitCode.USAGE
    refused = checkpoints("show", place, "--step", "7")
    assert refused.returncode == ExitCode.FAILED
    assert "the newest steps are 1, 2" in refused.stderr


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            manager.save({HOSTILE: np.full(2, step)}, step=step, metadata={HOSTILE: "[bold]\u202e"}).wait()
    spoil(tmp_path, 2)
    for command in (["ls"], ["show"], ["show", "--step=1"], ["verify"], ["diff", "1", "1"]):
        result = checkpoints(command[0], tmp_path, *command[1:])
        assert "\u001b" not in result.stdout + result.stderr
        assert "\u202e" not in result.stdout + result.stderr
    assert "[red]x[/red]\\x1b[31m" in checkpoints("show", tmp_path).stdout
    assert "[red]x[/red]\\x1b[31m" in checkpoints("verify", tmp_path).stdout.replace("\\\\", "\\")
    assert as_json("show", tmp_path)["tensors"][0]["name"] == HOSTILE


# -- verify --------------------------------------------------------------------------------------------------------


def test_verify_finds_a_flipped_bit_and_names_the_file_and_the_tensor(place: Path) -> None:
    assert checkpoints("verify", place, "--all").returncode == 0
    spoiled = spoil(place, 2)
    found = checkpoints("verify", place)

    assert found.returncode == ExitCode.STATE_DAMAGED
    assert f"{spoiled} is damaged: tensor 'model.w' in {DATA}, bytes " in found.stdout
    assert found.stderr == "", "no progress bar without a terminal"
    assert checkpoints("verify", place, "--step", "1").returncode == 0


def test_verify_all_continues_after_a_damaged_checkpoint(place: Path) -> None:
    damaged, unreadable = spoil(place, 1), directory_of(place, 2).name
    (place / unreadable / m.FILE_NAME).write_text("{}")
    with manager_of(place) as manager:
        manager.save(state_of(3), step=3).wait()
    found = checkpoints("verify", place, "--all", "--json")
    report = json.loads(found.stdout)

    assert found.returncode == ExitCode.STATE_DAMAGED
    assert set(report["wrong"]) == {damaged, unreadable}
    assert report["good"] == [directory_of(place, 3).name]


def test_a_long_verify_shows_a_progress_bar_on_a_terminal(place: Path) -> None:
    script = (
        "import sys, threading\n"
        "from strata.checkpoint.load import integrity\n"
        "from strata.checkpoint.tools import progress\n"
        "from strata.cli import main\n"
        "shown, show, verify = threading.Event(), progress.ProgressCounter.show, integrity.verify\n"
        "progress.SHOWN_AFTER_S = 0.0\n"
        "progress.ProgressCounter.show = lambda self: (show(self), shown.set())\n"
        "integrity.verify = lambda *args, **kwargs: (shown.wait(30), verify(*args, **kwargs))\n"
        "main(['checkpoints', 'verify', sys.argv[1]])\n"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", script, str(place)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        drawn = b""
        try:
            while piece := os.read(ours, 4_096):
                drawn += piece
        except OSError:  # the other side has closed
            pass
        out, _ = process.communicate()
    os.close(ours)
    assert (process.returncode, b"is intact" in out) == (0, True)
    assert b"verifying" in drawn


# -- diff ----------------------------------------------------------------------------------------------------------


def test_diff_shows_what_changed_and_by_how_much(tmp_path: Path) -> None:
    before = {"a": np.zeros(10, np.float32), "same": np.ones(3), "gone": np.ones(1), "cut": np.ones((2, 2)), "lr": 0.1}
    after = {"a": np.zeros(10, np.float32), "same": np.ones(3), "new": np.ones(1), "cut": np.ones(4), "lr": 0.2}
    after["a"][[2, 5]] = [1.5, -2.5]  # type: ignore[index]
    with manager_of(tmp_path) as manager:
        manager.save(before, step=1).wait()
        second = manager.save(after, step=2)
    rows = [line.split() for line in checkpoints("diff", tmp_path, "1", second.id).stdout.splitlines()]

    assert ["removed", "gone", "1", "F64"] in rows
    assert ["added", "new", "1", "F64"] in rows
    assert ["reshaped", "cut", "2×2", "F64", "→", "4", "F64"] in rows
    assert ["changed", "a", "2", "of", "10", "elements,", "by", "up", "to", "2.5"] in rows
    assert ["1", "identical", "tensor"] in rows
    difference = as_json("diff", tmp_path, "1", "2")
    changed = {"num_elements": 10, "num_different": 2, "max_abs": 2.5, "num_not_finite": 0, "l2": np.hypot(1.5, 2.5)}
    assert difference["changed"] == {"a": changed}
    assert (difference["num_same"], difference["same_structure"]) == (1, False)
    assert as_json("diff", tmp_path, "1", "1")["num_same"] == 4


def test_diff_compares_checkpoints_in_two_directories(tmp_path: Path) -> None:
    for place, factor in (("a", 1), ("b", 3)):
        with manager_of(tmp_path / place) as manager:
            for step in (1, 2):
                table = np.arange(3_000_000, dtype=np.float32)  # in several chunks, of which one differs
                table[7] = factor * step
                manager.save({"table": table, "same": np.ones(2)}, step=step).wait()
    difference = as_json("diff", tmp_path / "a", "1", "2", "--against", tmp_path / "b")
    assert difference["changed"]["table"] == {
        "num_elements": 3_000_000,
        "num_different": 1,
        "max_abs": 5.0,
        "num_not_finite": 0,
        "l2": 5.0,
    }
    assert difference["num_same"] == 1
    assert as_json("diff", tmp_path / "a", "2", "--against", tmp_path / "b")["changed"]["table"]["max_abs"] == 4.0
    assert checkpoints("diff", tmp_path / "a", "2").returncode == ExitCode.USAGE
    assert checkpoints("diff", tmp_path / "a", "2", "--against", tmp_path / "c").returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (np.array([1, 2, 3], np.uint8), np.array([1, 255, 0], np.uint8), (2, 253, 0)),
        (np.array([-(2**63)]), np.array([2**63 - 1]), (1, 2**64 - 1, 0)),
        (np.array([True, False]), np.array([True, True]), (1, 1, 0)),
        (np.array([0.0, np.nan, np.inf]), np.array([-0.0, np.nan, 1.0]), (2, 0.0, 1)),
        (np.array([1 + 1j], np.complex64), np.array([4 + 5j], np.complex64), (1, 5.0, 0)),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 4.0], dtype=torch.bfloat16), (1, 2.0, 0)),
        (torch.tensor([1.0]).to(torch.float8_e5m2), torch.tensor([4.0]).to(torch.float8_e5m2), (1, 3.0, 0)),
        (np.array(7.0), np.array(8.0), (1, 1.0, 0)),
    ],
)
def test_a_difference_is_measured_for_every_dtype(one: Any, other: Any, expected: tuple[int, Any, int]) -> None:
    store = MemoryStore("differences")
    with CheckpointManager(store=store) as manager:
        for step, value in enumerate((one, other)):
            manager.save({"x": value}, step=step).wait()
        known = catalog.Catalog(store)
        by = diff.measure(Side(store, known.find(step=0)), Side(store, known.find(step=1)), ["x"])["x"]

    assert (by.num_different, by.max_abs, by.num_not_finite) == expected


class CountingStore(MemoryStore):
    num_read = 0

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.num_read += len(out)
        super().read_into(key, offset, out)


def test_diff_reads_only_the_differing_chunks_of_a_large_tensor() -> None:
    store = CountingStore("chunks")
    array = np.zeros(10 << 20, np.float32)  # 40 MiB are three chunks
    with CheckpointManager(store=store) as manager:
        manager.save({"x": array}, step=0).wait()
        array[-1] = 3
        manager.save({"x": array}, step=1).wait()
        known = catalog.Catalog(store)
        before, after = known.find(step=0), known.find(step=1)
        assert diff.compare(before, after).changed == ("x",)
        assert store.num_read == 0
        by = diff.measure(Side(store, before), Side(store, after), ["x"])["x"]

    assert (by.num_elements, by.num_different, by.max_abs) == (10 << 20, 1, 3.0)
    assert store.num_read <= 2 * ((8 << 20) + 4_096)


@pytest.mark.parametrize("second", [range(50), range(49, -1, -1)], ids=["same order", "other order"])
def test_many_small_tensors_are_each_measured(second: range) -> None:
    store = MemoryStore("small")
    with CheckpointManager(store=store) as manager:
        for step, names in enumerate((range(50), second)):
            manager.save({f"t{n}": np.full(n + 1, n * step, np.int32) for n in names}, step=step).wait()
        known = catalog.Catalog(store)
        before, after = known.find(step=0), known.find(step=1)
        changed = diff.compare(before, after).changed
        found = diff.measure(Side(store, before), Side(store, after), changed)

    assert {name: (by.num_different, by.max_abs) for name, by in found.items()} == {
        f"t{n}": (n + 1, n) for n in range(1, 50)
    }


# -- export --------------------------------------------------------------------------------------------------------


def test_export_writes_a_file_that_safetensors_reads(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    done = checkpoints("export", place, "--output", file, "--only", "model.*")

    assert done.returncode == 0, done.stderr
    assert "2 tensors" in done.stdout
    loaded = safetensors.numpy.load_file(file)
    assert set(loaded) == {"model.w", "model.same"}
    assert loaded["model.w"].tolist() == [[2.0] * 3] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


def test_export_writes_a_file_that_torch_reads(tmp_path: Path) -> None:
    with manager_of(tmp_path / "c") as manager:
        manager.save({"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(3)}, "step": 7}, step=7).wait()
    assert checkpoints("export", tmp_path / "c", "--output", tmp_path / "all.pt").returncode == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (loaded["step"], loaded["optimizer"]["m"].tolist()) == (7, [1, 1, 1])
    assert checkpoints("export", tmp_path / "c", "--output", tmp_path / "w.pt", "--only", "model.*").returncode == 0
    assert "optimizer" not in torch.load(tmp_path / "w.pt", weights_only=True)


def test_export_strips_a_prefix_so_that_a_model_loads_the_file(tmp_path: Path) -> None:
    def model_of(value: float) -> torch.nn.Module:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        torch.nn.init.constant_(model["a"].weight, value)  # type: ignore[arg-type]
        model["b"].weight = model["a"].weight  # tied
        return model

    with manager_of(tmp_path / "c") as manager:
        saved = {"model": {f"module.{n}": t for n, t in model_of(5).state_dict().items()}, "optimizer": torch.ones(3)}
        manager.save(saved, step=1).wait()
    for suffix in ("pt", "safetensors"):
        done = checkpoints(
            "export", tmp_path / "c", "--output", tmp_path / f"m.{suffix}", "--strip-prefix", "model.module."
        )
        assert done.returncode == 0, done.stderr
    fresh = model_of(0)
    fresh.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert fresh["b"].weight.tolist() == [[5, 5], [5, 5]]  # type: ignore[index]
    assert set(safetensors.numpy.load_file(tmp_path / "m.safetensors")) == {"a.weight", "a.bias", "b.bias"}
    refused = checkpoints("export", tmp_path / "c", "--output", tmp_path / "x.pt", "--strip-prefix", "net.")
    assert refused.returncode == ExitCode.USAGE
    assert "no tensor has a name below the prefix 'net.'" in refused.stderr


def test_a_failed_export_leaves_no_file(place: Path, tmp_path: Path) -> None:
    spoil(place, 2)
    file = tmp_path / "x.safetensors"
    for args, code, message in (
        ([], ExitCode.STATE_DAMAGED, "tensor 'model.w'"),
        (["--only", "nothing"], ExitCode.USAGE, "no tensor that matches"),
        (["--output", tmp_path / "x.bin"], ExitCode.USAGE, "unknown suffix"),
        (["--output", tmp_path / "absent" / "x.pt"], ExitCode.FAILED, "cannot be written"),
    ):
        refused = checkpoints("export", place, "--output", file, *args)
        assert (refused.returncode, message in refused.stderr) == (code, True), refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_export_overwrites_a_file_only_with_force(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_text("precious")
    refused = checkpoints("export", place, "--output", file)
    assert refused.returncode == ExitCode.USAGE
    assert file.read_text() == "precious"
    assert checkpoints("export", place, "--output", file, "--force").returncode == 0
    assert "model.w" in safetensors.numpy.load_file(file)


def test_small_tensors_are_exported_in_groups_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_READ_BYTES", 100)
    store = MemoryStore("groups")
    state = {f"t{n}": np.full(n, n, np.int64) for n in range(30)}
    with CheckpointManager(store=store) as manager:
        manager.save(state, step=0).wait()
        assert export.export(store, catalog.Catalog(store).find(), tmp_path / "x.safetensors") == 30
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {name: array.tolist() for name, array in loaded.items()} == {n: a.tolist() for n, a in state.items()}


# -- rm, compact, repair -------------------------------------------------------------------------------------------


def test_rm_asks_first(place: Path) -> None:
    assert checkpoints("rm", place).returncode == ExitCode.USAGE
    assert checkpoints("rm", place, "--step", "1", answer="n\n").returncode == 1
    assert directory_of(place, 1).exists()
    assert checkpoints("rm", place, "--step", "1", answer="y\n").returncode == 0
    assert [c["step"] for c in as_json("ls", place)["checkpoints"]] == [2]
    assert not list(place.glob("step-000000000001-*"))


def test_rm_by_id_removes_an_unreadable_checkpoint(place: Path) -> None:
    directory = directory_of(place, 2)
    (directory / m.FILE_NAME).write_text("{}")
    assert checkpoints("rm", place, "--id", directory.name, "--yes").returncode == 0
    assert not directory.exists()
    for name in (directory.name, "../checkpoints", "."):
        assert checkpoints("rm", place, "--id", name, "--yes").returncode == ExitCode.FAILED
    assert directory_of(place, 1).exists()


def test_compact_rewrites_an_incremental_checkpoint_and_frees_its_base(tmp_path: Path) -> None:
    table = np.zeros((1_000, 64), np.float32)
    with manager_of(tmp_path) as manager:
        base = manager.save({"table": table}, step=1).wait()
        table[7] = 3
        delta = manager.save({"table": table}, step=2, checkpoint_type="INCREMENTAL").wait()
    assert delta.bases == (base.id,)
    assert checkpoints("rm", tmp_path, "--step", "1", "--yes").returncode == ExitCode.USAGE
    assert checkpoints("compact", tmp_path).returncode == ExitCode.USAGE
    done = checkpoints("compact", tmp_path, "--step", "2")
    (old, new) = as_json("ls", tmp_path)["checkpoints"]

    assert (done.returncode, done.stdout) == (0, f"{new['id']} is a full checkpoint, 254.0 KiB\n")
    assert (old["id"], new["step"], new["bases"]) == (base.id, 2, [])
    assert not (tmp_path / delta.id).exists()
    assert checkpoints("rm", tmp_path, "--step", "1", "--yes").returncode == 0
    with manager_of(tmp_path) as manager:
        assert np.array_equal(manager.load()["table"], table)
    again = checkpoints("compact", tmp_path, "--id", new["id"])
    assert (again.returncode, [c["id"] for c in as_json("ls", tmp_path)["checkpoints"]]) == (0, [new["id"]])


def test_the_base_of_a_quarantined_checkpoint_is_not_removed() -> None:
    store = MemoryStore("bases")
    with CheckpointManager(store=store, statistics=False) as manager:
        base = manager.save(state_of(1), step=1)
        manager.wait()
        known = catalog.Catalog(store)
        files = tuple(m.msgspec.structs.replace(file, path=f"{base.id}/{file.path}") for file in known.find().files)
        child = m.msgspec.structs.replace(known.find(), id="child", parent=base.id, step=2, files=files)
        store.put("child/manifest.json", m.encode(child))
        with pytest.raises(InvalidArgument, match="is the base of child"):
            inspect.removable(store, known, step=1)
        known.quarantine("child", "a test")
        with pytest.raises(InvalidArgument, match="is the base of child"):
            inspect.removable(store, catalog.Catalog(store), id=base.id)
        inspect.remove(store, known, inspect.removable(store, known, id="child"))
        inspect.remove(store, known, inspect.removable(store, known, id=base.id))
        assert list(store.walk()) == []


def test_repair_lifts_the_quarantine_of_intact_checkpoints_only(place: Path) -> None:
    spoiled = spoil(place, 2)
    with manager_of(place) as manager:
        assert manager.load()["model"]["w"].max() == 1  # the newest goes into quarantine
    result = checkpoints("repair", place)
    assert f"skipped: {spoiled}: in quarantine: tensor 'model.w'" in result.stdout
    refused = checkpoints("repair", place, "--lift", spoiled)
    assert refused.returncode == ExitCode.STATE_DAMAGED
    assert (place / spoiled / "quarantine.json").exists()
    spoil(place, 2)  # flips it back
    assert checkpoints("repair", place, "--lift", spoiled).returncode == 0
    assert [c["id"] for c in as_json("ls", place)["checkpoints"]][-1] == spoiled
    assert checkpoints("repair", place, "--lift", spoiled).returncode == ExitCode.USAGE


def test_repair_collects_only_abandoned_saves(place: Path) -> None:
    old, young, others = (place / name for name in (f"step-{7:012d}-{7:016x}", f"step-{8:012d}-{8:016x}", "photos"))
    for directory in (old, young, others):
        directory.mkdir()
        (directory / DATA).write_bytes(b"x")
    given_up(old, hours=2)
    given_up(others, hours=2)
    mixed = place / f"step-{9:012d}-{9:016x}"
    mixed.mkdir()
    (mixed / "notes.txt").write_text("mine")
    given_up(mixed, hours=2)
    given_up(directory_of(place, 1), hours=2)
    output = checkpoints("repair", place).stdout
    assert f"{old.name} (1 file, 1 B) is an unfinished save: abandoned, last written 2h ago" in output
    assert f"{young.name} (1 file, 1 B) is an unfinished save: perhaps still being written" in output
    assert checkpoints("repair", place, "--collect", answer="n\n").returncode == 1
    assert old.exists()
    assert "removed 1 abandoned save" in checkpoints("repair", place, "--collect", "--yes").stdout
    assert not old.exists()
    assert all(directory.exists() for directory in (young, others, mixed, directory_of(place, 1)))


def test_repair_collects_the_files_of_a_killed_process(place: Path) -> None:
    old, young = (place / f"step-{n:012d}-{n:016x}" for n in (7, 8))
    for directory in (old, young):
        directory.mkdir()
        (directory / ".tmp-0123").write_bytes(b"half")
    given_up(old, hours=2)
    output = checkpoints("repair", place, "--collect", "--yes").stdout
    assert f"{old.name} (1 file, 4 B) is an unfinished save: abandoned" in output
    assert f"{young.name} (1 file, 4 B) is an unfinished save: perhaps still being written" in output
    assert (old.exists(), young.exists()) == (False, True)


def test_a_manifest_with_absurd_numbers_is_listed(place: Path) -> None:
    directory = directory_of(place, 2)
    manifest = m.decode((directory / m.FILE_NAME).read_bytes(), file="")
    large = m.msgspec.structs.replace(manifest, written_bytes=(1 << 63) - 1, created_at_s=float(1 << 39))
    (directory / m.FILE_NAME).write_bytes(m.encode(large))
    listed = checkpoints("ls", place)
    assert listed.returncode == 0
    assert max(map(len, listed.stdout.splitlines())) < 150


def test_a_save_that_is_committed_meanwhile_is_not_collected(place: Path) -> None:
    with manager_of(place) as manager:
        store = manager._store
        directory = directory_of(place, 2)
        manifest = (directory / m.FILE_NAME).read_bytes()
        (directory / m.FILE_NAME).unlink()
        (left,) = inspect.leftovers(store)
        (directory / m.FILE_NAME).write_bytes(manifest)
        assert not inspect.collect(store, left)
        assert manager.verify().step == 2


def test_storage_options_are_pairs_and_apply_to_object_stores_only(place: Path) -> None:
    assert checkpoints("ls", place, "--storage-option", "region").returncode == ExitCode.USAGE
    refused = checkpoints("ls", place, "--storage-option", "region=x")
    assert refused.returncode == ExitCode.USAGE
    assert "leave them out for a path" in refused.stderr


def test_the_help_loads_nothing_heavy() -> None:
    look = (
        "import sys\nfrom strata.cli import main\ntry:\n    main(['checkpoints', 'verify', '--help'])\n"
        "finally:\n    print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)

    assert set(result.stdout.splitlines()[-1].split()) & {"numpy", "torch", "obstore"} == set()


def test_choosing_takes_a_step_or_an_id(place: Path) -> None:
    with manager_of(place) as manager:
        store = manager._store
        known = catalog.Catalog(store)
        assert inspect.choose(known, "1").step == 1
        assert inspect.choose(known, directory_of(place, 2).name).step == 2
        with pytest.raises(NoCheckpoint):
            inspect.choose(known, "nobody")
        spoil(place, 2)
        with pytest.raises(CheckpointCorrupt, match=r"tensor 'model\.w'"):
            diff.measure(Side(store, known.find(step=1)), Side(store, known.find(step=2)), ["model.w"])
