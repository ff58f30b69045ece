"""Where the demo is shown: on a terminal with a picture that is drawn over, elsewhere as plain lines, or not at all."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.live import Live

from strata.demo import view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from strata.demo.view import RunFacts

REFRESH_S = 0.125
TOLD_S = 5.0
"""Between two lines, where nothing can be drawn over."""


class Stage:
    def __init__(self, console: Console | None) -> None:
        """None: nobody looks."""
        self.shown: list[RenderableType] = []
        """What stays and is worth a picture, in order."""
        self._console = console
        self._drawn_s = 0.0
        self._live: Live | None = None

    @property
    def width(self) -> int:
        return min(self._console.width, view.MAX_WIDTH) if self._console is not None else view.MIN_WIDTH

    def say(self, *what: RenderableType, is_for_picture: bool = True) -> None:
        assert not any(isinstance(each, str) and "\n" in each for each in what), "a string is one line"
        if is_for_picture:
            self.shown += what
        if self._console is not None:
            for each in what:
                self._console.print(each, width=self.width)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """What is drawn in it is gone at its end."""
        self._drawn_s = time.monotonic()
        if self._console is None or not self._can_draw:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw again."""
        if self._console is None:
            return False
        return time.monotonic() - self._drawn_s >= (REFRESH_S if self._live is not None else TOLD_S)

    def draw(self, facts: RunFacts) -> None:
        self._drawn_s = time.monotonic()
        if self._live is not None:
            self._live.update(view.live(facts, self.width), refresh=True)
        elif self._console is not None:
            self._console.print(view.progress_line(facts), highlight=False)

    @property
    def _can_draw(self) -> bool:
        # Not rich's own opinion: FORCE_COLOR makes it take a log file for a terminal.
        assert self._console is not None
        return self._console.file.isatty() and not self._console.is_dumb_terminal
