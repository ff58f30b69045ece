"""Dependencies point down only.

The checker reads every module of the package, not what happens to be imported in a run, so an import inside a function
or under `if TYPE_CHECKING` counts as well: a module that names a type of a higher layer cannot be understood without
that layer, and should use a `Protocol`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# From the top down. A package may import from every layer below its own, and from none beside it.
LAYERS = (
    {"cli"},
    {"dashboard", "operator", "demo", "bench", "doctor"},
    {"tune"},
    {"integrations", "trainer"},
    {"servers"},
    {"train"},
    {"launch"},
    {"coordinator", "checkpoint", "data"},
    {"storage", "transport"},
    {"v1"},
    {
        "errors",
        "clock",
        "config",
        "identity",
        "lifecycle",
        "printing",
        "scratch",
        "splitmix",
        "terminal",
        "tracing",
        "_version",
    },
)
DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}
GROUND = LAYERS[-1]  # small modules that may use one another
# `TrainingOrchestrator.tune` and `Trainer.tune` enter a higher layer, which is loaded when they are called, and so does
# `dashboard=True`.
ENTRANCES = {
    "strata.train.orchestrator": {"tune", "dashboard"},
    "strata.trainer.trainer": {"tune"},
    "strata.trainer.tuning": {"tune"},
}
SHOWS_ALL = {"bench", "demo"}  # they put everything to work, so they may import everything but the command line

WIRE_MODULES = (
    r"serve\.(service|session.*)|wire|relay\..*|client\..*"  # of the coordinator: where generated messages end
)

# The folders of a package, from the top down, by the same rule. Modules outside folders join them and may import any,
# except those that every folder may import.
FOLDERS = {
    "checkpoint": ({"tools"}, {"saver"}, {"save", "load"}, {"group"}, {"format"}),
    "coordinator": ({"relay", "http"}, {"client", "serve"}, {"journal"}, {"state"}),
    "data": (
        {"runtime", "iceberg", "delta", "lance"},
        {"batch", "shared"},
        {"plan"},
        {"formats"},
        {"filter"},
        {"source"},
        {"order"},
    ),
    "launch": ({"nodes"}, {"record"}, {"processes"}),
    "servers": ({"table"},),
    "tune": ({"state"}, {"samplers", "schedulers"}, {"space"}),
    "trainer": ({"models"}, {"features", "graph", "metrics", "optimizer", "strategy"}),
}
SHARED = {
    "checkpoint": {"catalog"},
    "coordinator": {"config", "extension", "timeouts", "wire"},
    "data": {"arrow_types", "config", "memory", "pyarrow_private"},
    "launch": {"environment", "protocol", "spec"},
    "servers": set(),
    "tune": {"packages"},
    "trainer": set(),
}
PURE_FOLDERS = (
    *("strata.coordinator.state", "strata.checkpoint.format", "strata.data.order", "strata.servers.table"),
    *("strata.tune.schedulers", "strata.tune.state"),
)

IO_MODULES = {
    *("asyncio", "concurrent", "http", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select"),
    *(
        "selectors",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
    ),
    *("fastapi", "grpc", "psutil", "sqlalchemy", "uvicorn", "yaml"),
}


def imports(module: str, text: str, *, is_package: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` gives `a.b`, which may be a module or a name in one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join([*parents, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    """`strata.coordinator.state.ring` → `coordinator`; empty for the root."""
    return [*name.split("."), ""][1]


def direction_problem(module: str, imported: str) -> str | None:
    here, there = package_of(module), package_of(imported)
    if not imported.startswith("strata.") or here == there:
        return None
    if here == "" or (module == "strata.train" and there == "trainer"):
        return None  # they only lend names, and load nothing: tests/unit/test_import.py
    if there in ENTRANCES.get(module, ()):
        return None
    if here in SHOWS_ALL and there != "cli":
        return None
    if there not in DEPTH:
        return f"{module} imports {imported}: name its home module, the root's names are for users"
    if here not in DEPTH:
        return f"{module}: package {here!r} has no layer yet; give it one in this test"
    if DEPTH[here] < DEPTH[there] or (here in GROUND and there in GROUND):
        return None
    return f"{module} imports {imported}: {here} stands {'beside' if DEPTH[here] == DEPTH[there] else 'below'} {there}"


def wire_problem(module: str, imported: str) -> str | None:
    if not imported.startswith("strata.v1.") or package_of(module) in {"v1", "transport", *SHOWS_ALL}:
        return None
    if package_of(module) == "coordinator" and re.fullmatch(WIRE_MODULES, module.split(".", 2)[2]):
        return None
    return f"{module} imports {imported}: generated messages end at the service and the client"


def folder_problem(module: str, imported: str) -> str | None:
    """Inside a package, folders have layers as well."""
    package = package_of(module)
    if package != package_of(imported) or package not in FOLDERS:
        return None
    depth = {folder: depth for depth, layer in enumerate(FOLDERS[package]) for folder in layer}
    here, there = (name.split(".")[2] if name.count(".") > 1 else "" for name in (module, imported))
    if here not in depth or here == there or there in SHARED[package]:
        return None
    if there not in depth:
        return f"{module} imports {imported}: {there} is above the folders of {package}"
    if depth[here] < depth[there]:
        return None
    return f"{module} imports {imported}: {here} is {'beside' if depth[here] == depth[there] else 'below'} {there}"


def is_pure(module: str) -> bool:
    return module.startswith(tuple(f"{folder}." for folder in PURE_FOLDERS))


def purity_problems(modules: Mapping[str, set[str]]) -> Iterator[str]:
    """A pure module imports no I/O, and nothing of ours that does."""
    for pure in sorted(filter(is_pure, modules)):
        reached, waiting = {pure}, [pure]
        while waiting:
            module = waiting.pop()
            for imported in sorted(modules[module]):
                if imported.split(".")[0] in IO_MODULES:
                    yield f"{pure} is pure, but {'it' if module == pure else module} imports {imported}"
                home = next((name for name in (imported, imported.rpartition(".")[0]) if name in modules), None)
                if home is not None and home not in reached | {"strata"}:
                    reached.add(home)
                    waiting.append(home)


def problems(sources: Mapping[str, str], packages: set[str] | None = None) -> list[str]:
    """Return the violations in modules given as {dotted name: text}."""
    modules = {name: set(imports(name, text, is_package=name in (packages or ()))) for name, text in sources.items()}
    pairs = [(module, imported) for module, found in sorted(modules.items()) for imported in sorted(found)]
    rules = [
        rule(module, imported)
        for module, imported in pairs
        for rule in (direction_problem, folder_problem, wire_problem)
    ]
    return [*filter(None, rules), *purity_problems(modules)]


def read_sources() -> tuple[dict[str, str], set[str]]:
    sources, packages = {}, set()
    for path in sorted((SOURCE / "strata").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
        if parts[-1] == "__init__":
            packages.add(name)
    return sources, packages


def test_every_import_in_the_package_points_down() -> None:
    sources, packages = read_sources()

    assert len(sources) > 10
    assert problems(sources, packages) == []


def test_every_package_has_a_layer() -> None:
    found = {
        path.stem for path in (SOURCE / "strata").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }

    assert found - {"__init__"} <= DEPTH.keys()


@pytest.mark.parametrize(
    ("module", "text", "problem"),
    [
        ("strata.storage.s3", "import strata.coordinator.state.core", "storage stands below coordinator"),
        ("strata.data.plan.plan", "from strata.checkpoint import manifest", "data stands beside checkpoint"),
        ("strata.data.plan.plan", "from ...checkpoint import manifest", "data stands beside checkpoint"),
        ("strata.errors", "def f():\n    from strata import train", "errors stands below train"),
        ("strata.train.loop", "if TYPE_CHECKING:\n    from strata.cli.app import app", "train stands below cli"),
        ("strata.demo.show", "from strata.cli import main", "demo stands below cli"),
        ("strata.train.loop", "from strata import CoordinatorClient", "name its home module"),
        ("strata.extra.loop", "from strata.errors import StrataError", "'extra' has no layer yet"),
        ("strata.coordinator.serve.engine", "from strata.v1 import calls_pb2", "generated messages end"),
        ("strata.coordinator.service_table", "from strata.v1 import calls_pb2", "generated messages end"),
        ("strata.coordinator.state.ring", "import time", "ring is pure, but it imports time"),
        ("strata.coordinator.state.core", "from os import path", "core is pure, but it imports os.path"),
    ],
)
def test_the_checker_finds_what_it_is_for(module: str, text: str, problem: str) -> None:
    found = problems({module: text})

    assert len(found) == 1
    assert problem in found[0]


def test_the_checker_finds_io_behind_another_module_of_ours() -> None:
    sources = {"strata.coordinator.state.core": "from strata.clock import Clock", "strata.clock": "import time"}

    assert problems(sources) == ["strata.coordinator.state.core is pure, but strata.clock imports time"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("strata.cli.app", "from strata import bench, config"),
        ("strata.bench.rpc", "from strata import CoordinatorClient\nfrom strata.v1 import calls_pb2"),
        ("strata.coordinator.client.sync", "from strata.v1 import calls_pb2"),
        ("strata.coordinator.state.core", "from strata.coordinator.state.ring import place\nimport numpy"),
        ("strata.config", "from strata.errors import ConfigError"),
        ("strata.data.plan.plan", "from .splits import pack\nfrom strata.storage import local"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(module: str, text: str) -> None:
    assert problems({module: text}) == []


def test_every_folder_has_a_docstring_and_a_place_on_the_map() -> None:
    architecture = (SOURCE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for init in sorted((SOURCE / "strata").rglob("__init__.py")):
        folder = init.parent.relative_to(SOURCE / "strata").as_posix()
        if folder == ".":
            continue
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{folder}/__init__.py has no docstring"
        assert f"`{folder}/`" in architecture, f"ARCHITECTURE.md does not mention `{folder}/`"
