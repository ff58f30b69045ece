"""What the exit code of `strata` says to a script."""

from __future__ import annotations

import enum

from strata.errors import (
    CheckpointInvalid,
    ConfigError,
    CoordinatorUnavailable,
    InvalidArgument,
    JournalDamaged,
    JournalError,
    StrataError,
)


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    STATE_DAMAGED = 4
    STATE_BUSY = 5
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "a flag, argument or setting is wrong",
    ExitCode.UNAVAILABLE: "no coordinator answers",
    ExitCode.STATE_DAMAGED: "the coordinator's state, or a checkpoint, cannot be read back",
    ExitCode.STATE_BUSY: "the coordinator's state is in use by another, or cannot be written",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}

# The first that fits wins, so the narrower stand before the wider.
_BY_ERROR: tuple[tuple[type[StrataError], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (InvalidArgument, ExitCode.USAGE),
    (CoordinatorUnavailable, ExitCode.UNAVAILABLE),
    (JournalDamaged, ExitCode.STATE_DAMAGED),
    (CheckpointInvalid, ExitCode.STATE_DAMAGED),
    (JournalError, ExitCode.STATE_BUSY),
    (StrataError, ExitCode.FAILED),
)


def exit_code_of(error: StrataError) -> ExitCode:
    return next(code for kind, code in _BY_ERROR if isinstance(error, kind))


def describe() -> str:
    """The table above for a help text, one code a line."""
    return "\n".join(["Exit codes:", *(f"{code.value:>5}  {meaning}" for code, meaning in MEANINGS.items())])
