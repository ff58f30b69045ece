"""The command line. `main` is what `strata` runs: it turns errors into one clear line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from strata.cli.app import app
from strata.cli.exit_codes import ExitCode, exit_code_of
from strata.errors import StrataError
from strata.terminal import echo, tame_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACEBACK_VARIABLE = "STRATA_TRACEBACK"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ends in SystemExit."""
    tame_logging()
    try:
        app(args=args, prog_name="strata")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except StrataError as error:
        _explain(error, error.message)
        sys.exit(exit_code_of(error))
    except Exception as error:  # noqa: BLE001 (the edge of the process)
        _explain(error, f"{type(error).__name__}: {error} (not foreseen; {TRACEBACK_VARIABLE}=1 shows where)")
        sys.exit(ExitCode.FAILED)


def _explain(error: Exception, message: str) -> None:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        raise error
    echo(f"error: {' '.join(message.split())}", err=True)
