"""Weights & Biases: offline files by default, which `wandb sync` uploads.

W&B writes an offline file in large blocks, so a killed process leaves an incomplete one, and nothing tells a restarted
process which steps it has. A journal of ours beside it therefore keeps the reports until W&B has finished its file. The
next process removes what is left of an unfinished file and writes those reports again, before its own. Online, the
server knows the steps of a run.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from strata.errors import ConfigError
from strata.train.loggers.background import BackgroundLogger, Report, Written, begins_anew

if TYPE_CHECKING:
    from collections.abc import Sequence


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted process must know of a run."""

    id: str
    first_step: int
    last_step: int = -1
    """The last one in finished files."""
    unfinished: str = ""
    """The name of the directory in which a process writes; its reports are in the journal."""


class WandbLogger(BackgroundLogger):
    """Writes to `wandb/` (or `WANDB_DIR`), offline unless `WANDB_MODE` is set."""

    def __init__(self, *, run: str, key: str, attempt: int) -> None:
        """`run`: name of the run in W&B. `key`: the same in all processes of the run, and in no other."""
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"loggers=['wandb'] needs a package that cannot be imported ({error}); "
                "pip install 'strata-runtime[wandb]'",
                field="loggers",
            ) from None
        super().__init__(_WandbSink(wandb, run=run, key=key, attempt=attempt))


class _WandbSink:
    def __init__(self, wandb: Any, *, run: str, key: str, attempt: int) -> None:
        self._wandb = wandb
        self._name = run
        self._attempt = attempt
        self._mode = os.environ.get("WANDB_MODE") or "offline"
        self._directory = Path(os.environ.get("WANDB_DIR") or ".")
        self._journal = Journal(self._directory / "wandb" / f"strata-{key}.jsonl")
        self._written = Written()
        self._run: Any = None

    def open(self, step: int) -> None:
        state, reports = self._journal.read()
        if state is None or begins_anew(step, first_step=state.first_step, attempt=self._attempt):
            state, reports = _new_run(step), []
        elif state.unfinished:
            shutil.rmtree(self._directory / "wandb" / Path(state.unfinished).name, ignore_errors=True)
        self._run = self._wandb.init(
            id=state.id,
            name=self._name or None,
            resume="allow",
            mode=self._mode,
            dir=os.fspath(self._directory),
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        if self._mode != "offline":
            self._written.last_step = self._run.step - 1 if self._run.resumed else -1
            self._journal.begin(state)
            return
        self._written.last_step = state.last_step
        self._journal.begin(msgspec.structs.replace(state, unfinished=Path(self._run.dir).parent.name))
        self.write(reports)
        self._written.last_step = max(state.last_step, self._written.newest)

    def write(self, reports: Sequence[Report]) -> None:
        new = self._written.new(reports)
        if self._mode == "offline":
            self._journal.append(new)
        for each in new:
            self._run.log(dict(each.metrics), step=each.step)

    def close(self, *, is_failing: bool) -> None:
        self._run.finish(exit_code=1 if is_failing else 0)
        self._journal.finish(self._written.newest)


def _new_run(step: int) -> RunState:
    return RunState(id=os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4), first_step=step)


class Journal:
    """A file of the state of a run and of the reports that are in no finished file of W&B. A line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: RunState | None = None
        self._file: IO[bytes] | None = None

    def read(self) -> tuple[RunState | None, list[Report]]:
        try:
            first, *lines = self._path.read_bytes().splitlines()
            state = msgspec.json.decode(first, type=RunState)
        except (OSError, ValueError, msgspec.DecodeError):
            return None, []
        reports = []
        for line in lines:
            try:
                step, at_s, metrics = json.loads(line)  # which has NaN and infinity
            except ValueError:  # cut off by a kill
                break
            reports.append(Report(step, metrics, at_s))
        return state, reports

    def begin(self, state: RunState) -> None:
        """Replace the file: nothing is unfinished but what is appended from now on."""
        self._state = state
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(state) + b"\n")
        draft.replace(self._path)

    def append(self, reports: Sequence[Report]) -> None:
        if self._file is None:
            self._file = self._path.open("ab")
        lines = (json.dumps([each.step, each.at_s, {**each.metrics}], default=float) for each in reports)
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()  # survives a kill of this process

    def finish(self, last_step: int) -> None:
        """Keep no reports: W&B has them all."""
        assert self._state is not None
        if self._file is not None:
            self._file.close()
        last_step = max(self._state.last_step, last_step)
        self.begin(msgspec.structs.replace(self._state, last_step=last_step, unfinished=""))
