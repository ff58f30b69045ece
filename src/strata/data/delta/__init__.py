"""Delta Lake tables as plans, which the same runtime reads as those of files.

    table (log, version) → planner: the survey and the plan of files, through `DeltaFormat`

`DeltaFormat` presents a data file as the table sees it, so surveying, planning, caching and reading are those of files.
May import every folder of `data` but `runtime`. Only planning imports deltalake: decode processes do without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from strata.errors import ConfigError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping
    from typing import Any

    from strata.data.config import PlanConfig
    from strata.data.formats.base import Format
    from strata.data.plan.plan import Plan
    from strata.data.source.source import Source

Shared: TypeAlias = Callable[[Callable[[], bytes]], bytes]


@dataclass(frozen=True, slots=True)
class TableVersion:
    """The table and the version that a user requested."""

    table_uri: str
    version: int | None
    timestamp: dt.datetime | str | None
    storage_options: Mapping[str, Any]


def plan_table(selected: TableVersion, config: PlanConfig, shared: Shared) -> tuple[Source, Plan, Format]:
    """Plan a version of a table; on all ranks the version that rank 0 found, and from its survey.

    `shared` calls a function on rank 0, if ranks can communicate, and returns its result on all of them.

    Raises:
        InvalidArgument: The table or the version does not exist, or an argument is invalid.
        ConfigError: deltalake is not installed.
        SchemaMismatch: A column does not exist, or a file does not fit the table's schema.
        NoData: No rows are left.
        DataError, StorageError: The log or files cannot be read; the message names them.
    """
    try:
        planner = importlib.import_module("strata.data.delta.planner")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Delta tables need the package {error.name}; install it with: pip install 'strata-runtime[delta]'",
            field="table_uri",
        ) from error
    source, plan, format = planner.plan(selected, config, shared)
    return source, plan, format
