"""The identity of a training process: its rank, its world size, its attempt and its run.

`Identity` is the one object that the loaders, the checkpoints, the agent and `strata.init()` share, and
`Identity.from_environment` is the one parser of the variables that launchers set. The generation of the membership is
not part of it: it changes while a process runs, so a worker asks its coordinator client for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from strata.errors import ConfigError
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RUN = "STRATA_RUN"
ATTEMPT = "STRATA_ATTEMPT"
INCARNATION = "STRATA_INCARNATION"
_UNNAMED_RUNS = ("", "none")
"""torchrun's id of a run without a name."""


class Launcher(NamedTuple):
    """The variables in which a launcher passes a process its ranks."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    needs_both: bool = False
    """Ignore the rank or the world size when the other one is not set, instead of raising an error."""


TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Also `strata run`, `accelerate launch` and `deepspeed`."""
SLURM = Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", needs_both=True)
"""In shells in which it starts no ranks, Slurm sets one of the two."""
OPEN_MPI = Launcher(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
MPICH = Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
LAUNCHERS = (TORCHRUN, SLURM, OPEN_MPI, MPICH)
"""In order of precedence: torchrun under Slurm starts more ranks than Slurm has tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which worker of which attempt of which run a process is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    attempt: int = 0
    """Number of earlier starts of this run's workers."""
    incarnation: int = 0
    """Number of earlier processes of this rank in this attempt: above 0 if it was restarted alone."""
    run: str = ""
    """Name of the run; empty if the launcher gave none."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    found_in: str = field(default="the defaults of a single process", compare=False)
    """Source of the ranks, for messages."""
    device: Any = field(default=None, compare=False)
    """Device that an accelerator object has assigned to this process; None if there is none."""

    @property
    def worker_id(self) -> str:
        """The worker's name at the coordinator. The worker of the same rank in the next attempt takes it over."""
        return f"rank-{self.rank}"

    @property
    def session(self) -> str:
        """A name that all ranks of one attempt share and that no other attempt has."""
        return f"{self.run}/{self.attempt}/{self.master_addr}:{self.master_port}"

    @classmethod
    def from_environment(
        cls, variables: Mapping[str, str], *, launchers: Sequence[Launcher] = LAUNCHERS, cure: str = "correct them"
    ) -> Identity | None:
        """Parse the variables of the first launcher that has set its own; return None if none has.

        Only the rank and the world size must be valid. Other programs set variables such as MASTER_PORT too, so the
        remaining numbers fall back to their defaults. `cure` ends error messages.

        Raises:
            ConfigError: A launcher's rank or world size is missing, not a number or out of range.
        """
        for launcher in launchers:
            if not _is_used(launcher, variables, cure):
                continue
            rank, world_size = (_require_number(variables, name, cure) for name in launcher[:2])
            if not 0 <= rank < world_size:
                raise ConfigError(
                    f"{launcher.rank}={rank} in the environment is not below {launcher.world_size}={world_size}; "
                    f"{cure}",
                    field=launcher.rank,
                )
            run = variables.get(RUN) or variables.get("TORCHELASTIC_RUN_ID", "")
            return cls(
                rank=rank,
                world_size=world_size,
                local_rank=_number(variables, launcher.local_rank, 0),
                local_world_size=_number(variables, launcher.local_world_size, world_size),
                node_rank=_number(variables, "GROUP_RANK", 0),
                num_nodes=_number(variables, "GROUP_WORLD_SIZE", 1),
                attempt=_number(variables, ATTEMPT, _number(variables, "TORCHELASTIC_RESTART_COUNT", 0)),
                incarnation=_number(variables, INCARNATION, 0),
                run="" if run in _UNNAMED_RUNS and RUN not in variables else run,
                master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
                master_port=_number(variables, "MASTER_PORT", 0),
                found_in=f"the environment ({launcher.rank} and {launcher.world_size})",
            )
        return None


def process_name(rank: int, *, world_size: int, num_servers: int) -> str:
    """Return how messages and views name a process: `rank 1`; or `server 0`, since the last ranks may be servers."""
    num_workers = world_size - num_servers
    return f"rank {rank}" if rank < num_workers or not num_servers else f"server {rank - num_workers}"


def process_counts(world_size: int, num_servers: int) -> str:
    """Return `4 workers`, or `2 workers and 2 servers`."""
    servers = f" and {counted(num_servers, 'server')}" if num_servers else ""
    return f"{counted(world_size - num_servers, 'worker')}{servers}"


def _is_used(launcher: Launcher, variables: Mapping[str, str], cure: str) -> bool:
    present = [name for name in launcher[:2] if name in variables]
    if len(present) == 1 and not launcher.needs_both:
        missing = launcher.world_size if present[0] == launcher.rank else launcher.rank
        raise ConfigError(f"the environment has {present[0]} but not {missing}; set both, or {cure}", field=missing)
    return len(present) == 2


def _require_number(variables: Mapping[str, str], name: str, cure: str) -> int:
    text = variables[name]
    if not _is_number(text):
        raise ConfigError(f"{name}={text!r} in the environment is not a number; {cure}", field=name)
    return int(text)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    return int(text) if _is_number(text) else default


def _is_number(text: str) -> bool:
    return text.isascii() and text.strip().isdigit()
