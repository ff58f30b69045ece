"""The environment of a worker: torchrun's variables, so that scripts run unchanged, and a few of our own.

The agent writes these variables and `strata.init()` reads them. Both sides live here, so that they cannot drift apart.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.errors import ConfigError
from strata.identity import ATTEMPT, INCARNATION, RUN, TORCHRUN, Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

STOPPED = 83
"""Exit code of a worker that saved a checkpoint and stopped on request; no shell and no signal produces it."""

UNREACHABLE = 75
"""Exit code of a worker that the coordinator has removed, or of a trial that cannot reach its driver (`EX_TEMPFAIL` of
`sysexits.h`): the training code is not the cause."""

STACKS_SIGNAL = "SIGUSR2"
"""Signal on which a worker dumps the stacks of its threads to its log."""

NOTE = "strata: "
"""Prefix of our own lines in a worker's log; such a line is never the cause of a failure."""

NOT_SAVING = -1.0
"""Value of `METRICS.saving_step` when no save is in progress: a metric keeps its last value, so it must be reset."""

NEEDED_WORLD_SIZE = "strata/world_size"
"""Key in a checkpoint's metadata: the only world size that can resume from it, because a loader's state is per rank."""

JOINED = "STRATA_JOINED"
"""Process id of the worker that has joined as this rank. Its children inherit the environment but are not ranks."""
STORAGE_OPTIONS = "STRATA_STORAGE_OPTIONS"
"""Storage options of the run's checkpoints, as JSON. They hold no secrets: a run stores its variables in a file."""
LAST_STEP = "STRATA_LAST_STEP"
"""Path of the file in which a worker records its last step: it has left the coordinator when its process exits."""
ALONE = "STRATA_ALONE"
"""Path of the file in which a worker declares whether it may be restarted without the others, as one byte."""
MAY_RESTART_ALONE = b"1"
SERVERS = "STRATA_SERVERS"
"""Number of parameter servers, if `strata scale` has changed it; otherwise the strategy of the Trainer decides."""
LAYOUT = "STRATA_LAYOUT"
"""How often the number of servers has changed in this attempt."""
SERVERS_BEFORE = "STRATA_SERVERS_BEFORE"
"""Number of servers before this process, a server, joined a running attempt; 0 if it was started with the others."""
_MAX_DIGITS = 20
_COORDINATOR = "STRATA_COORDINATOR"
_CHECKPOINTS = "STRATA_CHECKPOINTS"
_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
_NUMBERS = (*TORCHRUN[:4], "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", ATTEMPT, _MAX_RESTARTS)
_TEXTS = ("MASTER_ADDR", _COORDINATOR, _CHECKPOINTS)


class METRICS:
    """Names of our own heartbeat metrics. The slash keeps them apart from the names of keyword arguments."""

    agree_command = "strata/agree_command"
    """Id of the command that the ranks are agreeing on."""
    agree_limit = "strata/agree_limit"
    """Step beyond which this rank does not train until they have agreed."""
    agreed_command = "strata/agreed_command"
    """Id of the command before that one, and its limit: a rank may reach the next command before all have read it."""
    agreed_limit = "strata/agreed_limit"
    last_steps = ("strata/last_step/0", "strata/last_step/1")
    """Last step of a rank's training, alternating between two names at each end of training.

    A rank that has read all values may reach its next end before the others have read its own, but not the one after.
    """
    saving_step = "strata/saving_step"
    """Step of the save in progress, or `NOT_SAVING`."""
    saving_fraction = "strata/saving_fraction"
    per_rank = "strata/per_rank"
    """Above 0 if a loader's state is per rank, so that only the same world size can resume from a checkpoint."""
    lost_updates = "strata/lost_updates"
    """Updates of workers that a parameter server has lost, because it was restarted from the last checkpoint."""
    layout = "strata/layout"
    """How often the number of servers has changed in this attempt, as this process knows; half a number more while a
    server that joins is ready for the next change."""
    moved_rows = "strata/moved_rows"
    """Rows that a parameter server got from others in the last change of their number."""
    has_copies = "strata/has_copies"
    """Above 0 on a parameter server that keeps a copy of another one's rows, so that their number cannot change."""

    @staticmethod
    def is_ours(name: str) -> bool:
        return name.startswith("strata/")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one worker process of a run is started with."""

    identity: Identity
    coordinator: str
    """Address of the coordinator or of the node's relay."""
    checkpoints: str
    """Directory or URL."""
    max_restarts: int = 0
    num_servers: int = 0
    """Parameter servers, if `strata scale` has changed their number; 0: the script decides."""
    layout: int = 0
    """How often the number of servers has changed in this attempt."""
    servers_before: int = 0
    """The number of servers that this one joins while the run trains; 0: it starts with all others."""


def worker_environment(spec: WorkerSpec) -> dict[str, str]:
    """Return the variables that torchrun would set, and those that `read_environment` needs."""
    identity = spec.identity
    return {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.world_size),
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(identity.local_world_size),
        "GROUP_RANK": str(identity.node_rank),
        "GROUP_WORLD_SIZE": str(identity.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(identity.rank),
        "ROLE_WORLD_SIZE": str(identity.world_size),
        "MASTER_ADDR": identity.master_addr,
        "MASTER_PORT": str(identity.master_port),
        "TORCHELASTIC_RUN_ID": identity.run,
        "TORCHELASTIC_RESTART_COUNT": str(identity.attempt),
        _MAX_RESTARTS: str(spec.max_restarts),
        JOINED: "",
        RUN: identity.run,
        ATTEMPT: str(identity.attempt),
        INCARNATION: str(identity.incarnation),
        _COORDINATOR: spec.coordinator,
        _CHECKPOINTS: spec.checkpoints,
        SERVERS: str(spec.num_servers),
        LAYOUT: str(spec.layout),
        SERVERS_BEFORE: str(spec.servers_before),
    }


def read_environment(variables: Mapping[str, str]) -> WorkerSpec | None:
    """Return what the agent has set, or None in a process that no agent started.

    Raises:
        ConfigError: A variable is missing or not a number.
    """
    if RUN not in variables:
        return None
    for name in _TEXTS:
        _require(variables, name)
    for name in _NUMBERS:
        _require_number(variables, name)
    identity = Identity.from_environment(variables, launchers=(TORCHRUN,), cure="leave them as `strata run` set them")
    assert identity is not None
    return WorkerSpec(
        identity=identity,
        coordinator=variables[_COORDINATOR],
        checkpoints=variables[_CHECKPOINTS],
        max_restarts=int(variables[_MAX_RESTARTS]),
        num_servers=_count(variables, SERVERS),
        layout=_count(variables, LAYOUT),
        servers_before=_count(variables, SERVERS_BEFORE),
    )


def note_last_step(variables: Mapping[str, str], step: int) -> None:
    """Record the last step of a worker that leaves, if its agent asked for it."""
    if path := variables.get(LAST_STEP):
        with contextlib.suppress(OSError):
            Path(path).write_bytes(b"%d" % step)


def take_last_step(path: Path) -> int | None:
    """Read and remove what `note_last_step` wrote; None if the worker was killed or made no step."""
    with contextlib.suppress(OSError, ValueError):
        step = int(path.read_bytes()[:_MAX_DIGITS])
        path.unlink()
        return step
    return None


def take_alone(path: Path) -> bool:
    """Read and remove what a worker declared last: whether it may be restarted without the others."""
    with contextlib.suppress(OSError):
        declared = path.read_bytes()
        path.unlink()
        return declared == MAY_RESTART_ALONE
    return False


def _require(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise ConfigError(
            f"{name} is not set although {RUN} is; start workers with `strata run`, and keep the environment that it "
            "sets",
            field=name,
        )
    return variables[name]


def _require_number(variables: Mapping[str, str], name: str) -> None:
    text = _require(variables, name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a number; leave it as `strata run` set it", field=name)


def _count(variables: Mapping[str, str], name: str) -> int:
    """Return a number that an agent of an earlier version does not set."""
    if name in variables:
        _require_number(variables, name)
    return int(variables.get(name, "0"))


def storage_options_in(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the options of `strata run --storage-option`.

    Raises:
        ConfigError: The variable does not hold what `strata run` writes.
    """
    try:
        return msgspec.json.decode(variables.get(STORAGE_OPTIONS) or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{STORAGE_OPTIONS} is not a JSON object of strings: {error}; leave it as `strata run` set it",
            field=STORAGE_OPTIONS,
        ) from None
