"""`strata data`: text and JSON output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from strata.cli import main
from strata.cli.app import app


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, num_rows in enumerate((100, 30, 70)):
        table = pa.table(
            {
                "id": pa.array(range(number * 100, number * 100 + num_rows)),
                "price": pa.array([float(i) for i in range(num_rows)]),
                "name": pa.array([f"row [bold]{i}" for i in range(num_rows)]),
            }
        )
        pq.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=25)
    return tmp_path


def run(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_plan_prints_tables_of_splits_and_columns(data: Path) -> None:
    output = run("plan", data, "--ranks", 2, "--batch-size", 10, "--workers", 1).output
    assert "200 rows in 3 splits of 9 row groups in 3 files" in output
    assert "part-1.parquet" in output
    assert "Python objects" in output
    assert "10 batches of 10 rows on each of 2 ranks, read in 2 lanes" in output
    assert "lpt over 2 decode threads: the busiest has" in output


def test_plan_as_json_reports_what_a_filter_prunes(data: Path) -> None:
    result = json.loads(run("plan", data, "--json", "--filter", "id >= 225", "--columns", "id", "--workers", 2).output)
    assert result["num_rows"] == 45
    assert [split["file"] for split in result["splits"]] == ["part-2.parquet"]
    assert result["pruning"]["num_units_pruned"] == 7
    assert result["pruning"]["bytes_planned"] < result["pruning"]["bytes_total"]
    assert [column["column"] for column in result["columns"]] == ["id"]
    assert result["balance"]["max_over_mean"] >= 1.0
    assert result["delivery"]["batches"] == 1


def test_plan_warns_about_too_few_row_groups(data: Path) -> None:
    assert "only 9 row groups for 8 decode threads" in run("plan", data, "--workers", 8).output


def test_peek_shows_the_first_rows_without_interpreting_them(data: Path) -> None:
    output = run("peek", data, "--rows", 2, "--columns", "name,id").output
    assert "row [bold]1" in output
    assert "2 of 200 rows, 2 columns" in output
    result = json.loads(run("peek", data, "--json", "-n", 3, "--filter", "price > 1").output)
    assert result["num_rows"] == 200 - 6
    assert [row["id"] for row in result["rows"]] == [2, 3, 4]


def test_bench_reads_an_epoch_and_reports_throughput(data: Path) -> None:
    result = json.loads(run("bench", data, "--json", "--workers", 2, "--batch-size", 16, "--shuffle").output)
    assert result["rows"] == 200
    assert result["batches"] == 13
    assert result["rows_per_s"] > 0
    output = run("bench", data, "--columns", "id").output
    assert "utilisation" in output
    assert "rows/s" in output


@pytest.mark.parametrize(
    ("arguments", "code", "cure"),
    [
        (("plan", "{data}", "--columns", "prize"), 1, "price"),
        (("plan", "{data}", "--filter", "price = 3"), 2, "=="),
        (("peek", "{data}", "--format", "parquett"), 2, "parquet"),
        (("plan", "{data}/nothing-here"), 1, "nothing-here"),
        (("bench", "{data}", "--storage-option", "region"), 2, "KEY=VALUE"),
        (("plan", "{data}", "--strategy", "fair"), 2, "lpt"),
        (("plan", "{data}", "--split-bytes", "much"), 2, "128MiB"),
    ],
)
def test_errors_name_the_cure(
    data: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, cure: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", *(argument.format(data=data) for argument in arguments)])
    output = capsys.readouterr().err
    assert ended.value.code == code, output
    assert cure in output
    assert "Traceback" not in output
