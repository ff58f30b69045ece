"""One class name stands for one idea within a package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "strata"
SEPARATE = ("v1/", "bench/contenders/", "coordinator/http/models.py", "dashboard/explorer/models.py")
"""Generated code, programs that never meet, and the JSON forms of what other modules define."""
SHARED = {
    "integrations": {"StrataCallback"},  # one per framework; a script imports one of them
    "servers": {"Part", "Push"},  # a push and its message; a part of an answer and of a snapshot
}


def repeated(definitions: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Return the places of each class that a package defines more than once.

    Args:
        definitions: Path below the source, and name of the class.
    """
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, name in definitions:
        package = path.split("/")[0]
        if not path.startswith(SEPARATE) and name not in SHARED.get(package, ()):
            places[package, name].append(path)
    return {key: found for key, found in places.items() if len(found) > 1}


def test_no_class_name_stands_for_two_ideas_within_one_package() -> None:
    definitions = [
        (path.relative_to(SOURCE).as_posix(), node.name)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]

    assert len(definitions) > 500
    assert repeated(definitions) == {}


def test_a_name_that_two_modules_define_is_found() -> None:
    definitions = [("data/a.py", "Plan"), ("data/order/b.py", "Plan"), ("train/c.py", "Plan"), ("data/a.py", "Row")]

    assert repeated(definitions) == {("data", "Plan"): ["data/a.py", "data/order/b.py"]}
