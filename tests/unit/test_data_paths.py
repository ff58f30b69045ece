"""Find files by `path` on a local disk, open sources, and translate storage options and errors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from calls import num_calls
from hypothesis import given
from hypothesis import strategies as st

from strata.data.source.filesystem import open_source
from strata.data.source.listing import Pattern, common_directory
from strata.data.source.paths import FoundFiles, discover, format_of, guess_format, suffixes_of
from strata.data.source.source import ByteCounter, DataFile, Source, translate_error, translate_errors
from strata.data.source.storage_options import azure_arguments, gcs_arguments, s3_arguments
from strata.errors import (
    ConfigError,
    DataFileMissing,
    InvalidArgument,
    NoData,
    SchemaMismatch,
    StorageDenied,
    StorageError,
    StorageUnavailable,
)
from strata.storage import object_options

PARQUET = suffixes_of("parquet")
CLOSED_S = 15.0


def make(root: Path, *names: str, content: bytes = b"x") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names_of(found: FoundFiles) -> list[str]:
    return [file.name for file in found.files]


def search(path: Any, suffixes: Any = PARQUET, **more: Any) -> list[str]:
    return names_of(discover(path, suffixes=suffixes, **more))


# Files that are found


def test_a_path_of_a_file_finds_that_file(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet", content=b"four")
    found = discover(tmp_path / "a.parquet", suffixes=PARQUET)
    about = (tmp_path / "a.parquet").stat()
    assert found.files == (DataFile(str(tmp_path / "a.parquet"), "a.parquet", 4, about.st_mtime_ns),)
    assert found.source.is_local


def test_a_directory_is_listed_recursively_in_code_point_order(tmp_path: Path) -> None:
    make(tmp_path, "b.parquet", "a/z.parquet", "a/b/c/y.PQ", "B.parquet", "a-1.parquet", "ä.parquet", "a.parquet")
    expected = ["B.parquet", "a-1.parquet", "a.parquet", "a/b/c/y.PQ", "a/z.parquet", "b.parquet", "ä.parquet"]
    assert search(tmp_path) == search(f"{tmp_path}/") == search(tmp_path.as_uri()) == expected


def test_hidden_files_and_markers_are_skipped_and_counted(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet", "_SUCCESS", ".a.parquet.crc", "a.parquet.crc", "_tmp/b.parquet", "x/.git/c.parquet")
    make(tmp_path, "_metadata.parquet", "dir_$folder$", "x/_k=1/d.parquet", "_k=1.parquet", "notes.txt", "README")
    os.mkfifo(tmp_path / "pipe.parquet")
    found = discover(tmp_path, suffixes=PARQUET, partitioning=None)
    assert names_of(found) == ["a.parquet", "x/_k=1/d.parquet"]
    assert found.passed_over == {"": 1, ".txt": 1, "hidden or marker": 9}


def test_a_file_requested_by_name_is_selected_whatever_its_name(tmp_path: Path) -> None:
    make(tmp_path, "_hidden", "data.bin", ".x/a.txt")
    assert search(tmp_path / "_hidden") == ["_hidden"]
    assert search([tmp_path / "data.bin", tmp_path / ".x/a.txt"]) == [".x/a.txt", "data.bin"]
    with pytest.raises(InvalidArgument, match="neither a file nor a directory"):
        search("/dev/null")


def test_a_directory_below_a_hidden_one_can_be_searched(tmp_path: Path) -> None:
    make(tmp_path, "_staging/.part/a.parquet")
    assert search(tmp_path / "_staging/.part") == ["a.parquet"]


def test_names_do_not_depend_on_the_location_of_the_dataset(tmp_path: Path) -> None:
    for place in ("one", "two/deep/er"):
        make(tmp_path / place, "a=1/x.parquet", "a=2/y.parquet")
    assert search(tmp_path / "one") == search(tmp_path / "two/deep/er") == search(f"{tmp_path}/two/deep/er/*/*.parquet")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*/part-*.parquet", ["d1/part-0.parquet", "d2/part-1.parquet"]),
        ("d?/part-[0-1].parquet", ["d1/part-0.parquet", "d2/part-1.parquet"]),
        ("d[!1]/*.parquet", ["d2/part-1.parquet"]),
        ("**/part-*.parquet", ["d1/e/part-2.parquet", "d1/part-0.parquet", "d2/part-1.parquet", "part-3.parquet"]),
        ("**", ["d1/e/part-2.parquet", "d1/part-0.parquet", "d2/part-1.parquet", "part-3.parquet"]),
        ("d1/**/*.parquet", ["e/part-2.parquet", "part-0.parquet"]),
        ("**/e/**", ["d1/e/part-2.parquet"]),
        ("d*", ["d1/e/part-2.parquet", "d1/part-0.parquet", "d2/part-1.parquet"]),
        ("d1/*", ["e/part-2.parquet", "part-0.parquet"]),
        ("d1/*.txt", ["other.txt"]),
        ("*/_*/*.parquet", ["d1/_tmp/hidden.parquet"]),
        ("*/.*.parquet", ["d2/.hidden.parquet"]),
    ],
)
def test_a_pattern_selects_the_files_and_directories_it_matches(
    tmp_path: Path, pattern: str, expected: list[str]
) -> None:
    make(tmp_path, "d1/part-0.parquet", "d1/e/part-2.parquet", "d2/part-1.parquet", "part-3.parquet", "d1/other.txt")
    make(tmp_path, "d1/_tmp/hidden.parquet", "d2/.hidden.parquet")
    assert search(f"{tmp_path}/{pattern}") == expected
    through_fsspec = search(f"{tmp_path}/{pattern}", filesystem=fsspec.filesystem("file"))
    assert through_fsspec == expected


part = st.sampled_from(["a", "b", "_a", ".b", "_a=b", "a.crc"])
wild = st.sampled_from(["a", "*", "**", "_*", "?", "[ab]", "*a", "a.*"])


@given(st.lists(part, min_size=1, max_size=5), st.lists(wild, min_size=1, max_size=4))
def test_a_pattern_enters_every_directory_above_what_it_matches(parts: list[str], patterns: list[str]) -> None:
    pattern = Pattern(patterns)
    if pattern.matches("/".join(parts)) is not None:
        for i in range(1, len(parts)):
            assert pattern.may_enter("/".join(parts[:i]))


def test_a_pattern_does_not_list_directories_where_nothing_can_match(tmp_path: Path) -> None:
    make(tmp_path, "yes/a.parquet", "no/b.parquet")
    (tmp_path / "no").chmod(0)
    pattern = Pattern(["y*", "*.parquet"])
    assert pattern.may_enter("yes")
    assert not pattern.may_enter("no")
    assert search(f"{tmp_path}/y*/*.parquet") == ["yes/a.parquet"]
    (tmp_path / "no").chmod(0o755)


HOSTILE = [
    *("line\nbreak.parquet", "ünï/日本.parquet", "a b/ c .parquet", "100%/50%25.parquet", "a[1]*?.parquet"),
    *("a=1=2/b.parquet", "quote'\".parquet", "#hash?.parquet", "-dash.parquet", "back\\slash.parquet"),
]


def test_hostile_names_work_in_directories_by_name_and_in_patterns(tmp_path: Path) -> None:
    make(tmp_path, *HOSTILE)
    found = discover(tmp_path, suffixes=PARQUET)
    assert names_of(found) == sorted(HOSTILE)
    for file in found.files:
        assert found.source.read(file, 0, 9).to_pybytes() == b"x"
        assert search(file.path) == [Path(file.path).name]
    assert search([file.path for file in found.files]) == sorted(HOSTILE)
    assert search(f"{tmp_path}/a[[]1]*") == ["a[1]*?.parquet"]


def test_an_empty_object_that_marks_a_directory_is_skipped() -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/marked/a.parquet/b.parquet", b"x")
        memory.pipe("/marked/c.parquet", b"")
        memory.store["/marked/a.parquet"] = type(memory.store["/marked/c.parquet"])(memory, "/marked/a.parquet", b"")
        found = discover("memory://marked", suffixes=PARQUET)
        assert names_of(found) == ["a.parquet/b.parquet", "c.parquet"]
    finally:
        memory.store.clear()


def test_a_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")).write_bytes(b"x")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        search(tmp_path)


def test_links_are_followed_and_cycles_terminate(tmp_path: Path) -> None:
    make(tmp_path, "data/a/x.parquet", "elsewhere/y.parquet")
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/b").symlink_to(tmp_path / "data/a")
    (tmp_path / "data/z").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/self").symlink_to(tmp_path / "data/self")
    (tmp_path / "data/one.parquet").symlink_to(tmp_path / "elsewhere/y.parquet")
    assert search(tmp_path / "data") == ["a/x.parquet", "c/y.parquet", "one.parquet"]


def test_a_broken_link_to_a_data_file_is_reported_and_other_links_are_not(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet")
    (tmp_path / "README").symlink_to(tmp_path / "nowhere")
    assert search(tmp_path) == ["a.parquet"]
    (tmp_path / "b.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataFileMissing, match=r"b\.parquet is a broken link"):
        search(tmp_path)


def test_a_list_may_mix_files_directories_and_patterns(tmp_path: Path) -> None:
    make(tmp_path, "x/a.parquet", "x/sub/b.parquet", "y/c.parquet", "y/d.parquet", "z/e.parquet")
    listed = [tmp_path / "y/c.parquet", str(tmp_path / "x"), f"{tmp_path}/z/*.parquet"]
    assert search(listed) == ["x/a.parquet", "x/sub/b.parquet", "y/c.parquet", "z/e.parquet"]
    assert search([tmp_path / "x"]) == ["a.parquet", "sub/b.parquet"]
    assert search([tmp_path / "x/a.parquet", tmp_path / "x/sub"]) == ["a.parquet", "sub/b.parquet"]


def test_a_file_that_is_selected_twice_is_rejected(tmp_path: Path) -> None:
    make(tmp_path, "x/a.parquet")
    with pytest.raises(InvalidArgument, match=r"a\.parquet twice"):
        search([tmp_path, tmp_path / "x/a.parquet"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], r"path=\[\] is empty"),
        (None, "path contains None"),
        ([3], "path contains 3"),
        ("", "is not a path"),
        (["a", "s3://b/c"], "different"),
    ],
)
def test_an_invalid_path_is_rejected(path: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        search(path)


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_common_directory_is_the_lowest_that_contains_all_paths(bases: list[list[str]]) -> None:
    common = [part for part in common_directory(["/" + "/".join(base) for base in bases]).split("/") if part]
    assert all(base[: len(common)] == common for base in bases)
    assert any(len(base) == len(common) for base in bases) or len({base[len(common)] for base in bases}) > 1


def test_partitions_are_read_from_directories_below_the_root(tmp_path: Path) -> None:
    make(tmp_path, "year=2026/c=x%20y/a.parquet")
    (file,) = discover(tmp_path, suffixes=PARQUET).files
    assert file.partition == (("year", "2026"), ("c", "x y"))
    assert discover(f"{tmp_path}/year=*/*", suffixes=PARQUET).files == (file,)
    assert discover(tmp_path, suffixes=PARQUET, partitioning=None).files[0].partition == ()
    make(tmp_path, "year=1/year=2/b.parquet")
    with pytest.raises(SchemaMismatch, match="'year' twice"):
        search(tmp_path)
    with pytest.raises(InvalidArgument, match="pass 'hive' or None"):
        search(tmp_path, partitioning="date")


# Paths without files


def test_a_missing_path_suggests_a_similar_one(tmp_path: Path) -> None:
    make(tmp_path, "train/a.parquet")
    with pytest.raises(NoData, match=rf"{tmp_path}/trian does not exist; did you mean {tmp_path}/train\?"):
        search(tmp_path / "trian")
    with pytest.raises(NoData, match="/no/such/place does not exist; check the path"):
        search("/no/such/place")
    with pytest.raises(NoData, match="no file was found"):
        search(f"{tmp_path}/train/*.orc")
    with pytest.raises(NoData, match="does not exist"):
        search(tmp_path / "train/a.parquet/below")
    with pytest.raises(NoData, match="does not exist"):
        search(tmp_path / ("x" * 300))


def test_a_path_without_files_of_the_format_lists_what_was_found(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", "b.csv", "c.csv.gz", "_SUCCESS", "part-0")
    with pytest.raises(NoData) as caught:
        search(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no files that end with .parquet, .pq, .parq: found 1 file without a suffix, 2 .csv files, "
        "1 .csv.gz file, 1 hidden or marker entry (names that start with _ or .); did you mean format='csv'?"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoData, match="no file was found"):
        search(tmp_path / "empty")
    make(tmp_path, "plain/part-0")
    with pytest.raises(NoData, match=r"found 1 file without a suffix; .* such as DIR/part-\*"):
        search(tmp_path / "plain")
    assert search(f"{tmp_path}/plain/part-*") == ["part-0"]


def test_a_directory_without_permission_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a/b/c.parquet")
    look = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("/a/b"):
            raise PermissionError(13, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    with pytest.raises(StorageDenied, match="a/b: access denied"):
        search(tmp_path)


def test_listing_two_thousand_files_takes_few_system_calls_each(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"d={i}").mkdir()
        for j in range(200):
            os.mknod(tmp_path / f"d={i}/part-{j:05}.parquet")
    assert len(search(tmp_path)) == 2_000
    assert num_calls(lambda: discover(tmp_path, suffixes=PARQUET)) < 16 * 2_000


# Formats


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("a.parquet", "parquet"), ("a.PQ", "parquet"), ("a.orc", "orc"), ("a.csv", "csv"), ("a.tsv.gz", "csv")),
        *(("a.json", "json"), ("a.jsonl", "jsonl"), ("a.ndjson.zst", "jsonl"), ("a.json.bz2", "json")),
        *(("a.arrow", "arrow"), ("a.feather", "arrow"), ("a.arrows", "arrow"), ("a.ipc", "arrow")),
        *(("a.parquet.gz", None), ("a.gz", None), ("a", None), ("parquet", None), ("a.txt", None)),
    ],
)
def test_a_suffix_determines_the_format(name: str, expected: str | None) -> None:
    assert format_of(name) == expected
    if expected:
        assert name.lower().endswith(suffixes_of(expected))


@pytest.mark.parametrize(
    ("content", "expected"), [(b"PAR1....", "parquet"), (b"ORC.....", "orc"), (b"ARROW1\0\0", "arrow")]
)
def test_without_a_suffix_the_first_bytes_determine_the_format(tmp_path: Path, content: bytes, expected: str) -> None:
    make(tmp_path, "part-0", "part-1", content=content)
    found = discover(tmp_path, suffixes=None)
    assert guess_format(found.source, found.files) == expected


def test_unknown_files_beside_known_ones_are_skipped(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", "b.tsv", "README.md", "LICENSE")
    found = discover(tmp_path, suffixes=None)
    assert names_of(found) == ["a.csv", "b.tsv"]
    assert found.passed_over == {"": 1, ".md": 1}
    assert guess_format(found.source, found.files) == "csv"


def test_files_of_several_formats_are_rejected_with_an_example_of_each(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", "b.parquet", "c.csv")
    found = discover(tmp_path, suffixes=None)
    with pytest.raises(InvalidArgument, match=r"a\.csv is csv, b\.parquet is parquet; pass format="):
        guess_format(found.source, found.files)
    make(tmp_path, "odd/x.bin", "odd/empty", content=b"")
    found = discover(tmp_path / "odd", suffixes=None)
    with pytest.raises(InvalidArgument, match="the format of empty cannot be guessed"):
        guess_format(found.source, found.files)
    with pytest.raises(InvalidArgument, match="cannot be guessed without files"):
        guess_format(found.source, [])


# Sources


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *(("/a/b/", "/a/b"), ("file:///a/b%20c", "/a/b c"), ("file://localhost/a", "/a"), ("/a/../b", "/b")),
        *(("~/x", f"{Path.home()}/x"), ("x%20y", f"{Path.cwd()}/x%20y")),
    ],
)
def test_a_local_path_becomes_absolute(path: str, expected: str) -> None:
    assert open_source(path)[1] == expected


S3_KEYS = {"access_key_id": "k", "secret_access_key": "s", "region": "eu-west-1"}


@pytest.mark.parametrize(
    ("url", "options", "kind", "path"),
    [
        ("s3://bucket/a%20b/", S3_KEYS, pafs.S3FileSystem, "bucket/a%20b"),
        ("s3a://bucket", S3_KEYS, pafs.S3FileSystem, "bucket"),
        ("s3://bucket/part-?.parquet", S3_KEYS, pafs.S3FileSystem, "bucket/part-?.parquet"),
        ("gs://bucket/a", {"skip_signature": True}, pafs.GcsFileSystem, "bucket/a"),
        ("az://container/a", {"account_name": "x", "account_key": "QUJD"}, pafs.AzureFileSystem, "container/a"),
        ("abfss://c@x.dfs.core.windows.net/a", {"account_key": "QUJD"}, pafs.AzureFileSystem, "c/a"),
        ("memory://a/b", {}, pafs.PyFileSystem, "/a/b"),
    ],
)
def test_a_url_opens_its_file_system_which_can_be_pickled(
    url: str, options: dict[str, Any], kind: type[pafs.FileSystem], path: str
) -> None:
    source, found = open_source(url, storage_options=options)
    assert isinstance(source.filesystem, kind)
    assert found == path
    again = pickle.loads(pickle.dumps(source))
    assert again == source
    assert open_source("dir//x", filesystem=source.filesystem)[0].filesystem is source.filesystem


@pytest.mark.parametrize(
    "url", ["s3://key:pass-word@bucket/x", "s3://bucket/x?secret=pass-word", "az://c:pass-word@h/x"]
)
def test_a_url_with_credentials_is_rejected_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="pass these as storage_options") as caught:
        open_source(url)
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://b", {"regoin": "x"}, "S3 have no option 'regoin'; did you mean region?"),
        ("s3://b", {"endpoint_url": "x"}, "did you mean endpoint?"),
        ("gs://b", {"token": "x"}, "did you mean bearer_token?"),
        ("s3://b", {"request_payer": True}, "supports it as filesystem="),
        ("gs://b", {"service_account": "x"}, "set GOOGLE_APPLICATION_CREDENTIALS"),
        ("s3://b", {"endpoint": "http://h:1"}, "http://h:1 is not encrypted"),
        ("s3://b", {"endpoint": "ftp://h:1"}, "write it as https://HOST:PORT"),
        ("s3://b", {"access_key": "x", "access_key_id": "y"}, "access_key and access_key_id are the same"),
        ("s3://b", {"timeout_s": 0}, "timeout_s=0 is invalid"),
        ("s3://b", {"max_retries": "many"}, "max_retries='many' is invalid"),
        ("s3://b", {"skip_signature": "maybe"}, "pass True or False"),
        ("s3://b", {"region": "x", "access_key_id": "only"}, "rejects the combination"),
        ("az://c/x", {}, "the Azure account is missing"),
        ("s3:///x", {}, "has no bucket"),
        ("s3://buck*/x", {}, "has no bucket"),
        ("nope://x", {}, "unknown scheme nope://"),
        ("/x", {"region": "x"}, "remove them for a local path"),
        ("memory://x", {"filesystem": object()}, "an existing filesystem="),
    ],
)
def test_invalid_options_are_rejected_with_the_cure(
    url: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    filesystem = pafs.LocalFileSystem() if "filesystem" in options else None
    with pytest.raises(ConfigError) as caught:
        open_source(url, storage_options=options, filesystem=filesystem)
    assert message in str(caught.value)


def test_a_missing_package_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"needs the package fsspec; .* pip install 'strata-runtime\[data\]'"):
        open_source("memory://x")
    monkeypatch.undo()

    def lacking(**_: Any) -> None:
        raise ImportError("built without it")

    monkeypatch.setattr(pafs, "GcsFileSystem", lacking)
    with pytest.raises(ConfigError, match="this build of pyarrow does not support gs://"):
        open_source("gs://b/x")


def test_an_object_that_is_not_a_file_system_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="filesystem=int is not a file system"):
        open_source("x", filesystem=3)


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def test_every_option_of_checkpoints_is_known_for_data_too() -> None:
    """Check that an option has its effect, concerns only writing, or is rejected with a cure, but is never unknown."""
    readers = {
        object_options.S3: s3_arguments,
        object_options.GCS: gcs_arguments,
        object_options.AZURE: azure_arguments,
    }
    limits = object_options.Limits.__dataclass_fields__
    for kind, read in readers.items():
        for name in (*object_options._CONFIG[kind], *object_options._CLIENT, *limits):
            base = {"account_name": "a"} if kind == object_options.AZURE and name != "account_name" else {}
            message = refusal_of(lambda: read({**base, name: "1"}, {}))  # noqa: B023 - called at once
            assert not message or ", does not support " in message, (kind, name)


def test_options_become_pyarrows_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    certificate = "-----BEGIN CERTIFICATE-----\nx"
    options = {"endpoint": "http://h:9/", "allow_http": "true", "root_certificate": certificate, "max_retries": 1}
    found = s3_arguments({**S3_KEYS, **options, "piece_bytes": 1, "timeout_s": 7}, {})
    assert Path(found.pop("tls_ca_file_path")).read_text() == certificate
    assert found == {
        "access_key": "k",
        "secret_key": "s",
        "region": "eu-west-1",
        "scheme": "http",
        "endpoint_override": "h:9",
        "connect_timeout": 5.0,
        "request_timeout": 7.0,
        "max_attempts": 2,
    }
    from_environment = s3_arguments({}, {"AWS_ENDPOINT_URL": "http://e:1", "AWS_ALLOW_HTTP": "1"})
    assert (from_environment["scheme"], from_environment["endpoint_override"]) == ("http", "e:1")
    assert "access_key" not in from_environment  # the client library finds and renews it


def test_a_profile_must_contain_keys_because_they_are_read_once(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile keys]\naws_access_key_id=k\naws_secret_access_key=s\n"
        "[profile role]\nrole_arn=arn:aws:iam::1:role/r\nsource_profile=keys\n"
        "[profile sso]\nsso_session=work\n"
    )
    environment = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    found = s3_arguments({"profile": "keys"}, environment)
    assert (found["access_key"], found["secret_key"]) == ("k", "s")
    for profile in ("role", "sso"):
        with pytest.raises(ConfigError, match="is not supported; export keys"):
            s3_arguments({"profile": profile}, environment)


@pytest.mark.parametrize(
    ("host", "options", "expected"),
    [
        ("acc.dfs.core.windows.net", {}, {}),
        (
            "acc.dfs.core.chinacloudapi.cn",
            {},
            {
                "blob_storage_authority": ".blob.core.chinacloudapi.cn",
                "blob_storage_scheme": "https",
                "dfs_storage_authority": ".dfs.core.chinacloudapi.cn",
                "dfs_storage_scheme": "https",
            },
        ),
        (
            "",
            {"account_name": "acc", "endpoint": "http://127.0.0.1:1/acc", "allow_http": True},
            {
                "blob_storage_authority": "127.0.0.1:1",
                "blob_storage_scheme": "http",
                "dfs_storage_authority": "127.0.0.1:1",
                "dfs_storage_scheme": "http",
            },
        ),
    ],
)
def test_an_azure_account_is_named_by_the_url_or_by_options(
    host: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    environment = {"AZURE_STORAGE_ACCOUNT_KEY": "QUJD"}
    found = azure_arguments(options, environment, host)
    assert found == {"account_name": "acc", "account_key": "QUJD", **expected}


def test_the_region_of_a_bucket_is_looked_up_only_if_it_is_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(bucket: str) -> str:
        asked.append(bucket)
        return "ap-south-1"

    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pafs, "resolve_s3_region", resolve)
    keys = {"access_key_id": "k", "secret_access_key": "s"}
    assert open_source("s3://b/x", storage_options=keys)[0].filesystem.region == "ap-south-1"
    assert open_source("s3://b/x", storage_options=S3_KEYS)[0].filesystem.region == "eu-west-1"
    open_source("s3://b/x", storage_options={**keys, "endpoint": "https://h"})
    assert asked == ["b"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "x"), DataFileMissing),
        (PermissionError(13, "x"), StorageDenied),
        (TimeoutError("x"), StorageUnavailable),
        (ConnectionResetError("x"), StorageUnavailable),
        (
            OSError("When listing: AWS Error ACCESS_DENIED during HeadObject operation: No response body."),
            StorageDenied,
        ),
        (OSError("AWS Error SIGNATURE_DOES_NOT_MATCH during ListObjectsV2 operation"), StorageDenied),
        (OSError("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation"), StorageDenied),
        (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation"), DataFileMissing),
        (OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7"), StorageUnavailable),
        (OSError("AWS Error UNKNOWN (HTTP status 503) during GetObject operation"), StorageUnavailable),
        (OSError("google::cloud::Status(PERMISSION_DENIED: Permanent error)"), StorageDenied),
        (OSError("google::cloud::Status(UNAVAILABLE: Retry policy exhausted)"), StorageUnavailable),
        (OSError("No such file or directory 'datasets/x'"), DataFileMissing),
        (OSError("failed. Azure Error: [AuthorizationFailure] 403 Server failed"), StorageDenied),
        (OSError("failed. Azure Error: [] Fail to get a new connection for: http://h"), StorageUnavailable),
        (OSError("failed. Azure Error: [BlobNotFound] 404 The specified blob"), DataFileMissing),
        (OSError(5, "Input/output error"), StorageError),
        (OSError("Unexpected end of file 'ACCESS_DENIED/HTTP status 503.parquet'"), StorageError),
    ],
)
def test_errors_of_file_systems_are_translated(error: OSError, kind: type[Exception]) -> None:
    assert type(translate_error(error, "f")) is kind
    with pytest.raises(kind, match=r"^f[: ]"), translate_errors("f"):
        raise error


def test_no_signature_of_a_url_is_repeated() -> None:
    message = str(translate_error(OSError("GetProperties failed for 'https://a/b?sv=1&sig=abc%2Fdef&se=2'"), "f"))
    assert "abc" not in message
    assert "sig=…&se=2" in message


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/x", {**S3_KEYS, "endpoint": "http://127.0.0.1:{port}"}),
        ("az://c/x", {"account_name": "a", "account_key": "QUJD", "endpoint": "http://127.0.0.1:{port}/a"}),
        ("gs://b/x", {"base_url": "http://127.0.0.1:{port}", "skip_signature": True, "retry_timeout_s": 1}),
    ],
)
def test_an_unreachable_store_is_reported_quickly(url: str, options: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        filled = {name: value.format(port=port) if isinstance(value, str) else value for name, value in options.items()}
        begin_s = time.monotonic()
        with pytest.raises(StorageUnavailable, match="check the endpoint"):
            discover(url, suffixes=None, storage_options={**filled, "allow_http": True, "max_retries": 1})
        assert time.monotonic() - begin_s < CLOSED_S


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/x", {**S3_KEYS, "endpoint": "http://127.0.0.1:{port}"}),
        ("az://c/x", {"account_name": "a", "account_key": "QUJD", "endpoint": "http://127.0.0.1:{port}/a"}),
        ("gs://b/x", {"base_url": "http://127.0.0.1:{port}", "skip_signature": True}),
    ],
)
def test_a_store_that_never_answers_is_reported_at_the_deadline(url: str, options: dict[str, Any]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        filled = {name: value.format(port=port) if isinstance(value, str) else value for name, value in options.items()}
        begin_s = time.monotonic()
        with pytest.raises(StorageUnavailable, match="check the endpoint"):
            discover(
                url, suffixes=None, storage_options={**filled, "allow_http": True, "max_retries": 0, "timeout_s": 1}
            )
        assert time.monotonic() - begin_s < CLOSED_S


# Counting


def test_bytes_are_counted_by_source_and_by_reader(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet", content=bytes(range(100)))
    found = discover(tmp_path, suffixes=PARQUET)
    source, (file,) = found.source, found.files
    assert source.read(file, 10, 5).to_pybytes() == bytes(range(10, 15))
    assert source.read_tail(file, 7).to_pybytes() == bytes(range(93, 100))
    assert source.read(file, 98, 50).size == 2
    assert source.read(file, 200, 50).size == 0
    assert source.counter.total == 14
    own = ByteCounter()
    with source.open_counted(file, own) as opened:
        opened.seek(90)
        assert opened.read() == bytes(range(90, 100))
        assert opened.read_at(4, 0) == bytes(range(4))
    assert own.total == 14
    assert source.counter.total == 28


def test_threads_share_a_byte_counter_and_processes_do_not(tmp_path: Path) -> None:
    counter = ByteCounter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(counter.add, [1] * 10_000))
    assert counter.total == 10_000
    source = Source(pafs.LocalFileSystem(), is_local=True, counter=counter)
    assert pickle.loads(pickle.dumps(source)).counter.total == 0


def _read_elsewhere(source: Source, file: DataFile) -> bytes:
    return source.read(file, 0, 4).to_pybytes()


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet", content=b"four")
    found = discover(tmp_path, suffixes=PARQUET)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_read_elsewhere, (found.source, found.files[0])) == b"four"
