"""The parts of all ranks are merged into one manifest, or rejected with the tensor and the ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from calls import num_calls
from hypothesis import given, settings
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import manifest as m
from strata.checkpoint.format import part as parts
from strata.checkpoint.format import tree
from strata.checkpoint.format.merge import Head, merge
from strata.checkpoint.format.part import RankPart
from strata.checkpoint.format.shards import first_overlap, is_grid
from strata.errors import CheckpointCorrupt, CheckpointInvalid, CheckpointTooNew

ID = "step-000000000005-abc"
HEAD = Head(id=ID, step=5, epoch=2, created_at_s=1.5, metadata={"loss": 0.5}, data_cursor="here")
HASH = "0123456789abcdef" * 2
Contents = dict[int, dict[int, bytes]]
"""File (rank) → offset → bytes, as a store would hold them."""


class Writer:
    """One rank: assigns each piece an offset in its file and a hash, as saving does."""

    def __init__(self, rank: int, contents: Contents | None = None, *, path: str = "") -> None:
        self.rank = rank
        self._held = (contents if contents is not None else {}).setdefault(rank, {})
        self._path = path or f"rank-{rank:05d}.safetensors"
        self._offset = 4096
        self._slices: dict[str, list[m.Slice]] = {}
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._sharded: list[str] = []

    def whole(self, name: str, array: np.ndarray[Any, Any], **changes: Any) -> Writer:
        return self._add(name, array, array.shape, (0,) * array.ndim, **changes)

    def slice(self, name: str, array: np.ndarray[Any, Any], shape: Any, start: Any, **changes: Any) -> Writer:
        if name not in self._sharded:
            self._sharded.append(name)
        return self._add(name, array, shape, start, **changes)

    def _add(self, name: str, array: np.ndarray[Any, Any], shape: Any, start: Any, **changes: Any) -> Writer:
        data = array.tobytes()
        self._held[self._offset] = data
        hashes = (xxh3_128_hexdigest(data),) if data else ()
        fields = {"file": 0, "offset": self._offset, "start": tuple(start), "shape": array.shape, "hashes": hashes}
        self._slices.setdefault(name, []).append(m.Slice(**(fields | changes)))
        self._described[name] = ({"float32": "F32", "uint8": "U8"}[str(array.dtype)], tuple(shape))
        self._offset += len(data)
        return self

    def part(self, structure: Any = None, files: tuple[m.DataFile, ...] = (), **changes: Any) -> RankPart:
        own = m.DataFile(path=self._path, rank=self.rank, size_bytes=self._offset, header_bytes=4096, header_hash=HASH)
        tensors = tuple(
            m.TensorEntry(name=name, dtype=dtype, shape=shape, slices=tuple(self._slices[name]))
            for name, (dtype, shape) in self._described.items()
        )
        if structure is None:
            structure = refer(*self._described)
        fields: dict[str, Any] = {
            "checkpoint": ID,
            "rank": self.rank,
            "files": (own, *files),
            "tensors": tensors,
            "sharded": tuple(self._sharded),
            "structure": structure,
            "full_bytes": 100,
            "written_bytes": 10,
        }
        return RankPart(**(fields | changes))


def refer(*names: str, **values: Any) -> Any:
    tensors = [[name, {"tensor": name, "as": "numpy"}] for name in names]
    return {"dict": [*tensors, *([key, value] for key, value in values.items())]}


def read(manifest: m.Manifest, contents: Contents, name: str) -> np.ndarray[Any, Any]:
    """Assemble a tensor from the slices of the manifest."""
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    out = np.full(tensor.shape, 255, {"F32": "float32", "U8": "uint8"}[tensor.dtype])
    for part in tensor.slices:
        data = contents[manifest.files[part.file].rank][part.offset]
        region = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
        out[region] = np.frombuffer(data, out.dtype).reshape(part.shape)
    return out


def floats(*shape: int, start: float = 0.0) -> np.ndarray[Any, Any]:
    return (np.arange(math.prod(shape), dtype=np.float32) + start).reshape(shape)


# -- slices --------------------------------------------------------------------------------------------------------


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], int, int]:
    """(shape, cuts along each dimension, number of ranks, seed)"""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
    cuts = [sorted({0, *draw(st.lists(st.integers(0, size - 1), max_size=3)), size}) for size in shape]
    return shape, cuts, draw(st.integers(1, 5)), draw(st.integers(0, 1 << 30))


def cells(shape: tuple[int, ...], cuts: list[list[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    runs = [list(itertools.pairwise(along)) for along in cuts]
    chosen = itertools.product(*runs)
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in chosen]


@given(cut_tensors())
def test_any_tensor_sharded_as_a_grid_is_merged_into_one(
    cut: tuple[tuple[int, ...], list[list[int]], int, int],
) -> None:
    shape, cuts, num_ranks, seed = cut
    tensor, contents = floats(*shape), Contents()
    writers = [Writer(rank, contents) for rank in range(num_ranks)]
    rng = random.Random(seed)
    for start, size in cells(shape, cuts):
        region = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        for writer in rng.sample(writers, rng.randint(1, min(2, num_ranks))):  # some slices have copies
            writer.slice("w", tensor[region], shape, start)
    merged = merge([writer.part(refer("w")) for writer in rng.sample(writers, num_ranks)], head=HEAD)

    m.check(merged, file="merged")
    assert np.array_equal(read(merged, contents, "w"), tensor)
    assert (merged.structures, merged.structure_of_rank) == ((refer("w"),), (0,) * num_ranks)
    assert len(merged.tensors[0].slices) == len(cells(shape, cuts))


@given(cut_tensors(), st.data())
def test_a_tensor_of_which_one_slice_is_missing_is_never_committed(
    cut: tuple[tuple[int, ...], list[list[int]], int, int], data: st.DataObject
) -> None:
    shape, cuts, num_ranks, seed = cut
    found = cells(shape, cuts)
    lost = data.draw(st.sampled_from(found))
    writers = [Writer(rank) for rank in range(num_ranks)]
    rng = random.Random(seed)
    for start, size in found:
        if (start, size) != lost:
            rng.choice(writers).slice("w", floats(*size), shape, start)
    with pytest.raises(CheckpointInvalid, match="'w'"):
        merge([writer.part(refer("w")) for writer in writers], head=HEAD)


boxes = st.tuples(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(0, 3), st.integers(0, 3)))


@given(st.lists(boxes, max_size=8))
def test_an_overlap_is_found_exactly_if_two_boxes_share_an_element(rectangles: list[Any]) -> None:
    def elements(box: Any) -> set[tuple[int, int]]:
        (y, x), (height, width) = box
        return set(itertools.product(range(y, y + height), range(x, x + width)))

    pairs = itertools.combinations(range(len(rectangles)), 2)
    overlapping = {(i, j) for i, j in pairs if elements(rectangles[i]) & elements(rectangles[j])}
    found = first_overlap(rectangles)
    assert (found in overlapping) if overlapping else (found is None)


@given(st.lists(boxes.filter(lambda box: all(box[1])), min_size=1, max_size=6))
def test_a_grid_covers_its_tensor_without_overlap(rectangles: list[Any]) -> None:
    shape = tuple(max(start[d] + size[d] for start, size in rectangles) for d in range(2))
    if is_grid(shape, rectangles):
        assert first_overlap(rectangles) is None
        assert sum(math.prod(size) for _, size in rectangles) == math.prod(shape)


def test_slices_that_do_not_form_a_grid_are_merged_too() -> None:
    """Five boxes in a pinwheel."""
    tensor, contents = floats(3, 3), Contents()
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    ranks = []
    for rank, (start, size) in enumerate(wheel):
        piece = tensor[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
        ranks.append(Writer(rank, contents).slice("w", piece, (3, 3), start).part())
    merged = merge(ranks, head=HEAD)
    m.check(merged, file="merged")
    assert np.array_equal(read(merged, contents, "w"), tensor)


def test_an_overlap_names_the_tensor_and_both_ranks() -> None:
    one = Writer(0).slice("w", floats(3), (4,), (0,)).part()
    other = Writer(1).slice("w", floats(2), (4,), (2,)).part()
    with pytest.raises(CheckpointInvalid, match=r"'w' \(4,\).*rank 0 overlaps .* of rank 1"):
        merge([one, other], head=HEAD)


def test_a_gap_names_the_ranks_and_how_many_elements_they_hold() -> None:
    one = Writer(0).slice("w", floats(1), (4,), (0,)).part()
    other = Writer(1).slice("w", floats(2), (4,), (2,)).part()
    with pytest.raises(CheckpointInvalid, match="ranks 0, 1 hold 3 of its 4 elements"):
        merge([one, other], head=HEAD)


@pytest.mark.parametrize(
    ("array", "shape"), [(np.zeros(2, np.uint8), (4,)), (floats(2), (6,)), (floats(2, 1), (4, 1))], ids=str
)
def test_ranks_with_different_tensors_under_one_name_are_rejected(
    array: np.ndarray[Any, Any], shape: tuple[int, ...]
) -> None:
    one = Writer(0).slice("w", floats(2), (4,), (0,)).part()
    other = Writer(1).slice("w", array, shape, (2,) + (0,) * (len(shape) - 1)).part()
    with pytest.raises(CheckpointInvalid, match=r"'w' is F32 \(4,\) on rank 0, but .* on rank 1"):
        merge([one, other], head=HEAD)


def test_copies_of_a_slice_that_differ_are_rejected() -> None:
    ranks = [Writer(rank).slice("w", floats(2, start=rank), (2,), (0,)).part() for rank in range(2)]
    with pytest.raises(CheckpointInvalid, match=r"'w': ranks 0 and 1 both hold .* different contents"):
        merge(ranks, head=HEAD)


def test_a_tensor_that_is_whole_on_one_rank_and_sharded_on_another_is_rejected() -> None:
    ranks = [Writer(0).whole("w", floats(2)).part(), Writer(1).slice("w", floats(1), (2,), (0,)).part()]
    with pytest.raises(CheckpointInvalid, match="'w' is whole on rank 0 and sharded on rank 1"):
        merge(ranks, head=HEAD)


def test_empty_slices_are_dropped_and_empty_tensors_are_kept() -> None:
    contents = Contents()
    ranks = [
        Writer(0, contents).slice("w", floats(2), (2,), (0,)).slice("none", floats(0, 3), (0, 3), (0, 0)).part(),
        Writer(1, contents).slice("w", floats(0), (2,), (2,)).slice("none", floats(0, 1), (0, 3), (0, 1)).part(),
    ]
    merged = merge(ranks, head=HEAD)
    m.check(merged, file="merged")
    assert {tensor.name: len(tensor.slices) for tensor in merged.tensors} == {"w": 1, "none": 1}


# -- whole tensors and structures ----------------------------------------------------------------------------------


def test_a_single_part_is_taken_over_unchanged() -> None:
    part = Writer(0).whole("b", floats(2)).whole("a", floats(3)).part()
    merged = merge([part], head=HEAD)
    assert (merged.files, merged.tensors, merged.structures) == (part.files, part.tensors, (part.structure,))
    assert (merged.step, merged.epoch, merged.metadata, merged.data_cursor) == (5, 2, {"loss": 0.5}, "here")
    assert (merged.num_ranks, merged.full_bytes, merged.written_bytes) == (1, 100, 10)
    assert merged.model_hash == m.model_hash(part.tensors)


def test_equal_tensors_are_entered_once_and_different_ones_are_renamed_by_rank() -> None:
    contents = Contents()
    seeds = [7.0, 8.0, 7.0, 8.0]
    ranks = [
        Writer(rank, contents).whole("w", floats(4)).whole("rng", floats(1, start=seed)).part()
        for rank, seed in enumerate(seeds)
    ]
    merged = merge(ranks, head=HEAD)
    m.check(merged, file="merged")

    assert [tensor.name for tensor in merged.tensors] == ["w", "rng", "rng@1"]
    assert merged.structure_of_rank == (0, 1, 0, 1)
    for rank, seed in enumerate(seeds):
        named = tree.unflatten(merged.structures[merged.structure_of_rank[rank]], lambda name, _: name)
        assert read(merged, contents, named["rng"]).tolist() == [seed]
        assert named["w"] == "w"
    assert (merged.full_bytes, merged.written_bytes) == (400, 40)


def test_whole_tensors_of_one_name_and_different_shapes_are_two_tensors() -> None:
    merged = merge([Writer(0).whole("w", floats(2)).part(), Writer(1).whole("w", floats(3)).part()], head=HEAD)
    assert {tensor.name: tensor.shape for tensor in merged.tensors} == {"w": (2,), "w@1": (3,)}


def test_a_generated_name_never_hides_an_existing_one() -> None:
    ranks = [
        Writer(0).whole("w", floats(1)).whole("w@1", floats(1, start=5)).part(),
        Writer(1).whole("w", floats(1, start=3)).whole("w@1", floats(1, start=5)).part(),
    ]
    merged = merge(ranks, head=HEAD)
    m.check(merged, file="merged")
    assert [tensor.name for tensor in merged.tensors] == ["w", "w@1", "w@1#2"]
    assert tree.names_in(merged.structures[1]) == ["w@1#2", "w@1"]


def test_structures_that_differ_in_a_plain_value_are_kept_apart() -> None:
    ranks = [Writer(rank).whole("w", floats(1)).part(refer("w", rank=rank % 2)) for rank in range(3)]
    merged = merge(ranks, head=HEAD)
    assert (len(merged.structures), merged.structure_of_rank) == (2, (0, 1, 0))


def test_a_replicated_tensor_is_in_every_structure() -> None:
    merged = merge([Writer(0).part(refer("w")), Writer(1).whole("w", floats(2)).part()], head=HEAD)
    assert merged.structure_of_rank == (0, 0)
    assert merged.files[merged.tensors[0].slices[0].file].rank == 1


def test_a_tensor_that_no_rank_wrote_is_rejected_with_its_rank() -> None:
    with pytest.raises(CheckpointInvalid, match=r"rank 1 has tensor 'lost' and 1 more, which no rank has written"):
        merge([Writer(0).whole("w", floats(1)).part(), Writer(1).part(refer("w", "lost", "gone"))], head=HEAD)


# -- files and types -----------------------------------------------------------------------------------------------

BASE = m.DataFile(path="step-1/rank-00000.safetensors", rank=0, size_bytes=8192, header_bytes=4096, header_hash=HASH)
INCREMENTAL = msgspec.structs.replace(HEAD, type=m.CheckpointType.INCREMENTAL, parent="step-1")


def test_a_base_that_several_ranks_refer_to_is_entered_once() -> None:
    patch = m.Patch(
        file=0,
        unit_bytes=4,
        num_units=1,
        num_bytes=4,
        index_bytes=4,
        index_offset=4096,
        index_hashes=(HASH,),
        offset=4100,
        hashes=(HASH,),
    )
    ranks = [
        Writer(rank)
        .slice("w", floats(2), (4,), (2 * rank,), file=1, offset=4096 + 8 * rank, patches=(patch,))
        .part(files=(BASE, msgspec.structs.replace(BASE, path="step-1/unused.safetensors")))
        for rank in range(2)
    ]
    merged = merge(ranks, head=INCREMENTAL)
    m.check(merged, file="merged")
    paths = ["rank-00000.safetensors", BASE.path, "rank-00001.safetensors"]
    assert [file.path for file in merged.files] == paths
    assert [(s.file, s.patches[0].file) for s in merged.tensors[0].slices] == [(1, 0), (1, 2)]
    assert (merged.type, merged.parent, merged.bases) == (m.CheckpointType.INCREMENTAL, "step-1", ("step-1",))


def test_a_base_that_ranks_describe_differently_is_rejected() -> None:
    ranks = [
        Writer(rank)
        .slice("w", floats(2), (4,), (2 * rank,), file=1)
        .part(files=(msgspec.structs.replace(BASE, size_bytes=8192 + rank),))
        for rank in range(2)
    ]
    with pytest.raises(CheckpointInvalid, match=r"ranks 0 and 1 .*step-1/rank-00000"):
        merge(ranks, head=INCREMENTAL)


def test_two_ranks_that_list_one_file_are_rejected() -> None:
    ranks = [Writer(rank, path="mine.safetensors").part(refer()) for rank in range(2)]
    with pytest.raises(CheckpointInvalid, match=r"ranks 0 and 1 both list a file mine\.safetensors"):
        merge(ranks, head=HEAD)


def test_an_incremental_checkpoint_that_needs_no_base_becomes_full_with_a_reason() -> None:
    merged = merge([Writer(0).whole("w", floats(1)).part()], head=INCREMENTAL)
    assert (merged.type, merged.parent) == (m.CheckpointType.FULL, "")
    assert "needs no base" in merged.why
    explained = merge([Writer(0).part()], head=msgspec.structs.replace(INCREMENTAL, why="the structure has changed"))
    assert explained.why == "the structure has changed"


def test_a_full_rank_among_incremental_ones_makes_an_incremental_checkpoint() -> None:
    full = Writer(0).slice("w", floats(2), (4,), (0,)).part()
    delta = Writer(1).slice("w", floats(2), (4,), (2,), file=1).part(files=(BASE,))
    merged = merge([full, delta], head=msgspec.structs.replace(HEAD, why="no base"))
    m.check(merged, file="merged")
    assert (merged.type, merged.parent) == (m.CheckpointType.INCREMENTAL, "step-1")
    assert "no base" in merged.why


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "ranks none"),
        ([Writer(1).part()], "ranks 1, expected one part of each rank from 0 on"),
        ([Writer(0).part(), Writer(0).part()], "expected one part of each rank from 0 on"),
        ([Writer(0).part(), Writer(2).part()], "ranks 0, 2"),
        ([Writer(0).part(checkpoint="other")], "belongs to checkpoint other"),
        ([Writer(0).part(), Writer(1).part(chunk_bytes=5)], "rank 1 hashes chunks of 5 bytes"),
    ],
)
def test_parts_of_different_checkpoints_are_rejected(ranks: list[RankPart], message: str) -> None:
    with pytest.raises(CheckpointInvalid, match=message):
        merge(ranks, head=HEAD)


def test_the_head_travels_as_plain_data() -> None:
    assert msgspec.json.decode(msgspec.json.encode(INCREMENTAL), type=Head) == INCREMENTAL


def test_two_hundred_tensors_of_two_hundred_ranks_are_merged_with_few_calls_each() -> None:
    num_ranks = 200
    structure = refer("rng", *(f"w{t}" for t in range(200)))
    whole = [
        m.TensorEntry(
            name=f"w{t}",
            dtype="F32",
            shape=(1, 1),
            slices=(m.Slice(file=0, offset=4097, start=(0, 0), shape=(1, 1), hashes=(HASH,)),),
        )
        for t in range(100)
    ]

    def a_rank(rank: int) -> RankPart:
        own = m.Slice(file=0, offset=4097, start=(rank, 0), shape=(1, 1), hashes=(HASH,))
        cut = [m.TensorEntry(name=f"w{t}", dtype="F32", shape=(num_ranks, 1), slices=(own,)) for t in range(100, 200)]
        part = Writer(rank).whole("rng", np.array([rank % 7], np.uint8)).part(structure)
        sharded = tuple(tensor.name for tensor in cut)
        return msgspec.structs.replace(part, tensors=(*part.tensors, *whole, *cut), sharded=sharded)

    ranks = [a_rank(rank) for rank in range(num_ranks)]
    done: list[m.Manifest] = []
    assert num_calls(lambda: done.append(merge(ranks, head=HEAD))) < 20 * 200 * num_ranks
    (merged,) = done
    assert (len(merged.tensors), len(merged.structures)) == (207, 7)
    assert sum(len(tensor.slices) for tensor in merged.tensors) == 100 * num_ranks + 107


# -- a part as an object -------------------------------------------------------------------------------------------


def a_part(**changes: Any) -> RankPart:
    writer = Writer(3).whole("w", floats(2)).slice("s", floats(2), (8,), (2,)).slice("s", floats(1), (8,), (6,))
    return writer.part(**changes)


def test_a_part_survives_encoding_and_decoding() -> None:
    assert parts.part_name(3) == "part-00003.json"
    assert parts.decode(parts.encode(a_part()), file="x") == a_part()


def with_tensor(**changes: Any) -> dict[str, Any]:
    whole, sharded = a_part().tensors
    return {"tensors": (whole, msgspec.structs.replace(sharded, **changes))}


def with_slice(**changes: Any) -> dict[str, Any]:
    return with_tensor(slices=(msgspec.structs.replace(a_part().tensors[1].slices[0], **changes),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "rank -1"),
        ({"rank": 10**6}, "rank 3 or 1000000"),
        ({"rank": 4}, r"rank-00003\.safetensors belongs to rank 3, expected rank 4"),
        ({"checkpoint": "../x"}, "valid name"),
        ({"sharded": ("s", "lost")}, "'lost' is listed as sharded"),
        ({"sharded": ()}, "'s' is not covered exactly once by its slices"),
        ({"structure": {"pickle": "x"}}, "unknown tag 'pickle'"),
        ({"tensors": (a_part().tensors[0],) * 2, "sharded": ()}, "'w' occurs twice"),
        ({"written_bytes": -1}, "negative"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"files": ()}, "refers to file 0"),
        ({"files": (msgspec.structs.replace(BASE, path="../x"),)}, "leads out"),
        (with_tensor(dtype="code"), "unknown dtype 'code'"),
        (with_tensor(shape=(4,)), "'s' has a slice outside"),
        (with_slice(start=(-1,)), "'s' has a slice outside"),
        (with_slice(start=(2, 0)), "'s' has a slice outside"),
        (with_slice(offset=1 << 40), "'s' has 8 bytes at"),
        (with_slice(hashes=()), "'s' has 0 hashes"),
        (with_slice(hashes=("x" * 32,)), "'s' has 1 hashes"),
        (with_slice(file=7), "'s' refers to file 7"),
    ],
    ids=str,
)
def test_an_impossible_part_is_neither_written_nor_read(changes: dict[str, Any], message: str) -> None:
    part = msgspec.structs.replace(a_part(), **changes)
    with pytest.raises(CheckpointInvalid, match=message):
        parts.encode(part)
    body = msgspec.json.encode(part)
    data = b'{"strata_part":1,"hash":"%s","part":%s}' % (xxh3_128_hexdigest(body).encode(), body)
    with pytest.raises(CheckpointInvalid, match=r"the/file\.json: ") as caught:
        parts.decode(data, file="the/file.json")
    assert not isinstance(caught.value, CheckpointCorrupt)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", CheckpointInvalid),
        (b"{}", CheckpointInvalid),
        (b"\xff" * 10, CheckpointInvalid),
        (b'{"strata_part":2}', CheckpointTooNew),
        (b'{"strata_part":0}', CheckpointInvalid),
        (b'{"strata_part":1,"hash":"x","part":{}}', CheckpointCorrupt),
        (b'{"strata_part":1,"hash":"x","part":' + b"[" * 100_000, CheckpointInvalid),
        (parts.encode(a_part())[:-10], CheckpointInvalid),
        (m.encode(merge([Writer(0).part()], head=HEAD)), CheckpointInvalid),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, bytes) else "",
)
def test_a_malformed_part_is_rejected_with_its_file_name(data: bytes, kind: type[CheckpointInvalid]) -> None:
    with pytest.raises(kind, match=r"the/file\.json"):
        parts.decode(data, file="the/file.json")


encoded = parts.encode(a_part())


@settings(max_examples=300)
@given(st.integers(0, len(encoded) - 1), st.integers(1, 255))
def test_every_changed_byte_of_a_part_is_noticed(at: int, flip: int) -> None:
    changed = bytearray(encoded)
    changed[at] ^= flip
    with contextlib.suppress(CheckpointInvalid):
        assert parts.decode(bytes(changed), file="x") == a_part()  # such as a space between two values
