"""Plan a version of a Delta table: the survey and the plan are those of its active files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import xxhash

from strata.data.delta.table import find_version, scan
from strata.data.filter.filter import parse
from strata.data.plan import cache as survey_cache
from strata.data.plan import survey as surveys
from strata.data.plan.planner import build
from strata.data.plan.probe import SurveyProgress
from strata.data.plan.surveyor import survey
from strata.data.source.source import without_secrets
from strata.errors import NoData

if TYPE_CHECKING:
    from strata.data.config import PlanConfig
    from strata.data.delta import Shared, TableVersion
    from strata.data.delta.table import ScannedVersion
    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Format
    from strata.data.plan.plan import Plan
    from strata.data.source.source import Source


def plan(selected: TableVersion, config: PlanConfig, shared: Shared) -> tuple[Source, Plan, Format]:
    """Plan a version of a table; see `strata.data.delta.plan_table`."""
    uri, options = selected.table_uri, selected.storage_options
    condition = None if config.filters is None else parse(config.filters)

    def find() -> bytes:
        found = find_version(uri, version=selected.version, timestamp=selected.timestamp, options=options)
        return msgspec.json.encode(found)

    # All ranks read the version that rank 0 found, even if the table is written meanwhile.
    scanned = scan(uri, msgspec.json.decode(shared(find), type=int), condition=condition, options=options)
    if scanned.is_excluded and condition is not None and config.on_empty == "raise":
        raise NoData(
            f"{without_secrets(uri)}, version {scanned.version}: no row passes the filter {condition.text}, because "
            "the log excludes every file; check its values, or accept an empty loader with on_empty='empty'"
        )
    surveyed = surveys.from_bytes(shared(lambda: surveys.to_bytes(_survey(scanned, uri, condition, config))))
    made = build(
        surveyed,
        columns=config.columns,
        condition=condition,
        split_bytes=config.split_bytes,
        split_rows=config.split_rows,
        on_empty=config.on_empty,
    )
    pruning = replace(
        made.pruning,
        num_files=made.pruning.num_files + scanned.num_pruned,
        num_files_pruned=made.pruning.num_files_pruned + scanned.num_pruned,
    )
    identity = f"{scanned.table_id} {scanned.version} {made.fingerprint}"
    fingerprint = str(xxhash.xxh3_128_hexdigest(identity.encode()))
    return scanned.source, replace(made, fingerprint=fingerprint, pruning=pruning), scanned.format


def _survey(scanned: ScannedVersion, uri: str, condition: Condition | None, config: PlanConfig) -> surveys.Survey:
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
            roots=[scanned.table_id, uri, scanned.format.digest],
            progress=progress,
        )
