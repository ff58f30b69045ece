"""Failures that are retried, and programming errors that are not."""

from __future__ import annotations

import pytest

from strata.launch.actions import Finish, StartAttempt
from strata.launch.failures import is_programming_error
from strata.launch.protocol import WorkerExit
from strata.launch.spec import Size
from strata.launch.supervisor import EARLY_S, Supervisor


@pytest.mark.parametrize(
    ("code", "last_words"),
    [
        (1, "SyntaxError: invalid syntax"),
        (1, "ModuleNotFoundError: No module named 'nosuch'"),
        (1, "ImportError: cannot import name 'x' from 'y' (/y.py)"),
        (1, "NameError: name 'modle' is not defined"),
        (1, "AttributeError: module 'torch' has no attribute 'optin'"),
        (1, "TypeError: init() got an unexpected keyword argument 'evry'"),
        (1, "TypeError"),
        (1, "strata.errors.ConfigError: every='often' is neither a number of steps nor a time"),
        (1, "/usr/bin/python: No module named trian"),
        (2, "train.py: error: the following arguments are required: --lr"),
        (2, "python: can't open file '/train.py': [Errno 2] No such file or directory"),
    ],
)
def test_mistakes_in_a_program_are_recognised(code: int, last_words: str) -> None:
    assert is_programming_error(code, last_words)


@pytest.mark.parametrize(
    ("code", "last_words"),
    [
        (1, ""),
        (1, "ValueError: TypeError: of a row"),
        (1, "FileNotFoundError: [Errno 2] No such file or directory: '/mnt/data'"),
        (1, "somewhere.TypeError: not Python's own"),
        (1, "torch.OutOfMemoryError: CUDA out of memory"),
        (-9, "TypeError: printed before it was killed"),
        (137, ""),
        (1, "TypeErrors are fun"),
    ],
)
def test_what_may_come_from_data_or_the_machine_is_no_mistake(code: int, last_words: str) -> None:
    assert not is_programming_error(code, last_words)


def started(now_s: float = 0.0) -> Supervisor:
    run = Supervisor(Size(1, 1), max_restarts=3, grace_s=1.0)
    run.begin(now_s=now_s)
    return run


def fails(run: Supervisor, now_s: float) -> list[object]:
    return [*run.exited(WorkerExit(0, 1, "TypeError: bad"), now_s=now_s)]


def test_a_mistake_before_the_first_step_fails_at_once_with_the_cause_first() -> None:
    assert fails(started(), now_s=1.0)[-1] == Finish(
        "failed", "rank 0: exit code 1: TypeError: bad (not retried: it would fail the same way)"
    )


def test_with_a_context_it_counts_however_long_the_start_took() -> None:
    run = started()
    run.joined()
    assert isinstance(fails(run, now_s=10 * EARLY_S)[-1], Finish)


def test_without_a_context_only_the_first_minute_counts() -> None:
    assert not isinstance(fails(started(), now_s=EARLY_S + 1.0)[-1], Finish)


def test_once_a_step_was_made_everything_is_retried_in_later_attempts_too() -> None:
    run = started()
    run.advanced(1)
    assert fails(run, now_s=1.0)[-1] == StartAttempt(1, 1)
    assert not isinstance(fails(run, now_s=2.0)[-1], Finish)
