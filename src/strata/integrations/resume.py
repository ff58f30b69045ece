"""What all integrations need to resume inside a framework's loop.

A loader's state is *global* (a position in the order of all ranks, as in our loaders) or *per rank*. With a global
state a framework resumes with any world size, but its own counters must be adjusted: they count batches of the current
world size. With a state per rank, only the same world size can resume.
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
    """Receives a part of a checkpoint, for a framework that applies it itself."""

    def __init__(self) -> None:
        self.state: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class LazyState(Mapping[str, Any]):
    """A state that is built on first access: most steps are not saved."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _built(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, name: str) -> Any:
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._built)

    def __len__(self) -> int:
        return len(self._built)


class FixedWorldSize:
    """Attached to a context instead of a framework's own loader, whose state is per rank."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self._world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: The state was saved with another world size.
        """
        saved = int(state["world_size"])
        if saved != self._world_size:
            raise ConfigError(
                f"{saved} workers saved the checkpoint, and the state of their loader is per rank; {self._world_size} "
                "workers cannot resume from it without repeating or losing rows. Resume with "
                f"{saved} workers (strata resume --workers {saved}); to change their number, {CURE}",
                field="workers",
            )


def context_of(ctx: Context | None, arguments: Mapping[str, Any]) -> Context:
    """Return the given context, or a new one.

    Raises:
        InvalidArgument: Arguments for a new context were passed together with a context.
    """
    if ctx is None:
        return init(**arguments)
    if arguments:
        raise InvalidArgument(
            f"{', '.join(f'{name}=' for name in arguments)} cannot be combined with an existing context; pass it to "
            "strata.init()",
            field=next(iter(arguments)),
        )
    return ctx


def has_global_state(loader: Any) -> bool:
    return bool(getattr(loader, "has_global_state", False))


def batches_done(loader: Any, *, accumulate: int) -> int:
    """Return the number of batches of this world size that correspond to the rows already read with another one.

    Raises:
        ConfigError: The rest of the epoch does not start at a step of the framework.
    """
    total, left = len(loader), int(loader.num_batches_left)
    done = max(0, total - left)
    if left > total or done % accumulate:
        raise ConfigError(
            f"{left} of {total} batches of the epoch are left, which does not start at a step: the framework "
            f"accumulates {accumulate} batches per step. Scale without gradient accumulation, or resume with the "
            "number of workers that saved the checkpoint",
            field="workers",
        )
    return done
