"""The GPUs that the processes of a trial see. No test here needs a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_launch_nodes import FakeNode, events_of

from strata.launch.nodes.shared import SharedNodes
from strata.tune.devices import CUDA, HIP, count_gpus, device_variables, share


def uncounted() -> int:
    raise AssertionError("the environment lists the devices")


@pytest.mark.parametrize(
    ("seats", "num_seats", "shown"),
    [([0], 4, "0"), ([3], 4, "3"), ([1, 2], 4, "1,2"), ([0], 1, "0,1,2,3"), ([1], 2, "2,3"), ([0], 3, "0")],
)
def test_the_gpus_of_a_machine_are_divided_among_its_slots(seats: list[int], num_seats: int, shown: str) -> None:
    assert device_variables({}, seats, num_seats, lambda: 4) == {CUDA: shown}


@pytest.mark.parametrize(("seat", "shown"), [(0, "0"), (1, "1"), (2, "0"), (3, "1")])
def test_more_slots_than_gpus_take_turns(seat: int, shown: str) -> None:
    assert device_variables({}, [seat], 4, lambda: 2) == {CUDA: shown}


def test_two_workers_on_one_gpu_see_it_once() -> None:
    assert device_variables({}, [0, 1], 2, lambda: 1) == {CUDA: "0"}


def test_a_machine_without_gpus_keeps_its_environment() -> None:
    assert device_variables({}, [0], 2, lambda: 0) == {}
    for hidden in ("", " ", "-1", "-1,0"):
        assert device_variables({CUDA: hidden}, [0], 2, uncounted) == {}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("2,3", "3"),
        (" 2 , 3 ", "3"),
        ("GPU-8932f937-d72c,GPU-4f2e0c1a-11aa", "GPU-4f2e0c1a-11aa"),
        ("MIG-GPU-8932f937/1/0,MIG-4c2b", "MIG-4c2b"),
        ("5,7,-1,8", "7"),
        ("5,7,,8", "7"),
    ],
)
def test_only_devices_that_the_environment_shows_are_divided(given: str, shown: str) -> None:
    assert device_variables({CUDA: given}, [1], 2, uncounted) == {CUDA: shown}


def test_the_variable_of_amd_is_divided_if_it_is_set() -> None:
    assert device_variables({HIP: "0,1"}, [1], 2, uncounted) == {HIP: "1"}
    assert device_variables({HIP: "0,1", CUDA: "0,1"}, [1], 2, uncounted) == {HIP: "1", CUDA: "1"}


@given(num_devices=st.integers(1, 16), num_seats=st.integers(1, 16))
def test_every_slot_has_a_device_of_its_own_if_there_are_enough(num_devices: int, num_seats: int) -> None:
    devices = [str(number) for number in range(num_devices)]
    shares = [share(devices, [seat], num_seats) for seat in range(num_seats)]

    assert len({len(each) for each in shares}) == 1
    assert all(shares)
    used = [device for each in shares for device in each]
    if num_devices >= num_seats:
        assert len(set(used)) == len(used)
    else:
        assert set(used) == set(devices)
        assert max(map(used.count, devices)) - min(map(used.count, devices)) <= 1


def test_gpus_are_counted_by_their_device_files_and_otherwise_by_the_driver(tmp_path: Path) -> None:
    assert count_gpus(tmp_path) == 0
    for bus in ("0000:3b:00.0", "0000:af:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert count_gpus(tmp_path) == 2
    (tmp_path / "dev").mkdir()
    for name in ("nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus(tmp_path) == 1, "a container that may use one of two"


def test_running_jobs_have_different_seats_of_a_node_and_freed_ones_are_taken_again() -> None:
    async def scene() -> None:
        first, second = FakeNode("a", slots=4), FakeNode("b", slots=2)
        nodes = SharedNodes(first, second)
        for ranks in ([0], [1], [2, 3], [4, 5]):
            assert await nodes.place(ranks) is not None
        seats = {rank: nodes.seats(rank, ranks) for ranks in ([0], [1], [2, 3], [4, 5]) for rank in ranks}
        assert seats == {
            0: ((0,), 2),
            1: ((1,), 2),
            **dict.fromkeys((2, 3), ((0, 1), 4)),
            4: ((2, 3), 4),
            5: ((2, 3), 4),
        }
        first.end(2, 0)
        first.end(3, 0)
        await events_of(nodes)
        assert await nodes.place([9]) is not None
        assert nodes.seats(9, [9]) == ((0,), 4)

    asyncio.run(scene())


def test_workers_of_a_job_on_two_nodes_see_the_devices_of_their_own_node() -> None:
    async def scene() -> None:
        nodes = SharedNodes(FakeNode("a", slots=1), FakeNode("b", slots=1))
        assert await nodes.place([0, 1]) is not None
        assert [nodes.seats(rank, [0, 1]) for rank in (0, 1)] == [((0,), 1), ((0,), 1)]

    asyncio.run(scene())
