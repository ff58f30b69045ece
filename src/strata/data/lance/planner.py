"""Plan a version of a Lance dataset: the survey and the plan are those of its fragments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from strata.data.filter.filter import parse
from strata.data.lance.dataset import OpenedDataset, as_text, find_version, location_of
from strata.data.lance.format import LanceFormat
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.planner import build
from strata.data.plan.probe import SurveyProgress
from strata.data.plan.surveyor import survey
from strata.data.source.source import DataFile, without_secrets
from strata.errors import NoData

if TYPE_CHECKING:
    from strata.data.config import PlanConfig
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Format
    from strata.data.lance import DatasetVersion, Shared
    from strata.data.lance.dataset import Fragment
    from strata.data.plan.plan import Plan
    from strata.data.source.source import Source

_NEVER_CHANGES_NS = 1
"""The modification time of remote fragments: their files are never written again, and 0 stands for unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class _Scanned:
    """The fragments of one version of a dataset."""

    source: Source
    files: tuple[DataFile, ...]
    format: LanceFormat


def plan(selected: DatasetVersion, config: PlanConfig, shared: Shared) -> tuple[Source, Plan, Format]:
    """Plan a version of a dataset; see `strata.data.lance.plan_dataset`."""
    source, root, location = location_of(selected.uri, selected.storage_options)
    options = as_text(selected.storage_options)
    condition = None if config.filters is None else parse(config.filters)

    def find() -> bytes:
        return msgspec.json.encode(find_version(location, version=selected.version, tag=selected.tag, options=options))

    # All ranks read the version that rank 0 found, even if the dataset is written meanwhile.
    version = msgspec.json.decode(shared(find), type=int)
    scanned = _scan(OpenedDataset(location, version, options), source, root)
    surveyed = surveys.from_bytes(shared(lambda: surveys.to_bytes(_survey(scanned, selected.uri, condition, config))))
    made = build(
        surveyed,
        columns=config.columns,
        condition=condition,
        split_bytes=config.split_bytes,
        split_rows=config.split_rows,
        on_empty=config.on_empty,
    )
    # The names of files are unique, so that the digest also identifies the dataset.
    identity = f"{scanned.format.digest} {version} {made.fingerprint}"
    fingerprint = str(xxhash.xxh3_128_hexdigest(identity.encode()))
    return source, replace(made, fingerprint=fingerprint), scanned.format


def _scan(dataset: OpenedDataset, source: Source, root: str) -> _Scanned:
    """
    Raises:
        NoData: The version has no fragments.
        DataFileInvalid: A fragment has a file outside the dataset.
        InvalidArgument, StorageError: The version cannot be opened.
    """
    found = dataset.fragments()
    if not found:
        raise NoData(f"{without_secrets(dataset.uri)}, version {dataset.version}, has no rows; write rows to it first")
    width = len(str(len(found) - 1))
    fragments: dict[str, Fragment] = {}
    files = []
    for number, fragment in enumerate(found):
        path = f"{root}/{fragment.files[0].name}"
        fragments[path] = fragment
        size, modified_ns = _status(source, path, fragment)
        # The number comes first: the planner sorts by name, and ids need not ascend.
        files.append(DataFile(path, f"fragment {number:0{width}} (id {fragment.id})", size, modified_ns))
    return _Scanned(source, tuple(files), LanceFormat(dataset, root, fragments))


def _status(source: Source, path: str, fragment: Fragment) -> tuple[int, int]:
    """Return the size and the modification time. For local files, the node cache compares them with the file."""
    if not source.is_local:
        return fragment.files[0].num_bytes or 0, _NEVER_CHANGES_NS
    try:
        status = Path(path).stat()
    except OSError:  # measuring the fragment reports the reason
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _survey(scanned: _Scanned, uri: str, condition: Condition | None, config: PlanConfig) -> surveys.Survey:
    with SurveyProgress(is_shown=config.show_progress) as progress:
        return survey(
            scanned.source,
            scanned.files,
            scanned.format,
            columns=config.columns,
            condition=condition,
            split_bytes=config.split_bytes,
            on_error=config.on_error,
            keeps_one=config.on_empty == "empty",
            cache=survey_cache.default() if config.cache else None,
            roots=[uri, scanned.format.digest],
            progress=progress,
        )
