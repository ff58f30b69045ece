"""Export a checkpoint as one file for other tools: safetensors, or a file for `torch.load`.

The file gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import os
import uuid
from typing import TYPE_CHECKING

from strata.checkpoint.format import layout, tree
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.tree import Leaf
from strata.checkpoint.load import fetch, integrity, reader
from strata.checkpoint.load.fetch import Source
from strata.checkpoint.load.state import rebuild
from strata.errors import ConfigError, InvalidArgument, StorageError
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from strata.checkpoint.format.layout import Place
    from strata.checkpoint.format.manifest import Manifest
    from strata.checkpoint.format.tree import Node
    from strata.storage import Store

SUFFIXES = (".safetensors", ".pt", ".pth")
_READ_BYTES = 64 << 20
"""Small tensors are read together up to this size."""


def export(
    store: Store,
    manifest: Manifest,
    output: Path,
    *,
    only: Iterable[str] = (),
    strip_prefix: str = "",
    force: bool = False,
    watch: Watch | None = None,
) -> int:
    """Write the tensors whose names match one of the patterns, or all tensors; return their number.

    A safetensors file takes the memory of the largest tensor, a torch file that of all tensors.

    Args:
        strip_prefix: Skip tensors whose names do not begin with it, and remove it from the names of the others. A torch
            file is then a flat dict of tensors by name, as `Module.load_state_dict` expects.

    Raises:
        InvalidArgument: No tensor matches, the file exists, or its suffix is unknown.
        ConfigError: A torch file needs torch, which is not installed.
        CheckpointInvalid: The checkpoint cannot be trusted.
        StorageError: The file cannot be written.
    """
    if output.suffix not in SUFFIXES:
        raise InvalidArgument(f"{output.name!r} has an unknown suffix; use {', '.join(SUFFIXES)}", field="output")
    if output.exists() and not force:
        raise InvalidArgument(f"{str(output)!r} already exists; choose another name, or use --force", field="output")
    watch = watch or Watch()
    structure, names = _selected(store, manifest, only=only, strip_prefix=strip_prefix, watch=watch)
    if output.suffix == ".safetensors":
        with _complete_file(output) as file:
            _write_safetensors(store, manifest, names, file, watch)
    else:
        if importlib.util.find_spec("torch") is None:
            raise ConfigError("a .pt file needs torch; pip install 'strata-runtime[torch]', or write .safetensors")
        with _complete_file(output) as file:
            _write_torch(store, manifest, structure, file, watch)
    return len(names)


def stream(
    store: Store, manifest: Manifest, *, only: Iterable[str] = (), strip_prefix: str = "", watch: Watch | None = None
) -> tuple[int, Iterator[bytes | memoryview]]:
    """Return the size and the contents of the safetensors file that `export` would write, a tensor at a time.

    Raises:
        InvalidArgument: No tensor matches.
        CheckpointInvalid: The checkpoint cannot be trusted; if the data cannot, the iterator raises it.
    """
    watch = watch or Watch()
    _, names = _selected(store, manifest, only=only, strip_prefix=strip_prefix, watch=watch)
    return _safetensors(store, manifest, names, watch)


def _selected(
    store: Store, manifest: Manifest, *, only: Iterable[str], strip_prefix: str, watch: Watch
) -> tuple[Node, dict[str, str]]:
    """Return the structure and the names of the selected tensors, and check the headers of their files."""
    patterns = list(only)
    integrity.check_manifest(manifest, manifest.structures)
    structure = manifest.structures[manifest.structure_of_rank[0]]
    names = {t.name: t.name for t in manifest.tensors if not patterns or _matches(t.name, patterns)}
    if patterns and not names:
        raise InvalidArgument(f"checkpoint {manifest.id} has no tensor that matches {patterns}", field="only")
    if strip_prefix:
        structure = _flat(structure, names, strip_prefix)
        stripped = {name: name.removeprefix(strip_prefix) for name in names if name.startswith(strip_prefix)}
        if not stripped or not all(stripped.values()):
            some = ", ".join(list(names)[:5])
            raise InvalidArgument(
                f"no tensor has a name below the prefix {strip_prefix!r}; the names are {some}", field="strip_prefix"
            )
        names = stripped
    elif patterns:
        structure = tree.select(structure, lambda name: _matches(name, patterns))
    chosen = set(names)
    files = fetch.files_of(tensor for tensor in manifest.tensors if tensor.name in chosen)
    integrity.check_headers(Source(store, manifest, watch.without_progress()), manifest, files)
    return structure, names


def _flat(structure: Node, names: Container[str], prefix: str) -> Node:
    """Return the tensors below a prefix by their paths; a tied tensor appears under each of its paths."""
    pairs = [(".".join(path), node) for path, node in tree.leaves_in(structure)]
    return {
        "dict": [
            [path.removeprefix(prefix), node]
            for path, node in pairs
            if node["tensor"] in names and path.startswith(prefix)
        ]
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _write_safetensors(
    store: Store, manifest: Manifest, names: Mapping[str, str], file: BinaryIO, watch: Watch
) -> None:
    """Write tensors; `names` maps names in the checkpoint to names in the file."""
    file.writelines(_safetensors(store, manifest, names, watch)[1])


def _safetensors(
    store: Store, manifest: Manifest, names: Mapping[str, str], watch: Watch
) -> tuple[int, Iterator[bytes | memoryview]]:
    """Return the size of the file in bytes, and its contents, which are read while they are iterated over."""
    originals = {name: original for original, name in names.items()}
    leaves = [
        Leaf(
            name=names[t.name], dtype=BY_NAME[t.dtype], shape=t.shape, kind="bytes", source=None, num_bytes=t.num_bytes
        )
        for t in manifest.tensors
        if t.name in names
    ]
    plan = layout.plan(leaves, {"strata_checkpoint": manifest.id, "step": str(manifest.step)})

    def contents() -> Iterator[bytes | memoryview]:
        yield plan.header
        for group in _groups(plan.places):
            wanted = [originals[place.name] for place in group]
            tensors = reader.read_tensors(store, manifest, wanted, watch=watch)
            yield from (tensors[name].data for name in wanted)

    return plan.size_bytes, contents()


def _groups(places: Iterable[Place]) -> Iterator[list[Place]]:
    group: list[Place] = []
    for place in places:
        if group and place.end - group[0].offset > _READ_BYTES:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _write_torch(store: Store, manifest: Manifest, structure: Node, file: BinaryIO, watch: Watch) -> None:
    import torch  # noqa: PLC0415 - torch is optional

    tensors = reader.read_tensors(store, manifest, tree.names_in(structure), watch=watch)
    torch.save(rebuild(structure, manifest.tensors, tensors), file)


@contextlib.contextmanager
def _complete_file(output: Path) -> Iterator[BinaryIO]:
    temporary = output.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(output)
        finally:
            temporary.unlink(missing_ok=True)
    except StorageError:
        raise  # an error of the store, not of the file
    except OSError as error:
        raise StorageError(f"{str(output)!r} cannot be written: {error.strerror or error}") from error
