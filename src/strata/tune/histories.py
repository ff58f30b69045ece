"""Where the trials of a study save, and which of these directories no trial can continue from any more.

A trial that continues from the checkpoint of another one begins a new history, in a new directory. Its earlier
directories are of no use to it. Another trial may still be about to clone a checkpoint of one; until it has, the state
of the study names that checkpoint as its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.tune.state.trial import Trial

CHECKPOINTS = "checkpoints"


def directory_of(trial: Trial) -> Path:
    """Return where a trial saves, within the directory of its study: a new place each time that it continues from
    another trial.
    """
    suffix = f"-{trial.origin:03}" if trial.origin else ""
    return Path("trials") / f"{trial.number:05}" / f"{CHECKPOINTS}{suffix}"


def abandoned(trial: Trial, names: Iterable[str], trials: Iterable[Trial]) -> list[Path]:
    """Return the directories of a trial's earlier histories that hold the checkpoint of no trial.

    Args:
        names: What the folder of the trial contains.
        trials: All trials of the study.
    """
    current = directory_of(trial)
    # The last parts identify a directory, however the path of the study is written.
    needed = {Path(each.checkpoint).parts[-3:-1] for each in trials if each.checkpoint}
    return [
        current.with_name(name)
        for name in sorted(names)
        if name.startswith(CHECKPOINTS) and name != current.name and (current.parent.name, name) not in needed
    ]
