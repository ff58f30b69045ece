"""Run directories: created atomically, readable at any time, with dead agents detected."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.clock import ManualClock
from strata.errors import ConfigError
from strata.launch.record import directory
from strata.launch.record.directory import (
    MAX_EVENT_BYTES,
    MAX_REASON,
    STATUS_BYTES,
    RunDirectory,
    RunStatus,
    all_runs,
    boot_id,
    create,
    is_alive,
    new_name,
    open_run,
    remove,
    root,
    started_ticks,
    state_now,
)
from strata.launch.record.timeline import RunEvent
from strata.launch.spec import RunSpec, Size


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "state" / "runs"))
    return tmp_path / "state" / "runs"


def spec_of(name: str = "first", **fields: object) -> RunSpec:
    made = RunSpec(name=name, script="train.py", directory="/work", checkpoints="/work/checkpoints")
    return msgspec.structs.replace(made, **fields)


def status_of(state: str = "running", **fields: object) -> RunStatus:
    return msgspec.structs.replace(RunStatus.of_this_process(now_s=1.0), state=state, **fields)


def event(what: str = "failed", **fields: object) -> RunEvent:
    return msgspec.structs.replace(RunEvent(at_s=1.0, monotonic_s=2.0, what=what), **fields)


# -- making and finding ------------------------------------------------------------------------------------------------


def test_a_run_is_found_again_with_its_spec(runs_dir: Path) -> None:
    spec = spec_of(arguments=("--lr", "0.1"), workers=Size(2, 8), variables={"A": "b"})

    made, found = create(spec), open_run("first")

    assert made.path == found.path == runs_dir / "first"
    assert found.spec == spec
    assert found.name == "first"
    assert found.checkpoints == runs_dir / "first" / "checkpoints"
    assert found.journal == runs_dir / "first" / "coordinator.db"


def test_only_the_user_may_look_into_it(runs_dir: Path) -> None:
    run = create(spec_of())
    run.write_status(status_of())
    run.note(event())
    run.log_path(0, 0)
    with run.lock():
        pass

    directories = [runs_dir, run.path, *(path for path in run.path.rglob("*") if path.is_dir())]
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"run.json", "status.json", "events.jsonl", "lock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_without_the_variable_runs_live_with_the_state_of_users_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRATA_RUNS_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert root() == tmp_path / "strata" / "runs"


def test_a_name_that_is_made_up_is_short_sortable_and_new(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    names = iter(["aaaa", "aaaa", "bbbb", "0000"])
    monkeypatch.setattr(directory.secrets, "token_hex", lambda num_bytes: next(names))

    first = new_name(clock)
    (runs_dir / first).mkdir(parents=True)
    second = new_name(clock)
    clock.advance(60)
    third = new_name(clock)

    assert re.fullmatch(r"\d{6}-\d{4}-aaaa", first)
    assert second == first.replace("aaaa", "bbbb")
    assert first < second < third
    assert spec_of(third)


def test_a_second_run_of_a_name_is_refused_and_the_first_stays() -> None:
    create(spec_of(script="mine.py"))

    with pytest.raises(ConfigError, match="strata resume first") as caught:
        create(spec_of(script="other.py"))

    assert caught.value.field == "name"
    assert open_run("first").spec.script == "mine.py"
    assert [path.name for path in root().iterdir()] == ["first"]


def test_of_two_that_make_the_same_run_at_once_one_is_refused(runs_dir: Path) -> None:
    outcomes: list[str] = []
    gate = threading.Barrier(8)

    def make() -> None:
        gate.wait()
        try:
            create(spec_of())
            outcomes.append("made")
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == ["made"] + 7 * ["refused"]
    assert [path.name for path in runs_dir.iterdir()] == ["first"]


def test_an_unwritable_directory_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "file" / "runs"))

    with pytest.raises(ConfigError, match="set STRATA_RUNS_DIR"):
        create(spec_of())
    assert all_runs().found == []


def test_what_json_cannot_hold_is_refused_with_its_cure() -> None:
    with pytest.raises(ConfigError, match=r"a\\udcff is not UTF-8"):
        create(spec_of(arguments=("a\udcff",)))
    with pytest.raises(ConfigError, match="put them into a file"):
        create(spec_of(arguments=("x" * 9_000_000,)))
    assert all_runs().found == []


def test_an_unambiguous_prefix_of_a_name_is_enough() -> None:
    for name in ("alpha", "alpine", "beta", "bet"):
        create(spec_of(name))

    assert open_run("alph").name == "alpha"
    assert open_run("bet").name == "bet", "a whole name, although another name starts with it"
    with pytest.raises(ConfigError, match="2 runs start with 'al': alpha, alpine; type more"):
        open_run("al")


def test_an_unknown_run_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no such run: 'x'; `strata ps --all`"):
        open_run("x")
    create(spec_of("resnet-50"))

    with pytest.raises(ConfigError, match=r"did you mean resnet-50\? `strata ps --all` lists them"):
        open_run("resent-50")
    for other in ("", "..", "../runs/resnet-50", "/", "."):
        with pytest.raises(ConfigError, match="no such run"):
            open_run(other)


def test_runs_are_listed_newest_first_and_damaged_ones_hide_no_others() -> None:
    for number, name in enumerate(("a", "b", "c", "d")):
        run = create(spec_of(name))
        os.utime(run.path / "run.json", (1_000 + number, 1_000 + number))
    open_run("a").write_status(status_of(started_at_s=9_000.0))  # resumed
    (root() / "b" / "run.json").write_text("{")
    (root() / "c" / "run.json").unlink()
    (root() / "e").mkdir()
    (root() / "file").touch()
    (root() / ".new-1").mkdir()
    create(spec_of("f", max_restarts=1))
    (root() / "f" / "run.json").write_bytes(
        msgspec.json.encode({**msgspec.to_builtins(spec_of("f")), "max_restarts": -1})
    )

    runs = all_runs()

    assert [run.name for run in runs.found] == ["a", "d"]
    assert sorted(runs.unreadable) == ["b", "c", "e", "f"]
    assert "has an invalid run.json" in runs.unreadable["b"]
    assert "has no run.json" in runs.unreadable["c"]
    assert "max_restarts=-1 is not a number of restarts" in runs.unreadable["f"]
    with pytest.raises(ConfigError, match="delete the directory"):
        open_run("b")


def test_another_spec_keeps_the_name_and_the_age() -> None:
    run = create(spec_of())
    os.utime(run.path / "run.json", (1_000, 1_000))

    run.write_spec(spec_of("other", workers=Size(4, 4)))

    assert open_run("first").spec == spec_of(workers=Size(4, 4)) == run.spec
    assert run.created_at_s == 1_000


# -- status ------------------------------------------------------------------------------------------------------------


def test_a_status_is_read_as_written() -> None:
    run = create(spec_of())
    assert run.status is None

    status = status_of(step=7, attempt=2, world_size=4, num_restarts=2, exit_code=1, control="/tmp/x/control")
    run.write_status(status)

    assert open_run("first").status == status


def test_a_reader_never_finds_half_a_status() -> None:
    run = create(spec_of())
    run.write_status(status_of())
    is_over = threading.Event()

    def write() -> None:
        for step in range(200):
            run.write_status(status_of(step=step, reason="x" * (step * 10)))
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        steps = []
        while not is_over.is_set():
            found = run.status
            assert found is not None
            steps.append(found.step)
    finally:
        writer.join()
    assert steps == sorted(steps)


@pytest.mark.parametrize("text", ["", "{", '{"state": "sideways"}', "[]", "\0" * 100, "x" * 100_000])
def test_an_empty_status_after_a_power_failure_is_none(text: str) -> None:
    run = create(spec_of())
    (run.path / "status.json").write_text(text)

    assert run.status is None
    assert state_now(run.status) == "interrupted"


def test_a_failed_write_is_logged_once_and_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    run = create(spec_of())
    (run.path / "status.json").mkdir()

    with caplog.at_level(logging.WARNING):
        run.write_status(status_of())
        run.write_status(status_of())

    assert [record.getMessage().split("(")[0] for record in caplog.records] == [f"cannot write {run.path}/status.json "]


# -- whether it lives --------------------------------------------------------------------------------------------------


def test_a_run_whose_agent_was_killed_is_interrupted() -> None:
    agent = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        status = status_of(pid=agent.pid, pid_started=started_ticks(agent.pid))
        assert is_alive(status)
        assert [state_now(msgspec.structs.replace(status, state=s)) for s in ("starting", "running", "stopping")] == [
            "starting",
            "running",
            "stopping",
        ]
        agent.kill()
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(status), "the agent is a zombie, not alive"
        assert state_now(status) == "interrupted"
    finally:
        agent.kill()
        agent.communicate()

    assert started_ticks(agent.pid) is None
    assert state_now(status) == "interrupted"
    assert state_now(msgspec.structs.replace(status, state="done")) == "done"


def test_another_process_of_the_same_number_is_not_the_agent() -> None:
    status = status_of()

    assert is_alive(status)
    assert not is_alive(msgspec.structs.replace(status, pid_started=status.pid_started + 1))
    assert not is_alive(msgspec.structs.replace(status, boot_id="of yesterday"))
    assert not is_alive(msgspec.structs.replace(status, pid=0))
    assert re.fullmatch(r"[0-9a-f-]{36}", boot_id())


def test_the_start_of_a_process_is_found_whatever_it_is_called() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (2 3'); print(flush=True); input()"
    odd = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert odd.stdout is not None
        odd.stdout.readline()
        assert Path(f"/proc/{odd.pid}/comm").read_text() == ") Z 1 (2 3\n"
        ours, theirs = started_ticks(os.getpid()), started_ticks(odd.pid)
        assert ours is not None
        assert theirs is not None
        assert ours < theirs
    finally:
        odd.communicate(b"\n")


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_sort_by_attempt_and_rank_after_a_change_of_size() -> None:
    run = create(spec_of(workers=Size(1, 4)))
    assert run.log_path(0, 3).relative_to(run.path) == Path("logs/attempt-000/rank-3.log")
    for attempt, rank in ((0, 3), (0, 0), (1_000, 0)):
        run.log_path(attempt, rank).touch()
    run.write_spec(spec_of(workers=Size(1, 16)))
    for rank in (10, 2):
        run.log_path(1, rank).touch()
    (run.path / "logs" / "attempt-001" / "core").touch()
    (run.path / "logs" / "notes.txt").touch()

    found = run.logs()

    assert [(log.attempt, log.rank) for log in found] == [(0, 0), (0, 3), (1, 2), (1, 10), (1_000, 0)]
    assert found[2].path.name == "rank-02.log"
    assert create(spec_of("empty")).logs() == []


def test_the_first_to_fail_is_found_by_what_was_noted() -> None:
    run = create(spec_of(workers=Size(2, 2)))
    for attempt in (0, 1):
        for rank in (0, 1):
            run.log_path(attempt, rank).touch()
    assert run.first_failure() is None
    run.note(event(attempt=0, rank=1, text="rank 1: exit code 1"))
    run.note(event(attempt=0, rank=0, text="rank 0: killed"))
    assert run.first_failure() is None, "no worker of the newest attempt has failed"

    run.note(event(attempt=1, text="rank 0: exit code 1"))

    assert [run.first_failure(0), run.first_failure(), run.first_failure(7)] == [run.logs()[1], run.logs()[2], None]


# -- events ------------------------------------------------------------------------------------------------------------


def test_events_are_read_in_the_order_in_which_they_were_noted() -> None:
    run = create(spec_of())
    assert run.events() == []

    noted = [event(what, step=step) for step, what in enumerate(("started", "checkpoint", "failed"))]
    for each in noted:
        run.note(each)

    assert open_run("first").events() == noted


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_line_that_was_cut_is_left_out_and_spoils_no_other(cut: int) -> None:
    run = create(spec_of())
    run.note(event("started"))
    run.note(event("failed"))
    path = run.path / "events.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:cut])

    run.note(event("finished"))

    kept = ["started", "failed", "finished"] if cut == -1 else ["started", "finished"]
    assert [each.what for each in run.events()] == kept


@given(st.text(max_size=3_000), st.text(max_size=100))
def test_a_line_of_an_event_is_bounded_whatever_is_in_it(text: str, what: str) -> None:
    run = create(spec_of(f"r{os.urandom(8).hex()}"))
    run.note(event(what, text=text * 10))

    (found,) = run.events()
    line = (run.path / "events.jsonl").read_bytes()
    assert len(line) <= MAX_EVENT_BYTES
    assert line.count(b"\n") == 1
    assert found.text.isprintable()


def test_of_very_many_events_the_last_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(spec_of())
    for step in range(100):
        run.note(event(step=step))
    monkeypatch.setattr(directory, "MAX_EVENTS_BYTES", 1_000)

    steps = [each.step for each in run.events()]

    assert 5 < len(steps) < 20
    assert steps == list(range(100 - len(steps), 100))


def test_a_reason_has_an_end() -> None:
    run = create(spec_of())
    run.write_status(status_of(reason="\x1b" * 100_000))

    assert run.status is not None
    assert len(run.status.reason) == MAX_REASON


# -- the lock ----------------------------------------------------------------------------------------------------------


def holder_of(run: RunDirectory) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from strata.launch.record.directory import open_run\n"
        f"with open_run({run.name!r}).lock(): print('mine', flush=True); sys.stdin.readline()"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_only_one_agent_holds_the_lock_and_a_killed_one_releases_it() -> None:
    run = create(spec_of())
    holder = holder_of(run)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mine\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} already runs first"), run.lock():
            pytest.fail("it had the lock")
    finally:
        holder.kill()
        holder.communicate()

    with run.lock(), pytest.raises(ConfigError, match=f"process {os.getpid()} "), open_run("first").lock():
        pass
    with run.lock():
        pass


def test_a_lock_is_let_go_of_when_what_it_was_for_fails() -> None:
    run = create(spec_of())
    with pytest.raises(RuntimeError, match="it failed"), run.lock():
        raise RuntimeError("it failed")

    with run.lock():
        pass


def test_the_end_of_a_remote_log_is_stored_and_a_local_log_is_not_touched() -> None:
    run = create(spec_of(workers=Size(2, 2)))
    run.log_path(0, 0).write_text("all of it\n")
    for rank in (0, 1):
        run.keep_log_end(0, rank, ["Traceback", "ValueError: bäd"])
    run.keep_log_end(1, 0, [])
    assert [(log.attempt, log.rank) for log in run.logs()] == [(0, 0), (0, 1)]
    assert run.log_path(0, 0).read_text() == "all of it\n"
    first, *others = run.log_path(0, 1).read_text().splitlines()
    assert "on another machine" in first
    assert others == ["Traceback", "ValueError: bäd"]


def test_the_final_state_is_written_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(spec_of("full"))
    run.write_status(status_of(state="running", step=5))

    def no_room(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory, "_replace", no_room)
    for reason in ("short", "ü" * MAX_REASON):
        run.write_status(status_of(state="failed", step=7, reason=reason, exit_code=1))

        found = run.status
        assert found is not None
        assert (found.state, found.step, found.exit_code) == ("failed", 7, 1)
        assert found.reason.startswith(reason[:100])
    assert (run.path / "status.json").stat().st_size == STATUS_BYTES, "it needs no more space than before"


def test_a_run_is_removed_completely_unless_it_is_locked() -> None:
    run = create(spec_of("old"))
    run.log_path(0, 0).write_text("words")
    with run.lock(), pytest.raises(ConfigError, match=f"process {os.getpid()} already runs old"):
        remove(run)
    remove(run)
    assert list(root().iterdir()) == []
    with pytest.raises(ConfigError, match="no such run"):
        open_run("old")


def test_an_ambiguous_prefix_is_refused_with_the_matching_names() -> None:
    for name in ("train", "train-a", "train-b"):
        create(spec_of(name))
    assert open_run("train").name == "train", "a whole name is never ambiguous"
    with pytest.raises(ConfigError, match="3 runs start with 'tr': train, train-a, train-b; type more of the name"):
        open_run("tr")
