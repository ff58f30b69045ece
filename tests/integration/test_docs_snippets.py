"""The documentation is run: its examples work, its settings load, its links lead somewhere. See docs/README.md."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from documents import ROOT, Block, blocks, prose
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from servers import command_line
from typer.testing import CliRunner

from strata.cli.app import app
from strata.cli.exit_codes import MEANINGS
from strata.config import load_yaml
from strata.coordinator.config import CoordinatorConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]
GUIDE = ROOT / "docs" / "running-a-coordinator.md"
ADDRESS = "localhost:50051"
"""The coordinator's address in the examples."""
TIMEOUT_S = 300.0
"""Bounds a hang; the longest page takes 25 s on a quiet machine."""
LINK = re.compile(r"\]\(([^)#]*)#?([^)]*)\)")
EXPECTED = re.compile(r"strata: checkpoints in | +[\d.:]+(?: s)?  [a-z]+: |the training loop waits for data ")
"""Lines on stderr that show no mistake of a page: where checkpoints are, the events of a study, and the bottleneck that
a loader measures when the machine is so busy that an example takes more than ten seconds."""
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real coordinator."""
    flags = ("--listen=127.0.0.1:0", "--http=off", "--state=memory", "--json")
    with command_line(tmp_path_factory.mktemp("coordinator"), *flags) as coordinator:
        yield coordinator.addresses()["grpc"]
        coordinator.terminate()
        assert coordinator.ended() == (0, "")


def program(page: Path) -> str:
    """Return the page's `python` blocks, each at its own line, so that a traceback names the line of the page."""
    shown = [block for block in blocks(page) if block.info == "python"]
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in shown:
        text = block.text.splitlines()
        lines[block.line - 1 : block.line - 1 + len(text)] = text
    return "\n".join(lines) if shown else ""


@functools.cache
def help_of(*commands: str) -> str:
    result = CliRunner().invoke(app, [*commands, "--help"], env=PLAIN)
    assert result.exit_code == 0, result.output
    return result.output


def marked(info: str) -> list[tuple[Path, Block]]:
    return marked_with({info})


def marked_with(infos: set[str]) -> list[tuple[Path, Block]]:
    return [(page, block) for page in PAGES for block in blocks(page) if block.info in infos]


# -- examples ------------------------------------------------------------------------------------------------------

SLOW = {
    *("features.md", "gnn.md", "models.md", "parameter-servers.md", "torchrec.md", "trainer-porting.md", "tuning.md"),
    *("checkpoints.md", "run.md", "trainer.md", "own-dataloader.md"),
}
"""Pages that train several models, or start many processes."""


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES
        if program(page)
    ],
)
def test_the_examples_of_a_page_run(page: Path, address: str, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}_page.py"  # not the name of a library that it imports
    script.write_text(program(page).replace(ADDRESS, address), encoding="utf-8")
    (tmp_path / "cwd").mkdir()
    ran = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path / "cwd",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    logged = [line for line in ran.stderr.splitlines() if not EXPECTED.match(line)]
    assert (ran.returncode, logged) == (0, [])


def test_every_python_block_is_run_or_marked_as_not_run() -> None:
    infos = {block.info for page in PAGES for block in blocks(page) if block.info.startswith("py")}
    files = {info for info in infos if re.fullmatch(r'python title="\w+\.py"', info)}  # run by the tests of these pages

    assert infos - files <= {"python", "python no-run"}
    assert {page.name for page, _ in marked_with(files)} <= {"get-started.md", "tuning.md"}


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"{name_of(p)}:{b.line}") for p, b in marked("console") if "$ strata" in b.text]
)
def test_commands_and_their_flags_exist(block: Block) -> None:
    for line in block.text.splitlines():
        if not line.startswith("$ strata"):
            continue
        arguments = shlex.split(line.removeprefix("$ strata"))
        end = next((place for place, word in enumerate(arguments) if word.endswith(".py")), None)
        arguments = arguments[:end]  # without those of a script
        commands = [word for word in arguments if re.fullmatch(r"[a-z]+", word)][
            : 2 if arguments[0] in ("journal", "jobs", "checkpoints", "data", "studies") else 1
        ]
        help_text = help_of(*commands)

        assert [word for word in arguments if word.startswith("--") and word not in help_text] == []


# -- settings ------------------------------------------------------------------------------------------------------


def settings_of(config: type) -> Iterator[str]:
    for field in dataclasses.fields(config):
        kind = field.default_factory
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from (f"{field.name}.{name}" for name in settings_of(kind))
        else:
            yield field.name


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"{name_of(p)}:{b.line}") for p, b in marked("yaml coordinator.yaml")]
)
def test_a_documented_coordinator_yaml_loads(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text(block.text, encoding="utf-8")

    assert load_yaml(CoordinatorConfig, path)


def test_the_guide_names_every_setting_with_its_default(tmp_path: Path) -> None:
    (block,) = [block for page, block in marked("yaml coordinator.yaml") if page == GUIDE]
    path = tmp_path / "coordinator.yaml"
    path.write_text(block.text, encoding="utf-8")
    named = {
        f"{name}.{inner}" if inner else name
        for name, value in yaml.safe_load(block.text).items()
        for inner in (value if isinstance(value, dict) else [""])
    }

    assert named == set(settings_of(CoordinatorConfig))
    assert load_yaml(CoordinatorConfig, path) == CoordinatorConfig()


def test_the_guide_names_every_flag_of_the_coordinator() -> None:
    documented = set(re.findall(r"^\| `(--[a-z-]+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE))

    assert documented == set(re.findall(r"(?<![\w-])--[a-z-]+", help_of("coordinator"))) - {"--help"}


def test_the_guide_names_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)

    assert {int(code): meaning for code, meaning in rows} == {code.value: text for code, text in MEANINGS.items()}


# -- the rest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_have_a_target(page: Path) -> None:
    links = [(target, anchor) for target, anchor in LINK.findall(prose(page)) if "://" not in target]
    gone = [target for target, _ in links if not (page.parent / target).exists()]
    lost = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor and target not in gone and anchor not in anchors(page.parent / target if target else page)
    ]

    assert gone + lost == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub creates them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {target for target, _ in LINK.findall(prose(index))}

    assert [p.name for p in PAGES if p.parent == index.parent and p != index and p.name not in named] == []


def test_reflection_describes_the_service_without_files(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)

        assert "strata.v1.Coordinator" in database.get_services()
        described = database.FindFileContainingSymbol("strata.v1.Coordinator")
    assert {"WaitBarrier", "Session"} < {method.name for method in described.service[0].method}


def test_the_coordinator_announces_itself_as_the_guide_shows(tmp_path: Path) -> None:
    (shown,) = [b.text for p, b in marked("console") if p == GUIDE and "is up" in b.text]
    with command_line(tmp_path, "--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--state=memory") as coordinator:
        lines = [coordinator.line() for _ in range(5)]

    documented = shown.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [line.split()[0] for line in documented]
    assert lines[0].strip() == documented[0]
    assert lines[4].split() == ["state", "memory"]
