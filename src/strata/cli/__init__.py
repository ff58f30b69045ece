"""The command line: one module per command or group of commands; `app` lists them all.

`main` turns errors into one line and an exit code. The command line sits on top of every other package, and no other
package imports it. A command parses its arguments, calls one package and prints the result; it makes no decision that a
script could want to call.
"""

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
    """Run the command line and raise SystemExit with its exit code."""
    tame_logging()
    try:
        app(args=args, prog_name="strata")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except StrataError as error:
        _print_error(error, error.message)
        sys.exit(exit_code_of(error))
    except Exception as error:  # noqa: BLE001 (process boundary)
        _print_error(error, f"unexpected {type(error).__name__}: {error}; set {TRACEBACK_VARIABLE}=1 for a traceback")
        sys.exit(ExitCode.FAILED)


def _print_error(error: Exception, message: str) -> None:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        raise error
    echo(f"error: {' '.join(message.split())}", err=True)
