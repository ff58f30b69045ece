"""Checkpoints written by hand with numpy, zstandard and xxhash, valid and invalid ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import manifest as m
from strata.storage import Store

ID, BASE, OLDER = "step-000000000007-aa", "step-000000000006-bb", "step-000000000005-cc"
HEADER_BYTES = 8_192
"""The header size of every file, fixed before the tensors are known."""
DTYPES = {"<f4": "F32", "<f8": "F64", "|u1": "U8", "<u2": "U16", "<i8": "I64", "<u4": "U32", "<u8": "U64"}


class HandMadeFile:
    def __init__(self, owner: str, name: str, rank: int) -> None:
        self.owner, self.name, self.rank = owner, name, rank
        self.entries: dict[str, Any] = {"__metadata__": {"format": "pt", "strata": "1", "id": owner, "rank": str(rank)}}
        self.data = bytearray()

    def add(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Append data and return its offset in the file."""
        begin = len(self.data)
        self.data += array.tobytes()
        while name in self.entries:
            name += "#"
        offsets = [begin, len(self.data)]
        self.entries[name] = {"dtype": DTYPES[array.dtype.str], "shape": array.shape, "data_offsets": offsets}
        return HEADER_BYTES + begin

    @property
    def header(self) -> bytes:
        text = json.dumps(self.entries).encode().ljust(HEADER_BYTES - 8)
        assert len(text) == HEADER_BYTES - 8, "more tensors than fit into the header"
        return len(text).to_bytes(8, "little") + text

    @property
    def key(self) -> str:
        return f"{self.owner}/{self.name}"


class HandMade:
    """One checkpoint, and the files of its bases."""

    def __init__(self, store: Store, *, chunk_bytes: int = 64, owner: str = ID) -> None:
        self.store, self.chunk_bytes, self.id = store, chunk_bytes, owner
        self.files: list[HandMadeFile] = []
        self.tensors: list[m.TensorEntry] = []

    def file(self, owner: str = "", name: str = "rank-00000.safetensors", rank: int = 0) -> int:
        self.files.append(HandMadeFile(owner or self.id, name, rank))
        return len(self.files) - 1

    def hashes(self, data: bytes) -> tuple[str, ...]:
        return tuple(xxh3_128_hexdigest(chunk) for chunk in self.chunks(data))

    def chunks(self, data: bytes) -> list[bytes]:
        return [data[at : at + self.chunk_bytes] for at in range(0, len(data), self.chunk_bytes)]

    def frames(self, file: int, name: str, data: bytes) -> dict[str, Any]:
        frames = [zstandard.compress(chunk) for chunk in self.chunks(data)]
        offset = self.files[file].add(name, np.frombuffer(b"".join(frames), np.uint8))
        return {"offset": offset, "frames": tuple(map(len, frames))}

    def slice(
        self,
        file: int,
        name: str,
        array: np.ndarray[Any, Any],
        *,
        start: Sequence[int] | None = None,
        encoding: str = "",
        patches: Sequence[m.Patch] = (),
    ) -> m.Slice:
        array = np.ascontiguousarray(array).reshape(array.shape)
        data = array.tobytes()
        if encoding:
            place = {"encoding": encoding, **self.frames(file, name, data)}
        else:
            place = {"offset": self.files[file].add(name, array)}
        return m.Slice(
            file=file,
            start=tuple(start or (0,) * array.ndim),
            shape=array.shape,
            hashes=self.hashes(data),
            patches=tuple(patches),
            **place,
        )

    def patch(
        self,
        file: int,
        name: str,
        contents: bytearray,
        indices: Sequence[int],
        data: bytes,
        *,
        unit_bytes: int,
        index_bytes: int = 4,
        encoding: str = "",
    ) -> m.Patch:
        """Add a patch: `data` replaces these units, also in `contents`, which a reader should return."""
        difference = bytearray()
        at = 0
        for index in indices:
            begin, end = index * unit_bytes, min((index + 1) * unit_bytes, len(contents))
            new = data[at : at + end - begin]
            difference += bytes(a ^ b for a, b in zip(new, contents[begin:end], strict=True))
            contents[begin:end] = new
            at += end - begin
        stored = bytes(difference) if encoding == "xor-zstd" else data[:at]
        if encoding:
            place = {"encoding": encoding, **self.frames(file, f"{name}#data", stored)}
        else:
            place = {"offset": self.files[file].add(f"{name}#data", np.frombuffer(stored, np.uint8))}
        numbers = np.array(indices, f"<u{index_bytes}")
        return m.Patch(
            file=file,
            unit_bytes=unit_bytes,
            num_units=len(indices),
            num_bytes=at,
            index_bytes=index_bytes,
            index_offset=self.files[file].add(f"{name}#indices", numbers),
            index_hashes=self.hashes(numbers.tobytes()),
            hashes=self.hashes(stored),
            **place,
        )

    def tensor(self, name: str, dtype: str, shape: Sequence[int], *slices: m.Slice) -> m.TensorEntry:
        entry = m.TensorEntry(name=name, dtype=dtype, shape=tuple(shape), slices=slices)
        self.tensors.append(entry)
        return entry

    def add(self, name: str, array: np.ndarray[Any, Any], *, file: int = 0, encoding: str = "") -> m.TensorEntry:
        """Add a tensor in one slice."""
        kept = self.slice(file, name, array, encoding=encoding)
        return self.tensor(name, DTYPES[array.dtype.str], array.shape, kept)

    def finish(self, **changes: Any) -> m.Manifest:
        """Put all files; return the manifest after encoding and decoding it."""
        for one in self.files:
            self.store.put(one.key, one.header + bytes(one.data))
        files = tuple(
            m.DataFile(
                path=one.name if one.owner == self.id else one.key,
                rank=one.rank,
                size_bytes=HEADER_BYTES + len(one.data),
                header_bytes=HEADER_BYTES,
                header_hash=xxh3_128_hexdigest(one.header),
            )
            for one in self.files
        )
        size = sum(file.size_bytes for file in files)
        is_delta = any("/" in file.path for file in files)
        fields: dict[str, Any] = {
            "id": self.id,
            "step": 7,
            "epoch": 0,
            "type": m.CheckpointType.INCREMENTAL if is_delta else m.CheckpointType.FULL,
            "created_at_s": 1.0,
            "num_ranks": 1 + max(file.rank for file in files),
            "chunk_bytes": self.chunk_bytes,
            "parent": BASE if is_delta else "",
            "files": files,
            "tensors": tuple(self.tensors),
            "structures": ({"dict": [[t.name, {"tensor": t.name, "as": "numpy"}] for t in self.tensors]},),
            "structure_of_rank": (0,) * (1 + max(file.rank for file in files)),
            "full_bytes": size,
            "written_bytes": size,
            "model_hash": m.model_hash(self.tensors),
        }
        data = m.encode(m.Manifest(**(fields | changes)))
        self.store.put(f"{self.id}/{m.FILE_NAME}", data)
        return m.decode(data, file="manifest.json")

    def damage(self, key: str, place: int, byte: int = 0xFF) -> None:
        data = bytearray(self.store.get(key, max_bytes=1 << 30))
        data[place] ^= byte
        self.store.put(key, bytes(data))
