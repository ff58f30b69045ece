"""Assignment strategies: every task is assigned once, and evenly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.order.assignment import (
    BY_NAME,
    Balance,
    Strategy,
    Task,
    balance,
    by_name,
    lpt,
    round_robin,
    size_balanced,
)
from strata.errors import InvalidArgument

sizes = st.lists(st.integers(0, 1_000), max_size=60)


def tasks_of(sizes: Sequence[int], *, first: int = 0) -> list[Task]:
    return [Task(number, size, num_rows=1) for number, size in enumerate(sizes, first)]


def loads_of(strategy: Strategy, tasks: Sequence[Task], num_workers: int) -> tuple[int, ...]:
    return balance(strategy(tasks, num_workers), tasks).bytes_per_worker


@given(sizes=sizes, num_workers=st.integers(1, 9), name=st.sampled_from(sorted(BY_NAME)))
def test_every_task_is_assigned_once_and_in_the_given_order(sizes: list[int], num_workers: int, name: str) -> None:
    tasks = tasks_of(sizes, first=7)
    assignment = BY_NAME[name](tasks, num_workers)

    assert len(assignment) == num_workers
    assert sorted(itertools.chain(*assignment)) == [task.number for task in tasks]
    assert all(numbers == sorted(numbers) for numbers in assignment)
    assert assignment == BY_NAME[name](tasks, num_workers)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), num_workers=st.integers(1, 3))
def test_lpt_is_within_grahams_bound_of_the_optimum(sizes: list[int], num_workers: int) -> None:
    def latest(choice: tuple[int, ...]) -> int:
        return max(sum(s for s, w in zip(sizes, choice, strict=True) if w == worker) for worker in range(num_workers))

    best = min(map(latest, itertools.product(range(num_workers), repeat=len(sizes))))
    makespan = max(loads_of(lpt, tasks_of(sizes), num_workers))

    assert 3 * num_workers * makespan <= (4 * num_workers - 1) * best


@given(sizes=st.lists(st.integers(0, 10_000), min_size=1, max_size=200), num_workers=st.integers(1, 16))
def test_lpt_and_size_balanced_differ_from_the_mean_by_at_most_one_task(sizes: list[int], num_workers: int) -> None:
    mean, tasks = sum(sizes) / num_workers, tasks_of(sizes)

    assert max(loads_of(lpt, tasks, num_workers)) <= mean + (1 - 1 / num_workers) * max(sizes) + 1e-6
    # tasks without bytes count as one byte here, so that there may be so many more of them in a run
    assert max(loads_of(size_balanced, tasks, num_workers)) <= mean + max(sizes) + sizes.count(0) + 1


def test_lpt_assigns_the_largest_task_to_the_least_loaded_worker() -> None:
    assert lpt(tasks_of([2, 7, 3, 3, 2, 1]), 2) == [[1, 4], [0, 2, 3, 5]]


def test_round_robin_takes_turns_regardless_of_size() -> None:
    assert round_robin(tasks_of([9, 1, 9, 1, 9]), 2) == [[0, 2, 4], [1, 3]]


def test_size_balanced_gives_consecutive_runs_of_about_equal_bytes() -> None:
    assert size_balanced(tasks_of([10, 10, 10, 30, 15, 15]), 3) == [[0, 1, 2], [3], [4, 5]]


def test_tasks_without_bytes_are_spread_over_the_workers() -> None:
    assert size_balanced(tasks_of([0, 0, 0, 0]), 2) == [[0, 1], [2, 3]]


def test_one_huge_task_shows_in_the_balance() -> None:
    tasks = tasks_of([90, 10, 10, 10])

    assert balance(lpt(tasks, 2), tasks) == Balance(
        bytes_per_worker=(90, 30), max_over_mean=1.5, std_over_mean=pytest.approx(0.5)
    )


def test_no_tasks_are_perfectly_balanced() -> None:
    assert balance(lpt([], 3), []) == Balance(bytes_per_worker=(0, 0, 0), max_over_mean=1.0, std_over_mean=0.0)


def test_strategies_are_found_by_name_and_lpt_is_the_default() -> None:
    assert by_name(None) is lpt
    assert {name: by_name(name) for name in BY_NAME} == BY_NAME
    assert by_name(round_robin) is round_robin


@pytest.mark.parametrize("wrong", ["fastest", 3])
def test_an_unknown_strategy_is_refused_with_the_known_ones(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match=r"'lpt', 'round_robin', 'size_balanced', or a function") as caught:
        by_name(wrong)  # type: ignore[arg-type]
    assert caught.value.field == "split_strategy"


def test_a_users_strategy_is_used_unchanged() -> None:
    def backwards(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
        return [[task.number for task in reversed(tasks)], *([] for _ in range(num_workers - 1))]

    assert by_name(backwards)(tasks_of([1, 1, 1]), 2) == [[2, 1, 0], []]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda tasks, _: [[0, 1, 2]], "returned 1 lists for 2 workers"),
        (lambda tasks, _: [[0, 1], [1, 2]], "returned task 1 more than once"),
        (lambda tasks, _: [[0], [2]], "left out 1 of 3 tasks, the first of them task 1"),
        (lambda tasks, _: [[0, 1, 2], [8]], "returned task 8, which does not exist"),
        (lambda tasks, _: [[tasks[0]], []], "return `task.number`"),
        (lambda tasks, _: None, "returned NoneType, not a list"),
        (lambda tasks, _: [0, 1], "returned list, not a list of task numbers per worker"),
    ],
)
def test_a_users_strategy_that_loses_or_repeats_a_task_is_refused(own: Callable[..., object], message: str) -> None:
    checked = by_name(own)  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match=message):
        checked(tasks_of([1, 1, 1]), 2)
