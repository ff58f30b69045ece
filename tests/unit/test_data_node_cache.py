"""The node cache of several members, whose locks are as independent within a process as between two."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from strata.clock import ManualClock
from strata.data.shared import cache as node_cache
from strata.data.shared import keeper
from strata.data.shared.cache import COPY_BYTES, Claim, NodeCache
from strata.data.shared.eviction import MIN_WAIT_S

KEY = "0" * 40
BIG = COPY_BYTES * 2
"""An entry that is mapped, not copied."""


class Machine:
    """Members of one cache, with a clock that advances while they wait."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.path = node_cache.directory_for(max_bytes, root)
        self.max_bytes = max_bytes
        self.clock = ManualClock()
        self.while_waiting: list[Callable[[], None]] = []
        self.members: list[NodeCache] = []

    def pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.while_waiting:
            self.while_waiting.pop(0)()

    def member(self) -> NodeCache:
        made = NodeCache(self.path, max_bytes=self.max_bytes, now_s=self.clock.monotonic_s, pause=self.pause)
        self.members.append(made)
        return made

    def names(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.path.glob(f"*{suffix}"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(NodeCache, "_start_keeper", lambda _: None)
    machine = Machine(tmp_path, 8 * BIG)
    yield machine
    for member in machine.members:
        member.leave()


def fill(member: NodeCache, key: str, data: bytes) -> pa.Buffer | None:
    claim = member.claim(key, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    return member.publish(claim, len(data), lambda fd: write(fd, data))


def write(fd: int, data: bytes) -> None:
    assert os.pwrite(fd, data, 0) == len(data)


@pytest.mark.parametrize("size", [100, BIG])
def test_an_entry_is_made_once_and_read_by_all(machine: Machine, size: int) -> None:
    data = os.urandom(size)
    assert fill(machine.member(), KEY, data) == pa.py_buffer(data)
    found = machine.member().claim(KEY, MIN_WAIT_S)
    assert isinstance(found, pa.Buffer)
    assert found.to_pybytes() == data
    assert machine.names(".draft") == []


def test_a_process_waits_for_the_one_that_has_begun(machine: Machine) -> None:
    first, second = machine.member(), machine.member()
    claim = first.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    machine.while_waiting = [lambda: None, lambda: first.publish(claim, 3, lambda fd: write(fd, b"abc"))]
    found = second.claim(KEY, MIN_WAIT_S)
    assert isinstance(found, pa.Buffer)
    assert found.to_pybytes() == b"abc"


def test_a_claim_that_is_given_up_goes_to_the_next(machine: Machine) -> None:
    first, second = machine.member(), machine.member()
    claim = first.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    machine.while_waiting = [lambda: first.abandon(claim)]
    assert isinstance(second.claim(KEY, MIN_WAIT_S), Claim)


def test_the_draft_of_a_killed_process_is_replaced_at_once(machine: Machine) -> None:
    first, second = machine.member(), machine.member()
    claim = first.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    os.pwrite(claim.draft.fd, b"half", 0)
    claim.draft.close()  # as the kernel does
    before_s = machine.clock.monotonic_s()
    assert fill(second, KEY, b"whole") == pa.py_buffer(b"whole")
    assert machine.clock.monotonic_s() == before_s


def test_the_claim_of_a_stopped_process_is_taken_over_and_it_publishes_nothing_afterwards(machine: Machine) -> None:
    stopped, second = machine.member(), machine.member()
    claim = stopped.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    began_s = machine.clock.monotonic_s()
    later = second.claim(KEY, MIN_WAIT_S)
    assert isinstance(later, Claim)
    assert MIN_WAIT_S <= machine.clock.monotonic_s() - began_s < 2 * MIN_WAIT_S

    assert stopped.publish(claim, 3, lambda fd: write(fd, b"old")) is None
    assert machine.names(".entry") == []
    second.publish(later, 3, lambda fd: write(fd, b"new"))
    assert machine.member().get(KEY) == pa.py_buffer(b"new")


def test_a_process_that_stopped_between_writing_and_publishing_does_not_publish_over_its_successor(
    machine: Machine,
) -> None:
    stopped, second = machine.member(), machine.member()
    claim = stopped.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)

    def written_and_stopped(fd: int) -> None:
        write(fd, b"old")
        fill(second, KEY, b"new")

    assert stopped.publish(claim, 3, written_and_stopped) == pa.py_buffer(b"old")
    assert machine.member().get(KEY) == pa.py_buffer(b"new")
    assert len(machine.names(".entry")) == 1


def test_a_wait_ends_with_the_pass(machine: Machine) -> None:
    first, second = machine.member(), machine.member()
    claim = first.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    assert second.claim(KEY, MIN_WAIT_S, lambda: True) is None
    assert machine.names(".draft") == [f"{KEY}.draft"], "the claim of the first process stays"


def test_the_least_recently_used_entry_makes_room(machine: Machine) -> None:
    member = machine.member()
    keys = [f"{number:040}" for number in range(9)]
    for number, key in enumerate(keys[:8]):
        fill(member, key, b"x" * BIG)
        os.utime(machine.path / f"{key}.entry", ns=(number, number))
    gc.collect()  # unmap them
    assert member.get(keys[0]) is not None
    gc.collect()
    fill(member, keys[8], b"x" * BIG)
    assert machine.names(".entry") == [f"{key}.entry" for key in (keys[0], *keys[2:])]


def test_a_mapped_entry_stays_and_a_new_one_that_finds_no_room_is_not_shared(machine: Machine) -> None:
    member = machine.member()
    held = [fill(member, f"{number:040}", bytes([number]) * BIG) for number in range(8)]
    claim = member.claim("f" * 40, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    assert member.publish(claim, BIG, lambda fd: write(fd, b"y" * BIG)) is None
    assert [each.to_pybytes()[:1] for each in held if each is not None] == [bytes([number]) for number in range(8)]
    assert len(machine.names(".entry")) == 8
    assert machine.names(".draft") == []


def test_an_evicted_entry_stays_valid_for_a_process_that_has_mapped_it(machine: Machine) -> None:
    data = os.urandom(BIG)
    held = fill(machine.member(), KEY, data)
    machine.member().discard(KEY)
    assert held == pa.py_buffer(data)
    assert machine.names(".entry") == []


def test_an_entry_larger_than_the_limit_is_not_shared(machine: Machine) -> None:
    member = machine.member()
    fill(member, KEY, b"small")
    claim = member.claim("f" * 40, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    assert member.publish(claim, machine.max_bytes + 1, lambda fd: write(fd, b"")) is None
    assert member.get(KEY) is not None, "nothing was evicted for it"


def test_a_full_file_system_makes_an_entry_private(machine: Machine) -> None:
    member = machine.member()
    claim = member.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    assert member.publish(claim, 10, full) is None
    assert machine.names(".draft") == []
    assert fill(member, KEY, b"later") == pa.py_buffer(b"later")


def test_room_that_killed_processes_had_reserved_is_found_again(machine: Machine) -> None:
    member = machine.member()
    for number in range(8):
        claim = member.claim(f"{number:040}", MIN_WAIT_S)
        assert isinstance(claim, Claim)
        assert member._reserve(claim, BIG)
        claim.draft.close()
    assert fill(member, "f" * 40, b"x" * BIG) is not None
    assert machine.names(".draft") == []


def test_a_process_that_stopped_with_the_lock_of_the_directory_delays_the_others_once(machine: Machine) -> None:
    member = machine.member()
    member.join()
    held = os.open(machine.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    began_s = machine.clock.monotonic_s()
    assert [member.claim(f"{number:040}", MIN_WAIT_S) for number in range(5)] == [None] * 5
    assert machine.clock.monotonic_s() - began_s < 2 * node_cache.LOCK_WAIT_S
    os.close(held)
    machine.clock.advance(node_cache.SUSPENDED_S)
    assert fill(member, KEY, b"x") is not None


def test_a_process_out_of_descriptors_shares_nothing_and_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = machine.member()
    fill(member, KEY, b"x")

    def none_left(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(node_cache, "open_file", none_left)
    assert member.get(KEY) is None
    assert member.claim(KEY, MIN_WAIT_S) is None


def test_many_entries_are_copied_instead_of_holding_a_descriptor_each(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_cache, "MAX_MAPPED", 2)
    member = machine.member()
    held = [fill(member, f"{number:040}", bytes([number]) * BIG) for number in range(5)]
    assert [each.to_pybytes() for each in held if each is not None] == [bytes([number]) * BIG for number in range(5)]
    assert len(member._mapped) == 2


@pytest.mark.parametrize("kind", ["link", "readable"])
def test_a_directory_that_another_user_can_reach_is_not_used(
    machine: Machine, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        machine.path.symlink_to(tmp_path / "elsewhere")
    else:
        machine.path.mkdir(mode=0o755)
    member = machine.member()
    assert member.claim(KEY, MIN_WAIT_S) is None
    assert member.get(KEY) is None
    assert "share nothing" in caplog.text
    assert len(caplog.records) == 1


def test_a_cache_without_members_is_removed_and_one_with_members_stays(machine: Machine, tmp_path: Path) -> None:
    first = machine.member()
    fill(first, KEY, b"x")
    assert not keeper.remove_if_unused(str(machine.path))
    second = machine.member()
    assert second.get(KEY) is not None
    first.leave()
    assert not keeper.remove_if_unused(str(machine.path))
    second.leave()
    assert keeper.remove_if_unused(str(machine.path))
    assert list(tmp_path.iterdir()) == []
    assert fill(second, KEY, b"y") is not None, "a member that left joins again"


def test_a_directory_of_something_else_is_not_removed(machine: Machine, tmp_path: Path) -> None:
    machine.path.mkdir(mode=0o700)
    (machine.path / "notes").write_text("mine")
    node_cache.remove_abandoned(tmp_path)
    assert (machine.path / "notes").exists()
    (machine.path / "notes").unlink()
    node_cache.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [], "what a process left that was killed while it joined"


def test_an_entry_of_another_size_than_was_reserved_is_not_shared(machine: Machine) -> None:
    member = machine.member()
    claim = member.claim(KEY, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    assert member.publish(claim, 3, lambda fd: write(fd, b"longer")) is None
    assert machine.names(".entry") == machine.names(".draft") == []


def test_a_new_member_removes_what_a_killed_keeper_left(machine: Machine, tmp_path: Path) -> None:
    first = machine.member()
    fill(first, KEY, b"x")
    first.leave()
    other = NodeCache(node_cache.directory_for(1 << 30, tmp_path), max_bytes=1 << 30)
    machine.members.append(other)
    assert other.join()
    assert not machine.path.exists()


def test_a_forked_child_joins_anew_and_holds_no_lock_of_its_parent(machine: Machine) -> None:
    parent = machine.member()
    fill(parent, KEY, b"x")
    claim = parent.claim("f" * 40, MIN_WAIT_S)
    assert isinstance(claim, Claim)
    report, reported = os.pipe()
    stay, leave = os.pipe()
    child = os.fork()
    if not child:
        os.close(leave)
        is_well = claim.draft.fd < 0 and parent._members.fd < 0 and parent.get(KEY) is not None
        os.write(reported, b"y" if is_well else b"n")
        os.read(stay, 1)  # returns when the parent closes its end
        os._exit(0)
    assert os.read(report, 1) == b"y"
    claim.draft.close()  # as if the parent were killed
    began_s = machine.clock.monotonic_s()
    assert isinstance(machine.member().claim("f" * 40, MIN_WAIT_S), Claim)
    assert machine.clock.monotonic_s() == began_s, "the child does not hold the lock on the draft"
    parent.leave()
    for member in machine.members:
        member.leave()
    assert not keeper.remove_if_unused(str(machine.path)), "the child is a member"
    os.close(leave)
    os.waitpid(child, 0)
    assert keeper.remove_if_unused(str(machine.path))
    for fd in (report, reported, stay):
        os.close(fd)


def test_a_member_that_is_collected_leaves(machine: Machine) -> None:
    member = machine.member()
    fill(member, KEY, b"x")
    machine.members.clear()
    del member
    gc.collect()
    assert keeper.remove_if_unused(str(machine.path))
