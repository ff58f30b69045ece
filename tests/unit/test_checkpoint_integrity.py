"""Loading and verifying agree: whatever changes the bytes of a checkpoint, both reject it or both accept it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from xxhash import xxh3_128_hexdigest

from strata import CheckpointManager
from strata.checkpoint.format import layout
from strata.checkpoint.format import manifest as m
from strata.errors import CheckpointInvalid, StorageError
from strata.storage.memory import MemoryStore

Objects = dict[str, bytes]
REFUSED = "refused"


def state_of(step: int) -> dict[str, Any]:
    table = np.arange(6_000, dtype=np.float32).reshape(1_000, 6)
    table[step * 3] = step
    return {
        "table": table,
        "zeros": np.zeros(5_000, np.int64),  # compressible
        "blob": b"some bytes",
        "groups": {0: {"betas": (0.9, 0.999), "big": 1 << 80}, "empty": np.zeros((0, 3), np.uint8)},
    }


@functools.cache
def saved(kind: str) -> tuple[Objects, str]:
    """Return the objects of a store with a base and a delta, and the id of the newest checkpoint."""
    store = MemoryStore()
    with CheckpointManager(store=store, saver="thread", compression="zstd", statistics=False) as manager:
        if kind == "plain values":
            newest = manager.save({"epoch": 3, "name": "no tensor"}, step=1).wait()
        else:
            manager.save(state_of(1), step=1).wait()
            newest = manager.save(state_of(2), step=2, checkpoint_type="INCREMENTAL").wait()
            assert newest.checkpoint_type.name == "INCREMENTAL"
    return {listed.key: store.get(listed.key, max_bytes=1 << 30) for listed in store.walk()}, newest.id


def judged(objects: Objects, newest: str) -> tuple[Any, str]:
    """Return the result of a load and that of verifying: "accepted" or "refused"."""
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    with CheckpointManager(store=store, saver="thread") as manager:
        loaded = _or_refused(lambda: manager.load(id=newest))
        verified = _or_refused(lambda: manager.verify(id=newest) and "accepted")
    return loaded, verified


def _or_refused(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (CheckpointInvalid, StorageError):
        return REFUSED


def plain(value: Any) -> Any:
    """Return a value that can be compared with `==`."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("kind", ["plain values", "incremental"])
def test_load_and_verify_accept_a_sound_checkpoint(kind: str) -> None:
    objects, newest = saved(kind)
    loaded, verified = judged(objects, newest)
    assert verified == "accepted"
    assert loaded is not REFUSED


@pytest.mark.parametrize("kind", ["plain values", "incremental"])
@settings(max_examples=150)
@given(st.data())
def test_load_and_verify_agree_on_any_changed_bytes(kind: str, data: st.DataObject) -> None:
    """Change bytes of the manifest, the headers and the data, also of the base."""
    objects, newest = saved(kind)
    key = data.draw(st.sampled_from(sorted(objects)), label="object")
    changed = bytearray(objects[key])
    place = data.draw(st.integers(0, len(changed) - 1) | st.integers(0, min(len(changed) - 1, 600)), label="place")
    match data.draw(st.sampled_from(["flip", "cut", "append", "insert"])):
        case "flip":
            changed[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            del changed[place:]
        case "append":
            changed += b"\0"
        case _:
            changed.insert(place, data.draw(st.sampled_from(b' 0"}')))
    loaded, verified = judged({**objects, key: bytes(changed)}, newest)
    assert (loaded is REFUSED) == (verified is REFUSED)
    if loaded is not REFUSED:
        original, _ = judged(objects, newest)
        assert plain(loaded) == plain(original)


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 64),
    st.text(max_size=3),
    st.sampled_from(["zstd", "U8", "F32", "C32", "I64", "table", "zeros", "numpy", "bytes", "torch", "0" * 32, "../x"]),
    st.sampled_from([[], {}, [0], {"tensor": "table", "as": "numpy"}, {"dict": []}, {"list": [None]}, [1] * 70]),
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in inner for place in places_in(item, (*path, key))]


def altered(body: Any, data: st.DataObject) -> None:
    """Replace one value by another."""
    *path, last = data.draw(st.sampled_from(places_in(body)), label="place")
    parent = body
    for key in path:
        parent = parent[key]
    match data.draw(st.sampled_from(["replace", "remove", "repeat"])):
        case "remove":
            del parent[last]
        case "repeat" if isinstance(parent, list):
            parent.append(parent[last])
        case _:
            parent[last] = data.draw(JSON)


def sealed(body: Any) -> bytes:
    text = msgspec.json.encode(body)
    return b'{"strata_checkpoint":1,"hash":"%s","manifest":%s}\n' % (xxh3_128_hexdigest(text).encode(), text)


@settings(max_examples=300)
@given(st.data())
def test_load_and_verify_agree_on_a_forged_manifest(data: st.DataObject) -> None:
    objects, newest = saved("incremental")
    key = f"{newest}/{m.FILE_NAME}"
    body = json.loads(objects[key])["manifest"]
    altered(body, data)
    if data.draw(st.booleans(), label="with the right hash of the contents"):
        try:
            body["model_hash"] = m.model_hash(msgspec.convert(body["tensors"], tuple[m.TensorEntry, ...]))
        except (msgspec.ValidationError, KeyError, UnicodeEncodeError):
            return
    loaded, verified = judged({**objects, key: sealed(body)}, newest)
    assert (loaded is REFUSED) == (verified is REFUSED)


@settings(max_examples=200)
@given(st.data())
def test_load_and_verify_agree_on_a_forged_header(data: st.DataObject) -> None:
    objects, newest = saved("incremental")
    key = f"{newest}/{m.FILE_NAME}"
    body = json.loads(objects[key])["manifest"]
    file = data.draw(st.sampled_from(body["files"]))
    path = file["path"] if "/" in file["path"] else f"{newest}/{file['path']}"
    header = json.loads(objects[path][8 : file["header_bytes"]])
    altered(header, data)
    text = msgspec.json.encode(header).ljust(file["header_bytes"] - 8)
    forged = len(text).to_bytes(8, "little") + text
    file["header_hash"], file["header_bytes"] = xxh3_128_hexdigest(forged), len(forged)
    contents = forged + objects[path][len(forged) :]
    loaded, verified = judged({**objects, key: sealed(body), path: contents}, newest)
    assert (loaded is REFUSED) == (verified is REFUSED)


# -- keys that are there twice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step":', b'"step":7,"step":'),
        (b'"metadata":{', b'"metadata":{"a":1,"a":2,'),
        (b'{"int":', b'{"int":"5","int":'),
    ],
    ids=["of the manifest", "within its metadata", "within its structure"],
)
def test_a_manifest_with_a_duplicate_key_is_rejected(old: bytes, new: bytes) -> None:
    objects, newest = saved("incremental")
    body = json.loads(objects[f"{newest}/{m.FILE_NAME}"])["manifest"]
    body["metadata"] = {"b": 1}
    text = msgspec.json.encode(body).replace(old, new, 1)
    data = b'{"strata_checkpoint":1,"hash":"%s","manifest":%s}\n' % (xxh3_128_hexdigest(text).encode(), text)
    with pytest.raises(CheckpointInvalid, match=r"manifest.json: an object has the key '(step|a|int)' twice"):
        m.decode(data, file=m.FILE_NAME)
    assert judged({**objects, f"{newest}/{m.FILE_NAME}": data}, newest) == (REFUSED, REFUSED)


def test_an_envelope_with_two_manifests_is_rejected() -> None:
    objects, newest = saved("incremental")
    data = objects[f"{newest}/{m.FILE_NAME}"].replace(b'{"strata_checkpoint"', b'{"manifest":{},"strata_checkpoint"', 1)
    with pytest.raises(CheckpointInvalid, match="has the key 'manifest' twice"):
        m.decode(data, file=m.FILE_NAME)


def test_a_reformatted_manifest_is_still_read() -> None:
    """Other whitespace and another order of keys, as another program may write them."""
    objects, newest = saved("incremental")
    body = json.loads(objects[f"{newest}/{m.FILE_NAME}"])["manifest"]
    text = json.dumps(dict(reversed(body.items())), indent=1).encode()
    data = b'{"strata_checkpoint": 1, "hash": "%s", "manifest": %s}' % (xxh3_128_hexdigest(text).encode(), text)
    assert m.decode(data, file=m.FILE_NAME).id == newest


def test_a_header_with_a_duplicate_tensor_is_rejected() -> None:
    entry = b'"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = b"{%s,%s}" % (entry, entry)
    header = len(text).to_bytes(8, "little") + text
    with pytest.raises(CheckpointInvalid, match="has the key 'w' twice"):
        layout.read_header(header, file="x.safetensors", size_bytes=len(header) + 1)
