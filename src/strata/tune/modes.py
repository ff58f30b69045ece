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


def mode_name(sampler: str, scheduler: str) -> str:
    """Return the name of the mode with this sampler and scheduler, or a description."""
    for name, mode in MODES.items():
        if (mode.sampler, mode.scheduler) == (sampler, scheduler):
            return name
    return sampler if scheduler == "none" else f"{sampler} with {scheduler}"
