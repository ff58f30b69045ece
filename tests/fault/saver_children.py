"""Trainers that save and are killed: `python saver_children.py NAME PLACE`. They print their reports to stdout."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

import strata
from strata.checkpoint.save import staging
from strata.checkpoint.saver.client import ProcessSaver

NUM_BYTES = 48 << 20


def state_of(number: int) -> dict[str, Any]:
    data = np.random.default_rng(number).integers(0, 256, NUM_BYTES, np.uint8)
    return {"w": data.reshape(-1, 256), "number": number}


def report(*fields: object) -> None:
    os.write(1, (" ".join(map(str, fields)) + "\n").encode())


def saver_of(manager: strata.CheckpointManager) -> ProcessSaver:
    saver = manager._saver
    assert isinstance(saver, ProcessSaver)
    return saver


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when_staged(place: str) -> None:
    manager = strata.CheckpointManager(place)
    save = manager.save(state_of(1), step=1)
    report(save.id, saver_of(manager).pid)
    die()


def killed_while_staging(place: str) -> None:
    manager = strata.CheckpointManager(place)
    manager.save(state_of(1), step=1).wait()
    report("first", saver_of(manager).pid)
    copy = np.copyto
    num_copied = 0

    def copy_and_die(target: Any, source: Any) -> None:
        nonlocal num_copied
        num_copied += 1
        if num_copied == 2:
            die()
        copy(target, source)

    staging.np.copyto = copy_and_die
    manager.save(state_of(2), step=2)


def killed_with_a_forked_child_alive(place: str) -> None:
    """The forked child holds the trainer's socket, so the saver does not see it close."""
    manager = strata.CheckpointManager(place)
    manager.prepare(state_of(1))
    child = os.fork()
    if child == 0:
        signal.pause()
    manager.save(state_of(1), step=1)
    report(child, saver_of(manager).pid)
    die()


def interrupted(place: str) -> None:
    """The terminal sends Ctrl-C to all processes in the foreground."""
    manager = strata.CheckpointManager(place)
    manager.prepare(state_of(1))
    save = manager.save(state_of(1), step=1)
    try:
        os.killpg(0, signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        save.wait()
        report("durable", saver_of(manager).pid)
        manager.close()


def left_without_closing(place: str) -> None:
    manager = strata.CheckpointManager(place)
    manager.save(state_of(1), step=1)
    report("left", saver_of(manager).pid)


def left_a_thread_without_closing(place: str) -> None:
    manager = strata.CheckpointManager(place, saver="thread")
    manager.save(state_of(1), step=1)
    report("left", os.getpid())


def forked(place: str) -> None:
    """A child that has a copy of the manager can neither save with it nor end the parent's saver."""
    manager = strata.CheckpointManager(place, statistics=False)
    state = {"w": np.zeros((1_000, 64), np.float32)}
    manager.save(state, step=1).wait()
    child = os.fork()
    if child == 0:
        try:
            manager.save(state, step=2)
        except strata.StrataError as error:
            manager.close()
            os._exit(0 if "forked this one" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    state["w"][3] = 3
    report(manager.save(state, step=3, checkpoint_type="INCREMENTAL").wait().checkpoint_type.name)
    manager.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
