"""`strata ps` and `strata logs`: text and JSON output; the script of `strata run`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from strata.cli import runs
from strata.cli.run import script_path
from strata.cli.runs import LogSelection, age, read_logs, recent
from strata.coordinator.state.server_figures import ServerFigures
from strata.errors import ConfigError
from strata.launch.record.directory import RunDirectory, RunStatus, create, root
from strata.launch.record.timeline import RunEvent
from strata.launch.spec import RunSpec, Size

app = typer.Typer()
app.command("ps")(runs.ps)
app.command("logs")(runs.logs)


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path / "runs"))


def a_run(name: str = "first", workers: int = 1, **fields: object) -> RunDirectory:
    spec = RunSpec(name=name, script="/work/train.py", directory="/work", checkpoints="/c", workers=Size(1, workers))
    return create(msgspec.structs.replace(spec, **fields))


def put(run: RunDirectory, state: str, **fields: object) -> None:
    run.write_status(msgspec.structs.replace(RunStatus.of_this_process(now_s=1.0), state=state, **fields))


def log(run: RunDirectory, attempt: int, rank: int, text: str) -> None:
    with run.log_path(attempt, rank).open("a", encoding="utf-8") as file:
        file.write(text)


def fail(run: RunDirectory, attempt: int, rank: int, text: str) -> None:
    run.note(RunEvent(at_s=1.0, monotonic_s=1.0, what="failed", text=text, attempt=attempt, rank=rank))


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments: str) -> str:
    error = CliRunner().invoke(app, list(arguments)).exception
    assert isinstance(error, ConfigError)
    return error.message


# -- ps ----------------------------------------------------------------------------------------------------------------


def test_ps_lists_runs_newest_first_with_state_and_command() -> None:
    for number, (name, state) in enumerate((("old", "failed"), ("dead", "running"), ("new", "running"))):
        run = a_run(name, workers=4, arguments=("--lr", "0.1", "two words"))
        os.utime(run.path / "run.json", (1_000 + number, 1_000 + number))
        pid = 0 if name == "dead" else os.getpid()
        put(run, state, step=120, world_size=2, num_restarts=3 if state == "failed" else 1, pid=pid)

    lines = call("ps").stdout.splitlines()

    assert lines[0].split() == ["name", "state", "workers", "step", "restarts", "age", "script"]
    assert [line.split()[:2] for line in lines[1:]] == [["new", "running"], ["dead", "interrupted"], ["old", "failed"]]
    assert lines[1].split()[2:7] == ["2", "120", "1", "of", "3"]
    assert lines[3].split()[4:7] == ["3", "of", "3"]
    assert lines[1].endswith("train.py --lr 0.1 'two words'")


def test_ps_json_prints_one_object_per_line_without_environment_variables() -> None:
    run = a_run(workers=4, variables={"TOKEN": "secret"}, script="pack.train", is_module=True)
    a_run("second")
    put(run, "done", step=7, exit_code=0, reason="4 workers are done")

    result = call("ps", "--json")
    rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}

    assert "secret" not in result.output
    assert (rows["first"]["state"], rows["first"]["step"], rows["first"]["exit_code"]) == ("done", 7, 0)
    assert rows["first"]["command"] == "-m pack.train"
    assert rows["first"]["path"] == str(run.path)
    assert rows["second"]["state"] == "interrupted", "it was created, but no agent runs it"


def test_ps_lists_the_last_ten_ended_runs_unless_all_is_given() -> None:
    for number in range(13):
        run = a_run(f"run-{number:02}")
        os.utime(run.path / "run.json", (1_000 + number, 1_000 + number))
        put(run, "running" if number == 0 else "done", started_at_s=0.0)

    output = call("ps").stdout

    assert [line.split()[0] for line in output.splitlines()[1:-1]] == [
        *(f"run-{number:02}" for number in range(12, 2, -1)),
        "run-00",
    ]
    assert output.splitlines()[-1] == "2 older runs not shown; strata ps --all lists all"
    assert len(call("ps", "--all").stdout.splitlines()) == 14
    assert len(call("ps", "--json").stdout.splitlines()) == 11
    assert recent([]) == []


def test_ps_prints_where_it_looked_and_reports_damaged_runs_on_stderr() -> None:
    assert call("ps").stdout == f"no runs in {root()}\n"
    assert call("ps", "--json").stdout == ""
    a_run("good")
    (root() / "bad\x1b[2J").mkdir(parents=True)

    result = call("ps", "--json")

    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.startswith(f"skipped: {root()}/bad\\x1b[2J has no run.json; ")


def test_an_age_is_one_number_and_a_unit() -> None:
    assert [age(s) for s in (-5, 0, 59, 60, 3_599, 3_600, 86_400, 1e6)] == [
        "0s",
        "0s",
        "59s",
        "1m",
        "59m",
        "1h",
        "1d",
        "11d",
    ]


# -- logs --------------------------------------------------------------------------------------------------------------


def test_the_log_of_one_worker_is_printed_without_control_sequences() -> None:
    log(a_run(), 0, 0, "\x1b[31mstep 1\x1b[0m\n 10%\r 20%\r\nlast, without an end")

    assert call("logs", "first").output == "step 1\n 20%\nlast, without an end\n"


def test_with_several_workers_each_line_starts_with_the_rank() -> None:
    run = a_run(workers=12)
    for rank in range(11):
        log(run, 0, rank, "old\n")
        log(run, 1, rank, f"a{rank}\nb{rank}\n")

    lines = call("logs", "first").stdout.splitlines()

    assert lines[:13] == [*(f"[{rank:2}] old" for rank in range(11)), "[ 0] a0", "[ 0] b0"]
    assert lines[-1] == "[10] b10"
    assert call("logs", "fir", "--rank", "3").output == "old\nattempt 1\na3\nb3\n"
    assert call("logs", "fir", "--rank", "3", "--attempt", "1").stdout == "a3\nb3\n"
    assert call("logs", "first", "--rank", "3", "--attempt", "0").output == "old\n"
    assert call("logs", "first", "--rank", "3", "-n", "1").stdout == "old\nb3\n"
    assert call("logs", "first", "--rank", "3", "-n", "0").output == ""


def test_the_worker_that_failed_first_comes_first() -> None:
    run = a_run(workers=3)
    put(run, "failed")
    for rank in range(3):
        log(run, 2, rank, f"words of {rank}\n")
    fail(run, 2, 1, "rank 1: exit code 1: ValueError: bad [row]")
    fail(run, 2, 0, "rank 0: killed")

    result = call("logs", "first")

    assert result.stdout.splitlines() == ["[1] words of 1", "[0] words of 0", "[2] words of 2"]
    assert result.stderr == "attempt 2 failed: rank 1: exit code 1: ValueError: bad [row]\n"
    assert call("logs", "first", "--rank", "0").stdout == "words of 0\n"


def test_a_missing_rank_or_attempt_is_refused_with_the_existing_ones() -> None:
    run = a_run(workers=4)
    assert refusal("logs", "first") == "run first has no logs; its workers were never started"
    for rank in range(4):
        log(run, 1, rank, "x\n")

    assert refusal("logs", "first", "--rank", "4") == "run first has no rank 4; it has 0 to 3"
    assert refusal("logs", "first", "--attempt", "0") == "run first has no attempt 0; it has 1"
    assert "did you mean first?" in refusal("logs", "frist")


def test_following_an_ended_run_returns_at_once() -> None:
    run = a_run()
    put(run, "running", pid=0)
    log(run, 0, 0, "last words")

    assert call("logs", "first", "-f").output == "last words\n"


def test_a_very_long_line_is_split_and_a_log_of_many_blocks_is_complete() -> None:
    log(a_run(), 0, 0, "x" * (3 << 20) + "\n" + "".join(f"line {n}\n" for n in range(200_000)))

    lines = call("logs", "first").output.splitlines()

    assert sum(len(line) for line in lines if line.startswith("x")) == 3 << 20
    assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(200_000)]


# -- following ---------------------------------------------------------------------------------------------------------


def follow(run: RunDirectory, selection: LogSelection, *pauses: Callable[[], None]) -> list[str]:
    """Return the lines read, as `attempt/rank: line`; each pause runs the next of `pauses`."""
    left: Iterator[Callable[[], None]] = iter(pauses)

    def pause() -> None:
        happens = next(left)
        happens()

    found = read_logs(run, selection._replace(is_followed=True), pause=pause)
    followed = [f"{log.attempt}/{log.rank}: {line}" for log, lines in found for line in lines]
    assert list(left) == []
    return followed


def test_following_reads_every_line_until_the_run_ends() -> None:
    run = a_run(workers=2)
    put(run, "starting")

    def ends() -> None:
        log(run, 0, 0, " end\nlast")
        put(run, "done")

    followed = follow(
        run,
        LogSelection(),
        lambda: log(run, 0, 0, "one\ntwo\nthe"),
        lambda: log(run, 0, 1, "other\n"),
        lambda: None,
        ends,
    )

    assert followed == ["0/0: one", "0/0: two", "0/1: other", "0/0: the end", "0/0: last"]


def test_following_continues_with_the_next_attempts() -> None:
    run = a_run(workers=2)
    put(run, "running")
    log(run, 0, 0, "before\n")
    log(run, 1, 0, "a\nb\nc\n")

    def fails_twice() -> None:
        log(run, 1, 0, "Error")
        log(run, 2, 0, "Error again\n")
        log(run, 3, 0, "d\ne\n")

    followed = follow(run, LogSelection(num_lines=1), fails_twice, lambda: put(run, "stopped"))

    assert followed == ["0/0: before", "1/0: c", "1/0: Error", "2/0: Error again", "3/0: d", "3/0: e"]


def test_following_one_attempt_ends_with_that_attempt() -> None:
    run = a_run(workers=2)
    put(run, "running")
    log(run, 0, 1, "a\n")

    def next_attempt() -> None:
        log(run, 0, 1, "b")
        log(run, 1, 1, "not wanted\n")

    assert follow(run, LogSelection(attempt=0, rank=1), next_attempt) == ["0/1: a", "0/1: b"]


def test_following_ends_if_the_agent_is_killed_or_the_run_is_removed() -> None:
    run = a_run()
    put(run, "running")
    log(run, 0, 0, "a\n")

    def remove() -> None:
        run.log_path(0, 0).unlink()
        (run.path / "status.json").unlink()

    assert follow(run, LogSelection(), lambda: put(run, "running", pid=0)) == ["0/0: a"]
    put(run, "running")
    assert follow(run, LogSelection(), remove) == ["0/0: a"]


# -- parameter servers -------------------------------------------------------------------------------------------------


def with_servers() -> RunDirectory:
    run = a_run("hybrid", workers=4, num_servers=2)
    figures = ServerFigures(rows=50_000, bytes=2_854_288, evicted=0, pulls_per_s=290.7, staleness=1, hits=75, misses=25)
    put(run, "running", world_size=4, num_servers=2, servers=figures)
    return run


def test_ps_counts_servers_apart_and_shows_what_they_hold() -> None:
    with_servers()
    a_run("plain")
    heading, plain, hybrid = call("ps").stdout.splitlines()
    assert heading.split() == ["name", "state", "workers", "servers", "step", "restarts", "age", "script"]
    assert "  2  2: 50,000 rows, 2.7 MiB, 291 pulls/s  " in hybrid
    assert "rows" not in plain
    found = json.loads(call("ps", "--json").stdout.splitlines()[1])
    assert (found["world_size"], found["num_servers"]) == (4, 2)
    assert found["servers"] == {
        "rows": 50_000,
        "bytes": 2_854_288,
        "evicted": 0,
        "pulls_per_s": 290.7,
        "staleness": 1,
        "hits": 75,
        "misses": 25,
        "hit_rate": 0.75,
    }


def test_logs_name_servers_and_select_one_by_its_number() -> None:
    run = with_servers()
    for rank in range(4):
        log(run, 0, rank, f"line of {rank}\n")
    put(run, "done", world_size=4, num_servers=2)
    assert call("logs", "hybrid").stdout.splitlines() == [
        *("[0] line of 0", "[1] line of 1", "[server 0] line of 2", "[server 1] line of 3")
    ]
    assert call("logs", "hybrid", "--server", "1").stdout == "line of 3\n"
    assert refusal("logs", "hybrid", "--server", "2") == "run hybrid has no server 2; it has servers 0 to 1"
    assert "either --rank or --server" in refusal("logs", "hybrid", "--server", "0", "--rank", "2")


def test_a_directory_in_place_of_a_script_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory; name the script in it, such as .*train\.py"):
        script_path(str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist; to run a module, use strata run -m"):
        script_path(str(tmp_path / "none"))
