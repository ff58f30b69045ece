"""Design pages and docstrings name modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`([\w/]+\.py)`")
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [
    "/" + path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "scripts", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
USER_SCRIPTS = {"train.py", "before.py", "predict.py"}  # scripts of the reader


def unknown_modules(text: str) -> list[str]:
    names = {name for name in NAME.findall(text) if name not in USER_SCRIPTS}
    return sorted(name for name in names if not any(module.endswith(f"/{name}") for module in MODULES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    assert unknown_modules(page.read_text(encoding="utf-8")) == []


def test_every_module_that_a_docstring_names_exists() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): unknown
        for path in sorted((ROOT / "src" / "strata").rglob("*.py"))
        if (unknown := unknown_modules(path.read_text(encoding="utf-8")))
    }

    assert found == {}
