"""The fenced blocks of a Markdown file, for tests that run the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(.*)$")


@dataclass(frozen=True)
class Block:
    line: int
    """The number of its first line of text, counted from 1."""
    info: str
    """The info string after the fence: `python`, `yaml coordinator.yaml`."""
    text: str


def prose(path: Path) -> str:
    """Return the page without its blocks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for block in blocks(path):
        num_lines = block.text.count("\n")
        lines[block.line - 1 : block.line - 1 + num_lines] = [""] * num_lines
    return "\n".join(lines)


def blocks(path: Path) -> list[Block]:
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened = (number + 1, fence[1].strip())
        else:
            first, info = opened
            found.append(Block(first, info, "\n".join(lines[first - 1 : number - 1]) + "\n"))
            opened = None
    assert opened is None, f"{path.name}:{opened}: a fence is not closed"
    return found
