"""Loggers of a script: what rank 0 reports, written where other tools read it. `strata.init(loggers=["tensorboard"])`.

`base.py` has the port, and one file each has TensorBoard, MLflow and Weights & Biases; the last two write on a thread
of their own (`background.py`). A logger receives the first step of its process, because a restarted run repeats the
steps since its last checkpoint. A logger that fails is dropped with a warning, as no chart is worth a run. May import
nothing else of `train`; imports a tool only when it is asked for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest

from strata.errors import ConfigError
from strata.train.loggers.base import Logger, Loggers
from strata.train.loggers.tensorboard import TensorBoardLogger, open_writer, summary_writer

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Logger", "Loggers", "TensorBoardLogger", "checked", "create", "open_writer", "summary_writer"]

NAMES = ("tensorboard", "mlflow", "wandb")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


def checked(given: Any) -> list[str | Logger]:
    """Return the loggers that a script passed, one or several.

    Raises:
        ConfigError: One of them is neither a name nor a logger.
    """
    found: list[str | Logger] = [given] if isinstance(given, str) or not hasattr(given, "__iter__") else list(given)
    for each in found:
        is_logger = not isinstance(each, str | type) and all(hasattr(each, name) for name in ("start", "log", "close"))
        if each not in NAMES and not is_logger:
            raise ConfigError(
                f"loggers= has {each!r}; use 'tensorboard', 'mlflow' or 'wandb', or an object with start(step), "
                "log(step, metrics) and close()",
                field="loggers",
            )
    return found


def create(given: Iterable[str | Logger], *, run: str, checkpoints: str = "", attempt: int = 0) -> Loggers:
    """Return loggers that `checked` has accepted.

    Args:
        run: Name of the run.
        checkpoints: Their location, from which a restarted process continues: part of the identity of the run.
        attempt: Number of earlier starts of the run.

    Raises:
        ConfigError: A package is missing.
    """
    place = checkpoints if "://" in checkpoints else os.path.abspath(checkpoints)  # noqa: PTH100 - links stay
    key = xxh3_64_hexdigest(f"{run}\0{place}".encode())
    return Loggers(_named(each, run, key, attempt) if isinstance(each, str) else each for each in given)


def _named(name: str, run: str, key: str, attempt: int) -> Logger:
    if name == "mlflow":
        from strata.train.loggers.mlflow import MLflowLogger  # noqa: PLC0415 - only if it is asked for

        return MLflowLogger(run=run, key=key, attempt=attempt)
    if name == "wandb":
        from strata.train.loggers.wandb import WandbLogger  # noqa: PLC0415 - only if it is asked for

        return WandbLogger(run=run, key=key, attempt=attempt)
    return TensorBoardLogger(Path("tensorboard") / (_NOT_IN_NAMES.sub("-", run).lstrip(".-") or "run"))
