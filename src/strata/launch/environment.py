"""What a worker finds in its environment: torchrun's variables, so that scripts start unchanged, and a few of ours.

The agent writes it, `strata.init()` reads it; both sides are here, so that they cannot differ.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

STOPPED = 83
"""The exit code of a worker that saved and stopped because it was asked to; no shell or signal gives it."""

STACKS_SIGNAL = "SIGUSR2"
"""At which a worker writes where it stands to its log."""

NOTE = "strata: "
"""With which our own lines in a worker's log begin: nobody died of them."""

NOT_SAVING = -1.0
"""In place of a step that is being saved: a metric stays what it was last, so this says that there is none any more."""

NEEDED_WORLD_SIZE = "strata/world_size"
"""In a checkpoint's metadata: the only number of workers that can go on from it, where a loader's state is per rank."""

JOINED = "STRATA_JOINED"
"""The process that has joined as this rank: what it starts inherits its environment, and is no rank."""
STORAGE_OPTIONS = "STRATA_STORAGE_OPTIONS"
"""For the run's checkpoints, as JSON. No secrets: a run keeps its variables in a file."""
MAX_DIGITS = 20
LAST_STEP = "STRATA_LAST_STEP"
"""The file in which a worker that leaves notes its last step: it has left the coordinator when its process ends."""
_RUN = "STRATA_RUN"
_ATTEMPT = "STRATA_ATTEMPT"
_COORDINATOR = "STRATA_COORDINATOR"
_CHECKPOINTS = "STRATA_CHECKPOINTS"


class METRICS:
    """Heartbeat metrics of ours, beside the user's own; the names cannot be those of arguments."""

    attempt = "strata/attempt"
    rank = "strata/rank"
    restored_at_s = "strata/restored_at_s"
    first_step_at_s = "strata/first_step_at_s"
    agree_command = "strata/agree_command"
    """About which command the ranks agree."""
    agree_limit = "strata/agree_limit"
    """How far a rank's training goes until they have."""
    agreed_command = "strata/agreed_command"
    """The command before that, and the limit: a rank that goes on to the next may not have been read by all."""
    agreed_limit = "strata/agreed_limit"
    last_steps = ("strata/last_step/0", "strata/last_step/1")
    """After which a rank's training has come to its end: at its ends number 0, 2, …, and number 1, 3, ….

    A rank that has read everybody's may come to its next end before everybody has read its own; not beyond that one."""
    saving_step = "strata/saving_step"
    """Of the save that is under way; or NOT_SAVING."""
    saving_fraction = "strata/saving_fraction"
    per_rank = "strata/per_rank"
    """Above 0: a loader's state is each rank's own, so that only as many workers can go on from a checkpoint."""

    @staticmethod
    def is_ours(name: str) -> bool:
        return name.startswith("strata/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which worker of which attempt of which run a process is."""

    run: str
    attempt: int
    """Counts the starts of the run's workers, from 0."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int
    coordinator: str
    """Where the coordinator, or the node's relay, is reached."""
    checkpoints: str
    """A directory or URL."""
    max_restarts: int = 0

    @property
    def worker_id(self) -> str:
        """What the coordinator calls it. The next attempt's worker of this rank takes the name over."""
        return f"rank-{self.rank}"

    @property
    def session(self) -> str:
        """What the ranks of this start have in common, and no other start ever had."""
        return f"{self.run}/{self.attempt}/{self.master_addr}:{self.master_port}"


def environment(place: Place) -> dict[str, str]:
    """As torchrun sets it, and what `place_in` reads."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.run,
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        JOINED: "",
        _RUN: place.run,
        _ATTEMPT: str(place.attempt),
        _COORDINATOR: place.coordinator,
        _CHECKPOINTS: place.checkpoints,
    }


def place_in(variables: Mapping[str, str]) -> Place | None:
    """What the agent has said; None in a process that no agent started.

    Raises:
        ConfigError: Something of it is missing or no number.
    """
    if _RUN not in variables:
        return None
    return Place(
        run=variables[_RUN],
        attempt=_number(variables, _ATTEMPT),
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE"),
        node_rank=_number(variables, "GROUP_RANK"),
        num_nodes=_number(variables, "GROUP_WORLD_SIZE"),
        master_addr=_text(variables, "MASTER_ADDR"),
        master_port=_number(variables, "MASTER_PORT"),
        coordinator=_text(variables, _COORDINATOR),
        checkpoints=_text(variables, _CHECKPOINTS),
        max_restarts=_number(variables, "TORCHELASTIC_MAX_RESTARTS"),
    )


def note_last_step(variables: Mapping[str, str], step: int) -> None:
    """By a worker that leaves; where nobody has asked for it, it does nothing."""
    if path := variables.get(LAST_STEP):
        with contextlib.suppress(OSError):
            Path(path).write_bytes(b"%d" % step)


def take_last_step(path: Path) -> int | None:
    """What a worker has left there; None if it was killed, or made no step that we know of."""
    with contextlib.suppress(OSError, ValueError):
        step = int(path.read_bytes()[:MAX_DIGITS])
        path.unlink()
        return step
    return None


def _text(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise ConfigError(
            f"{name} is not set although {_RUN} is; start workers with `strata run`, and let the script keep its "
            "environment",
            field=name,
        )
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number; leave it as `strata run` has set it", field=name) from None


def storage_options_in(variables: Mapping[str, str]) -> dict[str, str]:
    """What `strata run --storage-option` said.

    Raises:
        ConfigError: It is not what `strata run` writes.
    """
    try:
        return msgspec.json.decode(variables.get(STORAGE_OPTIONS) or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{STORAGE_OPTIONS} is not a JSON object of texts: {error}", field=STORAGE_OPTIONS) from None
