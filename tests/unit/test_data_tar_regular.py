"""Members that are found together are those that the walk from header to header finds."""

from __future__ import annotations

import io
import tarfile

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.formats.webdataset.format import _LoadedSamples
from strata.data.formats.webdataset.headers import TarDamage, walk
from strata.data.formats.webdataset.regular import find_regular

Members = list[tuple[str, bytes]]
SAMPLES: Members = [("a.jpg", b"x" * 700), ("a.cls", b"1"), ("b.jpg", b""), ("b.cls", b"2" * 512)]
NAMES = st.sampled_from(
    [
        "a.jpg",
        "a.cls",
        "A.CLS",
        "b.jpg",
        "b.b.cls",
        "d/a.jpg",
        "d.e/a.jpg",
        "__m__.json",
        "c",
        ".jpg",
        "a.__key__",
        "ü.jpg",
    ]
)


def body(members: Members, kind: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar without its end marker, as a row group is."""
    made = b""
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        made += info.tobuf(kind) + data + bytes(-len(data) % 512)
    return made


def walked(data: bytes) -> Members | None:
    try:
        members = list(walk(lambda first, num: data[first : first + num], 0, len(data), has_marker=False))
    except TarDamage:
        return None
    return [(each.name, data[each.offset : each.offset + each.num_bytes]) for each in members]


def found(data: bytes) -> Members | None:
    regular = find_regular(pa.py_buffer(data))
    if regular is None:
        return None
    places = zip(regular.names, regular.bounds[::2], regular.bounds[1::2], strict=True)
    return [(name, data[first:last]) for name, first, last in places]


def table(data: bytes, columns: list[str], required: tuple[str, ...], *, at_once: bool) -> pa.Table | str:
    buffer = pa.py_buffer(data)
    regular = find_regular(buffer) if at_once else None
    try:
        return _LoadedSamples(buffer, 0, required, has_marker=False, regular=regular).table(columns)
    except TarDamage as error:
        return str(error)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_ordinary_members_are_found(kind: int) -> None:
    assert found(body(SAMPLES, kind)) == SAMPLES


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(st.tuples(NAMES, st.sampled_from([b"", b"1", b"y" * 512, b"z" * 1_300])), max_size=6),
    required=st.sampled_from([(), ("jpg",), ("jpg", "cls")]),
)
def test_samples_are_the_same_however_their_members_were_found(members: Members, required: tuple[str, ...]) -> None:
    data, columns = body(members), ["__key__", "jpg", "cls"]
    assert table(data, columns, required, at_once=True) == table(data, columns, required, at_once=False)


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 4_095), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_never_give_other_members_than_the_walk(changes: list[tuple[int, int]]) -> None:
    data = bytearray(body(SAMPLES))
    for place, value in changes:
        data[place % len(data)] = value
    assert found(bytes(data)) in (None, walked(bytes(data)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(body(SAMPLES)[:-1], id="cut off inside a block"),
        pytest.param(body(SAMPLES)[:-512], id="cut off inside a member"),
        pytest.param(body(SAMPLES) + bytes(512), id="zeros at the end"),
        pytest.param(bytes(512) + body(SAMPLES), id="zeros at the beginning"),
        pytest.param(body([("d" * 90 + "/" + "e" * 90 + ".jpg", b"1")]), id="a prefix"),
        pytest.param(body([("e" * 200 + ".jpg", b"1")], tarfile.GNU_FORMAT), id="a GNU long name"),
        pytest.param(body([("ü" * 90 + ".jpg", b"1")], tarfile.PAX_FORMAT), id="a pax header"),
        pytest.param(body([("a/", b"")]), id="a directory of before POSIX"),
        pytest.param(body([("a.jpg", b"1")]).replace(b"a.jpg\0\0", b"a.jpg\0x"), id="a wrong checksum"),
        pytest.param(body([("a.tar", body(SAMPLES))]), id="a tar in a tar"),
    ],
)
def test_whatever_is_not_ordinary_is_left_to_the_walk(data: bytes) -> None:
    assert find_regular(pa.py_buffer(data)) is None


def test_links_are_left_to_the_walk_which_refuses_them() -> None:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.linkname = tarfile.SYMTYPE, "b.jpg"
    data = info.tobuf(tarfile.USTAR_FORMAT)
    assert find_regular(pa.py_buffer(data)) is None
    assert "a symbolic link" in str(table(data, ["jpg"], (), at_once=True))


def test_a_payload_that_looks_like_a_header_is_a_payload() -> None:
    looks = io.BytesIO(body(SAMPLES)).read(512)
    data = body([("a.tar", looks), ("a.cls", b"1")])
    assert find_regular(pa.py_buffer(data)) is None
    assert table(data, ["tar"], (), at_once=True).column("tar").to_pylist() == [looks]  # type: ignore[union-attr]
