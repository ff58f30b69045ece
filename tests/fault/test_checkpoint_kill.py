"""kill -9 at every boundary of a save: reported checkpoints exist, listed ones are intact, the next save cleans up.

A first process saves three checkpoints and reports every call that modifies the disk. For each of these calls, another
process does the same and is killed just before, during or just after that call. The page cache survives a kill, so
the order in which data becomes durable is checked separately, from the list of calls.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_children import (
    CALLS,
    SAVERS,
    STEPS,
    Ended,
    Parent,
    do_nothing,
    environment_of_savers,
    is_running,
    is_same,
    open_manager,
    order,
    save_beside,
    save_three,
    state_of,
    write_rounds,
)
from faulty_store import CHANGES, When
from s3 import S3Server, s3
from servers import until

from strata.checkpoint import CheckpointManager
from strata.errors import NoCheckpoint
from strata.storage.base import TEMPORARY

__all__ = ["s3"]  # a fixture

pytestmark = pytest.mark.timeout(180)  # starts hundreds of processes

NUM_BYTES = 40_000
TWO_HOURS_S = 7_200.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent() as parent:
        yield parent


@pytest.fixture(scope="module")
def calls(parent: Parent, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Return the calls of a process that is not killed, as (call, path)."""
    ended = parent.run(save_three, place=str(tmp_path_factory.mktemp("whole") / "new"), level="calls")
    assert ended.exit_code == 0, parent.log()
    assert list(ended.durable.values()) == [*STEPS]
    return [(name, path) for name, path in ended.calls]


@pytest.fixture
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip `fsync` in the checking process: these tests kill processes, not the kernel."""
    monkeypatch.setattr(os, "fsync", do_nothing)


# -- invariants after a kill -----------------------------------------------------------------------------------------


def check_listed(manager: CheckpointManager, durable: dict[str, int], *, num_bytes: int = NUM_BYTES) -> list[str]:
    """Check that listed checkpoints are intact, and that each reported one or a newer one is listed; return the ids."""
    listed = manager.list()
    assert manager.problems == {}
    for one in listed:
        manager.verify(id=one.id)
        assert is_same(manager.load(id=one.id), state_of(one.step, num_bytes=num_bytes))
    newest = listed[-1].step if listed else 0
    ids = [one.id for one in listed]
    assert all(one in ids or step < newest for one, step in durable.items()), (
        f"{durable} were reported, {ids} are listed"
    )
    if listed:
        assert manager.load()["step"] == newest
    else:
        with pytest.raises(NoCheckpoint):
            manager.load()
    return ids


def age(place: Path) -> None:
    """Set the modification times back by two hours."""
    then_s = time.time() - TWO_HOURS_S
    for directory, _, names in os.walk(place, topdown=False):
        for name in (*names, "."):
            os.utime(Path(directory, name), (then_s, then_s))


def temporaries(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob(f"{TEMPORARY}*"))


def check_recovers(place: Path, durable: dict[str, int]) -> None:
    """Check that a new process finds reported checkpoints, saves, and deletes old leftovers but no recent ones."""
    with open_manager(str(place)) as manager:
        before = check_listed(manager, durable)
        left = temporaries(place)
        manager.save(state_of(8), step=8).wait()
        manager.wait()
        assert temporaries(place) == left, "recent temporary files may belong to a live writer"
        age(place)
        manager.save(state_of(9), step=9).wait()
        manager.wait()
        after = check_listed(manager, durable)
        assert after[: len(before)] == before
        assert [one.step for one in manager.list()][len(before) :] == [8, 9]
    directories = sorted(path.name for path in place.iterdir())
    assert directories == sorted(after), "the killed process left files"
    in_checkpoints = temporaries(place)
    with open_manager(str(place), keep_count=1) as manager:
        manager.save(state_of(10), step=10).wait()
        manager.wait()
        assert [one.step for one in manager.list()] == [10]
    assert len(in_checkpoints) <= 1, "only the second name of a manifest may remain"
    assert temporaries(place) == []
    assert len(list(place.iterdir())) == 1


# -- on a disk: kills at every system call -----------------------------------------------------------------------------


def test_the_harness_sees_every_kind_of_call(calls: list[tuple[str, str]]) -> None:
    """Otherwise the tests below would prove little."""
    assert {name for name, _ in calls} == set(CALLS)
    num_pieces = sum(name == "pwrite" and "manifest" not in path for name, path in calls)
    assert num_pieces > 3 * len(STEPS)


def is_another_state(calls: list[tuple[str, str]], number: int, name: str, when: When) -> bool:
    """Return whether a kill here leaves a state on disk that no other kill leaves.

    Only a write has a middle. The state after a call is the state before the next one, unless another thread makes that
    call, which may happen at any time. Of two kills in the same state, the later one is the stricter test, because more
    may have been reported by then.
    """
    if when == "after":
        return number + 1 == len(calls) or "pwrite" in (name, calls[number + 1][0])
    return when == "before" or name == "pwrite"


@pytest.mark.usefixtures("no_power_cuts")
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_process_that_is_killed_at_any_call_loses_nothing_that_was_reported(
    tmp_path: Path, parent: Parent, calls: list[tuple[str, str]], when: When
) -> None:
    wrong = []
    numbers = [n for n, (name, _) in enumerate(calls) if is_another_state(calls, n, name, when)]
    for number in numbers:
        place = tmp_path / str(number)
        ended = parent.run(save_three, place=str(place), level="calls", number=number, when=when)
        assert ended.exit_code == -signal.SIGKILL, f"{calls[number]}: {parent.log()}"
        place.mkdir(exist_ok=True)  # the process may have died before creating it
        try:
            check_recovers(place, ended.durable)
        except AssertionError as error:
            wrong.append(f"{when} call {number}, {calls[number]}: {error}")
    assert wrong == [], f"{len(wrong)} of {len(numbers)}"


@pytest.mark.usefixtures("no_power_cuts")
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_process_that_is_killed_while_it_writes_statistics_loses_nothing(
    tmp_path: Path, parent: Parent, when: When
) -> None:
    """Statistics are written in idle time, so the numbering of the calls varies between runs."""
    whole = parent.run(save_three, place=str(tmp_path / "whole"), level="calls", statistics=True)
    assert whole.exit_code == 0, parent.log()
    numbers = [n for n, (name, path) in enumerate(whole.calls) if name == "rename" and "statistics" in path]
    assert len(numbers) == len(STEPS)
    for number in range(numbers[1] - 3, numbers[1] + 2):
        place = tmp_path / str(number)
        arguments = {"level": "calls", "number": number, "when": when, "statistics": True}
        ended = parent.run(save_three, place=str(place), **arguments)
        assert ended.exit_code == -signal.SIGKILL, parent.log()
        check_recovers(place, ended.durable)


def test_a_manifest_is_published_only_when_its_files_would_survive_a_power_cut(
    calls: list[tuple[str, str]],
) -> None:
    for at, (_, manifest) in ((n, call) for n, call in enumerate(calls) if call[0] == "link"):
        directory = str(Path(manifest).parent)
        before = calls[:at]
        last_write = max(n for n, (name, path) in enumerate(before) if name in ("pwrite", "ftruncate"))
        named = max(n for n, (name, path) in enumerate(before) if name == "rename" and path.startswith(directory))
        data_writes = [n for n, call in enumerate(before[:named]) if call[0] in ("pwrite", "ftruncate")]
        assert "fsync" in [name for name, _ in before[max(data_writes) : named]], "sync the data before the rename"
        assert ("fsync", directory) in before[named:], "sync the directory after the rename"
        assert any(name == "fsync" for name, _ in before[last_write:]), "sync the manifest before the link"
        made = [n for n, call in enumerate(before) if call == ("mkdir", directory)]
        assert ("fsync", str(Path(directory).parent)) in before[made[-1] :], "sync the parent of a new directory"


def test_nothing_older_is_deleted_before_the_new_checkpoint_would_survive_a_power_cut(
    calls: list[tuple[str, str]],
) -> None:
    removed = set()
    for at, (name, path) in enumerate(calls):
        if name != "unlink" or TEMPORARY in path:
            continue
        removed.add(Path(path).parent)
        committed = max(n for n, call in enumerate(calls[:at]) if call[0] == "link")
        assert ("fsync", str(Path(calls[committed][1]).parent)) in calls[committed:at]
    assert len(removed) == len(STEPS) - 1


def test_a_deletion_removes_the_manifest_first(calls: list[tuple[str, str]]) -> None:
    removed = [path for name, path in calls if name == "unlink" and TEMPORARY not in path]
    by_directory: dict[str, list[str]] = {}
    for path in removed:
        by_directory.setdefault(str(Path(path).parent), []).append(Path(path).name)
    assert len(by_directory) == len(STEPS) - 1
    assert all(names[0] == "manifest.json" for names in by_directory.values())


def test_an_old_second_name_of_a_manifest_is_removed_too(
    tmp_path: Path, parent: Parent, calls: list[tuple[str, str]]
) -> None:
    """A process killed between linking the manifest and unlinking its temporary name leaves both names."""
    place = tmp_path / "new"
    number = next(n for n, (name, _) in enumerate(calls) if name == "link")
    ended = parent.run(save_three, place=str(place), level="calls", number=number, when="after")
    if len(temporaries(place)) != 1:
        pytest.fail("the process was killed at another call")
    age(place)
    with open_manager(str(place)) as manager:
        manager.save(state_of(9), step=9).wait()
        manager.wait()
        if check_listed(manager, ended.durable) == []:
            pytest.fail("the checkpoint was lost")
    assert temporaries(place) == []


# -- kills of a saver process or its trainer ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saver_calls(parent: Parent, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the calls that a saver makes up to the commit, if it is not killed."""
    directory = tmp_path_factory.mktemp("saver")
    environment = environment_of_savers(directory / "customs")
    (directory / "place").mkdir()  # as after a first save
    ended = parent.run(save_beside, place=str(directory / "place"), environment=environment)
    assert ended.exit_code == 0, parent.log()
    assert list(ended.durable.values()) == [2]
    found = [line.split()[0] for line in notes_of(directory / "customs")[1:]]
    return found[: found.index("link") + 3]


def has_ended(pid: int) -> bool:
    return not is_running(pid)


def notes_of(customs: Path) -> list[str]:
    """Return the saver's process id, then its calls."""
    return (customs / "notes").read_text().splitlines()


def sampled(calls: list[str], when: When) -> list[int]:
    """Return the last call of each kind, because every kill costs the start of an interpreter.

    A kill after a call is left out if the sample contains the next call: a kill before that one leaves the same state.
    """
    if when == "half":
        return [max(n for n, name in enumerate(calls) if name == "pwrite")]
    numbers = sorted({name: n for n, name in enumerate(calls)}.values())
    return numbers if when == "before" else [n for n in numbers if n + 1 not in numbers]


@pytest.mark.usefixtures("no_power_cuts")
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_when_the_saver_is_killed_another_one_writes_the_staged_snapshot(
    tmp_path: Path, parent: Parent, saver_calls: list[str], when: When
) -> None:
    for number in sampled(saver_calls, when):
        place, customs = tmp_path / str(number), tmp_path / f"customs-{number}"
        first = save_first(place)
        environment = environment_of_savers(customs, number=number, when=when)
        ended = parent.run(save_beside, place=str(place), environment=environment)
        assert ended.exit_code == 0, parent.log()
        assert len(notes_of(customs)) >= number + 2, "the saver was not killed at this call"
        assert list(ended.durable.values()) == [2]
        check_recovers(place, {first: 1, **ended.durable})


@pytest.mark.usefixtures("no_power_cuts")
def test_when_every_saver_is_killed_the_save_fails_and_the_next_one_works(
    tmp_path: Path, parent: Parent, saver_calls: list[str]
) -> None:
    place = tmp_path / "place"
    first = save_first(place)
    environment = environment_of_savers(tmp_path / "customs", number=saver_calls.index("rename"), when="before")
    ended = parent.run(save_beside, place=str(place), environment=environment, always=True)
    assert ended.exit_code == 0, parent.log()
    assert len(ended.failed) == 1
    assert "CheckpointAborted: the saver process has exited (killed by signal 9)" in ended.failed[0]
    assert list(ended.durable.values()) == [3]
    with open_manager(str(place)) as manager:
        check_listed(manager, {first: 1, **ended.durable})
        assert [one.step for one in manager.list()] == [1, 3]


@pytest.mark.usefixtures("no_power_cuts")
def test_old_temporary_files_of_a_killed_saver_are_removed(
    tmp_path: Path, parent: Parent, saver_calls: list[str]
) -> None:
    place = tmp_path / "place"
    save_first(place)
    environment = environment_of_savers(tmp_path / "customs", number=saver_calls.index("rename"), when="before")
    ended = parent.run(save_beside, place=str(place), environment=environment)
    if list(ended.durable.values()) != [2]:
        pytest.fail(parent.log())
    age(place)
    with open_manager(str(place)) as manager:
        manager.save(state_of(9), step=9).wait()
        manager.wait()
    assert [(place / one).stat().st_size for one in temporaries(place)] == []


def save_first(place: Path) -> str:
    with open_manager(str(place)) as manager:
        return manager.save(state_of(1), step=1).wait().id


@pytest.mark.usefixtures("no_power_cuts")
@pytest.mark.parametrize("when", ["before", "after"])
def test_when_the_trainer_is_killed_the_staged_snapshot_becomes_durable(
    tmp_path: Path, parent: Parent, saver_calls: list[str], when: When
) -> None:
    for number in sampled(saver_calls, when):
        place, customs = tmp_path / str(number), tmp_path / f"customs-{number}"
        first = save_first(place)
        environment = environment_of_savers(customs, number=number, when=when, victim="trainer")
        ended = parent.run(save_beside, place=str(place), environment=environment)
        assert ended.exit_code == -signal.SIGKILL, parent.log()
        saver = int(notes_of(customs)[0])
        until(partial(has_ended, saver), "the saver has finished and exited")
        with open_manager(str(place)) as manager:
            assert [one.step for one in manager.list()] == [1, 2]
            check_listed(manager, {first: 1})
        assert temporaries(place) == []


# -- kills at every call of a store ------------------------------------------------------------------------------------


def changes(ended: Ended) -> list[tuple[int, str, str]]:
    return [(number, kind, key) for number, kind, key in ended.calls if kind in CHANGES]


@pytest.mark.usefixtures("no_power_cuts")
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_process_that_is_killed_at_any_call_of_the_store_loses_nothing_that_was_reported(
    tmp_path: Path, parent: Parent, when: When
) -> None:
    whole = parent.run(save_three, place=str(tmp_path / "whole"), level="store")
    assert whole.exit_code == 0, parent.log()
    assert {kind for _, kind, _ in changes(whole)} == set(CHANGES)
    for number, kind, _ in changes(whole):
        if when == "half" and kind == "put":
            continue  # a small object is written in one piece
        place = tmp_path / str(number)
        place.mkdir()
        ended = parent.run(save_three, place=str(place), level="store", number=number, when=when)
        assert ended.exit_code == -signal.SIGKILL, parent.log()
        check_recovers(place, ended.durable)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_call_loses_nothing_on_s3(s3: S3Server, parent: Parent) -> None:
    """This includes kills during an upload: listings do not show its parts, and a lifecycle rule deletes them."""
    num_bytes = 12 * MIB
    options = s3.options(piece_bytes=5 * MIB, concurrency=2, max_retries=3)
    arguments: dict[str, Any] = {"storage_options": options, "level": "store", "num_bytes": num_bytes}
    whole = parent.run(save_three, place=s3.new_url(), **arguments)
    assert whole.exit_code == 0, parent.log()
    second = [(n, kind) for n, kind, key in changes(whole) if "step-000000000002" in key or kind == "delete"]
    for number, kind in second[:4]:  # the data, the manifest, and the deletion of the first checkpoint
        for when in ("before", "half", "after") if kind == "put_large" else ("before", "after"):
            place = s3.new_url()
            ended = parent.run(save_three, place=place, number=number, when=when, **arguments)
            assert ended.exit_code == -signal.SIGKILL, parent.log()
            assert 1 in ended.durable.values()
            assert 2 not in ended.durable.values() or kind == "delete"
            with open_manager(place, storage_options=options) as manager:
                check_listed(manager, ended.durable, num_bytes=num_bytes)
                manager.save(state_of(9, num_bytes=num_bytes), step=9).wait()
                assert manager.load()["step"] == 9


# -- two writers -------------------------------------------------------------------------------------------------------

NUM_ROUNDS = 20


def test_two_processes_that_save_the_same_steps_at_once_both_commit(tmp_path: Path, parent: Parent) -> None:
    _write_both(parent, tmp_path, keep_count=None)
    ended = parent.end()
    assert [one.exit_code for one in ended] == [0, 0], parent.log()
    with open_manager(str(tmp_path)) as manager:
        listed = {one.id: one.step for one in manager.list()}
        assert listed == {**ended[0].durable, **ended[1].durable}
        assert sorted(listed.values()) == sorted([*range(1, NUM_ROUNDS + 1)] * 2)
        for one, step in listed.items():
            manager.verify(id=one)
            writer = "one" if one in ended[0].durable else "other"
            assert is_same(manager.load(id=one), state_of(step, writer=writer))
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("keep_count", [None, 3])
def test_while_two_processes_save_the_same_steps_a_third_can_load_at_any_moment(
    tmp_path: Path, parent: Parent, keep_count: int | None
) -> None:
    """With `keep_count=3`, retention does not delete the checkpoint that is being read."""
    with open_manager(str(tmp_path)) as manager:
        manager.save(state_of(0), step=0).wait()
        _write_both(parent, tmp_path, keep_count=keep_count)
        newest, num_loads = 0, 0
        while newest < NUM_ROUNDS:
            state = manager.load()
            assert is_same(state, state_of(state["step"], writer=state["writer"]))
            assert state["step"] >= newest, "load() returned an older checkpoint than before"
            newest, num_loads = state["step"], num_loads + 1
        assert num_loads > NUM_ROUNDS // 2
        ended = parent.end()
        assert [one.exit_code for one in ended] == [0, 0], parent.log()
        for one in manager.list():
            manager.verify(id=one.id)
        assert manager.list()[-1].step == NUM_ROUNDS


def _write_both(parent: Parent, place: Path, *, keep_count: int | None) -> None:
    parent.begin(
        *(
            order(
                write_rounds,
                place=str(place),
                writer=writer,
                num_rounds=NUM_ROUNDS,
                saver=SAVERS[-1],
                keep_count=keep_count,
            )
            for writer in ("one", "other")
        )
    )
