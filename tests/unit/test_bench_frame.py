"""Benchmarks without processes: order of rounds, parsing of answers, figures, ratios and reports."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from strata import bench
from strata.bench.frame import (
    Absent,
    Benchmark,
    Contender,
    Failure,
    Figure,
    Outcome,
    Sample,
    Setting,
    Spread,
    aggregate,
    interleave,
    is_left_out,
    quotients,
    ratios,
    read_answer,
)
from strata.bench.machine import cpu_model, describe_machine, describe_versions
from strata.bench.report import as_object, comparison_table, figure_table, number, show
from strata.errors import ConfigError, InvalidArgument

OURS = Figure(key="ours_ms", title="ours", unit="ms", peers=("theirs_ms",))
THEIRS = Figure(key="theirs_ms", title="theirs", unit="ms")
A, B, C = (Contender(name=name, module=f"m.{name}") for name in "abc")
TINY = Benchmark(name="tiny", title="Tiny", contenders=(A, B), figures=(OURS, THEIRS))
MET = (
    Sample("a", 0, {"ours_ms": 2.0}),
    Sample("b", 0, {"theirs_ms": 4.0}, {"theirs": "9.9"}),
    Sample("a", 1, {"ours_ms": 1.0}),
    Sample("b", 1, {"theirs_ms": 8.0}, {"theirs": "9.9"}),
    Sample("a", 2, {"ours_ms": 4.0}),
    Sample("b", 2, {"theirs_ms": 12.0}, {"theirs": "9.9"}),
)


def answer(line: str) -> Sample | Absent | Failure:
    return read_answer(line, contender="a", round_=0, known=frozenset({"ours_ms", "theirs_ms"}))


def printed(table: object) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_rounds_are_interleaved_so_that_no_contender_runs_twice_in_a_row() -> None:
    order = [(number, contender.name) for number, contender in interleave((A, B, C), 2)]
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "a"), (1, "b"), (1, "c")]


def test_a_benchmark_estimates_its_usual_and_its_longest_duration() -> None:
    two = replace(TINY, contenders=(replace(A, usual_s=20.0, timeout_s=60.0), replace(B, usual_s=5.0, timeout_s=100.0)))
    assert two.estimate(3, quick=False) == "tiny: 3 rounds of 2 contenders, about 2 min, at most 8 min"
    assert two.estimate(1, quick=True) == "tiny: 1 round of 2 contenders, about 20 s, at most 3 min"
    assert two.estimate(100, quick=False).endswith("about 42 min, at most 4 h 27 min")
    with pytest.raises(ConfigError, match="at most its deadline"):
        replace(A, usual_s=20.0, timeout_s=10.0)


@pytest.mark.parametrize(("lost", "left_out"), [([], False), ([True], False), ([True, True], True), ([False], True)])
def test_a_contender_that_misses_its_deadline_runs_again_and_a_failed_one_does_not(
    lost: list[bool], left_out: bool
) -> None:
    failures = [Failure("a", number, "no answer", is_lost=each) for number, each in enumerate(lost)]
    assert is_left_out(failures) is left_out


def test_three_rounds_become_median_minimum_and_maximum() -> None:
    assert aggregate(MET) == {"ours_ms": Spread(2.0, 1.0, 4.0), "theirs_ms": Spread(8.0, 4.0, 12.0)}


def test_a_ratio_is_taken_within_each_round_and_then_summarised() -> None:
    assert ratios(OURS, "theirs_ms", MET) == Spread(3.0, 2.0, 8.0)


def test_the_ratio_is_inverted_if_higher_is_better() -> None:
    rate = Figure(key="ours_ms", title="rate", better="higher", peers=("theirs_ms",))
    assert ratios(rate, "theirs_ms", MET[:2]) == Spread(0.5, 0.5, 0.5)


def test_a_quotient_is_computed_within_each_round() -> None:
    figures = [
        Figure(key="ours_ms", title="ours"),
        Figure(key="theirs_ms", title="theirs"),
        Figure(key="vs_theirs", title="theirs over ours", quotient=("theirs_ms", "ours_ms")),
        Figure(key="vs_nobody", title="nobody over ours", quotient=("theirs_ms", "theirs_ms")),
    ]
    samples = [
        Sample("a", 0, {"ours_ms": 2.0}),
        Sample("b", 0, {"theirs_ms": 4.0}),
        Sample("a", 1, {"ours_ms": 1.0}),
        Sample("b", 1, {"theirs_ms": 8.0}),
        Sample("a", 2, {"ours_ms": 1.0}),
        Sample("b", 3, {"theirs_ms": 0.0}),
    ]
    found = quotients(figures, samples)
    assert [(s.round, s.figures) for s in found] == [
        (0, {"vs_theirs": 2.0, "vs_nobody": 1.0}),
        (1, {"vs_theirs": 8.0, "vs_nobody": 1.0}),
    ]


@pytest.mark.parametrize(("better", "expected"), [("lower", [0.5]), ("higher", [0.25])])
def test_a_quotient_of_several_figures_uses_the_best_of_each_complete_round(
    better: Literal["lower", "higher"], expected: list[float]
) -> None:
    figures = [Figure(key="over_best", title="ours over the best", better=better, quotient=("ours", "one", "other"))]
    samples = [
        Sample("a", 0, {"ours": 2.0, "one": 8.0}),
        Sample("b", 0, {"other": 4.0}),
        Sample("a", 1, {"ours": 2.0, "one": 8.0}),
    ]
    assert [sample.figures["over_best"] for sample in quotients(figures, samples)] == expected


def test_a_peer_that_never_ran_has_no_ratio() -> None:
    assert ratios(OURS, "theirs_ms", MET[:1]) is None


def test_only_the_last_line_of_the_output_is_parsed() -> None:
    found = answer('loading…\n{"figures": {"ours_ms": 3}, "versions": {"x": "1"}}\n')
    assert found == Sample("a", 0, {"ours_ms": 3.0}, {"x": "1"})


def test_a_contender_without_its_data_is_absent_with_the_reason_and_the_cure() -> None:
    found = answer('{"not_fetched": "npm is not installed"}')

    assert isinstance(found, Absent)
    assert found.note == "npm is not installed; when that is solved, run `make bench-setup`, which fetches it"


def test_a_peer_that_is_not_installed_is_absent_with_the_install_command() -> None:
    found = answer('{"not_installed": "uhashring"}')
    assert found == Absent("a", "uhashring is not installed; run `make bench-setup`")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "printed nothing"),
        ("done", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"ours_ms": 1}', "not a JSON object of figures"),
        ('{"figures": {}}', "unknown or non-numeric"),
        ('{"figures": {"other_ms": 1}}', "other_ms"),
        ('{"figures": {"ours_ms": "1"}}', "ours_ms"),
        ('{"figures": {"ours_ms": true}}', "ours_ms"),
        ('{"figures": {"ours_ms": NaN}}', "ours_ms"),
    ],
)
def test_an_invalid_answer_is_a_failure_with_the_reason(line: str, message: str) -> None:
    found = answer(line)
    assert isinstance(found, Failure)
    assert message in found.reason


def test_a_figure_with_spread_is_an_object_and_one_without_is_a_number() -> None:
    steady = Sample("a", 0, {"ours_ms": 1.5}), Sample("a", 1, {"ours_ms": 1.5})
    assert as_object(Outcome(steady))["figures"] == {"ours_ms": 1.5}
    assert as_object(Outcome(MET))["figures"]["ours_ms"] == {"median": 2.0, "min": 1.0, "max": 4.0}


def test_the_object_has_figures_machine_and_versions_with_those_of_peers() -> None:
    found = as_object(Outcome(MET))
    assert set(found) == {"figures", "machine", "versions"}
    assert found["versions"]["theirs"] == "9.9"
    assert json.loads(json.dumps(found)) == found


def test_the_comparison_shows_the_ratio_first() -> None:
    row = next(line for line in printed(comparison_table(TINY, Outcome(MET))).splitlines() if "theirs" in line)
    assert re.search(r"3\.000 × \(2\.000–8\.000\).*ours.*2\.000 ms.*theirs: 8\.000 ms", row)


def test_a_figure_is_shown_with_its_key_median_and_spread() -> None:
    row = next(line for line in printed(figure_table(TINY, Outcome(MET))).splitlines() if "theirs" in line)
    assert re.search(r"theirs theirs_ms.*8\.000 │ ms +│ 4\.000–12\.00", row)


def test_absent_peers_have_no_row_and_no_comparison() -> None:
    outcome = Outcome(MET[:1])
    assert comparison_table(TINY, outcome).row_count == 0
    assert "theirs" not in printed(figure_table(TINY, outcome))


def test_with_json_stdout_has_one_object_and_stderr_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = Failure("b", 0, "ended with exit code 3", "Traceback …\nKeyError: [bold]x")
    show(TINY, Outcome(MET[:1], (Absent("c", "make bench-setup"),), (failure,)), as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["figures"] == {"ours_ms": 2.0}
    assert "c: make bench-setup" in shown.err
    assert "b, round 1: ended with exit code 3" in shown.err
    assert "KeyError: [bold]x" in shown.err


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.2345, "1.234"), (12.345, "12.35"), (123.45, "123.5"), (12_345.6, "12,346")],
)
def test_numbers_are_shown_with_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_benchmark_with_duplicate_or_unknown_figures_is_refused() -> None:
    with pytest.raises(ConfigError, match="the same key"):
        Benchmark(name="x", title="x", contenders=(A,), figures=(THEIRS, THEIRS))
    with pytest.raises(ConfigError, match="theirs_ms"):
        Benchmark(name="x", title="x", contenders=(A,), figures=(OURS,))


def test_a_contender_with_an_invalid_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_s=0"):
        Contender(name="x", module="x", timeout_s=0)


def test_the_number_of_rounds_defaults_to_the_benchmarks() -> None:
    assert TINY.num_rounds(None, quick=False) == 5
    assert TINY.num_rounds(None, quick=True) == 2
    assert TINY.num_rounds(7, quick=True) == 7
    with pytest.raises(InvalidArgument, match="rounds=0"):
        TINY.num_rounds(0, quick=False)


SIZED = Benchmark(
    name="sized",
    title="Sized",
    contenders=(A,),
    figures=(THEIRS,),
    settings=(
        Setting(name="gib", title="GiB (default 1)", at_least=0.5, whole=False),
        Setting(name="num_parts", title="parts (default 4)", at_least=1),
    ),
)


def test_a_setting_becomes_an_environment_variable_of_contenders() -> None:
    assert SIZED.with_settings(()).environment == {}
    found = SIZED.with_settings(["gib=0.5", "num_parts=2", "num_parts=3"])
    assert found.environment == {"STRATA_BENCH_GIB": "0.5", "STRATA_BENCH_NUM_PARTS": "3"}
    assert SIZED.environment == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("size=1", "no setting 'size' .* gib: GiB .default 1.; num_parts: parts .default 4."),
        ("gib", "gib= is invalid .GiB .default 1..; use a number, at least 0.5"),
        ("gib=0.4", "at least 0.5"),
        ("gib=nan", "at least 0.5"),
        ("gib=inf", "at least 0.5"),
        ("num_parts=1.5", "use a whole number, at least 1"),
        ("num_parts=0", "use a whole number, at least 1"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_valid_values(given: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SIZED.with_settings([given])


def test_a_benchmark_without_settings_reports_none() -> None:
    with pytest.raises(InvalidArgument, match="settings: none"):
        TINY.with_settings(["gib=1"])


def test_every_registered_benchmark_loads_under_its_name() -> None:
    assert "shards" in bench.names()
    assert [bench.get(name).name for name in bench.names()] == bench.names()


@pytest.mark.parametrize("name", ["shard", "Shards", "shrads"])
def test_an_unknown_benchmark_is_refused_with_the_nearest_known(name: str) -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'shards'"):
        bench.main(name)


def test_the_machine_is_described_without_host_names_or_paths() -> None:
    machine = describe_machine()
    assert machine["threads"] >= 1
    assert machine["filesystem"] != "unknown"
    assert "/" not in json.dumps(machine)
    assert {"python", "strata", "numpy"} <= describe_versions().keys()


def test_a_processor_without_a_name_is_reported_by_its_architecture(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast 9000 @ 3.0 GHz\n")
    assert cpu_model(cpuinfo) == "Fast 9000 @ 3.0 GHz"
    cpuinfo.write_text("processor\t: 0\n")
    assert cpu_model(cpuinfo)
    assert cpu_model(tmp_path / "missing")
