"""`docs/checkpoint-format.md` names what the code writes: a field that is added there must be told here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strata.checkpoint import catalog, dtypes, layout, manifest, tree

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")


def fields_of(what: str) -> set[str]:
    """The first column of the table whose heading is `Field of WHAT`."""
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
    ],
)
def test_the_page_names_every_field_and_no_other(what: str, struct: type) -> None:
    assert fields_of(what) == set(struct.__struct_fields__)  # type: ignore[attr-defined]


def test_the_page_names_every_element_type_and_checkpoint_type() -> None:
    words = set(re.findall(r"\w+", PAGE))

    assert {dtype.name for dtype in dtypes.DTYPES} - words == set()
    assert {kind.value for kind in manifest.CheckpointType} - words == set()


def test_the_page_tells_the_numbers_that_hold() -> None:
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
    assert f"`{manifest.FILE_NAME}`" in PAGE
    assert f"`{catalog.QUARANTINE}`" in PAGE


def test_every_tag_of_a_structure_is_told() -> None:
    state = {"a": [1 << 60, (float("nan"), 1j)], "b": b"x"}
    flat = tree.flatten(state)
    tags = set(re.findall(r"'(\w+)': [\['{]", str(flat.structure))) - {"as"}

    assert tags >= {"dict", "list", "tuple", "int", "float", "complex"}
    assert [tag for tag in tags if f'{{"{tag}": ' not in PAGE] == []
