"""Optional packages of tuning, imported when they are first needed. A missing one is reported with the cure."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def require(package: str, what: str, cure: str) -> Any:
    """Import a package.

    Raises:
        ConfigError: It is not installed; `what` needs it, and `cure` helps.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package.partition(".")[0]:
            raise  # it is installed, but broken
        raise ConfigError(f"{what} needs {package.partition('.')[0]}, which is not installed; {cure}") from None


def optuna_module(what: str = "this mode") -> Any:
    """
    Raises:
        ConfigError: Optuna is not installed.
    """
    cure = "pip install 'strata-runtime[tune]', or use 'random', 'grid', 'sobol', 'asha' or 'hyperband'"
    return require("optuna", what, cure)


def is_sampler(found: object) -> bool:
    """Return whether an object is a sampler of Optuna; whoever made one has imported Optuna."""
    optuna = sys.modules.get("optuna")
    return optuna is not None and isinstance(found, optuna.samplers.BaseSampler)


def is_gaussian_process(found: object) -> bool:
    """Return whether an object is a sampler of Optuna that takes long to answer."""
    return is_sampler(found) and isinstance(found, sys.modules["optuna"].samplers.GPSampler)


def is_pruner(found: object) -> bool:
    """Return whether an object is a pruner of Optuna."""
    optuna = sys.modules.get("optuna")
    return optuna is not None and isinstance(found, optuna.pruners.BasePruner)


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Keep Optuna from announcing a study and every failed trial on stderr; Strata has its own output."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
