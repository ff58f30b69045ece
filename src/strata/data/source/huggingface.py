"""Directories that `save_to_disk` of Hugging Face's `datasets` wrote.

Such a directory holds Arrow streams, and `state.json`, which names them. Only these are read: `datasets` also keeps the
results of transforms there, as `cache-….arrow`. A `DatasetDict` is a directory of such directories, one per split.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strata.data.source.source import DataFile
from strata.errors import DataFileInvalid, DataFileMissing, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.data.source.listing import ListedFile, Search
    from strata.data.source.source import Source

NAME = "huggingface"
"""The `format=` that accepts only such directories."""
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
MAX_STATE_BYTES = 64 << 20


def saved_files(source: Source, searches: Sequence[Search], *, is_required: bool) -> list[Search]:
    """Return the searches with only the Arrow files of saved datasets, if all of them are of such directories.

    Args:
        is_required: Whether other paths are an error; otherwise they are returned unchanged.

    Raises:
        InvalidArgument: A path contains several splits, or is not a saved dataset although it must be.
        DataFileInvalid: A `state.json` is damaged, or names files outside its directory.
        DataFileMissing: A file that `state.json` names does not exist.
    """
    for search in searches:
        if _find(search, SPLITS) is not None:
            raise InvalidArgument(_several_splits(source, search), field="path")
    others = [search for search in searches if _find(search, STATE) is None or _find(search, INFO) is None]
    if not others:
        return [_saved(source, search) for search in searches]
    if is_required:
        raise InvalidArgument(
            f"{others[0].written} is not a directory that save_to_disk of datasets wrote: it lacks {STATE} or {INFO}; "
            "pass format='arrow' to read all Arrow files of a directory",
            field="path",
        )
    return list(searches)


def _saved(source: Source, search: Search) -> Search:
    state = _read_object(source, search, STATE)
    entries = state.get("_data_files")
    entries = entries if isinstance(entries, list) else []
    named = [each.get("filename") for each in entries if isinstance(each, dict)]
    names = [name for name in named if isinstance(name, str)]
    if not names or len(names) != len(entries):
        raise DataFileInvalid(
            f"{search.written}/{STATE} does not list the files of the dataset (_data_files); save the dataset again "
            "with save_to_disk",
            path=f"{search.base}/{STATE}",
        )
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataFileInvalid(
            f"{search.written} has an indices mapping, which selects and reorders its rows; save it again with a "
            "current version of datasets, which writes the selected rows: load_from_disk(…).save_to_disk(…)",
            path=f"{search.base}/{STATE}",
        )
    listed = {one.name: one for one in search.listed}
    for name in names:
        if "/" in name or "\\" in name:
            raise DataFileInvalid(
                f"{search.written}/{STATE} names {name!r}, which is not a file of this directory; save the dataset "
                "again with save_to_disk",
                path=f"{search.base}/{STATE}",
            )
        if name not in listed:
            raise DataFileMissing(
                f"{search.written} has no file {name}, which its {STATE} names; copy the directory completely"
            )
    return replace(search, listed=[listed[name] for name in dict.fromkeys(names)])


def _several_splits(source: Source, search: Search) -> str:
    splits = _read_object(source, search, SPLITS).get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    example = f"{search.written.rstrip('/')}/{names[0] if names else 'train'}"
    return (
        f"{search.written} is a DatasetDict with the splits {', '.join(names) or '(none)'}; pass the directory of one, "
        f"such as {example}"
    )


def _find(search: Search, name: str) -> ListedFile | None:
    return next((one for one in search.listed if one.name == name), None) if search.is_directory else None


def _read_object(source: Source, search: Search, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file.

    Raises:
        DataFileInvalid: It is not a JSON object.
    """
    file = _find(search, name)
    assert file is not None
    try:
        if file.size_bytes > MAX_STATE_BYTES:
            raise ValueError(f"it has {file.size_bytes} bytes, and the limit is {MAX_STATE_BYTES}")  # noqa: TRY301
        data = source.read(DataFile(file.path, name, file.size_bytes, file.mtime_ns), 0, file.size_bytes)
        found = json.loads(data.to_pybytes())
        if not isinstance(found, dict):
            raise TypeError("it is not a JSON object")  # noqa: TRY301
    except (ValueError, TypeError, RecursionError) as error:
        raise DataFileInvalid(
            f"{search.written}/{name} is damaged ({error}); save the dataset again with save_to_disk", path=file.path
        ) from error
    return found
