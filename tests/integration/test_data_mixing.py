"""Mixing datasets by weights: tables and tar shards in one mix, exact shares, exact resume, refusals."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strata
from strata import StructuredDataset
from strata.data import PackedRows, PaddedRows, mix, pack
from strata.errors import DataError, InvalidArgument, NoData, PlanChanged, SchemaMismatch, StrataError

ROWS = {"web": 300, "code": 70, "tars": 23}
WEIGHTS = {"web": 0.6, "code": 0.3, "tars": 0.1}
FIRST_ID = {"web": 0, "code": 1_000, "tars": 2_000}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for name in ("web", "code"):
        ids = np.arange(ROWS[name]) + FIRST_ID[name]
        (root / name).mkdir()
        table = pa.table({"cls": ids, "txt": [f"{name} {number}" for number in ids]})
        pq.write_table(table, root / name / "0.parquet", row_group_size=16)
    (root / "samples").mkdir()
    for number in np.arange(ROWS["tars"]) + FIRST_ID["tars"]:
        (root / "samples" / f"{number}.cls").write_text(str(number))
        (root / "samples" / f"{number}.txt").write_text(f"tars {number}")
    pack(root / "samples", root / "tars", max_samples=10)
    return root


def create(root: Path, name: str, **options: Any) -> Any:
    defaults = {"columns": ["cls", "txt"], "shuffle": True, "shuffle_buffer_size": 40, "num_workers": 1, "cache": False}
    return StructuredDataset.create_dataloader(str(root / name), **{**defaults, **options})[0]


def make(
    root: Path, *, rank: int = 0, num_ranks: int = 1, weights: Mapping[str, float] = WEIGHTS, **options: Any
) -> Any:
    sources = {name: create(root, name, rank=rank, num_ranks=num_ranks) for name in weights}
    return mix(sources, weights, **{"batch_size": 10, "stop": "all_exhausted", **options})


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["cls"].tolist()
    return found


def source_of(number: int) -> str:
    return max((name for name in FIRST_ID if FIRST_ID[name] <= number), key=FIRST_ID.__getitem__)


def test_tables_and_tar_shards_are_mixed_in_the_proportions_of_their_weights(root: Path) -> None:
    mixed = make(root, source_column="source")
    assert len(mixed) == 50  # "web" ends last: 300 rows / 0.6 in batches of 10
    counted: Counter[str] = Counter()
    rows: Counter[int] = Counter()
    for step, batch in enumerate(mixed, start=1):
        assert batch["txt"] == [f"{source_of(number)} {number}" for number in ids(batch)]
        assert batch["source"].tolist() == [list(WEIGHTS).index(source_of(number)) for number in ids(batch)]
        counted.update(map(source_of, ids(batch)))
        rows.update(ids(batch))
        assert all(abs(counted[name] - 10 * step * weight) <= 0.5 + 1.5 * weight for name, weight in WEIGHTS.items())
    assert mixed.is_last
    for name, num_rows in ROWS.items():
        of_source = [rows[number + FIRST_ID[name]] for number in range(num_rows)]
        assert set(of_source) <= {counted[name] // num_rows, counted[name] // num_rows + 1}
        assert sum(of_source) == counted[name]
    found = mixed.get_metrics()
    assert {name: each.rows for name, each in found.sources.items()} == dict(counted)
    assert {name: (each.epoch, each.position) for name, each in found.sources.items()} == {
        name: divmod(counted[name], ROWS[name]) for name in ROWS
    }
    assert (found.rows, found.batches) == (500, 50)
    assert json.loads(json.dumps(found.to_dict()))["sources"]["web"]["weight"] == pytest.approx(0.6)


@pytest.mark.parametrize("mix_by", ["row", "batch"])
def test_a_mix_resumes_at_the_same_row_on_another_number_of_ranks(root: Path, mix_by: str) -> None:
    whole = [ids(batch) for batch in make(root, mix_by=mix_by, batch_size=12)]
    for step in (1, 17):
        mixed = make(root, mix_by=mix_by, batch_size=12)
        for number, _ in enumerate(mixed, start=1):
            if number == step:
                break
        state = json.dumps(mixed.state_dict())
        mixed.close()
        ranks = []
        for rank in range(3):
            resumed = make(root, mix_by=mix_by, rank=rank, num_ranks=3, batch_size=4)
            resumed.load_state_dict(json.loads(state))
            ranks.append([ids(batch) for batch in resumed])
            assert resumed.state_dict() | {"position": 0} == mixed.state_dict() | {"position": 0}
        assert all([len(batch) for batch in batches] == [4] * (len(whole) - step) for batches in ranks)
        together = [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
        assert together == [sorted(batch) for batch in whole[step:]]


def test_a_mix_resumes_with_the_same_rows_in_batches_of_another_size(root: Path) -> None:
    whole = [number for batch in make(root, batch_size=12) for number in ids(batch)]
    mixed = make(root, batch_size=12)
    batches = iter(mixed)
    for _ in range(5):
        next(batches)
    ranks = []
    for rank in range(2):
        resumed = make(root, rank=rank, num_ranks=2, batch_size=3)
        resumed.load_state_dict(mixed.state_dict())
        ranks.append([ids(batch) for batch in resumed])
    rest = [number for parts in zip(*ranks, strict=True) for batch in parts for number in batch]
    for first in range(0, 420, 12):  # two batches of 6 rows have the rows of one of 12
        assert sorted(rest[first : first + 12]) == sorted(whole[60 + first : 72 + first])


def test_a_long_epoch_of_a_source_is_read_in_several_passes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [ids(batch) for batch in make(root)]
    monkeypatch.setattr("strata.data.mix_pass.MAX_PASS_STEPS", 3)
    assert [ids(batch) for batch in make(root)] == whole


def test_ranks_with_other_arguments_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank_0(_: object, produce: Callable[[], bytes]) -> bytes:
        return json.dumps({**json.loads(produce()), "stop": "first_exhausted"}).encode()

    monkeypatch.setattr("strata.data.mixer.share", of_rank_0)
    with pytest.raises(DataError, match="stop is 'all_exhausted' here and 'first_exhausted' there"):
        make(root)


def test_every_epoch_of_the_mix_continues_where_the_last_one_ended(root: Path) -> None:
    mixed = make(root, weights={"web": 1, "code": 1}, stop="first_exhausted")
    seen: Counter[int] = Counter()
    for epoch in range(4):
        mixed.set_epoch(epoch)
        seen.update(number for batch in mixed for number in ids(batch))
    # Four passes over "code", and as many rows of "web", of which none comes twice.
    assert all(count == (1 if number < 1_000 else 4) for number, count in seen.items())
    assert sum(seen.values()) == 2 * 4 * 70
    mixed.set_epoch(1)
    again = [number for batch in mixed for number in ids(batch)]
    fresh = make(root, weights={"web": 1, "code": 1}, stop="first_exhausted")
    fresh.set_epoch(1)
    assert [number for batch in fresh for number in ids(batch)] == again


def test_a_state_at_the_end_of_an_epoch_continues_with_the_next_one(root: Path) -> None:
    mixed = make(root, epoch_size=50)
    first = [ids(batch) for batch in mixed]
    second = [ids(batch) for batch in mixed]
    resumed = make(root, epoch_size=50)
    assert [ids(batch) for batch in resumed] == first
    state = resumed.state_dict()
    resumed = make(root, epoch_size=50)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert [ids(batch) for batch in resumed] == second
    assert resumed.position == (1, 100)


def test_other_weights_apply_from_the_resumed_row_on(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "strata.data")
    mixed = make(root)
    batches = iter(mixed)
    before = [number for _ in range(10) for number in ids(next(batches))]
    changed = make(root, weights={"web": 1, "code": 8, "tars": 1}, epoch_size=200)
    changed.load_state_dict(mixed.state_dict())
    after = [number for batch in changed for number in ids(batch)]
    assert Counter(map(source_of, before)) == {"web": 60, "code": 30, "tars": 10}
    assert Counter(map(source_of, after)) == {"web": 10, "code": 80, "tars": 10}
    of_code = [number for number in before + after if source_of(number) == "code"]
    assert len(set(of_code[:70])) == 70
    assert "from row 100 on" in caplog.text


@pytest.mark.parametrize("output_format", ["numpy", "arrow", "pandas", "dict"])
def test_rows_of_all_sources_are_joined_in_every_output_format(root: Path, output_format: str) -> None:
    sources = {name: create(root, name, output_format=output_format) for name in ("web", "code")}
    batch = next(iter(mix(sources, {"web": 2, "code": 1}, batch_size=9, source_column="source")))
    found = {"pandas": "to_dict", "arrow": "to_pydict"}.get(output_format)
    found = getattr(batch, found)(*(["list"] if output_format == "pandas" else [])) if found else batch
    assert list(found["source"]) == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert list(found["txt"]) == [f"{source_of(number)} {number}" for number in found["cls"]]


@pytest.mark.parametrize("output_format", ["torch", "numpy"])
@pytest.mark.parametrize("sequences", ["ragged", "padded", "packed"])
def test_lists_of_all_sources_are_joined(tmp_path: Path, sequences: str, output_format: str) -> None:
    for name, values in (("a", [[1], [], [2, 3]]), ("b", [[10, 11], [12]])):
        pq.write_table(pa.table({"x": pa.array(values, pa.list_(pa.int64()))}), tmp_path / f"{name}.parquet")
    options = {"columns": ["x"], "shuffle": False, "sequences": sequences, "output_format": output_format}
    sources = {name: create(tmp_path, f"{name}.parquet", **options) for name in "ab"}
    (batch,) = mix(sources, {"a": 3, "b": 2}, batch_size=5, source_column="source")
    assert batch["source"].tolist() == [0, 1, 0, 1, 0]
    rows = batch["x"]
    if isinstance(rows, PaddedRows):
        assert rows.values.tolist() == [[1, 0], [10, 11], [0, 0], [12, 0], [2, 3]]
        assert rows.lengths.tolist() == [1, 2, 0, 1, 2]
        return
    assert rows.values.tolist() == [1, 10, 11, 12, 2, 3]
    if isinstance(rows, PackedRows):
        assert str(rows.cu_seqlens.dtype).endswith("int32")
        assert rows.cu_seqlens.tolist() == [0, 1, 3, 3, 4, 6]
        assert rows.positions.tolist() == [0, 0, 1, 0, 0, 1]
        assert rows.max_seqlen == 2
    else:
        assert rows.offsets.tolist() == [0, 1, 3, 3, 4]


def test_batches_of_one_source_may_have_their_own_columns(root: Path) -> None:
    sources = {"web": create(root, "web", columns=["cls"]), "tars": create(root, "tars", columns=["txt"])}
    mixed = mix(sources, {"web": 3, "tars": 1}, batch_size=10, mix_by="batch", epoch_size=80, source_column="source")
    found = [(list(batch), set(batch["source"].tolist())) for batch in mixed]
    web, tars = (["cls", "source"], {0}), (["txt", "source"], {1})
    assert found == [web, web, tars, web, web, web, tars, web]


def test_collate_fn_of_the_mix_gets_whole_batches(root: Path) -> None:
    mixed = make(root, collate_fn=lambda batch: len(batch["txt"]))
    assert set(mixed) == {10}


def test_a_checkpoint_of_a_run_contains_the_position_of_the_mix(root: Path, tmp_path: Path) -> None:
    def train(num_steps: int) -> list[list[int]]:
        seen = []
        with strata.init(checkpoints=str(tmp_path / "checkpoints"), every=1) as ctx:
            loader = ctx.attach(make(root, rank=ctx.rank, num_ranks=ctx.world_size))
            step = ctx.restore({}).step
            for _ in ctx.epochs(1):
                for batch in loader:
                    seen.append(ids(batch))
                    step += 1
                    ctx.report(step=step)
                    ctx.maybe_checkpoint({})
                    if len(seen) == num_steps:
                        return seen
        return seen

    assert train(7) + train(100) == [ids(batch) for batch in make(root)]


def test_batches_are_smaller_where_a_damaged_row_group_was_left_out(root: Path, tmp_path: Path) -> None:
    data = bytearray((root / "web" / "0.parquet").read_bytes())
    data[20:200] = bytes(180)
    (tmp_path / "0.parquet").write_bytes(data)
    sources = {"web": create(tmp_path, "0.parquet", on_error="skip", shuffle=False), "code": create(root, "code")}
    mixed = mix(sources, {"web": 1, "code": 1}, batch_size=10, epoch_size=60, source_column="source")
    batches = list(mixed)
    assert len(batches) == 6
    skipped = mixed.get_metrics().sources["web"].loader.skipped_rows
    assert skipped >= 10
    assert sum(len(batch["txt"]) for batch in batches) < 60
    for batch in batches:
        assert batch["source"].tolist() == [int(number >= FIRST_ID["code"]) for number in ids(batch)]


def test_a_loop_that_another_one_replaces_ends_with_an_error(root: Path) -> None:
    mixed = make(root)
    first = iter(mixed)
    next(first)
    assert next(iter(mixed)) is not None
    with pytest.raises(StrataError, match="closed while it was iterated over"):
        next(first)


def test_a_source_that_has_changed_is_refused_by_its_name(root: Path, tmp_path: Path) -> None:
    state = make(root, weights={"web": 1}).state_dict()
    (tmp_path / "web").mkdir()
    table = pq.read_table(root / "web" / "0.parquet").slice(1)
    pq.write_table(table, tmp_path / "web" / "0.parquet")
    with pytest.raises(PlanChanged, match="source 'web'"):
        make(tmp_path, weights={"web": 1}).load_state_dict(state)


def test_columns_of_other_names_or_types_are_refused_before_the_first_step(root: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"cls": [0.5], "txt": ["x"]}), tmp_path / "floats.parquet")
    pq.write_table(pa.table({"cls": [5]}), tmp_path / "short.parquet")
    web = create(root, "web")
    floats, short = create(tmp_path, "floats.parquet"), create(tmp_path, "short.parquet", columns=["cls"])
    with pytest.raises(SchemaMismatch, match="'cls' is int64 in source 'web' and float64 in source 'floats'"):
        mix({"web": web, "floats": floats}, {"web": 1, "floats": 1})
    with pytest.raises(SchemaMismatch, match="source 'web' has a column 'txt', and source 'short' has not"):
        mix({"web": web, "short": short}, {"web": 1, "short": 1})
    with pytest.raises(SchemaMismatch, match="output_format='torch' and source 'code' has 'numpy'"):
        mix({"web": web, "code": create(root, "code", output_format="numpy")}, {"web": 1, "code": 1})


def test_types_that_decoding_shows_are_refused_with_the_first_batch(root: Path) -> None:
    tars = create(root, "tars", decode={"cls": float})
    mixed = mix({"web": create(root, "web"), "tars": tars}, {"web": 1, "tars": 1}, batch_size=10)
    with pytest.raises(
        SchemaMismatch, match=r"'cls' is torch.int64 in source 'web' and torch.float64 in source 'tars'"
    ):
        next(iter(mixed))


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"web": 0.5, "code": 0}, {}, r"weights\['code'\]=0 must be a positive number"),
        ({"web": 0.5, "code": -1}, {}, r"weights\['code'\]=-1 must be"),
        ({"web": 0.5, "code": float("nan")}, {}, r"weights\['code'\]=nan must be"),
        ({"web": 0.5, "code": "1"}, {}, r"weights\['code'\]='1' must be"),
        ({"web": 1, "code": 1e-12}, {}, r"weights\['code'\]=1e-12 is less than"),
        ({"web": 1}, {}, "'code' has no weight; give every source a weight"),
        ({"web": 1, "code": 1, "books": 1}, {}, "'books' is no source; the sources are web, code"),
        ({"web": 1, "code": 1}, {"batch_size": 0}, "batch_size=0 must be"),
        ({"web": 1, "code": 1}, {"epoch_size": True}, "epoch_size=True must be"),
        ({"web": 1, "code": 1}, {"stop": "never"}, "stop='never' is unknown"),
        ({"web": 1, "code": 1}, {"mix_by": "file"}, "mix_by='file' is unknown"),
        ({"web": 1, "code": 1}, {"collate_fn": 3}, "collate_fn=3 is not callable"),
    ],
)
def test_an_invalid_argument_is_refused_with_its_value(
    root: Path, weights: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    sources = {name: create(root, name) for name in ("web", "code")}
    with pytest.raises(InvalidArgument, match=message):
        mix(sources, weights, **options)


def test_sources_that_cannot_be_mixed_are_refused(root: Path) -> None:
    web, code = create(root, "web"), create(root, "code")
    both = {"a": 1, "b": 1}
    with pytest.raises(InvalidArgument, match="source 'b' is a list"):
        mix({"a": web, "b": [1]}, both)
    with pytest.raises(InvalidArgument, match="'a' and 'b' are the same loader"):
        mix({"a": web, "b": web.dataset}, both)
    with pytest.raises(InvalidArgument, match="source 'b' is read as rank 1 of 2"):
        mix({"a": web, "b": create(root, "code", rank=1, num_ranks=2)}, both)
    with pytest.raises(InvalidArgument, match="source 'b' has a collate_fn"):
        mix({"a": web, "b": create(root, "code", collate_fn=len)}, both)
    with pytest.raises(InvalidArgument, match=r"source 'b' makes batches by bytes.*leave out batch_bytes="):
        mix({"a": web, "b": create(root, "code", batch_size=None, batch_bytes=1000)}, both)
    with pytest.raises(NoData, match="source 'b' has no rows"):
        mix({"a": web, "b": create(root, "code", filters="cls < 0", on_empty="empty")}, both)
    with pytest.raises(NoData, match="141 rows, which do not fill one batch of 500 rows"):
        mix({"a": web, "b": code}, both, batch_size=500)
    state = mix({"a": web, "b": code}, both, batch_size=10).state_dict()
    with pytest.raises(InvalidArgument, match="a mix of a, b, and this is a mix of a, c"):
        mix({"a": web, "c": code}, {"a": 1, "c": 1}, batch_size=10).load_state_dict(state)
