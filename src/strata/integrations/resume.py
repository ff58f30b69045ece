"""What resuming inside a framework's loop needs, whichever framework that is.

A loader's state is *global* (a position in the order of all ranks, as ours have) or *per rank*. With a global one a
framework resumes on any number of workers, but its own counters must follow: they count batches of the current number
of workers. With any other, only the same number of workers can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError, InvalidArgument
from strata.train import init

if TYPE_CHECKING:
    from strata.train.context import Context

CURE = "train on a loader of ctx.dataloader(…)"


class Part:
    """Takes a part out of a checkpoint, for a framework that puts it into place itself."""

    def __init__(self) -> None:
        self.state: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class LazyState(Mapping[str, Any]):
    """A state that is made when somebody looks into it: most steps are not saved."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class FixedWorldSize:
    """Attached to a context in place of a framework's own loader, whose state only as many ranks can load."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self._world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: Another number of ranks has saved it.
        """
        saved = int(state["world_size"])
        if saved != self._world_size:
            raise ConfigError(
                f"the checkpoint was saved by {saved} workers, which had each read a part of the data of their own; "
                f"{self._world_size} workers cannot go on from it without repeating or losing rows. Resume with "
                f"{saved} workers (strata resume --workers {saved}); to change their number, {CURE}",
                field="workers",
            )


def context_of(ctx: Context | None, arguments: Mapping[str, Any]) -> Context:
    """The one that is given, or a new one.

    Raises:
        InvalidArgument: There are arguments for a new one beside it.
    """
    if ctx is None:
        return init(**arguments)
    if arguments:
        raise InvalidArgument(
            f"{', '.join(f'{name}=' for name in arguments)} cannot be set any more, since there is a context already; "
            "pass it to strata.init()",
            field=next(iter(arguments)),
        )
    return ctx


def has_global_state(loader: Any) -> bool:
    return bool(getattr(loader, "has_global_state", False))


def batches_done(loader: Any, *, accumulate: int) -> int:
    """How many batches of an epoch of this world size are as much as what was read of it, on another one.

    Raises:
        ConfigError: What is left cannot be cut into the steps that the framework will make.
    """
    total, left = len(loader), int(loader.num_batches_left)
    done = max(0, total - left)
    if left > total or done % accumulate:
        raise ConfigError(
            f"{left} of {total} batches are left of the epoch, and a framework that accumulates {accumulate} batches "
            "a step cannot begin in the middle of a step; scale without gradient accumulation, or resume with the "
            "number of workers that saved the checkpoint",
            field="workers",
        )
    return done
