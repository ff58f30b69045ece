"""The benchmark of the reference models at a small size, on made-up files in place of the downloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strata.bench.contenders import models_data
from strata.bench.models import BENCHMARK, DATA_SETS, MODELS

DEADLINE_S = 150
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)
ROWS = 2_000


def write_flights(place: Path) -> None:
    """Write flights; whether one is late depends on the pair of its airports, which no linear model sees."""
    random = np.random.default_rng(0)
    origins, destinations = random.integers(0, 4, (2, ROWS))
    late = random.random(ROWS) < np.where((origins + destinations) % 2 == 0, 0.9, 0.1)
    table = pa.table(
        {
            "date": np.datetime64("2001-01-01T00:00", "us") + random.integers(0, 10**13, ROWS),
            "delay": np.where(late, 40, 0),
            "distance": random.integers(50, 2500, ROWS),
            "origin": np.array(list("ABCD"))[origins],
            "destination": np.array(list("ABCD"))[destinations],
        }
    )
    pq.write_table(table, place / models_data.FLIGHTS)


def write_movielens(place: Path) -> None:
    directory = place / models_data.MOVIELENS
    directory.mkdir()
    texts = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float", "2\t7\t4\t100", "1\t7\t3.0\t50"],
        "item": [
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            '7\tThe "Quoted" Film\t1995\tComedy Children\'s',
            "8\tUnknown\t\tunknown",
        ],
        "user": [
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
            "1\t24\tM\tartist\t85711",
            "2\t53\tF\tother\tE2A4H",
        ],
    }
    for suffix, lines in texts.items():
        (directory / f"ml-100k.{suffix}").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the data sets."""
    directory = tmp_path / "data"
    directory.mkdir()
    monkeypatch.setenv(models_data.DIRECTORY_VARIABLE, str(directory))
    return directory


def contender(name: str, **environment: str) -> Any:
    ended = subprocess.run(
        [sys.executable, "-m", f"strata.bench.contenders.models_{name}", "--quick"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_model_is_measured_and_those_with_interactions_beat_logistic_regression(place: Path) -> None:
    write_flights(place)
    command = ["bench", "models", "--quick", "--json", "--only", "flights", "--set", f"rows={ROWS}"]

    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["figures"]
    assert found.keys() == {figure.key for figure in BENCHMARK.figures if figure.key.startswith("flights")}
    assert 0.4 < found["flights_auc_lr"] < 0.65
    assert found["flights_auc_wide_deep_over_lr"] > 1.2
    assert all(found[f"flights_auc_{model}"] <= 1.0 for model in MODELS)


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_a_data_set_that_cannot_be_fetched_is_absent_without_failure(name: str, place: Path) -> None:
    nowhere = {"PATH": "", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}

    answer = contender(name, **nowhere)

    package = models_data.FLIGHTS_PACKAGE if name == "flights" else models_data.MOVIELENS_PACKAGE
    assert answer.keys() == {"not_fetched"}
    assert package in answer["not_fetched"]
    assert list(place.iterdir()) == []


def test_the_setup_of_benchmarks_fetches_what_is_missing_and_reports_the_rest(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_movielens(place)
    makefile = Path(__file__).parents[2] / "Makefile"

    def refuse(*_: Any) -> Path:
        raise models_data.NotFetched("the registry does not answer")

    monkeypatch.setattr(models_data, "_download", refuse)
    models_data.fetch_all()

    printed = capsys.readouterr()
    assert printed.out == f"bench data: {place / models_data.MOVIELENS}\n"
    assert "the registry does not answer; the benchmark runs without flights-3m.parquet" in printed.err
    assert f"-m {models_data.__name__}" in makefile.read_text().partition("\nbench-setup:")[2].partition("\n\n")[0]


def test_ratings_are_joined_with_users_and_movies(place: Path) -> None:
    write_movielens(place)

    first, second = models_data.movielens().to_pylist()

    assert first == {
        "liked": 0,
        "user": "1",
        "item": "7",
        "gender": "M",
        "occupation": "artist",
        "genres": "Comedy Children's",
        "age": 24.0,
        "year": 1995.0,
    }
    assert (second["liked"], second["user"], second["occupation"]) == (1, "2", "other")


def test_the_splits_are_fixed_disjoint_samples(tmp_path: Path) -> None:
    table = pa.table({"row": np.arange(1_000)})
    found = []
    for name in ("once", "again"):
        counts = models_data.write_splits(table, tmp_path / name, num_rows=500, shares=(0.6, 0.2, 0.2))
        assert counts == {"train": 300, "valid": 100, "test": 100}
        found.append([pq.read_table(tmp_path / name / split)["row"].to_pylist() for split in counts])

    assert found[0] == found[1]
    assert len({row for split in found[0] for row in split}) == 500


def test_a_download_with_other_contents_is_refused(tmp_path: Path) -> None:
    write = ["sh", "-c", f"echo changed > {tmp_path}/it.tgz", "some-package"]

    with pytest.raises(models_data.NotFetched, match=r"some-package.*SHA-256"):
        models_data._download(write, tmp_path, "*.tgz", models_data.FLIGHTS_SHA256)
