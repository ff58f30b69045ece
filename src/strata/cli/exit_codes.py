"""The exit codes of `strata`, and which error maps to which code."""

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
    ExitCode.OK: "success",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "invalid flag, argument or setting",
    ExitCode.UNAVAILABLE: "no coordinator answered",
    ExitCode.STATE_DAMAGED: "the coordinator's state or a checkpoint is damaged",
    ExitCode.STATE_BUSY: "the coordinator's state is in use by another process or not writable",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}

# The first match wins, so subclasses come before their base classes.
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
    """Return the exit codes for the help text, one per line."""
    return "\n".join(["Exit codes:", *(f"{code.value:>5}  {meaning}" for code, meaning in MEANINGS.items())])
