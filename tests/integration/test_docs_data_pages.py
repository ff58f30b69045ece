"""The pages on data: the examples that need several processes or a library run here, and their tables are complete.

`test_docs_snippets.py` runs the examples that need a single process, as on every page.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from strata import DeltaDataset, IcebergDataset, LanceDataset, StructuredDataset, errors
from strata.cli.app import app
from strata.data import formats
from strata.data.batch import policy
from strata.data.formats.csv import CsvFormat
from strata.data.formats.text import TextFormat
from strata.data.order.assignment import BY_NAME
from strata.data.runtime.bottleneck import Cause, PlanFacts, diagnose
from strata.data.runtime.metrics import LoaderMetrics, LoaderRecorder, WorkerMetrics
from strata.data.runtime.prometheus import register
from strata.data.source import paths, storage_options
from strata.errors import DataError

DOCS = ROOT / "docs"
DATA, WORKERS, RESUME = DOCS / "data.md", DOCS / "data-workers.md", DOCS / "data-resume.md"
RANKS, TYPES, ICEBERG = DOCS / "data-ranks.md", DOCS / "data-types.md", DOCS / "data-iceberg.md"
DELTA, LANCE = DOCS / "data-delta.md", DOCS / "data-lance.md"
METRICS = DOCS / "data-metrics.md"
PAGES = (DATA, WORKERS, RESUME, RANKS, TYPES, ICEBERG, DELTA, LANCE, METRICS)
TIMEOUT_S = 100
LIBRARIES = ("from accelerate import", "import lightning", "from transformers import", "from strata.data.hf import")
NOT_INSTALLED = ("horovod",)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def section(page: Path, heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^## |\Z)", text(page), re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no section {heading!r}"
    return found[1]


def first_cells(table: str) -> list[str]:
    """Return the text in code font in the first column of a section's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def shown(page: Path, *, of: str) -> str:
    """Return the only `no-run` block that contains this text."""
    (found,) = [block.text for block in blocks(page) if block.info == "python no-run" and of in block.text]
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the datasets that the pages create at their start."""
    directory = tmp_path_factory.mktemp("pages")
    with contextlib.chdir(directory):
        for page in (DATA, WORKERS):
            exec(next(block.text for block in blocks(page) if block.info == "python"), {})
    return directory


def run(command: list[Any], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="shown-") as temporary:  # torchrun leaves logs there
        ran = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": temporary, **environment},
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def run_script(script: str, directory: Path, *options: str, name: str = "shown.py") -> str:
    path = directory / name
    path.write_text(script, encoding="utf-8")
    return run([sys.executable, *options, path], directory).stdout


# -- examples ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_of_ddp_take_the_same_steps_and_see_every_row_once(place: Path) -> None:
    (place / "train.py").write_text(shown(RANKS, of="# train.py"), encoding="utf-8")
    (command,) = re.findall(r"^\$ torchrun (.*)$", text(RANKS), re.MULTILINE)
    launcher = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)]
    printed = run(launcher, place, OMP_NUM_THREADS="1").stdout

    reports = {tuple(map(int, each)) for each in re.findall(r"rank (\d): (\d+) batches, (\d+) of (\d+) rows", printed)}
    assert {rank for rank, *_ in reports} == {0, 1}
    assert len({num_batches for _, num_batches, *_ in reports}) == 1
    (total,) = {total for *_, total in reports}
    assert sum(num_rows for _, _, num_rows, _ in reports) == total < 12_500


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_examples_for_libraries_run_with_them(place: Path, tmp_path: Path) -> None:
    (tmp_path / "clicks").symlink_to(place / "clicks")  # the libraries write into the directory they run in
    run_script("\n".join(shown(RANKS, of=marker) for marker in LIBRARIES), tmp_path)


def test_a_transform_runs_in_processes_as_shown(place: Path) -> None:
    run_script(shown(WORKERS, of='worker_type="process"'), place, "-W", "error")


def test_the_example_of_the_index_runs(place: Path) -> None:
    script = shown(ROOT / "docs" / "README.md", of="StructuredDataset")
    assert "s3://bucket/clicks/" in script
    names: dict[str, Any] = {}
    exec(script.replace("s3://bucket/clicks/", str(place / "clicks")), names)

    assert names["state"]["position"] == 12_500


def test_the_commands_that_are_shown_run(place: Path) -> None:
    commands = [
        shlex.split(line) for block in blocks(WORKERS) if block.info == "bash" for line in block.text.splitlines()
    ]

    assert [command[:3] for command in commands] == [["strata", "data", name] for name in ("plan", "peek", "bench")]
    with contextlib.chdir(place):
        for _, *arguments in commands:
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output


def test_every_no_run_block_is_run_here_or_needs_a_library_that_is_not_installed() -> None:
    run_here = {
        shown(RANKS, of="# train.py"),
        *(shown(RANKS, of=marker) for marker in LIBRARIES),
        shown(WORKERS, of='worker_type="process"'),
        shown(RANKS, of="import deepspeed"),  # in test_data_deepspeed.py
    }
    others = [
        block.text
        for page in PAGES
        for block in blocks(page)
        if block.info == "python no-run" and block.text not in run_here
    ]

    assert [next(name for name in NOT_INSTALLED if name in other) for other in others] == list(NOT_INSTALLED)


# -- tables --------------------------------------------------------------------------------------------------------


def test_the_page_names_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)` )?\|", section(DATA, "All options"), re.MULTILINE)
    signature = inspect.signature(StructuredDataset.create_dataloader)

    assert {name: default for name, default in rows if default} == {
        name: repr(one.default) for name, one in signature.parameters.items() if one.default is not one.empty
    }
    assert [name for name, _ in rows] == list(signature.parameters)


@pytest.mark.parametrize(("page", "kind"), [(ICEBERG, IcebergDataset), (DELTA, DeltaDataset), (LANCE, LanceDataset)])
def test_the_page_on_a_table_format_names_what_differs(page: Path, kind: Any) -> None:
    of_tables = set(inspect.signature(kind.create_dataloader).parameters)
    of_files = set(inspect.signature(StructuredDataset.create_dataloader).parameters)
    sentence = r"All other options are those of .*? without (.*?), which the (?:table|dataset)"
    without = re.search(sentence, text(page), re.DOTALL)
    assert without

    assert set(re.findall(r"^\| `(\w+)` \|", text(page), re.MULTILINE)) == of_tables - of_files
    assert set(re.findall(r"`(\w+)`", without[1])) == of_files - of_tables


def test_the_page_names_every_format_its_endings_and_the_options_of_csv() -> None:
    rows = re.findall(r"^\| `\"(\w+)\"` \| (.*?) \|", section(DATA, "Input files"), re.MULTILINE)
    endings = {name: tuple(re.findall(r"`(\.\w+)`", cell.partition(";")[0])) for name, cell in rows}

    assert endings == dict(paths.SUFFIXES)
    assert set(endings) == set(formats.NAMES)
    assert all(f"`{suffix}`" in text(DATA) for suffix in paths.COMPRESSED)
    listed = re.search(r"For CSV they are (.*?)\. ", text(DATA), re.DOTALL)
    assert listed
    assert re.findall(r"`(\w+)`", listed[1]) == [
        name for name in inspect.signature(CsvFormat).parameters if name not in inspect.signature(TextFormat).parameters
    ]


def test_every_attribute_that_the_page_names_exists_on_a_dataset() -> None:
    names = [name.partition("(")[0] for name in first_cells(section(DATA, "Quick start"))]

    assert len(names) >= 10
    assert [name for name in names if not hasattr(StructuredDataset, name)] == []


def test_the_page_has_the_policy_tables_of_the_code() -> None:
    document = ast.get_docstring(ast.parse(inspect.getsource(policy)))
    assert document
    tables = [line for line in document.splitlines() if line.startswith("|")]

    assert len(tables) > 20
    assert [line for line in tables if line not in text(TYPES).splitlines()] == []


def test_the_page_names_every_strategy() -> None:
    assert {f'"{name}"' for name in BY_NAME} <= set(first_cells(section(WORKERS, "Decode threads")))


def test_the_page_names_every_measurement_and_no_other() -> None:
    tables = section(METRICS, "Where the time goes")
    loader, _, worker = tables.partition("| Decode thread field")

    def known(kind: type) -> set[str]:
        made = {name for name, value in vars(kind).items() if isinstance(value, property)}
        return {*kind.__struct_fields__, *made}  # type: ignore[attr-defined]

    of_loader, of_worker = set(first_cells(loader)), {*first_cells(worker)} - {"metrics.workers", "metrics.total"}
    assert of_loader == known(LoaderMetrics) - {"workers", "total", "num_resets"}
    assert of_worker == known(WorkerMetrics) - {"worker", "alive_s"}


def test_the_page_names_every_metric_with_its_type_and_labels() -> None:
    recorder, registry = LoaderRecorder(1), CollectorRegistry()
    recorder.began()
    recorder.asked()
    recorder.delivered(1)
    registration = register("some", recorder.snapshot, registry)
    exported = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels})
        for family in registry.collect()
    }
    registration.unregister()
    table = section(DOCS / "metrics.md", "Loader metrics")
    rows = re.findall(r"^\| (counter|gauge) \| `(\w+)` \| (.*?) \|", table, re.MULTILINE)

    assert {name: (kind, set(re.findall(r"\w+", labels))) for kind, name, labels in rows} == exported
    for name in re.findall(r"strata_data_\w+", text(METRICS)):
        assert name.removesuffix("_total") in exported


WINDOWS = {
    Cause.TOO_FEW_UNITS: {"idle_s": 9.0, "decode_s": 1.0},
    Cause.MEMORY_BOUND: {"blocked_s": 9.0, "decode_s": 1.0},
    Cause.SLOW_STORAGE: {"read_s": 9.0, "decode_s": 1.0},
    Cause.SLOW_TRANSFORM: {"transform_s": 9.0, "decode_s": 1.0},
    Cause.SLOW_DECODE: {"decode_s": 9.0, "assemble_s": 1.0},
    Cause.SLOW_CONSUMER: {"blocked_s": 9.0, "decode_s": 1.0},
}
"""How a worker spent ten seconds, for which the loader reports each cause."""


@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name.lower())
def test_the_page_describes_the_warning_that_a_loader_logs(cause: Cause) -> None:
    wait_s = 0.1 if cause is Cause.SLOW_CONSUMER else 5.0
    window = LoaderMetrics(
        workers=(WorkerMetrics(worker=0, **WINDOWS[cause]),),  # type: ignore[arg-type]
        batches=20,
        consumer_wait_s=wait_s,
        consumer_busy_s=10 - wait_s,
    )
    facts = PlanFacts(num_row_groups=1, num_splits=1, is_local=True)
    diagnosis = diagnose(window, facts, num_workers=1)
    rows = re.findall(r"^\| ([^|]*) \| [^|]+ \| [^|]+ \|$", section(METRICS, "Bottleneck warnings"), re.MULTILINE)
    phrases = [row.strip("… ") for row in rows[1:]]

    assert diagnosis is not None
    assert diagnosis.cause is cause
    assert len([phrase for phrase in phrases if phrase in diagnosis.found]) == 1
    assert len(phrases) == len(Cause)


def test_the_page_on_stores_states_how_often_reads_are_retried() -> None:
    found = re.search(
        r"`max_retries` is (\d+) .*`retry_timeout_s` is (\d+)", section(DOCS / "object-stores.md", "Reading data")
    )
    assert found

    assert (int(found[1]), float(found[2])) == (storage_options.MAX_ATTEMPTS - 1, storage_options.GCS_RETRY_S)


def test_the_table_of_faults_names_every_error_of_data() -> None:
    known = {name for name, kind in errors.BY_KIND.items() if issubclass(kind, DataError)} - {"DataError"}
    named = set(re.findall(r"`([A-Z]\w+)`", section(RESUME, "Errors"))) | {"PlanChanged"}

    assert known <= named
    assert [name for name in named if name not in errors.BY_KIND] == []
