"""The walk over a tar agrees with tarfile on good files, and refuses what tarfile would skip or cut off."""

from __future__ import annotations

import contextlib
import io
import struct
import tarfile
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.formats.webdataset import index
from strata.data.formats.webdataset.headers import MAX_EXTENSION_BYTES, TarDamage, walk
from strata.data.formats.webdataset.samples import MAX_EXTENSIONS, cut, outline, split_name
from strata.data.source.braces import expand
from strata.errors import LimitExceeded

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def make_tar(members: list[tuple[str, bytes]], kind: int = tarfile.GNU_FORMAT, **fields: object) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, num_bytes: data[offset : offset + num_bytes]


def walked(data: bytes) -> list[tuple[str, bytes]]:
    members = walk(reader(data), 0, len(data), has_marker=True)
    return [(each.name, data[each.offset : each.offset + each.num_bytes]) for each in members]


def resealed(header: bytes) -> bytes:
    """Return a header with the right checksum."""
    blank = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(blank) + header[156:]


def with_field(data: bytes, first: int, value: bytes, *, at: int = 0) -> bytes:
    """Return a tar in which a field of the header at an offset is replaced, and its checksum is right."""
    header = bytearray(data[at : at + 512])
    header[first : first + len(value)] = value
    return data[:at] + resealed(bytes(header)) + data[at + 512 :]


NAMES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1, max_size=90)
    .filter(lambda name: name.strip(".") == name and len(name.encode()) < 200),
    min_size=1, max_size=4,
).map("/".join)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(st.tuples(NAMES, st.binary(max_size=1_500)), max_size=6),
    kind=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_the_walk_finds_what_tarfile_finds(members: list[tuple[str, bytes]], kind: int) -> None:
    data = make_tar(members, kind)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, tar.extractfile(info).read()) for info in tar if info.isreg()]  # type: ignore[union-attr]
    assert walked(data) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_change_of_a_byte_makes_the_walk_leave_the_file_or_crash(data: st.DataObject) -> None:
    good = bytearray(make_tar([("a.jpg", b"x" * 700), ("ü" * 120 + ".cls", b"1"), ("b.jpg", b"")], tarfile.PAX_FORMAT))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, 4095))] = data.draw(st.integers(0, 255))
    found = []
    with contextlib.suppress(TarDamage):
        found += walk(reader(bytes(good)), 0, len(good), has_marker=True)
    assert all(0 <= each.offset <= each.offset + each.num_bytes <= len(good) for each in found)


@pytest.mark.parametrize("kind", FORMATS, ids=["ustar", "gnu", "pax"])
def test_long_names_are_whole_and_directories_are_left_out(kind: int) -> None:
    name = "/".join(["d" * 60, "e" * 80, "f.jpg"])
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as tar:
        folder = tarfile.TarInfo("d" * 60)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        info = tarfile.TarInfo(name)
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    assert walked(made.getvalue()) == [(name, b"abc")]


def test_sizes_in_base_256_are_read() -> None:
    data = make_tar([("a.jpg", b"abc")])
    assert walked(with_field(data, 124, b"\x80" + (3).to_bytes(11, "big"))) == [("a.jpg", b"abc")]


ONE = make_tar([("a.jpg", b"abc"), ("b.jpg", b"def")])
BAD = {
    "cut in a payload": (ONE[:514], 0),
    "cut in a padding": (ONE[:700], 1_024),
    "cut in a header": (ONE[:1_200], 1_024),
    "no end marker": (ONE[:2_048], 2_048),
    "a wrong checksum": (ONE[:1_030] + b"!" + ONE[1_031:], 1_024),
    "a negative size": (with_field(ONE, 124, b"\xff" * 12), 0),
    "a size beyond the file": (with_field(ONE, 124, b"77777777777\0"), 0),
    "a size of 2^88": (with_field(ONE, 124, b"\x80" + b"\xff" * 11), 0),
    "a size that is no number": (with_field(ONE, 124, b"-0000000001\0"), 0),
    "a hard link": (with_field(ONE, 156, b"1", at=1_024), 1_024),
    "a symbolic link": (with_field(ONE, 156, b"2", at=1_024), 1_024),
    "a device": (with_field(ONE, 156, b"3"), 0),
    "a sparse member": (with_field(ONE, 156, b"S"), 0),
    "an unknown type": (with_field(ONE, 156, b"q"), 0),
    "a name that is not UTF-8": (with_field(ONE, 0, b"\xff\xfe.jpg"), 0),
    "joined tars": (ONE[:2_048] + bytes(1_024) + ONE, 2_560),
    "a huge extended header": (with_field(ONE, 124, b"%011o\0" % (MAX_EXTENSION_BYTES + 1) + bytes(20) + b"x"), 0),
    "a sparse member in pax": (
        make_tar([("a.jpg", b"abc")], tarfile.PAX_FORMAT, pax_headers={"GNU.sparse.major": "1"}), 0
    ),
    "a size in pax that overflows": (
        make_tar([("a.jpg", b"abc")], tarfile.PAX_FORMAT, pax_headers={"size": "9" * 19}), 1_024
    ),
    "a size in pax that is negative": (
        make_tar([("a.jpg", b"abc")], tarfile.PAX_FORMAT, pax_headers={"size": "-1"}), 0
    ),
    "an extended header alone": (make_tar([("n" * 150, b"")])[:1_024] + bytes(1_024), 1_024),
}  # fmt: skip


@pytest.mark.parametrize(("data", "offset"), BAD.values(), ids=BAD)
def test_a_bad_tar_is_refused_at_its_offset(data: bytes, offset: int) -> None:
    with pytest.raises(TarDamage) as caught:
        walked(data)
    assert caught.value.offset == offset
    assert str(caught.value).startswith(f"byte {offset:,}: ")


def test_old_checksums_of_signed_bytes_are_accepted() -> None:
    header = bytearray(make_tar([("ü.jpg", b"")])[:512])
    blank = bytes(header[:148]) + b" " * 8 + bytes(header[156:])
    header[148:156] = b"%06o\0 " % sum(struct.unpack("512b", blank))
    assert [name for name, _ in walked(bytes(header) + bytes(1_024))] == ["ü.jpg"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("x.y/a.Seg.PNG", ("x.y/a", "seg.png")),
        ("./a.jpg", ("./a", "jpg")),
        ("a", None),
        ("x.y/a", None),
        (".hidden.jpg", None),
        ("d/.hidden", None),
        ("__meta__.json", ("__meta__", "json")),
        ("__meta__", None),
        ("__meta__/a.jpg", None),
    ],
)
def test_keys_and_extensions_are_those_of_webdataset(name: str, expected: tuple[str, str] | None) -> None:
    assert split_name(name) == expected


def outlined(members: list[tuple[str, bytes]]) -> tuple[bytes, object]:
    data = make_tar(members)
    return data, outline(reader(data), len(data))


def test_two_parts_with_one_extension_are_refused() -> None:
    with pytest.raises(TarDamage, match=r"byte 1,024: sample 'a' has two parts 'jpg'"):
        outlined([("a.jpg", b"1"), ("a.JPG", b"2")])


def test_keys_with_dots_are_refused_before_every_name_is_a_column() -> None:
    with pytest.raises(TarDamage, match="write keys without dots"):
        outlined([(f"a.{number}.jpg", b"") for number in range(MAX_EXTENSIONS + 1)])


def test_row_groups_end_with_the_sample_that_fills_them_and_leave_out_incomplete_ones() -> None:
    members = [(f"{row}.jpg", b"x" * 1_000) for row in range(10)]
    for row in (9, 4, 3, 2):
        members.insert(row + 1, (f"{row}.cls", b"1"))
    data = make_tar(members)
    found = outline(reader(data), len(data))
    assert [unit.num_rows for unit in cut(found, 4_000)] == [3, 2, 3, 2]
    assert sum(unit.num_bytes for unit in cut(found, 4_000)) == int(found.starts[-1])
    assert [(unit.index, unit.num_rows, unit.first_row) for unit in cut(found, 4_000, ["cls"])] == [
        (0, 1, 0), (1, 2, 1), (3, 1, 3)
    ]  # fmt: skip


def test_an_index_returns_what_was_written_and_refuses_damage() -> None:
    data = make_tar([(f"{row}.{kind}", b"x" * row) for row in range(30) for kind in ("jpg", "cls") if row % 3])
    found = outline(reader(data), len(data))
    stored = index.to_bytes(found, len(data))
    loaded, num_bytes = index.from_bytes(stored)
    assert (num_bytes, loaded.version, loaded.extensions) == (len(data), found.version, found.extensions)
    assert all(np.array_equal(getattr(loaded, name), getattr(found, name)) for name in ("starts", "presence", "hashes"))
    for bad in (b"", stored[:-1], stored[:40] + bytes([stored[40] ^ 1]) + stored[41:], b"x" + stored):
        with pytest.raises(ValueError, match=r"it |its "):
            index.from_bytes(bad)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ["a"]),
        ("s-{000..002}.tar", ["s-000.tar", "s-001.tar", "s-002.tar"]),
        ("s-{8..10}", ["s-8", "s-9", "s-10"]),
        ("s-{08..10}", ["s-08", "s-09", "s-10"]),
        ("{2..0..2}", ["2", "0"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("{a}", ["{a}"]),
        ("{", ["{"]),
        ("{x{0..1}", ["{x0", "{x1"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected


def test_a_pattern_of_too_many_paths_is_refused_before_it_is_expanded() -> None:
    with pytest.raises(LimitExceeded, match="narrower"):
        expand("{0..999999999}/{0..999999999}")
