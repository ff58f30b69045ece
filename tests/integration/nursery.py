"""Starts real processes in milliseconds: this one has imported everything they need, and forks a child for every order.

Its arguments name the modules to import; the default is the coordinator and its clients. Orders are lines of JSON on
stdin, answers are lines on stdout. A forked child first connects its *lifeline*, a Unix socket over which it exchanges
lines of JSON with the test; when the lifeline closes, the test knows that the child has exited.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

PRELOADED = ("strata.coordinator.server", "strata.coordinator.client", "children", "killable_coordinator")
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The child's end of the socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r")

    def send(self, **fields: Any) -> None:
        self._socket.sendall(json.dumps(fields).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next order, or None once the test has closed the connection."""
        line = self._lines.readline()
        return json.loads(line) if line else None

    def fileno(self) -> int:
        """Return the descriptor, for a child that also waits for something else."""
        return self._socket.fileno()


def main(paths: list[str], preloaded: list[str]) -> None:
    sys.path[:0] = paths
    gc.disable()  # imported modules stay, and collecting while importing them takes a fifth of the time
    for name in preloaded or PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:  # or the end of the input, which forks of the test's process hold open
            break
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            print(json.dumps({"exit_code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(order)
        print(json.dumps({"pid": pid}), flush=True)
    os._exit(0)  # tearing down the imported modules would take time


def _become(order: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        # No child outlives the tests, however they end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        faulthandler.register(signal.SIGUSR1)  # writes the stacks of all threads to the log
        lifeline = Lifeline(order["lifeline"])
        module, _, function = order["run"].partition(":")
        getattr(importlib.import_module(module), function)(lifeline, **order["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 (the edge of the process)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1].split(os.pathsep), sys.argv[2:])
