"""Surveys as bytes and in the cache, which saves work and never changes a plan."""

from __future__ import annotations

import dataclasses
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import xxhash
import zstandard
from data_fakes import SOURCE, FakeFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.filter import filter as filters
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.cache import SurveyCache
from strata.data.plan.planner import build
from strata.data.plan.survey import Survey
from strata.data.plan.surveyor import survey
from strata.data.source.source import DataFile
from strata.errors import DataError, NoData


@pytest.fixture
def cache(tmp_path: Path) -> SurveyCache:
    return SurveyCache(directory=tmp_path / "surveys")


def look(
    fake: FakeFormat, files: list[DataFile], cache: SurveyCache | None, filter_: str | None = None, **more: Any
) -> Survey:
    condition = filters.parse(filter_) if filter_ else None
    return survey(SOURCE, files, fake, condition=condition, num_threads=1, cache=cache, **more)


def two_files(fake: FakeFormat) -> list[DataFile]:
    return [fake.add("a", {"x": [1, 2, 3, None]}), fake.add("b", {"x": [4, 5], "y": ["u", "v"]})]


def entry(cache: SurveyCache) -> Path:
    [path] = cache.directory.iterdir()
    return path


def test_a_survey_survives_a_broadcast() -> None:
    fake = FakeFormat(unit_rows=1)
    found = look(fake, [*two_files(fake), fake.add("bad", None)], None, "x > 1", on_error="skip")
    assert surveys.from_bytes(surveys.to_bytes(found)) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Survey) == found


def test_cached_files_are_not_opened_again(cache: SurveyCache) -> None:
    fake = FakeFormat()
    files = two_files(fake)
    found = look(fake, files, cache, "x > 1")
    fake.calls.clear()
    assert look(fake, files, cache, "x > 1") == found
    assert not fake.calls
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


def test_another_filter_other_columns_or_another_option_of_the_format_is_another_survey(cache: SurveyCache) -> None:
    fake = FakeFormat()
    files = two_files(fake)
    for options in (
        {},
        {"filter_": "x > 1"},
        {"filter_": "x > 2"},
        {"columns": ["x"]},
        {"split_bytes": 5},
        {"roots": ["/q"]},
    ):
        fake.calls.clear()
        look(fake, files, cache, **options)
        assert fake.calls["inspect", "a"] == 1, options
    fake.unit_rows = 3
    assert look(fake, files, cache) == look(fake, files, None), "an option of the format"
    assert len(list(cache.directory.iterdir())) == 7


def test_only_changed_files_are_opened(cache: SurveyCache) -> None:
    fake = FakeFormat()
    files = two_files(fake)
    look(fake, files, cache)
    touched = dataclasses.replace(files[1], mtime_ns=2)
    fake.calls.clear()
    look(fake, [files[0], touched, fake.add("new", {"x": [7]})], cache)
    assert set(fake.calls) == {("inspect", "b"), ("inspect", "new")}
    undated = [dataclasses.replace(file, mtime_ns=0) for file in files]
    look(fake, undated, cache)
    fake.calls.clear()
    look(fake, undated, cache)
    assert fake.calls.total() == 2, "a file without a date is not trusted"


def test_rows_are_counted_again_when_the_types_of_the_filter_s_columns_change(cache: SurveyCache) -> None:
    fake = FakeFormat()
    files = [fake.add("a", {"x": pa.array([1, 2], pa.int8())})]
    look(fake, files, cache, "x > 1")
    files.append(fake.add("b", {"x": pa.array([2**40], pa.int64())}))
    fake.calls.clear()
    assert look(fake, files, cache, "x > 1") == look(fake, files, None, "x > 1")
    assert fake.calls["inspect", "a"] == 1  # by the second one, which has no cache
    assert fake.calls["open", "a"] == 2


def test_rows_are_counted_again_when_partition_values_change(cache: SurveyCache) -> None:
    fake = FakeFormat()
    file = fake.add("y=1/a", {"y": [5, 6]})
    by_path, by_name = [pa.field("y", pa.int64())], list[pa.Field]()
    moved = dataclasses.replace(file, partition=(("y", "7"),))
    for files, fields, expected in (([file], by_path, 0), ([moved], by_path, 2), ([moved], by_name, 1)):
        found = look(fake, files, cache, "y > 5", partition_fields=fields, roots=["/data"])
        passing = [surveys.unpack(each.passing or b"").sum() for each in found.files]
        assert sum(passing) == expected
    assert fake.calls["inspect", "y=1/a"] == 1


def test_unreadable_files_are_tried_again(cache: SurveyCache) -> None:
    fake = FakeFormat(bad_units={("a", 0)})
    files = two_files(fake)
    assert look(fake, files, cache, "x > 1", on_error="skip").skipped
    fake.bad_units.clear()
    assert not look(fake, files, cache, "x > 1", on_error="skip").skipped


def tampered(found: Survey, **changes: Any) -> bytes:
    file = msgspec.structs.replace(found.files[0], **changes)
    return surveys.to_bytes(msgspec.structs.replace(found, files=(file, *found.files[1:])))


def with_payload(payload: bytes) -> bytes:
    return surveys._MAGIC + xxhash.xxh3_128_digest(payload) + payload


def test_impossible_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "MAX_BYTES", 10_000)
    fake = FakeFormat(unit_rows=2)
    found = look(fake, two_files(fake), None, "x > 1")
    good = surveys.to_bytes(found)
    bad = [
        b"",
        b"\x00" * 100,
        good[:-1],
        good[:40],
        good.replace(b"strata survey %d" % surveys.VERSION, b"strata survey 1"),
        good[:-5] + bytes([good[-5] ^ 1]) + good[-4:],
        with_payload(b"no zstd"),
        with_payload(zstandard.compress(b"no msgpack")),
        with_payload(zstandard.compress(msgspec.msgpack.encode({"format": "x"}))),
        with_payload(zstandard.compress(b"\x00" * (surveys.MAX_BYTES + 1))),
        surveys.to_bytes(msgspec.structs.replace(found, schemas=(b"no schema",) * len(found.schemas))),
        tampered(found, schema=9),
        tampered(found, schema=-1),
        tampered(found, rows=surveys.pack([1, 2, 3])),
        tampered(found, rows=b"123"),
        tampered(found, rows=surveys.pack([-1, 2])),
        tampered(found, num_bytes=surveys.pack([2**60, 2])),
        tampered(found, passing=surveys.pack([3, 0])),
        tampered(found, null_counts=b""),
        tampered(found, parts=surveys.pack([0, 0])),
        tampered(found, parts=surveys.pack([2, 0, 1])),
        tampered(found, parts=surveys.pack([-1, 0, 1])),
        tampered(found, parts=surveys.pack([0, -1, 1])),
        tampered(found, parts=surveys.pack([0, 1, 2])),
        tampered(found, parts=surveys.pack([0, 0, 0])),
        tampered(found, parts=surveys.pack([0, 2**62, 2**62])),
        tampered(found, parts=surveys.pack([0, 0, 2, 0, 1, 1])),
        tampered(found, parts=surveys.pack([1, 0, 2, 0, 0, 2])),
    ]
    for number, data in enumerate(bad):
        with pytest.raises(DataError, match="survey the dataset again"):
            pytest.fail(f"{number} was taken for a survey: {surveys.from_bytes(data)}")


def test_an_untrusted_cache_is_ignored(cache: SurveyCache, tmp_path: Path) -> None:
    fake = FakeFormat()
    files = two_files(fake)
    expected = look(fake, files, cache)
    path = entry(cache)
    good = path.read_bytes()

    def damage() -> None:
        path.write_bytes(good[: len(good) // 2])

    def loosen() -> None:
        path.chmod(0o666)

    def link() -> None:
        (tmp_path / "elsewhere").write_bytes(good)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")

    def directory() -> None:
        path.unlink()
        path.mkdir()

    def pipe() -> None:
        path.rmdir()
        os.mkfifo(path, 0o600)

    for harm in (damage, loosen, link, directory, pipe):
        harm()
        fake.calls.clear()
        assert look(fake, files, cache) == expected, harm.__name__
        assert fake.calls.total() == 2, harm.__name__


def test_a_cache_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    fake = FakeFormat()
    files = two_files(fake)
    assert look(fake, files, SurveyCache(directory=tmp_path / "file" / "surveys")) == look(fake, files, None)


def test_the_cache_is_bounded_and_evicts_the_least_recently_used(tmp_path: Path) -> None:
    fake = FakeFormat()
    found = look(fake, two_files(fake), None)
    size = len(surveys.to_bytes(found))
    cache = SurveyCache(directory=tmp_path / "surveys", max_entries=3, max_bytes=10 * size)
    for number in range(5):
        cache.save(f"k{number}", found)
        os.utime(cache.directory / f"k{number}.survey", (number, number))
        if number == 3:
            assert cache.load("k1") == found  # now the newest
    assert sorted(path.name for path in cache.directory.iterdir()) == ["k1.survey", "k3.survey", "k4.survey"]
    dataclasses.replace(cache, max_bytes=2 * size).save("k5", found)
    assert len(list(cache.directory.iterdir())) == 2
    dataclasses.replace(cache, max_bytes=size - 1).save("k6", found)
    assert cache.load("k6") is None


def test_the_cache_directory_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path))
    assert survey_cache.default().directory == tmp_path / "surveys"
    monkeypatch.delenv("STRATA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert survey_cache.default().directory == tmp_path / "xdg" / "strata" / "surveys"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.none() | st.lists(st.integers(0, 5) | st.none(), max_size=6),
        st.sampled_from(["int8", "int64", "string"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=20)
@given(STEPS, st.sampled_from([None, "x is not None", "y is None"]))
def test_a_cache_never_changes_a_plan(
    steps: list[tuple[str, list[int | None] | None, str]], filter_: str | None
) -> None:
    """Files are added, removed and changed; after each step the plan equals one made without a cache."""
    condition = filters.parse(filter_) if filter_ else None
    fake = FakeFormat(unit_rows=2)
    files = {"y": fake.add("y", {"y": [1, None, 2]}), "x": fake.add("x", {"x": pa.array([1, None], pa.int8())})}
    with tempfile.TemporaryDirectory() as directory:
        cache = SurveyCache(directory=Path(directory))
        for number, (name, values, kind) in enumerate(steps):
            files.pop(name, None)
            if values is not None:
                column = pa.array(values, pa.int8()).cast(kind)
                files[name] = fake.add(name, {"x": column}, mtime_ns=number + 2)
            outcomes = []
            for kept in (cache, cache, None):
                try:
                    made = build(look(fake, list(files.values()), kept, filter_), condition=condition)
                    outcomes.append(
                        (made.fingerprint, made.pruning, made.null_counts, made.schema, made.unit_bytes.tolist())
                    )
                except DataError as error:
                    outcomes.append((type(error), str(error)))
            assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_dataset_that_became_empty_is_empty_with_a_cache_too(cache: SurveyCache) -> None:
    fake = FakeFormat()
    look(fake, two_files(fake), cache, roots=["/data"])
    with pytest.raises(NoData):
        build(look(fake, [], cache, roots=["/data"]))
