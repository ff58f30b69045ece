"""Directories of checkpoints that no trial can continue from any more."""

from __future__ import annotations

from pathlib import Path

from strata.tune.histories import abandoned, directory_of
from strata.tune.state.trial import Trial

NAMES = ["checkpoints", "checkpoints-002", "checkpoints-004", "notes.txt"]


def a_trial(number: int, *, origin: int = 0, checkpoint: str = "") -> Trial:
    return Trial(number, {}, origin=origin, checkpoint=checkpoint)


def test_each_history_of_a_trial_has_its_own_directory() -> None:
    assert directory_of(a_trial(7)) == Path("trials/00007/checkpoints")
    assert directory_of(a_trial(7, origin=4)) == Path("trials/00007/checkpoints-004")


def test_earlier_histories_are_abandoned_and_nothing_else() -> None:
    member = a_trial(7, origin=4, checkpoint="/runs/sweep/trials/00007/checkpoints-004/step-9")

    assert abandoned(member, NAMES, [member]) == [
        Path("trials/00007/checkpoints"),
        Path("trials/00007/checkpoints-002"),
    ]
    assert abandoned(a_trial(7), ["checkpoints"], [a_trial(7)]) == []


def test_a_history_that_another_trial_has_yet_to_clone_is_kept() -> None:
    """However the path of the study is written there."""
    member = a_trial(7, origin=4, checkpoint="/runs/sweep/trials/00003/checkpoints/step-8")
    for prefix in ("/runs/sweep/", "/link/to/sweep/", ""):
        copying = a_trial(3, origin=2, checkpoint=f"{prefix}trials/00007/checkpoints-002/step-5")
        assert abandoned(member, NAMES, [member, copying]) == [Path("trials/00007/checkpoints")]


def test_directories_of_other_trials_with_the_same_names_keep_nothing() -> None:
    member = a_trial(7, origin=4)
    other = a_trial(3, origin=2, checkpoint="/runs/sweep/trials/00003/checkpoints-002/step-5")

    assert len(abandoned(member, NAMES, [member, other])) == 2
