"""The last step of a script: whether it is saved and, if not, from what it can be saved at the end. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Unsaved = tuple[Mapping[str, Any], dict[str, Any]]
    Positions = tuple[Any, ...] | None


class LastStep:
    """What a context knows about the last step that was made. Steps are saved only between two of them."""

    def __init__(self) -> None:
        self.is_new = False
        """A step was reported since the last `maybe_checkpoint`."""
        self.is_under_way = False
        """A step was made since the last common end of training."""
        self.ends_elsewhere = False
        """The training loop belongs to a framework, whose callback calls `save_last` at its end."""
        self.saved = -1
        """Last step that was saved or restored."""
        self.unsaved: Unsaved | None = None
        """State and arguments of the last `maybe_checkpoint`, if it did not save."""
        self._positions: Positions = ()

    def forget(self) -> None:
        """Forget the step, because another state is loaded."""
        self.unsaved, self.is_under_way, self.is_new = None, False, False

    def keep(self, unsaved: Unsaved | None, positions: Positions) -> None:
        """Keep what a step that is not saved now can be saved from later.

        Args:
            unsaved: State and arguments; None if the state is valid only now.
            positions: Of the loaders after the step; None if one of them has none.
        """
        self.unsaved, self._positions = unsaved, positions

    def take(self) -> Unsaved | None:
        """End training; return what the last step is saved from, unless it is saved."""
        unsaved, self.unsaved, self.is_under_way = self.unsaved, None, False
        return unsaved

    def why_not_here(self, positions: Positions) -> str:
        """Return why the loaders, now at these positions, may have gone past the step; empty if they have not."""
        if self._positions is None:
            return "a loader of another library may have delivered a batch after it"
        return "" if self._positions == positions else "a batch was taken from a loader after it"
