"""Find out what a script will import from its text, so that the warm process can import it in advance.

Only libraries that are known to be safe to fork count: importing them starts no threads and touches no accelerator.
Neither the script nor any other of its imports is executed for this.
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
"""A larger file is not a script."""

SAFE = ("numpy", "torch", "pyarrow", "pandas", "msgspec", "xxhash", "safetensors")
"""Imported as a whole, whichever part a script names. A test counts the threads after these and our own modules."""

FRAMEWORKS = {
    "accelerate": ("accelerate", "strata.integrations.accelerate"),
    "lightning": ("lightning.pytorch", "strata.integrations.lightning"),
    "transformers": ("transformers", "strata.integrations.transformers"),
}
"""Frameworks, with the module to import and our integration. They are slower to import than torch, which they use."""

LAZY = ("transformers",)
"""Packages that import a name when it is first looked up; the names that a script uses are looked up, too."""

BEHIND = {
    "strata.train": ("strata.train.context", "strata.train.startup"),
    "strata.checkpoint": ("strata.checkpoint.manager",),
    "strata.data": ("strata.data.structured", "strata.data.formats.parquet.format"),
    "strata.coordinator.client": ("strata.coordinator.client",),
}
"""Our packages import lazily; these are the modules that take time."""
BEHIND_WITH_TORCH = {"strata.data": ("strata.data.torch",)}
"""The same for scripts that use torch, which these modules import."""


AT_FIRST_USE = {"optim": "torch._dynamo", "DistributedDataParallel": "torch._dynamo"}
"""Modules that torch imports when a name is first used: an optimizer alone takes as long as torch itself."""


def preloads(script: str, *, is_module: bool = False, directory: str = ".") -> tuple[str, ...]:
    """Return what a script or module will import; nothing if it cannot be read, as running it will report."""
    path = _find_module(script, directory) if is_module else Path(directory, script)
    try:
        if path is None or path.stat().st_size > MAX_SOURCE_BYTES:
            return ()
        return safe_imports(path.read_bytes())
    except OSError:
        return ()


def safe_imports(source: str | bytes) -> tuple[str, ...]:
    """Return the modules to import before a script with this text runs, in a fixed order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    names, words = set(_imported(tree.body)), _words(tree)
    frameworks = [name for name in FRAMEWORKS if any(_is_within(each, name) for each in names)]
    if frameworks:  # they import torch and create optimizers
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
    """Yield imports at the top level, even conditional ones. Imports inside functions may never happen."""
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
    """Return every name in a script: of variables, attributes (also as `owner.name`) and imports."""
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
    """Return the file that `python -m name` runs, without importing parent packages."""
    paths: Sequence[str] | None = [directory, *sys.path]
    for package in name.split("."):
        spec = PathFinder.find_spec(package, paths) if paths is not None else None
        if spec is None:
            return None
        paths = spec.submodule_search_locations
    if paths is not None:  # a package runs its `__main__`
        spec = PathFinder.find_spec("__main__", paths)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None
