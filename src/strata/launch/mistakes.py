"""Which failures are mistakes in a program, so that running it again would only show them again.

It is told by how a worker ended: its exit code and its last words, which for Python name the exception. Errors that may
come from data or from the machine are no mistakes in this sense: those are worth another attempt.
"""

from __future__ import annotations

import re

_USAGE = 2
"""The exit code of argparse, click and Python itself for a command line that they do not take."""
_EXCEPTION = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")
_OF_PYTHON = {
    *("SyntaxError", "IndentationError", "TabError"),
    *("ImportError", "ModuleNotFoundError"),
    *("NameError", "UnboundLocalError", "AttributeError", "TypeError"),
}
_OF_STRATA = ("strata.errors.ConfigError", "strata.errors.InvalidArgument")
_NO_MODULE = ": No module named "
"""What `python -m` prints, without a traceback."""


def is_mistake(code: int, last_words: str) -> bool:
    """Whether a worker that has made no step ended because of how its program is written or called."""
    if code == _USAGE:
        return True
    if code != 1:
        return False
    named = _EXCEPTION.match(last_words)
    return (
        (named is not None and named[0].rstrip(":") == named[1] and named[1] in _OF_PYTHON)
        or last_words.startswith(_OF_STRATA)
        or _NO_MODULE in last_words
    )
