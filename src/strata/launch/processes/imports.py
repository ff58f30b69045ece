"""What a script will import, read from its text: the warm process imports it before the script is there.

Only libraries that are known to be safe to fork count: they start no threads and touch no accelerator when they are
imported. The script never runs for this, nor does anything that it imports and that is not on the list.
"""

from __future__ import annotations

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_SOURCE_BYTES = 8 << 20
"""A longer script is data."""

SAFE = ("numpy", "torch", "pyarrow", "pandas", "msgspec", "xxhash", "safetensors")
"""Imported as a whole, whichever part of it a script names. A test counts the threads after them and all of ours."""

FRAMEWORKS = {
    "accelerate": ("accelerate", "strata.integrations.accelerate"),
    "lightning": ("lightning.pytorch", "strata.integrations.lightning"),
    "transformers": ("transformers", "strata.integrations.transformers"),
}
"""As safe, and slow: they take longer than torch, which they import. Our module, where the script names it."""

LAZY = ("transformers",)
"""Of these a name is imported when it is first looked up, so what a script imports from them is looked up, too."""

BEHIND = {
    "strata.train": ("strata.train.context", "strata.train.startup"),
    "strata.checkpoint": ("strata.checkpoint.manager",),
    "strata.data": ("strata.data.structured", "strata.data.formats.parquet.format"),
    "strata.coordinator.client": ("strata.coordinator.client",),
}
"""Our packages load what stands behind a name when it is first used, so it is this that takes the time."""
BEHIND_WITH_TORCH = {"strata.data": ("strata.data.torch",)}
"""What is used in a script that has torch; it would import it."""


AT_FIRST_USE = {"optim": "torch._dynamo", "DistributedDataParallel": "torch._dynamo"}
"""What torch imports when something of this name is first used: an optimizer alone takes as long as torch itself."""


def preloads(script: str, *, is_module: bool = False, directory: str = ".") -> tuple[str, ...]:
    """What the script in this file, or this module, will import. Nothing if it cannot be read: running it says why."""
    path = _find_module(script, directory) if is_module else Path(directory, script)
    try:
        if path is None or path.stat().st_size > MAX_SOURCE_BYTES:
            return ()
        return safe_imports(path.read_bytes())
    except OSError:
        return ()


def safe_imports(source: str | bytes) -> tuple[str, ...]:
    """Modules to import before a script with this text is run, in a fixed order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    names, words = set(_imported(tree.body)), _words(tree)
    frameworks = [name for name in FRAMEWORKS if any(_is_within(each, name) for each in names)]
    if frameworks:  # they import torch, and make optimizers
        names.add("torch")
        words.add("optim")
    found = [name for name in SAFE if any(_is_within(each, name) for each in names)]
    if "torch" in found:
        found += sorted({module for name, module in AT_FIRST_USE.items() if name in words})
    for name in frameworks:
        found += _of_framework(name, names, words)
    for package, modules in BEHIND.items():
        # `import strata` may mean all of it; `from strata.data import …` gives `strata.data` and names in it
        if any(_is_within(each, package) or each == "strata" for each in names):
            found += modules
            if "torch" in found:
                found += BEHIND_WITH_TORCH.get(package, ())
    return tuple(found)


def _of_framework(framework: str, names: set[str], words: set[str]) -> Iterator[str]:
    module, ours = FRAMEWORKS[framework]
    yield module
    if framework in LAZY:
        used = {each.split(".")[1] for each in names if each.startswith(f"{framework}.")} - {"*"}
        used |= {word.removeprefix(f"{framework}.") for word in words if word.startswith(f"{framework}.")}
        yield from sorted(f"{framework}:{name}" for name in used)
    if any(_is_within(each, ours) for each in names):
        yield ours


def _imported(body: Sequence[ast.stmt]) -> Iterator[str]:
    """At the top level, also where that is conditional. What a function imports, it may never import."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.If(test=test, body=first, orelse=other):
                yield from _imported(other if _is_for_type_checkers(test) else [*first, *other])
            case ast.Try(body=first, handlers=handlers, orelse=other, finalbody=last):
                yield from _imported([*first, *other, *last])
                for handler in handlers:
                    yield from _imported(handler.body)


def _words(tree: ast.AST) -> set[str]:
    """Every name that stands somewhere in a script: of variables, attributes (also as `owner.name`) and imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=word):
                found.update((word, f"{owner}.{word}"))
            case ast.Name(id=word) | ast.Attribute(attr=word):
                found.add(word)
            case ast.Import(names=aliases):
                found.update(part for alias in aliases for part in alias.name.split("."))
            case ast.ImportFrom(module=module, names=aliases):
                found.update((module or "").split("."), (alias.name for alias in aliases))
    return found


def _is_for_type_checkers(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _find_module(name: str, directory: str) -> Path | None:
    """Where `python -m name` finds its text. A package above it is not imported, as it would be to find it exactly."""
    paths: Sequence[str] | None = [directory, *sys.path]
    for package in name.split("."):
        spec = PathFinder.find_spec(package, paths) if paths is not None else None
        if spec is None:
            return None
        paths = spec.submodule_search_locations
    if paths is not None:  # a package: what it runs is its `__main__`
        spec = PathFinder.find_spec("__main__", paths)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None
