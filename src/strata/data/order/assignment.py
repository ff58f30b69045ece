"""Strategies that assign row groups to decode threads so that the threads finish at about the same time.

The cost of a task is its size in bytes. Every strategy is deterministic. A worker gets its tasks in the order in which
they were given, because the pipeline needs them in that order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from strata.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    """Identifies the task among those that are assigned together."""
    num_bytes: int
    num_rows: int


Strategy: TypeAlias = Callable[[Sequence[Task], int], list[list[int]]]
"""Maps tasks and a number of workers to one list of task numbers per worker, which together hold every task once."""


def lpt(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
    """Longest processing time first: give the largest remaining task to the least loaded worker.

    The result takes at most 4/3 - 1/(3 × workers) times as long as the optimum (Graham, 1969).
    """
    loads = [(0, worker) for worker in range(num_workers)]
    worker_of = {}
    for task in sorted(tasks, key=lambda task: (-task.num_bytes, task.number)):
        load, worker = loads[0]
        worker_of[task.number] = worker
        heapq.heapreplace(loads, (load + task.num_bytes, worker))
    return _in_given_order(tasks, num_workers, worker_of)


def round_robin(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
    """Assign tasks in turn, regardless of size; suits tasks of equal size."""
    return [[task.number for task in tasks[worker::num_workers]] for worker in range(num_workers)]


def size_balanced(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
    """Assign consecutive runs of about equal bytes, so that a worker reads few files.

    No run differs from its share by more than the largest task.
    """
    total_bytes = sum(_weight(task) for task in tasks)
    worker_of, before = {}, 0
    for task in tasks:
        # A task belongs to the run that contains its middle. Doubling keeps the arithmetic exact in integers.
        worker_of[task.number] = (2 * before + _weight(task)) * num_workers // (2 * total_bytes)
        before += _weight(task)
    return _in_given_order(tasks, num_workers, worker_of)


DEFAULT: Strategy = lpt
BY_NAME: dict[str, Strategy] = {"lpt": lpt, "round_robin": round_robin, "size_balanced": size_balanced}


def by_name(strategy: str | Strategy | None) -> Strategy:
    """Return a strategy by name, the default for None, or the user's function with a check on its results.

    Raises:
        InvalidArgument: The name is unknown. A user's strategy raises it when it is called and its result does not
            hold every task once.
    """
    if strategy is None:
        return DEFAULT
    if isinstance(strategy, str) and strategy in BY_NAME:
        return BY_NAME[strategy]
    if isinstance(strategy, str) or not callable(strategy):
        raise InvalidArgument(
            f"split_strategy={strategy!r} is unknown; use {', '.join(map(repr, BY_NAME))}, or a function of "
            "(tasks, num_workers) that returns one list of task numbers per worker",
            field="split_strategy",
        )
    if strategy in BY_NAME.values():
        return strategy
    return _Checked(strategy)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A user's strategy whose results are checked: a task assigned twice or never is rows read twice or never."""

    strategy: Strategy

    def __call__(self, tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
        found = self.strategy(tasks, num_workers)
        try:
            assignment = [list(numbers) for numbers in found]
        except TypeError:
            raise self._error(f"returned {type(found).__name__}, not a list of task numbers per worker") from None
        if len(assignment) != num_workers:
            raise self._error(f"returned {len(assignment)} lists for {num_workers} workers; return one per worker")
        known = {task.number for task in tasks}
        seen: set[int] = set()
        for number in (number for numbers in assignment for number in numbers):
            if number not in known:
                raise self._error(f"returned task {number!r}, which does not exist; return `task.number`")
            if number in seen:
                raise self._error(f"returned task {number} more than once; assign each task to one worker")
            seen.add(number)
        if seen != known:
            raise self._error(
                f"left out {len(known - seen)} of {len(known)} tasks, the first of them task {min(known - seen)}; "
                "assign each task to one worker"
            )
        return assignment

    def _error(self, what: str) -> InvalidArgument:
        name = getattr(self.strategy, "__qualname__", repr(self.strategy))
        return InvalidArgument(f"split_strategy {name} {what}", field="split_strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly bytes are spread over workers."""

    bytes_per_worker: tuple[int, ...]
    max_over_mean: float
    """1.0 is perfectly even; at 2.0 the slowest worker takes twice as long as with an even spread."""
    std_over_mean: float


def balance(assignment: Sequence[Sequence[int]], tasks: Sequence[Task]) -> Balance:
    """Return how evenly an assignment spreads the bytes of the tasks."""
    size_of = {task.number: task.num_bytes for task in tasks}
    sizes = tuple(sum(size_of[number] for number in numbers) for numbers in assignment)
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    if mean == 0.0:
        return Balance(bytes_per_worker=sizes, max_over_mean=1.0, std_over_mean=0.0)
    deviation = math.sqrt(sum((size - mean) ** 2 for size in sizes) / len(sizes))
    return Balance(bytes_per_worker=sizes, max_over_mean=max(sizes) / mean, std_over_mean=deviation / mean)


def _weight(task: Task) -> int:
    """Return the cost of a task, at least 1: a task without bytes (no columns, only a row count) has a cost too."""
    return max(task.num_bytes, 1)


def _in_given_order(tasks: Sequence[Task], num_workers: int, worker_of: dict[int, int]) -> list[list[int]]:
    assignment: list[list[int]] = [[] for _ in range(num_workers)]
    for task in tasks:
        assignment[worker_of[task.number]].append(task.number)
    return assignment
