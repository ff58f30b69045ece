"""Who decodes what: tasks dealt out to workers so that they end at about the same time.

What a task costs is taken to be its bytes. All strategies are deterministic, and every worker gets its tasks in the
order in which they were given, which is the order in which somebody waits for them.
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
    """Its name: no two tasks that are dealt out together have the same."""
    num_bytes: int
    num_rows: int


Strategy: TypeAlias = Callable[[Sequence[Task], int], list[list[int]]]
"""From tasks and a number of workers to the numbers of the tasks of each worker: every task once, a list per worker."""


def lpt(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
    """Longest processing time first: the largest task that is left to the worker with the least so far.

    At the worst 4/3 - 1/(3 × workers) of the best that is possible (Graham, 1969).
    """
    loads = [(0, worker) for worker in range(num_workers)]
    worker_of = {}
    for task in sorted(tasks, key=lambda task: (-task.num_bytes, task.number)):
        load, worker = loads[0]
        worker_of[task.number] = worker
        heapq.heapreplace(loads, (load + task.num_bytes, worker))
    return _in_given_order(tasks, num_workers, worker_of)


def round_robin(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
    """In turn, whatever their sizes: right for tasks of one size."""
    return [[task.number for task in tasks[worker::num_workers]] for worker in range(num_workers)]


def size_balanced(tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
    """Consecutive runs of about equal bytes: a worker stays in few files. None is off by more than the largest task."""
    total_bytes = sum(_weight(task) for task in tasks)
    worker_of, before = {}, 0
    for task in tasks:
        # A task belongs to the run in which its middle lies; doubled, so that all of it is exact in integers.
        worker_of[task.number] = (2 * before + _weight(task)) * num_workers // (2 * total_bytes)
        before += _weight(task)
    return _in_given_order(tasks, num_workers, worker_of)


DEFAULT: Strategy = lpt
BY_NAME: dict[str, Strategy] = {"lpt": lpt, "round_robin": round_robin, "size_balanced": size_balanced}


def by_name(strategy: str | Strategy | None) -> Strategy:
    """A strategy by its name, the default for None, or the user's own function, whose results are checked.

    Raises:
        InvalidArgument: There is none of this name. From a user's strategy, when it is called: its result does not
            hold every task once.
    """
    if strategy is None:
        return DEFAULT
    if isinstance(strategy, str) and strategy in BY_NAME:
        return BY_NAME[strategy]
    if isinstance(strategy, str) or not callable(strategy):
        raise InvalidArgument(
            f"split_strategy={strategy!r} is not known; give {', '.join(map(repr, BY_NAME))}, or a function of "
            "(tasks, num_workers) that gives back a list of task numbers per worker",
            field="split_strategy",
        )
    if strategy in BY_NAME.values():
        return strategy
    return _Checked(strategy)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A user's strategy: a task that is dealt out twice or never would be a row read twice or never."""

    strategy: Strategy

    def __call__(self, tasks: Sequence[Task], num_workers: int) -> list[list[int]]:
        found = self.strategy(tasks, num_workers)
        try:
            assignment = [list(numbers) for numbers in found]
        except TypeError:
            raise self._refusal(f"gave back {type(found).__name__}, not a list of task numbers per worker") from None
        if len(assignment) != num_workers:
            raise self._refusal(f"gave back {len(assignment)} lists for {num_workers} workers; give one for each")
        known = {task.number for task in tasks}
        seen: set[int] = set()
        for number in (number for numbers in assignment for number in numbers):
            if number not in known:
                raise self._refusal(f"gave back task {number!r}, which does not exist; give back `task.number`")
            if number in seen:
                raise self._refusal(f"gave back task {number} more than once; give each to one worker")
            seen.add(number)
        if seen != known:
            raise self._refusal(
                f"left out {len(known - seen)} of {len(known)} tasks, the first of them task {min(known - seen)}; "
                "give each to one worker"
            )
        return assignment

    def _refusal(self, what: str) -> InvalidArgument:
        name = getattr(self.strategy, "__qualname__", repr(self.strategy))
        return InvalidArgument(f"split_strategy {name} {what}", field="split_strategy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly bytes are spread over workers."""

    bytes_per_worker: tuple[int, ...]
    max_over_mean: float
    """1.0: perfectly even. 2.0: the last worker takes twice as long as it would if it were."""
    std_over_mean: float


def balance(assignment: Sequence[Sequence[int]], tasks: Sequence[Task]) -> Balance:
    size_of = {task.number: task.num_bytes for task in tasks}
    sizes = tuple(sum(size_of[number] for number in numbers) for numbers in assignment)
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    if mean == 0.0:
        return Balance(bytes_per_worker=sizes, max_over_mean=1.0, std_over_mean=0.0)
    deviation = math.sqrt(sum((size - mean) ** 2 for size in sizes) / len(sizes))
    return Balance(bytes_per_worker=sizes, max_over_mean=max(sizes) / mean, std_over_mean=deviation / mean)


def _weight(task: Task) -> int:
    """Tasks without bytes (no columns, only a count of rows) still cost something."""
    return max(task.num_bytes, 1)


def _in_given_order(tasks: Sequence[Task], num_workers: int, worker_of: dict[int, int]) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in range(num_workers)]
    for task in tasks:
        dealt[worker_of[task.number]].append(task.number)
    return dealt
