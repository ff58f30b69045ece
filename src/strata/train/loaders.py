"""The loaders of a context, whose states are saved in checkpoints.

A loader's state is *global* or *per rank*. The states of our loaders are global: a position in the order of all ranks,
from which any world size can resume. The state of another loader, such as torchdata's `StatefulDataLoader`, is what one
rank has read. A checkpoint keeps one per rank, and only the same world size can resume from it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.train.loader_rng import Beginnings

NO_STATE = (
    "has no state_dict and load_state_dict; use ctx.dataloader(dataset, …), a DataLoader whose sampler is "
    "ctx.sampler(dataset), or torchdata's StatefulDataLoader"
)


def is_path(source: Any) -> bool:
    """Return whether the source is a path, a URL or a list of them. Everything else is a dataset."""
    if isinstance(source, list | tuple):
        return all(isinstance(each, str | os.PathLike) for each in source[:1])
    return isinstance(source, str | os.PathLike)


def map_style_module() -> Any:
    """Import the loader for map-style datasets."""
    try:
        from strata.data import map_style  # noqa: PLC0415 - imports torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("a map-style dataset needs torch, which is not installed; pip install torch") from error
    return map_style


class Loaders:
    """The attached loaders, by name."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._loaders: dict[str, Any] = {}
        self._per_rank: set[str] = set()
        """Names of loaders whose state is per rank."""
        self._beginnings: dict[str, Beginnings] = {}
        """Generators of torch's own loaders."""
        self._waiting: dict[str, Mapping[str, Any]] = {}
        """Restored states of loaders that are not attached yet."""
        self._waiting_beginnings: dict[str, Mapping[str, Any]] = {}
        self._saved_world_size = world_size

    @property
    def are_per_rank(self) -> bool:
        """Whether only the same world size can resume from a checkpoint."""
        return bool(self._per_rank)

    def add(self, loader: Any, *, name: str = "", per_rank: bool | None = None) -> bool:
        """Attach a loader; return whether a restored state was waiting for it.

        Raises:
            InvalidArgument: The loader has no state, or its name is taken.
            ConfigError: The waiting state is per rank, and was saved with another world size.
        """
        name = name or f"loader-{len(self._loaders)}"
        if name in self._loaders:
            raise InvalidArgument(f"a loader {name!r} is already attached; give each loader its own name", field="name")
        if _is_torch(loader):
            _adopt(loader)
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise InvalidArgument(f"a {type(loader).__name__} {NO_STATE}", field="loader")
        is_ours = getattr(loader, "has_global_state", False)
        if _is_torch(loader) and not is_ours:
            from strata.train.loader_rng import remember  # noqa: PLC0415 - imports torch

            self._beginnings[name] = remember(loader, name)
        if not is_ours if per_rank is None else per_rank:
            self._per_rank.add(name)
        self._loaders[name] = loader
        if name not in self._waiting:
            return False
        self._load(name, self._waiting.pop(name), self._waiting_beginnings.pop(name, None))
        return True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of every loader; of a plain torch loader, of its samplers and dataset, as users do by hand."""
        for loader in self._loaders.values():
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            elif _is_torch(loader):
                for part in (loader.sampler, loader.batch_sampler, loader.dataset):
                    if hasattr(part, "set_epoch"):
                        part.set_epoch(epoch)

    def positions(self) -> tuple[Any, ...] | None:
        """Return the positions of all loaders, cheaply enough for every step; None if one of them is not ours."""
        found = tuple(getattr(loader, "position", None) for loader in self._loaders.values())
        return None if None in found else found

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loaders' entries for a checkpoint. The context adds its `world_size`."""
        return {
            "loaders": {name: loader.state_dict() for name, loader in self._loaders.items()},
            "per_rank": sorted(self._per_rank),
            "beginnings": {name: each.state_dict() for name, each in self._beginnings.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: A state is per rank, and was saved with another world size.
        """
        self._saved_world_size = int(state["world_size"])
        for name in state.get("per_rank", ()):
            self._check_world_size(name)
        beginnings = state.get("beginnings", {})
        for name, saved in state["loaders"].items():
            if name in self._loaders:
                self._load(name, saved, beginnings.get(name))
            else:
                self._waiting[name] = saved
                if name in beginnings:
                    self._waiting_beginnings[name] = beginnings[name]

    def _load(self, name: str, state: Mapping[str, Any], beginning: Mapping[str, Any] | None) -> None:
        if name in self._per_rank:
            self._check_world_size(name)
        self._loaders[name].load_state_dict(state)
        if name in self._beginnings and beginning is not None:
            self._beginnings[name].load_state_dict(beginning)

    def _check_world_size(self, name: str) -> None:
        saved, now = self._saved_world_size, self._world_size
        if saved != now:
            raise ConfigError(
                f"{saved} workers saved the checkpoint, and the state of loader {name!r} is per rank; {now} workers "
                f"cannot resume from it without repeating or losing rows. Resume with {saved} workers. To change the "
                "number of workers, load a map-style dataset with ctx.dataloader(dataset, …), or restart the epoch "
                "with ctx.restore(…, loaders=False)",
                field="workers",
            )


def _is_torch(loader: Any) -> bool:
    """Return whether it is a torch `DataLoader`, without importing torch."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(loader, data.DataLoader)


def _adopt(loader: Any) -> None:
    """Let a `DataLoader` that was built with `ctx.sampler` count what it delivers."""
    map_loader = sys.modules.get("strata.data.map_style")  # without it, there is no such sampler
    if map_loader is not None and map_loader.sampler_of(loader) is not None and not hasattr(loader, "map_rows"):
        map_loader.adopt(loader)
