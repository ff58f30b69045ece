"""`docs/checkpoint-format.md` documents everything that the code writes, including every new field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoint_files import BASE, ID, OLDER, HandMade

from strata.checkpoint import catalog
from strata.checkpoint.format import dtypes, layout, manifest, tree
from strata.checkpoint.format import part as parts
from strata.checkpoint.tools import inspect
from strata.storage.local import LocalStore

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")


def fields_of(what: str) -> set[str]:
    """Return the first column of the table whose heading is `Field of WHAT`."""
    _, _, rest = PAGE.partition(f"| Field of {what} |")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize(
    ("what", "struct"),
    [
        ("`manifest`", manifest.Manifest),
        ("a file", manifest.DataFile),
        ("a tensor", manifest.TensorEntry),
        ("a slice", manifest.Slice),
        ("a patch", manifest.Patch),
    ],
)
def test_the_page_names_every_field_and_no_other(what: str, struct: type) -> None:
    assert fields_of(what) == set(struct.__struct_fields__)  # type: ignore[attr-defined]


def test_the_page_names_every_element_type_and_checkpoint_type() -> None:
    words = set(re.findall(r"\w+", PAGE))

    assert {dtype.name for dtype in dtypes.DTYPES} - words == set()
    assert {kind.value for kind in manifest.CheckpointType} - words == set()


def test_the_page_states_the_limits_of_the_code() -> None:
    assert f"version is {manifest.VERSION}." in PAGE
    assert f"{layout.ALIGNMENT:,}" in PAGE
    assert f"{layout.MAX_HEADER_BYTES:,} bytes" in PAGE
    assert f"{tree.MAX_NAME_BYTES:,} bytes" in PAGE
    assert f"| nesting of the state | {tree.MAX_DEPTH} |" in PAGE
    assert (manifest.MAX_MANIFEST_BYTES, manifest.MAX_METADATA_BYTES, layout.CHUNK_BYTES) == (
        1 << 30,
        1 << 20,
        16 << 20,
    )
    assert manifest.MAX_UNIT_BYTES == 1 << 20
    assert "1 to 2²⁰" in PAGE
    assert f"`{manifest.FILE_NAME}`" in PAGE
    assert f"`{catalog.QUARANTINE}`" in PAGE


def test_the_page_names_every_tag_of_a_structure() -> None:
    state = {"a": [1 << 60, (float("nan"), 1j)], "b": b"x"}
    flat = tree.flatten(state)
    tags = set(re.findall(r"'(\w+)': [\['{]", str(flat.structure))) - {"as"}

    assert tags >= {"dict", "list", "tuple", "int", "float", "complex"}
    assert [tag for tag in tags if f'{{"{tag}": ' not in PAGE] == []


def test_the_page_names_every_encoding() -> None:
    _, _, table = PAGE.partition("| `encoding` | Means |")
    named = re.findall(r"^\| (?:`([\w-]+)`|empty) \|", table.partition("\n\n")[0], re.MULTILINE)

    assert tuple(named) == manifest.ENCODINGS


def test_the_page_names_every_file_of_a_checkpoint() -> None:
    names = ["rank-00000.safetensors", "rank-00000-1.safetensors", "statistics.json", "aborted.json", "quarantine.json"]

    assert [name for name in names if name not in PAGE] == []
    of_ranks = [parts.part_name(3), "claim-00003.json", "failed-00003.json"]
    assert [name for name in [*names, *of_ranks] if not inspect._OURS.fullmatch(name)] == []
    assert [name for name in of_ranks if f"`{name.replace('00003', 'NNNNN')}`" not in PAGE] == []


# -- the reader on the page ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """Return the functions of the page's reader, which does not use Strata."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def read_manifest" in block]
    assert "strata." not in code
    names: dict[str, Any] = {}
    exec(compile(code, "checkpoint-format.md", "exec"), names)
    return names


def everything(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write a checkpoint with every feature of the format; return its contents."""
    rng = np.random.default_rng(11)
    made = HandMade(LocalStore(directory), chunk_bytes=100)
    older, base = made.file(OLDER), made.file(BASE)
    own, second = made.file(), made.file(name="rank-00001.safetensors", rank=1)
    truth = {"table": rng.random((40, 6)), "halves": rng.random((10, 8), np.float32), "packed": np.zeros((7, 9))}
    contents = bytearray(truth["table"].tobytes())
    kept = made.slice(older, "table", truth["table"], encoding="zstd")
    patches = (
        made.patch(base, "table#1", contents, [3, 17, 18], rng.bytes(3 * 48), unit_bytes=48),
        made.patch(own, "table#2", contents, [0, 19], rng.bytes(200), unit_bytes=100, encoding="xor-zstd"),
        made.patch(own, "table#3", contents, [2, 13], rng.bytes(270), unit_bytes=141, index_bytes=8, encoding="zstd"),
    )
    made.tensor("table", "F64", (40, 6), msgspec.structs.replace(kept, patches=patches))
    truth["table"] = np.frombuffer(bytes(contents)).reshape(40, 6)
    columns = [truth["halves"][:, :3], truth["halves"][:, 3:]]
    places = zip((own, second), columns, (0, 3), strict=True)
    slices = [made.slice(file, "halves", part, start=(0, at)) for file, part, at in places]
    made.tensor("halves", "F32", (10, 8), *slices)
    made.add("packed", truth["packed"], file=own, encoding="zstd")
    made.finish()
    return truth


def test_the_reader_on_the_page_reads_slices_encodings_patches_and_bases(
    reader: dict[str, Any], tmp_path: Path
) -> None:
    truth = everything(tmp_path)

    found = reader["read_manifest"](tmp_path / ID)

    assert found["type"] == "INCREMENTAL"
    assert [entry["name"] for entry in found["tensors"]] == list(truth)
    for entry in found["tensors"]:
        assert np.array_equal(reader["read_tensor"](tmp_path / ID, found, entry), truth[entry["name"]])


def test_the_reader_on_the_page_notices_every_changed_byte_that_it_uses(reader: dict[str, Any], tmp_path: Path) -> None:
    everything(tmp_path)
    found = reader["read_manifest"](tmp_path / ID)
    path = tmp_path / ID / "rank-00000.safetensors"
    sound = path.read_bytes()
    for place in range(found["files"][2]["header_bytes"], len(sound), 97):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 0x55]) + sound[place + 1 :])
        with pytest.raises((AssertionError, reader["zstandard"].ZstdError)):
            _ = [reader["read_tensor"](tmp_path / ID, found, entry) for entry in found["tensors"]]
