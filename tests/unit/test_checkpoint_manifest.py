"""Nothing in a manifest is trusted."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from strata.checkpoint.format import manifest as m
from strata.errors import CheckpointCorrupt, CheckpointInvalid, CheckpointTooNew

HASH = "0123456789abcdef" * 2


def a_slice(**changes: Any) -> m.Slice:
    fields: dict[str, Any] = {"file": 0, "offset": 4096, "start": (0, 0), "shape": (2, 3), "hashes": (HASH,)}
    return m.Slice(**(fields | changes))


def a_tensor(*slices: m.Slice, **changes: Any) -> m.TensorEntry:
    fields: dict[str, Any] = {"name": "w", "dtype": "F32", "shape": (2, 3), "slices": slices or (a_slice(),)}
    return m.TensorEntry(**(fields | changes))


def a_file(**changes: Any) -> m.DataFile:
    fields: dict[str, Any] = {
        "path": "rank-00000.safetensors",
        "rank": 0,
        "size_bytes": 4096 + 24,
        "header_bytes": 4096,
        "header_hash": HASH,
    }
    return m.DataFile(**(fields | changes))


def a_manifest(**changes: Any) -> m.Manifest:
    fields: dict[str, Any] = {
        "id": "step-000000000005-abc",
        "step": 5,
        "epoch": 1,
        "type": m.CheckpointType.FULL,
        "created_at_s": 1.5,
        "num_ranks": 1,
        "chunk_bytes": 1 << 24,
        "files": (a_file(),),
        "tensors": (a_tensor(),),
        "structures": ({"dict": [["w", {"tensor": "w", "as": "torch"}]]},),
        "structure_of_rank": (0,),
        "metadata": {"loss": 0.5, "note": "…"},
        "full_bytes": 4120,
        "written_bytes": 4120,
    }
    fields |= changes
    return m.Manifest(**{"model_hash": m.model_hash(fields["tensors"]), **fields})


def test_a_manifest_survives_encoding_and_decoding() -> None:
    assert m.decode(m.encode(a_manifest()), file="x") == a_manifest()


def test_the_times_of_a_save_are_in_the_manifest_only_if_they_were_measured() -> None:
    assert b"_s" not in m.encode(a_manifest()).replace(b"created_at_s", b"")
    timed = a_manifest(stall_s=0.25, write_s=1.5, duration_s=2.0)
    assert m.decode(m.encode(timed), file="x") == timed
    assert m.decode(m.encode(a_manifest(duration_s=2)), file="x").duration_s == 2.0


def test_the_same_contents_have_the_same_hash_whatever_the_step() -> None:
    assert a_manifest().model_hash == a_manifest(step=6, id="other", metadata={}).model_hash
    assert a_manifest().model_hash != a_manifest(tensors=(a_tensor(a_slice(hashes=("f" * 32,))),)).model_hash


def a_patch(**changes: Any) -> m.Patch:
    """Patch units 0 and 2 of the three units of ten bytes in 24 bytes."""
    fields: dict[str, Any] = {
        "file": 0,
        "unit_bytes": 10,
        "num_units": 2,
        "num_bytes": 14,
        "index_bytes": 4,
        "index_offset": 4096,
        "index_hashes": (HASH,),
        "offset": 4104,
        "hashes": (HASH,),
    }
    return m.Patch(**(fields | changes))


def patched(**changes: Any) -> dict[str, Any]:
    return {"tensors": (a_tensor(a_slice(patches=(a_patch(**changes),))),)}


def encoded(**changes: Any) -> dict[str, Any]:
    return {"tensors": (a_tensor(a_slice(**({"encoding": "zstd", "frames": (20,)} | changes))),)}


def test_patches_encodings_and_files_of_bases_survive_encoding_and_decoding() -> None:
    files = (a_file(), a_file(path="step-000000000004-base/rank-00000.safetensors"))
    for changes in (patched(), patched(file=1, encoding="xor-zstd", frames=(16,)), encoded()):
        manifest = a_manifest(files=files, parent="step-000000000004-base", **changes)
        assert m.decode(m.encode(manifest), file="x") == manifest
        assert manifest.bases == ("step-000000000004-base",)


def test_an_encoding_does_not_change_the_model_hash_but_a_patch_does() -> None:
    assert a_manifest(**encoded()).model_hash == a_manifest().model_hash
    assert a_manifest(**patched()).model_hash != a_manifest().model_hash


halves = (a_slice(start=(0, 0), shape=(1, 3)), a_slice(start=(1, 0), shape=(1, 3), offset=4108))


def test_a_tensor_may_have_several_slices() -> None:
    manifest = a_manifest(tensors=(a_tensor(*halves),))
    assert m.decode(m.encode(manifest), file="x") == manifest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "../escape"}, "id"),
        ({"id": ""}, "id"),
        ({"parent": "a/b"}, "parent"),
        ({"step": -1}, "negative"),
        ({"written_bytes": 10**400}, "too large"),
        ({"created_at_s": -1e308}, "is not a valid time"),
        ({"stall_s": -1.0}, "stall_s=-1.0 is not a valid duration"),
        ({"duration_s": 1e300}, "is not a valid duration"),
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"structure_of_rank": (0, 0)}, "structure"),
        ({"structure_of_rank": (1,)}, "structure"),
        ({"files": (a_file(path="../x"),)}, "leads out"),
        ({"files": (a_file(path="/etc/passwd"),)}, "leads out"),
        ({"files": (a_file(path="other/rank-00000.safetensors"),)}, "leads out"),
        ({"files": (a_file(path="a/../b"),)}, "leads out"),
        ({"files": (a_file(path=".hidden"),)}, "leads out"),
        ({"files": (a_file(rank=1),)}, "rank 1"),
        ({"files": (a_file(header_bytes=1 << 40),)}, "size"),
        ({"files": (a_file(header_hash="x"),)}, "has no valid hash"),
        ({"tensors": (a_tensor(), a_tensor())}, "twice"),
        ({"tensors": (a_tensor(dtype="X"),)}, "'X'"),
        ({"tensors": (a_tensor(shape=(-2, -3)),)}, "shape"),
        ({"tensors": (a_tensor(a_slice(file=1)),)}, "file 1"),
        ({"tensors": (a_tensor(a_slice(offset=4097)),)}, "bytes at"),
        ({"tensors": (a_tensor(a_slice(offset=0)),)}, "bytes at"),
        ({"tensors": (a_tensor(a_slice(start=(1, 0))),)}, "outside"),
        ({"tensors": (a_tensor(a_slice(start=(0,))),)}, "outside"),
        ({"tensors": (a_tensor(a_slice(start=(0, -1))),)}, "outside"),
        ({"tensors": (a_tensor(a_slice(hashes=())),)}, "0 hashes"),
        ({"tensors": (a_tensor(a_slice(hashes=("g" * 32,))),)}, "hashes"),
        ({"tensors": (a_tensor(halves[0]),)}, "not covered exactly once"),
        ({"tensors": (a_tensor(halves[0], halves[0]),)}, "not covered exactly once"),
        ({"files": (a_file(path="step-000000000005-abc/x"),), "parent": "base"}, "leads out"),
        ({"files": (a_file(path="base/a/b"),), "parent": "base"}, "leads out"),
        (encoded(encoding="lz4"), "unknown encoding 'lz4'"),
        (encoded(encoding=""), "has frames but no encoding"),
        (encoded(encoding="xor-zstd"), "an exclusive or without a base"),
        (encoded(frames=()), "0 frames"),
        (encoded(frames=(0,)), "1 frames, expected 1 of 1 to"),
        (encoded(frames=(25,)), "bytes at"),
        (encoded(frames=(1 << 30,)), "1 of 1 to"),
        (patched(file=1), "file 1"),
        (patched(unit_bytes=0), "2 of 0 bytes"),
        (patched(unit_bytes=(1 << 20) + 1), "impossible number of units"),
        (patched(num_units=0), r"\(0 of "),
        (patched(num_units=4), r"\(4 of "),
        (patched(num_bytes=10), "10 bytes for 2 units"),
        (patched(num_bytes=21), "21 bytes for 2 units"),
        (patched(index_bytes=2), "indices of 2 bytes"),
        (patched(index_offset=4120), "bytes at"),
        (patched(index_offset=0), "bytes at"),
        (patched(index_hashes=()), "0 hashes"),
        (patched(offset=4110), "bytes at"),
        (patched(hashes=(HASH, HASH)), "2 hashes"),
        (patched(encoding="zstd"), "0 frames"),
    ],
)
def test_an_impossible_manifest_is_neither_written_nor_read(changes: dict[str, Any], message: str) -> None:
    manifest = a_manifest(**changes)
    with pytest.raises(CheckpointInvalid, match=message):
        m.encode(manifest)
    body = msgspec.json.encode(manifest)
    forged = b'{"strata_checkpoint":1,"hash":"%s","manifest":%s}' % (m.xxh3_128_hexdigest(body).encode(), body)
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        m.decode(forged, file="the manifest")
    assert "the manifest" in str(caught.value)


def test_a_newer_format_raises_checkpoint_too_new() -> None:
    with pytest.raises(CheckpointTooNew, match="upgrade strata"):
        m.decode(b'{"strata_checkpoint": 2, "entirely": "different"}', file="x")


def test_every_changed_byte_is_noticed() -> None:
    data = m.encode(a_manifest())
    for place in range(len(data) - 1):  # the last byte is the newline
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(CheckpointInvalid):
            m.decode(bytes(changed), file="x")


def test_a_changed_body_names_the_expected_hash() -> None:
    data = m.encode(a_manifest()).replace(b'"step":5', b'"step":6')
    with pytest.raises(CheckpointCorrupt, match="expected"):
        m.decode(data, file="x")


@settings(max_examples=150)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_other_json_raises_checkpoint_invalid(value: Any) -> None:
    body = msgspec.json.encode(str(value) if isinstance(value, int) else value)
    for data in (
        body,
        b'{"strata_checkpoint":1,"hash":"%s","manifest":%s}' % (m.xxh3_128_hexdigest(body).encode(), body),
    ):
        with pytest.raises(CheckpointInvalid):
            m.decode(data, file="x")


def test_a_tensor_may_be_sharded_over_thousands_of_ranks_along_any_dimension() -> None:
    columns = tuple(a_slice(start=(0, i), shape=(2, 1), offset=4096) for i in range(3_000))
    m.check(a_manifest(tensors=(a_tensor(*columns, shape=(2, 3_000)),)), file="x")


def test_slices_that_would_take_hours_to_compare_are_rejected() -> None:
    size = 2_000
    rows_and_columns = [a_slice(start=(0, 0), shape=(size, 1), hashes=(HASH,)) for _ in range(size)]
    file = a_file(size_bytes=4096 + 4 * size)
    tensor = a_tensor(*rows_and_columns, shape=(size, size))
    with pytest.raises(CheckpointInvalid, match="not covered exactly once"):
        m.check(a_manifest(tensors=(tensor,), files=(file,)), file="x")
