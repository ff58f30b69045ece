"""The modes of tuning: each is a sampler and a scheduler."""

from __future__ import annotations

from typing import NamedTuple

from strata.errors import ConfigError


class Mode(NamedTuple):
    sampler: str
    scheduler: str = "none"
    ask_ahead: int = 0


MODES = {
    "random": Mode("random"),
    "grid": Mode("grid"),
    "sobol": Mode("sobol"),
    "bayesian": Mode("gp", ask_ahead=1),
    "cmaes": Mode("cmaes"),
    "hyperband": Mode("random", "hyperband"),
    "asha": Mode("random", "asha"),
    "median": Mode("random", "median"),
    "bohb": Mode("tpe", "hyperband"),
    "pbt": Mode("random", "pbt"),
}


def find_mode(mode: object) -> tuple[Mode, object]:
    """Return the mode of this name, or of a sampler object of Optuna, and that object.

    Raises:
        ConfigError: The mode is unknown.
    """
    if not isinstance(mode, str):
        return Mode(f"optuna/{type(mode).__name__}"), mode
    if mode not in MODES:
        raise ConfigError(f"hpt_mode={mode!r} is unknown; use {', '.join(MODES)}", field="hpt_mode")
    return MODES[mode], None
